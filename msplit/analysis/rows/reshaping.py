"""Ops that give the same elements another shape, or another order of axes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from msplit.analysis.rows.counts import Linear, asked_sizes
from msplit.analysis.rows.node import View, not_along, rule
from msplit.analysis.rows.states import COORDINATES, PLACE, Mixes, PerRow, State, with_axis, without
from msplit.shapes.registry import UNKNOWN, axis_of


def _product(sizes: Iterable[int | None]) -> tuple[int, bool]:
    """The product of the sizes that are known, and whether that are all."""
    result, whole = 1, True
    for size in sizes:
        if size is None or size == UNKNOWN:
            whole = False
        else:
            result *= size
    return result, whole


@rule("Reshape", sizes=(1,), places=True, each=True)
def reshape(view: View) -> State:
    """The row axis may take up axes before or behind it, or give some away, as long as whole rows stay together."""
    state = view.rows(0)
    if not state.group:
        return _reshaped(view, state)
    # Each entry that was chosen stays one.
    found = _reshaped(view, replace(state, inner=1))
    if (found.outer, found.inner) != (state.outer, 1):
        raise Mixes("reshapes entries of which each row has another number")
    return replace(found, inner=None)


def _reshaped(view: View, state: PerRow) -> PerRow:
    shape, asked = view.ranked(0), asked_sizes(view, 1)
    before, all_before = _product([*shape[: state.axis], state.outer])
    behind, all_behind = _product([state.inner, *shape[state.axis + 1 :]])
    if state.group and any(slope for _, slope in asked):
        raise Mixes("makes rows of entries of which each row has another number")
    axis, slope = _row_axis(asked, before * behind, all_before and all_behind)
    if all_before and all_behind and slope:
        asked = _settled(asked, slope, before * behind)
    ahead, all_ahead = _product(base for base, _ in asked[:axis])
    if not all_before or not all_ahead or (ahead < 0 and axis > 0):
        raise Mixes("reshapes what has axes of unknown size before the rows")
    if state.tells == COORDINATES and (state.column != len(shape) - 1 or asked[-1] != (shape[-1], 0)):
        raise Mixes(PLACE)
    column = None if state.column is None else len(asked) - 1
    result = replace(state, axis=axis, column=column)
    if ahead == 0 or before % ahead or before == 0:
        raise Mixes("reshapes rows into each other")
    outer = before // ahead
    if slope is None:
        if outer != 1:
            raise Mixes("reshapes what has axes of unknown size")
        return replace(result, inner=None)
    if slope % outer:
        raise Mixes("reshapes rows into each other")
    return replace(result, outer=outer, inner=slope // outer)


def _settled(asked: list[Linear], slope: int, elements: int) -> list[Linear]:
    """A shape of which each row has some elements; what stands for the rest is computed, if all others are known."""
    others, all_others = _product(base for base, grows in asked if grows == 0 and base != -1)
    others *= slope
    if not all_others or others <= 0 or elements % others:
        return asked
    return [(elements // others, 0) if item == (-1, 0) else item for item in asked]


def _row_axis(asked: Sequence[Linear], elements: int, whole: bool) -> tuple[int, int | None]:
    """The axis of a shape along which the rows lie, and how many of its entries are of each row, None where that is not known.

    Args:
        asked: The shape.
        elements: How many each row has, as far as they are known: a factor of them.
        whole: Whether that are all.
    """
    with_rows = [axis for axis, (_, slope) in enumerate(asked) if slope != 0]
    if len(with_rows) > 1 or any(asked[axis][0] != 0 for axis in with_rows):
        raise Mixes("reshapes rows into another number of rows")
    if with_rows:
        slope = asked[with_rows[0]][1]
        return with_rows[0], None if slope == UNKNOWN else slope
    rest = [axis for axis, (base, _) in enumerate(asked) if base == -1]
    if len(rest) != 1:
        raise Mixes("gives a fixed shape, so that it takes one batch only")
    others, all_others = _product(base for axis, (base, _) in enumerate(asked) if axis != rest[0])
    if not all_others or others <= 0 or elements <= 0 or elements % others:
        raise Mixes("reshapes rows into each other")
    return rest[0], elements // others if whole else None


@rule("ExpandDims", places=True, each=True)
def expand_dims(view: View) -> State:
    """A new axis of size 1."""
    state = view.rows(0)
    (given,) = view.whole(1)
    return with_axis(state, view.place(0, given, 1))


@rule("Squeeze", places=True, each=True)
def squeeze(view: View) -> State:
    """Axes of size 1 that are named: without names the rows would go where there is one."""
    state = view.rows(0)
    named = view.attr("squeeze_dims", ()) or view.attr("axis", ())
    if not named:
        raise Mixes("drops the axis of the rows where there is one row only")
    gone = {view.place(0, int(axis)) for axis in named}
    if state.axis in gone:
        raise Mixes("drops the axis of the rows")
    return without(state, gone)


@rule("Transpose", "ConjugateTranspose", places=True)
def transpose(view: View) -> State:
    """Permutes axes."""
    state, rank = view.rows(0), len(view.ranked(0))
    order = [axis_of(axis, rank) for axis in view.whole(1)]
    column = None if state.column is None else order.index(state.column)
    return replace(state, axis=order.index(state.axis), column=column)


@rule("Cast", places=True, each=True)
def cast(view: View) -> State:
    """A number at a time; the number of a row stays one."""
    state = view.rows(0)
    if state.tells and view.attr("DstT") not in ("int32", "int64"):
        raise Mixes(PLACE)
    return state


@rule("Bitcast")
def bitcast(view: View) -> State:
    """The last axis may appear or disappear."""
    state, shape, made = view.rows(0), view.ranked(0), _made(view)
    if len(made) < len(shape):
        not_along(state, len(shape) - 1, "makes one number of several rows")
    return state


def _made(view: View) -> tuple[int | None, ...]:
    shape = view.made[0]
    if shape is None:
        raise Mixes("makes a tensor with an unknown number of axes")
    return shape


@rule("SpaceToBatchND", "BatchToSpaceND")
def space_and_batch(view: View) -> State:
    """All items once for each place in a block, one behind the other, or back."""
    view.only(0)
    state, count = view.rows(0), math.prod(view.whole(1))
    if state.axis != 0:
        raise Mixes("takes rows for what lies inside of an item")
    if view.op == "SpaceToBatchND":
        return replace(state, outer=state.outer * count)
    if count < 1 or state.outer % count:
        raise Mixes("makes one item of several rows")
    return replace(state, outer=state.outer // count)
