"""Fewer streams: more than there may be, and such as never run at the same time."""

from __future__ import annotations

import numpy as np

from msplit.core.graph import Ints
from msplit.schedule.problem import Problem
from msplit.schedule.simulate import Simulation


def canonical(problem: Problem, stream: Ints) -> Ints:
    """The same assignment, streams numbered without gaps: the one with the most work is 0, the others follow by their first blocks."""
    _, first, number = np.unique(stream, return_index=True, return_inverse=True)
    if not len(first):
        return stream.astype(np.int32)
    work = np.bincount(number, problem.work_us)
    key = np.where(np.arange(len(first)) == int(np.argmax(work)), -1, first)
    new = np.empty(len(first), np.int32)
    new[np.argsort(key, kind="stable")] = np.arange(len(first), dtype=np.int32)
    return np.asarray(new[number.reshape(-1)])


def pack_streams(problem: Problem, stream: Ints, streams: int) -> Ints:
    """Puts the blocks of many streams on at most `streams`. O(n + m + s × streams) for s streams.

    Each stream is taken as one task that becomes ready when its first block could start at the earliest; tasks go, by that time, to the
    stream where they start first, preferably one that their first block's producers are on. This is what CANN's "LoadBalance:N"
    does with the paths of its path cover, with times in place of counts.

    Source: CANN's graph engine (hicann/ge), docs/en/design/features/stream_allocator.md.
    """
    stream = canonical(problem, stream)
    count = int(stream.max(initial=-1)) + 1
    if count <= streams:
        return stream
    earliest = _earliest_start(problem)
    head = np.full(count, len(problem), np.int64)
    np.minimum.at(head, stream, np.arange(len(problem)))
    work = np.bincount(stream, problem.work_us, count)
    begin = earliest[head]
    end = np.zeros(count)
    np.maximum.at(end, stream, earliest + problem.work_us)
    lane_of = [-1] * count
    free = [0.0] * streams
    src, start, owner = problem.dag.src, problem.dag.start, stream.tolist()
    for number in np.lexsort((np.arange(count), -work, begin)).tolist():
        node = int(head[number])
        related = {lane_of[owner[producer]] for producer in src[start[node] : start[node + 1]].tolist()}
        ready = float(begin[number])
        lane = min(range(streams), key=lambda lane: (max(free[lane], ready), lane not in related, -free[lane], lane))
        free[lane] = max(free[lane] + float(work[number]), float(end[number]))
        lane_of[number] = lane
    return canonical(problem, np.asarray(lane_of, np.int32)[stream])


def _earliest_start(problem: Problem) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    start, src, work = problem.dag.start.tolist(), problem.dag.src.tolist(), problem.work_us.tolist()
    begin = [0.0] * len(problem)
    for node in range(len(problem)):
        for producer in src[start[node] : start[node + 1]]:
            end = begin[producer] + work[producer]
            if end > begin[node]:
                begin[node] = end
    return np.asarray(begin)


def merge_idle(problem: Problem, stream: Ints, simulation: Simulation) -> Ints:
    """Merges streams of which never two run at the same time: the concurrency stays, waits and streams go.

    First fit, streams in the order of their first starts. O(s² + s n log n) for s streams.
    """
    busy = np.flatnonzero(~problem.joints)
    order = busy[np.lexsort((simulation.end_us[busy], simulation.start_us[busy]))]
    lanes: list[tuple[list[int], np.ndarray[tuple[int], np.dtype[np.int64]]]] = []  # (streams, their blocks by time)
    first = {lane: index for index, lane in reversed(list(enumerate(stream[order].tolist())))}
    for lane in sorted(first, key=first.__getitem__):
        blocks = order[stream[order] == lane]
        for number, (members, others) in enumerate(lanes):
            if _apart(simulation, blocks, others):
                joined = np.concatenate([others, blocks])
                by_time = np.lexsort((simulation.end_us[joined], simulation.start_us[joined]))
                lanes[number] = ([*members, lane], joined[by_time])
                break
        else:
            lanes.append(([lane], blocks))
    target = {lane: number for number, (members, _) in enumerate(lanes) for lane in members}
    return np.asarray([target.get(lane, 0) for lane in stream.tolist()], np.int32)


def _apart(simulation: Simulation, blocks: np.ndarray, others: np.ndarray) -> bool:
    """Whether no block of one list runs while one of the other does. Both are sorted by time and run one after the other."""
    begun = np.searchsorted(simulation.start_us[others], simulation.end_us[blocks], "left")
    ended = np.searchsorted(simulation.end_us[others], simulation.start_us[blocks], "right")
    return bool((begun == ended).all())
