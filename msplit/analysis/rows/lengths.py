"""Proof that sequences of a model may be padded: which values depend on positions, and where those beyond a row's end have to be hidden.

One pass over a graph, as for independent rows: what is proved of rows there is proved of positions here. What adds up, compares or
multiplies over the positions is right as well where those beyond the end are replaced in front of it by what changes nothing: zeros for a
sum or a product, minus infinity for a softmax or a maximum. Such places are told as masks, which `assignment.cut` writes
into the graph.
What mixes positions in any other way is refused by name.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
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
from msplit.analysis.rows.products import named_axes
from msplit.analysis.rows.walk import RowPass, Setting, Tensor, walked
from msplit.errors import MsplitError
from msplit.flatten.flat import FlatGraph
from msplit.formats.functions import modules_of
from msplit.opset.traits import MERGE, ops_with
from msplit.shapes.infer import inferred, stated_shapes
from msplit.shapes.registry import UNKNOWN, Shape
from msplit.shapes.result import CONTRADICTION, FUNCTIONAL

LAST, MEAN = "last", "mean"
"""Masks that do more than to fill: only the last position of a row stays, or as many are counted as are the row's."""

LOWEST, LARGEST = "lowest", "largest"
"""Fills of a type's own: minus infinity, infinity, or its smallest and largest whole number."""

_MOST_TRIES = 256
"""Ways in which axes of several inputs of a node may belong together, of which so many are tried."""

_HANDS_ON, _VIEWS = ops_with("identity") | ops_with("forwards"), ops_with("view")
InputShapes = Mapping[str, tuple[int | None, ...]]
Hidden = dict[int, tuple[int, str]]
"""By input slot, the axis of positions, and what hides those beyond the end."""

Decide = Callable[[View], tuple[RowState, Hidden]]
_MIXING: dict[str, Decide] = {}
"""Rules of ops that mix positions and are right nevertheless, as long as those beyond the end are hidden."""


@dataclass(frozen=True, slots=True)
class Several(RowState):
    """A tensor with positions along several axes, as scores of attention have them.

    Attributes:
        axes: What is known of each.
    """

    axes: tuple[PerRow, ...]


@dataclass(frozen=True)
class LengthMask:
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
class LengthProof:
    """Proof for a model.

    Attributes:
        inputs: Those that have positions, along their second axis.
        outputs: Of outputs that have some, along which axes.
        masks: By node and input slot.
    """

    inputs: tuple[str, ...]
    outputs: Mapping[str, tuple[int, ...]]
    masks: Mapping[Tensor, LengthMask]


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
        return MixedRows(self.refused(node, why))

    def refused(self, node: int, why: str | Mixes) -> RowDependence:
        """A refusal in terms of positions: rules that are those of rows speak of these."""
        return _worded(super()._mixed(node, why).refusal)

    def _general(self, node: int, sources: list[Tensor]) -> list[RowState] | None:
        op, count = self.graph.ops[node], max(1, len(self.result.outputs[node]))
        taken = [self.state(*source) for source in sources]
        inside = op in MERGE or op in FUNCTIONAL or op in self.setting.functions or op in _HANDS_ON
        if inside or any(isinstance(state, MixedRows) for state in taken):
            found = super()._general(node, sources) or [FIXED] * count
        else:
            try:
                found = self._apart(node, sources, taken)
            except Mixes as why:
                found = [self._mixed(node, why)] * count
            except CONTRADICTION:
                found = [self._mixed(node, "can not be followed")] * count
        moves = op in _HANDS_ON or (op in _VIEWS and found[0] == PerRow(len(self.result.shape(node, 0) or ()) - 1))
        self.zeros |= {(node, 0)} if moves and self.zeros.issuperset(sources[:1]) and sources else set()
        return None if all(state is FIXED for state in found) else found

    def _apart(self, node: int, sources: list[Tensor], taken: list[RowState]) -> list[RowState]:
        """The states of a node's outputs, found for one axis of positions at a time; others are then of a fixed size."""
        shapes, results = [self.result.shape(*source) for source in sources], list[list[RowState]]()
        left = [(slot, number) for slot, state in enumerate(taken) for number in range(len(_axes(state)))]
        if self.graph.ops[node].startswith("Shape"):
            return [_shape(self._view(node, sources, taken, shapes), slot) for slot in range(len(taken))]
        if not any(isinstance(state, Several) for state in taken):
            try:
                return self._along(node, sources, taken, shapes)
            except Mixes:
                if len(left) <= 1:
                    raise
        while left:
            problem = Mixes("puts positions side by side that lie along different axes")
            for chosen in _together(len(taken), left):
                try:
                    states = [self._of(state, chosen.get(slot)) for slot, state in enumerate(taken)]
                    results.append(self._along(node, sources, states, shapes))
                    break
                except Mixes as why:
                    problem = why
            else:
                raise problem
            left = [one for one in left if one not in chosen.items()]
        return [_joined(states) for states in zip(*results, strict=True)]

    def _of(self, state: RowState, chosen: int | None) -> RowState:
        """A state with one of its axes alone, or with none."""
        if isinstance(state, LinearSizes):
            kept = np.zeros_like(state.slope)
            if chosen is not None:
                kept.flat[np.flatnonzero(state.slope)[chosen]] = 1
            if UNKNOWN in state.slope:
                raise Mixes("asks for a shape that is not known beforehand")
            base = np.where(state.base == UNKNOWN, UNKNOWN, state.base + (1 - kept) * state.slope * self.setting.batch)
            return sizes_state(base, kept * state.slope, state.varying)
        axes: Sequence[RowState] = _axes(state)
        return FIXED if chosen is None and axes else axes[chosen or 0] if axes else state

    def _along(self, node: int, sources: list[Tensor], states: list[RowState], shapes: list[Shape]) -> list[RowState]:
        """The states of a node's outputs, of tensors with one axis of positions at most."""
        op, outputs, hidden = self.graph.ops[node], self.result.outputs[node], Hidden()
        if all(state is FIXED for state in states):
            return [FIXED] * max(1, len(outputs))
        view = self._view(node, sources, states, shapes)
        try:
            found = self._by_rule(node, view)
        except Mixes:
            if op not in _MIXING:
                raise
            found, hidden = _MIXING[op](view)
        listed = [_plain(one) for one in (found if isinstance(found, list) else [found] * max(1, len(outputs)))]
        for state, shape in zip(listed, outputs, strict=False):
            if isinstance(state, PerRow):
                self._agrees(state, shape)
        for slot, (axis, fill) in hidden.items():
            is_zero = fill == "0" and sources[slot] in self.zeros and axis == len(shapes[slot] or ()) - 1
            if not is_zero and self.hidden.setdefault((node, slot), (axis, fill)) != (axis, fill):
                raise Mixes("reduces along two axes of positions at once")
        if op == "Softmax" and hidden:
            self.zeros.add((node, 0))
        return listed


def _worded(refusal: RowDependence) -> RowDependence:
    said = refusal.why.replace("place of a row in the batch", "place of a position")
    return replace(refusal, why=re.sub(r"\brow(s?)\b", r"position\1", said))


def _axes(state: RowState) -> Sequence[Any]:
    """The axes of positions of a tensor, or the numbers of a shape that depend on how many there are, by their places."""
    if isinstance(state, LinearSizes):
        return np.flatnonzero(state.slope).tolist()
    return state.axes if isinstance(state, Several) else () if state is FIXED else (state,)


def _joined(states: Iterable[RowState]) -> RowState:
    """The state of a tensor by what it is along each axis of positions."""
    found = sorted((one for one in states if isinstance(one, PerRow)), key=lambda one: one.axis)
    if len(found) < sum(one is not FIXED for one in states) or len({one.axis for one in found}) < len(found):
        raise Mixes("makes of several axes of positions what can not be followed")
    return Several(tuple(found)) if len(found) > 1 else found[0] if found else FIXED


def _together(slots: int, left: Sequence[tuple[int, int]]) -> Iterator[dict[int, int]]:
    """Ways in which the first axis that is left belongs to others, by slot."""
    others = [[*(number for other, number in left if other == slot), None] for slot in range(slots)]
    others[left[0][0]] = [left[0][1]]
    for choice in itertools.islice(itertools.product(*others), _MOST_TRIES):
        yield {slot: number for slot, number in enumerate(choice) if number is not None}


def _plain(state: RowState) -> RowState:
    """A state that may be gone on with: the place of a position is data like any other, as it is the same in a longer sequence."""
    if isinstance(state, PerRow) and state.tells in (NUMBERS, EACH) and not state.group:
        return replace(state, tells="", origin=None)
    chosen = isinstance(state, PerRow) and (state.group or state.tells not in ("", INDICES))
    if chosen or isinstance(state, ListState) or (isinstance(state, LinearSizes) and state.varying is not None):
        raise Mixes("makes of positions what can not be followed")
    return state


def _shape(view: View, slot: int) -> RowState:
    """The state of a shape, which has a number for each axis of positions."""
    axes = _axes(view.states[slot]) if isinstance(view.states[slot], Several) else view.states[slot : slot + 1]
    found = [of_shape(replace(view, states=[one] * len(view.states)), slot) for one in axes]
    sizes = [one for one in found if isinstance(one, LinearSizes)]
    if len(found) == 1 or not sizes:
        return found[0]
    slope = np.sum([one.slope for one in sizes], 0)
    return sizes_state(np.where(slope != 0, 0, sizes[0].base), slope)


def _mixing(*ops: str) -> Callable[[Decide], Decide]:
    """Registers the rule of ops."""

    def register(decide: Decide) -> Decide:
        _MIXING.update(dict.fromkeys(ops, decide))
        return decide

    return register


def _whole(state: PerRow) -> int:
    """The axis of positions that have one place each."""
    if state.outer != 1 or state.inner != 1:
        raise Mixes("takes positions of which each lies in several places")
    return state.axis


def _reduced(view: View, fill: str) -> tuple[RowState, Hidden]:
    axis = _whole(view.alone())
    if axis not in {view.place(0, one) for one in view.whole(1)}:
        raise Mixes("works along the positions")
    if fill == MEAN and not str(view.attr("T", "")).startswith(("float", "bfloat", "double", "half")):
        raise Mixes("takes the mean of whole numbers over the positions")
    return FIXED, {0: (axis, fill)}


_mixing("Sum", "EuclideanNorm", "Any")(partial(_reduced, fill="0"))
_mixing("Prod", "All")(partial(_reduced, fill="1"))
_mixing("Mean")(partial(_reduced, fill=MEAN))
_mixing("Max", "ArgMax")(partial(_reduced, fill=LOWEST))
_mixing("Min", "ArgMin")(partial(_reduced, fill=LARGEST))


@_mixing("Softmax", "LogSoftmax")
def _softmax(view: View) -> tuple[RowState, Hidden]:
    state = view.alone()
    return state, {0: (_whole(state), LOWEST)}


@_mixing("MatMul", *sorted(ops_with("batch matmul")), "BatchMatMulV3")
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


@_mixing("Einsum")
def _einsum(view: View) -> tuple[RowState, Hidden]:
    given, _, result = str(view.attr("equation", "")).replace(" ", "").partition("->")
    terms = [named_axes(term, view.ranked(slot)) for slot, term in enumerate(given.split(","))]
    axes = [_whole(view.rows(slot)) for slot in range(len(terms))]
    (name, *others) = {term[axis] for term, axis in zip(terms, axes, strict=True)}
    if others or name in result or not name.isalpha() or any(term.count(name) > 1 for term in terms):
        raise Mixes("multiplies positions with positions")
    return FIXED, {slot: (axis, "0") for slot, axis in enumerate(axes)}


@_mixing("StridedSlice", "Slice")
def _sliced(view: View) -> tuple[RowState, Hidden]:
    """The first entries of a table, as many as there are positions; or the first position of a sequence, or its last."""
    begin, end = (_numbers(view, slot) for slot in (1, 2))
    masks = [int(view.attr(f"{name}_mask", 0)) for name in ("begin", "end", "new_axis", "shrink_axis")]
    state, place, axis = view.states[0], 0, 0
    if view.op == "StridedSlice" and (view.attr("ellipsis_mask", 0) or {*view.whole(3)} != {1}):
        raise Mixes("cuts positions behind an ellipsis, or in steps")
    for i, (start, stop) in enumerate(zip(begin, end, strict=True)):
        no_begin, no_end, is_new, dropped = (bool(mask >> i & 1) for mask in masks)
        start = (0, 0) if no_begin and not dropped else start
        if state is FIXED and (start, stop, is_new, no_end, dropped) == ((0, 0), (0, 1), False, False, False):
            return PerRow(place), {}
        if (getattr(state, "axis", -1), is_new, dropped) == (axis, False, True):
            return _single(view, start)
        place, axis = place + (is_new or not dropped), axis + (not is_new)
    raise Mixes("takes out others than the first entries of a table, or the first or last position of a sequence")


def _single(view: View, start: tuple[int, int]) -> tuple[RowState, Hidden]:
    axis, is_last = _whole(view.alone()), start == (-1, 0)
    if start != (0, 0) and (not is_last or str(view.attr("T", "")).startswith(("bool", "string", "complex"))):
        raise Mixes("takes another position out than the first or the last")
    return FIXED, {0: (axis, LAST)} if is_last else {}


def _numbers(view: View, slot: int) -> list[tuple[int, int]]:
    """Numbers of an input, each linear in how many positions there are; of one that is not known what is none of them."""
    sizes = view.counts(slot)
    return [(UNKNOWN, 0)] * (view.ranked(slot)[0] or 0) if sizes is None else linear(sizes)


@_mixing("Gather", "GatherV2", "GatherNd")
def _picked(view: View) -> tuple[RowState, Hidden]:
    """Positions that are told by what has no positions, such as a row's length less one: TensorFlow refuses one beyond the end."""
    axis, places = _whole(view.alone()), view.value(1)
    along = axis == (view.place(0, view.whole(2)[0]) if view.op == "GatherV2" else 0)
    if view.op == "GatherNd":
        along, places = axis < (view.ranked(1)[-1] or 0), None if places is None else places[..., axis : axis + 1]
    if not along or (places is not None and places.any()):
        raise Mixes("picks other positions than the first one by fixed numbers")
    return FIXED, {}


@_mixing("Cumsum", "MatrixBandPart")
def _in_order(view: View) -> tuple[RowState, Hidden]:
    """Sums over the positions before each; or what is kept of a square by both places."""
    if view.attr("reverse", False):
        raise Mixes("goes through the positions from their end")
    _whole(state := view.alone())
    return state, {}


@_mixing("Conv2D", "DepthwiseConv2dNative")
def _convolved(view: View) -> tuple[RowState, Hidden]:
    """Windows over neighbours: with as many zeros at both ends whatever the length, where steps are of one position."""
    state, steps = view.alone(), {*view.attr("strides", ()), *(view.attr("dilations", ()) or ())}
    channels_last = not str(view.attr("data_format", "NHWC")).startswith("NC")
    single = view.ranked(1)[state.axis - 1] == 1  # one position each
    padded = view.attr("padding", "") in ("SAME", "VALID" if single else "SAME")
    if steps != {1} or not padded or not 0 < state.axis < 3 or not channels_last:
        raise Mixes("has windows over the positions in steps of more than one, or without padding at both ends")
    return state, {} if single else {0: (_whole(state), "0")}


def lengths_of(flat: FlatGraph, shapes: InputShapes) -> tuple[str, ...]:
    """Inputs with positions: rows are open, and how many positions each has; no shape was given.

    Raises:
        MsplitError: There is none, or one leaves more open.
    """
    found = list[str]()
    for name, shape in stated_shapes(flat).items():
        if name not in shapes and shape is not None and shape[1:2] == (None,):
            if shape[0] is not None or None in shape[2:]:
                what = f"input {name!r} leaves open more than its rows and their length, or has no rows: {list(shape)}"
                raise MsplitError(what, fix=f"say its shape: --shape {name}=1,32,8 (shapes in Python)")
            found.append(name)
    if not found:
        raise MsplitError("no input leaves the length of its rows open", fix="leave --lengths out (lengths in Python)")
    return tuple(found)


def sized_shapes(flat: FlatGraph, inputs: Sequence[str], shapes: InputShapes, rows: int, length: int) -> dict[str, Any]:
    """Shapes of inputs at so many rows, of which those with positions have so many of them; of others those that were given."""
    found: dict[str, Any] = dict(shapes)
    for name, shape in stated_shapes(flat).items():
        if shape and shape[0] is None:
            sizes = [rows, *(found.get(name) or shape)[1:]]
            sizes[1:2] = [length] if name in inputs else sizes[1:2]
            found[name] = tuple(1 if size is None else size for size in sizes)
    return found


def positions_of(flat: FlatGraph, longest: int, shapes: InputShapes) -> LengthProof:
    """Proves that sequences may be padded.

    Args:
        flat: The model.
        longest: Most positions.
        shapes: Whole shapes of inputs without positions.

    Raises:
        MsplitError: They may not; names the op that mixes positions.
    """
    inputs = lengths_of(flat, shapes)
    # Numbers of a shape are linear in rows and in positions: what holds at these holds for all up to the longest.
    sizes = ((2, longest), (1, 1), (3, (longest + 1) // 2))
    found = [_proved(flat, inputs, shapes, *size) for size in sizes]
    if any(one != found[0] for one in found):
        what, fix = (
            "the model computes something else for one position, or one row, than for several",
            "give squeezes their axes",
        )
        raise MsplitError(what, fix=f"{fix}, or prepare it at fixed shapes (--shape)")
    return found[0]


def _proved(flat: FlatGraph, inputs: Sequence[str], shapes: InputShapes, rows: int, length: int) -> LengthProof:
    sized = sized_shapes(flat, inputs, shapes, rows, length)
    result, _ = inferred(flat, rows, sized)
    ends, back = [(tensor, (tensor.node, tensor.port)) for tensor in flat.inputs], flat.back_edges
    given: dict[Tensor, RowState] = {at: PerRow(1) if tensor.name in inputs else FIXED for tensor, at in ends}
    carried = zip(back.dst.tolist(), zip(back.src.tolist(), back.port.tolist(), strict=True), strict=True)
    along = LengthPass(Setting(length, flat.graph.functions), flat.graph, result, given, dict(carried))
    along.run()
    refusals, outputs = list[str](), dict[str, tuple[int, ...]]()
    for tensor in flat.outputs:
        state = along.state(tensor.node, tensor.port)
        axes = [one for one in _axes(state) if one == PerRow(getattr(one, "axis", 0))]
        if isinstance(state, MixedRows):
            refusals.append(str(_worded(state.refusal)))
        elif len(axes) < len(_axes(state)):
            refusals.append(
                str(along.refused(tensor.node, "gives how many positions there are, or some in several places"))
            )
        elif axes:
            outputs[tensor.name] = tuple(one.axis for one in axes)
    masks = _masks(flat, along, walked(flat, rows, sized)[0], refusals)
    if refusals:
        what = "positions of a sequence depend on each other, so that sequences can not be padded"
        fix = "prepare it at fixed shapes (--shape), or write that part by ops that msplit can mask, such as a softmax"
        raise MsplitError(what, details=[*dict.fromkeys(refusals)][:5], fix=fix)
    return LengthProof(tuple(inputs), outputs, masks)


def _masks(flat: FlatGraph, along: LengthPass, by_row: RowPass, refusals: list[str]) -> dict[Tensor, LengthMask]:
    """What hides positions; tensors without rows, of which each had a length, are refused."""
    masks = dict[Tensor, LengthMask]()
    modules = modules_of(flat.model.graph.functions)
    for (node, slot), (axis, fill) in sorted(along.hidden.items()):
        source = flat.graph.inputs(node)[slot]
        state = by_row.state(*source)
        row = state if isinstance(state, PerRow) and not state.tells and not state.group and state.inner else None
        if flat.origin(node)[0] in modules:
            refusal = "is inside of a module that JAX wrote, which stays as it is"
        elif row is not None and row.axis != axis and flat.region[node] < 0:
            masks[node, slot] = LengthMask(axis, fill, len(along.result.shape(*source) or ()), row)
            continue
        else:
            refusal = "is in a loop, or of what requests have in common"
            refusal = state.refusal.why if isinstance(state, MixedRows) else refusal
        refusals.append(str(along.refused(node, f"mixes positions, and {refusal}")))
    return masks


def about_lengths(flat: FlatGraph) -> str:
    """Says whether rows may have any length, and by what; "" where no input leaves open how long they are."""
    try:
        proof = positions_of(flat, 4, {})
    except MsplitError as problem:
        return f"Rows can not be filled up to a length: {'; '.join(problem.details)}." if problem.details else ""
    ops = ", ".join(sorted({flat.graph.ops[node] for node, _ in proof.masks})) or "no op, as none mixes positions"
    return f"Rows of {', '.join(proof.inputs)} may have any length (msplit build --lengths): what lies beyond is hidden from {ops}."
