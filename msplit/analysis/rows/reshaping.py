"""Rules of independent rows for ops that move elements: shapes, cuts and joins, repetition along axes.

Ops that give the same elements another shape, or another order of axes.

Ops that cut tensors apart and put them together.

Ops that make tensors, repeat them, and work along axes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from msplit.analysis.rows.counts import Linear, asked_sizes, linear
from msplit.analysis.rows.node import (
    COORDINATES,
    EACH,
    FIXED,
    NUMBERS,
    PADDED,
    PLACE,
    VARYING,
    LinearSizes,
    Mixes,
    PerRow,
    RowLimits,
    RowState,
    View,
    agreed,
    not_along,
    rule,
    with_axis,
    without,
)
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
def reshape(view: View) -> RowState:
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
    shape, sizes = view.ranked(0), view.counts(1, varying=bool(state.group))
    if sizes is None:
        raise Mixes("asks for a shape that is not known beforehand")
    asked = linear(sizes)
    if (found := view.chosen(sizes)) is not None:
        if found[1] != state.group or (-1, 0) in asked:
            raise Mixes("reshapes entries of which each row has another number")
        asked[found[0]] = (-1, 0)
    before, all_before = _product([*shape[: state.axis], state.outer])
    behind, all_behind = _product([state.inner, *shape[state.axis + 1 :]])
    if state.group and any(slope for _, slope in asked):
        raise Mixes("makes rows of entries of which each row has another number")
    # The axis of the result that grows with the batch, and by how much for each row.
    axis, slope = _row_axis(asked, before * behind, all_before and all_behind)
    if all_before and all_behind and slope:
        asked = _settled(asked, slope, before * behind)
    ahead, all_ahead = _product(base for base, _ in asked[:axis])
    if not all_before or not all_ahead or (ahead < 0 and axis > 0):
        raise Mixes("reshapes what has axes of unknown size before the rows")
    # Coordinates keep the column that tells the row only as the last axis.
    if state.tells == COORDINATES and (state.column != len(shape) - 1 or asked[-1] != (shape[-1], 0)):
        raise Mixes(PLACE)
    column = None if state.column is None else len(asked) - 1
    result = replace(state, axis=axis, column=column)
    # The new axes before that of the rows hold `ahead` entries: rows stay whole where those before them were a multiple.
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
def expand_dims(view: View) -> RowState:
    """A new axis of size 1."""
    state = view.rows(0)
    (given,) = view.whole(1)
    return with_axis(state, view.place(0, given, 1))


@rule("Squeeze", places=True, each=True)
def squeeze(view: View) -> RowState:
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
def transpose(view: View) -> RowState:
    """Permutes axes."""
    state, rank = view.rows(0), len(view.ranked(0))
    order = [axis_of(axis, rank) for axis in view.whole(1)]
    column = None if state.column is None else order.index(state.column)
    return replace(state, axis=order.index(state.axis), column=column)


@rule("Cast", places=True, each=True)
def cast(view: View) -> RowState:
    """A number at a time; the number of a row stays one."""
    if isinstance(view.states[0], RowLimits) and view.attr("DstT") in ("int32", "int64"):
        return view.states[0]
    state = view.rows(0)
    if state.tells and view.attr("DstT") not in ("int32", "int64"):
        raise Mixes(PLACE)
    return state


@rule("Bitcast")
def bitcast(view: View) -> RowState:
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
def space_and_batch(view: View) -> RowState:
    """All items once for each place in a block, one behind the other, or back."""
    state, count = view.alone(), math.prod(view.whole(1))
    if state.axis != 0:
        raise Mixes("takes rows for what lies inside of an item")
    if view.op == "SpaceToBatchND":
        return replace(state, outer=state.outer * count)
    if count < 1 or state.outer % count:
        raise Mixes("makes one item of several rows")
    return replace(state, outer=state.outer // count)


@rule("Pack", places=True)
def pack(view: View) -> RowState:
    """Stacks along a new axis; row numbers in front of other numbers are coordinates."""
    axis = view.place(0, int(view.attr("axis", 0)), 1)
    states = [view.rows(slot) for slot in range(len(view.states))]
    return _together([with_axis(state, axis) for state in states], axis)


def _together(states: Sequence[PerRow], axis: int) -> PerRow:
    """Result of a concatenation along an axis other than that of the rows: numbers of rows before other numbers are coordinates."""
    first, others = states[0], states[1:]
    if all(state.tells == first.tells and state.tells in ("", NUMBERS) for state in states):
        return agreed(states)
    starts = first.tells == NUMBERS or (first.tells == COORDINATES and first.column == axis)
    if not starts or any(state.tells for state in others):
        raise Mixes(PLACE)
    plain = agreed([replace(first, tells="", column=None), *others])
    return replace(plain, tells=COORDINATES, column=axis)


@rule("Unpack")
def unpack(view: View) -> RowState:
    """Takes another axis apart than that of the rows."""
    state = view.rows(0)
    axis = view.place(0, int(view.attr("axis", 0)))
    not_along(state, axis, "takes rows apart")
    return replace(state, axis=state.axis - (axis < state.axis))


@rule("Concat", "ConcatV2", places=True)
def concat(view: View) -> RowState:
    """Along another axis, or all rows of one tensor behind all rows of another."""
    slots = range(1, len(view.states)) if view.op == "Concat" else range(len(view.states) - 1)
    (given,) = view.whole(0 if view.op == "Concat" else -1)
    axis = view.place(slots[0], given)
    last, zero = view.states[slots[-1]], view.value(slots[0])
    if isinstance(last, RowLimits) and last.what == "ends" and len(slots) == 2 and zero is not None and [*zero] == [0]:
        return replace(last, what="splits")
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
def split(view: View) -> RowState | list[RowState]:
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
def cut(view: View) -> RowState:
    """All rows, of each a part."""
    state = view.rows(0)
    begin, size = _bounds(view, 1), _bounds(view, 2)
    others = [item for bounds in (begin, size) for axis, item in enumerate(bounds) if axis != state.axis]
    if any(item is not None and item[1] for item in others):
        raise Mixes("cuts another axis at the number of rows")
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
def strided_slice(view: View) -> RowState:
    """NumPy's basic indexing, with masks."""
    if isinstance(view.states[0], RowLimits):
        return _limits(view, view.states[0])
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
    # `source` is the axis of the data that an entry of the index takes, `place` that of the result.
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
        # The axis of the rows must be taken whole; other axes by bounds that do not grow with the batch.
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
    # Axes behind the index are taken whole.
    if result is None:
        result = replace(state, axis=place + state.axis - source)
    if state.column is None:
        return result
    if tells is None:
        raise Mixes(PLACE)
    return replace(result, tells=tells, column=None)


def _limits(view: View, state: RowLimits) -> RowState:
    """The starts or the ends out of where rows begin and end."""
    view.fixed(1, 2, 3)
    (begin,), (end,), (step,) = (view.whole(slot) for slot in (1, 2, 3))
    masks = {
        name: int(view.attr(f"{name}_mask", 0)) for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    }
    bounds = 0 if masks.pop("begin") else begin, None if masks.pop("end") else end
    found = {(1, None): "ends", (0, -1): "starts"}.get(bounds)
    if state.what != "splits" or any(masks.values()) or step != 1 or found is None:
        raise Mixes("cuts where rows begin and end")
    return replace(state, what=found)


@rule("Tile", sizes=(1,), places=True)
def tile(view: View) -> RowState:
    """Tile: a fixed tensor is repeated for every row; a tensor per row is repeated inside of each row, or all rows as a whole."""
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
def broadcast_to(view: View) -> RowState:
    """BroadcastTo: a fixed tensor is repeated for every row, a tensor per row along other axes."""
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
def fill(view: View) -> RowState:
    """One value everywhere."""
    view.only(0)
    if isinstance(sizes := view.states[0], LinearSizes) and (found := view.chosen(sizes)) is not None:
        if sizes.slope.any() or view.op == "Empty":
            raise Mixes(VARYING)
        return PerRow(found[0], 1, None, group=found[1])
    asked = asked_sizes(view, 0)
    with_rows = [axis for axis, (_, slope) in enumerate(asked) if slope != 0]
    if len(with_rows) != 1 or asked[with_rows[0]][0] != 0 or (view.op == "Empty" and not view.attr("init", False)):
        raise Mixes("makes a tensor that has not one entry for each row")
    slope = asked[with_rows[0]][1]
    return PerRow(with_rows[0], 1, None if slope == UNKNOWN else slope)


@rule("Range", sizes=(1,))
def arange(view: View) -> RowState:
    """From 0 up to the number of rows, or of all entries: the place of each."""
    limit = view.counts(1)
    (base, slope), *_ = linear(limit) if limit is not None else [(UNKNOWN, UNKNOWN)]
    if view.whole(0) != [0] or view.whole(2) != [1] or base != 0 or slope < 1:
        raise Mixes("counts to a number that depends on rows")
    if slope == 1:
        return PerRow(0, tells=NUMBERS)
    return PerRow(0, 1, slope, EACH, origin=PerRow(0, 1, slope))


@rule("Pad", "PadV2", "MirrorPad")
def pad(view: View) -> RowState:
    """Along other axes than the rows."""
    state = view.alone()
    pads = view.whole(1)
    if pads[2 * state.axis] or pads[2 * state.axis + 1]:
        raise Mixes("adds rows")
    return state


@rule("ReverseV2", "Cumsum", "Cumprod", "CumulativeLogsumexp", "Roll")
def along(view: View) -> RowState:
    """Along given axes, which are not that of the rows; or the sum of how many entries the rows before and a row have."""
    state = view.alone()
    choice = view.counted.get(view.sources[0])
    if (
        view.op == "Cumsum"
        and choice is not None
        and not (view.attr("exclusive", False) or view.attr("reverse", False))
    ):
        return RowLimits(choice, "ends")
    for axis in view.whole(2 if view.op == "Roll" else 1):
        not_along(state, view.place(0, axis), "works along the rows")
    return state


@rule("Reverse")
def reverse(view: View) -> RowState:
    """Along axes that a vector of truth values chooses."""
    state = view.rows(0)
    if view.whole(1)[state.axis]:
        raise Mixes("turns the order of the rows round")
    return state


@rule("ReverseSequence")
def reverse_sequence(view: View) -> RowState:
    """A part of each row, whose length is of the row."""
    state, lengths = view.rows(0), view.rows(1)
    batch = view.place(0, int(view.attr("batch_dim", 0)))
    if batch != state.axis:
        raise Mixes("works along the rows")
    agreed([replace(state, axis=0), lengths])
    return state


@rule("OneHot", places=True)
def one_hot(view: View) -> RowState:
    """A new axis. Beyond the end of a row are zeros where a number was that is none of those that are counted."""
    state = view.alone()
    axis = view.place(0, int(view.attr("axis", -1)), 1)
    if state.tells:
        depth, off, fill = view.value(1), view.value(3), state.origin
        if state.tells != PADDED or depth is None or off is None or off != 0 or not isinstance(fill, float):
            raise Mixes(PLACE)
        if 0 <= fill < (math.inf if int(depth) == UNKNOWN else int(depth)):
            raise Mixes("takes what stands beyond the end of a row")
        state = replace(state, origin=0.0)
    return with_axis(state, axis)
