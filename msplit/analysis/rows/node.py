"""Basis of the rules of independent rows: states of tensors, nodes as rules see them, and the table of rules.

A node as a rule sees it, and the table of rules: TensorFlow op -> what it does to rows.

    @rule("Squeeze")
    def squeeze(view: View) -> State | list[State]:
        ...

A rule is called where some input is not fixed, and gives the state of every output (one alone stands for all). Values that it asks for
are known only where that input is fixed, so that none that belongs to one batch gets in. It raises `Mixes` where rows do not stay
apart; a node that contradicts itself, or tells too little, may raise ValueError and the like.

States of a tensor in the proof of independent rows: its dependence on the rows of the inputs, and on their number.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from msplit.shapes.registry import UNKNOWN, Node, Outputs, Value, axis_of

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

PADDED = "padded"
"""Mark of a tensor per row: along its axis `column` the entries of a row, then `origin`, a number, as often as the longest row needs."""


PLACE = "makes data of the place of a row in the batch"
"""The reason for refusing that."""

VARYING = "takes a number that depends on all rows, such as the length of the longest"
"""The reason for refusing that."""

ENTRIES = "entries "
"""Begins, in `View.numbers`, how many entries a choice has."""


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
        column: The axis that `COORDINATES` lie along, or that is `PADDED`.
        group: Of entries that were chosen by what is in the rows: by which choice. Each row has a number of its own of them, in
            the order of the rows, in place of `inner`; equal places of two tensors belong together if their choice is the same.
        origin: Of `POSITIONS` and `EACH` the state of what they point into, of `INDICES` the node whose values they point to, of
            `PADDED` the number.
    """

    axis: int
    outer: int = 1
    inner: int | None = 1
    tells: str = ""
    column: int | None = None
    group: str = ""
    origin: PerRow | str | float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class LinearSizes(RowState):
    """Small whole numbers that depend on the number n of rows alone, and grow with it evenly: base + slope * n.

    Attributes:
        base, slope: int64 arrays of the tensor's shape, `UNKNOWN` for a number that is fixed, but not known.
        varying: None, or an int64 array of the same shape. Where it is not 0 the number is not that, but one that depends on what all
            rows are, such as the length of the longest; equal ones are equal numbers, see `View.numbers`.
    """

    base: NDArray[Any]
    slope: NDArray[Any]
    varying: NDArray[Any] | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LinearSizes) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[Any, ...]:
        varying = None if self.varying is None else self.varying.tobytes()
        return self.base.shape, self.base.tobytes(), self.slope.tobytes(), varying


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
class RowLimits(RowState):
    """Places of the rows in a list of chosen entries, as ragged tensors have them.

    Attributes:
        choice: The entries' `PerRow.group`.
        what: "splits": 0, and where each row ends; or one for each row: "ends", "starts", "within" what both of them are, "behind" a start
            or "before" an end, how far is the same for all.
    """

    choice: str
    what: str = "splits"


@dataclass(frozen=True, slots=True)
class MixedRows(RowState):
    """Depends on other rows, or can not be told.

    Attributes:
        refusal: Where that begins.
        least: Of a whole number: it is not less than base + slope * n, if that is known.
    """

    refusal: RowDependence
    least: tuple[int, int] | None = None


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
    return bool(((numbers == UNKNOWN) | ((numbers <= LARGEST) & (numbers >= -LARGEST))).all())


def sizes_state(base: NDArray[Any], slope: NDArray[Any], varying: NDArray[Any] | None = None) -> RowState:
    """Numbers as a state: without a slope, and where none depends on what rows are, they are fixed.

    Raises:
        Mixes: They are too large to be followed.
    """
    if not small(base) or not small(slope):
        raise Mixes("makes numbers too large to be followed")
    varying = varying if varying is not None and varying.any() else None
    return LinearSizes(base, slope, varying) if slope.any() or varying is not None else FIXED


def times(first: int | None, second: int | None) -> int | None:
    """A product of sizes, of which one may not be known."""
    return None if first is None or second is None else first * second


def number(size: int | None) -> int:
    """A size as an element of `LinearSizes`."""
    return UNKNOWN if size is None else size


@dataclass(eq=False)
class Arrays:
    """Writes into tensor arrays, by the node that makes the array; filled while a graph is walked.

    Attributes:
        elements: The state of every element.
        grown: Whether that has changed since somebody may have read it.
    """

    elements: dict[str, RowState] = field(default_factory=dict)
    grown: bool = False

    def write(self, array: RowState, element: RowState) -> None:
        """Puts an element in.

        Raises:
            Mixes: It is none that goes with the others.
        """
        if not isinstance(array, Array):
            raise Mixes(refused_input(array, 0))
        if isinstance(element, PerRow) and (element.group or element.tells):
            raise Mixes("keeps entries that were chosen")
        before = self.elements.get(array.key)
        after = element if before is None else either(before, element)
        if after != before:
            self.elements[array.key] = after
            self.grown = True

    def read(self, array: RowState) -> RowState:
        """The state of an element; fixed as long as there is none.

        Raises:
            Mixes: It is no array.
        """
        if not isinstance(array, Array):
            raise Mixes(refused_input(array, 0))
        return self.elements.get(array.key, FIXED)


@dataclass(slots=True, eq=False)
class View(Node):
    """A node, with the states of its inputs.

    Attributes:
        states: Of its data inputs.
        made: Shapes of its outputs, at the batch at which shapes are known.
        key: Of the node: no other has it.
        sources: Keys of its inputs.
        held: What tensor arrays hold, by the key of the node that makes each.
        numbers: `LinearSizes.varying` by what the number is.
        counted: By tensor of which each row has one, the choice of which it says how many entries the row has.
        batched: Gives the known value of an input at the batch at which shapes are known, also of one that has rows.
    """

    states: list[RowState] = field(default_factory=list)
    made: Outputs = ()
    key: str = ""
    sources: list[str] = field(default_factory=list)
    held: Arrays = field(default_factory=Arrays)
    numbers: dict[str, int] = field(default_factory=dict)
    counted: dict[str, str] = field(default_factory=dict)
    batched: Callable[[int], Value | None] = lambda slot: None

    def rows(self, slot: int = 0) -> PerRow:
        """The state of an input that is per row.

        Raises:
            Mixes: It is not.
        """
        state = self.states[slot]
        if isinstance(state, PerRow):
            return state
        raise Mixes(refused_input(state, slot))

    def fixed(self, *slots: int) -> None:
        """Makes sure that inputs are fixed.

        Raises:
            Mixes: One is not.
        """
        for slot in slots:
            if self.states[slot] is not FIXED:
                raise Mixes(refused_input(self.states[slot], slot, "is asked to be fixed"))

    def only(self, *slots: int) -> None:
        """Makes sure that all inputs but some are fixed.

        Raises:
            Mixes: One is not.
        """
        self.fixed(*(slot for slot in range(len(self.states)) if slot not in slots))

    def alone(self, slot: int = 0) -> PerRow:
        """The state of an input that is per row, where all others are fixed.

        Raises:
            Mixes: One is not.
        """
        self.only(slot)
        return self.rows(slot)

    def place(self, slot: int, given: int, more: int = 0) -> int:
        """An axis of an input, counted from the front; of `more` axes than it has."""
        return axis_of(given, len(self.ranked(slot)) + more)

    def sparse_shape(self, feature: object = "") -> RowState:
        """The shape of a matrix that is sparse: the number of rows, and the length of the longest."""
        return sizes_state(
            np.array([0, 0]), np.array([1, 0]), np.array([0, self.number(f"longest {self.key} {feature}")])
        )

    def number(self, what: str) -> int:
        """`LinearSizes.varying` of a number."""
        return self.numbers.setdefault(what, len(self.numbers) + 1)

    def chosen(self, sizes: LinearSizes) -> tuple[int, str] | None:
        """The axis of a shape along which entries lie that were chosen, and the choice; None if there is none.

        Raises:
            Mixes: Another number of the shape depends on what rows are.
        """
        if sizes.varying is None:
            return None
        names = {number: what for what, number in self.numbers.items()}
        found = [(axis, names[item]) for axis, item in enumerate(sizes.varying.tolist()) if item]
        axis, what = found[0]
        if len(found) > 1 or not what.startswith(ENTRIES):
            raise Mixes(VARYING)
        return axis, what.removeprefix(ENTRIES)

    def counts(self, slot: int, varying: bool = False) -> LinearSizes | None:
        """The numbers of an input that depend on nothing but the number of rows; None where they are not known.

        Args:
            slot: Of the input.
            varying: True where some may also depend on what rows are.

        Raises:
            Mixes: Some do, and they may not.
        """
        state = self.states[slot]
        if isinstance(state, LinearSizes):
            if state.varying is not None and not varying:
                raise Mixes(VARYING)
            return state
        value = self.value(slot)
        if value is None or value.dtype.kind != "i" or not small(value):
            return None
        return LinearSizes(value, np.zeros_like(value))


Decide = Callable[[View], "RowState | list[RowState]"]
D = TypeVar("D", bound=Decide)


@dataclass(frozen=True)
class RowRule:
    """The effect of an op on rows.

    Attributes:
        decide: From the node to the state of each output, or to one for all.
        sizes: Input slots that take the number of rows for a shape.
        places: Whether it knows what to do with the places of rows in the batch.
        each: Whether it leaves all places there where all are.
        always: Whether it is asked though all that the node takes is fixed.
    """

    decide: Decide
    sizes: Container[int] = ()
    places: bool = False
    each: bool = False
    always: bool = False

    def takes(self, state: RowState) -> bool:
        """True if it may take what is known of a tensor's elements."""
        if not isinstance(state, PerRow) or not state.tells:
            return True
        return self.each if state.tells == EACH else self.places


RULES: dict[str, RowRule] = {}

ANY = range(1 << 20)
"""All input slots."""


def rule(*ops: str, sizes: Container[int] = (), **known: bool) -> Callable[[D], D]:
    """Registers the rule of the named ops, with what else there is to know of it, see `RowRule`. Registering an op twice is an error."""

    def register(decide: D) -> D:
        for op in ops:
            if op in RULES:
                raise ValueError(f"{op} has a rule already")
            RULES[op] = RowRule(decide, sizes, **known)
        return decide

    return register


def rules(found: Iterable[str], **known: Any) -> Callable[[D], D]:
    """Registers the rule of ops that have a trait, but for those with a rule of their own."""
    return rule(*(op for op in sorted(found) if op not in RULES), **known)


def refused_input(state: RowState, slot: int, other: str = "takes no rows there") -> str:
    """The reason for refusing an input in some state."""
    if isinstance(state, LinearSizes):
        return "makes data of the number of rows"
    if isinstance(state, PerRow) and state.tells:
        return PLACE
    kind = "differs from row to row" if isinstance(state, PerRow) else "can not be followed here"
    if state is FIXED:
        return f"takes input {slot}, which is the same for all rows, where it needs one for each"
    return f"takes input {slot}, which {kind} and {other}"


def agreed(states: Iterable[PerRow]) -> PerRow:
    """The state of tensors whose equal places belong to the same row.

    Raises:
        Mixes: They have none in common.
    """
    first, *others = states
    for state in others:
        if not matching(first, state):
            raise Mixes("puts rows side by side that lie along different axes, or in another order")
        if first.inner is None:
            first = state
    return first


def not_along(state: PerRow, axis: int, what: str) -> None:
    """Makes sure that an axis is not that of the rows.

    Raises:
        Mixes: It is; `what` says what is done along it.
    """
    if axis == state.axis:
        raise Mixes(what)


def entries(state: PerRow) -> int:
    """Entries of the axis per row, or `UNKNOWN`."""
    return number(times(state.outer, state.inner))
