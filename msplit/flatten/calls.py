"""Calls that the flat view looks into, and what each function's body asks of the node that calls it."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from msplit.core.dag import reached
from msplit.core.graph import CONTROL, Edges, Function, FunctionRef, Graph, Ints
from msplit.errors import GraphError, LoadError
from msplit.flatten.control_flow import has_effect, is_stateful
from msplit.formats.functions import Library, gradient_of
from msplit.formats.stablehlo import CALL_MODULE
from msplit.opset import schema
from msplit.opset.traits import CALLS

MAX_NODES = 20_000_000
"""Most nodes that a flat graph may have. Functions that call each other twice over grow exponentially."""

MAX_GROWTH = 100
"""Most nodes of a flat graph as a multiple of the file's, and .."""

FREE_NODES = 20_000
""".. how many it may have in any case."""

MAX_DEPTH = 1_000
"""Most calls inside each other: a flat name holds the names of all of them."""

MAX_NAME = 1_000
"""Longest name of a flat node on average, and .."""

FREE_CHARACTERS = 1 << 24
""".. how many characters all of them may have in any case."""

_GRADIENT = "SymbolicGradient"
_COMPILED = "_XlaMustCompile"


@dataclass(frozen=True, eq=False)
class FunctionBody:
    """The nodes of a graph that are needed, split into those that stay nodes and calls that are looked into.

    Attributes:
        graph: All nodes, needed or not.
        ordinary: Nodes that stay nodes, ascending.
        place: Per node its place in `ordinary`, -1 for the others.
        parameter: Per node the parameter it stands for, -1 for the others.
        calls: Calls that are looked into, with what they call, ascending.
        edges: Edges between ordinary nodes, by place.
        foreign: Edges into ordinary nodes from parameters and calls: src is a node of `graph`, dst a place.
        first: Places of nodes that wait for nothing inside the body.
        results: (node, port) of each result; port CONTROL for a call that is only to be run.
        finals: Nodes after which the whole body has run as far as others can see: results, control results, stateful nodes.
        effects: Places of nodes that have to run even where nobody uses what they give.
    """

    graph: Graph
    ordinary: Ints
    place: Ints
    parameter: Ints
    calls: Mapping[int, FunctionRef]
    edges: Edges
    foreign: Edges
    first: Sequence[int]
    results: Sequence[tuple[int, int]]
    finals: Sequence[int]
    effects: Sequence[int]


def find_calls(graph: Graph, functions: Mapping[str, Function]) -> dict[int, FunctionRef]:
    """Nodes that call a function of the library and are looked into.

    `PartitionedCall`, `StatefulPartitionedCall`, nodes whose op is the function's name, `SymbolicGradient`, which calls a function's
    gradient, and `XlaCallModule`, which holds one of its own. Calls that XLA compiles as a whole stay
    nodes, as do calls of functions that are not there.
    """
    ops = set(graph.ops)
    direct = {op for op in ops if op in functions}
    wanted = direct | (ops & (CALLS | {_GRADIENT, CALL_MODULE}))
    found: dict[int, FunctionRef] = {}
    if not wanted:
        return found
    for node, op in enumerate(graph.ops):
        if op not in wanted:
            continue
        attrs = graph.attrs[node]
        called = FunctionRef(op, attrs) if op in direct else attrs.get("f")
        if op == CALL_MODULE:
            module = functions.module(attrs) if isinstance(functions, Library) else None
            called = None if module is None else FunctionRef(module)
        if op == _GRADIENT:
            types = attrs.get("Tout")
            if not isinstance(called, FunctionRef) or not isinstance(types, tuple):
                continue
            called = FunctionRef(gradient_of(called.name, map(str, types)))
        if isinstance(called, FunctionRef) and called.name in functions and attrs.get(_COMPILED) is not True:
            found[node] = called
    return found


@dataclass(frozen=True)
class Acting:
    """Functions that do something besides giving results, directly or through what they call.

    Attributes:
        stateful: Those with a stateful node.
        effects: Those with a node that has to run even where nobody uses what it gives.
    """

    stateful: Container[str]
    effects: Container[str]


def acting(names: Iterable[str], functions: Mapping[str, Function]) -> Acting:
    """Functions, among some and those that they call, that are `Acting`. What a call does is told by its function, not by its op."""
    callers: dict[str, list[str]] = {}
    stateful: list[str] = []
    effects: list[str] = []
    pending = list(dict.fromkeys(names))
    known = set(pending)
    while pending:
        name = pending.pop()
        function = functions[name]
        calls = find_calls(function.body, functions)
        own = [op for node, op in enumerate(function.body.ops) if node not in calls]
        if any(map(is_stateful, own)):
            stateful.append(name)
        if any(map(has_effect, own)) or _unknown_controls(function, functions):
            effects.append(name)
        for callee in {called.name: None for called in calls.values()}:
            callers.setdefault(callee, []).append(name)
            if callee not in known:
                known.add(callee)
                pending.append(callee)
    return Acting(*(reached(names, lambda name: callers.get(name, ())) for names in (stateful, effects)))


def _unknown_controls(function: Function, functions: Mapping[str, Function]) -> list[int]:
    """Control results of custom ops: the only sign that such a node does something."""
    ops = function.body.ops
    return [
        node for node in function.control_results if schema.lookup(ops[node]) is None and ops[node] not in functions
    ]


def body_of(function: Function, functions: Mapping[str, Function], active: Acting) -> FunctionBody:
    """The body of a function as it is inlined: what neither results nor effects need is left out."""
    graph = function.body
    calls = find_calls(graph, functions)
    results = [(result.node, result.port) for result in function.results]
    effects = [
        node
        for node, op in enumerate(graph.ops)
        if (calls[node].name in active.effects if node in calls else has_effect(op))
    ]
    effects = sorted({*effects, *_unknown_controls(function, functions)})
    keep = graph.ancestors([*(node for node, _ in results), *function.control_results, *effects])
    parameter = np.full(len(graph), -1, dtype=np.int32)
    for number, argument in enumerate(function.parameters):
        parameter[argument.node] = number
    stateful = [
        node
        for node, op in enumerate(graph.ops)
        if keep[node] and (calls[node].name in active.stateful if node in calls else is_stateful(op))
    ]
    finals = [*(node for node, _ in results), *function.control_results, *stateful]
    return split(graph, keep, parameter, calls, results, list(dict.fromkeys(finals)), effects)


def split(
    graph: Graph,
    keep: NDArray[np.bool_],
    parameter: Ints,
    calls: Mapping[int, FunctionRef],
    results: Sequence[tuple[int, int]],
    finals: Sequence[int],
    effects: Sequence[int],
) -> FunctionBody:
    """Splits the kept nodes of a graph into a `FunctionBody`."""
    is_call = np.zeros(len(graph), dtype=np.bool_)
    is_call[list(calls)] = True
    ordinary = np.flatnonzero(keep & ~is_call & (parameter < 0)).astype(np.int32)
    place = np.full(len(graph), -1, dtype=np.int32)
    place[ordinary] = np.arange(len(ordinary))
    edges = graph.edges
    into = place[edges.dst] >= 0
    from_inside = place[edges.src] >= 0
    inside, outside = edges.where(into & from_inside), edges.where(into & ~from_inside)
    waits_inside = np.zeros(len(graph), dtype=np.bool_)
    waits_inside[edges.dst[into & (parameter[edges.src] < 0)]] = True
    return FunctionBody(
        graph=graph,
        ordinary=ordinary,
        place=place,
        parameter=parameter,
        calls={node: called for node, called in calls.items() if keep[node]},
        edges=replace(inside, src=place[inside.src], dst=place[inside.dst]),
        foreign=replace(outside, dst=place[outside.dst]),
        first=np.flatnonzero(~waits_inside[ordinary]).tolist(),
        results=results,
        finals=finals,
        effects=[int(place[node]) for node in effects if place[node] >= 0],
    )


def bodies(root: FunctionBody, functions: Mapping[str, Function], where: str) -> dict[str, FunctionBody]:
    """The body of every function that is reached by calls, after a check that they can be inlined at all.

    Raises:
        LoadError: A function calls itself, directly or through others; calls are nested deeper than `MAX_DEPTH`; or inlining would
            make more than `MAX_NODES` nodes, or `MAX_GROWTH` times as many as there are in the file.
    """
    found: dict[str, FunctionBody] = {}
    active = acting((called.name for called in root.calls.values()), functions)
    inlined: dict[str, _Inlined] = {}
    chain: list[str] = []
    on_chain: set[str] = set()
    # Depth first without recursion: (function or None for the root, what it still has to call).
    stack: list[tuple[str | None, FunctionBody, list[str]]] = [(None, root, _callees(root))]
    while stack:
        name, body, pending = stack[-1]
        if pending:
            callee = pending.pop()
            if callee in on_chain:
                loop = [*chain[chain.index(callee) :], callee]
                raise LoadError(
                    f"the function {callee} calls itself: {' -> '.join(_shortened(loop))}",
                    where=where,
                    fix="TensorFlow can not run such functions either; export the model with a while loop instead",
                )
            if callee not in found:
                found[callee] = body_of(functions[callee], functions, active)
                chain.append(callee)
                on_chain.add(callee)
                stack.append((callee, found[callee], _callees(found[callee])))
            continue
        stack.pop()
        whole = _Inlined.of(body, found, inlined)
        if name is None:
            there = len(root.graph) + sum(len(called.graph) for called in found.values())
            whole.check("the functions", min(MAX_NODES, max(FREE_NODES, MAX_GROWTH * there)), where)
            whole.check_names(where)
        else:
            whole.check(f"the function {name}", MAX_NODES, where)
            inlined[name] = whole
            on_chain.remove(chain.pop())
    return found


@dataclass(frozen=True)
class _Inlined:
    """A body with all that it calls inlined.

    Attributes:
        size: Number of nodes, at most.
        characters: Length of their names, which hold those of all calls around them, at most.
        depth: How many calls are inside each other.
    """

    size: int
    characters: int
    depth: int

    @classmethod
    def of(cls, body: FunctionBody, bodies: Mapping[str, FunctionBody], inlined: Mapping[str, _Inlined]) -> _Inlined:
        """By what its callees become."""
        names = body.graph.names
        size, depth = len(body.ordinary), 0
        characters = sum(len(names[node]) for node in body.ordinary.tolist())
        for call, called in body.calls.items():
            inside = inlined[called.name]
            # A call may add an input join, an output join and an identity per result.
            nodes = 2 + len(bodies[called.name].results) + inside.size
            size += nodes
            characters += nodes * (len(names[call]) + 1) + inside.characters
            depth = max(depth, inside.depth + 1)
        return cls(size, characters, depth)

    def check(self, what: str, most: int, where: str) -> None:
        """Refuses more than `most` nodes, and calls nested deeper than `MAX_DEPTH`."""
        if self.size > most:
            raise LoadError(
                f"inlining {what} makes {self.size:,} nodes; msplit takes {most:,}",
                where=where,
                fix="functions that call each other many times over grow with every level: export the model with fewer levels",
            )
        if self.depth > MAX_DEPTH:
            raise LoadError(
                f"functions are called {self.depth:,} deep; msplit takes {MAX_DEPTH:,}",
                where=where,
                fix="export the model with fewer functions inside each other",
            )

    def check_names(self, where: str) -> None:
        """Refuses names that are longer than a graph of this size needs."""
        if self.characters > max(FREE_CHARACTERS, MAX_NAME * self.size):
            raise LoadError(
                f"the names of inlined nodes, which hold those of all calls around them, would have {self.characters:,} characters",
                where=where,
                fix="export the model with shorter names, or with fewer functions inside each other",
            )


def _shortened(chain: list[str]) -> list[str]:
    return chain if len(chain) <= 8 else [*chain[:4], f"… {len(chain) - 8:,} more …", *chain[-4:]]


def check_arity(body: FunctionBody, functions: Mapping[str, Function], where: str) -> None:
    """Checks that calls give what functions take, and that results which are asked for exist.

    Raises:
        GraphError: Names every call that does not.
    """
    defects = []
    edges = body.graph.edges
    for node, called in body.calls.items():
        function = functions[called.name]
        name = body.graph.names[node]
        slots = edges.slot[body.graph.in_start[node] : body.graph.in_start[node + 1]]
        given = int((slots != CONTROL).sum())
        if given != len(function.parameters):
            defects.append(f"{name} gives {given} arguments to {called.name}, which takes {len(function.parameters)}")
        highest = max(edges.port[body.graph.out_edges(node)], default=CONTROL)
        if highest >= len(function.results):
            defects.append(f"{name}:{highest} is used, but {called.name} has {len(function.results)} results")
    if defects:
        raise GraphError(defects, where=where)


def _callees(body: FunctionBody) -> list[str]:
    """Functions that a body calls, once each, the first called last."""
    return list(dict.fromkeys(called.name for called in body.calls.values()))[::-1]
