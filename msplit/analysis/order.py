"""Canonical order of a graph: the same for the same computation, whatever its nodes are called.

An order of the nodes that depends on what the graph computes, not on names or on the order of the file.

Telling copies apart without their names: partition refinement, one copy singled out at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.analysis.colocation import groups
from msplit.core.dag import Hashes, mixed
from msplit.core.graph import Floats, Ints, memoize
from msplit.flatten.flat import FlatGraph

BUDGET = 100_000
"""Links that may be looked at on trial for one graph: a limit in work, so that results do not depend on the machine."""

LARGEST = 200_000
"""A set is not tried where its members times the graph's links are more."""

_INPUT, _CONSUMER, _MEMBER = (np.uint64(number) for number in (1, 2, 3))


class Cells:
    """Sets of nodes that stand in like places: equal inputs and consumers, by set, by place and by number, and equal companions.

    The coarsest such sets are found by partition refinement. When a node is singled out, what it is linked with is told apart from its
    copies, and so on: between copies that belong together a decision is made once. All refinements of one graph together take
    O((n + m) log n), since of a set that is split all parts but the largest are looked at again.

    Sets are numbered by what they are, never by names or places in a file. A set may hold nodes that no automorphism maps onto each other:
    refinement can not tell a ring of six from two rings of three, and no fast algorithm is known that always can (this is graph
    isomorphism). `leading` looks one step ahead, while its budget lasts.

    Source: Hopcroft, "An n log n algorithm for minimizing states in a finite automaton", 1971; Paige and Tarjan, "Three partition
    refinement algorithms", SIAM J. Comput. 1987; individualisation as in McKay, "Practical graph isomorphism", 1981, with one branch.
    """

    def __init__(self, flat: FlatGraph, colours: Sequence[int], further: Sequence[NDArray[np.generic]]) -> None:
        """Finds the sets. Per node there are a colour and further columns: nodes that differ in any are of different sets."""
        self._link(flat)
        own = mixed(np.asarray(colours, np.int64).view(np.uint64))
        for column in further:
            own = mixed(own + np.unique(column, return_inverse=True)[1].reshape(-1).astype(np.uint64))
        own = np.concatenate([own, np.zeros(self._groups, np.uint64)])
        number, cells = self._first(own)
        self.of: list[int] = number.tolist()
        """Per node its set; then per group of nodes that share a stream that of the group."""
        self._by_cell = np.argsort(number, kind="stable")
        self._start = np.searchsorted(number[self._by_cell], np.arange(cells + 1))
        self._sets: dict[int, set[int]] = {}  # of those that were touched
        self._count = cells
        self._splits: list[tuple[int, int]] = []
        self._trace: list[int] | None = None
        self._budget = BUDGET
        self._refine()
        self.even = self._count
        """Number of sets before the first node was singled out; those with higher numbers came later."""

    def single_out(self, node: int) -> list[int]:
        """Makes a node a set of its own, and tells apart whatever this tells apart. Returns nodes whose sets got new numbers."""
        cell = self.of[node]
        self._splits = []
        if self._size(cell) > 1:
            self._waiting.append(self._new({node}, cell))
            self._refine()
        return [member for _, new in self._splits for member in self._sets[new]]

    def leading(self, cell: int) -> list[int] | None:
        """Members of a set such that singling one out does the same as singling out any other of them, for all that is seen while doing so.

        Each is tried. Of several kinds those are given whose record is the lowest. None where that would take too long: where the set times
        the graph, or what was tried before on this graph, is too large. None, too, where there is nothing to see: the set has no links.
        """
        members = self._members(cell)
        if len(members) == 1:
            return list(members)
        # Where it popped last a set remembers; an iterator walks over all that was ever taken out.
        any_of_them = members.pop()
        members.add(any_of_them)
        if self._link_start[any_of_them] == self._link_start[any_of_them + 1]:
            return None  # nor has any other: a set is linked alike
        if self._budget <= 0 or len(members) * len(self._links) > LARGEST:
            return None
        kinds: dict[int, list[int]] = {}
        for node in list(members):
            self._trace = []
            self.single_out(node)
            kinds.setdefault(hash(tuple(self._trace)), []).append(node)
            self._undo()
        self._trace = None
        return kinds[min(kinds)]

    def _undo(self) -> None:
        """Takes back what singling out the last node did."""
        for cell, new in reversed(self._splits):
            members = self._sets.pop(new)
            for node in members:
                self.of[node] = cell
            self._sets[cell] |= members
            self._count -= 1
        self._splits = []

    def _link(self, flat: FlatGraph) -> None:
        """Links of nodes and groups, both ways, each with a hash of what kind it is."""
        graph, edges = flat.graph, flat.graph.edges
        count = len(graph)
        self._group_of = groups(flat, handles=False, state=False).of
        self._groups = int(self._group_of.max(initial=-1)) + 1
        tied = np.flatnonzero(self._group_of >= 0)
        # The place of an input counts, that of control inputs too: whatever walks along inputs goes by it.
        place = np.arange(len(edges.src)) - graph.in_start[edges.dst]
        kind = mixed(mixed(edges.port.astype(np.int64).view(np.uint64)) + place.astype(np.uint64))
        group = (self._group_of[tied] + count).astype(np.int64)
        source = np.concatenate([edges.src, edges.dst, tied, group]).astype(np.int64)
        target = np.concatenate([edges.dst, edges.src, group, tied]).astype(np.int64)
        member = np.full(len(tied), mixed(np.atleast_1d(_MEMBER))[0])
        kinds = np.concatenate([mixed(kind + _INPUT), mixed(kind + _CONSUMER), member, member])
        order = np.argsort(source, kind="stable")
        self._link_start = np.searchsorted(source[order], np.arange(count + self._groups + 1))
        self._links, self._kinds = target[order], kinds[order]

    def _first(self, own: Hashes) -> tuple[NDArray[np.int64], int]:
        """Sets after one round from given ones, all nodes at once: per node its set, and their number. Splits that remain wait."""
        count = len(own)
        sums = np.zeros(len(self._links) + 1, np.uint64)  # whatever one end says of its links, summed at that end
        np.cumsum(mixed(own[self._links] + self._kinds), out=sums[1:])
        ends = self._link_start
        around = sums[ends[1:]] - sums[ends[:-1]]  # wraps, and so does the difference
        new = mixed(mixed(own) + around)
        pairs = np.stack([own, new], axis=1) if count else np.zeros((0, 2), np.uint64)
        order = np.lexsort((pairs[:, 1], pairs[:, 0]))
        differs = (pairs[order][1:] != pairs[order][:-1]).any(axis=1)
        number = np.zeros(count, np.int64)
        number[order] = np.concatenate([[0], np.cumsum(differs)])[:count]
        cells = int(number.max(initial=-1)) + 1
        # The sets are even towards the given ones. Of each of those all parts but the largest are still to be looked at.
        parent = np.zeros(cells, np.uint64)
        parent[number] = own
        size = np.bincount(number, minlength=cells)
        by_parent = np.lexsort((np.arange(cells), -size, parent))
        largest = np.ones(cells, bool)
        largest[1:] = parent[by_parent][1:] != parent[by_parent][:-1]
        self._waiting = deque(np.sort(by_parent[~largest]).tolist())
        return number, cells

    def _members(self, cell: int) -> set[int]:
        if cell not in self._sets:
            self._sets[cell] = set(self._by_cell[self._start[cell] : self._start[cell + 1]].tolist())
        return self._sets[cell]

    def _new(self, members: set[int], cell: int) -> int:
        """A set out of some members of another."""
        self._members(cell).difference_update(members)
        new = self._count
        self._count += 1
        self._sets[new] = members
        self._splits.append((cell, new))
        for node in members:
            self.of[node] = new
        return new

    def _refine(self) -> None:
        """Splits sets until all members of each are linked alike with every set."""
        waits = set(self._waiting)
        while self._waiting:
            splitter = self._waiting.popleft()
            waits.discard(splitter)
            for cell, linked in self._linked(list(self._members(splitter))):
                self._split(cell, linked, waits)

    def _linked(self, splitter: list[int]) -> list[tuple[int, dict[int, set[int]]]]:
        """Sets of several nodes that are linked with a set: by the sum of their links' hashes, who has it."""
        sums: dict[int, int] = {}
        for node in splitter:
            first, last = self._link_start[node], self._link_start[node + 1]
            for other, kind in zip(self._links[first:last].tolist(), self._kinds[first:last].tolist(), strict=True):
                sums[other] = sums.get(other, 0) + kind
        found: dict[int, dict[int, set[int]]] = {}
        for other, total in sums.items():
            found.setdefault(self.of[other], {}).setdefault(total, set()).add(other)
        in_order = sorted(found.items(), key=itemgetter(0))
        if self._trace is not None:
            self._budget -= len(sums)
            self._trace += [
                hash((cell, total, len(linked[total]))) for cell, linked in in_order for total in sorted(linked)
            ]
        return [(cell, linked) for cell, linked in in_order if len(linked) > 1 or self._size(cell) > _size(linked)]

    def _size(self, cell: int) -> int:
        known = self._sets.get(cell)
        return int(self._start[cell + 1] - self._start[cell]) if known is None else len(known)

    def _split(self, cell: int, linked: dict[int, set[int]], waits: set[int]) -> None:
        """Parts a set by its members' links. What is not linked, else the largest part, keeps the number."""
        members = self._members(cell)
        parts = [linked[total] for total in sorted(linked)]
        if _size(linked) == len(members):
            parts.remove(max(parts, key=len))
        cells = [cell, *(self._new(part, cell) for part in parts)]
        if cell not in waits:
            cells.remove(max(cells, key=self._size))
        else:
            cells.remove(cell)
        self._waiting.extend(cells)
        waits.update(cells)


def _size(linked: dict[int, set[int]]) -> int:
    return sum(map(len, linked.values()))


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
    `order.Cells` can see. Of copies the one with the shortest name is first, and then its companions are the first of theirs: other
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
    """True if a column tells nodes of one colour apart: whoever asks without it gets the same order otherwise, found once for both."""
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
    """Start nodes of the walk: outputs and targets, then all others without consumer. Those that have equal colours together."""
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
