"""What an assignment is worth: its plan, in the better of two record orders, and how long the simulator says it takes.

Costs are never right, and a plan whose branches are just hidden behind the longest one is slower where one of them takes a little
longer. So plans are compared by their mean makespan over several simulations in which the time of every block is off by about a tenth.
(On an H200, of assignments of Inception-v3 that the simulator takes for equal, those with room to spare were up to 5 % faster; the rank
correlation rose from 0.85 to 0.97. Sampling durations is how stochastic scheduling compares static plans: Ludwig, Möhring and Stork,
"A computational study on bounding the makespan distribution in stochastic project networks", Annals of Operations Research 2001.)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from msplit.core.dag import Dag
from msplit.core.graph import Floats, Ints
from msplit.schedule.plan.plan import Plan, topological
from msplit.schedule.plan.reorder import timed_order
from msplit.schedule.problem import Problem
from msplit.schedule.simulate import Simulation, plan_of, simulate

BOTH_ORDERS = 20_000
"""Up to this many blocks both record orders are tried; above it the timed one, which is rarely worse."""

SPREAD = 0.1
"""Standard deviation of a block's time in the simulations that plans are compared by, as a share of it."""

TURNS = (0.7548776662466927, 0.5698402909980532)
"""Powers of the plastic number: multiples of them, without what is before the point, fill the square evenly (Roberts's R2 sequence)."""

LARGEST_VARIED = 5_000
"""Up to this many blocks. Above it one simulation has to do: the means of many blocks in a row hardly vary."""

WAIT_PRICE = 0.1
"""What a wait costs beside the time it takes, in `join_us`: the device has to send and receive a signal even where nobody is late."""


@dataclass(frozen=True, eq=False)
class Evaluation:
    """An assignment, worked out. Its record order is of all blocks, joints included."""

    problem: Problem
    stream: Ints
    order: Ints
    plan: Plan
    simulation: Simulation

    @property
    def at_best_us(self) -> float:
        """The makespan, and the price of the waits. The mean of maxima is no less than the maximum of the means, so that the score is not
        below it, but for scheduling anomalies."""
        return self.simulation.makespan_us + WAIT_PRICE * self.problem.machine.join_us * self.plan.waits

    @cached_property
    def score_us(self) -> float:
        """The mean makespan when times vary, and the price of the waits: what is compared."""
        if self.plan.streams < 2 or len(self.problem) > LARGEST_VARIED:
            return self.at_best_us
        makespans = [simulate(self.problem, self.plan, work).makespan_us for work in varied(self.problem)]
        return self.at_best_us + sum(makespans) / len(makespans) - self.simulation.makespan_us


def evaluate(problem: Problem, stream: Ints, order: Ints | None = None) -> Evaluation:
    """Plans and simulates an assignment, in a record order or else in the better of the order by rank and the timed order."""
    orders = [timed_order(problem, stream)] if order is None else [order]
    if order is None and len(problem) <= BOTH_ORDERS:
        orders.insert(0, problem.by_rank)
    found = []
    for one in orders:
        plan = plan_of(problem, stream, one)
        found.append(Evaluation(problem, stream, one, plan, simulate(problem, plan)))
    return min(found, key=lambda evaluation: evaluation.at_best_us)


def varied(problem: Problem) -> list[Floats]:
    """Work of the blocks with their times off by `SPREAD`, up and down in pairs, so that the means are the times themselves.

    The same for the same problem on every machine: no random numbers.
    """
    found = []
    for turn in TURNS:
        even = np.modf(np.arange(1, len(problem) + 1) * turn)[0] * 2 - 1  # between -1 and 1, its deviation 1 / sqrt(3)
        found += [problem.work_us * (1 + sign * SPREAD * np.sqrt(3) * even) for sign in (1, -1)]
    return found


def node_order(problem: Problem, order: Ints, dag: Dag) -> Ints:
    """The record order of the graph that a problem was made from, in its own numbering: its nodes in the order of their blocks.

    Nodes that launch nothing come as early as they can.
    """
    position = np.empty(len(problem), np.float64)
    position[order] = np.arange(len(order))
    if not len(problem):
        return topological(dag)
    return topological(dag, np.where(problem.block >= 0, -position[np.maximum(problem.block, 0)], np.inf))
