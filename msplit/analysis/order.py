"""An order of the nodes that depends on what the graph computes, not on names or on the order of the file."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from msplit.analysis.structure import colours
from msplit.analysis.symmetry import Cells
from msplit.cost.costs import Floats
from msplit.flatten.flat import FlatGraph
from msplit.graph import Ints
from msplit.memory import remembered


def canonical(flat: FlatGraph, weights: Floats | None = None, *further: NDArray[np.generic]) -> Ints:
    """The nodes in the order in which a depth-first walk from the outputs finishes them: inputs by slot, producers before consumers.

    Decisions between equals are made by this order, so that renaming nodes or reordering a file does not change a partition. Several
    outputs, and behind them the ends of what no output needs, are taken by depth, op, number of inputs and by what is in front of
    them and around that (`structure.colours`). Those that are alike in all of these are copies of each other, for all that
    `symmetry.Cells` can see. Of copies the one with the shortest name is first, and then its companions are the first of theirs: other
    names swap copies, and whatever belongs to them with them.

    Args:
        flat: The graph.
        weights: Per node what else tells outputs apart: its time.
        further: Per node what else tells copies apart, and nothing but copies: columns of any type.

    Returns:
        A topological order of all nodes.
    """
    return remembered(flat, "canonical order", (weights, *further), lambda: _canonical(flat, weights, further))


def _canonical(flat: FlatGraph, weights: Floats | None, further: Sequence[NDArray[np.generic]]) -> Ints:
    graph = flat.graph
    starts, sources = graph.in_start.tolist(), graph.edges.src.tolist()
    place = list(starts[:-1])
    seen = [False] * len(graph)
    order: list[int] = []
    roots = _roots(flat, weights, further)
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


def _roots(flat: FlatGraph, weights: Floats | None, further: Sequence[NDArray[np.generic]]) -> list[int]:
    """What the walk starts from: outputs and targets, then whatever else has no consumer."""
    graph = flat.graph
    wanted = {output.node for output in flat.outputs} | set(flat.targets)
    ends = np.flatnonzero(np.diff(graph.out_start) == 0).tolist()
    levels, inputs = graph.level.tolist(), np.diff(graph.in_start).tolist()
    found = [*wanted, *(end for end in ends if end not in wanted)]
    coarse = {node: (node not in wanted, -levels[node], graph.ops[node], inputs[node]) for node in found}
    if len(set(coarse.values())) == len(found):
        return sorted(found, key=coarse.__getitem__)
    colour = remembered(flat, "colours", (weights,), lambda: colours(flat, weights))
    fine = {node: (*coarse[node], colour[node], *(column[node] for column in further)) for node in found}
    by_colour = [list(alike) for _, alike in groupby(sorted(found, key=fine.__getitem__), key=fine.__getitem__)]
    if len(by_colour) == len(found):
        return [root for (root,) in by_colour]
    return _one_by_one(flat, by_colour, Cells(flat, colour, (_listed(len(graph), wanted), *further)))


def _one_by_one(flat: FlatGraph, by_colour: list[list[int]], cells: Cells) -> list[int]:
    """Roots of which some may be copies of each other: whichever of these is first decides which of their companions are."""
    names = flat.graph.names

    def key(root: int) -> tuple[bool, int, int, str, int]:
        """Companions of what was singled out before others of their kind, in the order in which they were told apart."""
        cell = cells.of[root]
        return (cell < cells.even, cell, len(names[root]), names[root], root)

    order = []
    for alike in by_colour:
        left = set(alike)
        waiting = [key(root) for root in alike]
        heapify(waiting)
        while left:
            _, cell, *_, root = heappop(waiting)
            if root not in left or cell != cells.of[root]:
                continue  # it waits with its new number
            copies = cells.leading(cell)
            if copies is not None and root not in copies:
                heappush(waiting, key(root))
                root = min(copies, key=key)
            left.remove(root)
            order.append(root)
            for other in cells.single_out(root):
                if other in left:
                    heappush(waiting, key(other))
    return order


def _listed(count: int, nodes: set[int]) -> NDArray[np.bool_]:
    listed = np.zeros(count, bool)
    listed[list(nodes)] = True
    return listed
