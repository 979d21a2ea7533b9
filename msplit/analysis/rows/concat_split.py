"""Ops that cut tensors apart and put them together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from msplit.analysis.rows.counts import Linear, linear
from msplit.analysis.rows.node import View, agreed, not_along, rule
from msplit.analysis.rows.states import COORDINATES, NUMBERS, PLACE, Mixes, PerRow, State, with_axis
from msplit.shapes.registry import UNKNOWN


@rule("Pack", places=True)
def pack(view: View) -> State:
    """Stacks along a new axis; row numbers in front of other numbers are coordinates."""
    axis = view.place(0, int(view.attr("axis", 0)), 1)
    states = [view.rows(slot) for slot in range(len(view.states))]
    return _together([with_axis(state, axis) for state in states], axis)


def _together(states: Sequence[PerRow], axis: int) -> PerRow:
    """What is written side by side along an axis that is not that of the rows: numbers of rows before other numbers are coordinates."""
    first, others = states[0], states[1:]
    if all(state.tells == first.tells and state.tells in ("", NUMBERS) for state in states):
        return agreed(states)
    starts = first.tells == NUMBERS or (first.tells == COORDINATES and first.column == axis)
    if not starts or any(state.tells for state in others):
        raise Mixes(PLACE)
    plain = agreed([replace(first, tells="", column=None), *others])
    return replace(plain, tells=COORDINATES, column=axis)


@rule("Unpack")
def unpack(view: View) -> State:
    """Takes another axis apart than that of the rows."""
    state = view.rows(0)
    axis = view.place(0, int(view.attr("axis", 0)))
    not_along(state, axis, "takes rows apart")
    return replace(state, axis=state.axis - (axis < state.axis))


@rule("Concat", "ConcatV2", places=True)
def concat(view: View) -> State:
    """Along another axis, or all rows of one tensor behind all rows of another."""
    slots = range(1, len(view.states)) if view.op == "Concat" else range(len(view.states) - 1)
    (given,) = view.whole(0 if view.op == "Concat" else -1)
    axis = view.place(slots[0], given)
    states = [view.rows(slot) for slot in slots]
    if any(state.axis == axis for state in states):
        inner = states[0].inner
        if any(replace(state, outer=1) != PerRow(axis, 1, inner, states[0].tells) for state in states) or inner is None:
            raise Mixes("joins different tensors along the rows")
        return replace(states[0], outer=sum(state.outer for state in states))
    if states[0].tells == NUMBERS and view.ranked(slots[0])[axis] != 1 and not all(state.tells for state in states):
        raise Mixes(PLACE)
    return _together(states, axis)


@rule("Split", "SplitV")
def split(view: View) -> State | list[State]:
    """Along another axis, or between all rows and all rows."""
    slot = 1 if view.op == "Split" else 0
    view.only(slot)
    state = view.rows(slot)
    (given,) = view.whole(0 if view.op == "Split" else 2)
    if view.place(slot, given) != state.axis:
        return state
    parts = int(view.attr("num_split", 1))
    if view.op == "SplitV" or parts < 1 or state.outer % parts:
        raise Mixes("cuts between rows")
    return replace(state, outer=state.outer // parts)


@rule("Slice", sizes=(1, 2))
def cut(view: View) -> State:
    """All rows, of each a part."""
    state = view.rows(0)
    begin, size = _bounds(view, 1), _bounds(view, 2)
    _fixed_but(state.axis, begin, size)
    start, length = begin[state.axis], size[state.axis]
    if start is None or length is None:
        raise Mixes("cuts at places that are not known beforehand")
    stop = None if length == (-1, 0) else (start[0] + length[0], start[1] + length[1])
    return _cut_rows(state, start, stop)


def _bounds(view: View, slot: int) -> list[Linear | None]:
    """Numbers of an input, None where one is fixed but not known."""
    sizes = view.counts(slot)
    if sizes is None:
        view.fixed(slot)
        (count,) = view.ranked(slot)
        return [None] * (count or 0)
    return [None if UNKNOWN in item else item for item in linear(sizes)]


def _fixed_but(axis: int, *bounds: Sequence[Linear | None]) -> None:
    for numbers in bounds:
        for place, item in enumerate(numbers):
            if place != axis and item is not None and item[1] != 0:
                raise Mixes("cuts another axis at the number of rows")


def _cut_rows(state: PerRow, start: Linear | None, stop: Linear | None) -> PerRow:
    """All rows between two places, None for an end: whole repetitions of all rows stay."""
    inner = state.inner
    if start in (None, (0, 0)) and stop is None:
        return state
    if inner is None:
        raise Mixes("cuts some of the rows out")
    first, last = start or (0, 0), stop or (0, state.outer * inner)
    if first[0] or last[0] or first[1] % inner or last[1] % inner:
        raise Mixes("cuts some of the rows out")
    kept = range(state.outer)[first[1] // inner : last[1] // inner] if first[1] >= 0 and last[1] > 0 else range(0)
    if not kept:
        raise Mixes("cuts some of the rows out")
    return replace(state, outer=len(kept))


@rule("StridedSlice", sizes=(1, 2), places=True)
def strided_slice(view: View) -> State:
    """NumPy's basic indexing, with masks."""
    state, rank = view.rows(0), len(view.ranked(0))
    view.fixed(3)
    begin, end, steps = (_bounds(view, slot) for slot in (1, 2, 3))
    no_begin, no_end, ellipsis, new_axis, shrink = (
        int(view.attr(f"{name}_mask", 0)) for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    )
    spread = rank - sum(not (ellipsis | new_axis) >> i & 1 for i in range(len(begin)))
    source = place = 0
    result: PerRow | None = None
    tells: str | None = None
    for i, (start, stop, step) in enumerate(zip(begin, end, steps, strict=True)):
        if ellipsis >> i & 1:
            if source <= state.axis < source + spread:
                result = replace(state, axis=place + state.axis - source)
            source, place = source + spread, place + spread
            continue
        if new_axis >> i & 1:
            place += 1
            continue
        dropped = shrink >> i & 1
        start = (0, 0) if no_begin >> i & 1 and not dropped else start
        stop = None if no_end >> i & 1 else stop
        if source == state.axis:
            if dropped:
                raise Mixes("takes single rows out")
            if start is None or step != (1, 0) or (stop is None and not no_end >> i & 1):
                raise Mixes("cuts some of the rows out")
            result = replace(_cut_rows(state, start, stop), axis=place)
        elif any(item is not None and item[1] != 0 for item in (start, None if dropped else stop)):
            raise Mixes("cuts another axis at the number of rows")
        elif source == state.column:
            if not dropped or start is None:
                raise Mixes(PLACE)
            tells = NUMBERS if start == (0, 0) else "" if start[0] > 0 else None
        source, place = source + 1, place + (not dropped)
    if result is None:
        result = replace(state, axis=place + state.axis - source)
    if state.column is None:
        return result
    if tells is None:
        raise Mixes(PLACE)
    return replace(result, tells=tells, column=None)
