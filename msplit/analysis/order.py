"""An order of the nodes that depends on what the graph computes, not on names or on the order of the file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.analysis.colocation import groups
from msplit.analysis.symmetry import Cells
from msplit.core.graph import Floats, Ints
from msplit.core.memory import memoize
from msplit.flatten.flat import FlatGraph


def colours(flat: FlatGraph, weights: Floats | None = None) -> list[int]:
    """A number per node, made of what the node is and of everything in front of it and behind it.

    Three passes of colour refinement (Weisfeiler and Leman, 1968) along the edges instead of as many as there are nodes: to the outputs,
    back, and to the outputs again. Nodes that an automorphism maps onto each other have equal colours, and almost only those: two that
    differ in how their surroundings share nodes several forks away may be taken for equal. Data inputs count by slot, control inputs
    and consumers as sets.

    Near-linear. The numbers hang on no hash seed, and on no stream ids: an annotated graph is like the one it was made of. Weights, such
    as their times, tell nodes apart, too.
    """
    graph = flat.graph
    number = {op: place for place, op in enumerate(sorted(set(graph.ops)))}
    own = [
        hash(one)
        for one in zip(
            (number[op] for op in graph.ops),
            flat.host.tolist(),
            (flat.region >= 0).tolist(),
            np.zeros(len(graph)).tolist() if weights is None else weights.tolist(),
            strict=True,
        )
    ]
    order = graph.topological.tolist()
    of = groups(flat, state=False).of.tolist()
    forward = _refined(_tied(own, of), order, graph.in_start.tolist(), *_columns(flat, inputs=True))
    back = _refined(_tied(forward, of), order[::-1], graph.out_start.tolist(), *_columns(flat, inputs=False))
    return _refined(_tied(back, of), order, graph.in_start.tolist(), *_columns(flat, inputs=True))


def _tied(own: Sequence[int], of: Sequence[int]) -> list[int]:
    """Colours out of a node's own and those of the nodes that must share a stream with it."""
    together: dict[int, int] = {}
    for colour, group in zip(own, of, strict=True):
        if group >= 0:
            together[group] = together.get(group, 0) + hash((colour, 0))
    return [hash((colour, together[group])) if group >= 0 else colour for colour, group in zip(own, of, strict=True)]


def _columns(flat: FlatGraph, *, inputs: bool) -> tuple[list[int], list[tuple[int, int]]]:
    """Per edge, by consumer or by producer, the node at its other end and what kind of edge it is."""
    edges = flat.graph.edges
    if inputs:
        return edges.src.tolist(), list(zip(edges.port.tolist(), edges.slot.tolist(), strict=True))
    order = flat.graph.out_order
    return flat.graph.out_dst.tolist(), list(zip(edges.port[order].tolist(), edges.slot[order].tolist(), strict=True))


def _refined(
    own: Sequence[int],
    order: Sequence[int],
    starts: Sequence[int],
    others: Sequence[int],
    kinds: Sequence[tuple[int, int]],
) -> list[int]:
    """Colours of nodes out of their own and the new ones of their neighbours on one side, which come earlier in the order."""
    colour = list(own)
    for node in order:
        first, last = starts[node], starts[node + 1]
        # The slot of an edge says where it belongs, so that a sum loses nothing and the order of control inputs does not count.
        colour[node] = hash(
            (own[node], sum([hash((colour[others[edge]], kinds[edge])) for edge in range(first, last)]))
        )
    return colour


def canonical(flat: FlatGraph, weights: Floats | None = None, *further: NDArray[np.generic]) -> Ints:
    """The nodes in the order in which a depth-first walk from the outputs finishes them: inputs by slot, producers before consumers.

    Decisions between equals are made by this order, so that renaming nodes or reordering a file does not change a partition. Several
    outputs, and behind them the ends of what no output needs, are taken by depth, op, number of inputs and by what is in front of
    them and around that (`colours`). Those that are alike in all of these are copies of each other, for all that
    `symmetry.Cells` can see. Of copies the one with the shortest name is first, and then its companions are the first of theirs: other
    names swap copies, and whatever belongs to them with them.

    Args:
        weights: Per node what else tells outputs apart: its time.
        further: Per node what else tells copies apart, and nothing but copies: columns of any type.
    """
    alike = memoize(flat, "roots", (weights,), lambda: _roots(flat, weights))
    if all(len(roots) == 1 for roots in alike):
        further = ()  # there are no copies
    elif further:
        colour = np.unique(_colours(flat, weights), return_inverse=True)[1].reshape(-1)
        further = tuple(column for column in further if _parts(colour, column))

    def find() -> Ints:
        return _walk(flat, _one_by_one(flat, alike, weights, further))

    return memoize(flat, "canonical order", (weights, *further), find)


def _parts(colour: NDArray[np.integer], column: NDArray[np.generic]) -> bool:
    """Whether a column tells nodes of one colour apart: whoever asks without it gets the same order otherwise, found once for both."""
    first = np.empty(int(colour.max(initial=-1)) + 1, np.int64)
    first[colour[::-1]] = np.arange(len(colour))[::-1]
    return bool((column != column[first[colour]]).any())


def _walk(flat: FlatGraph, roots: list[int]) -> Ints:
    graph = flat.graph
    starts, sources = graph.in_start.tolist(), graph.edges.src.tolist()
    place = list(starts[:-1])
    seen = [False] * len(graph)
    order: list[int] = []
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


def _roots(flat: FlatGraph, weights: Floats | None) -> list[list[int]]:
    """What the walk starts from: outputs and targets, then whatever else has no consumer. Those that have equal colours together."""
    graph = flat.graph
    wanted = {output.node for output in flat.outputs} | set(flat.targets)
    ends = np.flatnonzero(np.diff(graph.out_start) == 0).tolist()
    levels, inputs = graph.level.tolist(), np.diff(graph.in_start).tolist()
    found = [*wanted, *(end for end in ends if end not in wanted)]
    coarse = {node: (node not in wanted, -levels[node], graph.ops[node], inputs[node]) for node in found}
    if len(set(coarse.values())) == len(found):
        return [[root] for root in sorted(found, key=coarse.__getitem__)]
    colour = _colours(flat, weights)
    fine = {node: (*coarse[node], colour[node]) for node in found}
    return [list(alike) for _, alike in groupby(sorted(found, key=fine.__getitem__), key=fine.__getitem__)]


def _colours(flat: FlatGraph, weights: Floats | None) -> list[int]:
    return memoize(flat, "colours", (weights,), lambda: colours(flat, weights))


def _one_by_one(
    flat: FlatGraph, by_colour: list[list[int]], weights: Floats | None, further: Sequence[NDArray[np.generic]]
) -> list[int]:
    """Roots of which some may be copies of each other: whichever of these is first decides which of their companions are."""
    if all(len(roots) == 1 for roots in by_colour):
        return [root for (root,) in by_colour]
    names = flat.graph.names
    wanted = np.zeros(len(names), bool)
    wanted[[output.node for output in flat.outputs]] = True
    wanted[list(flat.targets)] = True
    cells = Cells(flat, _colours(flat, weights), (wanted, *further))

    def key(root: int) -> tuple[bool, int, int, str, int]:
        """Companions of what was singled out before others of their kind, in the order in which they were told apart."""
        cell = cells.of[root]
        return (cell < cells.even, cell, len(names[root]), names[root], root)

    order = []
    for alike in _parted(by_colour, further):
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


def _parted(by_colour: list[list[int]], further: Sequence[NDArray[np.generic]]) -> Iterator[list[int]]:
    """Roots of equal colours, by what else tells them apart."""

    def labels(root: int) -> list[Any]:
        return [column[root] for column in further]

    for alike in by_colour:
        for _, equal in groupby(sorted(alike, key=labels), key=labels):
            yield list(equal)
