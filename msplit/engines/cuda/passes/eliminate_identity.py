"""Ops that give their first input back: they vanish, and whatever reads them reads that input."""

from __future__ import annotations

import numpy as np

from msplit.engines.cuda.ir.graph import Key, Op, OpGraph
from msplit.opset.traits import ops_with, traits

_BY_SHAPE = ops_with("unchanged by shape")


def eliminate_identity(graph: OpGraph) -> bool:
    """Removes identities, reshapes to the same shape, and arithmetic that changes nothing."""
    names: dict[Key, Key] = {}
    for number, op in list(graph.ops.items()):
        if _hands_on(graph, op):
            names[number, 0] = op.inputs[0]
            del graph.ops[number]
    graph.rename(names)
    return bool(names)


def _hands_on(graph: OpGraph, op: Op) -> bool:
    if op.op == "Identity":
        return True
    if not op.inputs or (op.node, 0) not in graph.shapes or op.inputs[0] not in graph.shapes:
        return False
    if graph.shapes[op.node, 0] != graph.shapes[op.inputs[0]]:
        return False
    if op.op in _BY_SHAPE or (op.op == "ConcatV2" and len(op.inputs) == 2):
        return True
    if op.op == "Transpose":
        order = graph.constants.get(op.inputs[1])
        return order is not None and order.tolist() == list(range(order.size))
    if (neutral := traits(op.op).neutral) is not None:
        value = graph.constants.get(op.inputs[1])
        return value is not None and value.size > 0 and bool(np.all(value == neutral))
    return False
