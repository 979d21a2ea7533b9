"""What may be measured: schedules that the algorithms propose for several numbers of streams, in several kinds of kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from msplit.core.graph import Ints
from msplit.schedule.algorithms import LIST, ONE
from msplit.schedule.problem import Problem
from msplit.schedule.search.choose import choose, constrain
from msplit.schedule.search.evaluate import evaluate
from msplit.schedule.search.neighbours import Schedule

WIDTHS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Numbers of streams that candidates are made for, up to the most that there may be."""

POOL_EFFORT = 8_000
"""Blocks that may be simulated for one pool."""

REFINING = 10_000
"""Blocks that may be simulated to refine the best candidate of each width: what is left to gain, measuring finds."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """Something to measure. The mode says which kernels: it is a key of the problems that are searched. Waits are those over blocks."""

    mode: str
    name: str
    schedule: Schedule
    predicted_us: float
    waits: int
    streams: int

    def key(self) -> tuple[str, bytes]:
        """Equal for candidates that run the same."""
        return self.mode, self.schedule.key()


def single(problem: Problem, mode: str) -> Candidate:
    """Everything on one stream, as a candidate."""
    return candidate_of(problem, mode, ONE, np.zeros(len(problem), np.int32))


def candidate_of(problem: Problem, mode: str, name: str, stream: Ints, order: Ints | None = None) -> Candidate:
    """A candidate of an assignment, in the better record order where none is given."""
    found = evaluate(problem, stream, order)
    schedule = Schedule(stream, found.order)
    return simulated_candidate(problem, mode, name, schedule, found.simulation.makespan_us, found.plan.waits)


def simulated_candidate(
    problem: Problem, mode: str, name: str, schedule: Schedule, predicted: float, waits: int
) -> Candidate:
    """A candidate of a schedule that was simulated."""
    used = np.unique(schedule.stream[~problem.joints])
    return Candidate(mode, name, schedule, predicted, waits, max(len(used), 1))


def candidates(problem: Problem, mode: str, streams: int, given: Sequence[tuple[str, Ints]]) -> list[Candidate]:
    """Different candidates for two and up to so many streams, those given first."""
    # Large graphs take seconds to simulate: one number of streams more, in between, has to do.
    widths = WIDTHS if len(problem) <= POOL_EFFORT else (10,)
    found: dict[tuple[str, bytes], Candidate] = {}

    def add(candidate: Candidate) -> None:
        found.setdefault(candidate.key(), candidate)

    for name, stream in given:
        add(candidate_of(problem, mode, name, constrain(problem, stream, streams)))
    for width in [streams, *(width for width in reversed(widths) if 1 < width < streams)]:
        names = None if width == streams or len(problem) <= POOL_EFFORT else (LIST,)
        for proposal in choose(problem, width, names, refining=REFINING):
            if proposal.skipped is None and proposal.name != ONE:
                few = f" on {width}" if width < streams and proposal.streams >= width else ""
                name = proposal.name if proposal.name.endswith(f"-{width}") else proposal.name + few
                schedule = Schedule(proposal.stream, proposal.order)
                add(simulated_candidate(problem, mode, name, schedule, proposal.makespan_us, proposal.waits))
    return [candidate for candidate in found.values() if candidate.streams > 1]
