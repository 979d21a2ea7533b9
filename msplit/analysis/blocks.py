"""The graph as analysis sees it: kernels, and blocks of kernels that no schedule gains by cutting."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from msplit.analysis.order import canonical
from msplit.analysis.path import longest
from msplit.core.contraction import bypass, chains, in_order, quotient
from msplit.core.dag import Dag
from msplit.core.graph import Floats, Ints
from msplit.core.memory import memoize
from msplit.cost.costs import Costs
from msplit.flatten.flat import FlatGraph


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
        """The kernels of a graph: nodes that take time and are no host nodes. `order` is its canonical order, where that is known."""
        order = canonical(flat, costs.time_us, costs.share, costs.bytes) if order is None else order
        dag, nodes = kernel_graph(flat, costs, order)
        launches = (costs.time_us > 0) & ~flat.host
        return Kernels(dag, nodes, np.where(launches, costs.time_us, 0.0)[nodes], costs.share[nodes])


def kernel_graph(flat: FlatGraph, costs: Costs, order: Ints) -> tuple[Dag, Ints]:
    """What must come before what among kernels and joints, each dependency once, and per kernel its node in the flat graph.

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
