"""Algorithms that go over the blocks once: critical-path list scheduling, what frameworks do, and packing of independent parts.

Also what every algorithm is, and how it is continued.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush, heapreplace
from itertools import pairwise
from math import inf
from typing import Protocol

import numpy as np

from msplit.core.graph import Ints
from msplit.schedule.plan import places
from msplit.schedule.problem import Problem, components, cuts

_FULL = 1 - 1e-9


def list_schedule(problem: Problem, streams: int) -> Ints:
    """Plays the graph; whenever something ends, the ready blocks with the longest path to the end start where they can start first.

    The streams are not the machine, the GPU is: a block starts only while SMs and bandwidth are left, and what runs at once slows down
    as in the simulator. Starting on a stream that none of the block's latest producers ran on costs a wait. If a producer's
    stream is about to be free before a wait would be over, the block waits for it instead. Of tied blocks the first to start takes the
    others along; they and pinned ones wait for their stream.

    O((n + m) + n × streams + n log n).

    Source: HEFT's upward rank and earliest start (Topcuoglu, Hariri and Wu, "Performance-effective and low-complexity task scheduling
    for heterogeneous computing", IEEE TPDS 2002), as list scheduling over time (Graham, "Bounds on multiprocessing timing
    anomalies", 1969) of tasks that share one resource.
    """
    return _Run(problem, streams).play()


class _Run:
    """The state of the machine while the schedule is built. Times are µs."""

    def __init__(self, problem: Problem, streams: int) -> None:
        self.machine = problem.machine
        start, src = problem.dag.start.tolist(), problem.dag.src.tolist()
        self.producers = [src[first:last] for first, last in pairwise(start)]
        self.out_start, self.out = (column.tolist() for column in problem.consumers)
        self.missing = np.diff(problem.dag.start).tolist()
        self.place, self.node_at = places(problem.rank)
        self.work = problem.work_us.tolist()
        self.sms, self.bandwidth, self.issue = (column.tolist() for column in problem.demand.T)
        self.joint = problem.joints.tolist()
        self.lane = [0] * len(problem)
        self.end = [0.0] * len(problem)
        self.ready: list[int] = []  # places
        self.running: list[tuple[float, int]] = []  # by virtual time, as in the simulator
        self.occupant = [-1] * streams  # the block that runs on each lane
        self.finish = [0.0] * streams  # its end in virtual time
        self.since = [-1.0] * streams  # since when a lane is idle; -1: never used
        self.idle = streams
        self.tie = problem.tie.tolist()
        # The lane that a block must be on, or -1.
        self.given: list[int] = np.where(problem.pin < streams, problem.pin, -1).tolist()
        self.lane_of_tie = {tie: lane for tie, lane in zip(self.tie, self.given, strict=True) if tie >= 0 and lane >= 0}
        self.parked: list[list[int]] = [[] for _ in range(streams)]  # places of blocks that wait for their lane
        self.now = self.virtual = 0.0
        self.rate = 1.0
        self.used_sms = self.used_bandwidth = self.used_issue = 0.0

    def play(self) -> Ints:
        for node, missing in enumerate(list(self.missing)):
            if missing == 0:
                self._arrive(node)
        while True:
            held = self._dispatch()
            if not self.running:
                break
            self._advance()
            for node in held:
                heappush(self.ready, self.place[node])
        return np.asarray(self.lane, np.int32)

    def _arrive(self, node: int) -> None:
        """A block all of whose producers have ended is ready. A joint is over at once."""
        joints = [node]
        while joints:
            node = joints.pop()
            if not self.joint[node]:
                heappush(self.ready, self.place[node])
                continue
            producers = self.producers[node]
            self.end[node] = self.now
            self.lane[node] = self.lane[max(producers, key=self.end.__getitem__)] if producers else 0
            for consumer in self.out[self.out_start[node] : self.out_start[node + 1]]:
                self.missing[consumer] -= 1
                if self.missing[consumer] == 0:
                    joints.append(consumer)

    def _advance(self) -> None:
        """To the end of what ends next, and of all that ends with it."""
        running, missing = self.running, self.missing
        target = running[0][0]
        self.now += (target - self.virtual) * self.rate
        self.virtual = target
        while running and running[0][0] <= target + 1e-9:
            node = heappop(running)[1]
            self.end[node] = self.now
            lane = self.lane[node]
            self.occupant[lane] = -1
            self.since[lane] = self.now
            self.idle += 1
            if self.parked[lane]:
                heappush(self.ready, heappop(self.parked[lane]))
            self.used_sms -= self.sms[node]
            self.used_bandwidth -= self.bandwidth[node]
            self.used_issue -= self.issue[node]
            for consumer in self.out[self.out_start[node] : self.out_start[node + 1]]:
                missing[consumer] -= 1
                if missing[consumer] == 0:
                    self._arrive(consumer)
        if not running:
            self.used_sms = self.used_bandwidth = self.used_issue = 0.0
        self.rate = self.machine.slowdown(len(running), self.used_sms, self.used_bandwidth, self.used_issue)

    def _dispatch(self) -> list[int]:
        """Starts ready blocks on idle lanes. Returns those that had better wait for a lane that is about to be free."""
        held: list[int] = []
        # Lanes. One block waits for each: behind a barrier thousands would wait for the one that ended last.
        awaited: set[int] = set()
        ready = self.ready
        while ready and self.idle and self.used_sms < _FULL and self.used_bandwidth < _FULL:
            batch = [self.node_at[heappop(ready)] for _ in range(min(self.idle, len(ready)))]
            homeless = []
            for node in batch:  # first whoever can go on where a producer ran
                if self.used_sms >= _FULL or self.used_bandwidth >= _FULL:
                    heappush(ready, self.place[node])
                    continue
                bound = self._bound(node)
                if bound >= 0 and self.occupant[bound] >= 0:
                    heappush(self.parked[bound], self.place[node])
                    continue
                home, when = (bound, self._arrival(node, bound)) if bound >= 0 else self._home(node)
                if home >= 0:
                    self._launch(node, home, when)
                else:
                    homeless.append(node)
            for node in homeless:
                just_bound = self._bound(node) >= 0  # what it is tied to has just started
                if just_bound or not self.idle or self.used_sms >= _FULL or self.used_bandwidth >= _FULL:
                    heappush(ready, self.place[node])
                    continue
                later = self._arrival(node, -1)
                soon = self._soon_free(node, later)
                if soon >= 0 and soon not in awaited:
                    awaited.add(soon)
                    held.append(node)
                else:
                    self._launch(node, self._stranger(), later)
        return held

    def _bound(self, node: int) -> int:
        """The lane that a block must start on, -1 where it may choose."""
        if self.given[node] >= 0:
            return self.given[node]
        return self.lane_of_tie.get(self.tie[node], -1) if self.tie[node] >= 0 else -1

    def _arrival(self, node: int, lane: int) -> float:
        """Earliest start of a block on a lane that is idle now."""
        latest, wait = self.now, self.machine.wait_us
        for producer in self.producers[node]:
            if self.lane[producer] != lane and self.end[producer] + wait > latest:
                latest = self.end[producer] + wait
        return latest

    def _home(self, node: int) -> tuple[int, float]:
        """The idle lane of a producer on which the block can start first, and when; -1 where all are busy."""
        best, soonest = -1, inf
        tried = []
        for producer in self.producers[node]:
            lane = self.lane[producer]
            if self.occupant[lane] >= 0 or lane in tried:
                continue
            tried.append(lane)
            when = self._arrival(node, lane)
            if when < soonest:
                best, soonest = lane, when
        return best, soonest

    def _soon_free(self, node: int, later: float) -> int:
        """A producer's lane that is free before the block could start elsewhere, or -1."""
        until = self.virtual + (later - self.now) / self.rate
        for producer in self.producers[node]:
            lane: int = self.lane[producer]
            if self.occupant[lane] >= 0 and self.finish[lane] <= until:
                return lane
        return -1

    def _stranger(self) -> int:
        """The lane that has been idle longest: what just ended probably goes on there. A new one before one that is free just now."""
        fresh = youngest = -1
        oldest = -1
        for lane, node in enumerate(self.occupant):
            if node >= 0:
                continue
            since = self.since[lane]
            if since < 0:
                fresh = lane if fresh < 0 else fresh
            elif since < self.now:
                oldest = lane if oldest < 0 or since < self.since[oldest] else oldest
            else:
                youngest = lane if youngest < 0 else youngest
        return oldest if oldest >= 0 else fresh if fresh >= 0 else youngest

    def _launch(self, node: int, lane: int, when: float) -> None:
        self.lane[node] = lane
        if self.tie[node] >= 0:
            self.lane_of_tie.setdefault(self.tie[node], lane)
        self.occupant[lane] = node
        self.idle -= 1
        self.used_sms += self.sms[node]
        self.used_bandwidth += self.bandwidth[node]
        self.used_issue += self.issue[node]
        self.rate = self.machine.slowdown(len(self.running) + 1, self.used_sms, self.used_bandwidth, self.used_issue)
        self.finish[lane] = self.virtual + (when - self.now) / self.rate + self.work[node]
        heappush(self.running, (self.finish[lane], node))


def continued(problem: Problem, goes_on: Callable[[int], bool], streams: int) -> Ints:
    """Each block on the stream of its first producer whose stream goes on behind it; where there is none it opens one, in turn."""
    start, src = problem.dag.start.tolist(), problem.dag.src.tolist()
    stream = [0] * len(problem)
    opened = 0
    for node in range(len(problem)):
        producer = next((one for one in src[start[node] : start[node + 1]] if goes_on(one)), None)
        stream[node] = opened % streams if producer is None else stream[producer]
        opened += producer is None
    return np.asarray(stream, np.int32)


class Skipped(Exception):
    """A candidate does not apply to a problem. The text says why, for the user."""


class Algorithm(Protocol):
    """Puts the blocks of a problem on streams."""

    def __call__(self, problem: Problem, streams: int) -> Ints:
        """Returns per block a stream ``0..``. Algorithms that know no limit may use more than `streams`: they are packed afterwards.

        Raises:
            Skipped: The problem is too large for the algorithm, or has nothing that it could work on.
        """


def one_stream(problem: Problem, streams: int) -> Ints:
    """Everything on stream 0."""
    return np.zeros(len(problem), np.int32)


def fan_out(problem: Problem, streams: int) -> Ints:
    """A block stays on the stream of a producer that feeds nothing else; after a fork or without such a producer it opens a stream.

    Ids are taken modulo the number of streams, as TensorFlow did, so unrelated branches may meet on one. O(n + m), knows no costs.

    Source: `AssignStreams` in tensorflow/core/common_runtime/gpu/gpu_stream_util.cc (TensorFlow 1.x and 2.x; it was always called
    with one stream: https://github.com/tensorflow/tensorflow/issues/36970).
    """
    consumers = np.bincount(problem.dag.src, minlength=len(problem)).tolist()
    return continued(problem, lambda producer: consumers[producer] == 1, streams)


def round_robin(problem: Problem, streams: int) -> Ints:
    """The longest path, counted in kernels, is on stream 0; the other blocks go round-robin over the other streams, in topological order.

    O(n + m). The original deals out single kernels and so cuts chains as well; on the blocks of a contracted problem it does better
    than there. `Problem.of(..., contracted=False)` gives the original.

    Source: NVIDIA apex, contrib/torchsched (https://github.com/NVIDIA/apex/pull/1886), eight streams by default.
    """
    if streams < 2:
        raise Skipped("needs two streams")
    start, src, kernels = problem.dag.start.tolist(), problem.dag.src.tolist(), problem.kernels.tolist()
    depth = [0] * len(problem)
    deepest = [-1] * len(problem)
    for node in range(len(problem)):
        for producer in src[start[node] : start[node + 1]]:
            if depth[producer] > depth[node]:
                depth[node] = depth[producer]
                deepest[node] = producer
        depth[node] += kernels[node]
    stream = np.full(len(problem), -1, np.int32)
    node = int(np.argmax(depth)) if depth else -1
    while node >= 0:
        stream[node] = 0
        node = deepest[node]
    rest = np.flatnonzero(stream < 0)
    stream[rest] = 1 + np.arange(len(rest)) % (streams - 1)
    return stream


def longest_first(problem: Problem, streams: int) -> Ints:
    """Between two blocks that everything passes through, each connected part (an embedding column, a tower) goes whole on one stream.

    Parts are dealt out by falling time, each to the stream with the least so far, which is at most 4/3 of the best possible packing.
    The longest part and the blocks that everything passes through are on stream 0. O(n + m + p log s) for p parts.

    Source: Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math. 1969 (LPT). DeepRec packs embedding columns
    round-robin instead.
    """
    trunk = cuts(problem.dag)
    dst = problem.dag.dst()
    inside = ~(trunk[problem.dag.src] | trunk[dst])
    inner = np.flatnonzero(~trunk)
    if not len(inner):
        raise Skipped("no two kernels are independent")
    first = components(len(problem), problem.dag.src[inside], dst[inside])
    heads, number = np.unique(first[inner], return_inverse=True)
    count = len(heads)
    part = np.full(len(problem), -1, np.int32)
    part[inner] = number
    total = np.bincount(part[inner], problem.work_us[inner], count)
    section = np.zeros(count, np.int64)
    section[part[inner]] = np.cumsum(trunk)[inner]
    order = np.lexsort((np.arange(count), -total, section))
    if len(np.unique(section)) == count:
        raise Skipped("no independent parts between the blocks that everything passes through")
    chosen = np.zeros(count, np.int32)
    current, loads = -1, [(0.0, 0)]
    for number in order.tolist():
        if section[number] != current:
            current = int(section[number])
            loads = [(0.0, lane) for lane in range(streams)]
        load, lane = loads[0]
        chosen[number] = lane
        heapreplace(loads, (load + float(total[number]), lane))
    stream = np.zeros(len(problem), np.int32)
    stream[inner] = chosen[part[inner]]
    return stream
