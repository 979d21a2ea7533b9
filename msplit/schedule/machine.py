"""What the simulator and the candidates know of a GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

from msplit.cost.costs import Costs
from msplit.cost.gpus import Gpu, data_sheet

REACHED_BANDWIDTH = 0.85
"""Share of the peak bandwidth that kernels reach."""


@dataclass(frozen=True)
class Machine:
    """Constants of a GPU that replays a CUDA graph.

    The defaults were fitted to one H200 (driver 580, CUDA 13); `msplit profile` measures them.

    Attributes:
        wait_us: From the end of a node to the start of one on another stream that waits for it, beyond what a successor on the same
            stream needs. (Fork, two side kernels, join: 1.1 µs more than a chain, for two crossings.)
        join_us: Every further wait of the same node. (A join of 16 costs about 4 µs more than one of 2.)
        node_us: Start latency of a kernel that its time does not include. 0: both the static times and the measured ones include it.
        issue_us: The device starts at most one kernel in this time, all streams together. (An unrolled LSTM of 16,000 kernels of
            1.06 µs takes 2430 µs on 10 streams.)
        bandwidth: Bytes per µs that kernels reach together.
    """

    wait_us: float = 0.55
    join_us: float = 0.25
    node_us: float = 0.0
    issue_us: float = 0.15
    bandwidth: float = 4.08e6

    @staticmethod
    def of_costs(costs: Costs) -> Machine:
        """The machine that costs were measured on, or that of their data sheet; what was not measured is the data sheet's."""
        sheet = Machine.of(data_sheet(costs.gpu))
        found = costs.constants
        if found is None:
            return sheet
        given = {
            "wait_us": found.wait_us,
            "join_us": found.join_us,
            "issue_us": found.issue_us,
            "bandwidth": found.copy_bytes_per_us,
        }
        return replace(sheet, **{name: value for name, value in given.items() if value is not None})

    @staticmethod
    def of(gpu: Gpu) -> Machine:
        """From a data sheet. Its `wait_us` was measured over a fork and its join: two crossings."""
        scale = gpu.wait_us / (2 * Machine.wait_us)
        return Machine(
            wait_us=gpu.wait_us / 2,
            join_us=Machine.join_us * scale,
            issue_us=Machine.issue_us * scale,
            bandwidth=REACHED_BANDWIDTH * gpu.bytes_per_us,
        )

    def fork_join_us(self, branches: int = 2) -> float:
        """What leaving a stream and coming back costs the longest of some branches at least."""
        return 2 * self.wait_us + self.join_us * max(branches - 2, 0)
