"""A node as a rule sees it, and the table of rules: TensorFlow op -> what it does to rows.

    @rule("Squeeze")
    def squeeze(view: View) -> State | list[State]:
        ...

A rule is called where some input is not fixed, and gives the state of every output (one alone stands for all). Values that it asks for
are known only where that input is fixed, so that none that belongs to one batch gets in. It raises `Mixes` where rows do not stay
apart; a node that contradicts itself, or tells too little, may raise ValueError and the like.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from msplit.analysis.rows.states import (
    EACH,
    FIXED,
    PLACE,
    Array,
    LinearSizes,
    Mixes,
    PerRow,
    RowState,
    either,
    matching,
    number,
    small,
    times,
)
from msplit.shapes.registry import Node, Outputs, axis_of


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
    """

    states: list[RowState] = field(default_factory=list)
    made: Outputs = ()
    key: str = ""
    sources: list[str] = field(default_factory=list)
    held: Arrays = field(default_factory=Arrays)

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

    def counts(self, slot: int) -> LinearSizes | None:
        """The numbers of an input that depend on nothing but the number of rows; None where they are not known."""
        state = self.states[slot]
        if isinstance(state, LinearSizes):
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
