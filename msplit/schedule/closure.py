"""Ancestors as bit sets, and the transitive reduction. Quadratic: only for graphs within a stated bound."""

from __future__ import annotations

import numpy as np

from msplit.core.dag import Dag

LARGEST = 20_000
"""Nodes. The bit sets of that many take at most 25 MB."""


def ancestors(dag: Dag) -> list[int]:
    """Per node a bit set of all nodes that come before it. O(n·m / 64).

    Args:
        dag: Numbered topologically.
    """
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

    Args:
        dag: Numbered topologically, each edge once.
        above: Its `ancestors`.
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
