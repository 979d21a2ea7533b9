"""Where nothing runs side by side, and what lies between."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from msplit.core.dag import Dag
from msplit.core.graph import Ints


def cuts(dag: Dag) -> NDArray[np.bool_]:
    """Nodes that are an ancestor or a descendant of every other node. O(n + m).

    In a topological numbering all nodes before v lead to v if and only if each of them has a consumer no later than v (walk on from
    consumer to consumer); all nodes after v depend on it if and only if each has a producer no earlier than v.

    Args:
        dag: Numbered topologically.
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
