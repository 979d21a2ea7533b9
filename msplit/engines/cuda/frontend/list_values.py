"""Lists of tensors while loops are unrolled: known element by element, before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from msplit.engines.cuda.ir.graph import Key, Op, OpGraph
from msplit.engines.cuda.ir.node import Unsupported
from msplit.errors import EngineError
from msplit.formats.tensors import numpy_dtype

Shape = tuple[int | None, ...] | None


@dataclass(frozen=True)
class TensorList:
    """The value of a list, of an array's flow, or what lies on a stack.

    Attributes:
        elements: The value of each, None for one that nobody has set.
        dtype: Name of their type.
        shape: Of an element, as far as it is known.
        like: A list whose elements have the shapes of those that nobody has set here.
        gradient: Of a gradient's array the array that it belongs to, by its handle or, where that is one of a gradient too, by this; and
            the gradient's name.
    """

    elements: tuple[Key | None, ...]
    dtype: str
    shape: Shape
    like: TensorList | None = None
    gradient: tuple[object, str] | None = None


class TooMany(EngineError):
    """The loops of a model are more ops than may be."""


class Values:
    """Facts about values while a graph is unrolled: its constants and shapes are what is known so far.

    Attributes:
        graph: Gets new constants.
        most: Ops and turns that all loops may become.
    """

    def __init__(self, graph: OpGraph, most: int) -> None:
        self.graph, self.most = graph, most
        self._count = 0
        self._lists: dict[Key, TensorList] = {}

    def dtype(self, key: Key) -> str:
        """Name of a value's type."""
        return self.graph.constants[key].dtype.name if key in self.graph.constants else self.graph.dtypes[key]

    def list(self, key: Key) -> TensorList:
        """The list that a value is."""
        if key not in self._lists:
            raise Unsupported("this list comes from an op that keeps lists in another way")
        return self._lists[key]

    def is_list(self, key: Key) -> bool:
        """Returns whether a value is a list."""
        return key in self._lists

    def put(self, handle: Key, held: TensorList) -> None:
        """Lets the handle of a stack or an array stand for another list from now on."""
        self._lists[handle] = held

    def new(self, op: str, like: Op, attrs: Mapping[str, Any], inputs: Sequence[Key]) -> Op:
        """A new op that does a part of another's work."""
        self.count(like)
        return Op(self.graph.fresh(), like.name, op, dict(attrs), [*inputs], [*like.source_nodes])

    def count(self, like: Op) -> None:
        """Counts an op, or a turn of a loop, which may have no ops at all and no end."""
        self._count += 1
        if self._count > self.most:
            raise TooMany(
                f"the loops of this model are more than {self.most:,} ops when they are unrolled",
                where=f"node {like.name}",
                fix="use --engine tensorflow, or give shorter sequences with --shape",
            )


Result = Key | TensorList
Made = Generator[Op, None, list[Result]]
"""Ops to run, each of which has run when the next is asked for. The results are returned."""

Lowered = Callable[[Values, Op], list[Result] | Made]
"""Rule of an op: gives its results, or ops that make them."""

LONGEST = 1_000_000
"""Elements that a list may have: a damaged graph may ask for any number."""


def number(values: Values, op: Op, slot: int, what: str) -> int:
    """The integer that an input is; the message says what it is."""
    found = values.graph.constants.get(op.inputs[slot])
    if found is None:
        raise Unsupported(f"{what} depends on values that only the run knows")
    return int(found)


def places_of(values: Values, op: Op, slot: int) -> list[int]:
    """The places in a list that an input names."""
    found = values.graph.constants.get(op.inputs[slot])
    if found is None:
        raise Unsupported("the places in the list depend on values that only the run knows")
    return [int(place) for place in found.reshape(-1)]


def whole(values: Values, held: TensorList, wanted: Shape) -> tuple[int, ...]:
    """The shape of any element that nobody has set."""
    shape = _merged(held.shape, wanted)
    for alike in _alike(held):
        for element in alike.elements:
            if element is not None:
                shape = _merged(shape, values.graph.shape(element))
    if shape is None or any(size is None for size in shape):
        raise Unsupported("an element of the list is read before it is set, and its shape is not known")
    return tuple(int(size) for size in shape if size is not None)


def _merged(one: Shape, other: Shape) -> Shape:
    if one is None or other is None or len(one) != len(other):
        return other if one is None else one
    return tuple(a if b is None else b for a, b in zip(one, other, strict=True))


def _alike(held: TensorList) -> Iterator[TensorList]:
    """A list, the one that it has its shapes of, and so on."""
    found: TensorList | None = held
    while found is not None:
        yield found
        found = found.like


def elements_of(values: Values, held: TensorList, places: Iterable[int], wanted: Shape = None) -> list[Key]:
    """Some elements; zeros where nobody has set them, as TensorFlow has it."""
    at = list(places)
    if held.gradient is not None:  # its array may have grown when the gradient was there already
        held = long_enough(held, max(at, default=-1) + 1)
    zeros: dict[tuple[int, ...] | None, Key] = {}
    found: list[Key] = []
    for place in at:
        element = held.elements[_inside(held, place)]
        if element is None:
            shape = _shape_at(values, held, place)
            if shape not in zeros:
                zeros[shape] = zeros_of(values, held.dtype, whole(values, held, wanted) if shape is None else shape)
            element = zeros[shape]
        found.append(element)
    return found


def _shape_at(values: Values, held: TensorList, place: int) -> tuple[int, ...] | None:
    """The shape of an element that nobody has set, by the lists that it is to be like."""
    for alike in _alike(held):
        element = alike.elements[place] if place < len(alike.elements) else None
        if element is not None:
            return values.graph.shape(element)
    return None


def zeros_of(values: Values, dtype: str, shape: tuple[int, ...]) -> Key:
    """Zeros, as a constant."""
    return values.graph.constant(np.zeros(shape, numpy_dtype(dtype)))


def _inside(held: TensorList, place: int) -> int:
    if not 0 <= place < len(held.elements):
        raise Unsupported(f"element {place} of a list of {len(held.elements)}")
    return place


def unset(count: int) -> tuple[None, ...]:
    """So many elements that nobody has set."""
    if count > LONGEST:
        raise Unsupported(f"a list of {count:,} elements")
    return (None,) * count


def long_enough(held: TensorList, count: int) -> TensorList:
    """A list with so many elements or more."""
    return replace(held, elements=held.elements + unset(count - len(held.elements)))


def with_elements(held: TensorList, elements: Mapping[int, Key]) -> TensorList:
    """A list with some elements set."""
    found = list(held.elements)
    for place, element in elements.items():
        found[_inside(held, place)] = element
    return replace(held, elements=tuple(found))


def rows_of(values: Values, op: Op, slot: int) -> Generator[Op, None, list[Key]]:
    """The parts of an input along its first axis."""
    shape = values.graph.shape(op.inputs[slot])
    if not shape:
        raise Unsupported("the length of the list depends on values that only the run knows")
    if not shape[0]:
        return []
    unpack = values.new("Unpack", op, {"num": shape[0], "axis": 0}, [op.inputs[slot]])
    yield unpack
    return [(unpack.node, port) for port in range(shape[0])]


def pieces_of(values: Values, op: Op, slot: int, lengths: int) -> Generator[Op, None, list[Key]]:
    """The parts of an input along its first axis that are as long as another input says."""
    sizes = values.graph.constants.get(op.inputs[lengths])
    if sizes is None:
        raise Unsupported("the lengths of the list's elements depend on values that only the run knows")
    if not sizes.size:
        return []
    axis = values.graph.constant(np.asarray(0, np.int32))
    attrs = {"num_split": sizes.size, "num": sizes.size}
    cut = values.new("SplitV", op, attrs, [op.inputs[slot], op.inputs[lengths], axis])
    yield cut
    return [(cut.node, port) for port in range(sizes.size)]


def stacked(values: Values, op: Op, held: TensorList, places: Sequence[int], wanted: Shape) -> Made:
    """Some elements as one tensor, along a new first axis."""
    if not places:
        return [zeros_of(values, held.dtype, (0, *whole(values, held, wanted)))]
    pack = values.new("Pack", op, {"axis": 0}, elements_of(values, held, places, wanted))
    yield pack
    return [(pack.node, 0)]


def joined(values: Values, op: Op, held: TensorList, wanted: Shape) -> Made:
    """All elements as one tensor, along their first axis, and how long each is."""
    elements = elements_of(values, held, range(len(held.elements)), wanted)
    shapes = [values.graph.shape(element) for element in elements]
    if not elements or not all(shapes):
        raise Unsupported("the lengths of the list's elements depend on values that only the run knows")
    lengths = values.graph.constant(np.asarray([shape[0] for shape in shapes if shape], np.int64))
    concat = values.new("ConcatV2", op, {}, [*elements, values.graph.constant(np.asarray(0, np.int32))])
    yield concat
    return [(concat.node, 0), lengths]


def summed(values: Values, op: Op) -> Made:
    """Lists added element by element, and the flows of arrays. What nobody has set adds nothing, nor does a flow that is no array's."""
    lists = [values.list(key) for key in op.inputs if values.is_list(key)]
    if len({held.gradient for held in lists}) > 1:
        raise Unsupported("it adds what is written to several arrays")
    longest = max(lists, key=lambda held: len(held.elements))
    elements: list[Key | None] = []
    for place in range(len(longest.elements)):
        column = [held.elements[place] for held in lists if place < len(held.elements)]
        addends = [element for element in column if element is not None]
        some = [element for element in addends if not _is_zero(values, element)] or addends[:1]
        if len(some) > 1:
            added = values.new("AddN", op, {}, some)
            yield added
            some = [(added.node, 0)]
        elements += some or [None]
    return [replace(longest, elements=tuple(elements))]


def _is_zero(values: Values, key: Key) -> bool:
    found = values.graph.constants.get(key)
    return found is not None and not found.any()


OPTIONAL = "optional"
"""The type of a list that is an optional: its elements are the optional's value; it is empty where there is none."""


def chosen(values: Values, op: Op, condition: Key, one: Key, other: Key) -> Generator[Op, None, TensorList]:
    """The one list or the other, element by element. A flow that is no array's is an array in which nothing is written."""
    lists = [values.list(key) for key in (one, other) if values.is_list(key)]
    longest = max(lists, key=lambda held: len(held.elements))
    if longest.dtype == OPTIONAL and not _select_works(values, lists):
        # One without a value is not read, and of two a gradient reads each in its own branch.
        return longest if any(not held.elements for held in lists) else replace(longest, elements=())
    if len({len(held.elements) for held in lists}) > 1 and longest.gradient is None:
        raise Unsupported("how long a list is depends on which branch is taken, which only the run knows")
    nothing = replace(longest, elements=())
    given = (values.list(key) if values.is_list(key) else nothing for key in (one, other))
    first, second = (long_enough(held, len(longest.elements)) for held in given)
    elements: list[Key | None] = []
    for place, (yes, no) in enumerate(zip(first.elements, second.elements, strict=True)):
        if yes == no:
            elements.append(yes)
            continue
        (yes,) = elements_of(values, replace(first, like=second), (place,))
        (no,) = elements_of(values, replace(second, like=first), (place,))
        if values.graph.shape(yes) is None or values.graph.shape(yes) != values.graph.shape(no):
            raise Unsupported(
                "which element a list has depends on values that only the run knows, and so does its shape"
            )
        select = values.new("SelectV2", op, {}, [condition, yes, no])
        yield select
        elements.append((select.node, 0))
    return replace(longest, elements=tuple(elements))


def _select_works(values: Values, optionals: Sequence[TensorList]) -> bool:
    """Checks that the values of two optionals are tensors of the same shapes."""
    shapes = [[values.graph.shape(element) for element in held.elements if element is not None] for held in optionals]
    return shapes[0] == shapes[-1] and None not in shapes[0]
