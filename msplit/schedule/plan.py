"""A plan: an assignment made executable, with the fewest waits that order every edge.

For a given assignment and a given order of each stream the fewest waits are unique: the cross-stream edges of the transitive
reduction of (graph ∪ stream order). They are found in one pass with vector clocks (Mattern 1989; Fidge 1988): a clock per stream says how
far into every other stream it has waited already, and a producer that the clock covers needs no wait.

In a CUDA graph there are no streams, only edges, but the order in which nodes are recorded decides which lane a node replays on:
a node that joins several branches goes on where its first recorded producer ran. So the critical child of a fork is
recorded first, and what has slack comes as late as its consumers allow.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from msplit.core.dag import Dag, distinct, longest, topological_numbers
from msplit.core.graph import Floats, Ints


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

    @cached_property
    def links(self) -> tuple[list[int], list[int], list[int], dict[int, list[int]]]:
        """Per node the next one on its stream, or -1; what it waits for, its predecessor there included; its waits; who waits for it.

        A plan is simulated several times: who changes one of these copies it.
        """
        count, lanes = len(self.stream), self.stream.tolist()
        following, missing, waits = [-1] * count, [0] * count, [0] * count
        last: dict[int, int] = {}
        for node in self.order.tolist():
            before = last.get(lanes[node], -1)
            if before >= 0:
                following[before] = node
                missing[node] = 1
            last[lanes[node]] = node
        waiters: dict[int, list[int]] = {}
        for node, event in zip(self.wait_node.tolist(), self.wait_on.tolist(), strict=True):
            missing[node] += 1
            waits[node] += 1
            waiters.setdefault(event, []).append(node)
        return following, missing, waits, waiters

    @property
    def records(self) -> int:
        """Number of nodes that record an event."""
        return len(distinct(self.wait_on))


def make_plan(dag: Dag, stream: Ints, order: Ints) -> Plan:
    """Finds the fewest waits. O((nodes + edges) log edges + waits × streams).

    Args:
        dag: Dependencies, control edges included.
        stream: Per node its stream, or -1 for a node that launches nothing.
        order: Topological order of all nodes; the nodes of one stream run in this order.
    """
    lanes = _Lanes.of(stream, order)
    keys = distinct(_crossing(dag, lanes))
    (wait_node, wait_on, merged), clocks = _waits(keys[_new(keys, lanes)], lanes)
    return Plan(
        stream=stream,
        order=np.asarray(order[stream[order] >= 0], np.int32),
        wait_node=wait_node,
        wait_on=wait_on,
        fork=_forks(lanes, wait_node),
        join=_joins(lanes, clocks),
        streams=lanes.count,
        edges=len(keys),
        merged_waits=merged,
    )


@dataclass(frozen=True, eq=False)
class _Lanes:
    """Positions of nodes: on their streams and in the record order.

    A dependency across streams is kept as one number, a key: the consumer's rank, the producer's stream and the producer's position
    there. Sorted keys are grouped by consumer, and in that by stream.
    """

    stream: Ints
    order: Ints
    rank: NDArray[np.int64]  # of a node in the record order
    position: NDArray[np.int64]  # of a node in its stream; -1 for nodes that are on none
    members: Ints  # nodes by stream and position
    first: NDArray[np.int64]  # of each stream in `members`, and the end
    count: int

    @staticmethod
    def of(stream: Ints, order: Ints) -> _Lanes:
        count = int(stream.max(initial=-1)) + 1
        rank = np.zeros(len(stream), np.int64)
        rank[order] = np.arange(len(order))
        placed = order[stream[order] >= 0]
        members = np.asarray(placed[np.argsort(stream[placed], kind="stable")], np.int32)
        first = np.searchsorted(stream[members], np.arange(count + 1))
        position = np.full(len(stream), -1, np.int64)
        position[members] = np.arange(len(members)) - first[stream[members]]
        return _Lanes(stream, order, rank, position, members, first, count)

    def key(self, producer: Ints, consumer: Ints) -> NDArray[np.int64]:
        length = max(len(self.stream), 1)
        keys: NDArray[np.int64] = self.rank[consumer] * self.count + self.stream[producer]
        return keys * length + self.position[producer]

    def split(self, keys: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """(rank of the consumer, stream of the producer, its position there)."""
        length = max(len(self.stream), 1)
        pair, position = keys // length, keys % length
        return pair // max(self.count, 1), pair % max(self.count, 1), position


def _crossing(dag: Dag, lanes: _Lanes) -> NDArray[np.int64]:
    """Keys of what nodes depend on in other streams, also through nodes without a stream; some more than once."""
    src, dst, stream = dag.src, dag.dst(), lanes.stream
    direct = (stream[src] >= 0) & (stream[dst] >= 0) & (stream[src] != stream[dst])
    through = np.flatnonzero((stream[src] < 0) & (stream[dst] >= 0))
    keys = lanes.key(src[direct], dst[direct])
    if not len(through):
        return keys
    first, needed = _frontier(dag, lanes)
    joint = src[through]
    many = (first[1:] - first[:-1])[joint]
    near = np.repeat(dst[through], many)
    # What joint j of the edges needs is needed[first[j]:first[j + 1]]: one run of numbers per edge.
    far = needed[np.arange(len(near)) + np.repeat(first[joint] - np.cumsum(many) + many, many)]
    other = stream[far] != stream[near]
    return np.concatenate([keys, lanes.key(far[other], near[other])])


def _frontier(dag: Dag, lanes: _Lanes) -> tuple[NDArray[np.int64], Ints]:
    """(first, node): of each stream the last node that j, a node without a stream, depends on, are ``node[first[j]:first[j + 1]]``."""
    start, src = dag.start.tolist(), dag.src.tolist()
    lane, position = lanes.stream.tolist(), lanes.position.tolist()
    found: dict[int, dict[int, int]] = {}
    for node in lanes.order[lanes.stream[lanes.order] < 0].tolist():
        needed: dict[int, int] = {}
        for producer in src[start[node] : start[node + 1]]:
            for other, last in found[producer].items() if lane[producer] < 0 else ((lane[producer], producer),):
                if other not in needed or position[needed[other]] < position[last]:
                    needed[other] = last
        found[node] = needed
    many = [len(found.get(node, ())) for node in range(len(dag))]
    flat = [last for node in sorted(found) for last in found[node].values()]
    return np.cumsum([0, *many]), np.asarray(flat, np.int32)


def _new(keys: NDArray[np.int64], lanes: _Lanes) -> NDArray[np.bool_]:
    """Mask of the sorted keys that are the latest of their consumer and stream, and later than all that the consumer's stream needed of
    that stream before. Nothing else can be a wait."""
    rank, other, position = lanes.split(keys)
    latest = np.ones(len(keys), bool)
    latest[:-1] = (rank[1:] != rank[:-1]) | (other[1:] != other[:-1])
    rows = np.flatnonzero(latest)
    pair = lanes.stream[lanes.order[rank[rows]]].astype(np.int64) * lanes.count + other[rows]
    by_pair = np.argsort(pair, kind="stable")  # and in that by time
    rows, pair = rows[by_pair], pair[by_pair]
    # A running maximum per pair: higher pairs start above whatever lower ones can reach.
    height = np.cumsum(_changes(pair)) * len(lanes.stream) + position[rows]
    rises = np.append(True, height[1:] > np.maximum.accumulate(height)[:-1])[: len(rows)]
    result = np.zeros(len(keys), bool)
    result[rows[rises]] = True
    return result


def _changes(values: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Mask of the values that differ from the one before; the first does."""
    return np.append(True, values[1:] != values[:-1])[: len(values)]


def _waits(keys: NDArray[np.int64], lanes: _Lanes) -> tuple[tuple[Ints, Ints, int], list[list[int]]]:
    """Waits (consumers, producers, how many they were without clocks), and what each stream knows to be over in the end.

    `keys` are sorted, and what `_new` leaves of them.
    """
    rank, other, position = lanes.split(keys)
    producer = lanes.members[lanes.first[other] + position]
    # The latest producer first: what it has waited for itself needs no wait of ours.
    by_time = np.lexsort((-lanes.rank[producer], rank))
    rank, other, position, producer = rank[by_time], other[by_time], position[by_time], producer[by_time]
    consumer = lanes.order[rank]
    first = np.flatnonzero(_changes(rank))  # of each consumer
    # What stream s knows to be over: clocks[s][t] is a position in stream t. Only consumers change it, so that what held when a
    # producer was recorded is what the last consumer at or before it in its stream left.
    at = np.full(len(lanes.stream), -1, np.int64)
    at[consumer[first]] = np.arange(len(first))
    shift = np.repeat(np.arange(lanes.count), lanes.first[1:] - lanes.first[:-1]) * (len(first) + 1)
    left_by = np.maximum.accumulate(np.maximum(at[lanes.members] + 1, 0) + shift) - shift - 1
    known_by = left_by[lanes.first[other] + position].tolist()
    others, positions = other.tolist(), position.tolist()
    clocks = [[-1] * lanes.count for _ in range(lanes.count)]
    rows: list[list[int]] = []
    waits: list[int] = []
    lane_of = lanes.stream[consumer[first]].tolist()
    borders = [*first.tolist(), len(keys)]
    for here, low, high in zip(lane_of, borders[:-1], borders[1:], strict=True):
        clock = clocks[here]
        for wait in range(low, high):
            lane = others[wait]
            if positions[wait] <= clock[lane]:
                continue
            waits.append(wait)
            known = known_by[wait]
            clock = list(map(max, clock, rows[known])) if known >= 0 else clock.copy()
            clock[lane] = positions[wait]
        clocks[here] = clock
        rows.append(clock)
    kept = np.asarray(waits, np.int64)
    return (np.asarray(consumer[kept], np.int32), np.asarray(producer[kept], np.int32), len(keys)), clocks


def _forks(lanes: _Lanes, wait_node: Ints) -> Ints:
    """First nodes of streams but the origin that wait for nothing, in record order."""
    heads = lanes.members[lanes.first[:-1][lanes.first[1:] > lanes.first[:-1]]]
    waits = np.zeros(len(lanes.stream), bool)
    waits[wait_node] = True
    heads = heads[(lanes.stream[heads] != 0) & ~waits[heads]]
    return np.asarray(heads[np.argsort(lanes.rank[heads])], np.int32)


def _joins(lanes: _Lanes, clocks: list[list[int]]) -> Ints:
    """Tails of the streams that the origin has not waited for, less those that another such tail waited for."""
    if not lanes.count:
        return np.empty(0, np.int32)
    tails = lanes.members[lanes.first[1:][lanes.first[1:] > lanes.first[:-1]] - 1]
    tails = tails[lanes.stream[tails] != 0]
    clock = clocks[0]
    join = []
    for tail in tails[np.argsort(-lanes.rank[tails])].tolist():
        lane, position = int(lanes.stream[tail]), int(lanes.position[tail])
        if position > clock[lane]:
            join.append(tail)
            clock = list(map(max, clock, clocks[lane]))
            clock[lane] = position
    return np.asarray(join, np.int32)


def upward_rank(dag: Dag, weights: Floats, order: Ints) -> Floats:
    """Length of the longest path from each node to a sink, its own weight included. `order` is any topological one."""
    return longest(weights, order[::-1], dag.start, dag.src)


def places(key: Floats) -> tuple[list[int], list[int]]:
    """The place of each node by falling key, ties by number, and the node at each place.

    A heap of places is faster than one of pairs of key and node.
    """
    by_key = np.argsort(-key, kind="stable")
    place = np.empty(len(key), np.int64)
    place[by_key] = np.arange(len(key))
    return place.tolist(), by_key.tolist()


def topological(dag: Dag, key: Floats | None = None) -> Ints:
    """A topological order: among ready nodes the one with the largest key first, ties by number (Kahn's algorithm with a heap)."""
    count = len(dag)
    out_start, out_dst = (column.tolist() for column in dag.consumers())
    waiting = np.diff(dag.start).tolist()
    place, node_at = places(np.zeros(count) if key is None else key)
    heap = [place[node] for node in range(count) if waiting[node] == 0]
    heapify(heap)
    result = []
    while heap:
        node = node_at[heappop(heap)]
        result.append(node)
        for consumer in out_dst[out_start[node] : out_start[node + 1]]:
            waiting[consumer] -= 1
            if waiting[consumer] == 0:
                heappush(heap, place[consumer])
    return np.asarray(result, dtype=np.int32)


def record_order(dag: Dag, weights: Floats) -> Ints:
    """Topological order by falling upward rank: the critical child first, side work breadth-first across branches."""
    # The rank is the same along any topological order.
    return topological(dag, upward_rank(dag, weights, topological_numbers(dag)))
