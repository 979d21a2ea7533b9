"""States of a tensor in the proof of independent rows: its dependence on the rows of the inputs, and on their number."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.shapes.registry import UNKNOWN

NUMBERS = "numbers"
"""Mark of a tensor per row: each element is the number of its row in the batch, counted from 0."""

COORDINATES = "coordinates"
"""Mark of a tensor per row: along its axis `column` the first is the number of the row, the others are of the row."""

POSITIONS = "positions"
"""Mark of chosen entries: the position of each along the axis of rows from which they were chosen."""

EACH = "each"
"""Mark of entries: the position of each along the axis of rows; every position comes once."""

INDICES = "indices"
"""Mark of chosen entries: the position of each in a list of all different ones, a `UniqueValues` of the same origin."""


PLACE = "makes data of the place of a row in the batch"
"""The reason for refusing that."""


@dataclass(frozen=True)
class RowDependence:
    """The reason why the rows of an output are not independent: the node that mixes them.

    Attributes:
        node: The node behind which rows are no longer apart; inside of functions ``call/node``.
        op: Its op.
        why: What it does, as in "sums over the rows".
    """

    node: str
    op: str
    why: str

    def __str__(self) -> str:
        return f"{self.op} ({self.node}) {self.why}"


class Mixes(Exception):
    """Raised by the rule of an op where rows do not stay apart.

    Args:
        why: What goes on behind the op's name, or the refusal that it comes from.
    """

    def __init__(self, why: str | RowDependence) -> None:
        self.why = why
        super().__init__(str(why))

    def refusal(self, node: str, op: str) -> RowDependence:
        """This refusal as that of a node."""
        return self.why if isinstance(self.why, RowDependence) else RowDependence(node, op, self.why)


class RowState:
    """The dependence of a tensor on rows; the base of the states below."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Fixed(RowState):
    """A fixed tensor: equal whatever the rows are and however many."""


@dataclass(frozen=True, slots=True)
class PerRow(RowState):
    """Each row of the inputs has elements of its own, which depend on nothing else; all other sizes are fixed.

    Of n rows the axis has outer * n * inner entries. Row r has those at (o * n + r) * inner + i for o < outer and i < inner.

    Attributes:
        axis: Counted from the front.
        outer: How often all rows stand one behind the other.
        inner: Neighbours that belong to one row; None where their number is fixed, but not known.
        tells: What else is known of the elements: "", or one of the words above.
        column: The axis that `COORDINATES` lie along.
        group: Of entries that were chosen by what is in the rows: by which choice. Each row has a number of its own of them, in
            the order of the rows, in place of `inner`; equal places of two tensors belong together if their choice is the same.
        origin: Of `POSITIONS` and `EACH` the state of what they point into, of `INDICES` the node whose values they point to.
    """

    axis: int
    outer: int = 1
    inner: int | None = 1
    tells: str = ""
    column: int | None = None
    group: str = ""
    origin: PerRow | str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class LinearSizes(RowState):
    """Small whole numbers that depend on the number n of rows alone, and grow with it evenly: base + slope * n.

    Attributes:
        base, slope: int64 arrays of the tensor's shape, `UNKNOWN` for a number that is fixed, but not known.
    """

    base: NDArray[Any]
    slope: NDArray[Any]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LinearSizes):
            return False
        return np.array_equal(self.base, other.base) and np.array_equal(self.slope, other.slope)

    def __hash__(self) -> int:
        return hash((self.base.tobytes(), self.slope.tobytes()))


@dataclass(frozen=True, slots=True)
class ListState(RowState):
    """A list of tensors: its length is fixed.

    Attributes:
        element: The state of every element; None while nothing was put in.
    """

    element: RowState | None = None


@dataclass(frozen=True, slots=True)
class Array(RowState):
    """The handle of a tensor array of TensorFlow 1, which holds what is written through any of its handles.

    Attributes:
        key: Of the node that makes it.
    """

    key: str


@dataclass(frozen=True, slots=True)
class UniqueValues(RowState):
    """The different values of a list in an order of their own, or what is looked up for them: of use by `INDICES` alone.

    Attributes:
        origin: The node that makes it.
    """

    origin: str


@dataclass(frozen=True, slots=True)
class MixedRows(RowState):
    """Depends on other rows, or can not be told.

    Attributes:
        refusal: Where that begins.
        least: Of a whole number: it is not less than this one, if that is known.
    """

    refusal: RowDependence
    least: int | None = None


FIXED = Fixed()


def merged(first: RowState, second: RowState) -> RowState:
    """The state of a tensor that is one or the other by a fixed choice; a list may learn what its elements are.

    Raises:
        Mixes: They are made of rows in different ways.
    """
    for state in (first, second):
        if isinstance(state, MixedRows):
            return state
    if isinstance(first, ListState) or isinstance(second, ListState):
        one, other = (state.element if isinstance(state, ListState) else state for state in (first, second))
        return ListState(one or other if one is None or other is None else either(one, other))
    return either(first, second)


def either(first: RowState, second: RowState) -> RowState:
    """The state of two that are equal.

    Raises:
        Mixes: They are not.
    """
    if first == second:
        return first
    if isinstance(first, PerRow) and isinstance(second, PerRow) and matching(first, second):
        return first if first.inner is not None else second
    raise Mixes("gives what is made in different ways of rows, one time or the other")


def matching(first: PerRow, second: PerRow) -> bool:
    """True if equal places of two tensors of one shape belong to the same row. TensorFlow itself makes sure that sizes agree."""
    if replace(first, inner=None) != replace(second, inner=None):
        return False
    return first.inner == second.inner or first.inner is None or second.inner is None


def with_axis(state: PerRow, axis: int) -> PerRow:
    """The state with a new axis before what was there."""
    column = None if state.column is None else state.column + (axis <= state.column)
    return replace(state, axis=state.axis + (axis <= state.axis), column=column)


def without(state: PerRow, gone: Container[int]) -> PerRow:
    """The state without some axes."""
    axis, column = state.axis, state.column
    if column is not None:
        if column in gone:
            raise Mixes(PLACE)
        column -= sum(place in gone for place in range(column))
    return replace(state, axis=axis - sum(place in gone for place in range(axis)), column=column)


LARGEST = 1 << 40
"""Largest number that is followed: sums of them can not overflow."""


def small(numbers: NDArray[Any]) -> bool:
    """True if none of some numbers is too large to be followed."""
    return bool(((numbers == UNKNOWN) | (abs(numbers) <= LARGEST)).all())


def sizes_state(base: NDArray[Any], slope: NDArray[Any]) -> RowState:
    """Numbers as a state: without a slope they are fixed.

    Raises:
        Mixes: They are too large to be followed.
    """
    if not small(base) or not small(slope):
        raise Mixes("makes numbers too large to be followed")
    return LinearSizes(base, slope) if slope.any() else FIXED


def times(first: int | None, second: int | None) -> int | None:
    """A product of sizes, of which one may not be known."""
    return None if first is None or second is None else first * second


def number(size: int | None) -> int:
    """A size as an element of `LinearSizes`."""
    return UNKNOWN if size is None else size
