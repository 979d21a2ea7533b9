"""Shape arithmetic with the number n of rows left open: every number is base + slope * n.

What moves numbers about, adds or sums them is linear: it is done to bases and slopes apart, by the functions that know values.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable

import numpy as np

from msplit.analysis.rows.node import (
    ANY,
    ENTRIES,
    FIXED,
    PADDED,
    PLACE,
    VARYING,
    Decide,
    LinearSizes,
    MixedRows,
    Mixes,
    PerRow,
    RowLimits,
    RowState,
    View,
    entries,
    number,
    rule,
    sizes_state,
)
from msplit.shapes.registry import UNKNOWN, Node, Value, axis_of, known
from msplit.shapes.values import LIMIT, TABLE

_LOST = "makes of the number of rows what can not be followed"
_INTEGERS = ("int", "uint")

Linear = tuple[int, int]
"""base + slope * n, either of which may be `UNKNOWN`."""


def linear(sizes: LinearSizes) -> list[Linear]:
    """The numbers one by one."""
    return list(zip(sizes.base.ravel().tolist(), sizes.slope.ravel().tolist(), strict=True))


def asked_sizes(view: View, slot: int) -> list[Linear]:
    """The sizes that an input asks for.

    Raises:
        Mixes: They are not known, or depend on more than the number of rows.
    """
    sizes = view.counts(slot)
    if sizes is None:
        raise Mixes("asks for a shape that is not known beforehand")
    return linear(sizes)


def of_shape(view: View, slot: int) -> RowState:
    """The state of the shape of an input, as a vector.

    Raises:
        Mixes: It depends on more than the number of rows.
    """
    state, shape = view.states[slot], view.inputs[slot]
    if state is FIXED or isinstance(state, LinearSizes):
        return FIXED
    if isinstance(state, RowLimits):
        return sizes_state(np.array([state.what == "splits"], np.int64), np.array([1]))
    if not isinstance(state, PerRow):
        raise Mixes("asks for a shape that can not be followed")
    if state.tells == PADDED:
        raise Mixes(PLACE)
    if shape is None:
        raise Mixes("asks for the shape of what has an unknown number of axes")
    base = np.array([number(size) for size in shape], np.int64)
    slope = np.zeros(len(shape), np.int64)
    if state.group:
        varying = np.zeros(len(shape), np.int64)
        base[state.axis], varying[state.axis] = 0, view.number(ENTRIES + state.group)
        return sizes_state(base, slope, varying)
    base[state.axis], slope[state.axis] = 0, entries(state)
    return sizes_state(base, slope)


@rule("Shape", "ShapeN", sizes=ANY, places=True, each=True)
def shape(view: View) -> list[RowState]:
    """The shape of each input."""
    return [of_shape(view, slot) for slot in range(len(view.states))]


@rule("Size", sizes=ANY)
def size(view: View) -> RowState:
    """The product of a shape."""
    vector = of_shape(view, 0)
    return _product(vector) if isinstance(vector, LinearSizes) else FIXED


rule("Rank", sizes=ANY)(lambda view: FIXED)

ARITHMETIC: dict[str, Decide] = {}
"""By op, the function that computes its result from numbers that depend on the number of rows; filled below."""


def arithmetic(view: View) -> RowState | list[RowState]:
    """Apply an op to numbers that depend on the number of rows.

    Raises:
        Mixes: Something else than such numbers.
    """
    known = ARITHMETIC.get(view.op)
    if known is None:
        raise Mixes("makes data of the number of rows")
    return known(view)


def _linear(view: View, brings: slice, moves: bool) -> list[RowState]:
    """An op whose result is linear in the numbers that some of its input slots bring; all else is fixed.

    Args:
        view: The node.
        brings: The slots.
        moves: True if it computes nothing, so that numbers that depend on what rows are may be among them.
    """
    slots = range(len(view.states))[brings]
    view.only(*slots)
    bases: list[Value | None] = list(view.values)
    slopes: list[Value | None] = list(view.values)
    varying: list[Value | None] = list(view.values)
    for slot in slots:
        taken = _filled(view, slot, moves)
        bases[slot], slopes[slot] = taken.base, taken.slope
        varying[slot] = np.zeros_like(taken.base) if taken.varying is None else taken.varying
    states: list[RowState] = []
    for base, slope, length in zip(*(_evaluated(view, values) for values in (bases, slopes, varying)), strict=True):
        if base is None or slope is None:
            raise Mixes(_LOST)
        states.append(sizes_state(base, slope, length))
    return states


def _linear_ops(*ops: str, brings: slice = slice(0, 1), moves: bool = True) -> None:
    """Registers linear ops, see `_linear`."""
    ARITHMETIC.update(dict.fromkeys(ops, functools.partial(_linear, brings=brings, moves=moves)))


def _evaluated(view: View, values: list[Value | None]) -> list[Value | None]:
    node = Node(view.op, view.attrs, view.inputs, values, [None] * len(values), view.outputs, view.room)
    found = TABLE[view.op](node, view.made)
    listed = found if isinstance(found, list | tuple) else [found]
    return [None if value is None else np.asarray(value) for value in listed]


def _each(function: Callable[[Linear, Linear], Linear]) -> Callable[[View], RowState]:
    """The rule of an op that takes two tensors of numbers and broadcasts them."""

    def apply(view: View) -> RowState:
        first, second = _filled(view, 0), _filled(view, 1)
        if math.prod(np.broadcast_shapes(first.base.shape, second.base.shape)) > LIMIT:
            raise Mixes(_LOST)
        parts = np.broadcast_arrays(first.base, first.slope, second.base, second.slope)
        columns = zip(*(part.ravel().tolist() for part in parts), strict=True)
        found = [function((a, b), (c, d)) for a, b, c, d in columns]
        return _state(found, parts[0].shape)

    return apply


def _filled(view: View, slot: int, varying: bool = False) -> LinearSizes:
    taken, size = view.counts(slot, varying), view.inputs[slot]
    if taken is not None:
        return taken
    if view.states[slot] is not FIXED or not known(size) or math.prod(size) > LIMIT:
        raise Mixes(_LOST)
    return LinearSizes(np.full(size, UNKNOWN), np.zeros(size, np.int64))


def _state(found: list[Linear], size: tuple[int, ...]) -> RowState:
    base, slope = (np.array([item[part] for item in found], np.int64).reshape(size) for part in (0, 1))
    return sizes_state(base, slope)


def _times(first: int, second: int) -> int:
    if first == 0 or second == 0:
        return 0
    return UNKNOWN if UNKNOWN in (first, second) else first * second


def _plus(first: int, second: int) -> int:
    return UNKNOWN if UNKNOWN in (first, second) else first + second


def multiplied(first: Linear, second: Linear) -> Linear:
    """A product, of which one factor at most depends on n."""
    if first[1] != 0 and second[1] != 0:
        raise Mixes("squares the number of rows")
    slope = _plus(_times(first[0], second[1]), _times(first[1], second[0]))
    return _times(first[0], second[0]), slope


def _divided(first: Linear, second: Linear) -> Linear:
    """A quotient without a rest, by a fixed number or of two multiples of n."""
    if UNKNOWN in (*first, *second):
        raise Mixes(_LOST)
    if second[1] == 0 and second[0] > 0 and first[0] % second[0] == 0 and first[1] % second[0] == 0:
        return first[0] // second[0], first[1] // second[0]
    if second[0] == first[0] == 0 and second[1] > 0 and first[1] % second[1] == 0:
        return first[1] // second[1], 0
    raise Mixes("divides the number of rows, with a rest for some")


def _rest(first: Linear, second: Linear) -> Linear:
    if UNKNOWN in (*first, *second) or second[1] != 0 or second[0] <= 0 or first[1] % second[0] != 0:
        raise Mixes(_LOST)
    return first[0] % second[0], 0


def _at_least(first: Linear, second: Linear) -> bool:
    """True if one number is at least as large as the other for every n of at least 1."""
    if UNKNOWN in (*first, *second):
        raise Mixes(_LOST)
    return first[1] >= second[1] and first[0] + first[1] >= second[0] + second[1]


def _larger(first: Linear, second: Linear) -> Linear:
    if _at_least(first, second):
        return first
    if _at_least(second, first):
        return second
    raise Mixes("compares the number of rows with another number")


def _smaller(first: Linear, second: Linear) -> Linear:
    return second if _larger(first, second) == first else first


def _compared(
    always: Callable[[Linear, Linear], bool], never: Callable[[Linear, Linear], bool]
) -> Callable[[View], RowState]:
    """A comparison that has one answer, whatever the number of rows is."""

    def decide(first: Linear, second: Linear) -> Linear:
        if always(first, second) or never(first, second):
            return (0, 0)
        raise Mixes("compares the number of rows with another number")

    return _each(decide)


def _more(first: Linear, second: Linear) -> bool:
    return UNKNOWN not in second and _at_least(first, (second[0] + 1, second[1]))


def limited(view: View) -> RowState:
    """A number that may depend on rows, between limits.

    Keras counts categories up to the largest that it sees, cut off at both ends at the number of categories; ragged tensors count the
    entries of rows up to the last row that has one, and at least, and at most, all rows.
    """
    for state, other, shape in zip(view.states, (1, 0), view.inputs, strict=True):
        counted = view.counts(other)
        if not isinstance(state, MixedRows) or shape != () or counted is None or counted.base.ndim:
            continue
        limit = int(counted.base), int(counted.slope)
        if view.op == "Maximum":
            return MixedRows(state.refusal, limit if state.least is None else _larger(limit, state.least))
        if state.least is not None and _at_least(state.least, limit):
            return sizes_state(counted.base, counted.slope)
    raise Mixes(next(state.refusal for state in view.states if isinstance(state, MixedRows)))


def _broadcast(first: Linear, second: Linear) -> Linear:
    if first == second or second == (1, 0):
        return first
    if first == (1, 0):
        return second
    raise Mixes(_LOST)


def product(sizes: Iterable[Linear]) -> Linear:
    """A product of numbers, of which one at most depends on n."""
    return functools.reduce(multiplied, sizes, (1, 0))


def _product(sizes: LinearSizes) -> RowState:
    if sizes.varying is not None:
        raise Mixes(VARYING)
    return _state([product(linear(sizes))], ())


def _prod(view: View) -> RowState:
    view.fixed(1)
    sizes = view.counts(0)
    if sizes is None or sizes.base.ndim != 1 or [axis_of(axis, 1) for axis in view.whole(1)] != [0]:
        raise Mixes(_LOST)
    found = _product(sizes)
    if isinstance(found, LinearSizes) and view.attr("keep_dims", False):
        return LinearSizes(found.base.reshape(1), found.slope.reshape(1))
    return found


def _cast(view: View) -> RowState:
    sizes = view.counts(0, varying=True)
    if sizes is None or not str(view.attr("DstT", "")).startswith(_INTEGERS):
        raise Mixes("makes data of the number of rows")
    return sizes


def _of_arguments(view: View) -> RowState:
    """The shape that two shapes broadcast to; the shorter one begins with ones."""
    first, second = _filled(view, 0), _filled(view, 1)
    size = max(first.base.size, second.base.size)
    columns = (
        np.pad(part.ravel(), (size - part.size, 0), constant_values=fill).tolist()
        for taken in (first, second)
        for part, fill in ((taken.base, 1), (taken.slope, 0))
    )
    found = [_broadcast((a, b), (c, d)) for a, b, c, d in zip(*columns, strict=True)]
    return _state(found, (size,))


ARITHMETIC.update(
    {
        "Mul": _each(multiplied),
        "Prod": _prod,
        "FloorDiv": _each(_divided),
        "TruncateDiv": _each(_divided),
        "FloorMod": _each(_rest),
        "TruncateMod": _each(_rest),
        "Maximum": _each(_larger),
        "Minimum": _each(_smaller),
        "BroadcastArgs": _of_arguments,
        "Greater": _compared(_more, lambda a, b: _at_least(b, a)),
        "GreaterEqual": _compared(_at_least, lambda a, b: _more(b, a)),
        "Less": _compared(lambda a, b: _more(b, a), _at_least),
        "LessEqual": _compared(lambda a, b: _at_least(b, a), _more),
        "Equal": _compared(lambda a, b: UNKNOWN not in a and a == b, lambda a, b: _more(a, b) or _more(b, a)),
        "NotEqual": _compared(lambda a, b: UNKNOWN not in a and a == b, lambda a, b: _more(a, b) or _more(b, a)),
        "Cast": _cast,
        "ZerosLike": lambda view: FIXED,
        "OnesLike": lambda view: FIXED,
    }
)
_linear_ops(
    "Reshape", "ExpandDims", "Squeeze", "Transpose", "StridedSlice", "Slice", "Gather", "GatherV2", "SplitV", "Unpack"
)
_linear_ops("BroadcastTo", "Tile")
_linear_ops("Neg", "Sum", moves=False)
_linear_ops("Split", "Fill", brings=slice(1, 2))
_linear_ops("Add", "AddV2", "Sub", brings=slice(0, 2), moves=False)
_linear_ops("AddN", brings=slice(None), moves=False)
_linear_ops("Pack", brings=slice(None))
_linear_ops("ConcatV2", brings=slice(0, -1))
_linear_ops("Concat", brings=slice(1, None))
