"""Ops that run functions: While, If, Case and calls. Their functions are walked with what is known at the call."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from msplit.core.graph import Function, FunctionRef
from msplit.opset.traits import CALLS, CONDS, LOOPS
from msplit.shapes.registry import Handle, Node, Shape, join, merge
from msplit.shapes.result import FUNCTIONAL, Bound, Outcome, Result, State
from msplit.shapes.trip_count import Tensor, added, behind, number, single, trip_count, trips_between
from msplit.shapes.walk import run

MAX_ROUNDS = 3
"""Walks of a loop's body whose results differ in shape from its arguments; afterwards those shapes count as unknown."""


def _function(reference: Any, state: State) -> Function | None:
    name = reference.name if isinstance(reference, FunctionRef) else reference
    return state.functions.get(name) if isinstance(name, str) else None


def _walked(function: Function, arguments: Sequence[Bound], state: State) -> tuple[list[Bound], Result] | None:
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


def call(node: Node, state: State) -> Outcome | None:
    """A call: the function is named by the attribute `f` (of a launch of XLA `function`), or by the op itself."""
    function = _function(node.attr("function" if node.op == "XlaLaunch" else "f", node.op), state)
    if function is None:
        return None
    walked = _walked(function, _inputs(node), state)
    return None if walked is None else Outcome(walked[0], {"f": (function, walked[1])})


def branch(node: Node, state: State) -> Outcome | None:
    """If and Case: what all branches have in common."""
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
    return Outcome(_stated(outputs, stated), bodies)


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
    """What a loop carries: an element shape that the first iteration teaches is kept, one that changes is not."""
    if before is None or after is None:
        return None
    shape = after.shape
    if before.shape is not None:
        shape = join(merge(before.shape, shape), merge(shape, before.shape))
    return Handle(shape, before.length if before.length == after.length else None)


def loop(node: Node, state: State) -> Outcome | None:
    """While: walks the body until what goes in is what comes out.

    Values are passed on only for what the body gives back as it came (a loop invariant).
    """
    body, condition = _function(node.attr("body"), state), _function(node.attr("cond"), state)
    stated = node.attr("output_shapes") or ()
    if body is None or len(body.results) != len(node.inputs):
        return None
    kept = [
        behind(body.body, (result.node, result.port))[0] == parameter.node
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
            return Outcome([Bound(shape) for shape in stated], {}) if stated else None
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
    return Outcome(_stated(carried, stated), bodies, trips)


def _counted(
    functions: tuple[Function, Function], results: tuple[Result, Result], node: Node, counter: Tensor, limit: Tensor
) -> int | None:
    """Trip count of a loop, given as condition and body, that compares one of its arguments with what does not change."""
    (condition, body), (tested, walked) = functions, results
    place = behind(condition.body, counter)[0]
    position = next((i for i, parameter in enumerate(condition.parameters) if parameter.node == place), None)
    if position is None:
        return None
    last = body.results[position]
    step = added(body.body, walked, (last.node, last.port), body.parameters[position].node)
    return trips_between(single(node.value(position)), number(condition.body, tested, limit), step)


FUNCTIONAL.update({"call": call, "RemoteCall": call, "XlaLaunch": call, "_If": branch, "_While": loop})
FUNCTIONAL.update(dict.fromkeys(CALLS, call) | dict.fromkeys(CONDS, branch) | dict.fromkeys(LOOPS, loop))
