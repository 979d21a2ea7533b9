"""TensorFlow's old stream assignment."""

from __future__ import annotations

import numpy as np

from msplit.core.graph import Ints
from msplit.schedule.problem import Problem


def fan_out(problem: Problem, streams: int) -> Ints:
    """A block stays on the stream of a producer that feeds nothing else; after a fork or without such a producer it opens a stream.

    Ids are taken modulo the number of streams, as TensorFlow did, so unrelated branches may meet on one. O(n + m), knows no costs.

    Source: `AssignStreams` in tensorflow/core/common_runtime/gpu/gpu_stream_util.cc (TensorFlow 1.x and 2.x; it was always called
    with one stream: https://github.com/tensorflow/tensorflow/issues/36970).
    """
    start, src = problem.dag.start.tolist(), problem.dag.src.tolist()
    consumers = np.bincount(problem.dag.src, minlength=len(problem)).tolist()
    stream = [0] * len(problem)
    opened = 0
    for node in range(len(problem)):
        for producer in src[start[node] : start[node + 1]]:
            if consumers[producer] == 1:
                stream[node] = stream[producer]
                break
        else:
            stream[node] = opened % streams
            opened += 1
    return np.asarray(stream, np.int32)
