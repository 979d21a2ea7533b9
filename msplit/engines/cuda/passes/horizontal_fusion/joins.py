"""Joins of branches: the members of a stack side by side are the stack itself, seen along another axis."""

from __future__ import annotations

import numpy as np

from msplit.engines.cuda.ir.graph import Key, Op
from msplit.engines.cuda.passes.horizontal_fusion.builder import Builder, StackSlot
from msplit.opset.traits import JOINS

_CHAIN_OF_ADDITIONS = 4


def join(builder: Builder, op: Op) -> bool:
    """Makes an op that reads several members of a stack read the stack. Whether it did."""
    if op.op == "Unpack":
        return _unpack(builder, op)
    data = op.inputs[:-1] if op.op == "ConcatV2" else op.inputs
    if op.op not in JOINS or len(data) < 2 or op.out not in builder.graph.shapes:
        return False
    ranges = builder.ranges(data)
    if len(ranges) != 1 or ranges[0].start < 0:
        return False
    rank = len(builder.graph.shapes[data[0]])
    stack = builder.range(ranges[0], op)
    if op.op == "AddN":
        if len(data) <= _CHAIN_OF_ADDITIONS:
            return False  # a chain of additions, which rounds in another order
        _place(builder, op, "Sum", [stack, builder.constant(np.asarray([0], np.int32))])
        return True
    if op.op == "Pack":
        axis = int(op.attrs.get("axis", 0)) % (rank + 1)
        how = _front_to(builder, axis, rank) if axis else _shape(builder, op)
        _place(builder, op, "Transpose" if axis else "Reshape", [stack, how])
        return True
    position = builder.graph.constants.get(op.inputs[-1])
    if position is None or not rank:
        return False
    axis = int(position) % rank
    if axis:
        shape = builder.graph.shapes[data[0]]
        moved = (*shape[:axis], len(data), *shape[axis:])
        stack = builder.helper(op, "Transpose", [stack, _front_to(builder, axis, rank)], moved)
    _place(builder, op, "Reshape", [stack, _shape(builder, op)])
    return True


def _unpack(builder: Builder, op: Op) -> bool:
    """The parts of a value along an axis are a stack already: the value with that axis in front."""
    key = op.inputs[0]
    shape = builder.graph.shapes.get(key)
    if not shape or builder.types.get(key) is None:
        return False
    axis = int(op.attrs.get("axis", 0)) % len(shape)
    stack = builder.plain(key, op)
    if axis:
        order = [axis, *(other for other in range(len(shape)) if other != axis)]
        inputs = [stack, builder.constant(np.asarray(order, np.int64))]
        stack = builder.helper(op, "Transpose", inputs, tuple(shape[place] for place in order))
    for port in range(shape[axis]):
        builder.places[op.node, port] = StackSlot(stack, port)
    return True


def _front_to(builder: Builder, axis: int, rank: int) -> Key:
    """The permutation that brings the first of `rank` + 1 axes to a position."""
    return builder.constant(np.asarray([*range(1, axis + 1), 0, *range(axis + 1, rank + 1)], np.int64))


def _shape(builder: Builder, op: Op) -> Key:
    return builder.constant(np.asarray(builder.graph.shapes[op.node, 0], np.int64))


def _place(builder: Builder, op: Op, name: str, inputs: list[Key]) -> None:
    """The op itself, as another one."""
    builder.ops[op.node] = Op(op.node, op.name, name, {"T": builder.types.get(inputs[0])}, inputs, op.source_nodes)
