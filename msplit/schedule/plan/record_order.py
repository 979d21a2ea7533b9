"""The order in which a plan's nodes are recorded.

In a CUDA graph there are no streams, only edges, but the order in which nodes are recorded decides which lane a node replays on:
a node that joins several branches goes on where its first recorded producer ran. So the critical child of a fork is
recorded first, and what has slack comes as late as its consumers allow.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from msplit.core.contraction import topological_numbers
from msplit.core.dag import Dag
from msplit.core.graph import Ints


def upward_rank(dag: Dag, weights: NDArray[np.float64], order: Ints) -> NDArray[np.float64]:
    """Length of the longest path from each node to a sink, its own weight included (HEFT's rank without communication).

    Args:
        dag: The graph.
        weights: Cost of each node, any unit.
        order: A topological order of it.
    """
    tail = [0.0] * len(dag)
    start, src, weight = dag.start.tolist(), dag.src.tolist(), weights.tolist()
    for node in reversed(order.tolist()):
        rank = tail[node] + weight[node]
        tail[node] = rank
        for producer in src[start[node] : start[node + 1]]:
            if tail[producer] < rank:
                tail[producer] = rank
    return np.asarray(tail)


def topological(dag: Dag, key: NDArray[np.float64] | None = None) -> Ints:
    """A topological order: among ready nodes the one with the largest key first, ties by number (Kahn's algorithm with a heap)."""
    count = len(dag)
    out_start, out_dst = (column.tolist() for column in dag.consumers())
    waiting = np.diff(dag.start).tolist()
    # Nodes by key, then by number: a heap of places in this order is faster than one of pairs.
    by_key = np.arange(count) if key is None else np.argsort(-key, kind="stable")
    at = np.empty(count, np.int64)
    at[by_key] = np.arange(count)
    place, node_at = at.tolist(), by_key.tolist()
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


def record_order(dag: Dag, weights: NDArray[np.float64]) -> Ints:
    """Topological order by falling upward rank: the critical child first, side work breadth-first across branches."""
    # The rank is the same along any topological order.
    return topological(dag, upward_rank(dag, weights, topological_numbers(dag)))
