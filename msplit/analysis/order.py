"""An order of the nodes that depends on what the graph computes, not on names or on the order of the file."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from msplit.flatten.flat import FlatGraph
from msplit.graph import Ints
from msplit.memory import remembered


def canonical(flat: FlatGraph) -> Ints:
    """The nodes in the order in which a depth-first walk from the outputs finishes them: inputs by slot, producers before consumers.

    Decisions between equals are made by this order, so that renaming nodes or reordering a file does not change a partition. Several
    outputs are taken by depth, op and number of inputs; between those that are alike in all of these, names decide, the
    shorter first.

    Returns:
        A topological order of all nodes.
    """
    return remembered(flat, "canonical order", (), lambda: _canonical(flat))


def _canonical(flat: FlatGraph) -> Ints:
    graph = flat.graph
    starts, sources = graph.in_start.tolist(), graph.edges.src.tolist()
    place = list(starts[:-1])
    seen = [False] * len(graph)
    order: list[int] = []
    roots = sorted({output.node for output in flat.outputs} | set(flat.targets), key=_by_structure(flat))
    stack: list[int] = []
    for root in (*roots, *range(len(graph))):
        if seen[root]:
            continue
        seen[root] = True
        stack.append(root)
        while stack:
            node = stack[-1]
            at, stop = place[node], starts[node + 1]
            while at < stop and seen[sources[at]]:
                at += 1
            if at == stop:
                order.append(node)
                stack.pop()
            else:
                place[node] = at + 1
                seen[sources[at]] = True
                stack.append(sources[at])
    return np.asarray(order, dtype=np.int32)


def _by_structure(flat: FlatGraph) -> Callable[[int], tuple[int, str, int, int, str]]:
    graph = flat.graph

    def key(node: int) -> tuple[int, str, int, int, str]:
        name = graph.names[node]
        inputs = int(graph.in_start[node + 1] - graph.in_start[node])
        return -int(graph.level[node]), graph.ops[node], inputs, len(name), name

    return key
