"""Nodes that compute the same from the same values: TensorFlow's optimizer and msplit's engine run one of them for all."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.cost.costs import Mask
from msplit.graph import CONTROL, Graph, Ints

_PRIMES = tuple(np.uint64(prime) for prime in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
"""Those of splitmix64 (Steele, Lea, Flood 2014)."""


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
    signature = _inputs(graph, data) + _mix(ops.astype(np.uint64))
    _, group, size = np.unique(signature[candidates], return_inverse=True, return_counts=True)
    first: dict[tuple[Any, ...], int] = {}
    for node in candidates[size[group.reshape(-1)] > 1].tolist():
        attrs = sorted((name, repr(value)) for name, value in graph.attrs[node].items() if not name.startswith("_"))
        key = (graph.ops[node], tuple(graph.inputs(node)), tuple(attrs))
        same[node] = first.setdefault(key, node)
    return same


def _inputs(graph: Graph, data: Mask) -> NDArray[np.uint64]:
    """A number per node that is the same for the same data inputs, and rarely for others."""
    edges = graph.edges
    tensor = edges.src.astype(np.uint64) * _PRIMES[1] + (edges.port + 1).astype(np.uint64) * _PRIMES[2]
    mixed = np.where(data, _mix(tensor + edges.slot.astype(np.uint64)), np.uint64(0))
    total = np.concatenate((np.zeros(1, np.uint64), np.cumsum(mixed, dtype=np.uint64)))
    result: NDArray[np.uint64] = total[graph.in_start[1:]] - total[graph.in_start[:-1]]
    return result


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of splitmix64; numbers wrap around."""
    mixed = values + _PRIMES[0]
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _PRIMES[1]
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _PRIMES[2]
    result: NDArray[np.uint64] = mixed ^ (mixed >> np.uint64(31))
    return result
