"""Longest-first packing of independent parts."""

from __future__ import annotations

import heapq

import numpy as np

from msplit.core.graph import Ints
from msplit.schedule.algorithms.base import Skipped
from msplit.schedule.problem import Problem
from msplit.schedule.segments import components, cuts


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
        heapq.heapreplace(loads, (load + float(total[number]), lane))
    stream = np.zeros(len(problem), np.int32)
    stream[inner] = chosen[part[inner]]
    return stream
