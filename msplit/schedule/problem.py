"""Scheduling problems as plain data, and who comes before whom in them.

A scheduling problem as plain data: blocks of kernels, what they cost, and what must come before what.

Who comes before whom in a DAG: what everything passes through, what is connected; ancestors and transitive reduction.

Graphs are numbered topologically. The last two are quadratic: only for graphs within a stated bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from msplit.analysis.branches import kernel_graph
from msplit.core.dag import Dag, along_chains, bypass, chains, in_order, merged, pieces, quotient, topological_numbers
from msplit.core.graph import Floats, Ints
from msplit.cost.costs import Costs
from msplit.flatten.flat import FlatGraph
from msplit.schedule.machine import Machine
from msplit.schedule.plan import topological, upward_rank


@dataclass(frozen=True, eq=False)
class Problem:
    """Blocks to be put on streams. A block is a linear chain of kernels: no schedule gains by cutting it.

    Blocks are numbered topologically: every producer has a smaller number than its consumers. A block without kernels is a joint: a
    node that launches nothing but has too many producers and consumers to be replaced by edges.

    Attributes:
        dag: Dependencies between blocks, each once.
        time_us: Time of a block alone on the GPU.
        share: Share of the GPU that it fills while it runs, in (0, 1]; the mean over its kernels by time.
        bytes: Device memory traffic.
        kernels: Number of kernels.
        block: Per node of the graph it was made from its block, or -1 if the node launches nothing.
        tie: Per block a group that must be on one stream, or -1; every group has two blocks or more.
        pin: Per block a stream that was decided before, or -1.
    """

    dag: Dag
    time_us: Floats
    share: Floats
    bytes: Floats
    kernels: Ints
    block: Ints
    tie: Ints
    pin: Ints
    machine: Machine = field(default_factory=Machine)

    def __len__(self) -> int:
        return len(self.dag)

    @property
    def size(self) -> int:
        """Blocks and edges between them: what every algorithm looks at, so that it stands for the time that one takes."""
        return len(self) + len(self.dag.src)

    @staticmethod
    def of(
        dag: Dag,
        time_us: ArrayLike,
        share: ArrayLike = 1.0,
        bytes: ArrayLike = 0.0,
        *,
        launches: ArrayLike | None = None,
        tie: ArrayLike = -1,
        pin: ArrayLike = -1,
        order: Ints | None = None,
        kernels: tuple[Dag, Ints] | None = None,
        machine: Machine | None = None,
        contracted: bool = True,
    ) -> Problem:
        """From arrays over the nodes of any graph, such as the steps of an engine.

        Args:
            dag: Dependencies, in any numbering, control edges included.
            time_us: Time of each node alone; scalars are spread over all nodes, here and below.
            share: Share of the GPU that each fills.
            bytes: Memory traffic of each.
            launches: Which nodes launch a kernel; by default those that take time.
            tie: Per node a group of nodes that must be on one stream, or -1.
            pin: Per node the stream it is on already, or -1.
            order: Topological order that numbers the blocks and so decides between equals; by default that of `topological_numbers`.
            kernels: Kernels and joints in that order, and the node of each, where they are known (`analysis.branches.kernel_graph`).
            contracted: Whether chains become blocks. Without, every kernel is a block of its own, which is how published algorithms
                see a graph.

        Raises:
            ValueError: The graph has a cycle, or a time is negative or not finite.
        """
        count = len(dag)
        times, shares, moved = (_column(column, count, np.float64) for column in (time_us, share, bytes))
        on_gpu = np.broadcast_to(times > 0 if launches is None else np.asarray(launches, dtype=bool), (count,))
        if kernels is None:
            order = topological_numbers(dag) if order is None else order
            kernels = in_order(*bypass(dag, ~on_gpu, order), order)
        small, nodes = kernels
        if not (np.isfinite(times).all() and (times >= 0).all()):
            raise ValueError("times must be finite and not negative")
        ties, pins = (_column(column, count) for column in (tie, pin))
        # What launches nothing has no stream, and what is tied to nothing else that launches is free.
        tied, pinned, working = _several(np.where(on_gpu, ties, -1)[nodes]), pins[nodes], on_gpu[nodes]
        head = np.arange(len(nodes), dtype=np.int32)
        if contracted:
            # A chain is cut between two groups, not where one begins: what leads to a tied kernel goes where that goes.
            tied = along_chains(small, tied, _labels(pinned, working))
            head = chains(small, _labels(tied, pinned, working))
        heads, block_of_left = np.unique(head, return_inverse=True)
        blocks = len(heads)
        work = np.where(on_gpu, times, 0.0)[nodes]
        block = np.full(count, -1, np.int32)
        block[nodes] = np.where(on_gpu[nodes], block_of_left, -1)
        return Problem(
            dag=quotient(small, block_of_left.astype(np.int32), blocks),
            **_together(block_of_left, blocks, work, np.clip(shares, 1e-6, 1.0)[nodes], moved[nodes]),
            kernels=np.bincount(block_of_left, on_gpu[nodes], blocks).astype(np.int32),
            block=block,
            tie=_several(tied[heads]),
            pin=pinned[heads],
            machine=machine or Machine(),
        )

    @staticmethod
    def from_flat(
        flat: FlatGraph,
        costs: Costs,
        *,
        tie: ArrayLike | None = None,
        pin: ArrayLike = -1,
        same: ArrayLike = -1,
        order: Ints | None = None,
        machine: Machine | None = None,
    ) -> Problem:
        """From a model: nodes that take time are kernels, regions stay together. The arguments are those of `of`, and one more.

        A loop of TensorFlow 1 is one block: what leaves it waits for its last turn, though the edge that says so was cut.

        Args:
            same: Per node the number of those that compute the same (`analysis.isomorphic`), or -1: they are one node to the graph that is
                scheduled, so that what follows each of them is not tied, too. They cost what all of them take.
        """
        launches = (costs.time_us > 0) & ~flat.host
        tie = flat.region if tie is None else tie
        found = _units(flat, launches, _column(same, len(flat)), _column(pin, len(flat)))
        dag = Dag.from_graph(flat.graph)
        if (found < 0).all():
            order = topological_numbers(dag) if order is None else order
            return Problem.of(
                dag,
                costs.time_us,
                costs.share,
                costs.bytes,
                launches=launches,
                tie=tie,
                pin=pin,
                kernels=kernel_graph(flat, costs, order),
                machine=machine,
            )
        piece, small = pieces(dag, found)
        whole = Problem.of(
            small,
            **_whole(piece, len(small), launches, costs, {"tie": tie, "pin": pin}),
            order=None if order is None else _order_of(piece, small, order),
            machine=machine,
        )
        block = np.where(launches, whole.block[piece], -1).astype(np.int32)
        counts = np.bincount(block[block >= 0], minlength=len(whole)).astype(np.int32)
        return replace(whole, block=block, kernels=counts)

    @cached_property
    def work_us(self) -> Floats:
        """Time that a block takes on its stream with the GPU to itself: its kernels, in the model, and what it costs to start them."""
        return self.time_us * self.machine.company + self.machine.node_us * self.kernels

    @cached_property
    def demand(self) -> Floats:
        """Per block what it takes of the SMs, the memory bandwidth and the rate at which kernels start: (blocks, 3), each in [0, 1]."""
        work = np.maximum(self.work_us, 1e-12)
        columns = (
            self.share * self.time_us * self.machine.company,
            self.bytes / self.machine.bandwidth,
            self.machine.issue_us * self.kernels,
        )
        return np.stack([np.clip(column / work, 0.0, 1.0) for column in columns], axis=1)

    @cached_property
    def demands(self) -> tuple[list[float], list[float], list[float]]:
        """The columns of `demand`: a search simulates one problem thousands of times."""
        sms, bandwidth, issue = (column.tolist() for column in self.demand.T)
        return sms, bandwidth, issue

    @cached_property
    def joints(self) -> NDArray[np.bool_]:
        """Blocks without kernels."""
        return np.asarray(self.kernels == 0)

    @cached_property
    def consumers(self) -> tuple[Ints, Ints]:
        """(start, dst): the consumers of block u are ``dst[start[u]:start[u + 1]]``, ascending."""
        return self.dag.consumers()

    @cached_property
    def rank(self) -> Floats:
        """Longest path from each block to the end, its own work included (HEFT's upward rank without communication)."""
        return upward_rank(self.dag, self.work_us, np.arange(len(self), dtype=np.int32))

    @cached_property
    def by_rank(self) -> Ints:
        """The blocks in topological order, those with the longest path to the end first: one record order for all assignments."""
        return topological(self.dag, self.rank)

    def bound_us(self) -> float:
        """No schedule is shorter: the longest path, each resource's total demand, and what must share a stream."""
        if not len(self):
            return 0.0
        demand = float((self.demand * self.work_us[:, None]).sum(axis=0).max())
        return max(float(self.rank.max()), demand, self.tied_us())

    def tied_us(self) -> float:
        """The most work that must be on one stream, one kernel after the other."""
        tied = self.tie >= 0
        return float(np.bincount(self.tie[tied], self.work_us[tied]).max(initial=0.0))

    def grouped(self, group: Ints) -> Problem:
        """This problem with groups of blocks as its blocks, for algorithms that want larger grains.

        Groups are numbered topologically, ``0..`` without gaps; contracting them must leave no cycle.
        """
        count = int(group.max(initial=-1)) + 1
        first = np.full(count, len(self), np.int64)
        np.minimum.at(first, group, np.arange(len(self)))
        return Problem(
            dag=quotient(self.dag, group, count),
            **_together(group, count, self.time_us, self.share, self.bytes),
            kernels=np.bincount(group, self.kernels, count).astype(np.int32),
            block=self.spread(group),
            tie=_several(self.tie[first]),
            pin=self.pin[first],
            machine=self.machine,
        )

    @cached_property
    def untied(self) -> tuple[Ints, Problem]:
        """Per block its number in the problem in which tied blocks are one, as far as that leaves no cycle; and that problem.

        It is for algorithms that know no ties. Blocks that are tied and pinned to different streams stay apart.
        """
        if not (self.tie >= 0).any():
            return np.arange(len(self), dtype=np.int32), self
        group = merged(self.dag, np.where(self.tie >= 0, self.labels, -1).astype(np.int32))
        return group, self.grouped(group)

    @cached_property
    def tied_pairs(self) -> tuple[Ints, Ints]:
        """Pairs of blocks that connect those of each tie: the first of it with each of the others."""
        tied = np.flatnonzero(self.tie >= 0).astype(np.int32)
        _, first, of = np.unique(self.tie[tied], return_index=True, return_inverse=True)
        return tied[first][of.reshape(-1)], tied

    @cached_property
    def labels(self) -> Ints:
        """One number per combination of tie, pin and having kernels: only blocks with the same may become one."""
        return _labels(self.tie, self.pin, ~self.joints)

    def spread(self, stream: Ints) -> Ints:
        """Streams of the nodes of the original graph from those of the blocks; -1 for nodes that launch nothing."""
        if not len(self):
            return np.full(len(self.block), -1, np.int32)
        return np.where(self.block >= 0, stream[np.maximum(self.block, 0)], -1).astype(np.int32)


def _column(column: ArrayLike, count: int, kind: type = np.int32) -> Any:
    return np.broadcast_to(np.asarray(column, dtype=kind), (count,))


def _together(
    group: NDArray[np.integer], count: int, time_us: Floats, share: Floats, bytes: Floats
) -> dict[str, Floats]:
    """Costs of each group: the times and bytes of its members summed, and the mean of their shares by time."""
    total, area, moved = (np.bincount(group, values, count) for values in (time_us, time_us * share, bytes))
    return {
        "time_us": total.astype(np.float64),
        "share": np.divide(area, total, out=np.full(count, 1e-6), where=total > 0),
        "bytes": moved.astype(np.float64),
    }


def _units(flat: FlatGraph, launches: NDArray[np.bool_], same: Ints, pin: Ints) -> Ints:
    """Per node the loop that it is part of, or its copies, or -1. Those whose kernels are pinned to several streams are no unit."""
    kinds = np.asarray([region.kind == "loop" for region in flat.regions], bool)
    loop: Ints = np.where(np.append(kinds, False)[flat.region], flat.region, -1).astype(np.int32)
    unit: Ints = np.where((loop < 0) & launches & (same >= 0), same + len(kinds), loop).astype(np.int32)
    pinned = launches & (unit >= 0) & (pin >= 0)
    count = int(unit.max(initial=-1)) + 1
    lowest = np.full(count, np.iinfo(np.int32).max)
    highest = np.full(count, -1)
    np.minimum.at(lowest, unit[pinned], pin[pinned])
    np.maximum.at(highest, unit[pinned], pin[pinned])
    split = np.append((highest >= 0) & (lowest != highest), False)
    return np.where(split[unit], -1, unit).astype(np.int32)


def _whole(
    piece: Ints,
    count: int,
    launches: NDArray[np.bool_],
    costs: Costs,
    labels: Mapping[str, ArrayLike],
) -> dict[str, Any]:
    """Costs of pieces, from those of their kernels, and where these are."""
    time_us, moved = (np.where(launches, column, 0.0) for column in (costs.time_us, costs.bytes))
    found: dict[str, Any] = {
        **_together(piece, count, time_us, costs.share, moved),
        "launches": np.bincount(piece[launches], minlength=count) > 0,
    }
    said = launches | (np.bincount(piece, minlength=count)[piece] == 1)
    for name, label in labels.items():
        found[name] = np.full(count, -1, np.int32)
        np.maximum.at(found[name], piece[said], _column(label, len(piece))[said])
    return found


def _order_of(piece: Ints, small: Dag, order: Ints) -> Ints:
    """A topological order of pieces after one of the nodes: pieces whose first node is early are early."""
    place = np.full(len(small), len(order), np.int64)
    np.minimum.at(place, piece[order], np.arange(len(order)))
    return topological(small, -place.astype(np.float64))


def _several(tie: Ints) -> Ints:
    """The groups that have two members or more; -1 for what is alone in its group."""
    counts = np.bincount(tie + 1, minlength=1)
    return np.where(counts[tie + 1] > 1, tie, -1).astype(np.int32)


def _labels(*columns: NDArray[np.integer] | NDArray[np.bool_]) -> Ints:
    """One number per combination of values, such as tie, pin and being a kernel: chains do not cross them."""
    label = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        found, number = np.unique(column, return_inverse=True)
        if len(found) > 1:  # numbered anew each time, so that products stay small
            label = np.unique(label * len(found) + number.reshape(-1), return_inverse=True)[1].reshape(-1)
    return label.astype(np.int32)


LARGEST = 20_000
"""Nodes. The bit sets of that many take at most 25 MB."""


def ancestors(dag: Dag) -> list[int]:
    """Per node a bit set of all nodes that come before it. O(n·m / 64)."""
    start, src = dag.start.tolist(), dag.src.tolist()
    above: list[int] = []
    for node in range(len(dag)):
        bits = 0
        for producer in src[start[node] : start[node + 1]]:
            bits |= above[producer] | 1 << producer
        above.append(bits)
    return above


def members(bits: int) -> list[int]:
    """The numbers in a bit set, ascending."""
    # Byte by byte: taking the lowest bit of a large integer costs its whole length.
    found = []
    for index, byte in enumerate(bits.to_bytes((bits.bit_length() + 7) // 8, "little")):
        while byte:
            lowest = byte & -byte
            found.append(index * 8 + lowest.bit_length() - 1)
            byte ^= lowest
    return found


def transitive_reduction(dag: Dag, above: list[int]) -> Dag:
    """The smallest graph with the same ancestors (Aho, Garey and Ullman 1972). Nimble calls it the minimum equivalent graph.

    Each edge is in `dag` once, and `above` are its `ancestors`.
    """
    start, src = dag.start.tolist(), dag.src.tolist()
    kept: list[int] = []
    starts = [0]
    for node in range(len(dag)):
        covered = 0
        needed = []
        # The largest number first: only a later producer can have an earlier one among its ancestors.
        for producer in sorted(src[start[node] : start[node + 1]], reverse=True):
            if not covered >> producer & 1:
                needed.append(producer)
                covered |= above[producer] | 1 << producer
        kept += reversed(needed)
        starts.append(len(kept))
    return Dag(np.asarray(starts, np.int32), np.asarray(kept, np.int32))


def cuts(dag: Dag) -> NDArray[np.bool_]:
    """Nodes that are an ancestor or a descendant of every other node. O(n + m).

    In a topological numbering all nodes before v lead to v if and only if each of them has a consumer no later than v (walk on from
    consumer to consumer); all nodes after v depend on it if and only if each has a producer no earlier than v.
    """
    count = len(dag)
    first_consumer = np.full(count, count, np.int64)
    last_producer = np.full(count, -1, np.int64)
    dst = dag.dst()
    np.minimum.at(first_consumer, dag.src, dst)
    np.maximum.at(last_producer, dst, dag.src)
    number = np.arange(count)
    furthest = np.concatenate([[-1], np.maximum.accumulate(first_consumer)[:-1]]) if count else first_consumer
    nearest = (
        np.concatenate([np.minimum.accumulate(last_producer[::-1])[::-1][1:], [count]]) if count else last_producer
    )
    return np.asarray((furthest <= number) & (nearest >= number))


def between_cuts(dag: Dag) -> Iterator[tuple[int, int]]:
    """Ranges (first, end) of the nodes that lie between two that everything passes through, where there are two or more of them."""
    borders = [-1, *np.flatnonzero(cuts(dag)).tolist(), len(dag)]
    for before, after in pairwise(borders):
        if after - before > 2:
            yield before + 1, after


def components(count: int, src: Ints, dst: Ints) -> Ints:
    """Per node the smallest node that it is connected with, in any direction. Near-linear (union-find with path halving)."""
    parent = list(range(count))
    for first, second in zip(src.tolist(), dst.tolist(), strict=True):
        while parent[first] != first:
            parent[first] = first = parent[parent[first]]
        while parent[second] != second:
            parent[second] = second = parent[parent[second]]
        if first < second:
            parent[second] = first
        else:
            parent[first] = second
    for node in range(count):
        parent[node] = parent[parent[node]]
    return np.asarray(parent, np.int32)
