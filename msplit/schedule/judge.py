"""Judgement whether streams can help a model, which every command tells in the same words.

What given stream ids are worth: their plan and its simulated time, beside one stream.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from msplit.analysis.colocation import groups
from msplit.analysis.copies import copies, with_copies
from msplit.analysis.order import canonical
from msplit.core.dag import distinct
from msplit.core.graph import Floats, Ints
from msplit.core.memory import memoize
from msplit.cost.costs import Costs
from msplit.errors import MsplitError
from msplit.flatten.flat import FlatGraph
from msplit.schedule.algorithms import LIST, ONE
from msplit.schedule.bounds import Bounds
from msplit.schedule.choose import MUCH, STREAMS, WORTH, best, choose
from msplit.schedule.machine import Machine
from msplit.schedule.plan import Plan
from msplit.schedule.problem import Problem
from msplit.schedule.simulate import Evaluation, Simulation, evaluate

_ALL = 20_000
"""Blocks up to which all algorithms are tried to see what streams could gain, above it the one that is best most often."""


@dataclass(frozen=True)
class Judgement:
    """Judgement of streams for a model: their simulated gain.

    Attributes:
        kind: ``nothing`` (no node launches a kernel), ``never`` (no number of streams gains `WORTH`), ``little`` (these do not),
            ``helps``.
        gain: Simulated speed-up over one stream.
        streams: On how many.
        most: No number of streams gains more.
        guessed: Share of the kernels whose cost is a guess.
        words: All this, in one to three sentences.
    """

    kind: str
    gain: float
    streams: int
    most: float
    guessed: float
    words: str

    @property
    def helps(self) -> bool:
        """True if the streams are worth having."""
        return self.kind == "helps"


def judge(of: Bounds, gain: float, streams: int, *, guessed: float = 0.0, worth: float = WORTH) -> Judgement:
    """Judges what streams gain.

    Args:
        gain: Simulated speed-up of some assignment over one stream.
        streams: Streams that its kernels use.
        guessed: Share of the kernels whose cost is a guess, since their shapes are not known.
        worth: Least gain that is one.
    """
    most = max(of.max_gain, gain)
    if not of.limit:
        kind, words = "nothing", "Streams can not help this model: no node launches a kernel."
    elif most < worth:
        kind, words = "never", f"Streams can not help this model: {of.limit}."
    elif gain < worth:
        kind = "little"
        got = (
            "one stream is as fast as any other number"
            if streams < 2
            else f"{gain:.2f}x predicted on {streams} streams"
        )
        words = f"Streams gain next to nothing here: {got}, and at most {most:.2f}x whatever their number: {of.limit}."
    else:
        kind = "helps"
        words = f"Streams help this model: {gain:.2f}x predicted on {streams}, and at most {most:.2f}x whatever their number."
    if guessed > MUCH and kind != "nothing":
        words += f" That is a guess: the shapes of {100 * guessed:.0f} % of the kernels are not known."
    return Judgement(kind, gain, streams, most, guessed, words)


def foresee(flat: FlatGraph, costs: Costs) -> tuple[float, int]:
    """Predict what the rule `auto` should reach: simulated gain over one stream, and the streams that it takes.

    `auto` itself simulates longer, to refine what it finds here, so that it may gain a little more. Near-linear: all algorithms up to
    20,000 blocks, above it list scheduling.
    """
    problem = problem_of(flat, costs)
    if not len(problem):
        return 1.0, 1
    found = choose(problem, STREAMS, None if len(problem) <= _ALL else (LIST,), refining=0)
    winner = best(found)
    one = next(candidate for candidate in found if candidate.name == ONE)
    if not winner.makespan_us:
        return 1.0, 1
    return one.makespan_us / winner.makespan_us, max(winner.streams, 1)


def problem_of(flat: FlatGraph, costs: Costs) -> Problem:
    """The problem behind a model, where no rule says what else must share a stream."""
    order = canonical(flat, costs.time_us)
    same = copies(flat, costs.time_us)
    tie = with_copies(flat, groups(flat, handles=False, state=False), same).of
    return Problem.from_flat(flat, costs, tie=tie, same=same, order=order, machine=Machine.of_costs(costs))


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
        """Speedup over one stream; 1 where nothing runs."""
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
