"""Ops that run functions: While, If, Case and calls. Their functions are walked with what is known at the call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msplit.cost.shapes.registry import Handle, Node, Shape, as_ints, join, merge
from msplit.cost.shapes.walk import FUNCTIONAL, Bound, Outcome, Result, State, run
from msplit.graph import Function, FunctionRef, Graph

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
    """A call: the function is named by the attribute `f`, or by the op itself."""
    function = _function(node.attr("f", node.op), state)
    if function is None:
        return None
    walked = _walked(function, _inputs(node), state)
    return None if walked is None else Outcome(walked[0], {"f": (function.body, walked[1])})


def branch(node: Node, state: State) -> Outcome | None:
    """If and Case: what all branches have in common."""
    attributes: list[tuple[str, Any]]
    if "Case" in node.op:
        attributes = [(f"branches[{index}]", item) for index, item in enumerate(node.attr("branches", ()))]
    else:
        attributes = [("then_branch", node.attr("then_branch")), ("else_branch", node.attr("else_branch"))]
    bodies: dict[str, tuple[Graph, Result]] = {}
    outputs: list[Bound] | None = None
    complete = True
    for name, reference in attributes:
        function = _function(reference, state)
        walked = None if function is None else _walked(function, _inputs(node, 1), state)
        if function is None or walked is None:
            complete = False
            continue
        bodies[name] = (function.body, walked[1])
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
    """What a loop carries: an element shape that the first turn teaches is kept, one that changes is not."""
    if before is None or after is None:
        return None
    shape = (
        after.shape
        if before.shape is None
        else join(merge(before.shape, after.shape), merge(after.shape, before.shape))
    )
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
        _behind_identities(body.body, result.node) == parameter.node
        for result, parameter in zip(body.results, body.parameters, strict=False)
    ]
    carried = [
        Bound(bound.shape, bound.value if keep else None, bound.handle)
        for bound, keep in zip(_inputs(node), kept, strict=True)
    ]
    walked = None
    for turn in range(MAX_ROUNDS + 1):
        walked = _walked(body, carried, state)
        if walked is None:
            return Outcome([Bound(shape) for shape in stated], {}) if stated else None
        following = [
            Bound(join(before.shape, after.shape), before.value, _grown_handle(before.handle, after.handle))
            for before, after in zip(carried, walked[0], strict=True)
        ]
        if turn == MAX_ROUNDS - 1:
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
    bodies = {"body": (body.body, walked[1])}
    turns = None
    if condition is not None and (tested := _walked(condition, carried, state)) is not None:
        bodies["cond"] = (condition.body, tested[1])
        turns = _turns(condition, tested[1], body, walked[1], node)
    return Outcome(_stated(carried, stated), bodies, turns)


def _turns(condition: Function, tested: Result, body: Function, walked: Result, node: Node) -> int | None:
    """How often a loop runs whose condition is `counter < limit`, or several of these joined by "and"; None for any other loop.

    The counter starts at a known value and the body adds a known amount to it; the limit is known and the loop does not change it.
    """
    waiting = [condition.results[0].node]
    found: list[int] = []
    unknown = False
    seen: set[int] = set()
    while waiting:
        place, graph = waiting.pop(), condition.body
        if place in seen:
            continue
        seen.add(place)
        sources = [source for source, _ in graph.inputs(place)]
        op = graph.ops[place]
        if op in ("Identity", "LogicalAnd"):
            waiting += sources
        elif op == "Less" and (turns := _counted(condition, tested, sources, body, walked, node)) is not None:
            found.append(turns)
        else:
            unknown = True
    # One side of an "and" that is not understood may end the loop sooner.
    return None if unknown or not found else min(found)


def _counted(
    condition: Function, tested: Result, sources: list[int], body: Function, walked: Result, node: Node
) -> int | None:
    counter, limit = (_behind_identities(condition.body, source) for source in sources)
    position = next((i for i, parameter in enumerate(condition.parameters) if parameter.node == counter), None)
    if position is None:
        return None
    start, end = node.scalar(position), tested.value(limit)
    step = _step(body, walked, position)
    if start is None or step is None or step <= 0 or end is None or end.size != 1 or None in as_ints(end):
        return None
    last = as_ints(end)[0] or 0
    return max(0, -(-(last - start) // step))


def _step(body: Function, walked: Result, position: int) -> int | None:
    """What the body adds to one of its arguments."""
    graph = body.body
    place = _behind_identities(graph, body.results[position].node)
    if graph.ops[place] not in ("Add", "AddV2"):
        return None
    sources = [_behind_identities(graph, source) for source, _ in graph.inputs(place)]
    counter = body.parameters[position].node
    others = [source for source in sources if source != counter]
    if len(others) != 1:
        return None
    value = walked.value(others[0])
    return None if value is None or value.size != 1 else as_ints(value)[0]


def _behind_identities(graph: Graph, node: int) -> int:
    while graph.ops[node] == "Identity":
        node = graph.inputs(node)[0][0]
    return node


FUNCTIONAL.update(
    {
        "call": call,
        "PartitionedCall": call,
        "StatefulPartitionedCall": call,
        "RemoteCall": call,
        "If": branch,
        "StatelessIf": branch,
        "Case": branch,
        "StatelessCase": branch,
        "While": loop,
        "StatelessWhile": loop,
        "_While": loop,
        "_If": branch,
    }
)
