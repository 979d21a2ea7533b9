"""Telling copies apart without their names: partition refinement, one copy singled out at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from msplit.analysis.colocation import groups
from msplit.core.hashing import Hashes, mixed
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
        """How many sets there were before the first node was singled out; those with higher numbers came later."""

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
