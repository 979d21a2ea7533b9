"""Which nodes must share a stream: colocation classes, regions, variable handles with their users, and what writes state unordered."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from msplit.analysis.paths import Paths
from msplit.analysis.state import unordered, users
from msplit.core.graph import CONTROL, Ints
from msplit.core.union_find import DisjointSets
from msplit.flatten.flat import FlatGraph
from msplit.opset.traits import ops_with

CLASS = "_class"
LOCATION = "loc:@"
_HANDLES = ops_with("handle")
_FORWARDS = ops_with("colocated")


@dataclass(frozen=True, eq=False)
class Groups:
    """Nodes that belong together.

    Attributes:
        of: Per node the number of its group, or -1 for a node on its own. Groups are numbered by their lowest node.
        count: Number of groups; each has two nodes or more.
    """

    of: Ints
    count: int

    def members(self) -> list[Ints]:
        """The nodes of each group, ascending."""
        grouped = np.flatnonzero(self.of >= 0)
        order = grouped[np.argsort(self.of[grouped], kind="stable")].astype(np.int32)
        return np.split(order, np.searchsorted(self.of[order], np.arange(1, self.count))) if self.count else []


def groups(
    flat: FlatGraph, *, classes: bool = True, regions: bool = True, handles: bool = True, state: bool = True
) -> Groups:
    """Closes all that ties nodes together, transitively.

    Tied are: by `classes` the nodes of one ``_class: loc:@x`` with each other and with node ``x`` (also where ``x`` itself is not in the
    graph any more), by `regions` those of one region, by `handles` a variable's handle with the nodes that take it, and by `state` what
    writes a variable, table or array with its other users that no path orders: on two streams they would race.
    """
    pairs = _classes(flat) if classes else []
    pairs += _regions(flat) if regions else []
    pairs += _handle_users(flat) if handles else []
    of = _closed(flat, pairs)
    if state and (racing := _racing(flat, of)):
        of = _closed(flat, pairs + racing)
    return Groups(of, int(of.max(initial=-1)) + 1)


def _closed(flat: FlatGraph, pairs: list[tuple[int, int]]) -> Ints:
    """Per node the number of its group, or -1."""
    tied = sorted({node for pair in pairs for node in pair})
    place = {node: number for number, node in enumerate(tied)}
    sets = DisjointSets(len(tied))
    for first, second in pairs:
        sets.join(place[first], place[second])
    number = np.unique([sets.find(node) for node in range(len(tied))], return_inverse=True)[1]
    of = np.full(len(flat), -1, np.int32)
    of[tied] = number
    return of


def _racing(flat: FlatGraph, of: Ints) -> list[tuple[int, int]]:
    """Pairs of users of one state on the GPU, of which one writes, that are in no group together and that nothing orders."""
    group = np.where(of >= 0, of, len(flat) + np.arange(len(flat))).tolist()
    known = [
        {node: writes for node, writes in of_one.items() if not flat.host[node]} for of_one in users(flat).values()
    ]
    apart = [of_one for of_one in known if any(of_one.values()) and len({group[node] for node in of_one}) > 1]
    place = np.empty(len(flat), np.int32)
    place[flat.graph.topological] = np.arange(len(flat), dtype=np.int32)
    open_ = [of_one for of_one in apart if not _chained(flat, sorted(of_one, key=place.__getitem__))]
    paths = Paths(flat.graph, [node for of_one in open_ for node in of_one], flat.back_edges)
    return [pair for of_one in open_ for pair in unordered(paths, of_one, group)]


def _chained(flat: FlatGraph, nodes: list[int]) -> bool:
    """Whether an edge leads from each node to the next, as the flow of a TensorArray does: then all are ordered, and nothing is to be
    searched."""
    dst = flat.graph.edges.dst
    return all(after in dst[flat.graph.out_edges(node)] for node, after in itertools.pairwise(nodes))


def _classes(flat: FlatGraph) -> list[tuple[int, int]]:
    graph = flat.graph
    first: dict[str, int] = {}
    pairs = []
    for node in graph.nodes_with(CLASS):
        values = graph.attrs[node].get(CLASS)
        for value in values if isinstance(values, tuple) else (values,):
            if isinstance(value, str) and value.startswith(LOCATION):
                name = value[len(LOCATION) :]
                leader = first.setdefault(name, graph.index.get(name, node))
                if leader != node:
                    pairs.append((leader, node))
    return pairs


def _regions(flat: FlatGraph) -> list[tuple[int, int]]:
    inside = np.flatnonzero(flat.region >= 0)
    _, first, of = np.unique(flat.region[inside], return_index=True, return_inverse=True)
    leaders = inside[first][of]
    return [(leader, node) for leader, node in zip(leaders.tolist(), inside.tolist(), strict=True) if leader != node]


def _handle_users(flat: FlatGraph) -> list[tuple[int, int]]:
    graph = flat.graph
    pairs = []
    for handle in [node for node, op in enumerate(graph.ops) if op in _HANDLES]:
        waiting = [handle]
        while waiting:
            node = waiting.pop()
            for edge in graph.out_edges(node).tolist():
                user = int(graph.edges.dst[edge])
                if graph.edges.port[edge] == CONTROL:
                    continue
                pairs.append((handle, user))
                if graph.ops[user] in _FORWARDS and graph.attrs[user].get("T") == "resource":
                    waiting.append(user)
    return pairs
