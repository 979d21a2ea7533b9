"""Zeros put around the data of a convolution become padding of the convolution."""

from __future__ import annotations

import numpy as np

from msplit.engines.cuda.ir.graph import Key, Op, OpGraph
from msplit.engines.cuda.passes.pattern import Readers, channels_last, inserted_axis
from msplit.opset.traits import IMAGE_CONVOLUTIONS, PADS, RESHAPES

_RANK = 4


def fold_padding(graph: OpGraph) -> bool:
    """Lets each convolution that alone reads padded data pad it itself."""
    readers = Readers(graph)
    names: dict[Key, Key] = {}
    before = len(graph.ops)
    for pad in list(graph.ops.values()):
        if pad.op not in PADS:
            continue
        view, last = None, pad
        reader = readers.only((pad.node, 0))
        if reader is not None and reader.op in RESHAPES:
            view = last = reader
            reader = readers.only((view.node, 0))
        if reader is None or reader.op not in IMAGE_CONVOLUTIONS or reader.inputs[0] != (last.node, 0):
            continue
        axis = None if view is None else _added_axis(graph, pad, view, reader)
        pairs = None if view is not None and axis is None else _zeros_around(graph, pad, reader, axis)
        if pairs is None:
            continue
        reader.attrs = {**reader.attrs, "padding": "EXPLICIT", "explicit_paddings": pairs}
        reader.source_nodes = [*reader.source_nodes, *pad.source_nodes]
        if view is None or axis is None:
            names[pad.node, 0] = pad.inputs[0]
        else:
            narrow = graph.shapes[pad.inputs[0]]
            wide = (*narrow[:axis], 1, *narrow[axis:])
            view.op, view.attrs, view.inputs = "Reshape", {}, [pad.inputs[0], graph.sizes(wide)]
            graph.shapes[view.node, 0] = wide
        del graph.ops[pad.node]
    graph.rename(names)
    return len(graph.ops) < before


def _added_axis(graph: OpGraph, pad: Op, view: Op, convolution: Op) -> int | None:
    """The axis that a view adds to padded sequences for a convolution of images."""
    padded, wide = (graph.shapes.get((op.node, 0)) for op in (pad, view))
    kernel = graph.shape(convolution.inputs[1])
    if padded is None or wide is None or kernel is None or pad.inputs[0] not in graph.shapes:
        return None
    return inserted_axis(padded, wide, kernel) if channels_last(convolution) else None


def _zeros_around(graph: OpGraph, pad: Op, convolution: Op, axis: int | None) -> tuple[int, ...] | None:
    """The padding of both together, as `explicit_paddings` has it, or None where a convolution can not pad so.

    The axis is one that was added behind the padding.
    """
    paddings = graph.constants.get(pad.inputs[1])
    if paddings is None or paddings.shape != (_RANK - (axis is not None), 2) or (paddings < 0).any():
        return None
    if axis is not None:
        paddings = np.insert(paddings, axis, 0, axis=0)
    if pad.op == "PadV2":
        value = graph.constants.get(pad.inputs[2])
        if value is None or (value != 0).any():
            return None
    channel = _RANK - 1 if channels_last(convolution) else 1
    if paddings[[0, channel]].any():
        return None
    own = np.zeros(2 * _RANK, np.int64)
    mode = convolution.attrs.get("padding")
    if mode == "EXPLICIT":
        own = np.asarray(convolution.attrs.get("explicit_paddings"), np.int64)
    elif mode != "VALID":
        return None  # what SAME adds depends on the padded size
    return tuple(int(size) for size in paddings.reshape(-1) + own)
