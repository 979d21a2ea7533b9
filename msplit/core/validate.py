"""Finds every structural defect of a graph: what TensorFlow's importer would reject, and calls to functions that are not there.

The importer stops at the first defect and, given a call to a missing function, at the first run. Nothing here recurses, so a chain
of any length and functions that call each other in a circle are fine.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from msplit.core.dag import Dag
from msplit.core.graph import CONTROL, Edges, Graph, Ints
from msplit.opset import schema
from msplit.opset.traits import MERGE, NEXT

_NAME = re.compile(r"[A-Za-z0-9.][A-Za-z0-9_.\-/]*(?:>[A-Za-z0-9.][A-Za-z0-9_.\-/]*)*")
"""Names that TensorFlow's graph importer accepts."""

_BODY_NAME = re.compile(r"[^\^:\s][^:\s]*")
"""Names that an input inside a function body can refer to; TensorFlow checks no more there."""

_NAMES_SHOWN = 6
_UNKNOWN = -1


@dataclass(frozen=True)
class Defect:
    """A defect of a graph.

    Attributes:
        kind: "input", "order", "duplicate", "name", "op", "port", "arity", "cycle", "colocation" or "function".
        node: The node that has it, the first of them where there are several; "" for a result of a function.
        text: What is wrong, with its node and, in a function, the function.
    """

    kind: str
    node: str
    text: str


def verify(graph: Graph, *, where: str | None = None) -> list[Defect]:
    """Every defect of a graph and of the functions that it calls, directly or not: by graph, then by check, then by node.

    `where` is what the texts call the graph, nothing for a top-level graph.
    """
    seen: set[str] = set()
    found = [(where, graph)]
    dangling: list[list[Defect]] = []
    for name, body in found:  # grows while it is walked
        dangling.append([])
        for node, called in body.calls():
            if not called or called in seen:
                continue
            if called not in body.functions:
                text = f"calls function {called!r}, which the library does not have"
                dangling[-1].append(_defect("function", body, node, text, name))
                continue
            seen.add(called)
            found.append((f"function {called}", body.functions[called].body))
    defects = [*_of_graph(graph, where), *_of_edges(graph, where), *_colocation(graph, where), *dangling[0]]
    sound = _sound([body for _, body in found[1:]])
    for (name, body), calls in zip(found[1:], dangling[1:], strict=True):
        # A body may carry groups of the graph that it was traced in; TensorFlow ignores them, and so does this.
        defects += _of_graph(body, name, is_body=True)
        defects += [] if sound else _of_edges(body, name)
        defects += calls
    return defects


def _sound(bodies: Sequence[Graph]) -> bool:
    """True if no function has a defect of `_of_edges`, found in one graph of them all: a function has few nodes, a model many functions."""
    if not bodies:
        return True
    firsts = list(itertools.accumulate((len(body) for body in bodies[:-1]), initial=0))
    whole = Graph(
        names=[name for body in bodies for name in body.names],
        ops=[op for body in bodies for op in body.ops],
        devices=(),
        attrs=[attrs for body in bodies for attrs in body.attrs],
        edges=Edges.together([body.edges for body in bodies], firsts),
        functions=bodies[0].functions,
        broken_inputs=tuple(
            replace(broken, node=broken.node + first)
            for body, first in zip(bodies, firsts, strict=True)
            for broken in body.broken_inputs
            if broken.node >= 0
        ),
    )
    return next(_of_edges(whole, None), None) is None


def _of_graph(graph: Graph, where: str | None, *, is_body: bool = False) -> Iterator[Defect]:
    """Defects of inputs and names."""
    yield from _broken_inputs(graph, where)
    yield from _names(graph, where, _BODY_NAME if is_body else _NAME)


def _of_edges(graph: Graph, where: str | None) -> Iterator[Defect]:
    """Defects of edges between nodes. Two graphs side by side have the defects of both, and no others."""
    numbered = _op_numbers(graph)
    yield from _ports(graph, where, numbered)
    yield from _arity(graph, where, numbered)
    yield from _cycles(graph, where)


def _defect(kind: str, graph: Graph, node: int, text: str, where: str | None) -> Defect:
    prefix = f"{where}, " if where else ""
    return Defect(kind, graph.names[node], f"{prefix}node {graph.names[node]!r} ({graph.ops[node] or 'no op'}): {text}")


def _broken_inputs(graph: Graph, where: str | None) -> Iterator[Defect]:
    for broken in graph.broken_inputs:
        if broken.node < 0:
            yield Defect("input", "", f"{where or 'function'}: {broken.text!r} {broken.why}")
        else:
            kind = "order" if "control" in broken.why else "input"
            yield _defect(kind, graph, broken.node, f"input {broken.text!r} {broken.why}", where)


def _names(graph: Graph, where: str | None, valid: re.Pattern[str]) -> Iterator[Defect]:
    fullmatch = valid.fullmatch
    for node, name in enumerate(graph.names):
        if not fullmatch(name):
            yield _defect("name", graph, node, "the name is not one that TensorFlow accepts", where)
    if len(graph.index) < len(graph):
        for name, count in Counter(graph.names).items():
            if count > 1:
                yield _defect("duplicate", graph, graph.index[name], f"{count} nodes have this name", where)
    if "" in graph.ops:
        for node, op in enumerate(graph.ops):
            if not op:
                yield _defect("op", graph, node, "has no op", where)


def _op_numbers(graph: Graph) -> tuple[list[str], Ints]:
    """The different ops, and per node the number of its op among them."""
    number = {op: position for position, op in enumerate(dict.fromkeys(graph.ops))}
    return list(number), np.fromiter((number[op] for op in graph.ops), dtype=np.int32, count=len(graph))


def _fixed(ops: Sequence[str], arguments: Callable[[schema.OpInfo], tuple[schema.ArgInfo, ...]]) -> NDArray[np.int64]:
    """Per op the number of tensors that some of its arguments stand for, _UNKNOWN where that hangs on attributes."""
    counts = []
    for op in ops:
        info = schema.lookup(op)
        args = arguments(info) if info else ()
        # The stand-in of a parameter has one port per tensor of the parameter, which the file does not count.
        variable = info is None or op == "_Arg" or any(arg.number_attr or arg.type_list_attr for arg in args)
        counts.append(_UNKNOWN if variable else len(args))
    return np.array(counts, dtype=np.int64)


def _ports(graph: Graph, where: str | None, numbered: tuple[list[str], Ints]) -> Iterator[Defect]:
    """Data inputs that take an output which their producer has not."""
    edges = graph.edges
    ops, number = numbered
    highest = np.full(len(graph), CONTROL, dtype=np.int32)
    np.maximum.at(highest, edges.src, edges.port)
    count = _fixed(ops, lambda info: info.outputs)[number]
    for node in np.flatnonzero((count == _UNKNOWN) & (highest >= 0)).tolist():
        op = graph.ops[node]
        if op in graph.functions:
            count[node] = len(graph.functions[op].results)
        elif op != "_Arg":
            known = schema.output_count(op, graph.attrs[node])
            count[node] = _UNKNOWN if known is None else known
    bad = (count[edges.src] != _UNKNOWN) & (edges.port >= count[edges.src])
    for edge in np.flatnonzero(bad).tolist():
        source, port = int(edges.src[edge]), int(edges.port[edge])
        outputs = "1 output" if count[source] == 1 else f"{count[source]} outputs"
        text = f"input '{graph.names[source]}:{port}' names a port out of range: {graph.ops[source]} has {outputs}"
        yield _defect("port", graph, int(edges.dst[edge]), text, where)


def _arity(graph: Graph, where: str | None, numbered: tuple[list[str], Ints]) -> Iterator[Defect]:
    """Nodes with more or fewer data inputs than their op takes."""
    ops, number = numbered
    expected = _fixed(ops, lambda info: info.inputs)[number]
    data = graph.edges.port != CONTROL
    given = np.bincount(graph.edges.dst[data], minlength=len(graph))
    variable = np.array([schema.lookup(op) is not None for op in ops], dtype=bool)[number] & (expected == _UNKNOWN)
    for node in np.flatnonzero(variable).tolist():
        known = schema.input_count(graph.ops[node], graph.attrs[node])
        expected[node] = _UNKNOWN if known is None else known
    # Where an input is broken the count is off, and the node is reported already.
    expected[[broken.node for broken in graph.broken_inputs if broken.node >= 0]] = _UNKNOWN
    for node in np.flatnonzero((expected != _UNKNOWN) & (expected != given)).tolist():
        takes = "no input" if expected[node] == 0 else "1 input" if expected[node] == 1 else f"{expected[node]} inputs"
        yield _defect("arity", graph, node, f"has {given[node]} and its op takes {takes}", where)


def _colocation(graph: Graph, where: str | None) -> Iterator[Defect]:
    for node in graph.nodes_with("_class"):
        groups = graph.attrs[node]["_class"]
        for group in groups if isinstance(groups, tuple) else (groups,):
            if isinstance(group, str) and group.startswith("loc:@") and group[5:] not in graph.index:
                yield _defect("colocation", graph, node, f"is colocated with {group[5:]!r}, which is no node", where)


def _cycles(graph: Graph, where: str | None) -> Iterator[Defect]:
    """Cycles that no loop closes (an edge from a NextIteration to a Merge); one for each knot of cycles."""
    stuck = np.flatnonzero(graph.level < 0)
    if not len(stuck):
        return
    local = np.full(len(graph), -1, dtype=np.int32)
    local[stuck] = np.arange(len(stuck))
    edges = graph.edges
    back = graph.with_ops(NEXT)[edges.src] & graph.with_ops(MERGE)[edges.dst]
    kept = (local[edges.src] >= 0) & (local[edges.dst] >= 0) & ~back
    src, dst = local[edges.src[kept]], local[edges.dst[kept]]
    start, followers = Dag.of(len(stuck), src, dst).consumers()
    successors = [followers[first:last].tolist() for first, last in itertools.pairwise(start.tolist())]
    for component in _knots(successors):
        cycle = [int(stuck[node]) for node in _shortest_cycle(successors, component)]
        shown = [graph.names[node] for node in cycle[:_NAMES_SHOWN]]
        if len(cycle) > len(shown):
            shown.append(f"… {len(cycle) - len(shown)} more …")
        path = " -> ".join([*shown, graph.names[cycle[0]]])
        yield _defect("cycle", graph, cycle[0], f"is on a cycle that no loop closes: {path}", where)


def _knots(successors: list[list[int]]) -> list[list[int]]:
    """Strongly connected components that hold a cycle, each sorted, by their first node (Tarjan's algorithm with its own stack)."""
    count = len(successors)
    found_at = [-1] * count
    low = [0] * count
    on_stack = bytearray(count)
    stack: list[int] = []
    result = []
    clock = 0
    for root in range(count):
        if found_at[root] >= 0:
            continue
        work = [(root, 0)]
        while work:
            node, position = work.pop()
            if position == 0:
                found_at[node] = low[node] = clock
                clock += 1
                stack.append(node)
                on_stack[node] = 1
            else:
                low[node] = min(low[node], low[successors[node][position - 1]])
            for next_position in range(position, len(successors[node])):
                target = successors[node][next_position]
                if found_at[target] < 0:
                    work.append((node, next_position + 1))
                    work.append((target, 0))
                    break
                if on_stack[target]:
                    low[node] = min(low[node], found_at[target])
            else:
                if low[node] == found_at[node]:
                    component: list[int] = []
                    while not component or component[-1] != node:
                        component.append(stack.pop())
                        on_stack[component[-1]] = 0
                    if len(component) > 1 or node in successors[node]:
                        result.append(sorted(component))
    return sorted(result)


def _shortest_cycle(successors: list[list[int]], component: list[int]) -> list[int]:
    """The shortest cycle through the first node of a component."""
    start = component[0]
    inside = set(component)
    before = {start: start}
    frontier = [start]
    while True:
        following = []
        for node in frontier:
            for target in successors[node]:
                if target == start:
                    cycle = [node]
                    while node != start:
                        node = before[node]
                        cycle.append(node)
                    return cycle[::-1]
                if target in inside and target not in before:
                    before[target] = node
                    following.append(target)
        frontier = following
