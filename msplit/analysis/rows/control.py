"""Lists, arrays, loops and choices: fixed as long as how often and which one does not depend on rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace

from msplit.analysis.rows.node import ANY, View, refused_input, rule, rules
from msplit.analysis.rows.states import FIXED, Array, Listed, Mixed, Mixes, PerRow, State, either, merged
from msplit.core.graph import Function
from msplit.opset.traits import ops_with
from msplit.shapes.result import Result


@rule("Print", "CheckNumerics", "CheckNumericsV2", sizes=ANY, places=True, each=True)
@rules(ops_with("identity") | ops_with("forwards"), sizes=ANY, places=True, each=True)
def passing(view: View) -> State:
    """The first input, whatever it is."""
    return view.states[0]


rule("IdentityN", sizes=ANY, places=True, each=True)(lambda view: list(view.states))


@rule("TensorArrayV3", always=True)
def new_array(view: View) -> list[State]:
    """A tensor array of TensorFlow 1, of a fixed length."""
    view.only()
    return [Array(view.key), FIXED]


@rule("TensorArrayWriteV3", always=True)
def write_array(view: View) -> State:
    """An element at a fixed place; what comes out only orders what is done."""
    view.only(0, 2)
    view.held.write(view.states[0], view.states[2])
    return FIXED


@rule("TensorArrayScatterV3", always=True)
def scatter_array(view: View) -> State:
    """Elements along the first axis, at fixed places."""
    view.only(0, 2)
    view.held.write(view.states[0], _taken_apart(view.states[2]))
    return FIXED


@rule("TensorArrayReadV3", always=True)
def read_array(view: View) -> State:
    """An element from a fixed place."""
    view.only(0)
    return view.held.read(view.states[0])


@rule("TensorArrayGatherV3", always=True)
def gather_array(view: View) -> State:
    """Elements from fixed places, stacked."""
    view.only(0)
    return _stacked(view.held.read(view.states[0]))


@rule("TensorArraySizeV3", "TensorArrayCloseV3", always=True)
def array_size(view: View) -> State:
    """The length, which is fixed."""
    view.only(0)
    return FIXED


def _taken_apart(state: State) -> State:
    if state is FIXED:
        return FIXED
    if not isinstance(state, PerRow) or state.tells:
        raise Mixes(refused_input(state, 0))
    if state.axis == 0:
        raise Mixes("takes rows apart")
    return replace(state, axis=state.axis - 1)


def _stacked(state: State | None) -> State:
    if isinstance(state, PerRow):
        return replace(state, axis=state.axis + 1)
    if state is None or state is FIXED:
        return FIXED
    raise Mixes(refused_input(state, 0))


def _listed(view: View) -> Listed:
    state = view.states[0]
    if isinstance(state, Listed):
        return state
    if state is FIXED:
        return Listed(FIXED)
    raise Mixes(refused_input(state, 0))


def _with(held: Listed, element: State) -> Listed:
    return Listed(element if held.element is None else either(held.element, element))


@rule("TensorListReserve", "EmptyTensorList", sizes=(0,), always=True)
def new_list(view: View) -> State:
    """The shape of elements that are not there yet may name the number of rows; how many there are is fixed."""
    view.only(0)
    return Listed()


@rule("TensorListFromTensor", sizes=(1,))
def from_tensor(view: View) -> State:
    """A list along the first axis."""
    return Listed(_taken_apart(view.states[0]))


@rule("TensorListSetItem", "TensorListPushBack")
def put(view: View) -> State:
    """An element is put in, at a fixed place."""
    slot = 2 if view.op == "TensorListSetItem" else 1
    view.only(0, slot)
    if isinstance(view.states[slot], PerRow | type(FIXED)):
        return _with(_listed(view), view.states[slot])
    raise Mixes(refused_input(view.states[slot], slot))


@rule("TensorListGetItem", sizes=(2,))
@rule("TensorListPopBack", sizes=(1,))
def get(view: View) -> State | list[State]:
    """An element from a fixed place."""
    held = _listed(view)
    if view.op == "TensorListGetItem":
        view.fixed(1)
        return held.element or _unwritten(view)
    return [held, held.element or _unwritten(view)]


def _unwritten(view: View) -> State:
    # Zeros, of a shape that may have the rows anywhere.
    raise Mixes("reads an element that nothing was written to")


@rule("TensorListStack", sizes=(1,))
@rule("TensorListGather", sizes=(2,))
def stack(view: View) -> State:
    """All elements, or those at fixed places, stacked."""
    if view.op == "TensorListGather":
        view.fixed(1)
    held = _listed(view)
    return _stacked(held.element or _unwritten(view))


@rule("TensorListLength", "TensorListElementShape")
def length(view: View) -> State:
    """The length is fixed, the shape of an element is not."""
    if view.op == "TensorListLength" or _listed(view).element is FIXED:
        return FIXED
    raise Mixes("asks for the shape of an element of a list")


@rule("TensorListResize")
def resize(view: View) -> State:
    """To a fixed length."""
    view.only(0)
    return _listed(view)


@rule("Switch", "RefSwitch", sizes=(0,), places=True)
def switch(view: View) -> State:
    """One of two ways, by a condition that is fixed."""
    _chosen(view, 1)
    return view.states[0]


Body = Callable[[Function, Result, list[State]], list[State]]
"""From a function, its shapes and the states of its arguments to the states of its results."""


def _chosen(view: View, slot: int) -> None:
    if view.states[slot] is not FIXED:
        raise Mixes("chooses by what depends on rows")


def call(view: View, bodies: Mapping[str, tuple[Function, Result]], walk: Body) -> list[State]:
    """What a node that runs functions gives."""
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


def _loop(view: View, bodies: Mapping[str, tuple[Function, Result]], walk: Body) -> list[State]:
    """The states that a loop does not change: each round what the body gives is joined with what it took."""
    if set(bodies) != {"body", "cond"}:
        raise Mixes("runs a function that can not be followed")
    carried = list(view.states)
    # A list may learn what its elements are, and nothing else may change.
    for _ in range(len(carried) + 2):
        (asked,) = walk(*bodies["cond"], carried)
        if isinstance(asked, Mixed):
            raise Mixes(asked.refusal)
        if asked is not FIXED:
            raise Mixes("runs as often as rows say")
        given = walk(*bodies["body"], carried)
        following = [merged(before, after) for before, after in zip(carried, given, strict=True)]
        if following == carried:
            return carried
        carried = following
    raise Mixes("changes what it carries in each round")
