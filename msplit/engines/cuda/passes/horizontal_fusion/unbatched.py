"""Ops that were not merged but read weights that were stacked: they read their part of the stack."""

from __future__ import annotations

import numpy as np

from msplit.engines.cuda.ir.graph import Key, Op, OpGraph
from msplit.engines.cuda.passes.horizontal_fusion.weights import SMALL_BYTES, Weights
from msplit.opset.traits import traits


def read_from_stacks(graph: OpGraph, weights: Weights) -> None:
    """Turns such products and lookups into merged ones with one member."""
    for op in graph.ops.values():
        slot = traits(op.op).weights
        if slot is None or op.inputs[slot] not in graph.constants:
            continue
        key = op.inputs[slot]
        place = weights.place(key)
        if place is None or graph.constants[key].nbytes <= SMALL_BYTES:
            continue
        if slot:
            _product(op, place, wide=weights.is_wide(place[0]))
        else:
            _lookup(graph, weights, op, key, place)


def _product(op: Op, place: tuple[Key, int], *, wide: bool) -> None:
    stack, start = place
    steps = tuple(str(step) for step in op.attrs.get("fused_ops", ()))
    layer = {"start": start, "count": 1, "transpose": int(bool(op.attrs.get("transpose_b"))), "wide": int(wide)}
    if steps:
        layer["bias"] = -1
    op.attrs = {
        **{name: op.attrs[name] for name in ("T", "leakyrelu_alpha") if name in op.attrs},
        "activation": "".join(steps[1:]),
        "count": 1,
        "layers": (layer,),
        "single": True,
    }
    op.op, op.inputs = "_GroupedMatMul", [op.inputs[0], stack, *op.inputs[2:]]


def _lookup(graph: OpGraph, weights: Weights, op: Op, key: Key, place: tuple[Key, int]) -> None:
    start = graph.constant(np.asarray([weights.first_row(key)], np.int64))
    size = graph.constant(np.asarray([len(graph.constants[key])], np.int64))
    op.attrs = {"T": op.attrs.get("Tparams", op.attrs.get("dtype")), "count": 1, "single": True}
    op.op, op.inputs = "_GroupedLookup", [place[0], op.inputs[1], start, size]
