"""What an assignment is worth: its plan, in the better of two record orders, and how long the simulator says it takes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from msplit.dag import Dag
from msplit.graph import Ints
from msplit.schedule.order import topological
from msplit.schedule.plan import Plan
from msplit.schedule.problem import Problem
from msplit.schedule.simulate import Simulation, plan_of, simulate
from msplit.schedule.timed_order import timed_order

BOTH_ORDERS = 20_000
"""Up to this many blocks both record orders are tried; above it the timed one, which is rarely worse."""

WAIT_PRICE = 0.1
"""What a wait costs beside the time it takes, in `join_us`: the device has to send and receive a signal even where nobody is late."""


@dataclass(frozen=True, eq=False)
class Evaluation:
    """An assignment, worked out.

    Attributes:
        stream: Per block its stream.
        order: Record order of the blocks, joints included.
        plan: The plan.
        simulation: What it does over time.
        score_us: The makespan, and the price of the waits: what is compared.
    """

    stream: Ints
    order: Ints
    plan: Plan
    simulation: Simulation
    score_us: float


def evaluate(problem: Problem, stream: Ints, order: Ints | None = None) -> Evaluation:
    """Plans and simulates an assignment.

    Args:
        problem: The blocks.
        stream: Per block its stream.
        order: The record order to use; by default the better of the order by rank and the timed order.
    """
    if order is not None:
        orders = [order]
    elif len(problem) <= BOTH_ORDERS:
        orders = [topological(problem.dag, problem.rank), timed_order(problem, stream)]
    else:
        orders = [timed_order(problem, stream)]
    return min((_evaluate(problem, stream, order) for order in orders), key=lambda found: found.score_us)


def _evaluate(problem: Problem, stream: Ints, order: Ints) -> Evaluation:
    plan = plan_of(problem, stream, order)
    simulation = simulate(problem, plan)
    price = WAIT_PRICE * problem.machine.join_us
    return Evaluation(stream, order, plan, simulation, simulation.makespan_us + price * plan.waits)


def node_order(problem: Problem, order: Ints, dag: Dag) -> Ints:
    """The record order of the graph that a problem was made from: its nodes in the order of their blocks.

    Args:
        problem: The blocks.
        order: Their record order.
        dag: The graph, in its own numbering. Nodes that launch nothing come as early as they can.
    """
    position = np.empty(len(problem), np.float64)
    position[order] = np.arange(len(order))
    if not len(problem):
        return topological(dag)
    return topological(dag, np.where(problem.block >= 0, -position[np.maximum(problem.block, 0)], np.inf))
