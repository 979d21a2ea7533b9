"""Whether a path leads from one node to another, for a few nodes of a large graph."""

from __future__ import annotations

from collections.abc import Sequence

from msplit.graph import Graph

_AT_ONCE = 512
"""Nodes whose ancestors are found in one pass over the graph: a set of them is an integer of so many bits."""


class Paths:
    """Reachability between some nodes. Each pass over the graph answers for `_AT_ONCE` of them.

    Args:
        graph: A DAG.
        nodes: The nodes to be asked for.
    """

    def __init__(self, graph: Graph, nodes: Sequence[int]) -> None:
        self._behind: dict[int, set[int]] = {}
        wanted = list(dict.fromkeys(nodes))
        if not wanted:
            return
        order = graph.topological.tolist()
        start, src = graph.in_start.tolist(), graph.edges.src.tolist()
        asked = set(wanted)
        self._behind = {node: set() for node in wanted}
        for low in range(0, len(wanted), _AT_ONCE):
            part = wanted[low : low + _AT_ONCE]
            bit = {node: 1 << place for place, node in enumerate(part)}
            above = [0] * len(graph)
            for node in order:
                found = 0
                for producer in src[start[node] : start[node + 1]]:
                    found |= above[producer]
                if node in asked and found:
                    self._behind[node].update(other for other in part if found & bit[other])
                above[node] = found | bit.get(node, 0)

    def between(self, first: int, last: int) -> bool:
        """Whether a path leads from the first to the last."""
        return first in self._behind[last]
