"""Ops that work element by element, with broadcasting, and those that treat vectors, matrices or items one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from msplit.analysis.rows.node import View, agreed, not_along, refused_input, rule, rules
from msplit.analysis.rows.states import FIXED, Mixes, PerRow, State
from msplit.opset.traits import ops_with
from msplit.shapes.registry import Shape

PER_ELEMENT = ops_with("per element")

_CORES = {"per vector": 1, "per matrix": 2, "per image": 3}
"""How many axes from the last on an op treats as a whole, by trait."""


def broadcast(states: Sequence[State], shapes: Sequence[Shape]) -> PerRow:
    """The state of what tensors are broadcast to.

    Raises:
        Mixes: Rows meet other rows, or what is fixed has an entry for each.
    """
    alone = states[0] if len(states) == 1 or all(shape == () for shape in shapes[1:]) else None
    if isinstance(alone, PerRow) and all(state is FIXED for state in states[1:]):
        return alone
    found: list[PerRow] = []
    top = 0
    for slot, (state, shape) in enumerate(zip(states, shapes, strict=True)):
        if shape is None:
            raise Mixes(f"takes input {slot}, whose number of axes is not known")
        top = max(top, len(shape))
        if isinstance(state, PerRow):
            # Counted from the last axis until all are known: that is how TensorFlow matches them.
            found.append(replace(state, axis=state.axis - len(shape)))
        elif state is not FIXED:
            raise Mixes(refused_input(state, slot))
    result = agreed(found)
    for slot, (state, shape) in enumerate(zip(states, shapes, strict=True)):
        if state is FIXED and shape is not None and len(shape) >= -result.axis and shape[result.axis] != 1:
            raise Mixes(f"takes input {slot}, which is fixed and has more than one entry along the rows")
    return replace(result, axis=result.axis + top)


@rules(PER_ELEMENT)
def per_element(view: View) -> State:
    """All inputs are broadcast."""
    return broadcast(view.states, view.inputs)


@rule("Select")
def select(view: View) -> State:
    """The condition may be a vector that chooses along the first axis."""
    condition = view.ranked(0)
    if len(condition) != 1:
        return broadcast(view.states, view.inputs)
    first = [1] * (len(view.ranked(1)) - 1)
    return broadcast(view.states, [(*condition, *first), *view.inputs[1:]])


@rule("SelectV2")
def select_v2(view: View) -> State:
    """All three are broadcast."""
    return broadcast(view.states, view.inputs)


def _core(view: View, size: int) -> State:
    """The last `size` axes are treated as a whole; rows lie along one before, in every input that is not a parameter."""
    found = []
    for slot, state in enumerate(view.states):
        if isinstance(state, PerRow):
            found.append(state)
            if len(view.ranked(slot)) != len(view.ranked(0)):
                raise Mixes("takes rows along different axes")
            if state.axis >= len(view.ranked(slot)) - size:
                raise Mixes("works along the rows" if size == 1 else f"works on the last {size} axes as a whole")
        elif slot == 0 or state is not FIXED or len(view.ranked(slot)) > 1:
            raise Mixes(refused_input(state, slot))
    return agreed(found)


rules(ops_with("per vector"))(lambda view: _core(view, 1))
rules(ops_with("per matrix"))(lambda view: _core(view, 2))
rules(ops_with("per image"))(lambda view: _core(view, 3))


@rules(ops_with("per item"))
def per_item(view: View) -> PerRow:
    """Items along the first axis, by themselves; all else is a parameter."""
    state = view.rows(0)
    view.only(0)
    if state.axis != 0:
        raise Mixes("takes rows for what lies inside of an item")
    if not str(view.attr("data_format", "N")).startswith("N"):
        raise Mixes("has its items along another axis than the first")
    for name in ("strides", "ksize", "ksizes", "dilations", "rates"):
        given = view.attr(name)
        if isinstance(given, tuple) and len(given) > 3 and given[0] != 1:
            raise Mixes("has a window over several items")
    return state


@rule("MaxPoolV2")
def max_pool_v2(view: View) -> State:
    """Pooling whose window is an input."""
    if view.whole(1)[0] != 1 or view.whole(2)[0] != 1:
        raise Mixes("has a window over several items")
    return per_item(view)


@rule("MaxPoolWithArgmax")
def max_pool_with_argmax(view: View) -> State:
    """Places may be counted over the whole batch."""
    if view.attr("include_batch_in_index", False):
        raise Mixes("counts places over the whole batch")
    return per_item(view)


@rule("Conv2DBackpropInput", "Conv3DBackpropInputV2", "DepthwiseConv2dNativeBackpropInput", sizes=(0,))
def transposed_convolution(view: View) -> State:
    """A convolution whose result has a given shape, that of the batch included."""
    view.fixed(1)
    state = view.rows(2)
    sizes = view.counts(0)
    if state.axis != 0 or sizes is None:
        raise Mixes("takes rows for what lies inside of an item")
    spatial = 3 if "3D" in view.op else 2
    if sizes.base.size != spatial and (
        sizes.base[0] != 0 or sizes.slope[0] != state.outer * (state.inner or 0) or sizes.slope[1:].any()
    ):
        raise Mixes("gives a batch of another size than it takes")
    return state


def channels(view: View, slot: int = 0) -> int:
    """Axis of the channels by the data format."""
    rank = len(view.ranked(slot))
    return 1 if str(view.attr("data_format", "NHWC")).startswith("NC") else rank - 1


@rule("BiasAdd", "BiasAddV1")
def bias_add(view: View) -> State:
    """A fixed vector along the channels."""
    state = view.rows(0)
    view.only(0)
    not_along(state, channels(view), "adds a bias along the rows")
    return state


@rule(*sorted(ops_with("batch norm")), "_FusedBatchNormEx")
def batch_norm(view: View) -> list[State]:
    """By fixed statistics; those of the batch come from all rows."""
    if view.attr("is_training", True):
        raise Mixes("normalizes by the mean and variance of the batch")
    state = agreed(view.rows(slot) for slot in (0, 5) if slot < len(view.states))
    view.only(0, 5)
    not_along(state, channels(view), "normalizes along the rows")
    return [state, *[FIXED] * 5]


@rule("SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits")
def cross_entropy(view: View) -> State:
    """A loss for each row of logits and labels, and its gradient."""
    state = agreed([view.rows(0), view.rows(1)])
    not_along(state, 1, "works along the rows")
    return state


@rule("InTopK", "InTopKV2")
def in_top_k(view: View) -> State:
    """Whether a target is among the largest of its row."""
    view.only(0, 1)
    state = agreed([view.rows(0), view.rows(1)])
    not_along(state, 1, "works along the rows")
    return state


@rule("LowerBound", "UpperBound")
def bound(view: View) -> State:
    """The place of each value in a sorted vector, one per row or one for all."""
    values = view.rows(1)
    if view.states[0] is FIXED and values.axis == 1:
        return values
    state = agreed([view.rows(0), values])
    not_along(state, 1, "looks rows up in each other")
    return state


@rule("CombinedNonMaxSuppression")
def suppression(view: View) -> State:
    """The best boxes of each image."""
    view.only(0, 1)
    state = agreed([view.rows(0), view.rows(1)])
    if state.axis != 0:
        raise Mixes("takes rows for what lies inside of an item")
    return state


@rule("LookupTableFind", "LookupTableFindV2")
def find(view: View) -> State:
    """A key at a time, in a table that stays as it is."""
    view.only(1)
    return view.rows(1)


@rule("DecodeCSV")
def decode_csv(view: View) -> State:
    """A record at a time; the defaults are fixed."""
    view.only(0)
    return view.rows(0)


def _cell(view: View, axis: int, slots: Mapping[int, int]) -> State:
    """A step of a recurrent cell, or all of them.

    Args:
        view: The node.
        axis: Axis of the rows in what it gives.
        slots: By input slot that of the inputs that have rows; all others are weights.
    """
    view.only(*slots)
    found = []
    for slot, place in slots.items():
        state = view.rows(slot)
        not_along(state, len(view.ranked(slot)) - 1, "works along the rows")
        if state.axis != place:
            raise Mixes(f"takes rows along axis {state.axis} of input {slot}")
        found.append(replace(state, axis=axis))
    return agreed(found)


rule("LSTMBlockCell")(lambda view: _cell(view, 0, {0: 0, 1: 0, 2: 0}))
rule("GRUBlockCell")(lambda view: _cell(view, 0, {0: 0, 1: 0}))
rule("BlockLSTM", "BlockLSTMV2")(lambda view: _cell(view, 1, {1: 1, 2: 0, 3: 0}))
