"""Judgements on streams: whether they can help, what given ones are worth, and what no schedule can beat.

Judgement whether streams can help a model, which every command tells in the same words.

What given stream ids are worth: their plan and its simulated time, beside one stream.

Lower bounds: what no schedule of these kernels on this GPU can beat, and what streams can gain at most.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from msplit.analysis.branches import critical_path
from msplit.analysis.colocation import groups
from msplit.analysis.isomorphic import copies, with_copies
from msplit.analysis.order import canonical
from msplit.core.dag import Dag, distinct
from msplit.core.graph import CONTROL, Floats, Ints, memoize
from msplit.cost.costs import Costs
from msplit.cost.estimate import peaks
from msplit.cost.gpus import data_sheet
from msplit.errors import MsplitError
from msplit.flatten.flat import FlatGraph
from msplit.opset.traits import ops_with
from msplit.schedule.algorithms import LIST, ONE
from msplit.schedule.choose import MUCH, STREAMS, WORTH, best, choose
from msplit.schedule.machine import Machine
from msplit.schedule.plan import Plan, topological, upward_rank
from msplit.schedule.problem import Problem
from msplit.schedule.simulate import Evaluation, Simulation, evaluate


@dataclass(frozen=True, eq=False)
class Bounds:
    """Times in µs.

    Attributes:
        critical_path_us: The heaviest path: kernels that depend on each other can not overlap, and none gets faster by company.
        bandwidth_us: All bytes at the peak memory bandwidth.
        flops_us: All operations, each at the peak of its type.
        sm_time_us: Time times share, summed: how long the kernels would keep the whole device busy. It is what predicts
            the gain of streams.
        whole_us: The heaviest path on which each loop of TensorFlow 1 is one piece, or the largest region, if that is more: rules and
            engines keep these whole, on one stream.
        lower_bound_us: The largest of the five.
        serial_us: All kernels one after the other.
        fused_us: What larger kernels could reach: every weight and input read once, every result written once, or all operations at
            their peak, whichever takes longer.
        unique_us: Every weight and input read once, every result written once, at the peak memory bandwidth.
        max_gain: No number of streams gains more: what one stream takes in the simulator over what no schedule there is shorter than.
            No prediction is above it. 1 where there is nothing to run.
        limit: What it is limited by, as the end of a sentence; "" where nothing runs.
        path: Nodes of the critical path, first to last.
    """

    critical_path_us: float
    bandwidth_us: float
    flops_us: float
    sm_time_us: float
    whole_us: float
    lower_bound_us: float
    serial_us: float
    fused_us: float
    unique_us: float
    max_gain: float
    limit: str
    path: Ints

    def gain_at_most(self, streams: int) -> float:
        """Upper bound of the gain of a number of streams over one: `max_gain`, and no more than their number. Waits cost nothing here.

        Raises:
            ValueError: `streams` is below 1.
        """
        if streams < 1:
            raise ValueError("at least one stream is needed")
        return max(1.0, min(self.max_gain, float(streams)))


def bounds(flat: FlatGraph, costs: Costs) -> Bounds:
    """Lower bounds of a graph's kernels. Where shapes are unknown costs are guesses, and so are the bounds."""
    return memoize(flat, "bounds", (costs,), lambda: _bounds(flat, costs))


def _bounds(flat: FlatGraph, costs: Costs) -> Bounds:
    sheet = data_sheet(costs.gpu)
    span, path = critical_path(flat.graph, costs.time_us)
    bandwidth = float(costs.bytes.sum()) / sheet.bytes_per_us
    flops = float((costs.flops / peaks(flat.graph, sheet)).sum())
    area = float((costs.time_us * costs.share).sum())
    serial = float(costs.time_us.sum())
    problem = Problem.from_flat(flat, costs, machine=Machine.of_costs(costs))
    alone = replace(problem, machine=replace(problem.machine, company=1.0, node_us=0.0))
    whole = max(float(alone.rank.max(initial=0.0)), alone.tied_us())
    work, least = float(problem.work_us.sum()), problem.bound_us()
    unique = float(unique_bytes(flat, costs)) / sheet.bytes_per_us
    fused = max(unique, flops)
    return Bounds(
        critical_path_us=span,
        bandwidth_us=bandwidth,
        flops_us=flops,
        sm_time_us=area,
        whole_us=whole,
        lower_bound_us=max(span, bandwidth, flops, area, whole),
        serial_us=serial,
        fused_us=fused,
        unique_us=unique,
        max_gain=work / least if least > 0 else 1.0,
        limit=_limit(problem, span, whole),
        path=path,
    )


def _limit(problem: Problem, span_us: float, whole_us: float) -> str:
    """The bound that keeps schedules from being shorter, in words: what takes longest of all that bounds it."""
    work = float(problem.work_us.sum())
    if work <= 0:
        return ""
    sms, bandwidth, starts = ((problem.demand * problem.work_us[:, None]).sum(axis=0) / work).tolist()
    if max(sms, bandwidth, starts) * work < problem.bound_us():
        share = f"{100 * problem.bound_us() / work:.0f} % of the work"
        if whole_us > span_us * _WHOLE:
            return f"{share} is in loops and regions that stay whole, or behind them"
        return f"{share} is on one path, where each kernel waits for the one before"
    if sms >= max(bandwidth, starts):
        return f"the kernels fill {100 * sms:.0f} % of the GPU already"
    if bandwidth >= starts:
        return f"the kernels use {100 * bandwidth:.0f} % of the memory bandwidth already"
    return f"starting the kernels takes {100 * starts:.0f} % of the time already, whatever stream they are on"


_WHOLE = 1.001
"""Tolerance: work that must stay whole is named where it takes longer than the longest path by more than rounding."""


@dataclass(frozen=True)
class StepBounds:
    """Lower bounds of the steps that an engine really runs. Times in µs.

    Unlike `Bounds`, which counts the traffic of every node, bandwidth here is that of what must cross the memory bus at least once
    (weights, inputs, outputs): what steps hand to each other may stay in the L2 cache, and measured times know that.

    Attributes:
        critical_path_us: The heaviest path of steps.
        bandwidth_us: Weights, inputs and outputs once, at the peak memory bandwidth.
        flops_us: All operations, each at the peak of its type.
        sm_time_us: Time times share, summed.
        lower_us: The largest of the four: no plan of these steps is faster.
        serial_us: All steps one after the other.
        fused_us: What larger kernels could reach: `bandwidth_us` or `flops_us`.
        limit: Which of the four is the largest, in words.
        steps: How many launch kernels.
        measured: How many of them have a measured time; the others have the static one.
    """

    critical_path_us: float
    bandwidth_us: float
    flops_us: float
    sm_time_us: float
    lower_us: float
    serial_us: float
    fused_us: float
    limit: str
    steps: int
    measured: int

    @property
    def max_gain(self) -> float:
        """No number of streams gains more over one; 1 where nothing runs."""
        return self.serial_us / self.lower_us if self.lower_us > 0 else 1.0


def step_bounds(dag: Dag, time_us: Floats, share: Floats, of: Bounds, *, measured: int = 0) -> StepBounds:
    """Lower bounds of an engine's steps.

    Args:
        dag: Dependencies between steps.
        time_us: Time of each alone; 0 for those that launch nothing.
        share: Share of the device that each fills.
        of: Static bounds of the model, for its operations and its weights, inputs and outputs.
        measured: How many of the times were measured.
    """
    rank = upward_rank(dag, time_us, topological(dag)) if len(dag) else np.zeros(1)
    limits = {
        "critical path": float(rank.max()),
        "memory bandwidth": of.unique_us,
        "arithmetic": of.flops_us,
        "SM time": float((time_us * share).sum()),
    }
    limit = max(limits, key=limits.__getitem__)
    return StepBounds(
        critical_path_us=limits["critical path"],
        bandwidth_us=limits["memory bandwidth"],
        flops_us=limits["arithmetic"],
        sm_time_us=limits["SM time"],
        lower_us=limits[limit],
        serial_us=float(time_us.sum()),
        fused_us=of.fused_us,
        limit=limit,
        steps=int(np.count_nonzero(time_us)),
        measured=measured,
    )


def unique_bytes(flat: FlatGraph, costs: Costs) -> float:
    """Bytes that have to cross the memory bus if everything between inputs and outputs stays on the chip.

    Each tensor that no kernel makes (a weight, an input) counts once, and not more than its readers read of it, so that a gather counts
    its rows and not its table; each output counts once.
    """
    graph = flat.graph
    runs = costs.time_us > 0
    if costs.inside is not None:
        runs |= costs.inside
    edges = graph.edges
    data = edges.port != CONTROL
    origin = _origins(flat, runs)
    source = origin[edges.src[data]]
    reader = edges.dst[data]
    taken = runs[reader] & (source >= 0)
    # Each (source, reader) pair once.
    key = distinct(source[taken].astype(np.int64) * len(graph) + reader[taken])
    source, reader = key // max(len(graph), 1), key % max(len(graph), 1)
    read = np.bincount(source, weights=costs.bytes[reader], minlength=len(graph))
    # Rows that gathers read through a handle: as many bytes as they write.
    behind = ops_with("reads rows behind a handle")
    gathers = [node for node, op in enumerate(graph.ops) if op in behind]
    rows = float((costs.out_bytes[gathers] * (costs.time_us[gathers] > 0)).sum())
    results = distinct(np.array([tensor.node for tensor in flat.outputs], dtype=np.int64))
    written = float(costs.out_bytes[results].sum()) if len(results) else 0.0
    return float(np.minimum(read, costs.out_bytes).sum()) + rows + written


def _origins(flat: FlatGraph, runs: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Ints:
    """Per node that runs no kernel, the node whose data it hands on; -1 for nodes that run one."""
    graph = flat.graph
    passing = ops_with("hands on data")
    first = np.full(len(graph), -1, dtype=np.int32)
    edges = graph.edges
    lead = edges.slot == 0
    first[edges.dst[lead]] = edges.src[lead]
    ops, running, before = graph.ops, runs.tolist(), first.tolist()
    origin = list(range(len(graph)))
    for node in graph.topological.tolist():
        if running[node]:
            origin[node] = -1
        elif ops[node] in passing and before[node] >= 0:
            origin[node] = origin[before[node]]
    return np.array(origin, dtype=np.int32)


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
