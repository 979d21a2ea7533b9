"""Dependencies of nodes as arrays, and what is computed of them: smaller graphs, joined sets, hashes.

Dependencies as two arrays: all that analysis and scheduling need to know of a graph.

Smaller graphs with the same paths and schedules: nodes that launch nothing are dropped, linear chains become one block.

Sets of numbers that are joined step by step: union-find.

Hashes of whole arrays of numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from msplit.core.graph import Floats, Graph, Ints

_Number = TypeVar("_Number", bound=np.number)
_Item = TypeVar("_Item", bound=Hashable)


def distinct(values: NDArray[_Number]) -> NDArray[_Number]:
    """Each value once, ascending. `np.unique` of NumPy 2.3 and later hashes, which takes eighty times as long for a million edges."""
    if bool((values[1:] > values[:-1]).all()):
        return values
    values = np.sort(values)
    first = np.ones(len(values), np.bool_)
    np.not_equal(values[1:], values[:-1], out=first[1:])
    return values[first]


def reached(starts: Iterable[_Item], beside: Callable[[_Item], Iterable[_Item]]) -> set[_Item]:
    """All that some items lead to, step by step, themselves included."""
    found = set(starts)
    waiting = list(found)
    while waiting:
        new = set(beside(waiting.pop())) - found
        found |= new
        waiting += new
    return found


@dataclass(frozen=True, eq=False)
class Dag:
    """A directed acyclic graph of nodes 0..n-1.

    Attributes:
        start: The producers of node v are ``src[start[v]:start[v + 1]]``.
        src: Producers, grouped by consumer. A producer may be there twice.
    """

    start: Ints
    src: Ints

    def __len__(self) -> int:
        return len(self.start) - 1

    @staticmethod
    def of(count: int, src: Any, dst: Any) -> Dag:
        """From unsorted edges."""
        src, dst = np.asarray(src, np.int32), np.asarray(dst, np.int32)
        order = np.argsort(dst, kind="stable")
        start = np.searchsorted(dst[order], np.arange(count + 1)).astype(np.int32)
        return Dag(start, src[order])

    @staticmethod
    def from_graph(graph: Graph) -> Dag:
        """The data and control edges of a graph."""
        return Dag(graph.in_start, graph.edges.src)

    def dst(self) -> Ints:
        """The consumer of each edge."""
        return np.repeat(np.arange(len(self), dtype=np.int32), self.start[1:] - self.start[:-1])

    def consumers(self) -> tuple[Ints, Ints]:
        """(start, dst): the consumers of node u are ``dst[start[u]:start[u + 1]]``, ascending. Sorts the edges anew each time."""
        order = np.argsort(self.src, kind="stable")
        start = np.searchsorted(self.src[order], np.arange(len(self) + 1)).astype(np.int32)
        return start, self.dst()[order]


_MAX_PRODUCT = 16
"""A dropped node may be replaced by this many edges."""


def topological_numbers(dag: Dag) -> Ints:
    """A topological order by Kahn's algorithm, first come first served; the identity where the numbering is topological already.

    Raises:
        ValueError: The graph has a cycle.
    """
    order = _sorted_part(dag)
    if len(order) < len(dag):
        raise ValueError("the graph has a cycle")
    return order


def _sorted_part(dag: Dag) -> Ints:
    """Likewise, of a graph that may have cycles: the nodes that depend on none."""
    count = len(dag)
    if bool((dag.src < dag.dst()).all()):
        return np.arange(count, dtype=np.int32)
    out_start, out_dst = (column.tolist() for column in dag.consumers())
    waiting = np.diff(dag.start).tolist()
    order = [node for node in range(count) if waiting[node] == 0]
    for node in order:
        for consumer in out_dst[out_start[node] : out_start[node + 1]]:
            waiting[consumer] -= 1
            if waiting[consumer] == 0:
                order.append(consumer)
    return np.asarray(order, dtype=np.int32)


def pieces(dag: Dag, group: Ints) -> tuple[Ints, Dag]:
    """The graph with each group as one node, but for groups that this would tie into a circle: their nodes stay apart.

    Args:
        dag: Any numbering, without cycles.
        group: Per node its group, or -1 for a node on its own.

    Returns:
        Per node its piece, numbered by their first nodes, and the graph between pieces.
    """
    count = len(dag)
    while True:
        first = np.full(int(group.max(initial=-1)) + 1, count, np.int64)
        np.minimum.at(first, group[group >= 0], np.flatnonzero(group >= 0))
        lead = np.where(group >= 0, first[group], np.arange(count)) if len(first) else np.arange(count)
        found, number = np.unique(lead, return_inverse=True)
        piece: Ints = number.reshape(-1).astype(np.int32)
        small = quotient(dag, piece, len(found))
        stuck = np.ones(len(found), bool)
        stuck[_sorted_part(small)] = False
        if not stuck.any():
            return piece, small
        # Whatever is in a circle can be reached from neither end. Apart it makes none, and nothing else does.
        stuck[_sorted_part(Dag.of(len(small), small.dst(), small.src))] = False
        group = np.where(stuck[piece], -1, group).astype(np.int32)


def quotient(dag: Dag, group: Ints, count: int) -> Dag:
    """The graph between groups of nodes, each edge once, producers ascending.

    Args:
        dag: Any numbering.
        group: Per node its group ``0..count-1``; -1 drops the node with its edges.
        count: Number of groups.
    """
    src, dst = group[dag.src].astype(np.int64), group[dag.dst()].astype(np.int64)
    kept = (src != dst) & (src >= 0) & (dst >= 0)
    keys = distinct(dst[kept] * count + src[kept])
    dst, src = keys // max(count, 1), keys % max(count, 1)
    start = np.searchsorted(dst, np.arange(count + 1)).astype(np.int32)
    return Dag(start, src.astype(np.int32))


def bypass(dag: Dag, free: NDArray[np.bool_], order: Ints) -> tuple[Dag, NDArray[np.bool_]]:
    """Takes out free nodes and links their producers with their consumers, where that does not multiply edges.

    A free node with many producers and many consumers (a NoOp that groups control inputs) stays: p × c edges would take its place.
    Which nodes stay, and what links them, is the same for every topological order.

    Args:
        dag: Any numbering.
        free: Nodes that launch nothing.
        order: A topological order.

    Returns:
        The graph in the same numbering, nodes taken out having no edges, and which nodes are left.
    """
    count, dst = len(dag), dag.dst()
    looked_at = free.copy()
    looked_at[dst[free[dag.src]]] = True
    start, src, is_free = dag.start.tolist(), dag.src.tolist(), free.tolist()
    fan_out = np.bincount(dag.src, minlength=count).tolist()
    kept = [True] * count
    producers: dict[int, list[int]] = {}
    for node in order[looked_at[order]].tolist():
        found: list[int] = []
        for producer in src[start[node] : start[node + 1]]:
            if kept[producer]:
                found.append(producer)
            else:
                found += producers[producer]
        if len(found) > 1:
            found = list(dict.fromkeys(found))
        if is_free[node] and (len(found) < 2 or fan_out[node] < 2 or len(found) * fan_out[node] <= _MAX_PRODUCT):
            kept[node] = False
        producers[node] = found
    as_before = ~looked_at[dst]
    linked = [(node, found) for node, found in producers.items() if kept[node]]
    consumers = np.repeat([node for node, _ in linked], [len(found) for _, found in linked])
    sources = np.fromiter((producer for _, found in linked for producer in found), np.int32)
    edges = np.concatenate([dag.src[as_before], sources]), np.concatenate([dst[as_before], consumers])
    return Dag.of(count, *edges), np.asarray(kept, dtype=bool)


def in_order(dag: Dag, kept: NDArray[np.bool_], order: Ints) -> tuple[Dag, Ints]:
    """The graph that `bypass` has left, each edge once, numbered in an order of all nodes; and per number its node."""
    nodes = order[kept[order]]
    number = np.full(len(dag), -1, np.int32)
    number[nodes] = np.arange(len(nodes), dtype=np.int32)
    return quotient(dag, number, len(nodes)), nodes


def chains(dag: Dag, label: Ints | None = None) -> Ints:
    """The head of the linear chain that each node is in: u and v are linked if v is all that u feeds and u is all that v reads.

    Args:
        dag: Numbered topologically, each edge once.
        label: Nodes with different labels are never linked. By default all are alike.
    """
    head = list(range(len(dag)))
    producers, consumers = _links(dag, label)
    for producer, consumer in zip(producers.tolist(), consumers.tolist(), strict=True):
        head[consumer] = head[producer]
    return np.asarray(head, dtype=np.int32)


def along_chains(dag: Dag, value: Ints, label: Ints | None = None) -> Ints:
    """Values of nodes of a chain that have none, -1: that of the nearest before it that has one, else of the nearest behind it.

    See `chains` for `dag` and `label`.
    """
    if not (value >= 0).any():
        return value
    filled: list[int] = value.tolist()
    producers, consumers = (nodes.tolist() for nodes in _links(dag, label))
    for producer, consumer in zip(producers, consumers, strict=True):
        if filled[consumer] < 0:
            filled[consumer] = filled[producer]
    for producer, consumer in zip(reversed(producers), reversed(consumers), strict=True):
        if filled[producer] < 0:
            filled[producer] = filled[consumer]
    return np.asarray(filled, np.int32)


def merged(dag: Dag, group: Ints) -> Ints:
    """Groups of nodes as far as each can become one node without a cycle. O(n + m) per round; a round that finds no cycle is the last.

    `group` has per node the group that it should be merged with, or -1.

    Returns:
        Per node its group, ``0..`` without gaps, numbered topologically. Groups on a cycle, or between two, stay single nodes.
    """
    count = len(dag)
    wanted: NDArray[np.int64] = np.where(group >= 0, group.astype(np.int64) + count, np.arange(count))
    while True:
        number = np.unique(wanted, return_inverse=True)[1].reshape(-1).astype(np.int32)
        small = quotient(dag, number, int(number.max(initial=-1)) + 1)
        order = _sorted_part(small)
        if len(order) == len(small):
            place = np.empty(len(small), np.int32)
            place[order] = np.arange(len(small), dtype=np.int32)
            return np.asarray(place[number], np.int32)
        back = Dag.of(len(small), small.dst(), small.src)
        circling = np.ones(len(small), np.bool_)  # on a cycle, or between two
        circling[order] = False
        circling[_sorted_part(back)] = False
        wanted = np.where(circling[number], np.arange(count), wanted)


def _links(dag: Dag, label: Ints | None) -> tuple[Ints, Ints]:
    """The edges that chains are made of, consumers ascending."""
    fan_in = np.diff(dag.start)
    fan_out = np.bincount(dag.src, minlength=len(dag))
    dst = dag.dst()
    linked = (fan_in[dst] == 1) & (fan_out[dag.src] == 1)
    if label is not None:
        linked &= label[dst] == label[dag.src]
    return dag.src[linked], dst[linked]


class DisjointSets:
    """Each of 0..count-1 in a set of its own at first. The smallest number of a set stands for it.

    Near-linear in what is asked: paths are halved on the way (Tarjan and van Leeuwen, 1984).
    """

    __slots__ = ("_leader",)

    def __init__(self, count: int) -> None:
        self._leader = list(range(count))

    def find(self, number: int) -> int:
        """The smallest number of the set that a number is in."""
        leader = self._leader
        while leader[number] != number:
            leader[number] = number = leader[leader[number]]
        return number

    def join(self, one: int, other: int) -> None:
        """Makes the sets of two numbers one."""
        first, second = self.find(one), self.find(other)
        self._leader[max(first, second)] = min(first, second)


Hashes = NDArray[np.uint64]


def mixed(values: Hashes) -> Hashes:
    """Hashes of numbers, the same on every machine (the finalizer of SplitMix64: Steele, Lea and Flood, OOPSLA 2014)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def longest(weights: NDArray[Any], order: Ints, starts: Ints, others: Ints) -> Floats:
    """Weight of the heaviest path that ends at each node, the node included. From node v paths go to ``others[starts[v]:starts[v + 1]]``.

    With consumers and a topological order that is when each node ends at the earliest; with producers and the reverse order it is how
    long it takes from its start to the end of all (HEFT's upward rank without communication). On plain lists: chains make array calls per
    level slower.
    """
    weight = np.asarray(weights, dtype=np.float64).tolist()
    start, target = starts.tolist(), others.tolist()
    arrival = [0.0] * len(weight)
    result = [0.0] * len(weight)
    for node in order.tolist():
        done = result[node] = arrival[node] + weight[node]
        for following in target[start[node] : start[node + 1]]:
            if done > arrival[following]:
                arrival[following] = done
    return np.array(result, dtype=np.float64)
