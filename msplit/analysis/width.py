"""How many kernels could run at once: on one level, and at most."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass

import numpy as np

from msplit.analysis.blocks import Kernels
from msplit.analysis.branches import Branches
from msplit.core.graph import Ints

MAX_BLOCKS = 50_000
"""Largest contracted graph, in blocks, for which the largest antichain is computed."""

_MAX_ARCS = 400_000
_UNLIMITED = 1 << 40


@dataclass(frozen=True, eq=False)
class LevelWidth:
    """The level with the most kernels; a level is all kernels with the same number of kernels on the longest path before them.

    Attributes:
        width: How many kernels it has.
        level: Its number, from 0.
        levels: How many levels there are.
        nodes: Its kernels, ascending.
    """

    width: int
    level: int
    levels: int
    nodes: Ints


@dataclass(frozen=True, eq=False)
class Antichain:
    """A largest set of kernels none of which waits for another, ascending. Where the graph is too large, its size is None, and why."""

    size: int | None
    nodes: Ints
    skipped: str = ""


def level_width(kernels: Kernels) -> LevelWidth:
    """Find the widest level, the first of equals. Linear."""
    starts, sources = kernels.dag.start.tolist(), kernels.dag.src.tolist()
    launches = (kernels.time_us > 0).tolist()
    level = [0] * len(kernels)
    for node in range(len(kernels)):
        before = [level[source] + launches[source] for source in sources[starts[node] : starts[node + 1]]]
        level[node] = max(before, default=0)
    levels = np.asarray(level, dtype=np.int64)[kernels.time_us > 0]
    if len(levels) == 0:
        return LevelWidth(0, 0, 0, np.zeros(0, np.int32))
    counts = np.bincount(levels)
    widest = int(counts.argmax())
    nodes = kernels.node[kernels.time_us > 0][levels == widest]
    return LevelWidth(int(counts[widest]), widest, len(counts), np.sort(nodes))


def max_antichain(branches: Branches, *, limit: int = MAX_BLOCKS) -> Antichain:
    """Find a largest antichain, exactly.

    By Dilworth's theorem it is as large as the fewest chains that cover the graph, which is a maximum matching of the transitive closure
    (Fulkerson, 1956). The closure is never built: in its stead, flow may pass through a block on the way from one to another. The flow
    starts from the branches, which are nearly the fewest chains, and is completed by Dinic's algorithm.

    Args:
        limit: Largest number of blocks.
    """
    blocks = branches.blocks
    count = len(blocks)
    if count > limit or len(blocks.dag.src) > _MAX_ARCS:
        reason = f"the contracted graph has {count} blocks and {len(blocks.dag.src)} edges, more than {limit} and {_MAX_ARCS}"
        return Antichain(None, np.zeros(0, np.int32), reason)
    real = blocks.time_us > 0
    network = _Network(2 * count + 2)
    source, sink = 2 * count, 2 * count + 1
    begins = {block: network.arc(source, block, 1) for block in np.flatnonzero(real).tolist()}
    ends = {block: network.arc(count + block, sink, 1) for block in np.flatnonzero(real).tolist()}
    for block in range(count):
        network.arc(count + block, block, _UNLIMITED)
    between = {}
    for producer, consumer in zip(blocks.dag.src.tolist(), blocks.dag.dst().tolist(), strict=True):
        between[producer, consumer] = network.arc(producer, count + consumer, _UNLIMITED)
    for branch in range(len(branches)):
        members = branches.members(branch).tolist()
        for producer, consumer in itertools.pairwise(members):
            if real[producer] and real[consumer]:
                network.push((begins[producer], between[producer, consumer], ends[consumer]))
    network.saturate(source, sink)
    reached = network.reachable(source)
    free = [block for block in np.flatnonzero(real).tolist() if reached[block] and not reached[count + block]]
    return Antichain(len(free), np.sort(blocks.kernels.node[_launching(branches, free)]))


def _launching(branches: Branches, chosen: list[int]) -> Ints:
    """The first kernel of each block that launches something."""
    kernels = branches.blocks.kernels
    launching = np.flatnonzero(kernels.time_us > 0)
    found, first = np.unique(branches.blocks.of[launching], return_index=True)
    return launching[first[np.searchsorted(found, chosen)]].astype(np.int32)


class _Network:
    """A flow network. Arc a and its reverse a ^ 1 stand side by side."""

    def __init__(self, nodes: int) -> None:
        self._arcs: list[list[int]] = [[] for _ in range(nodes)]
        self._to: list[int] = []
        self._left: list[int] = []

    def arc(self, start: int, end: int, capacity: int) -> int:
        """Add an arc and return its number."""
        number = len(self._to)
        self._to += (end, start)
        self._left += (capacity, 0)
        self._arcs[start].append(number)
        self._arcs[end].append(number + 1)
        return number

    def push(self, arcs: tuple[int, ...]) -> None:
        """Send one unit along arcs."""
        for number in arcs:
            self._left[number] -= 1
            self._left[number ^ 1] += 1

    def saturate(self, source: int, sink: int) -> None:
        """Send all that fits (Dinic, 1970), without recursion."""
        while True:
            level = self._levels(source)
            if level[sink] < 0:
                return
            place = [0] * len(self._arcs)
            path: list[int] = []
            node = source
            while True:
                if node == sink:
                    self.push(tuple(path))
                    path, node = [], source
                    continue
                arcs = self._arcs[node]
                while place[node] < len(arcs):
                    number = arcs[place[node]]
                    if self._left[number] > 0 and level[self._to[number]] == level[node] + 1:
                        break
                    place[node] += 1
                else:
                    if not path:
                        break
                    node = self._to[path.pop() ^ 1]
                    place[node] += 1
                    continue
                path.append(number)
                node = self._to[number]

    def reachable(self, source: int) -> list[bool]:
        """Per node whether more could flow there."""
        return [level >= 0 for level in self._levels(source)]

    def _levels(self, source: int) -> list[int]:
        level = [-1] * len(self._arcs)
        level[source] = 0
        waiting = deque([source])
        while waiting:
            node = waiting.popleft()
            for number in self._arcs[node]:
                if self._left[number] > 0 and level[self._to[number]] < 0:
                    level[self._to[number]] = level[node] + 1
                    waiting.append(self._to[number])
        return level
