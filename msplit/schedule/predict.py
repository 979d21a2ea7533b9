"""What given stream ids are worth: their plan and its simulated time, beside one stream."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from msplit.analysis.copies import copies
from msplit.analysis.order import canonical
from msplit.core.dag import distinct
from msplit.core.graph import Floats, Ints
from msplit.core.memory import memoize
from msplit.cost.costs import Costs
from msplit.errors import MsplitError
from msplit.flatten.flat import FlatGraph
from msplit.schedule.machine import Machine
from msplit.schedule.plan.plan import Plan
from msplit.schedule.problem import Problem
from msplit.schedule.search.evaluate import Evaluation, evaluate
from msplit.schedule.simulate import Simulation

MOST_STREAMS = 1024
"""Distinct ids that can be simulated. A plan costs memory with their square; no GPU runs a tenth of them at once."""


@dataclass(frozen=True, eq=False)
class Prediction:
    """The simulated run of a graph with given stream ids.

    Attributes:
        ids: Per node its stream id, as given.
        lanes: The ids that kernels have, ascending. The plan knows streams by their place in it.
        problem: The kernels as chains that do not cross streams; `Problem.block` says which chain a node is in.
        plan: What runs where, in which order, and the fewest waits; over the blocks of `problem`.
        one_us: Simulated time of the same kernels on one stream.
        kernel_us: Per node the time of its kernel, 0 where it launches none.
        start: The kernels of block b, in the order in which they run, are ``node[start[b]:start[b + 1]]``.
        node: See `start`.
    """

    ids: Ints
    lanes: Ints
    problem: Problem
    plan: Plan
    simulation: Simulation
    one_us: float
    kernel_us: Floats
    start: Ints
    node: Ints

    @property
    def makespan_us(self) -> float:
        """Simulated time of one step."""
        return self.simulation.makespan_us

    @property
    def gain(self) -> float:
        """How many times faster than one stream; 1 where nothing runs."""
        return self.one_us / self.makespan_us if self.makespan_us > 0 else 1.0

    def stream_of(self, block: int) -> int:
        """The stream id of a block, -1 for a block without kernels."""
        lane = int(self.plan.stream[block])
        return int(self.lanes[lane]) if lane >= 0 else -1

    def load_us(self) -> dict[int, float]:
        """Stream id -> time of its kernels."""
        on = self.kernel_us > 0
        lane = np.searchsorted(self.lanes, self.ids[on])
        sums = np.bincount(lane, self.kernel_us[on], len(self.lanes))
        return dict(zip(self.lanes.tolist(), sums.tolist(), strict=True))


def predict(flat: FlatGraph, costs: Costs, ids: Ints) -> Prediction:
    """Plans and simulates given ids: per node 0 or more, perhaps with gaps. `costs.gpu` names the GPU that is simulated.

    Raises:
        MsplitError: Kernels have more than `MOST_STREAMS` different ids.
    """
    order = canonical(flat, costs.time_us)
    kernel_us = np.where(flat.host, 0.0, costs.time_us)
    on_gpu = kernel_us > 0
    lanes = distinct(ids[on_gpu])
    if len(lanes) > MOST_STREAMS:
        raise MsplitError(
            f"the kernels have {len(lanes)} different stream ids, and at most {MOST_STREAMS} can be simulated",
            fix="assign fewer streams",
        )
    # A node without a kernel may have an id that no kernel has; it is on no lane and its lane is never looked at.
    pin = np.where(on_gpu, np.searchsorted(lanes, ids), -1).astype(np.int32)

    def simulated() -> tuple[Evaluation, float | None]:
        same, machine = copies(flat, costs.time_us), Machine.of_costs(costs)
        problem = Problem.from_flat(flat, costs, tie=-1, pin=pin, same=same, order=order, machine=machine)
        found = evaluate(problem, problem.pin)
        if len(lanes) < 2:
            return found, None
        return found, evaluate(problem, np.zeros(len(problem), np.int32)).simulation.makespan_us

    # A report shows the ids of a model, and so do the checks that it runs: equal ids are simulated once.
    found, one = memoize(flat, "simulated", (costs, order, pin.tobytes()), simulated)
    return prediction_of(ids, lanes, kernel_us, order, found, one)


def prediction_of(
    ids: Ints, lanes: Ints, kernel_us: Floats, order: Ints, found: Evaluation, one_us: float | None = None
) -> Prediction:
    """An assignment that was simulated, as the run of a graph.

    Args:
        ids: Per node its stream id.
        lanes: The ids that kernels have, ascending.
        kernel_us: Per node the time of its kernel.
        order: The order of nodes that the problem was made with.
        found: The assignment, worked out.
        one_us: Simulated time on one stream; None: it is on one.
    """
    problem = found.problem
    on = order[problem.block[order] >= 0]
    node = on[np.argsort(problem.block[on], kind="stable")]
    start = np.searchsorted(problem.block[node], np.arange(len(problem) + 1)).astype(np.int32)
    return Prediction(
        ids=ids,
        lanes=lanes.astype(np.int32),
        problem=problem,
        plan=found.plan,
        simulation=found.simulation,
        one_us=found.simulation.makespan_us if one_us is None else one_us,
        kernel_us=kernel_us,
        start=start,
        node=node.astype(np.int32),
    )
