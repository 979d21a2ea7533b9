"""What every candidate is."""

from __future__ import annotations

from typing import Protocol

from msplit.core.graph import Ints
from msplit.schedule.problem import Problem


class Skipped(Exception):
    """A candidate does not apply to a problem. The text says why, for the user."""


class Algorithm(Protocol):
    """Puts the blocks of a problem on streams."""

    def __call__(self, problem: Problem, streams: int) -> Ints:
        """Returns per block a stream ``0..``. Algorithms that know no limit may use more than `streams`: they are packed afterwards.

        Raises:
            Skipped: The problem is too large for the algorithm, or has nothing that it could work on.
        """
        ...
