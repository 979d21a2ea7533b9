"""Shapes of ops that run functions, and of ops whose results are handles or random.

Ops that run functions: While, If, Case and calls. Their functions are walked with what is known at the call.

Random numbers, inputs, tensor lists and tensor arrays, and what handles refer to.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from msplit.core.graph import Function, FunctionRef
from msplit.formats.endpoints import behind
from msplit.opset.traits import CALLS, CONDS, LOOPS, ops_with
from msplit.shapes.infer import IDENTITY, TensorId, added, number, single, trip_count, trips_between
from msplit.shapes.registry import (
    Handle,
    Node,
    Outputs,
    Shape,
    handle_function,
    join,
    merge,
    shape_from,
    shape_function,
    sure,
)
from msplit.shapes.result import FUNCTIONAL, Bound, FunctionShapes, InferenceState, Result
from msplit.shapes.walk import run

MAX_ROUNDS = 3
"""Walks of a loop's body whose results differ in shape from its arguments; afterwards those shapes count as unknown."""


def _function(reference: Any, state: InferenceState) -> Function | None:
    name = reference.name if isinstance(reference, FunctionRef) else reference
    return state.functions.get(name) if isinstance(name, str) else None


def _walked(function: Function, arguments: Sequence[Bound], state: InferenceState) -> tuple[list[Bound], Result] | None:
    """Results of a function for given arguments; None where it calls itself or is given too little."""
    if function.name in state.active or len(arguments) < len(function.parameters):
        return None
    key = (function.name, tuple(_fingerprint(bound) for bound in arguments))
    result = state.done.get(key)
    if result is None:
        if not state.may_walk(function):
            return None
        state.active.append(function.name)
        try:
            bound = {parameter.node: given for parameter, given in zip(function.parameters, arguments, strict=False)}
            result = run(function.body, state, {}, bound)
        finally:
            state.active.pop()
        state.done[key] = result
    return [result.bound(item.node, item.port) for item in function.results], result


def _fingerprint(bound: Bound) -> tuple[Any, ...]:
    value, handle = bound.value, bound.handle
    return (
        bound.shape,
        None if value is None else (value.shape, value.dtype.char, value.tobytes()),
        None if handle is None else (handle.shape, handle.length),
    )


def _inputs(node: Node, first: int = 0) -> list[Bound]:
    return [
        Bound(shape, value, handle)
        for shape, value, handle in zip(node.inputs[first:], node.values[first:], node.handles[first:], strict=True)
    ]


def call(node: Node, state: InferenceState) -> FunctionShapes | None:
    """A call: the function is named by the attribute `f` (of a launch of XLA `function`), or by the op itself."""
    function = sure(_function(node.attr("function" if node.op == "XlaLaunch" else "f", node.op), state))
    outputs, result = sure(_walked(function, _inputs(node), state))
    return FunctionShapes(outputs, {"f": (function, result)})


def branch(node: Node, state: InferenceState) -> FunctionShapes | None:
    """Conditionals (If, Case): the shapes that all branches have in common."""
    if "Case" in node.op:
        attributes = {f"branches[{index}]": item for index, item in enumerate(node.attr("branches", ()))}
    else:
        attributes = {name: node.attr(name) for name in ("then_branch", "else_branch")}
    bodies: dict[str, tuple[Function, Result]] = {}
    outputs: list[Bound] | None = None
    complete = True
    for name, reference in attributes.items():
        function = _function(reference, state)
        walked = None if function is None else _walked(function, _inputs(node, 1), state)
        if function is None or walked is None:
            complete = False
            continue
        bodies[name] = (function, walked[1])
        outputs = walked[0] if outputs is None else _joined(outputs, walked[0])
    stated = node.attr("output_shapes") or ()
    if outputs is None or not complete:
        outputs = [Bound(shape) for shape in stated] or [Bound(None)] * node.outputs
    return FunctionShapes(_stated(outputs, stated), bodies)


def _stated(outputs: list[Bound], stated: Sequence[Shape]) -> list[Bound]:
    return [
        Bound(merge(bound.shape, stated[index]) if index < len(stated) else bound.shape, bound.value, bound.handle)
        for index, bound in enumerate(outputs)
    ]


def _joined(first: list[Bound], second: list[Bound]) -> list[Bound]:
    return [
        Bound(join(a.shape, b.shape), None, _joined_handle(a.handle, b.handle))
        for a, b in zip(first, second, strict=False)
    ]


def _joined_handle(first: Handle | None, second: Handle | None) -> Handle | None:
    if first is None or second is None:
        return None
    return Handle(join(first.shape, second.shape), first.length if first.length == second.length else None)


def _grown_handle(before: Handle | None, after: Handle | None) -> Handle | None:
    """Handle that a loop carries: an element shape that the first iteration teaches is kept, one that changes is not."""
    if before is None or after is None:
        return None
    shape = after.shape
    if before.shape is not None:
        shape = join(merge(before.shape, shape), merge(shape, before.shape))
    return Handle(shape, before.length if before.length == after.length else None)


def loop(node: Node, state: InferenceState) -> FunctionShapes | None:
    """While: walks the body until what goes in is what comes out.

    Values are passed on only for what the body gives back as it came (a loop invariant).
    """
    body, condition = _function(node.attr("body"), state), _function(node.attr("cond"), state)
    stated = node.attr("output_shapes") or ()
    if body is None or len(body.results) != len(node.inputs):
        return None
    kept = [
        behind(body.body, (result.node, result.port), IDENTITY)[0] == parameter.node
        for result, parameter in zip(body.results, body.parameters, strict=False)
    ]
    carried = [
        Bound(bound.shape, bound.value if keep else None, bound.handle)
        for bound, keep in zip(_inputs(node), kept, strict=True)
    ]
    walked = None
    for attempt in range(MAX_ROUNDS + 1):
        walked = _walked(body, carried, state)
        if walked is None:
            return FunctionShapes([Bound(shape) for shape in stated], {}) if stated else None
        following = [
            Bound(join(before.shape, after.shape), before.value, _grown_handle(before.handle, after.handle))
            for before, after in zip(carried, walked[0], strict=True)
        ]
        if attempt == MAX_ROUNDS - 1:
            # What still changes is whatever the loop makes of it.
            following = [
                after if _fingerprint(after) == _fingerprint(before) else Bound(None)
                for before, after in zip(carried, following, strict=True)
            ]
        settled = all(_fingerprint(a) == _fingerprint(b) for a, b in zip(carried, following, strict=True))
        carried = following
        if settled:
            break
    assert walked is not None
    bodies = {"body": (body, walked[1])}
    trips = None
    if condition is not None and (tested := _walked(condition, carried, state)) is not None:
        bodies["cond"] = (condition, tested[1])
        asked = condition.results[0]
        counted = functools.partial(_counted, (condition, body), (tested[1], walked[1]), node)
        trips = trip_count(condition.body, (asked.node, asked.port), counted)
    return FunctionShapes(_stated(carried, stated), bodies, trips)


def _counted(
    functions: tuple[Function, Function], results: tuple[Result, Result], node: Node, counter: TensorId, limit: TensorId
) -> int | None:
    """Trip count of a loop, given as condition and body, that compares one of its arguments with what does not change."""
    (condition, body), (tested, walked) = functions, results
    place = behind(condition.body, counter, IDENTITY)[0]
    position = next((i for i, parameter in enumerate(condition.parameters) if parameter.node == place), None)
    if position is None:
        return None
    last = body.results[position]
    step = added(body.body, walked, (last.node, last.port), body.parameters[position].node)
    return trips_between(single(node.value(position)), number(condition.body, tested, limit), step)


FUNCTIONAL.update({"call": call, "RemoteCall": call, "XlaLaunch": call, "_If": branch, "_While": loop})
FUNCTIONAL.update(dict.fromkeys(CALLS, call) | dict.fromkeys(CONDS, branch) | dict.fromkeys(LOOPS, loop))


@shape_function("Multinomial", "StatelessMultinomial")
def multinomial(node: Node) -> Outputs:
    """Samples per row."""
    shape = node.shape(0)
    return ((shape[0] if shape else None, node.scalar(1)),)


@shape_function("RandomGamma", "RandomPoisson", "RandomPoissonV2")
def random_gamma(node: Node) -> Outputs:
    """A sample of the given shape for each parameter."""
    lead = node.sizes(0)
    return (None if lead is None else lead + node.ranked(1),)


@shape_function("IteratorGetNext", "IteratorGetNextSync", "QueueDequeueV2", "QueueDequeueManyV2")
def next_element(node: Node) -> Outputs:
    """The shapes in the attributes."""
    return tuple(node.attr("output_shapes") or ()) or (None,) * node.outputs


# Tensor lists (TensorFlow 2's loops) and tensor arrays (TensorFlow 1's).


def _given(node: Node, index: int) -> Shape:
    """Shape of an element given as a value: -1 alone means that even the rank is unknown."""
    value = node.value(index)
    return None if value is None or value.ndim == 0 else shape_from(node.ints(index))


@shape_function("TensorListGetItem", "TensorListPopBack")
def list_item(node: Node) -> Outputs:
    """One element, and before it the shorter list where the element is taken away."""
    if node.op == "TensorListPopBack":
        return ((), merge(node.element(), _given(node, 1)))
    return (merge(node.element(), _given(node, 2)),)


@shape_function("TensorListStack")
def list_stack(node: Node) -> Outputs:
    """All elements, stacked."""
    element, count = merge(node.element(), _given(node, 1)), int(node.attr("num_elements", -1))
    return (None if element is None else (count if count >= 0 else node.length(), *element),)


@shape_function("TensorListGather", "TensorArrayGatherV3")
def gather_elements(node: Node) -> Outputs:
    """Some elements, stacked."""
    if node.op == "TensorListGather":
        element = merge(node.element(), _given(node, 2))
    else:
        element = merge(node.attr("element_shape"), node.element())
    return (None if element is None else node.ranked(1) + element,)


@shape_function("TensorListConcat", "TensorListConcatV2", "TensorArrayConcatV3")
def concat_elements(node: Node) -> Outputs:
    """All elements along their first axis, and their lengths."""
    element = node.element()
    lengths = None if node.op == "TensorArrayConcatV3" else node.length()
    return ((None, *element[1:]) if element else None, (lengths,))


handle_function(*ops_with("forwards"))(lambda node: (node.handle(),))
handle_function("IdentityN", "XlaOptimizationBarrier")(lambda node: node.handles)
handle_function("Switch", "RefSwitch")(lambda node: (node.handle(),) * 2)
handle_function("VarHandleOp")(lambda node: (Handle(node.attr("shape")),))


@handle_function("Merge", "RefMerge")
def passed_first(node: Node) -> Sequence[Handle | None]:
    """Handle of the first input that refers to something."""
    return (next((handle for handle in node.handles if handle is not None), None),)


handle_function(*ops_with("lookup table"))(lambda node: (Handle(node.attr("value_shape", ())),))


@shape_function(*ops_with("looks keys up"))
def found(node: Node) -> Outputs:
    """A value for each key; it may have axes of its own. A table that is not known has numbers where its default is one."""
    keys, value = node.shape(1), node.element() if node.handle() is not None or node.shape(2) != () else ()
    return (None if keys is None or value is None else (*keys, *value),)


@handle_function("KvVarHandleOp")
def growing_table_handle(node: Node) -> Sequence[Handle | None]:
    """DeepRec's growing table: the attribute is the shape of one row."""
    row = node.attr("shape")
    return (Handle(None if row is None else (None, *row)),)


@handle_function("TensorListReserve", "EmptyTensorList")
def new_list(node: Node) -> Sequence[Handle | None]:
    """A list of elements of a shape that is a value."""
    return (Handle(_given(node, 0), node.scalar(1) if node.op == "TensorListReserve" else None),)


@handle_function("TensorListFromTensor")
def unstacked_list(node: Node) -> Sequence[Handle | None]:
    """A list of the rows of a tensor."""
    shape = node.shape(0)
    return (Handle(None if shape is None else shape[1:], shape[0] if shape else None),)


@handle_function("TensorListSetItem", "TensorListPushBack", "TensorListResize", "TensorListPopBack")
def changed_list(node: Node) -> Sequence[Handle | None]:
    """This list with one element more, less or other."""
    if node.op == "TensorListSetItem":
        return (Handle(merge(node.element(), node.shape(2)), node.length()),)
    if node.op == "TensorListPushBack":
        return (Handle(merge(node.element(), node.shape(1))),)
    return (Handle(node.element(), node.scalar(1) if node.op == "TensorListResize" else None), None)


@handle_function("TensorListScatter", "TensorListScatterV2", "TensorListScatterIntoExistingList")
def scattered_list(node: Node) -> Sequence[Handle | None]:
    """A list of the rows of a tensor, at given places."""
    rows = node.shape(1 if node.op.endswith("List") else 0)
    return (Handle(None if rows is None else rows[1:]),)


# An array; later writes tell the shape of its elements.
handle_function("TensorArrayV3")(lambda node: (Handle(node.attr("element_shape"), node.scalar(0)), None))


@handle_function("TensorArrayWriteV3", "TensorArrayScatterV3")
def write_array(node: Node) -> Sequence[Handle | None]:
    """The array that is written learns the shape of its elements."""
    handle, item = node.handle(), node.shape(2)
    if handle is not None and item is not None:
        handle.shape = merge(handle.shape, item if node.op == "TensorArrayWriteV3" else item[1:])
    return (None,)
