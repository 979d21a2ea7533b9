"""Where the time of a plan goes: what the simulator finds when the costs of running side by side are switched off, one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf

from msplit.schedule.plan.plan import Plan
from msplit.schedule.problem import Problem
from msplit.schedule.simulate import simulate

SWITCHES: tuple[tuple[str, Mapping[str, float]], ...] = (
    ("contention", {"contention": 0.0}),
    ("company", {"company": 1.0}),
    ("starts and waits", {"wait_us": 0.0, "join_us": 0.0, "issue_us": 0.0, "crowd_us": 0.0, "node_us": 0.0}),
    ("bandwidth", {"bandwidth": inf}),
    ("the step itself", {"step_us": 0.0}),
)
"""What is switched off, and the fields of `Machine` that do it. See there for what they mean."""


@dataclass(frozen=True)
class Breakdown:
    """The simulated time of a step in parts, µs.

    Attributes:
        makespan_us: All of it.
        kernels_us: What the kernels take where nothing but the order and the SMs hold them up: the critical path, where those suffice.
        parts: What else it goes into, by the names in `SWITCHES`. Each is what the step is shorter when that is switched off after those
            before it; a scheduling anomaly can make one a little negative.
    """

    makespan_us: float
    kernels_us: float
    parts: Mapping[str, float]


def breakdown(problem: Problem, plan: Plan) -> Breakdown:
    """Takes the simulated time of a plan apart.

    Args:
        problem: What is scheduled.
        plan: Over its blocks.
    """
    whole = left = simulate(problem, plan).makespan_us
    parts = {}
    for name, off in SWITCHES:
        problem = replace(problem, machine=replace(problem.machine, **off))
        rest = simulate(problem, plan).makespan_us
        parts[name], left = left - rest, rest
    return Breakdown(whole, left, parts)
