"""What the steps of a program cost: from the costs of the flat graph's nodes, or measured one by one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from msplit.cost.costs import Costs, Floats

if TYPE_CHECKING:
    from msplit.cost.profile import Constants
    from msplit.engines.cuda.engine import Prepared
    from msplit.engines.cuda.program import Program

LEAST_US = 1.0
"""No step that launches a kernel is estimated below this."""


@dataclass(frozen=True, eq=False)
class StepCosts:
    """Costs of a program's steps; 0 for those that launch nothing.

    Attributes:
        time_us: Time of each alone on the device.
        share: Share of the device that it fills.
        bytes: Memory traffic.
        measured: How many were measured.
        constants: Of the device, where they were measured.
    """

    time_us: Floats
    share: Floats
    bytes: Floats
    measured: int = 0
    constants: Constants | None = None


def estimated(program: Program, costs: Costs | None) -> StepCosts:
    """From the costs of the nodes that each step does the work of; without any, every step costs the same.

    A step that does the work of several nodes fills as much of the device as the first of them that launches a kernel, which is the
    product or the convolution where there is one. It takes as long as all of them: it is launched once only, but on an H200 the sum of
    all steps of 15 models came to 0.75 of what they took (median), and without the others' launches to 0.57. Of a node that several
    steps work on, each does an equal part. Members of a merged step run side by side: as long as one of them, or as the device takes
    for all where they fill it.
    """
    launches = np.asarray([step.launches for step in program.steps], dtype=bool)
    times, shares, moved = launches * LEAST_US, np.full(len(launches), 0.1), np.zeros(len(launches))
    if costs is not None:
        covering = [node for step in program.steps if step.launches for node in step.op.covers]
        parts = np.bincount(np.asarray(covering, np.int64), minlength=len(costs.time_us))
        for number, step in enumerate(program.steps):
            if step.launches:
                covers = np.asarray(step.op.covers)
                each = costs.time_us[covers] / parts[covers]
                main = int(np.argmax(each > 0))
                share, members = float(costs.share[covers[main]]), step.op.members
                times[number] = max(LEAST_US, float(each.sum()) * max(1 / members, share if members > 1 else 1.0))
                shares[number] = min(1.0, share * members)
                moved[number] = float(costs.bytes[covers].max())
    return StepCosts(times, shares, moved)


def measured(prepared: Prepared, costs: Costs | None, device_name: str, *, ieee: bool, seconds: float) -> StepCosts:
    """Times every kind of step alone on the device; what the seconds do not suffice for stays estimated.

    Args:
        prepared: The program.
        costs: For what is not measured.
        device_name: Where it was traced. On a CPU nothing is measured.
        ieee: In which precision.
        seconds: How long it may take.
    """
    import torch

    from msplit.engines.cuda.executable import precision
    from msplit.engines.cuda.profile import measure

    program = prepared.program
    found = estimated(program, costs)
    device = torch.device(device_name)
    if device.type != "cuda" or program.dynamic:
        return found
    with precision(ieee):
        timed = measure(program, prepared.lowered.feeds, device, seconds=seconds, grids=False)
    times, shares, moved = found.time_us.copy(), found.share.copy(), found.bytes.copy()
    for number, kind in enumerate(timed.kernel):
        if kind >= 0:
            kernel = timed.kernels[kind]
            times[number] = kernel.time_us
            shares[number] = shares[number] if kernel.share is None else kernel.share
            moved[number] = min(kernel.bytes, moved[number]) if moved[number] > 0 else kernel.bytes
    known = sum(kind >= 0 for kind in timed.kernel)
    return replace(found, time_us=times, share=shares, bytes=moved, measured=known, constants=timed.constants)
