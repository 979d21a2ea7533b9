"""Regions: nodes that must stay together on one stream."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from msplit.core.graph import CONTROL, Graph, Ints
from msplit.core.union_find import DisjointSets
from msplit.flatten.control_flow import conds, frames
from msplit.flatten.flat import Region
from msplit.opset import schema
from msplit.opset.traits import ops_with

_VARIABLES = ops_with("reference variable") | ops_with("temporary variable")


def find_regions(graph: Graph) -> tuple[Ints, tuple[Region, ...]]:
    """The regions of a graph: v1 loops, v1 conds, and the readers and writers of one ref variable.

    Regions that share a node are one region: its kind and name are those of the outermost, a variable's only where there is no
    loop or cond in it. The graph is a DAG: back edges are cut.

    Returns:
        Per node the index of its region or -1, and the regions, ordered by their first node.
    """
    loop = frames(graph)
    cond = conds(graph, loop.outermost)
    candidates = [Region("cond", name) for name in cond.names]
    first_loop = len(candidates)
    candidates += [Region("loop", name) for name in loop.names]
    members = [*_members(cond.outermost, 0), *_members(loop.outermost, first_loop)]
    for variable, touched in _variables(graph):
        members += [(node, len(candidates)) for node in touched]
        candidates.append(Region("variable", variable))
    return _union(len(graph), members, candidates)


def _members(region: Ints, first: int) -> Iterable[tuple[int, int]]:
    nodes = np.flatnonzero(region >= 0)
    return zip(nodes.tolist(), (region[nodes] + first).tolist(), strict=True)


def _variables(graph: Graph) -> Iterable[tuple[str, list[int]]]:
    """Ref variables with what reads and writes them, through ops that hand the reference on."""
    if not _VARIABLES & set(graph.ops):
        return
    edges = graph.edges
    for variable, op in enumerate(graph.ops):
        if op not in _VARIABLES:
            continue
        touched = {variable: None}
        stack = [variable]
        while stack:
            node = stack.pop()
            dtypes = schema.output_dtypes(graph.ops[node], graph.attrs[node]) or ()
            for edge in graph.out_edges(node).tolist():
                port = int(edges.port[edge])
                consumer = int(edges.dst[edge])
                is_ref = port != CONTROL and port < len(dtypes) and (dtypes[port] or "").endswith("_ref")
                if is_ref and consumer not in touched:
                    touched[consumer] = None
                    stack.append(consumer)
        if len(touched) > 1:
            yield graph.names[variable], list(touched)


def _union(count: int, members: list[tuple[int, int]], candidates: list[Region]) -> tuple[Ints, tuple[Region, ...]]:
    """Joins candidates that share a node. The first candidate of a joined region gives it its kind and name."""
    joined = DisjointSets(len(candidates))
    owner: dict[int, int] = {}
    for node, region in members:
        joined.join(owner.setdefault(node, region), region)
    result = np.full(count, -1, np.int32)
    number: dict[int, int] = {}
    regions: list[Region] = []
    for node in sorted(owner):
        chosen = joined.find(owner[node])
        if chosen not in number:
            number[chosen] = len(regions)
            regions.append(candidates[chosen])
        result[node] = number[chosen]
    return result, tuple(regions)
