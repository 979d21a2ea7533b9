"""Critical path on one stream, everything else in turn on the others."""

from __future__ import annotations

import numpy as np

from msplit.core.graph import Ints
from msplit.schedule.algorithms.base import Skipped
from msplit.schedule.problem import Problem


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
