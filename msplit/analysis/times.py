"""Longest paths over a graph with node times, in one pass each."""

from __future__ import annotations

import numpy as np

from msplit.cost.costs import Floats
from msplit.graph import Graph


def earliest_finish(graph: Graph, time_us: Floats) -> Floats:
    """When each node could end if nothing but its inputs held it back, µs after the start.

    Args:
        graph: A DAG.
        time_us: Time of each node.
    """
    starts, producers, times = graph.in_start.tolist(), graph.edges.src.tolist(), time_us.tolist()
    finish = [0.0] * len(graph)
    for node in graph.topological.tolist():
        ready = 0.0
        for producer in producers[starts[node] : starts[node + 1]]:
            if finish[producer] > ready:
                ready = finish[producer]
        finish[node] = ready + times[node]
    return np.asarray(finish)
