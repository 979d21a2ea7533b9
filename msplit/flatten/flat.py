"""The flat view of a model: a DAG of the nodes that its outputs need, functions inlined.

From the flat graph back to the nodes of the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.core.graph import Edges, Graph, Ints
from msplit.escape import html, line
from msplit.formats.model import STREAM_ID, Model, Nodes


@dataclass(frozen=True)
class Region:
    """Nodes that must stay on one stream.

    Attributes:
        kind: "loop" (a v1 while frame with everything nested in it), "cond" (a v1 Switch..Merge region) or "variable" (the
            readers and writers of one ref variable).
        name: Frame name, name of the Switch's predicate, or the variable.
    """

    kind: str
    name: str


@dataclass(frozen=True)
class Tensor:
    """Output `port` of one node of a flat graph, with the name the user knows it by."""

    name: str
    node: int
    port: int


@dataclass(frozen=True, eq=False, repr=False)
class FlatGraph:
    """The flat graph: the input of analysis, rules and engines.

    Attributes:
        graph: A DAG: back edges of v1 loops are cut, calls are inlined (their nodes are named ``call/body_node``). `While`, `If` and
            their stateless kin stay one node each, `graph.functions` holds their bodies.
        back_edges: The edges that were cut (NextIteration -> Merge), in the numbering of `graph`.
        origin_function: Per node the index in `function_names` of the function it comes from, -1 for the top-level graph.
        origin_node: Per node its index in that function's NodeDefs (not counting parameters) or in the top-level GraphDef. The few
            nodes that inlining adds (NoOp joins of control edges, an Identity where a call gives a parameter back) have the index of
            their call; parameters, which are nodes only in the view of a single function, have -1.
        region: Per node the index of its outermost region in `regions`, or -1.
        host: Per node, whether it has no GPU kernel (string, table, parsing, iterator ops) or is pinned to a CPU device.
        stateful: Per node, whether its op is stateful (reads or writes a resource, or is random).
        targets: Nodes that must run though nothing of them is fetched, those inside of inlined calls included.
    """

    model: Model
    graph: Graph
    back_edges: Edges
    origin_function: Ints
    origin_node: Ints
    function_names: Sequence[str]
    region: Ints
    regions: Sequence[Region]
    host: NDArray[np.bool_]
    stateful: NDArray[np.bool_]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    targets: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.graph)

    def __repr__(self) -> str:
        fed, made = (", ".join(tensor.name for tensor in some[:4]) for some in (self.inputs, self.outputs))
        return f"<FlatGraph model: {line(str(self.model.path))}, nodes: {len(self):,}, inputs: {line(fed)}, outputs: {line(made)}>"

    def _repr_html_(self) -> str:
        return f"<code>{html(repr(self))}</code>"

    def origin(self, node: int) -> tuple[str | None, int]:
        """(function name or None for the top-level graph, index of the NodeDef in it)."""
        function = int(self.origin_function[node])
        return (self.function_names[function] if function >= 0 else None), int(self.origin_node[node])


OriginalNode = tuple[str | None, str]
"""Function (None for the top-level graph) and name of a node there."""


@dataclass(frozen=True)
class Conflict:
    """A node of a function's body for which the places that call the function want different stream ids.

    Attributes:
        wanted: The ids that are wanted, each with the flat names of the nodes that want it, the chosen one first.
    """

    function: str | None
    node: str
    wanted: Mapping[int, tuple[str, ...]]

    @property
    def chosen(self) -> int:
        """The id that is written."""
        return next(iter(self.wanted))

    def __str__(self) -> str:
        asked = "; ".join(f"stream {stream}: {', '.join(nodes)}" for stream, nodes in self.wanted.items())
        return f"{self.function}: {self.node} gets stream {self.chosen} at every place it is called from ({asked})"


def to_ids(
    flat: FlatGraph, ids: Sequence[int], cost: Sequence[float] | None = None
) -> tuple[dict[OriginalNode, int], tuple[Conflict, ...]]:
    """Maps stream ids of flat nodes to the nodes of the file that they come from.

    Calls that were inlined get no id, nor do parameters. Where the places that call a function want different ids for one node,
    it gets the id that most cost asks for, or the lowest of those where costs are equal: the order of the nodes decides nothing.

    Args:
        flat: The flat graph.
        ids: Per flat node its stream id; a negative one gives none.
        cost: Per flat node its weight where ids disagree; every node weighs the same without it.

    Returns:
        The ids, in the order of the flat nodes, and every disagreement.
    """
    streams = np.asarray(ids).tolist()
    if not flat.function_names:
        top = flat.model.graph.names
        pairs = zip(flat.origin_node.tolist(), streams, strict=True)
        return {(None, top[number]): stream for number, stream in pairs if stream >= 0}, ()
    wanted: dict[tuple[int, int], dict[int, list[int]]] = {}
    origins = zip(flat.origin_function.tolist(), flat.origin_node.tolist(), strict=True)
    for node, (origin, stream) in enumerate(zip(origins, streams, strict=True)):
        if stream >= 0 and origin[1] >= 0:
            wanted.setdefault(origin, {}).setdefault(stream, []).append(node)
    result: dict[OriginalNode, int] = {}
    conflicts = []
    for (function, number), by_stream in wanted.items():
        name, node_name, op = original(flat, function, number)
        # Joins that inlining adds come from a call, which is no node of theirs.
        for stream in list(by_stream):
            by_stream[stream] = [node for node in by_stream[stream] if flat.graph.ops[node] == op]
            if not by_stream[stream]:
                del by_stream[stream]
        if not by_stream:
            continue
        ranked = list(by_stream)
        if len(ranked) > 1:
            weight = {s: fsum(cost[n] if cost is not None else 1 for n in nodes) for s, nodes in by_stream.items()}
            ranked.sort(key=lambda stream: (-weight[stream], stream))
            shown = {stream: tuple(flat.graph.names[node] for node in by_stream[stream]) for stream in ranked}
            conflicts.append(Conflict(name, node_name, shown))
        result[name, node_name] = ranked[0]
    return result, tuple(conflicts)


def as_written(flat: FlatGraph, ids: Ints, cost: NDArray[np.float64]) -> Ints:
    """Per flat node the id that its node of the file gets, which all copies of it share; -1 where that is none. See `to_ids`."""
    if not flat.function_names:
        return ids
    written, _ = to_ids(flat, ids.tolist(), cost.tolist())
    result = np.full(len(flat), -1, np.int32)
    for node in np.flatnonzero(ids >= 0).tolist():
        function, number = int(flat.origin_function[node]), int(flat.origin_node[node])
        if number >= 0:
            name, node_name, op = original(flat, function, number)
            if op == flat.graph.ops[node]:
                result[node] = written.get((name, node_name), -1)
    return result


def with_ids(model: Model) -> Nodes:
    """The nodes of a file that have a stream id, by function, in the order of the file."""
    found = {"": _named_with_ids(model.graph)}
    found |= {name: _named_with_ids(function.body) for name, function in model.graph.functions.items()}
    return {name: nodes for name, nodes in found.items() if nodes}


def _named_with_ids(graph: Graph) -> tuple[str, ...]:
    return tuple(graph.names[node] for node in graph.nodes_with(STREAM_ID))


def among(flat: FlatGraph, nodes: Nodes) -> NDArray[np.bool_]:
    """Mask of the nodes of a flat graph that have an id and come from some nodes of the file."""
    known = {function: frozenset(names) for function, names in nodes.items()}
    mask = np.zeros(len(flat), np.bool_)
    for node in flat.graph.nodes_with(STREAM_ID):
        function, number = int(flat.origin_function[node]), int(flat.origin_node[node])
        if number >= 0:
            name, node_name, _ = original(flat, function, number)
            mask[node] = node_name in known.get(name or "", ())
    return mask


def original(flat: FlatGraph, function: int, number: int) -> tuple[str | None, str, str]:
    """Function, name and op of an original node."""
    graph: Any = flat.model.graph
    if function < 0:
        return None, graph.names[number], graph.ops[number]
    name = flat.function_names[function]
    body = graph.functions[name]
    place = number + len(body.parameters)
    return name, body.body.names[place], body.body.ops[place]
