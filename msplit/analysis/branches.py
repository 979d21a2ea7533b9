"""Branches of a graph and its critical path, in the graph of kernels that analysis works on.

The branches of a graph: paths that cover it, the heaviest first, so that what a fork starts and a join ends is one branch.

The critical path: the longest path of a DAG by the weights of its nodes.

The graph as analysis sees it: kernels, and blocks of kernels that no schedule gains by cutting.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.analysis.order import canonical
from msplit.core.dag import Dag, bypass, chains, in_order, longest, quotient
from msplit.core.graph import Floats, Graph, Ints, memoize
from msplit.cost.costs import Costs
from msplit.flatten.flat import FlatGraph


def finish_times(graph: Graph, weights: NDArray[Any]) -> Floats:
    """Weight of the heaviest path that ends at each node, the node included: when it ends if nothing but its inputs delays it.

    Weights are at least 0. One pass in topological order over all edges, control edges included; O(nodes + edges).
    """
    return longest(weights, graph.topological, graph.out_start, graph.out_dst)


def critical_path(graph: Graph, weights: NDArray[Any]) -> tuple[float, Ints]:
    """The weight of the heaviest path, and its nodes from first to last.

    Among equal paths it is the one through the lowest numbers, from the end backwards.

    Raises:
        ValueError: The graph has a cycle, or a weight is negative.
    """
    if not len(graph):
        return 0.0, np.zeros(0, dtype=np.int32)
    if float(np.min(weights)) < 0:
        raise ValueError("weights must not be negative")
    if len(graph.topological) != len(graph):
        raise ValueError("the graph has a cycle")
    finish = finish_times(graph, weights)
    node = int(np.argmax(finish))
    path = [node]
    while True:
        before = graph.predecessors(node)
        if not len(before):
            break
        latest = before[finish[before] == finish[before].max()]
        node = int(latest.min())
        path.append(node)
    return float(finish.max()), np.array(path[::-1], dtype=np.int32)


@dataclass(frozen=True, eq=False)
class KernelGraph:
    """The nodes that launch a kernel, and what must come before what.

    Kernels are numbered topologically, in the canonical order. A joint is a node that launches nothing but stays, because it has too
    many producers and consumers to be replaced by edges (a NoOp that groups control inputs); it costs nothing.

    Attributes:
        dag: Dependencies, each once.
        node: Per kernel its node in the flat graph.
        time_us: Time of each; 0 for joints.
        share: Share of the GPU that each fills.
    """

    dag: Dag
    node: Ints
    time_us: Floats
    share: Floats

    def __len__(self) -> int:
        return len(self.node)

    @staticmethod
    def of(flat: FlatGraph, costs: Costs, order: Ints | None = None) -> KernelGraph:
        """The kernels of a graph: nodes that take time and are no host nodes. `order` is its canonical order, where that is known."""
        order = canonical(flat, costs.time_us, costs.share, costs.bytes) if order is None else order
        dag, nodes = kernel_graph(flat, costs, order)
        launches = (costs.time_us > 0) & ~flat.host
        return KernelGraph(dag, nodes, np.where(launches, costs.time_us, 0.0)[nodes], costs.share[nodes])


def kernel_graph(flat: FlatGraph, costs: Costs, order: Ints) -> tuple[Dag, Ints]:
    """Dependencies between kernels and joints, each once, and per kernel its node in the flat graph.

    They are numbered by `order`, a topological one of all nodes. What is asked for again is found once, for any number of orders the
    larger part of it.
    """

    def bypassed() -> tuple[Dag, NDArray[np.bool_]]:
        return bypass(Dag.from_graph(flat.graph), (costs.time_us <= 0) | flat.host, flat.graph.topological)

    def find() -> tuple[Dag, Ints]:
        dag, kept = memoize(flat, "kernels", (costs.time_us,), bypassed)
        return in_order(dag, kept, order)

    return memoize(flat, "kernels in order", (costs.time_us, order), find)


@dataclass(frozen=True, eq=False)
class Blocks:
    """Linear chains of kernels: no schedule gains by cutting one.

    Attributes:
        dag: Dependencies between blocks, each once; numbered topologically.
        of: Per kernel its block.
        first: Per block its first kernel.
        last: Per block its last kernel.
        useful_us: The part of its time that a second block like it could use: all of it for kernels that fill half of the GPU or less, none
            for kernels that fill it.
    """

    kernels: KernelGraph
    dag: Dag
    of: Ints
    first: Ints
    last: Ints
    time_us: Floats
    useful_us: Floats

    def __len__(self) -> int:
        return len(self.time_us)

    @staticmethod
    def from_kernels(kernels: KernelGraph) -> Blocks:
        """Contract the chains."""
        heads, inverse = np.unique(chains(kernels.dag), return_inverse=True)
        of: Ints = inverse.astype(np.int32)
        useful = kernels.time_us * np.clip(2 * (1 - kernels.share), 0.0, 1.0)
        count = len(heads)
        last = heads.astype(np.int32)
        np.maximum.at(last, of, np.arange(len(kernels), dtype=np.int32))
        return Blocks(
            kernels,
            quotient(kernels.dag, of, count),
            of,
            heads.astype(np.int32),
            last,
            _sums(of, kernels.time_us, count),
            _sums(of, useful, count),
        )

    @cached_property
    def finish_us(self) -> Floats:
        """Earliest end of each block, if nothing but its producers held it back."""
        return longest(self.time_us, np.arange(len(self), dtype=np.int32), *self.consumers)

    @cached_property
    def rank_us(self) -> Floats:
        """Longest path from each block to the end, its own time included."""
        return longest(self.time_us, np.arange(len(self), dtype=np.int32)[::-1], self.dag.start, self.dag.src)

    @cached_property
    def consumers(self) -> tuple[Ints, Ints]:
        """(start, dst): the consumers of block u are ``dst[start[u]:start[u + 1]]``, ascending."""
        return self.dag.consumers()


def _sums(group: Ints, values: Floats, count: int) -> Floats:
    return np.bincount(group, values, count).astype(np.float64)


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
        flat, "branches", (costs, chosen), lambda: find(Blocks.from_kernels(KernelGraph.of(flat, costs, chosen)))
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
