"""The critical path: the longest path of a DAG by the weights of its nodes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.core.graph import Graph, Ints

Floats = NDArray[np.float64]


def finish_times(graph: Graph, weights: NDArray[Any]) -> Floats:
    """Weight of the heaviest path that ends at each node, the node included: when it ends if nothing but its inputs delays it.

    One pass in topological order over all edges, control edges included; O(nodes + edges).

    Args:
        graph: A DAG.
        weights: Per node, at least 0.
    """
    return _longest(graph, weights, graph.topological, graph.out_start, graph.out_dst)


def tails(graph: Graph, weights: NDArray[Any]) -> Floats:
    """Weight of the heaviest path that starts at each node, the node included (HEFT's upward rank without communication).

    Args:
        graph: A DAG.
        weights: Per node, at least 0.
    """
    return _longest(graph, weights, graph.topological[::-1], graph.in_start, graph.edges.src)


def critical_path(graph: Graph, weights: NDArray[Any]) -> tuple[float, Ints]:
    """The heaviest path.

    Args:
        graph: A DAG.
        weights: Per node, at least 0.

    Returns:
        Its weight, and its nodes from first to last. Among equal paths the one through the lowest numbers, from the end backwards.

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


def _longest(graph: Graph, weights: NDArray[Any], order: Ints, starts: Ints, others: Ints) -> Floats:
    """Pushes the weight of each node's heaviest path along its edges, on plain lists: chains make array calls per level slower."""
    weight = np.asarray(weights, dtype=np.float64).tolist()
    start, target = starts.tolist(), others.tolist()
    arrival = [0.0] * len(graph)
    result = [0.0] * len(graph)
    for node in order.tolist():
        done = result[node] = arrival[node] + weight[node]
        for following in target[start[node] : start[node + 1]]:
            if done > arrival[following]:
                arrival[following] = done
    return np.array(result, dtype=np.float64)
