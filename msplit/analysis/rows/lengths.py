"""Proof that sequences of a model may be padded: which values depend on positions, and where those beyond a row's end have to be hidden.

One pass over a graph, as for independent rows: what is proved of rows there is proved of positions here. What adds up, compares or
multiplies over the positions is right as well where those beyond the end are replaced in front of it by what changes nothing: zeros for a
sum or a product, minus infinity for a softmax or a maximum. Such places are told as masks, which `run.buckets` writes into the graph.
What mixes positions in any other way is refused by name.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from msplit.analysis.rows.counts import linear, of_shape
from msplit.analysis.rows.node import (
    EACH,
    FIXED,
    INDICES,
    NUMBERS,
    LinearSizes,
    ListState,
    MixedRows,
    Mixes,
    PerRow,
    RowDependence,
    RowState,
    View,
    sizes_state,
)
from msplit.analysis.rows.walk import RowPass, Setting, Tensor, walked
from msplit.errors import MsplitError
from msplit.flatten.flat import FlatGraph
from msplit.opset.traits import MERGE, ops_with
from msplit.shapes.infer import inferred, stated_shapes
from msplit.shapes.registry import Shape
from msplit.shapes.result import CONTRADICTION, FUNCTIONAL

LAST, MEAN = "last", "mean"
"""Masks that do more than to fill: only the last position of a row stays, or entries are weighted by how many of all are the row's."""

LOWEST, LARGEST = "lowest", "largest"
"""Fills of a type's own: minus infinity, infinity, or its smallest and largest whole number."""

_FILLS: Mapping[str, str] = {
    "Sum": "0", "EuclideanNorm": "0", "Mean": MEAN, "Prod": "1", "Max": LOWEST, "ArgMax": LOWEST, "Min": LARGEST, "ArgMin": LARGEST,
    "All": "1", "Any": "0",
}  # fmt: skip
"""By op that reduces, what hides a position from it."""

_MOST_TRIES = 256
"""Ways in which axes of several inputs of a node may belong together, of which so many are tried."""

_HANDS_ON = ops_with("identity") | ops_with("forwards")
_MOVES = frozenset({"Cast", "ExpandDims", "Reshape", "Squeeze", "StridedSlice", "Transpose"})
_PRODUCTS = ops_with("batch matmul") | {"BatchMatMulV3", "MatMul"}
_SIZES = frozenset({(2, 17), (1, 1), (3, 8)})
"""Rows and positions at which graphs are looked at besides the longest: numbers of a shape are linear in each, so that these tell for all."""

Hidden = dict[int, tuple[int, str]]
"""By input slot, the axis of positions, and what hides those beyond the end."""


@dataclass(frozen=True, slots=True)
class Several(RowState):
    """A tensor with positions along several axes, as scores of attention have them.

    Attributes:
        axes: What is known of each.
    """

    axes: tuple[PerRow, ...]


@dataclass(frozen=True)
class Mask:
    """What hides positions beyond the end of each row, in front of an input of a node.

    Attributes:
        axis: Axis of the positions.
        fill: What they become; a word above, or a number as text.
        rank: Axes of the tensor.
        rows: Where its rows lie.
    """

    axis: int
    fill: str
    rank: int
    rows: PerRow


@dataclass(frozen=True)
class Positions:
    """Proof for a model.

    Attributes:
        inputs: Those that have positions, along their second axis.
        outputs: Of outputs that have some, along which axes.
        masks: By node and input slot.
    """

    inputs: tuple[str, ...]
    outputs: Mapping[str, tuple[int, ...]]
    masks: Mapping[Tensor, Mask]


@dataclass(eq=False)
class LengthPass(RowPass):
    """A pass over a graph in which a row is a position. See `RowPass`.

    Attributes:
        hidden: By node and input slot, what has to be hidden.
        zeros: Tensors that are 0 beyond the end along their last axis.
    """

    hidden: dict[Tensor, tuple[int, str]] = field(default_factory=dict)
    zeros: set[Tensor] = field(default_factory=set)

    def _mixed(self, node: int, why: str | Mixes) -> MixedRows:
        refusal = super()._mixed(node, why).refusal
        said = refusal.why.replace("place of a row in the batch", "place of a position")
        return MixedRows(replace(refusal, why=re.sub(r"\brow(s?)\b", r"position\1", said)))

    def _general(self, node: int, sources: list[Tensor]) -> list[RowState] | None:
        op, outputs = self.graph.ops[node], self.result.outputs[node]
        taken = [self.state(*source) for source in sources]
        shapes = [self.result.shape(*source) for source in sources]
        count = max(1, len(outputs))
        inside = op in MERGE or op in FUNCTIONAL or op in self.setting.functions
        if op in _HANDS_ON and sources[:1] and sources[0] in self.zeros:
            self.zeros.add((node, 0))
        if inside or op in _HANDS_ON or any(isinstance(state, MixedRows) for state in taken):
            return super()._general(node, sources)
        try:
            if op in ("Shape", "ShapeN"):
                found: list[RowState] = [
                    _shape(self._view(node, sources, taken, shapes), slot) for slot in range(count)
                ]
            else:
                found = self._apart(node, sources, taken, shapes)
            for state, shape in zip(found, outputs, strict=False):
                for one in _axes(state):
                    if isinstance(one, PerRow):
                        self._agrees(one, shape)
        except Mixes as why:
            return [self._mixed(node, why)] * count
        except CONTRADICTION:
            return [self._mixed(node, "can not be followed")] * count
        last = len(outputs[0] or ()) - 1 if outputs else -1
        if op in _MOVES and sources[0] in self.zeros and isinstance(found[0], PerRow) and found[0].axis == last:
            self.zeros.add((node, 0))
        return None if all(state is FIXED for state in found) else found

    def _apart(self, node: int, sources: list[Tensor], taken: list[RowState], shapes: list[Shape]) -> list[RowState]:
        """The states of a node's outputs, found for one axis of positions at a time; others are then of a fixed size."""
        axes = [_axes(state) for state in taken]
        if all(len(some) <= 1 or isinstance(state, LinearSizes) for some, state in zip(axes, taken, strict=True)):
            try:
                return self._along(node, sources, taken, shapes)
            except Mixes:
                if sum(map(len, axes)) <= 1:
                    raise
        left = [(slot, number) for slot, some in enumerate(axes) for number in range(len(some))]
        results: list[list[PerRow]] = []
        while left:
            problem = Mixes("puts positions side by side that lie along different axes")
            for chosen in _together(axes, shapes, left):
                states = [self._of(state, chosen.get(slot)) for slot, state in enumerate(taken)]
                try:
                    found = self._along(node, sources, states, shapes)
                    break
                except Mixes as why:
                    problem = why
            else:
                raise problem
            left = [one for one in left if one not in chosen.items()]
            results = results or [[] for _ in found]
            for several, state in zip(results, found, strict=True):
                if state is not FIXED and (
                    not isinstance(state, PerRow) or state.axis in [one.axis for one in several]
                ):
                    raise Mixes("makes of several axes of positions what can not be followed")
                several += [state] if isinstance(state, PerRow) else []
        return [_joined(several) for several in results]

    def _of(self, state: RowState, chosen: int | None) -> RowState:
        """A state with one of its axes alone, or with none."""
        if not isinstance(state, LinearSizes):
            return (
                state if not isinstance(state, PerRow | Several) else FIXED if chosen is None else _axes(state)[chosen]
            )
        if chosen is None:
            return FIXED
        kept = np.zeros_like(state.slope)
        kept.flat[np.flatnonzero(state.slope)[chosen]] = 1
        return sizes_state(
            state.base + (1 - kept) * state.slope * self.setting.batch, kept * state.slope, state.varying
        )

    def _along(self, node: int, sources: list[Tensor], states: list[RowState], shapes: list[Shape]) -> list[RowState]:
        """The states of a node's outputs, of tensors with one axis of positions at most."""
        op, view = self.graph.ops[node], self._view(node, sources, states, shapes)
        hidden = Hidden()
        if all(state is FIXED for state in states):
            return [FIXED] * max(1, len(self.result.outputs[node]))
        try:
            found = self._by_rule(node, view)
        except Mixes:
            if op not in _MIXING:
                raise
            found, hidden = _MIXING[op](view)
        listed = found if isinstance(found, list) else [found] * max(1, len(self.result.outputs[node]))
        listed = [_plain(state) for state in listed]
        for slot, (axis, fill) in hidden.items():
            if fill != "0" or sources[slot] not in self.zeros or axis != len(shapes[slot] or ()) - 1:
                if self.hidden.setdefault((node, slot), (axis, fill)) != (axis, fill):
                    raise Mixes("reduces along two axes of positions at once")
        if op == "Softmax" and hidden:
            self.zeros.add((node, 0))
        return listed


def _axes(state: RowState) -> Sequence[object]:
    """The axes of positions of a tensor, or the numbers of a shape that depend on how many there are."""
    if isinstance(state, Several):
        return state.axes
    if isinstance(state, LinearSizes):
        return np.flatnonzero(state.slope).tolist()
    return () if state is FIXED else (state,)


def _joined(axes: Sequence[PerRow]) -> RowState:
    return Several(tuple(sorted(axes, key=lambda one: one.axis))) if len(axes) > 1 else axes[0] if axes else FIXED


def _together(
    axes: Sequence[Sequence[object]], shapes: Sequence[Shape], left: Sequence[tuple[int, int]]
) -> Iterator[dict[int, int]]:
    """Ways in which the first axis that is left belongs to others, by slot: those that are as far from the end come first."""

    def behind(slot: int, number: int) -> int:
        one = axes[slot][number]
        if isinstance(one, PerRow):
            return len(shapes[slot] or ()) - one.axis
        assert isinstance(one, int)
        return ((shapes[slot] or (1,))[0] or 1) - one

    first, number = left[0]
    others: list[list[int | None]] = [
        [number]
        if slot == first
        else [
            *sorted(
                (k for other, k in left if other == slot), key=lambda k: abs(behind(slot, k) - behind(first, number))
            ),
            None,
        ]
        for slot in range(len(axes))
    ]
    for choice in itertools.islice(itertools.product(*others), _MOST_TRIES):
        yield {slot: k for slot, k in enumerate(choice) if k is not None}


def _plain(state: RowState) -> RowState:
    """A state that may be gone on with: the place of a position is data like any other, as it is the same in a longer sequence."""
    if isinstance(state, PerRow):
        if state.tells in (NUMBERS, EACH):
            state = replace(state, tells="", origin=None)
        if state.group or state.tells not in ("", INDICES):
            raise Mixes("chooses positions by what is in them")
    elif (isinstance(state, LinearSizes) and state.varying is not None) or isinstance(state, ListState):
        raise Mixes("makes of positions what can not be followed")
    return state


def _shape(view: View, slot: int) -> RowState:
    state = view.states[slot]
    if not isinstance(state, Several):
        return of_shape(view, slot)
    found = [
        of_shape(replace(view, states=[*view.states[:slot], one, *view.states[slot + 1 :]]), slot) for one in state.axes
    ]
    sizes = [one for one in found if isinstance(one, LinearSizes)]
    slope = sum((one.slope for one in sizes), np.zeros_like(sizes[0].slope))
    return sizes_state(np.where(slope != 0, 0, sizes[0].base), slope)


def _whole(state: PerRow) -> int:
    """The axis of positions that have one place each."""
    if state.outer != 1 or state.inner != 1:
        raise Mixes("takes positions of which each lies in several places")
    return state.axis


def _reduced(view: View) -> tuple[RowState, Hidden]:
    axis = _whole(view.alone())
    if axis not in {view.place(0, one) for one in view.whole(1)}:
        raise Mixes("works along the positions")
    if view.op == "Mean" and not str(view.attr("T", "")).startswith(("float", "bfloat", "double", "half")):
        raise Mixes("takes the mean of whole numbers over the positions")
    return FIXED, {0: (axis, _FILLS[view.op])}


def _softmax(view: View) -> tuple[RowState, Hidden]:
    state = view.alone()
    return state, {0: (_whole(state), LOWEST)}


def _product(view: View) -> tuple[RowState, Hidden]:
    """A product that adds up over the positions of both operands."""
    hidden = Hidden()
    for slot, names in enumerate((("adj_x", "transpose_a"), ("adj_y", "transpose_b"))):
        turned = any(bool(view.attr(name, False)) for name in names)
        axis = _whole(view.rows(slot))
        if axis - len(view.ranked(slot)) != (-1 if turned == bool(slot) else -2):
            raise Mixes("multiplies positions with positions")
        hidden[slot] = axis, "0"
    return FIXED, hidden


def _einsum(view: View) -> tuple[RowState, Hidden]:
    given, _, result = str(view.attr("equation", "")).replace(" ", "").partition("->")
    hidden, names = Hidden(), set[str]()
    for slot, term in enumerate(given.split(",")):
        axis, rank = _whole(view.rows(slot)), len(view.ranked(slot))
        before, dots, behind = term.partition("...")
        spread = [*before, *["."] * (rank - len(before) - len(behind)), *behind] if dots else list(term)
        names.add(spread[axis])
        if term.count(spread[axis]) != 1:
            raise Mixes("takes the diagonal of the positions")
        hidden[slot] = axis, "0"
    if len(names) != 1 or names & {*result, "."}:
        raise Mixes("multiplies positions with positions")
    return FIXED, hidden


def _sliced(view: View) -> tuple[RowState, Hidden]:
    """The first positions of a table, as many as there are; or the first position of a sequence, or its last."""
    rank, slots = len(view.ranked(0)), range(len(view.ranked(1)) and (view.ranked(1)[0] or 0))
    begin, end = (_numbers(view, slot) for slot in (1, 2))
    ones = view.whole(3) if view.op == "StridedSlice" else [1] * len(begin)
    masks = {
        name: int(view.attr(f"{name}_mask", 0)) for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    }
    place = axis = 0
    for i in slots:
        if masks["ellipsis"] >> i & 1:
            skipped = rank - sum(not (masks["ellipsis"] | masks["new_axis"]) >> k & 1 for k in slots)
            place, axis = place + skipped, axis + skipped
            continue
        if masks["new_axis"] >> i & 1:
            place += 1
            continue
        start = (0, 0) if masks["begin"] >> i & 1 else begin[i]
        dropped = bool(masks["shrink_axis"] >> i & 1)
        if view.states[0] is FIXED and end[i] is not None and end[i][1] and not masks["end"] >> i & 1:
            view.only(1, 2)
            if start != (0, 0) or end[i] != (0, 1) or ones[i] != 1 or dropped:
                raise Mixes(
                    "cuts a part of a table that does not begin at its first entry, or is not as long as the sequence"
                )
            return PerRow(place), {}
        if isinstance(state := view.states[0], PerRow) and state.axis == axis and view.op == "StridedSlice":
            view.only(0)
            if dropped and start in ((0, 0), (-1, 0)) and ones[i] == 1:
                return FIXED, {} if start == (0, 0) else {0: (_whole(state), LAST)}
            raise Mixes("takes other positions out than the first or the last, or some of them")
        place, axis = place + (not dropped), axis + 1
    raise Mixes("cuts positions")


def _numbers(view: View, slot: int) -> list[tuple[int, int] | None]:
    sizes = view.counts(slot)
    return [None] * 64 if sizes is None else [*linear(sizes)]


def _picked(view: View) -> tuple[RowState, Hidden]:
    """Positions that are told by what has no positions, such as a row's length less one: TensorFlow refuses one beyond the end."""
    held, places = view.rows(0), view.value(1)
    view.only(0)
    _whole(held)
    if view.op == "GatherNd":
        along = held.axis < (view.ranked(1)[-1] or 0)
        places = None if places is None else places[..., held.axis]
    else:
        along = held.axis == (view.place(0, view.whole(2)[0]) if view.op == "GatherV2" else 0)
    if not along or (places is not None and places.any()):
        raise Mixes("picks other positions than the first one by fixed numbers")
    return FIXED, {}


def _summed_up(view: View) -> tuple[RowState, Hidden]:
    """Sums over the positions before each."""
    state = view.alone()
    if view.attr("reverse", False):
        raise Mixes("goes through the positions from their end")
    return state, {} if _whole(state) >= 0 else {}


def _band(view: View) -> tuple[RowState, Hidden]:
    return view.alone(), {}


def _convolved(view: View) -> tuple[RowState, Hidden]:
    """Windows over neighbours: with as many zeros at both ends whatever the length, where steps are of one position."""
    state = view.alone()
    steps, widened = view.attr("strides", ()), view.attr("dilations", ()) or (1,)
    nhwc = not str(view.attr("data_format", "NHWC")).startswith("NC")
    if {*steps} != {1} or {*widened} != {1} or view.attr("padding", "") != "SAME" or not 0 < state.axis < 3 or not nhwc:
        raise Mixes("has windows over the positions in steps of more than one, or without padding at both ends")
    return state, {0: (_whole(state), "0")}


_MIXING: dict[str, Callable[[View], tuple[RowState, Hidden]]] = {
    **dict.fromkeys(_FILLS, _reduced),
    **dict.fromkeys(("Softmax", "LogSoftmax"), _softmax),
    **dict.fromkeys(_PRODUCTS, _product),
    **dict.fromkeys(("StridedSlice", "Slice"), _sliced),
    **dict.fromkeys(("Gather", "GatherV2", "GatherNd"), _picked),
    **dict.fromkeys(("Conv2D", "DepthwiseConv2dNative"), _convolved),
    "Einsum": _einsum,
    "Cumsum": _summed_up,
    "MatrixBandPart": _band,
}
"""Ops that mix positions and are right nevertheless, as long as those beyond the end are hidden."""


def lengths_of(flat: FlatGraph, shapes: Mapping[str, tuple[int | None, ...]]) -> tuple[str, ...]:
    """Inputs with positions: rows are open, and how many positions each has; no shape was given.

    Raises:
        MsplitError: There is none, or one leaves more open.
    """
    found = []
    for name, shape in stated_shapes(flat).items():
        if name in shapes or shape is None or len(shape) < 2 or shape[1] is not None:
            continue
        if shape[0] is not None or None in shape[2:]:
            raise MsplitError(
                f"input {name!r} leaves open {list(shape)}: more than its rows and their length, or no rows",
                fix=f"say its shape: --shape {name}=1,32,8 (shapes in Python)",
            )
        found.append(name)
    if not found:
        raise MsplitError("no input leaves the length of its rows open", fix="leave --lengths out (lengths in Python)")
    return tuple(found)


def sized_shapes(
    flat: FlatGraph, inputs: Sequence[str], shapes: Mapping[str, tuple[int | None, ...]], rows: int, length: int
) -> dict[str, Any]:
    """Shapes of inputs at so many rows, of which those with positions have so many of them; of others those that were given."""
    found: dict[str, Any] = dict(shapes)
    for name, shape in stated_shapes(flat).items():
        if shape and shape[0] is None:
            sizes = [rows, *(found.get(name) or shape)[1:]]
            sizes[1:2] = [length] if name in inputs else sizes[1:2]
            found[name] = tuple(1 if size is None else size for size in sizes)
    return found


def positions_of(flat: FlatGraph, longest: int, shapes: Mapping[str, tuple[int | None, ...]]) -> Positions:
    """Proves that sequences may be padded.

    Args:
        flat: The model.
        longest: Most positions.
        shapes: Whole shapes of inputs without positions.

    Raises:
        MsplitError: They may not; names the op that mixes positions.
    """
    inputs = lengths_of(flat, shapes)
    found = [_proved(flat, inputs, shapes, *sizes) for sizes in ((2, max(longest, 2)), *sorted(_SIZES))]
    if any(one != found[0] for one in found):
        what = "the model computes something else for one position, or for one row, than for several"
        raise MsplitError(
            what, fix="give the axes of squeezes and the sizes of reshapes, or prepare it at fixed shapes"
        )
    return found[0]


def _proved(
    flat: FlatGraph, inputs: Sequence[str], shapes: Mapping[str, tuple[int | None, ...]], rows: int, length: int
) -> Positions:
    sized = sized_shapes(flat, inputs, shapes, rows, length)
    result, _ = inferred(flat, rows, sized)
    given: dict[Tensor, RowState] = {
        (tensor.node, tensor.port): PerRow(1) if tensor.name in inputs else FIXED for tensor in flat.inputs
    }
    back = flat.back_edges
    goes_back = dict(zip(back.dst.tolist(), zip(back.src.tolist(), back.port.tolist(), strict=True), strict=True))
    along = LengthPass(Setting(length, flat.graph.functions), flat.graph, result, given, goes_back)
    along.run()
    by_row, _ = walked(flat, rows, sized)
    refusals, outputs = list[RowDependence](), dict[str, tuple[int, ...]]()
    for tensor in flat.outputs:
        state = along.state(tensor.node, tensor.port)
        axes = state.axes if isinstance(state, Several) else (state,)
        if isinstance(state, MixedRows):
            refusals.append(state.refusal)
        elif state is not FIXED:
            if any(not isinstance(one, PerRow) or one != PerRow(one.axis) or not one.axis for one in axes):
                what = "gives the number of positions, or several of them at one place"
                refusals.append(RowDependence(flat.graph.names[tensor.node], flat.graph.ops[tensor.node], what))
            outputs[tensor.name] = tuple(one.axis for one in axes if isinstance(one, PerRow))
    masks = dict[Tensor, Mask]()
    wanted = flat.graph.ancestors([tensor.node for tensor in flat.outputs])
    for (node, slot), (axis, fill) in along.hidden.items():
        source, port = flat.graph.inputs(node)[slot]
        state, size = by_row.state(source, port), result.shape(source, port)
        if not wanted[node]:
            continue
        if (
            not isinstance(state, PerRow)
            or state.tells
            or state.group
            or state.inner is None
            or state.axis == axis
            or size is None
        ):
            why = state.refusal.why if isinstance(state, MixedRows) else "has no rows there"
            refusals.append(RowDependence(flat.graph.names[node], flat.graph.ops[node], f"mixes positions, and {why}"))
            continue
        masks[node, slot] = Mask(axis, fill, len(size), state)
    if refusals:
        raise MsplitError(
            "positions of a sequence depend on each other, so that sequences can not be padded",
            details=[str(one) for one in dict.fromkeys(refusals)][:5],
            fix="prepare it at fixed shapes (--shape), or mask the op's input by the length of each row",
        )
    return Positions(tuple(inputs), outputs, dict(sorted(masks.items())))
