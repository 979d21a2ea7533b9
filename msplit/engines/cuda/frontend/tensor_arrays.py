"""Arrays and stacks of TensorFlow 1, in which loops and their gradients keep what their turns made, as lists.

An array is known by its flow, which every op that writes hands on changed. That of a gradient begins anew, with nothing written, at each op
of the forward pass that reads, and where flows are added so are the arrays: TensorFlow adds what is written to one place twice.

A stack is known by its handle: what a turn pushes, the turn of the gradient's loop that goes back over it pops, in the order of the graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from msplit.engines.cuda.frontend import list_values as lists
from msplit.engines.cuda.frontend.list_values import Lowered, Made, Result, Shape, TensorList, Values
from msplit.engines.cuda.ir.graph import Key, Op
from msplit.engines.cuda.ir.node import Unsupported


def _element_shape(op: Op) -> Shape:
    """The shape of an element that an array's attribute gives."""
    shape = op.attrs.get("element_shape")
    return shape if isinstance(shape, tuple) else None


def _array(values: Values, op: Op) -> list[Result]:
    """The handle stands for what was written last, whatever flow that is in: only shapes are asked of it."""
    count = lists.number(values, op, 0, "the length of the array")
    held = TensorList(lists.unset(count), str(op.attrs["dtype"]), _element_shape(op))
    return [held, held]


def _gradient(values: Values, op: Op) -> list[Result]:
    """The array of a gradient. TensorFlow makes one for all ops that ask for it by the same name."""
    of = values.list(op.inputs[0])
    name = of.gradient or op.inputs[0], str(op.attrs.get("source", ""))
    held = TensorList(lists.unset(len(of.elements)), of.dtype, of.shape, of, name)
    return [held, _held(values, held, op.inputs[1])]


def _held(values: Values, array: TensorList, flow: Key) -> TensorList:
    """Elements that are written in an array, by its flow: nothing in that of a gradient where the flow is not its own."""
    found = values.list(flow) if values.is_list(flow) or array.gradient is None else None
    if found is not None and found.gradient == array.gradient:
        return found
    return replace(array, elements=lists.unset(len(array.elements)))


def _read_by(values: Values, op: Op) -> TensorList:
    """Elements that are written in the array that an op reads: its handle is the first input, the flow the last one."""
    return _held(values, values.list(op.inputs[0]), op.inputs[-1])


def _written(values: Values, op: Op, places: Sequence[int], elements: Sequence[Key]) -> Made:
    """An array with some elements written; a gradient's array adds what is written twice."""
    held = lists.long_enough(_read_by(values, op), max(places, default=-1) + 1)  # one of a dynamic size grows
    for place, element in zip(places, elements, strict=True):
        before = held.elements[place] if 0 <= place < len(held.elements) else None
        if held.gradient is not None and before is not None:
            added = values.new("AddV2", op, {}, [before, element])
            yield added
            element = added.node, 0
        held = lists.with_elements(held, {place: element})
    values.put(op.inputs[0], held)
    return [held]


def _write(values: Values, op: Op) -> Made:
    place = lists.number(values, op, 1, "the place in the array")
    return (yield from _written(values, op, [place], [op.inputs[2]]))


def _scatter(values: Values, op: Op) -> Made:
    rows = yield from lists.rows_of(values, op, 2)
    return (yield from _written(values, op, lists.places_of(values, op, 1), rows))


def _split(values: Values, op: Op) -> Made:
    parts = yield from lists.pieces_of(values, op, 1, 2)
    return (yield from _written(values, op, range(len(parts)), parts))


def _read(values: Values, op: Op) -> list[Result]:
    place = lists.number(values, op, 1, "the place in the array")
    return [*lists.elements_of(values, _read_by(values, op), [place])]


def _gather(values: Values, op: Op) -> Made:
    held, places = _read_by(values, op), lists.places_of(values, op, 1)
    return (yield from lists.stacked(values, op, held, places, _element_shape(op)))


def _concat(values: Values, op: Op) -> Made:
    return (yield from lists.joined(values, op, _read_by(values, op), None))


def _size(values: Values, op: Op) -> list[Result]:
    return [values.graph.constant(np.asarray(len(_read_by(values, op).elements), np.int32))]


def _stack(values: Values, op: Op) -> list[Result]:
    del values
    return [TensorList((), str(op.attrs["elem_type"]), None)]


def _push(values: Values, op: Op) -> list[Result]:
    held = values.list(op.inputs[0])
    values.put(op.inputs[0], replace(held, elements=(*held.elements, op.inputs[1])))
    return [op.inputs[1]]


def _pop(values: Values, op: Op) -> list[Result]:
    held = values.list(op.inputs[0])
    if not held.elements:
        raise Unsupported("more is taken off the stack than was put there")
    values.put(op.inputs[0], replace(held, elements=held.elements[:-1]))
    return [*lists.elements_of(values, held, [len(held.elements) - 1])]


ARRAYS: Mapping[str, Lowered] = {
    "StackPopV2": _pop,
    "StackPushV2": _push,
    "StackV2": _stack,
    "TensorArrayConcatV3": _concat,
    "TensorArrayGatherV3": _gather,
    "TensorArrayGradV3": _gradient,
    "TensorArrayReadV3": _read,
    "TensorArrayScatterV3": _scatter,
    "TensorArraySizeV3": _size,
    "TensorArraySplitV3": _split,
    "TensorArrayV3": _array,
    "TensorArrayWriteV3": _write,
}
"""Rules by which ops of arrays and stacks are done on lists."""
