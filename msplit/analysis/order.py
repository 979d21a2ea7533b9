"""An order of the nodes that depends on what the graph computes, not on names or on the order of the file."""

from __future__ import annotations

import numpy as np

from msplit.analysis.structure import colours
from msplit.cost.costs import Floats
from msplit.flatten.flat import FlatGraph
from msplit.graph import Ints
from msplit.memory import remembered


def canonical(flat: FlatGraph, weights: Floats | None = None) -> Ints:
    """The nodes in the order in which a depth-first walk from the outputs finishes them: inputs by slot, producers before consumers.

    Decisions between equals are made by this order, so that renaming nodes or reordering a file does not change a partition. Several
    outputs, and behind them the ends of what no output needs, are taken by depth, op, number of inputs and by what is in front of
    them and around that (`structure.colours`). Between those that are alike in all of these, names decide, the shorter first: they
    are most likely copies of each other, and other names swap their parts.

    Args:
        flat: The graph.
        weights: Per node what else tells outputs apart: its time.

    Returns:
        A topological order of all nodes.
    """
    return remembered(flat, "canonical order", (weights,), lambda: _canonical(flat, weights))


def _canonical(flat: FlatGraph, weights: Floats | None) -> Ints:
    graph = flat.graph
    starts, sources = graph.in_start.tolist(), graph.edges.src.tolist()
    place = list(starts[:-1])
    seen = [False] * len(graph)
    order: list[int] = []
    roots = _roots(flat, weights)
    stack: list[int] = []
    for root in roots:
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


def _roots(flat: FlatGraph, weights: Floats | None) -> list[int]:
    """What the walk starts from: outputs and targets, then whatever else has no consumer."""
    graph = flat.graph
    wanted = {output.node for output in flat.outputs} | set(flat.targets)
    ends = np.flatnonzero(np.diff(graph.out_start) == 0).tolist()
    levels, inputs = graph.level.tolist(), np.diff(graph.in_start).tolist()
    found = [*wanted, *(end for end in ends if end not in wanted)]
    coarse = {node: (node not in wanted, -levels[node], graph.ops[node], inputs[node]) for node in found}
    if len(set(coarse.values())) == len(found):
        return sorted(found, key=coarse.__getitem__)
    colour = colours(flat, weights)
    return sorted(found, key=lambda node: (*coarse[node], colour[node], len(graph.names[node]), graph.names[node]))
