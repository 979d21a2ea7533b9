"""Nodes that compute the same from the same values: TensorFlow's optimizer and msplit's engine run one of them for all."""

from __future__ import annotations

from typing import Any

import numpy as np

from msplit.core.graph import CONTROL, Graph, Ints
from msplit.core.hashing import Hashes, mixed
from msplit.cost.costs import Mask


def duplicates(graph: Graph, able: Mask) -> Ints:
    """Per node the first of the nodes that have the same op, attributes and inputs: itself, if there is none before it.

    Only nodes that read the very same tensors are found, not those that read duplicates of each other.

    Args:
        graph: A DAG.
        able: Which nodes may be merged: those that launch kernels and have no state.
    """
    count = len(graph)
    same = np.arange(count, dtype=np.int32)
    edges = graph.edges
    data = edges.port != CONTROL
    reads = np.bincount(edges.dst[data], minlength=count) > 0
    candidates = np.flatnonzero(able & reads)
    if len(candidates) < 2:
        return same
    numbers: dict[str, int] = {}
    ops = np.fromiter((numbers.setdefault(op, len(numbers)) for op in graph.ops), np.int64, count)
    signature = _inputs(graph, data) + mixed(ops.astype(np.uint64))
    _, group, size = np.unique(signature[candidates], return_inverse=True, return_counts=True)
    first: dict[tuple[Any, ...], int] = {}
    for node in candidates[size[group.reshape(-1)] > 1].tolist():
        attrs = sorted((name, repr(value)) for name, value in graph.attrs[node].items() if not name.startswith("_"))
        key = (graph.ops[node], tuple(graph.inputs(node)), tuple(attrs))
        same[node] = first.setdefault(key, node)
    return same


def _inputs(graph: Graph, data: Mask) -> Hashes:
    """A number per node that is the same for the same data inputs, and rarely for others."""
    edges = graph.edges
    tensor = mixed(mixed(edges.src.astype(np.uint64)) + (edges.port + 1).astype(np.uint64))
    own = np.where(data, mixed(tensor + edges.slot.astype(np.uint64)), np.uint64(0))
    total = np.concatenate((np.zeros(1, np.uint64), np.cumsum(own, dtype=np.uint64)))
    result: Hashes = total[graph.in_start[1:]] - total[graph.in_start[:-1]]
    return result
