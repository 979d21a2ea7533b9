"""Tensor lists, which loops keep what their turns made in, known element by element before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from msplit.engines.cuda.ir.graph import Key, Op
from msplit.engines.cuda.ir.node import Unsupported
from msplit.formats.tensors import numpy_dtype

Shape = tuple[int | None, ...] | None


@dataclass(frozen=True)
class TensorList:
    """The value of a list.

    Attributes:
        elements: The value of each, None for one that nobody has set.
        dtype: Name of their type.
        shape: Of an element, as far as it is known.
    """

    elements: tuple[Key | None, ...]
    dtype: str
    shape: Shape


class Values(Protocol):
    """What is known of values while a graph is unrolled."""

    def static(self, key: Key) -> NDArray[Any] | None:
        """A value that is the same in every run."""

    def shape(self, key: Key) -> tuple[int, ...] | None:
        """Its shape, where that is the same in every run."""

    def dtype(self, key: Key) -> str:
        """Name of its type."""

    def list(self, key: Key) -> TensorList:
        """The list that a value is."""

    def constant(self, value: NDArray[Any]) -> Key:
        """A new constant."""

    def new(self, op: str, like: Op, attrs: Mapping[str, Any], inputs: Sequence[Key]) -> Op:
        """A new op that does a part of another's work."""


Result = Key | TensorList
Made = Iterator[Op | list[Result]]
"""Ops to run, each of which has run when the next is asked for, and at the end a list of the results."""


LONGEST = 1_000_000
"""Elements that a list may have: a damaged graph may ask for any number."""


def _number(values: Values, op: Op, slot: int, what: str) -> int:
    found = values.static(op.inputs[slot])
    if found is None:
        raise Unsupported(f"{what} depends on values that only the run knows")
    return int(found)


def _places(values: Values, op: Op) -> list[int]:
    found = values.static(op.inputs[1])
    if found is None:
        raise Unsupported("the places in the list depend on values that only the run knows")
    return [int(place) for place in found.reshape(-1)]


def _shape_input(values: Values, op: Op, slot: int) -> Shape:
    """The element shape that an input gives: -1 for a size that is not known, a scalar -1 for an unknown rank."""
    found = values.static(op.inputs[slot])
    if found is None or found.ndim == 0:
        return None
    return tuple(None if size < 0 else int(size) for size in found.tolist())


def _shape_attribute(op: Op) -> Shape:
    """The element shape that an array's attribute gives."""
    shape = op.attrs.get("element_shape")
    return shape if isinstance(shape, tuple) else None


def _merged(one: Shape, other: Shape) -> Shape:
    if one is None or other is None or len(one) != len(other):
        return other if one is None else one
    return tuple(a if b is None else b for a, b in zip(one, other, strict=True))


def _whole(values: Values, held: TensorList, wanted: Shape) -> tuple[int, ...]:
    """The shape of an element that nobody has set."""
    shape = _merged(held.shape, wanted)
    for element in held.elements:
        if element is not None:
            shape = _merged(shape, values.shape(element))
    if shape is None or any(size is None for size in shape):
        raise Unsupported("an element of the list is read before it is set, and its shape is not known")
    return tuple(int(size) for size in shape if size is not None)


def _elements(values: Values, held: TensorList, places: Iterable[int], wanted: Shape) -> list[Key]:
    """Some elements; zeros where nobody has set them, as TensorFlow has it."""
    found = [held.elements[_inside(held, place)] for place in places]
    known = [element for element in found if element is not None]
    if len(known) == len(found):
        return known
    zeros = _zeros(values, held.dtype, _whole(values, held, wanted))
    return [zeros if element is None else element for element in found]


def _element(values: Values, held: TensorList, place: int, wanted: Shape) -> Key:
    (found,) = _elements(values, held, (place,), wanted)
    return found


def _zeros(values: Values, dtype: str, shape: tuple[int, ...]) -> Key:
    return values.constant(np.zeros(shape, numpy_dtype(dtype)))


def _inside(held: TensorList, place: int) -> int:
    if not 0 <= place < len(held.elements):
        raise Unsupported(f"element {place} of a list of {len(held.elements)}")
    return place


def _unset(count: int) -> tuple[None, ...]:
    """So many elements that nobody has set."""
    if count > LONGEST:
        raise Unsupported(f"a list of {count:,} elements")
    return (None,) * count


def _long_enough(held: TensorList, count: int) -> TensorList:
    """A list with so many elements or more."""
    return replace(held, elements=held.elements + _unset(count - len(held.elements)))


def _with(held: TensorList, place: int, element: Key) -> TensorList:
    """A list with one element set."""
    at = _inside(held, place)
    return replace(held, elements=(*held.elements[:at], element, *held.elements[at + 1 :]))


def _reserve(values: Values, op: Op) -> Made:
    count = _number(values, op, 1, "the length of the list")
    yield [TensorList(_unset(count), str(op.attrs["element_dtype"]), _shape_input(values, op, 0))]


def _empty(values: Values, op: Op) -> Made:
    yield [TensorList((), str(op.attrs["element_dtype"]), _shape_input(values, op, 0))]


def _from_tensor(values: Values, op: Op) -> Made:
    shape = values.shape(op.inputs[0])
    if not shape:
        raise Unsupported("the length of the list depends on values that only the run knows")
    elements: tuple[Key, ...] = ()
    if shape[0]:
        unpack = values.new("Unpack", op, {"num": shape[0], "axis": 0}, [op.inputs[0]])
        yield unpack
        elements = tuple((unpack.node, port) for port in range(shape[0]))
    yield [TensorList(elements, str(op.attrs["element_dtype"]), shape[1:])]


def _get(values: Values, op: Op) -> Made:
    place = _number(values, op, 1, "the place in the list")
    yield [_element(values, values.list(op.inputs[0]), place, _shape_input(values, op, 2))]


def _set(values: Values, op: Op) -> Made:
    held, place = values.list(op.inputs[0]), _number(values, op, 1, "the place in the list")
    if op.attrs.get("resize_if_index_out_of_bounds"):
        held = _long_enough(held, place + 1)
    yield [_with(held, place, op.inputs[2])]


def _push(values: Values, op: Op) -> Made:
    held = values.list(op.inputs[0])
    yield [replace(held, elements=(*held.elements, op.inputs[1]))]


def _pop(values: Values, op: Op) -> Made:
    held = values.list(op.inputs[0])
    found = _element(values, held, len(held.elements) - 1, _shape_input(values, op, 1))
    yield [replace(held, elements=held.elements[:-1]), found]


def _length(values: Values, op: Op) -> Made:
    held = values.list(op.inputs[-1])  # of an array its flow, behind its handle
    yield [values.constant(np.asarray(len(held.elements), np.int32))]


def _resize(values: Values, op: Op) -> Made:
    held, count = values.list(op.inputs[0]), _number(values, op, 1, "the length of the list")
    yield [_long_enough(replace(held, elements=held.elements[:count]), count)]


def _stack(values: Values, op: Op) -> Made:
    held = values.list(op.inputs[0])
    yield from _stacked(values, op, held, range(len(held.elements)), _shape_input(values, op, 1))


def _gather(values: Values, op: Op) -> Made:
    yield from _stacked(values, op, values.list(op.inputs[0]), _places(values, op), _shape_input(values, op, 2))


def _stacked(values: Values, op: Op, held: TensorList, places: Sequence[int], wanted: Shape) -> Made:
    if not places:
        yield [_zeros(values, held.dtype, (0, *_whole(values, held, wanted)))]
        return
    pack = values.new("Pack", op, {"axis": 0}, _elements(values, held, places, wanted))
    yield pack
    yield [(pack.node, 0)]


def _concat(values: Values, op: Op) -> Made:
    held = values.list(op.inputs[0])
    wanted = _shape_input(values, op, 1) if op.op == "TensorListConcatV2" else None
    elements = _elements(values, held, range(len(held.elements)), wanted or None)
    shapes = [values.shape(element) for element in elements]
    if not elements or not all(shapes):
        raise Unsupported("the lengths of the list's elements depend on values that only the run knows")
    lengths = values.constant(np.asarray([shape[0] for shape in shapes if shape], np.int64))
    joined = values.new("ConcatV2", op, {}, [*elements, values.constant(np.asarray(0, np.int32))])
    yield joined
    yield [(joined.node, 0), lengths]


def _array(values: Values, op: Op) -> Made:
    """A TensorArray's flow is its list; nothing asks for its handle."""
    count = _number(values, op, 0, "the length of the array")
    held = TensorList(_unset(count), str(op.attrs["dtype"]), _shape_attribute(op))
    yield [values.constant(np.zeros(2, np.int32)), held]


def _array_read(values: Values, op: Op) -> Made:
    yield [_element(values, values.list(op.inputs[2]), _number(values, op, 1, "the place in the array"), None)]


def _array_write(values: Values, op: Op) -> Made:
    place = _number(values, op, 1, "the place in the array")
    held = _long_enough(values.list(op.inputs[3]), place + 1)  # one of a dynamic size grows
    yield [_with(held, place, op.inputs[2])]


def _array_scatter(values: Values, op: Op) -> Made:
    places, shape = _places(values, op), values.shape(op.inputs[2])
    if not shape:
        raise Unsupported("the places in the array depend on values that only the run knows")
    held = _long_enough(values.list(op.inputs[3]), max(places, default=-1) + 1)
    if places:
        unpack = values.new("Unpack", op, {"num": shape[0], "axis": 0}, [op.inputs[2]])
        yield unpack
        elements = list(held.elements)
        for port, place in enumerate(places):
            elements[_inside(held, place)] = (unpack.node, port)
        held = replace(held, elements=tuple(elements))
    yield [held]


def _array_gather(values: Values, op: Op) -> Made:
    yield from _stacked(values, op, values.list(op.inputs[2]), _places(values, op), _shape_attribute(op))


LISTS: Mapping[str, Callable[[Values, Op], Made]] = {
    "EmptyTensorList": _empty,
    "TensorArrayGatherV3": _array_gather,
    "TensorArrayReadV3": _array_read,
    "TensorArrayScatterV3": _array_scatter,
    "TensorArraySizeV3": _length,
    "TensorArrayV3": _array,
    "TensorArrayWriteV3": _array_write,
    "TensorListConcat": _concat,
    "TensorListConcatV2": _concat,
    "TensorListFromTensor": _from_tensor,
    "TensorListGather": _gather,
    "TensorListGetItem": _get,
    "TensorListLength": _length,
    "TensorListPopBack": _pop,
    "TensorListPushBack": _push,
    "TensorListReserve": _reserve,
    "TensorListResize": _resize,
    "TensorListSetItem": _set,
    "TensorListStack": _stack,
}
"""What each op of lists becomes."""
