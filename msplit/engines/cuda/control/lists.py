"""Tensor lists, which loops keep what their turns made in, known element by element before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from msplit.engines.cuda.program import Key, Op
from msplit.engines.cuda.registry import Unsupported
from msplit.formats.decode import numpy_dtype

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
Rule = Callable[[Values, Op], Iterator[Op | list[Result]]]
"""Gives out ops to run, each of which has run when the next is asked for, and at the end a list of the results."""


def _number(values: Values, op: Op, slot: int, what: str) -> int:
    found = values.static(op.inputs[slot])
    if found is None:
        raise Unsupported(f"{what} depends on values that only the run knows")
    return int(found)


def _shape_input(values: Values, op: Op, slot: int) -> Shape:
    """The element shape that an input gives: -1 for a size that is not known, a scalar -1 for an unknown rank."""
    found = values.static(op.inputs[slot])
    if found is None or found.ndim == 0:
        return None
    return tuple(None if size < 0 else int(size) for size in found.tolist())


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


def _element(values: Values, held: TensorList, index: int, wanted: Shape) -> Key:
    """An element; zeros where nobody has set it, as TensorFlow has it."""
    found = held.elements[index]
    return _zeros(values, held.dtype, _whole(values, held, wanted)) if found is None else found


def _zeros(values: Values, dtype: str, shape: tuple[int, ...]) -> Key:
    return values.constant(np.zeros(shape, numpy_dtype(dtype)))


def _place(held: TensorList, index: int) -> int:
    if not 0 <= index < len(held.elements):
        raise Unsupported(f"element {index} of a list of {len(held.elements)}")
    return index


def _reserve(values: Values, op: Op) -> Iterator[Op | list[Result]]:
    count = _number(values, op, 1, "the length of the list")
    yield [TensorList((None,) * count, str(op.attrs["element_dtype"]), _shape_input(values, op, 0))]


def _empty(values: Values, op: Op) -> Iterator[Op | list[Result]]:
    yield [TensorList((), str(op.attrs["element_dtype"]), _shape_input(values, op, 0))]


def _from_tensor(values: Values, op: Op) -> Iterator[Op | list[Result]]:
    shape = values.shape(op.inputs[0])
    if not shape:
        raise Unsupported("the length of the list depends on values that only the run knows")
    elements: tuple[Key, ...] = ()
    if shape[0]:
        unpack = values.new("Unpack", op, {"num": shape[0], "axis": 0}, [op.inputs[0]])
        yield unpack
        elements = tuple((unpack.node, port) for port in range(shape[0]))
    yield [TensorList(elements, str(op.attrs["element_dtype"]), shape[1:])]


def _get(values: Values, op: Op) -> Iterator[Op | list[Result]]:
    held = values.list(op.inputs[0])
    index = _place(held, _number(values, op, 1, "the place in the list"))
    yield [_element(values, held, index, _shape_input(values, op, 2))]


def _set(values: Values, op: Op) -> Iterator[Op | list[Result]]:
    held = values.list(op.inputs[0])
    index = _number(values, op, 1, "the place in the list")
    if op.attrs.get("resize_if_index_out_of_bounds") and index >= len(held.elements):
        held = replace(held, elements=(*held.elements, *(None,) * (index + 1 - len(held.elements))))
    index = _place(held, index)
    elements = (*held.elements[:index], op.inputs[2], *held.elements[index + 1 :])
    yield [replace(held, elements=elements)]


def _push(values: Values, op: Op) -> Iterator[Op | list[Result]]:
    held = values.list(op.inputs[0])
    yield [replace(held, elements=(*held.elements, op.inputs[1]))]


def _pop(values: Values, op: Op) -> Iterator[Op | list[Result]]:
    held = values.list(op.inputs[0])
    last = _place(held, len(held.elements) - 1)
    found = _element(values, held, last, _shape_input(values, op, 1))
    yield [replace(held, elements=held.elements[:-1]), found]


def _length(values: Values, op: Op) -> Iterator[Op | list[Result]]:
    yield [values.constant(np.asarray(len(values.list(op.inputs[0]).elements), np.int32))]


def _resize(values: Values, op: Op) -> Iterator[Op | list[Result]]:
    held = values.list(op.inputs[0])
    count = _number(values, op, 1, "the length of the list")
    elements = (*held.elements[:count], *(None,) * (count - len(held.elements)))
    yield [replace(held, elements=elements)]


def _stack(values: Values, op: Op) -> Iterator[Op | list[Result]]:
    held = values.list(op.inputs[0])
    yield from _stacked(values, op, held, range(len(held.elements)), _shape_input(values, op, 1))


def _gather(values: Values, op: Op) -> Iterator[Op | list[Result]]:
    held = values.list(op.inputs[0])
    indices = values.static(op.inputs[1])
    if indices is None:
        raise Unsupported("the places in the list depend on values that only the run knows")
    places = [_place(held, int(index)) for index in indices.reshape(-1)]
    yield from _stacked(values, op, held, places, _shape_input(values, op, 2))


def _stacked(
    values: Values, op: Op, held: TensorList, places: Sequence[int], wanted: Shape
) -> Iterator[Op | list[Result]]:
    if not places:
        yield [_zeros(values, held.dtype, (0, *_whole(values, held, wanted)))]
        return
    pack = values.new("Pack", op, {"axis": 0}, [_element(values, held, place, wanted) for place in places])
    yield pack
    yield [(pack.node, 0)]


def _concat(values: Values, op: Op) -> Iterator[Op | list[Result]]:
    held = values.list(op.inputs[0])
    wanted = None
    if op.op == "TensorListConcatV2" and (given := _shape_input(values, op, 1)):
        wanted = given
    elements = [_element(values, held, place, wanted) for place in range(len(held.elements))]
    shapes = [values.shape(element) for element in elements]
    if not elements or not all(shapes):
        raise Unsupported("the lengths of the list's elements depend on values that only the run knows")
    lengths = values.constant(np.asarray([shape[0] for shape in shapes if shape], np.int64))
    joined = values.new("ConcatV2", op, {}, [*elements, values.constant(np.asarray(0, np.int32))])
    yield joined
    yield [(joined.node, 0), lengths]


def _array(values: Values, op: Op) -> Iterator[Op | list[Result]]:
    """A TensorArray's flow is its list; nothing asks for its handle."""
    count = _number(values, op, 0, "the length of the array")
    shape = op.attrs.get("element_shape")
    yield [
        values.constant(np.zeros(2, np.int32)),
        TensorList((None,) * count, str(op.attrs["dtype"]), shape if isinstance(shape, tuple) else None),
    ]


def _array_read(values: Values, op: Op) -> Iterator[Op | list[Result]]:
    held = values.list(op.inputs[2])
    yield [_element(values, held, _place(held, _number(values, op, 1, "the place in the array")), None)]


def _array_write(values: Values, op: Op) -> Iterator[Op | list[Result]]:
    held = values.list(op.inputs[3])
    index = _number(values, op, 1, "the place in the array")
    missing = index + 1 - len(held.elements)
    place = _place(replace(held, elements=(*held.elements, *(None,) * missing)), index)  # one of a dynamic size grows
    elements = (*held.elements, *(None,) * missing)
    yield [replace(held, elements=(*elements[:place], op.inputs[2], *elements[place + 1 :]))]


def _array_scatter(values: Values, op: Op) -> Iterator[Op | list[Result]]:
    held = values.list(op.inputs[3])
    indices, shape = values.static(op.inputs[1]), values.shape(op.inputs[2])
    if indices is None or not shape:
        raise Unsupported("the places in the array depend on values that only the run knows")
    elements = list(held.elements)
    if len(indices):
        unpack = values.new("Unpack", op, {"num": shape[0], "axis": 0}, [op.inputs[2]])
        yield unpack
        places = [int(index) for index in indices]
        elements += [None] * (max(places) + 1 - len(elements))
        for port, index in enumerate(places):
            elements[_place(replace(held, elements=tuple(elements)), index)] = (unpack.node, port)
    yield [replace(held, elements=tuple(elements))]


def _array_gather(values: Values, op: Op) -> Iterator[Op | list[Result]]:
    held = values.list(op.inputs[2])
    indices, shape = values.static(op.inputs[1]), op.attrs.get("element_shape")
    if indices is None:
        raise Unsupported("the places in the array depend on values that only the run knows")
    places = [_place(held, int(index)) for index in indices]
    yield from _stacked(values, op, held, places, shape if isinstance(shape, tuple) else None)


def _array_size(values: Values, op: Op) -> Iterator[Op | list[Result]]:
    yield [values.constant(np.asarray(len(values.list(op.inputs[1]).elements), np.int32))]


LISTS: Mapping[str, Rule] = {
    "EmptyTensorList": _empty,
    "TensorArrayGatherV3": _array_gather,
    "TensorArrayReadV3": _array_read,
    "TensorArrayScatterV3": _array_scatter,
    "TensorArraySizeV3": _array_size,
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
