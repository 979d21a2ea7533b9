"""Which nodes are needed, and graphs cut down to them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from msplit.core.graph import Edges, Graph, Ints
from msplit.opset import schema
from msplit.opset.traits import ops_with

_NO_EFFECT, _PARAMETERS = ops_with("no effect"), ops_with("parameter")


def is_stateful(op: str) -> bool:
    """Whether TensorFlow calls an op stateful. Unknown ops are not, nor are calls of functions by their name."""
    info = schema.lookup(op)
    # TensorFlow says so of parameters and results only to keep them from being merged.
    return info is not None and info.stateful and op not in _PARAMETERS


def has_effect(op: str) -> bool:
    """Whether a node of this op does something though nobody uses its outputs. Unknown ops are taken to have none."""
    return is_stateful(op) and op not in _NO_EFFECT


def restricted(edges: Edges, keep: NDArray[np.bool_]) -> tuple[Edges, Ints]:
    """Edges between kept nodes in the numbering of those nodes, and that numbering (-1 for nodes that are left out)."""
    number = np.where(keep, np.cumsum(keep) - 1, -1).astype(np.int32)
    inside = edges.where(keep[edges.src] & keep[edges.dst])
    return replace(inside, src=number[inside.src], dst=number[inside.dst]), number


def without_inputs(edges: Edges, nodes: Sequence[int], count: int) -> Edges:
    """Edges but those into some nodes."""
    cut = np.zeros(count, dtype=np.bool_)
    cut[list(nodes)] = True
    if not cut[edges.dst].any():
        return edges
    return edges.where(~cut[edges.dst])


def fed_entirely(graph: Graph, fed: Iterable[tuple[int, int]], roots: Iterable[tuple[int, int]]) -> list[int]:
    """Nodes that do not run because all that is needed of them is fed; nothing in front of them runs for them.

    Args:
        fed: (node, port) of fed tensors.
        roots: (node, port) of what is fetched; port CONTROL for a node that just runs.
    """
    given = set(fed)
    # A node without inputs has nothing in front of it.
    nodes = {node for node, _ in given if graph.in_start[node] != graph.in_start[node + 1]}
    if not nodes:
        return []
    edges = graph.edges
    crossing = np.zeros(len(edges), np.bool_)
    for node, port in given:
        out = graph.out_edges(node)
        crossing[out[edges.port[out] == port]] = True
    without = replace(graph, edges=edges.where(~crossing))
    runs = without.ancestors([node for node, port in roots if (node, port) not in given])
    return sorted(node for node in nodes if not runs[node])
