"""Rules of independent rows for ops by element or by row, and for lists, loops and choices.

Ops that work element by element, with broadcasting, and those that treat vectors, matrices or items one by one.

Lists, arrays, loops and choices: fixed as long as how often and which one does not depend on rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from msplit.analysis.rows.node import (
    ANY,
    FIXED,
    Array,
    ListState,
    MixedRows,
    Mixes,
    PerRow,
    RowLimits,
    RowState,
    View,
    agreed,
    either,
    merged,
    not_along,
    refused_input,
    rule,
    rules,
)
from msplit.core.graph import Function
from msplit.opset.traits import ops_with
from msplit.shapes.registry import Shape
from msplit.shapes.result import Result

PER_ELEMENT = ops_with("per element")

_CORES = {"per vector": 1, "per matrix": 2, "per image": 3}
"""Number of axes, from the last on, that an op treats as a whole, by trait."""


def broadcast(states: Sequence[RowState], shapes: Sequence[Shape]) -> PerRow:
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


_MOVED = dict.fromkeys(("Minimum behind ends", "Maximum before starts"), "within")
_MOVED |= {"AddV2 starts on": "behind", "AddV2 ends back": "before"}
"""What becomes of places of rows, by the op and what it takes."""


@rules(PER_ELEMENT | {"SelectV2"})
def per_element(view: View) -> RowState:
    """All inputs are broadcast. Of ragged rows, ends less starts are lengths; starts that are moved on, or ends that are moved back, may be
    limited by each other."""
    first, last = view.states[0], view.states[-1]
    if not isinstance(first, RowLimits):
        return broadcast(view.states, view.inputs)
    what = f"{view.op} {first.what}"
    if isinstance(last, RowLimits) and last.choice == first.choice:
        what = f"{what} {last.what}"
    elif view.op == "AddV2" and view.shape(1) == ():
        what += " on" if view.whole(1)[0] >= 0 else " back"
    if what == "Sub ends starts":
        view.counted[f"{view.key}:0"] = first.choice
        return PerRow(0)
    if what not in _MOVED:
        raise Mixes(refused_input(first, 0))
    return replace(first, what=_MOVED[what])


@rule("Select")
def select(view: View) -> RowState:
    """The condition may be a vector that chooses along the first axis."""
    condition = view.ranked(0)
    if len(condition) != 1:
        return broadcast(view.states, view.inputs)
    first = [1] * (len(view.ranked(1)) - 1)
    return broadcast(view.states, [(*condition, *first), *view.inputs[1:]])


def _core(view: View, size: int) -> RowState:
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


for trait, axes in _CORES.items():
    rules(ops_with(trait))(functools.partial(_core, size=axes))


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
def max_pool_v2(view: View) -> RowState:
    """Pooling whose window is an input."""
    if view.whole(1)[0] != 1 or view.whole(2)[0] != 1:
        raise Mixes("has a window over several items")
    return per_item(view)


@rule("MaxPoolWithArgmax")
def max_pool_with_argmax(view: View) -> RowState:
    """Places may be counted over the whole batch."""
    if view.attr("include_batch_in_index", False):
        raise Mixes("counts places over the whole batch")
    return per_item(view)


@rule("Conv2DBackpropInput", "Conv3DBackpropInputV2", "DepthwiseConv2dNativeBackpropInput", sizes=(0,))
def transposed_convolution(view: View) -> RowState:
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
def bias_add(view: View) -> RowState:
    """A fixed vector along the channels."""
    state = view.rows(0)
    view.only(0)
    not_along(state, channels(view), "adds a bias along the rows")
    return state


@rule(*sorted(ops_with("batch norm")), "_FusedBatchNormEx")
def batch_norm(view: View) -> list[RowState]:
    """By fixed statistics; those of the batch come from all rows."""
    if view.attr("is_training", True):
        raise Mixes("normalizes by the mean and variance of the batch")
    state = agreed(view.rows(slot) for slot in (0, 5) if slot < len(view.states))
    view.only(0, 5)
    not_along(state, channels(view), "normalizes along the rows")
    return [state, *[FIXED] * 5]


@rule("SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits", "InTopK", "InTopKV2")
def cross_entropy(view: View) -> RowState:
    """A loss for each row of logits and labels, and its gradient; or whether a label is among the largest of its row."""
    view.only(0, 1)
    state = agreed([view.rows(0), view.rows(1)])
    not_along(state, 1, "works along the rows")
    return state


@rule("LowerBound", "UpperBound")
def bound(view: View) -> RowState:
    """The place of each value in a sorted vector, one per row or one for all."""
    values = view.rows(1)
    if view.states[0] is FIXED and values.axis == 1:
        return values
    state = agreed([view.rows(0), values])
    not_along(state, 1, "looks rows up in each other")
    return state


@rule("CombinedNonMaxSuppression")
def suppression(view: View) -> RowState:
    """The best boxes of each image."""
    view.only(0, 1)
    state = agreed([view.rows(0), view.rows(1)])
    if state.axis != 0:
        raise Mixes("takes rows for what lies inside of an item")
    return state


@rule("LookupTableFind", "LookupTableFindV2", "DecodeCSV")
def one_by_one(view: View) -> RowState:
    """A key at a time, in a table that stays as it is; or a record at a time, with defaults that are fixed."""
    return view.alone(0 if view.op == "DecodeCSV" else 1)


def _cell(view: View, axis: int, slots: Mapping[int, int]) -> RowState:
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


@rule("Print", "CheckNumerics", "CheckNumericsV2", sizes=ANY, places=True, each=True)
@rules(ops_with("identity") | ops_with("forwards"), sizes=ANY, places=True, each=True)
def passing(view: View) -> RowState:
    """The first input, whatever it is."""
    return view.states[0]


rule("IdentityN", sizes=ANY, places=True, each=True)(lambda view: list(view.states))


@rule("TensorArrayV3", always=True)
def new_array(view: View) -> list[RowState]:
    """A tensor array of TensorFlow 1, of a fixed length."""
    view.only()
    return [Array(view.key), FIXED]


@rule("TensorArrayWriteV3", "TensorArrayScatterV3", always=True)
def write_array(view: View) -> RowState:
    """An element at a fixed place, or those along the first axis at fixed places; what comes out only orders what is done."""
    view.only(0, 2)
    item = view.states[2]
    view.held.write(view.states[0], _taken_apart(item) if view.op.endswith("ScatterV3") else item)
    return FIXED


@rule("TensorArrayReadV3", "TensorArrayGatherV3", always=True)
def read_array(view: View) -> RowState:
    """An element from a fixed place, or those from fixed places, stacked."""
    view.only(0)
    item = view.held.read(view.states[0])
    return _stacked(item) if view.op.endswith("GatherV3") else item


@rule("TensorArraySizeV3", "TensorArrayCloseV3", always=True)
def array_size(view: View) -> RowState:
    """The length, which is fixed."""
    view.only(0)
    return FIXED


def _taken_apart(state: RowState) -> RowState:
    if state is FIXED:
        return FIXED
    if not isinstance(state, PerRow) or state.tells:
        raise Mixes(refused_input(state, 0))
    if state.axis == 0:
        raise Mixes("takes rows apart")
    return replace(state, axis=state.axis - 1)


def _stacked(state: RowState | None) -> RowState:
    if isinstance(state, PerRow):
        return replace(state, axis=state.axis + 1)
    if state is None or state is FIXED:
        return FIXED
    raise Mixes(refused_input(state, 0))


def _listed(view: View) -> ListState:
    state = view.states[0]
    if isinstance(state, ListState):
        return state
    if state is FIXED:
        return ListState(FIXED)
    raise Mixes(refused_input(state, 0))


def _with(held: ListState, element: RowState) -> ListState:
    return ListState(element if held.element is None else either(held.element, element))


@rule("TensorListReserve", "EmptyTensorList", sizes=(0,), always=True)
def new_list(view: View) -> RowState:
    """The shape of elements that are not there yet may name the number of rows; how many there are is fixed."""
    view.only(0)
    return ListState()


@rule("TensorListFromTensor", sizes=(1,))
def from_tensor(view: View) -> RowState:
    """A list along the first axis."""
    return ListState(_taken_apart(view.states[0]))


@rule("TensorListSetItem", "TensorListPushBack")
def put(view: View) -> RowState:
    """An element is put in, at a fixed place."""
    slot = 2 if view.op == "TensorListSetItem" else 1
    view.only(0, slot)
    if isinstance(view.states[slot], PerRow | type(FIXED)):
        return _with(_listed(view), view.states[slot])
    raise Mixes(refused_input(view.states[slot], slot))


@rule("TensorListGetItem", sizes=(2,))
@rule("TensorListPopBack", sizes=(1,))
def get(view: View) -> RowState | list[RowState]:
    """An element from a fixed place."""
    held = _listed(view)
    if view.op == "TensorListGetItem":
        view.fixed(1)
        return held.element or _unwritten(view)
    return [held, held.element or _unwritten(view)]


def _unwritten(view: View) -> RowState:
    # Zeros, of a shape that may have the rows anywhere.
    raise Mixes("reads an element that nothing was written to")


@rule("TensorListStack", sizes=(1,))
@rule("TensorListGather", sizes=(2,))
def stack(view: View) -> RowState:
    """All elements, or those at fixed places, stacked."""
    if view.op == "TensorListGather":
        view.fixed(1)
    held = _listed(view)
    return _stacked(held.element or _unwritten(view))


@rule("TensorListLength", "TensorListElementShape")
def length(view: View) -> RowState:
    """The length is fixed, the shape of an element is not."""
    if view.op == "TensorListLength" or _listed(view).element is FIXED:
        return FIXED
    raise Mixes("asks for the shape of an element of a list")


@rule("TensorListResize")
def resize(view: View) -> RowState:
    """To a fixed length."""
    view.only(0)
    return _listed(view)


@rule("Switch", "RefSwitch", sizes=(0,), places=True)
def switch(view: View) -> RowState:
    """One of two ways, by a condition that is fixed."""
    _chosen(view, 1)
    return view.states[0]


Body = Callable[[Function, Result, list[RowState]], list[RowState]]
"""From a function, its shapes and the states of its arguments to the states of its results."""


def _chosen(view: View, slot: int) -> None:
    if view.states[slot] is not FIXED:
        raise Mixes("chooses by what depends on rows")


def call(view: View, bodies: Mapping[str, tuple[Function, Result]], walk: Body) -> list[RowState]:
    """Row state of the outputs of a node that runs functions."""
    if not bodies:
        raise Mixes("runs a function that can not be followed")
    if set(bodies) == {"f"}:
        return walk(*bodies["f"], view.states)
    if "body" in bodies or "cond" in bodies:
        return _loop(view, bodies, walk)
    _chosen(view, 0)
    found = [walk(*body, view.states[1:]) for body in bodies.values()]
    expected = len(view.attr("branches", ())) or 2
    if len(bodies) != expected:
        raise Mixes("runs a function that can not be followed")
    return [functools.reduce(merged, states) for states in zip(*found, strict=True)]


def _loop(view: View, bodies: Mapping[str, tuple[Function, Result]], walk: Body) -> list[RowState]:
    """The states that a loop does not change: each round what the body gives is joined with what it took."""
    if set(bodies) != {"body", "cond"}:
        raise Mixes("runs a function that can not be followed")
    carried = list(view.states)
    # A list may learn what its elements are, and nothing else may change.
    for _ in range(len(carried) + 2):
        (asked,) = walk(*bodies["cond"], carried)
        if isinstance(asked, MixedRows):
            raise Mixes(asked.refusal)
        if asked is not FIXED:
            raise Mixes("runs as often as rows say")
        given = walk(*bodies["body"], carried)
        following = [merged(before, after) for before, after in zip(carried, given, strict=True)]
        if following == carried:
            return carried
        carried = following
    raise Mixes("changes what it carries in each round")
