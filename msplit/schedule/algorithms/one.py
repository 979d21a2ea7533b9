"""One stream: what everything else has to beat."""

from __future__ import annotations

import numpy as np

from msplit.core.graph import Ints
from msplit.schedule.problem import Problem


def one_stream(problem: Problem, streams: int) -> Ints:
    """Everything on stream 0."""
    return np.zeros(len(problem), np.int32)
