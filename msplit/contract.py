"""Smaller graphs with the same paths and schedules: nodes that launch nothing are dropped, linear chains become one block."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from msplit.dag import Dag
from msplit.graph import Ints

_MAX_PRODUCT = 16
"""A dropped node may be replaced by this many edges."""


def topological_numbers(dag: Dag) -> Ints:
    """A topological order by Kahn's algorithm, first come first served; the identity where the numbering is topological already.

    Raises:
        ValueError: The graph has a cycle.
    """
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
    if len(order) < count:
        raise ValueError("the graph has a cycle")
    return np.asarray(order, dtype=np.int32)


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


def bypass(dag: Dag, free: NDArray[np.bool_]) -> tuple[Dag, NDArray[np.bool_]]:
    """Takes out free nodes and links their producers with their consumers, where that does not multiply edges.

    A free node with many producers and many consumers (a NoOp that groups control inputs) stays: p × c edges would take its place.

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
    np.cumsum([len(found) if kept[node] else 0 for node, found in enumerate(producers)], out=new_start[1:])
    new_src = [producer for node, found in enumerate(producers) if kept[node] for producer in found]
    return Dag(new_start.astype(np.int32), np.asarray(new_src, dtype=np.int32)), left


def chains(dag: Dag, label: Ints | None = None) -> Ints:
    """The head of the linear chain that each node is in: u and v are linked if v is all that u feeds and u is all that v reads.

    Args:
        dag: Numbered topologically, each edge once.
        label: Nodes with different labels are never linked. By default all are alike.
    """
    count = len(dag)
    fan_in = np.diff(dag.start)
    fan_out = np.bincount(dag.src, minlength=count)
    dst = dag.dst()
    linked = (fan_in[dst] == 1) & (fan_out[dag.src] == 1)
    if label is not None:
        linked &= label[dst] == label[dag.src]
    head = list(range(count))
    for producer, consumer in zip(dag.src[linked].tolist(), dst[linked].tolist(), strict=True):
        head[consumer] = head[producer]
    return np.asarray(head, dtype=np.int32)
