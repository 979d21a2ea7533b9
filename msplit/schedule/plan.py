"""A plan: an assignment made executable, with the fewest waits that order every edge.

For a given assignment and a given order of each stream the fewest waits are unique: the cross-stream edges of the transitive
reduction of (graph ∪ stream order). They are found in one pass with vector clocks (Mattern 1989; Fidge 1988): a clock per stream says how
far into every other stream it has waited already, and a producer that the clock covers needs no wait.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from msplit.dag import Dag
from msplit.graph import Ints


@dataclass(frozen=True, eq=False)
class Plan:
    """The order of each stream and what waits for what.

    Only nodes that launch something on the device are on a stream; the others (constants, views, host nodes) have stream -1 and
    their dependencies pass through them.

    Attributes:
        stream: Per node of the graph its stream ``0..streams-1``, or -1.
        order: The nodes that are on a stream, in record order: topological, and restricted to one stream it is that stream's order.
        wait_node: Per wait the node that waits.
        wait_on: Per wait the node whose event it waits for; it is on another stream.
        fork: Nodes, first of their stream, that wait for nothing else and so must wait for the start of the origin stream (stream 0).
        join: Last nodes of streams that the origin stream must wait for at the end.
        streams: Number of streams.
        edges: Dependencies between streams before reduction, counted once per (producer, consumer).
        merged_waits: Waits left if each node waits at most once per source stream and skips what its stream waited for before
            (the effect of NVIDIA's TF_REDUCE_STREAM_WAIT), for comparison with ``len(wait_node)``.
    """

    stream: Ints
    order: Ints
    wait_node: Ints
    wait_on: Ints
    fork: Ints
    join: Ints
    streams: int
    edges: int
    merged_waits: int

    @property
    def waits(self) -> int:
        """Number of waits."""
        return len(self.wait_node)

    @property
    def records(self) -> int:
        """Number of nodes that record an event."""
        return len(np.unique(self.wait_on))


def make_plan(dag: Dag, stream: Ints, order: Ints) -> Plan:
    """Finds the fewest waits. O((nodes + edges) + waits × streams).

    Args:
        dag: Dependencies, control edges included.
        stream: Per node its stream, or -1 for a node that launches nothing.
        order: Topological order of all nodes; the nodes of one stream run in this order.
    """
    streams = int(stream.max(initial=-1)) + 1
    start, src, lane = dag.start.tolist(), dag.src.tolist(), stream.tolist()
    position = [-1] * len(dag)  # of a node in its stream
    rank = [0] * len(dag)  # of a node in the record order
    frontier: dict[int, dict[int, int]] = {}  # of a node without a stream: stream -> last node it depends on
    members: list[list[int]] = [[] for _ in range(streams)]
    # What stream s knows to be over: clocks[s][t] is a position in stream t. A row is replaced, never changed, when s waits,
    # so that `seen[node]` can keep the row that held when the node was recorded.
    clocks: list[list[int]] = [[-1] * streams for _ in range(streams)]
    seen: list[list[int] | None] = [None] * len(dag)
    merged: list[list[int]] = [[-1] * streams for _ in range(streams)]
    wait_node: list[int] = []
    wait_on: list[int] = []
    fork: list[int] = []
    edges = merged_waits = 0

    for number, node in enumerate(order.tolist()):
        here = lane[node]
        rank[node] = number
        needed: dict[int, int] = {}
        crossing: set[int] = set()
        for producer in src[start[node] : start[node + 1]]:
            passed_on = {lane[producer]: producer} if lane[producer] >= 0 else frontier.get(producer, {})
            for other, last in passed_on.items():
                if other == here:
                    continue
                crossing.add(last)
                if other not in needed or position[needed[other]] < position[last]:
                    needed[other] = last
        if here < 0:
            if needed:
                frontier[node] = needed
            continue
        edges += len(crossing)
        for other, last in needed.items():
            if merged[here][other] < position[last]:
                merged[here][other] = position[last]
                merged_waits += 1
        clock = clocks[here]
        # The latest producer first: what it has waited for itself needs no wait of ours.
        for last in sorted(needed.values(), key=rank.__getitem__, reverse=True):
            other = lane[last]
            if position[last] <= clock[other]:
                continue
            wait_node.append(node)
            wait_on.append(last)
            known = seen[last]
            assert known is not None
            clock = [max(mine, theirs) for mine, theirs in zip(clock, known, strict=True)]
            clock[other] = max(clock[other], position[last])
        clocks[here] = clock
        if here != 0 and not members[here] and all(theirs < 0 for theirs in clock):
            fork.append(node)
        position[node] = len(members[here])
        members[here].append(node)
        seen[node] = clock

    join = _joins(members, position, seen, rank, lane)
    placed = np.asarray([node for node in order.tolist() if lane[node] >= 0], dtype=np.int32)
    return Plan(
        stream=stream,
        order=placed,
        wait_node=np.asarray(wait_node, np.int32),
        wait_on=np.asarray(wait_on, np.int32),
        fork=np.asarray(fork, np.int32),
        join=np.asarray(join, np.int32),
        streams=streams,
        edges=edges,
        merged_waits=merged_waits,
    )


def _joins(
    members: list[list[int]], position: list[int], seen: list[list[int] | None], rank: list[int], lane: list[int]
) -> list[int]:
    """Tails of the streams that the origin has not waited for, less those that another such tail waited for."""
    if not members:
        return []
    tails = sorted(
        (lane_members[-1] for lane_members in members[1:] if lane_members), key=rank.__getitem__, reverse=True
    )
    origin = members[0][-1] if members[0] else None
    clock = list(seen[origin] or ()) if origin is not None else [-1] * len(members)
    join = []
    for tail in tails:
        if position[tail] > clock[lane[tail]]:
            join.append(tail)
            known = seen[tail]
            assert known is not None
            clock = [max(mine, theirs) for mine, theirs in zip(clock, known, strict=True)]
            clock[lane[tail]] = position[tail]
    return join
