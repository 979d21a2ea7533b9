"""Costs of the steps of a program: from the costs of the flat graph's nodes, or measured one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from msplit.core.graph import Floats
from msplit.cost.costs import Constants, Costs
from msplit.cost.gpus import ACCESS, SM_BYTES_PER_CYCLE, Gpu, data_sheet
from msplit.engines.base import Arrays
from msplit.engines.cuda.device.device import precision
from msplit.engines.cuda.ir.graph import FUSED
from msplit.engines.cuda.ir.program import KernelCall, Program
from msplit.engines.cuda.profiling.kernel_profile import measure
from msplit.schedule.machine import Machine
from msplit.schedule.problem import Problem

LEAST_US = 1.0
"""No step that launches a kernel is estimated below this."""


@dataclass(frozen=True, eq=False)
class StepCosts:
    """Costs of a program's steps; 0 for those that launch nothing.

    Attributes:
        time_us: Time of each alone on the device.
        share: Share of the device that it fills.
        bytes: Memory traffic.
        constants: Of the device, where they were measured.
        one_us: A whole step on one stream, where that was measured.
    """

    time_us: Floats
    share: Floats
    bytes: Floats
    measured: int = 0
    constants: Constants | None = None
    one_us: float | None = None

    def problem(
        self,
        program: Program,
        lanes: NDArray[np.int32] | int = -1,
        *,
        tie: NDArray[np.int32] | int = -1,
        machine: Machine | None = None,
    ) -> Problem:
        """The steps as a scheduling problem.

        Args:
            program: Whose costs these are.
            lanes: Per step its stream; -1 where that is open.
            tie: Per step a group that must share a stream, or -1.
            machine: The GPU, by default the one that the defaults were fitted to.
        """
        launches = [step.launches for step in program.steps]
        return Problem.of(
            program.dag, self.time_us, self.share, self.bytes, launches=launches, pin=lanes, tie=tie, machine=machine
        )


def estimated(program: Program, costs: Costs | None) -> StepCosts:
    """From the costs of the nodes that each step does the work of; without any, every step costs the same.

    A step that does the work of several nodes fills as much of the device as the first of them that launches a kernel, which is the
    product or the convolution where there is one. It takes as long as all of them, of which those that ride on another take nothing: on an
    H200 the sum of all steps of 17 models and batches came to 0.93 of what they took in one graph (median; 0.66 to 1.11). Of a node that
    several steps work on, each does an equal part; of a loop, a cond or a call, which many steps may be, one part per kernel that the
    graph as it is would launch for it (`Op.replaces`).

    Members of a merged step run side by side: as long as one of them, or as the device takes for all where they fill it. Where grouping
    has made one product of several that were added up, the launches of the others and of their sum are saved.

    What is one kernel by construction, a fused group, attention or the lookups of several columns, is launched once, does the
    operations of all, and moves no more than its inputs and outputs: the longest of the three, times what its nodes take over the longest
    of theirs. Inputs of columns that have to be laid out anew first are a launch each.
    """
    launches = np.asarray([step.launches for step in program.steps], dtype=bool)
    times, shares, moved = launches * LEAST_US, np.full(len(launches), 0.1), np.zeros(len(launches))
    if costs is not None:
        costs = _gathered(replace(costs, time_us=costs.own_us), program.unrolled)
        launching = [step.op for step in program.steps if step.launches]
        covering = [node for op in launching for node in op.replaces or op.source_nodes]
        parts = np.bincount(np.asarray(covering, np.int64), minlength=len(costs.time_us))
        sheet = data_sheet(costs.gpu)
        for number, step in enumerate(program.steps):
            if step.launches:
                source_nodes = np.asarray(step.op.source_nodes)
                each = costs.time_us[source_nodes] / parts[source_nodes]
                main = int(np.argmax(each > 0))
                share, members = float(costs.share[source_nodes[main]]), step.op.batch
                total = float(each.sum())
                if step.op.op in (
                    FUSED,
                    "_Attention",
                    "_Columns",
                ):  # a kernel that was made for all nodes that it covers
                    times[number], shares[number], moved[number] = _one_kernel(step, costs, parts, sheet)
                    continue
                shares[number] = min(1.0, share * members)
                carried = costs.bytes[source_nodes] / parts[source_nodes]
                moved[number] = float(carried.max())
                if members > 1:
                    # Each member is launched once: products that are added up inside are one product.
                    total -= max(int(np.count_nonzero(each)) - members, 0) * sheet.launch_us
                    moved[number] = _once(step, float(carried.sum()))
                    total = max(total * max(1 / members, share), moved[number] / sheet.bytes_per_us)
                times[number] = max(LEAST_US, total)
    return StepCosts(times, shares, moved)


def _gathered(costs: Costs, unrolled: Mapping[int, Sequence[int]]) -> Costs:
    """Costs with those of a TensorFlow 1 loop's nodes on the one that covers what the loop became: steps name no other."""
    frames = {node: [*{node, *inside}] for node, inside in unrolled.items() if inside}
    if not frames:
        return costs
    time, share, flops, nbytes = (column.copy() for column in (costs.time_us, costs.share, costs.flops, costs.bytes))
    for node, nodes in frames.items():
        if time[nodes].any():
            share[node] = np.average(share[nodes], weights=time[nodes])
        for column in (time, flops, nbytes):
            column[node] = column[nodes].sum()
    return replace(costs, time_us=time, share=share, flops=flops, bytes=nbytes)


def _one_kernel(step: KernelCall, costs: Costs, parts: NDArray[np.int64], sheet: Gpu) -> tuple[float, float, float]:
    """Time, share and bytes of a kernel that does the work of several nodes."""
    source_nodes = np.asarray(step.op.replaces or step.op.source_nodes)
    part = 1 / parts[source_nodes]
    time, flops, nbytes = (column[source_nodes] * part for column in (costs.time_us, costs.flops, costs.bytes))
    runs = time > 0
    if not runs.any():
        return LEAST_US, 0.1, float(step.traffic)
    own = np.where(runs, costs.share[source_nodes], 0.0)
    # Columns lie side by side in the grid, and so do members; ops of one chain work on the same elements.
    share = float(own.sum()) if step.op.op == "_Columns" else float(own.max()) * step.op.batch
    share = min(share, 1.0)
    once = _once(step, float(nbytes.sum()))
    alone = float(_roofline(flops[runs], nbytes[runs], own[runs], sheet).sum())
    all_flops, all_bytes, all_share = np.asarray([[float(flops[runs].sum())], [once], [share]])
    together = float(_roofline(all_flops, all_bytes, all_share, sheet).sum())
    # The kernel of columns finds values by their distance from a start, so that each input that lies otherwise is copied first.
    copies = step.scattered if step.op.op == "_Columns" else 0
    copy_us = sheet.launch_us + ACCESS / sheet.clock_mhz  # of a small tensor: launched, loaded and stored
    return max(LEAST_US, together * float(time.sum()) / alone) + copies * copy_us, share, once


def _roofline(flops: Floats, nbytes: Floats, share: Floats, sheet: Gpu) -> Floats:
    """Least time of kernels without tensor cores: launched, computed, moved. See `cost.estimate`."""
    drawn = np.minimum(sheet.bytes_per_us, share * sheet.sms * SM_BYTES_PER_CYCLE * sheet.clock_mhz)
    found = np.maximum(flops / (sheet.flops_per_us("float32") * share), nbytes / drawn)
    return np.asarray(np.maximum(found, sheet.launch_us), np.float64)


def _once(step: KernelCall, nbytes: float) -> float:
    """Bytes that a step moves where values that stay inside are not moved at all, and a gather reads its rows only."""
    return min(nbytes, float(step.traffic)) if step.traffic else nbytes


def measured(
    program: Program, feeds: Arrays, costs: Costs | None, device_name: str, *, ieee: bool, seconds: float
) -> StepCosts:
    """Times every kind of step alone on the device; what the seconds do not suffice for stays estimated.

    Args:
        costs: For what is not measured.
        device_name: Where it was traced. On a CPU nothing is measured.
        seconds: How long it may take.
    """
    found = estimated(program, costs)
    device = torch.device(device_name)
    if device.type != "cuda" or program.dynamic:
        return found
    with precision(ieee):
        timed = measure(program, feeds, device, seconds=seconds, grids=False)
    times, shares, moved = found.time_us.copy(), found.share.copy(), found.bytes.copy()
    for number, kind in enumerate(timed.kernel):
        if kind >= 0:
            kernel = timed.kernels[kind]
            times[number] = kernel.time_us
            shares[number] = shares[number] if kernel.share is None else kernel.share
            moved[number] = min(kernel.bytes, moved[number]) if moved[number] > 0 else kernel.bytes
    known = sum(kind >= 0 for kind in timed.kernel)
    return replace(found, time_us=times, share=shares, bytes=moved, measured=known, constants=timed.constants)
