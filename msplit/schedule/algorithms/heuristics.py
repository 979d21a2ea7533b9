"""Algorithms of one pass, most of them without costs: what frameworks do, and packing of independent parts."""

from __future__ import annotations

import heapq

import numpy as np

from msplit.core.graph import Ints
from msplit.schedule.algorithms.list_schedule import Skipped, continued
from msplit.schedule.problem import Problem, components, cuts


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
        heapq.heapreplace(loads, (load + float(total[number]), lane))
    stream = np.zeros(len(problem), np.int32)
    stream[inner] = chosen[part[inner]]
    return stream
