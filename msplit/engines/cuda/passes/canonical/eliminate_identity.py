"""Ops that give their first input back: they vanish, and whatever reads them reads that input."""

from __future__ import annotations

import numpy as np

from msplit.engines.cuda.ir.graph import Key, Op, OpGraph
from msplit.opset.traits import ops_with, traits

_BY_SHAPE = ops_with("unchanged by shape")
_COMMUTATIVE = ops_with("commutative")


def eliminate_identity(graph: OpGraph) -> bool:
    """Removes identities, reshapes to the same shape, and arithmetic that changes nothing."""
    names: dict[Key, Key] = {}
    for number, op in list(graph.ops.items()):
        key = _hands_on(graph, op)
        if key is not None:
            names[number, 0] = key
            del graph.ops[number]
    graph.rename(names)
    return bool(names)


def _hands_on(graph: OpGraph, op: Op) -> Key | None:
    """The input that an op gives back; None for one that gives anything else."""
    if op.op == "Identity":
        return op.inputs[0]
    if op.out not in graph.shapes:
        return None
    for slot, key in enumerate(op.inputs[: 2 if op.op in _COMMUTATIVE else 1]):
        other = op.inputs[1 - slot] if len(op.inputs) > 1 else None
        if graph.shapes.get(key) == graph.shapes[op.out] and _changes_nothing(graph, op, other):
            return key
    return None


def _changes_nothing(graph: OpGraph, op: Op, other: Key | None) -> bool:
    """Checks if an op, whose result has the shape of one input, gives that one back, whatever it is. `other` is its second operand."""
    if op.op in _BY_SHAPE or (op.op == "ConcatV2" and len(op.inputs) == 2):
        return True
    value = None if other is None else graph.constants.get(other)
    if op.op == "Transpose":
        return value is not None and value.tolist() == list(range(value.size))
    neutral = traits(op.op).neutral
    return neutral is not None and value is not None and value.size > 0 and bool(np.all(value == neutral))
