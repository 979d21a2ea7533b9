"""What some values need of a graph."""

from __future__ import annotations

from collections.abc import Iterable, Set

import numpy as np

from msplit.core.graph import CONTROL, Graph
from msplit.engines.cuda.ir.graph import Key


def reachable(graph: Graph, wanted: Iterable[Key], given: Set[Key]) -> list[int]:
    """Nodes that values need through data edges, in topological order; the walk stops at values that are given.

    Control edges order effects. Nothing that the engine runs has an effect, so a node needed only for control is left out.
    """
    seen = np.zeros(len(graph), dtype=bool)
    stack = [node for node, port in wanted if (node, port) not in given]
    seen[stack] = True
    start, src, ports = graph.in_start, graph.edges.src, graph.edges.port
    while stack:
        node = stack.pop()
        edges = slice(int(start[node]), int(start[node + 1]))
        for producer, port in zip(src[edges].tolist(), ports[edges].tolist(), strict=True):
            if port != CONTROL and not seen[producer] and (producer, port) not in given:
                seen[producer] = True
                stack.append(producer)
    found: list[int] = graph.topological[seen[graph.topological]].tolist()
    return found
