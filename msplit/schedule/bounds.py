"""Lower bounds: what no schedule of these kernels on this GPU can beat, and what streams can gain at most."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from msplit.analysis.branches import critical_path
from msplit.core.dag import Dag, distinct
from msplit.core.graph import CONTROL, Floats, Ints
from msplit.core.memory import memoize
from msplit.cost.costs import Costs
from msplit.cost.estimate import peaks
from msplit.cost.gpus import data_sheet
from msplit.flatten.flat import FlatGraph
from msplit.opset.traits import ops_with
from msplit.schedule.machine import Machine
from msplit.schedule.plan import topological, upward_rank
from msplit.schedule.problem import Problem


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
    results = np.unique(np.array([tensor.node for tensor in flat.outputs], dtype=np.int64))
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
