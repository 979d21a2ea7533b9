"""Ways to put blocks on streams. Each algorithm is a pure function from a problem to a stream per block."""

from msplit.schedule.algorithms.base import Algorithm, Skipped
from msplit.schedule.algorithms.registry import ALGORITHMS, LIST, ONE

__all__ = ["ALGORITHMS", "LIST", "ONE", "Algorithm", "Skipped"]
