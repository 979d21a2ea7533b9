"""Who comes before whom in a DAG: what everything passes through, what is connected; ancestors and transitive reduction.

Graphs are numbered topologically. The last two are quadratic: only for graphs within a stated bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from msplit.core.dag import Dag
from msplit.core.graph import Ints

LARGEST = 20_000
"""Nodes. The bit sets of that many take at most 25 MB."""


def ancestors(dag: Dag) -> list[int]:
    """Per node a bit set of all nodes that come before it. O(n·m / 64)."""
    start, src = dag.start.tolist(), dag.src.tolist()
    above: list[int] = []
    for node in range(len(dag)):
        bits = 0
        for producer in src[start[node] : start[node + 1]]:
            bits |= above[producer] | 1 << producer
        above.append(bits)
    return above


def transitive_reduction(dag: Dag, above: list[int]) -> Dag:
    """The smallest graph with the same ancestors (Aho, Garey and Ullman 1972). Nimble calls it the minimum equivalent graph.

    Each edge is in `dag` once, and `above` are its `ancestors`.
    """
    start, src = dag.start.tolist(), dag.src.tolist()
    kept: list[int] = []
    starts = [0]
    for node in range(len(dag)):
        covered = 0
        needed = []
        # The largest number first: only a later producer can have an earlier one among its ancestors.
        for producer in sorted(src[start[node] : start[node + 1]], reverse=True):
            if not covered >> producer & 1:
                needed.append(producer)
                covered |= above[producer] | 1 << producer
        kept += reversed(needed)
        starts.append(len(kept))
    return Dag(np.asarray(starts, np.int32), np.asarray(kept, np.int32))


def cuts(dag: Dag) -> NDArray[np.bool_]:
    """Nodes that are an ancestor or a descendant of every other node. O(n + m).

    In a topological numbering all nodes before v lead to v if and only if each of them has a consumer no later than v (walk on from
    consumer to consumer); all nodes after v depend on it if and only if each has a producer no earlier than v.
    """
    count = len(dag)
    first_consumer = np.full(count, count, np.int64)
    last_producer = np.full(count, -1, np.int64)
    dst = dag.dst()
    np.minimum.at(first_consumer, dag.src, dst)
    np.maximum.at(last_producer, dst, dag.src)
    number = np.arange(count)
    furthest = np.concatenate([[-1], np.maximum.accumulate(first_consumer)[:-1]]) if count else first_consumer
    nearest = (
        np.concatenate([np.minimum.accumulate(last_producer[::-1])[::-1][1:], [count]]) if count else last_producer
    )
    return np.asarray((furthest <= number) & (nearest >= number))


def between_cuts(dag: Dag) -> Iterator[tuple[int, int]]:
    """Ranges (first, end) of the nodes that lie between two that everything passes through, where there are two or more of them."""
    borders = [-1, *np.flatnonzero(cuts(dag)).tolist(), len(dag)]
    for before, after in pairwise(borders):
        if after - before > 2:
            yield before + 1, after


def components(count: int, src: Ints, dst: Ints) -> Ints:
    """Per node the smallest node that it is connected with, in any direction. Near-linear (union-find with path halving)."""
    parent = list(range(count))
    for first, second in zip(src.tolist(), dst.tolist(), strict=True):
        while parent[first] != first:
            parent[first] = first = parent[parent[first]]
        while parent[second] != second:
            parent[second] = second = parent[parent[second]]
        if first < second:
            parent[second] = first
        else:
            parent[first] = second
    for node in range(count):
        parent[node] = parent[parent[node]]
    return np.asarray(parent, np.int32)
