"""Greedy path cover."""

from __future__ import annotations

import numpy as np

from msplit.core.graph import Ints
from msplit.schedule.problem import Problem


def greedy_cover(problem: Problem, streams: int) -> Ints:
    """Each block continues the stream of its first producer that no other block continues; where there is none it opens a stream.

    O(n + m), knows no costs, and opens as many streams as the greedy path cover has paths.

    Source: Chen, Wei, Hong, Xu and Liu, "Opara: Exploiting Operator Parallelism for Expediting DNN Inference on GPUs", IEEE
    Transactions on Computers 2025, algorithm 1 (https://arxiv.org/abs/2312.10351).
    """
    start, src = problem.dag.start.tolist(), problem.dag.src.tolist()
    continued = [False] * len(problem)
    stream = [0] * len(problem)
    opened = 0
    for node in range(len(problem)):
        for producer in src[start[node] : start[node + 1]]:
            if not continued[producer]:
                continued[producer] = True
                stream[node] = stream[producer]
                break
        else:
            stream[node] = opened
            opened += 1
    return np.asarray(stream, np.int32)
