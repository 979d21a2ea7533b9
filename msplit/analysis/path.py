"""The critical path: the longest path of a DAG by the weights of its nodes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.core.graph import Floats, Graph, Ints


def finish_times(graph: Graph, weights: NDArray[Any]) -> Floats:
    """Weight of the heaviest path that ends at each node, the node included: when it ends if nothing but its inputs delays it.

    Weights are at least 0. One pass in topological order over all edges, control edges included; O(nodes + edges).
    """
    return longest(weights, graph.topological, graph.out_start, graph.out_dst)


def critical_path(graph: Graph, weights: NDArray[Any]) -> tuple[float, Ints]:
    """The weight of the heaviest path, and its nodes from first to last.

    Among equal paths it is the one through the lowest numbers, from the end backwards.

    Raises:
        ValueError: The graph has a cycle, or a weight is negative.
    """
    if not len(graph):
        return 0.0, np.zeros(0, dtype=np.int32)
    if float(np.min(weights)) < 0:
        raise ValueError("weights must not be negative")
    if len(graph.topological) != len(graph):
        raise ValueError("the graph has a cycle")
    finish = finish_times(graph, weights)
    node = int(np.argmax(finish))
    path = [node]
    while True:
        before = graph.predecessors(node)
        if not len(before):
            break
        latest = before[finish[before] == finish[before].max()]
        node = int(latest.min())
        path.append(node)
    return float(finish.max()), np.array(path[::-1], dtype=np.int32)


def longest(weights: NDArray[Any], order: Ints, starts: Ints, others: Ints) -> Floats:
    """Weight of the heaviest path that ends at each node, the node included. From node v paths go to ``others[starts[v]:starts[v + 1]]``.

    With consumers and a topological order that is when each node ends at the earliest; with producers and the reverse order it is how
    long it takes from its start to the end of all (HEFT's upward rank without communication). On plain lists: chains make array calls per
    level slower.
    """
    weight = np.asarray(weights, dtype=np.float64).tolist()
    start, target = starts.tolist(), others.tolist()
    arrival = [0.0] * len(weight)
    result = [0.0] * len(weight)
    for node in order.tolist():
        done = result[node] = arrival[node] + weight[node]
        for following in target[start[node] : start[node + 1]]:
            if done > arrival[following]:
                arrival[following] = done
    return np.array(result, dtype=np.float64)
