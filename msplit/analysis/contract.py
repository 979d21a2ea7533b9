"""Smaller graphs that ask the same questions: nodes that launch nothing are dropped, linear chains become one block."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from msplit.analysis.dag import Dag
from msplit.analysis.order import canonical
from msplit.cost.costs import Costs, Floats
from msplit.flatten.flat import FlatGraph
from msplit.graph import Ints

_MAX_PRODUCT = 16
"""A dropped node may be replaced by this many edges."""


@dataclass(frozen=True, eq=False)
class Kernels:
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
    def of(flat: FlatGraph, costs: Costs, order: Ints | None = None) -> Kernels:
        """The kernels of a graph: nodes that take time and are no host nodes.

        Args:
            flat: The graph.
            costs: Cost of each node.
            order: Its canonical order, if that is known already.
        """
        order = canonical(flat) if order is None else order
        number = np.empty(len(flat), np.int32)
        number[order] = np.arange(len(flat), dtype=np.int32)
        dag = Dag.of(len(flat), number[flat.graph.edges.src], number[flat.graph.edges.dst])
        launches = ((costs.time_us > 0) & ~flat.host)[order]
        bypassed, kept = bypass(dag, ~launches)
        ids = np.where(kept, np.cumsum(kept) - 1, -1).astype(np.int32)
        nodes = order[kept]
        time_us = np.where(launches[kept], costs.time_us[nodes], 0.0)
        return Kernels(quotient(bypassed, ids, len(nodes)), nodes, time_us, costs.share[nodes])


@dataclass(frozen=True, eq=False)
class Blocks:
    """Linear chains of kernels: no schedule gains by cutting one.

    Attributes:
        kernels: What they are made of.
        dag: Dependencies between blocks, each once; numbered topologically.
        of: Per kernel its block.
        first: Per block its first kernel.
        last: Per block its last kernel.
        time_us: Time of each block.
        useful_us: The part of its time that a second block like it could use: all of it for kernels that fill half of the GPU or less, none
            for kernels that fill it.
    """

    kernels: Kernels
    dag: Dag
    of: Ints
    first: Ints
    last: Ints
    time_us: Floats
    useful_us: Floats

    def __len__(self) -> int:
        return len(self.time_us)

    @staticmethod
    def from_kernels(kernels: Kernels) -> Blocks:
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
        """When each block could end if nothing but its producers held it back."""
        starts, sources, times = self.dag.start.tolist(), self.dag.src.tolist(), self.time_us.tolist()
        finish = [0.0] * len(self)
        for block in range(len(self)):
            ready = 0.0
            for producer in sources[starts[block] : starts[block + 1]]:
                if finish[producer] > ready:
                    ready = finish[producer]
            finish[block] = ready + times[block]
        return np.asarray(finish)

    @cached_property
    def rank_us(self) -> Floats:
        """Longest path from each block to the end, its own time included."""
        starts, sources, times = self.dag.start.tolist(), self.dag.src.tolist(), self.time_us.tolist()
        behind = [0.0] * len(self)
        rank = [0.0] * len(self)
        for block in range(len(self) - 1, -1, -1):
            own = rank[block] = behind[block] + times[block]
            for producer in sources[starts[block] : starts[block + 1]]:
                if own > behind[producer]:
                    behind[producer] = own
        return np.asarray(rank)

    @cached_property
    def consumers(self) -> tuple[Ints, Ints]:
        """(start, dst): the consumers of block u are ``dst[start[u]:start[u + 1]]``, ascending."""
        order = np.argsort(self.dag.src, kind="stable")
        start = np.searchsorted(self.dag.src[order], np.arange(len(self) + 1)).astype(np.int32)
        return start, self.dag.dst()[order]


def bypass(dag: Dag, free: NDArray[np.bool_]) -> tuple[Dag, NDArray[np.bool_]]:
    """Take out free nodes and link their producers with their consumers, where that does not multiply edges.

    Args:
        dag: Numbered topologically.
        free: Nodes that launch nothing.

    Returns:
        The graph in the same numbering, nodes taken out having no edges, and which nodes are left.
    """
    count = len(dag)
    start, src, is_free = dag.start.tolist(), dag.src.tolist(), free.tolist()
    fan_out = np.bincount(dag.src, minlength=count).tolist()
    kept = [True] * count
    producers: list[list[int]] = []
    for node in range(count):
        found: list[int] = []
        for producer in src[start[node] : start[node + 1]]:
            if kept[producer]:
                found.append(producer)
            else:
                found += producers[producer]
        if len(found) > 1:
            found = sorted(dict.fromkeys(found))
        if is_free[node] and (len(found) < 2 or fan_out[node] < 2 or len(found) * fan_out[node] <= _MAX_PRODUCT):
            kept[node] = False
        producers.append(found)
    left = np.asarray(kept, dtype=bool)
    new_start = np.zeros(count + 1, np.int64)
    np.cumsum([len(found) if stays else 0 for found, stays in zip(producers, kept, strict=True)], out=new_start[1:])
    new_src = [producer for found, stays in zip(producers, kept, strict=True) if stays for producer in found]
    return Dag(new_start.astype(np.int32), np.asarray(new_src, dtype=np.int32)), left


def quotient(dag: Dag, group: Ints, count: int) -> Dag:
    """The graph between groups of nodes, each edge once, producers ascending.

    Args:
        dag: The graph.
        group: Per node its group ``0..count-1``; -1 drops the node with its edges.
        count: Number of groups.
    """
    src, dst = group[dag.src].astype(np.int64), group[dag.dst()].astype(np.int64)
    kept = (src != dst) & (src >= 0) & (dst >= 0)
    keys = np.unique(dst[kept] * count + src[kept])
    dst, src = keys // max(count, 1), keys % max(count, 1)
    start = np.searchsorted(dst, np.arange(count + 1)).astype(np.int32)
    return Dag(start, src.astype(np.int32))


def chains(dag: Dag) -> Ints:
    """The head of the linear chain that each node is in: u and v are linked if v is all that u feeds and u is all that v reads.

    Args:
        dag: Numbered topologically, each edge once.
    """
    fan_in = np.diff(dag.start)
    fan_out = np.bincount(dag.src, minlength=len(dag))
    dst = dag.dst()
    linked = (fan_in[dst] == 1) & (fan_out[dag.src] == 1)
    head = list(range(len(dag)))
    for producer, consumer in zip(dag.src[linked].tolist(), dst[linked].tolist(), strict=True):
        head[consumer] = head[producer]
    return np.asarray(head, dtype=np.int32)


def _sums(group: Ints, values: Floats, count: int) -> Floats:
    return np.bincount(group, values, count).astype(np.float64)
