"""The branches of a graph: paths that cover it, the heaviest first, so that what a fork starts and a join ends is one branch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from msplit.analysis.blocks import Blocks, Kernels
from msplit.analysis.order import canonical
from msplit.core.graph import Floats, Ints
from msplit.core.memory import memoize
from msplit.cost.costs import Costs
from msplit.flatten.flat import FlatGraph


@dataclass(frozen=True, eq=False)
class Branches:
    """Paths of blocks; every block is on one. Branches are numbered by their first blocks.

    Attributes:
        of: Per block its branch.
        order: Blocks grouped by branch, each branch from first to last.
        start: Branch b is ``order[start[b]:start[b + 1]]``.
        useful_us: The part of it that can overlap with other work (see `Blocks.useful_us`).
        fork: Per branch the block that its first block waits for longest, -1 where it waits for none.
        join: Per branch the most urgent consumer of its last block, -1 where it has none.
    """

    blocks: Blocks
    of: Ints
    order: Ints
    start: Ints
    time_us: Floats
    useful_us: Floats
    fork: Ints
    join: Ints

    def __len__(self) -> int:
        return len(self.time_us)

    def members(self, branch: int) -> Ints:
        """The blocks of a branch, from first to last."""
        return self.order[self.start[branch] : self.start[branch + 1]]

    @cached_property
    def first(self) -> Ints:
        """The first block of each branch."""
        return self.order[self.start[:-1]]

    @cached_property
    def last(self) -> Ints:
        """The last block of each branch."""
        return self.order[self.start[1:] - 1]

    def nodes(self, branch: int) -> Ints:
        """The nodes of a branch in the flat graph, ascending; those that launch a kernel."""
        kernels = self.blocks.kernels
        return np.sort(kernels.node[np.isin(self.blocks.of, self.members(branch)) & (kernels.time_us > 0)])


def branches_of(flat: FlatGraph, costs: Costs, order: Ints | None = None) -> Branches:
    """The branches of a graph's kernels, in a given order of nodes or the canonical one; found once."""
    chosen = canonical(flat, costs.time_us, costs.share, costs.bytes) if order is None else order
    return memoize(
        flat, "branches", (costs, chosen), lambda: find(Blocks.from_kernels(Kernels.of(flat, costs, chosen)))
    )


def find(blocks: Blocks) -> Branches:
    """Cover the graph with paths, greedily.

    A block continues the path of a producer if it is that producer's most urgent consumer (longest way to the end), and of several such
    producers of the one that ends last, then of the one with the heaviest path so far. So the costliest way out of a fork stays on the
    fork's path, and long rows win over short columns where a lattice allows both. What is left over is linked where a path ends at a block
    that another path could start from. In the manner of the path covers of Opara (arXiv:2312.10351), with costs.

    Near-linear: two passes over the edges.
    """
    before = _link(blocks)
    count = len(blocks)
    heads = np.flatnonzero(before < 0)
    branch = np.full(count, -1, np.int64)
    branch[heads] = np.arange(len(heads))
    following = branch.tolist()
    for block, producer in enumerate(before.tolist()):
        if producer >= 0:
            following[block] = following[producer]
    of = np.asarray(following, dtype=np.int32)
    order = np.argsort(of, kind="stable").astype(np.int32)
    start = np.searchsorted(of[order], np.arange(len(heads) + 1)).astype(np.int32)
    last = order[start[1:] - 1] if count else order
    return Branches(
        blocks=blocks,
        of=of,
        order=order,
        start=start,
        time_us=np.bincount(of, blocks.time_us, len(heads)).astype(np.float64),
        useful_us=np.bincount(of, blocks.useful_us, len(heads)).astype(np.float64),
        fork=_best(heads.astype(np.int32), blocks.dag.start, blocks.dag.src, blocks.finish_us),
        join=_best(last, *blocks.consumers, blocks.rank_us),
    )


def _link(blocks: Blocks) -> Ints:
    """Per block the producer whose path it continues, or -1."""
    starts, sources = blocks.dag.start.tolist(), blocks.dag.src.tolist()
    finish, rank, times = blocks.finish_us.tolist(), blocks.rank_us.tolist(), blocks.time_us.tolist()
    # Sums of the same times in another order must count as equal.
    close = 1e-9 * max(finish, default=0.0)
    urgent = [0.0] * len(blocks)
    for block in range(len(blocks)):
        for producer in sources[starts[block] : starts[block + 1]]:
            if rank[block] > urgent[producer]:
                urgent[producer] = rank[block]
    before = [-1] * len(blocks)
    taken = [False] * len(blocks)
    path = times[:]
    for block in range(len(blocks)):
        best = -1
        for producer in sources[starts[block] : starts[block + 1]]:
            if taken[producer] or rank[block] < urgent[producer] - close:
                continue
            later = finish[producer] - finish[best] if best >= 0 else 1.0 + close
            if later > close or (later >= -close and path[producer] > path[best] + close):
                best = producer
        if best >= 0:
            before[block] = best
            taken[best] = True
            path[block] += path[best]
    for block in range(len(blocks)):
        if before[block] < 0:
            free = [producer for producer in sources[starts[block] : starts[block + 1]] if not taken[producer]]
            if free:
                before[block] = max(free, key=lambda producer: (finish[producer], -producer))
                taken[before[block]] = True
    return np.asarray(before, dtype=np.int32)


def _best(blocks: Ints, start: Ints, others: Ints, value: NDArray[np.float64]) -> Ints:
    """Per block its neighbour with the largest value, the lowest-numbered of equals; -1 without neighbours."""
    starts, neighbours, values = start.tolist(), others.tolist(), value.tolist()
    best = []
    for block in blocks.tolist():
        found = neighbours[starts[block] : starts[block + 1]]
        best.append(max(found, key=values.__getitem__) if found else -1)
    return np.asarray(best, dtype=np.int32)
