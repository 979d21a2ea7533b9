"""Where branches meet: the members of a stack side by side are the stack itself, seen along another axis."""

from __future__ import annotations

import numpy as np

from msplit.engines.cuda.ir.graph import Key, Op
from msplit.engines.cuda.passes.horizontal_fusion.builder import Draft, Place

_CHAIN_OF_ADDITIONS = 4


def join(draft: Draft, op: Op) -> bool:
    """Makes an op that reads several members of a stack read the stack. Whether it did."""
    if op.op == "Unpack":
        return _unpack(draft, op)
    data = op.inputs[:-1] if op.op == "ConcatV2" else op.inputs
    if op.op not in ("Pack", "ConcatV2", "AddN") or len(data) < 2 or (op.node, 0) not in draft.graph.shapes:
        return False
    parts = draft.parts(data)
    if len(parts) != 1 or parts[0].start < 0:
        return False
    rank = len(draft.graph.shapes[data[0]])
    stack = draft.range(parts[0], op)
    if op.op == "AddN":
        if len(data) <= _CHAIN_OF_ADDITIONS:
            return False  # a chain of additions, which rounds in another order
        _place(draft, op, "Sum", [stack, draft.constant(np.asarray([0], np.int32))])
        return True
    if op.op == "Pack":
        axis = int(op.attrs.get("axis", 0)) % (rank + 1)
        if axis:
            _place(draft, op, "Transpose", [stack, _front_to(draft, axis, rank)])
        else:
            _place(draft, op, "Reshape", [stack, _shape(draft, op)])
        return True
    position = draft.graph.constants.get(op.inputs[-1])
    if position is None or not rank:
        return False
    axis = int(position) % rank
    if axis:
        shape = draft.graph.shapes[data[0]]
        moved = (*shape[:axis], len(data), *shape[axis:])
        inputs = [stack, _front_to(draft, axis, rank)]
        number = draft.emit(op, "Transpose", {"T": draft.types.get(stack)}, inputs, [moved], [op.source_nodes[0]])
        draft.types[number, 0] = draft.types[stack]
        stack = (number, 0)
    _place(draft, op, "Reshape", [stack, _shape(draft, op)])
    return True


def _unpack(draft: Draft, op: Op) -> bool:
    """The parts of a value along an axis are a stack already: the value with that axis in front."""
    key = op.inputs[0]
    shape = draft.graph.shapes.get(key)
    kind = draft.types.get(key)
    if shape is None or kind is None or not shape:
        return False
    axis = int(op.attrs.get("axis", 0)) % len(shape)
    stack = draft.plain(key, op)
    if axis:
        order = [axis, *(other for other in range(len(shape)) if other != axis)]
        moved = tuple(shape[place] for place in order)
        inputs = [stack, draft.constant(np.asarray(order, np.int64))]
        number = draft.emit(op, "Transpose", {"T": kind}, inputs, [moved], [op.source_nodes[0]])
        stack = (number, 0)
        draft.types[stack] = kind
    for port in range(shape[axis]):
        draft.places[op.node, port] = Place(stack, port)
    return True


def _front_to(draft: Draft, axis: int, rank: int) -> Key:
    """The permutation that brings the first of `rank` + 1 axes to a position."""
    return draft.constant(np.asarray([*range(1, axis + 1), 0, *range(axis + 1, rank + 1)], np.int64))


def _shape(draft: Draft, op: Op) -> Key:
    return draft.constant(np.asarray(draft.graph.shapes[op.node, 0], np.int64))


def _place(draft: Draft, op: Op, name: str, inputs: list[Key]) -> None:
    """The op itself, as another one."""
    draft.ops[op.node] = Op(op.node, op.name, name, {"T": draft.types.get(inputs[0])}, inputs, op.source_nodes)
