"""The order in which a plan's nodes are recorded.

In a CUDA graph there are no streams, only edges, but the order in which nodes are recorded decides which lane a node replays on:
a node that joins several branches goes on where its first recorded producer ran. So the critical child of a fork is
recorded first, and what has slack comes as late as its consumers allow.
"""

from __future__ import annotations

import heapq

import numpy as np

from msplit.analysis.path import longest
from msplit.core.contraction import topological_numbers
from msplit.core.dag import Dag
from msplit.core.graph import Floats, Ints


def upward_rank(dag: Dag, weights: Floats, order: Ints) -> Floats:
    """Length of the longest path from each node to a sink, its own weight included. `order` is any topological one."""
    return longest(weights, order[::-1], dag.start, dag.src)


def places(key: Floats) -> tuple[list[int], list[int]]:
    """The place of each node by falling key, ties by number, and the node at each place.

    A heap of places is faster than one of pairs of key and node.
    """
    by_key = np.argsort(-key, kind="stable")
    place = np.empty(len(key), np.int64)
    place[by_key] = np.arange(len(key))
    return place.tolist(), by_key.tolist()


def topological(dag: Dag, key: Floats | None = None) -> Ints:
    """A topological order: among ready nodes the one with the largest key first, ties by number (Kahn's algorithm with a heap)."""
    count = len(dag)
    out_start, out_dst = (column.tolist() for column in dag.consumers())
    waiting = np.diff(dag.start).tolist()
    place, node_at = places(np.zeros(count) if key is None else key)
    heap = [place[node] for node in range(count) if waiting[node] == 0]
    heapq.heapify(heap)
    result = []
    while heap:
        node = node_at[heapq.heappop(heap)]
        result.append(node)
        for consumer in out_dst[out_start[node] : out_start[node + 1]]:
            waiting[consumer] -= 1
            if waiting[consumer] == 0:
                heapq.heappush(heap, place[consumer])
    return np.asarray(result, dtype=np.int32)


def record_order(dag: Dag, weights: Floats) -> Ints:
    """Topological order by falling upward rank: the critical child first, side work breadth-first across branches."""
    # The rank is the same along any topological order.
    return topological(dag, upward_rank(dag, weights, topological_numbers(dag)))
