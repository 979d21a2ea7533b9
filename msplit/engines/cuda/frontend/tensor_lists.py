"""Lists, arrays and stacks that loops keep values in, as plain tensors.

Lists of TensorFlow 2, in which loops and their gradients keep what their turns made, and optionals, which conds keep it in.

Arrays and stacks of TensorFlow 1, in which loops and their gradients keep what their turns made, as lists.

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
from msplit.formats.tensors import numpy_dtype
from msplit.opset.traits import ADD


def _shape_of_element(op: Op) -> Shape:
    """The shape of an element that an array's attribute gives."""
    shape = op.attrs.get("element_shape")
    return shape if isinstance(shape, tuple) else None


def _array(values: Values, op: Op) -> list[Result]:
    """The handle stands for what was written last, whatever flow that is in: only shapes are asked of it."""
    count = lists.number(values, op, 0, "the length of the array")
    held = TensorList(lists.unset(count), str(op.attrs["dtype"]), _shape_of_element(op))
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


def _scatter_array(values: Values, op: Op) -> Made:
    rows = yield from lists.rows_of(values, op, 2)
    return (yield from _written(values, op, lists.places_of(values, op, 1), rows))


def _split_array(values: Values, op: Op) -> Made:
    parts = yield from lists.pieces_of(values, op, 1, 2)
    return (yield from _written(values, op, range(len(parts)), parts))


def _read(values: Values, op: Op) -> list[Result]:
    place = lists.number(values, op, 1, "the place in the array")
    return [*lists.elements_of(values, _read_by(values, op), [place])]


def _gather_array(values: Values, op: Op) -> Made:
    held, places = _read_by(values, op), lists.places_of(values, op, 1)
    return (yield from lists.stacked(values, op, held, places, _shape_of_element(op)))


def _concat_array(values: Values, op: Op) -> Made:
    return (yield from lists.joined(values, op, _read_by(values, op), None))


def _size(values: Values, op: Op) -> list[Result]:
    return [values.graph.constant(np.asarray(len(_read_by(values, op).elements), np.int32))]


def _make_stack(values: Values, op: Op) -> list[Result]:
    return [TensorList((), str(op.attrs["elem_type"]), None)]


def _push_stack(values: Values, op: Op) -> list[Result]:
    held = values.list(op.inputs[0])
    values.put(op.inputs[0], replace(held, elements=(*held.elements, op.inputs[1])))
    return [op.inputs[1]]


def _pop_stack(values: Values, op: Op) -> list[Result]:
    held = values.list(op.inputs[0])
    if not held.elements:
        raise Unsupported("more is taken off the stack than was put there")
    values.put(op.inputs[0], replace(held, elements=held.elements[:-1]))
    return [*lists.elements_of(values, held, [len(held.elements) - 1])]


ARRAYS: Mapping[str, Lowered] = {
    "StackPopV2": _pop_stack,
    "StackPushV2": _push_stack,
    "StackV2": _make_stack,
    "TensorArrayConcatV3": _concat_array,
    "TensorArrayGatherV3": _gather_array,
    "TensorArrayGradV3": _gradient,
    "TensorArrayReadV3": _read,
    "TensorArrayScatterV3": _scatter_array,
    "TensorArraySizeV3": _size,
    "TensorArraySplitV3": _split_array,
    "TensorArrayV3": _array,
    "TensorArrayWriteV3": _write,
}
"""Rules by which ops of arrays and stacks are done on lists."""


def _shape_input(values: Values, op: Op, slot: int) -> Shape:
    """The element shape that an input gives: -1 for a size that is not known, a scalar -1 for an unknown rank."""
    found = values.graph.constants.get(op.inputs[slot])
    if found is None or found.ndim == 0:
        return None
    return tuple(None if size < 0 else int(size) for size in found.tolist())


def _reserve(values: Values, op: Op) -> list[Result]:
    count = lists.number(values, op, 1, "the length of the list") if op.op == "TensorListReserve" else 0
    return [TensorList(lists.unset(count), str(op.attrs["element_dtype"]), _shape_input(values, op, 0))]


def _from_tensor(values: Values, op: Op) -> Made:
    rows = yield from lists.rows_of(values, op, 0)
    shape = values.graph.shape(op.inputs[0]) or ()
    return [TensorList(tuple(rows), str(op.attrs["element_dtype"]), shape[1:])]


def _get(values: Values, op: Op) -> list[Result]:
    place = lists.number(values, op, 1, "the place in the list")
    return [*lists.elements_of(values, values.list(op.inputs[0]), [place], _shape_input(values, op, 2))]


def _set(values: Values, op: Op) -> list[Result]:
    held, place = values.list(op.inputs[0]), lists.number(values, op, 1, "the place in the list")
    if op.attrs.get("resize_if_index_out_of_bounds"):
        held = lists.long_enough(held, place + 1)
    return [lists.with_elements(held, {place: op.inputs[2]})]


def _push(values: Values, op: Op) -> list[Result]:
    held = values.list(op.inputs[0])
    return [replace(held, elements=(*held.elements, op.inputs[1]))]


def _pop(values: Values, op: Op) -> list[Result]:
    held = values.list(op.inputs[0])
    last = lists.elements_of(values, held, [len(held.elements) - 1], _shape_input(values, op, 1))
    return [replace(held, elements=held.elements[:-1]), *last]


def _element_shape(values: Values, op: Op) -> list[Result]:
    shape = values.list(op.inputs[0]).shape
    sizes = -1 if shape is None else [-1 if size is None else size for size in shape]
    return [values.graph.constant(np.asarray(sizes, numpy_dtype(str(op.attrs.get("shape_type", "int32")))))]


def _resize(values: Values, op: Op) -> list[Result]:
    held, count = values.list(op.inputs[0]), lists.number(values, op, 1, "the length of the list")
    return [lists.long_enough(replace(held, elements=held.elements[:count]), count)]


def _stack(values: Values, op: Op) -> Made:
    held = values.list(op.inputs[0])
    return (yield from lists.stacked(values, op, held, range(len(held.elements)), _shape_input(values, op, 1)))


def _gather(values: Values, op: Op) -> Made:
    held = values.list(op.inputs[0])
    return (yield from lists.stacked(values, op, held, lists.places_of(values, op, 1), _shape_input(values, op, 2)))


def _scatter(values: Values, op: Op) -> Made:
    rows = yield from lists.rows_of(values, op, 0)
    places, shape = lists.places_of(values, op, 1), values.graph.shape(op.inputs[0]) or ()
    count = lists.number(values, op, 3, "the length of the list") if op.op == "TensorListScatterV2" else -1
    held = TensorList(lists.unset(max(count, max(places, default=-1) + 1)), str(op.attrs["element_dtype"]), shape[1:])
    return [lists.with_elements(held, dict(zip(places, rows, strict=True)))]


def _scatter_into(values: Values, op: Op) -> Made:
    rows = yield from lists.rows_of(values, op, 1)
    places = lists.places_of(values, op, 2)
    held = lists.long_enough(values.list(op.inputs[0]), max(places, default=-1) + 1)
    return [lists.with_elements(held, dict(zip(places, rows, strict=True)))]


def _concat(values: Values, op: Op) -> Made:
    wanted = _shape_input(values, op, 1) if op.op == "TensorListConcatV2" else None
    return (yield from lists.joined(values, op, values.list(op.inputs[0]), wanted or None))


def _split(values: Values, op: Op) -> Made:
    parts = yield from lists.pieces_of(values, op, 0, 2)
    return [TensorList(tuple(parts), str(op.attrs["element_dtype"]), None)]


def _zeros_like(values: Values, op: Op) -> list[Result]:
    held = values.list(op.inputs[0])
    if op.attrs.get("T") != "variant":  # the flow of an array
        return [values.graph.constant(np.zeros((), np.float32))]
    return [TensorList(lists.unset(len(held.elements)), held.dtype, held.shape, like=held)]


def _optional(values: Values, op: Op) -> list[Result]:
    return [TensorList(tuple(op.inputs), lists.OPTIONAL, None)]


def _optional_value(values: Values, op: Op) -> list[Result]:
    found = values.list(op.inputs[0]).elements
    if not found:
        raise Unsupported("the optional has no value, or one of which the shape depends on the branch that is taken")
    return [element for element in found if element is not None]


LISTS: Mapping[str, Lowered] = {
    **ARRAYS,
    "EmptyTensorList": _reserve,
    "OptionalFromValue": _optional,
    "OptionalGetValue": _optional_value,
    "OptionalNone": _optional,
    "TensorListConcat": _concat,
    "TensorListConcatV2": _concat,
    "TensorListElementShape": _element_shape,
    "TensorListFromTensor": _from_tensor,
    "TensorListGather": _gather,
    "TensorListGetItem": _get,
    "TensorListLength": _size,
    "TensorListPopBack": _pop,
    "TensorListPushBack": _push,
    "TensorListReserve": _reserve,
    "TensorListResize": _resize,
    "TensorListScatter": _scatter,
    "TensorListScatterIntoExistingList": _scatter_into,
    "TensorListScatterV2": _scatter,
    "TensorListSetItem": _set,
    "TensorListSplit": _split,
    "TensorListStack": _stack,
}
"""Rules by which ops of lists are done."""

OF_LISTS: Mapping[str, Lowered] = {**dict.fromkeys(ADD | {"AddN"}, lists.summed), "ZerosLike": _zeros_like}
"""Rules for ops of all values where an input is a list."""
