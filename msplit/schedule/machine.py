"""The GPU as the simulator and the algorithms see it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from msplit.cost.costs import DEEP, Constants, Costs
from msplit.cost.gpus import Gpu, data_sheet

REACHED_BANDWIDTH = 0.85
"""Share of the peak bandwidth that kernels reach."""

REACHED_L2 = 0.45
"""Share of 64 bytes per SM and clock that kernels which run side by side reach in the L2 cache."""

REUSE = 2.0
"""A graph whose kernels move up to so many times the L2 cache's size keeps in it what it moves: a value is written once and read once
or more, so its traffic is at least twice its size."""


@dataclass(frozen=True)
class Machine:
    """Constants of a GPU that replays a CUDA graph.

    The defaults were fitted to one H200 (driver 580, CUDA 13); `msplit profile` measures all of them but `node_us` and
    `contention`.

    Attributes:
        wait_us: From the end of a node to the start of one on another stream that waits for it, beyond what a successor on the same
            stream needs. (Fork, two side kernels, join: 1.1 µs more than a chain, for two crossings.)
        join_us: Every further wait of the same node. (A join of 16 costs about 2 µs more than one of 2.)
        node_us: Start latency of a kernel that its time does not include. 0: both the static times and the measured ones include it.
        issue_us: The device starts at most one kernel in this time, all streams together, while up to `issue_lanes` kernels run. (An
            unrolled LSTM of 16,000 kernels of 1.06 µs takes 2430 µs on 10 streams.)
        issue_lanes: With more kernels running at once it starts them more slowly, in proportion to their number. (16 chains of 10 tiny
            kernels take 41 µs.)
        crowd_us: Each other kernel that runs makes every kernel take this much longer to start. (That LSTM takes 1.06 µs per kernel and
            stream on one stream, 1.16 on 2, 1.27 on 5 and 1.52 on 10.)
        contention: What runs at once slows each other down even where there are SMs for all: a kernel takes so much longer per share of
            the SMs that the others keep busy. (Fitted to 244 assignments of nine models: see `benchmarks/notes/schedulers.md`.)
        company: How many times longer kernels take in the model than alone, one after the other: alone they find what they read, and
            their own code, in the caches.
        step_us: What a step takes whatever it runs: a graph begins, with the kernel that the executor puts before its first ones, and
            ends with the one that delivers its outputs.
        bandwidth: Bytes per µs that kernels reach together.
    """

    wait_us: float = 0.55
    join_us: float = 0.15
    node_us: float = 0.0
    issue_us: float = 0.15
    issue_lanes: float = 10.0
    crowd_us: float = 0.04
    contention: float = 0.84
    company: float = 1.0
    step_us: float = 5.8
    bandwidth: float = 4.08e6

    @staticmethod
    def of(gpu: Gpu, moved: float | None = None) -> Machine:
        """From a data sheet, whose `wait_us` was measured over a fork and its join: two crossings.

        `moved` is how many bytes all kernels move in a step: where that is little, they move it in the L2 cache.
        """
        scale = gpu.wait_us / (2 * Machine.wait_us)
        inside = moved is not None and moved <= REUSE * gpu.l2_mb * 1e6
        return Machine(
            wait_us=gpu.wait_us / 2,
            join_us=Machine.join_us * scale,
            issue_us=Machine.issue_us * scale,
            crowd_us=Machine.crowd_us * scale,
            step_us=Machine.step_us * scale,
            bandwidth=REACHED_L2 * gpu.l2_bytes_per_us if inside else REACHED_BANDWIDTH * gpu.bytes_per_us,
        )

    @staticmethod
    def of_costs(costs: Costs) -> Machine:
        """The machine that costs were measured on, or that of their data sheet; what was not measured is the data sheet's."""
        moved = float(costs.bytes.sum())
        sheet = data_sheet(costs.gpu)
        machine = Machine.of(sheet, moved)
        if costs.constants is None:
            return machine
        machine = _measured(machine, sheet, moved, costs.constants)
        return machine if costs.one_us is None else machine.in_company(costs.one_us, float(costs.time_us.sum()))

    def in_company(self, one_us: float, alone_us: float) -> Machine:
        """The machine for a model whose step took `one_us` on one stream, and whose kernels take `alone_us` alone, all together."""
        return self if alone_us <= 0 else replace(self, company=max((one_us - self.step_us) / alone_us, 1.0))

    def slowdown(self, running: int, sms: float, bandwidth: float, issue: float) -> float:
        """Slowdown factor of blocks that run side by side, by what is short and by contention.

        For candidates that are built step by step: the simulator also counts how kernels delay each other's starts. `sms`, `bandwidth` and
        `issue` are the sums of their shares of the SMs, the memory bandwidth and the rate at which kernels start.
        """
        others = 1 - 1 / max(running, 1)
        return max(1.0, sms, bandwidth, issue, 1 + self.contention * sms * others)

    def fork_join_us(self, branches: int = 2) -> float:
        """Least cost of a fork and join for the longest of some branches."""
        return 2 * self.wait_us + self.join_us * max(branches - 2, 0)


def _measured(machine: Machine, sheet: Gpu, moved: float, found: Constants) -> Machine:
    """A machine with the constants that were measured in place of the data sheet's."""
    inside = moved <= REUSE * sheet.l2_mb * 1e6
    given = {
        "wait_us": found.wait_us,
        "step_us": None if found.launch_us is None or found.node_us is None else found.launch_us + 2 * found.node_us,
        "bandwidth": found.l2_bytes_per_us if inside else found.copy_bytes_per_us,
        **_starts(found),
    }
    # Noise may bring a difference of two measurements below nothing, and a file may hold anything.
    machine = replace(machine, **{name: max(value, 0.0) for name, value in given.items() if value is not None})
    if machine.bandwidth <= 0:
        machine = replace(machine, bandwidth=REACHED_BANDWIDTH * sheet.bytes_per_us)
    wide = max(found.fork_join_us, default=0)
    if wide > 2:
        # What a wide fork-join takes beyond a narrow one is in part that of its kernels' starts, which the simulator counts by itself.
        starts = max(machine.issue_us * wide * max(1.0, wide / machine.issue_lanes) - (found.node_us or 0.0), 0.0)
        rest = found.fork_join_us[wide] - 2 * machine.wait_us - starts
        machine = replace(machine, join_us=max(rest / (wide - 2), 0.0))
    return machine


def _starts(found: Constants) -> dict[str, float]:
    """Slowdown of kernel starts, from the chains of tiny kernels side by side."""
    each = {width: total / DEEP for width, total in found.deep_us.items()}  # µs per kernel of one chain
    alone = each.get(1)
    if alone is None or max(each) < 4 or min(each) < 1 or min(each.values()) <= 0:
        return {}
    few = [max(time - alone, 0.0) / (width - 1) for width, time in each.items() if 2 <= width <= 8]
    rates = {width: time / width for width, time in each.items()}
    issue, widest = min(rates.values()), max(each)
    return {
        "crowd_us": float(np.median(few)) if few else 0.0,
        "issue_us": issue,
        "issue_lanes": max(widest * issue / rates[widest], 1.0),
    }
