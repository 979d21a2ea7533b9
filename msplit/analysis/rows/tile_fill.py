"""Ops that make tensors, repeat them, and work along axes."""

from __future__ import annotations

from dataclasses import replace

from msplit.analysis.rows.counts import asked_sizes, linear
from msplit.analysis.rows.node import View, agreed, not_along, rule
from msplit.analysis.rows.states import EACH, FIXED, NUMBERS, PLACE, Mixes, PerRow, State
from msplit.shapes.registry import UNKNOWN


@rule("Tile", sizes=(1,), places=True)
def tile(view: View) -> State:
    """What is fixed is repeated for every row; what is per row is repeated inside of each row, or all rows as a whole."""
    asked, shape = asked_sizes(view, 1), view.ranked(0)
    if view.states[0] is FIXED:
        axes = [axis for axis, (_, slope) in enumerate(asked) if slope != 0]
        if len(axes) != 1 or asked[axes[0]][0] != 0:
            raise Mixes("repeats a number of times that can not be followed")
        axis = axes[0]
        size, slope = shape[axis], asked[axis][1]
        return PerRow(axis, 1, None if size is None or slope == UNKNOWN else size * slope)
    state = view.rows(0)
    if any(slope != 0 for _, slope in asked):
        raise Mixes("repeats rows for every row")
    if state.column is not None and asked[state.column] != (1, 0):
        raise Mixes(PLACE)
    times = asked[state.axis][0]
    if times == UNKNOWN or times < 1:
        raise Mixes("repeats a number of times that is not known beforehand")
    return replace(state, outer=state.outer * times)


@rule("BroadcastTo", sizes=(1,), places=True)
def broadcast_to(view: View) -> State:
    """What is fixed is repeated for every row, what is per row along other axes."""
    asked, shape = asked_sizes(view, 1), view.ranked(0)
    with_rows = [axis - len(asked) for axis, (_, slope) in enumerate(asked) if slope != 0]
    if len(with_rows) != 1 or asked[with_rows[0]][0] != 0:
        raise Mixes("gives a shape that does not go with the number of rows")
    axis, slope = with_rows[0], asked[with_rows[0]][1]
    if view.states[0] is FIXED:
        if len(shape) >= -axis and shape[axis] != 1:
            raise Mixes("spreads what is fixed and has more than one entry along the rows")
        return PerRow(len(asked) + axis, 1, None if slope == UNKNOWN else slope)
    state = view.rows(0)
    if state.axis - len(shape) != axis or state.inner is None or slope != state.outer * state.inner:
        raise Mixes("spreads rows along an axis of rows")
    if state.column is not None and asked[state.column - len(shape)] != (shape[state.column], 0):
        raise Mixes(PLACE)
    column = None if state.column is None else len(asked) - len(shape) + state.column
    return replace(state, axis=len(asked) + axis, column=column)


@rule("Fill", "Empty", sizes=(0,))
def fill(view: View) -> State:
    """One value everywhere."""
    view.only(0)
    asked = asked_sizes(view, 0)
    with_rows = [axis for axis, (_, slope) in enumerate(asked) if slope != 0]
    if len(with_rows) != 1 or asked[with_rows[0]][0] != 0 or (view.op == "Empty" and not view.attr("init", False)):
        raise Mixes("makes a tensor that has not one entry for each row")
    slope = asked[with_rows[0]][1]
    return PerRow(with_rows[0], 1, None if slope == UNKNOWN else slope)


@rule("Range", sizes=(1,))
def arange(view: View) -> State:
    """From 0 up to the number of rows, or of all entries: the place of each."""
    limit = view.counts(1)
    (base, slope), *_ = linear(limit) if limit is not None else [(UNKNOWN, UNKNOWN)]
    if view.whole(0) != [0] or view.whole(2) != [1] or base != 0 or slope < 1:
        raise Mixes("counts to a number that depends on rows")
    if slope == 1:
        return PerRow(0, tells=NUMBERS)
    return PerRow(0, 1, slope, EACH, origin=PerRow(0, 1, slope))


@rule("Pad", "PadV2", "MirrorPad")
def pad(view: View) -> State:
    """Along other axes than the rows."""
    view.only(0)
    state = view.rows(0)
    pads = view.whole(1)
    if pads[2 * state.axis] or pads[2 * state.axis + 1]:
        raise Mixes("adds rows")
    return state


@rule("ReverseV2", "Cumsum", "Cumprod", "CumulativeLogsumexp", "Roll")
def along(view: View) -> State:
    """Along given axes, which are not that of the rows."""
    view.only(0)
    state = view.rows(0)
    for axis in view.whole(2 if view.op == "Roll" else 1):
        not_along(state, view.place(0, axis), "works along the rows")
    return state


@rule("Reverse")
def reverse(view: View) -> State:
    """Along axes that a vector of truth values chooses."""
    state = view.rows(0)
    if view.whole(1)[state.axis]:
        raise Mixes("turns the order of the rows round")
    return state


@rule("ReverseSequence")
def reverse_sequence(view: View) -> State:
    """A part of each row, whose length is of the row."""
    state, lengths = view.rows(0), view.rows(1)
    batch = view.place(0, int(view.attr("batch_dim", 0)))
    if batch != state.axis:
        raise Mixes("works along the rows")
    agreed([replace(state, axis=0), lengths])
    return state


@rule("OneHot")
def one_hot(view: View) -> State:
    """A new axis."""
    view.only(0)
    state = view.rows(0)
    axis = view.place(0, int(view.attr("axis", -1)), 1)
    return replace(state, axis=state.axis + (axis <= state.axis))
