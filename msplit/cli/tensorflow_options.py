"""Options of stock TensorFlow: where it puts nodes, and how long a step of it may take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from msplit.cli import options
from msplit.cli.keys import key

if TYPE_CHECKING:
    from msplit.engines.base import ClusterOptions, TensorFlowOptions


@dataclass(frozen=True)
class Stock:
    """How TensorFlow runs a model."""

    soft_placement: bool = key(
        "--tensorflow",
        "soft-placement",
        "no: refuse devices that are not there or have no kernel, in place of moving nodes.",
        bool,
        True,
    )
    log_placement: bool = key("--tensorflow", "log-placement", "Show which device each node was put on.", bool, False)
    timeout: float | None = key(
        "--tensorflow",
        "timeout",
        "Seconds that a step may take (none: any; 60 where it reads a queue).",
        click.FloatRange(0, min_open=True),
    )
    gpu_memory: float | None = key(
        "--tensorflow",
        "gpu-memory",
        "Share of the GPU's free memory to take at once (none: what it needs; 0.45 for logical devices).",
        click.FloatRange(0, 1, min_open=True),
    )
    merge_streams: bool = key(
        "--tensorflow", "merge-streams", "A row whose copies use the stream of the kernels.", bool, False
    )
    private_threads: int = key(
        "--tensorflow",
        "private-threads",
        "A row with so many threads for each device alone.",
        click.IntRange(0),
        0,
    )
    device_priorities: tuple[int, ...] = key(
        "--tensorflow",
        "device-priorities",
        "A row with priorities of logical devices, such as -1,0 (-1 comes first).",
        options.Numbers(click.IntRange(-100, 100)),
        (),
    )
    device_memory: tuple[int, ...] = key(
        "--tensorflow",
        "device-memory",
        "A row with limits of memory of logical devices, in MiB.",
        options.Numbers(click.IntRange(1)),
        (),
    )

    def tensorflow(self) -> TensorFlowOptions:
        """The same for its sessions."""
        from msplit.engines.base import TensorFlowOptions

        return TensorFlowOptions(
            soft=self.soft_placement,
            timeout=self.timeout,
            memory=self.gpu_memory,
            merge_streams=self.merge_streams,
            private_threads=self.private_threads,
            priorities=self.device_priorities,
            limits=self.device_memory,
        )


PLACE = "FILE|TF_CONFIG"
WHAT = "Processes by job and address, in YAML or JSON as TensorFlow's ClusterSpec has them; TF_CONFIG: as that variable says."
"""Of --cluster, wherever it is an option."""


@dataclass(frozen=True, kw_only=True)
class Processes:
    """Over which processes TensorFlow runs a model."""

    cluster: str | None = key(
        "--tensorflow", "cluster", f"FILE or TF_CONFIG: run over several processes (`msplit worker`). {WHAT}"
    )
    ps_strategy: str = key(
        "--tensorflow",
        "ps-strategy",
        "Which task of job ps keeps which variable.",
        click.Choice(["bytes", "round-robin"]),
        "bytes",
    )
    container: str | None = None

    def over(self) -> ClusterOptions | None:
        """The same for its sessions; None for one process.

        Raises:
            MsplitError: It is no cluster.
        """
        if self.cluster is None:
            if self.container is not None:
                raise click.UsageError(
                    "--tensorflow container= is for variables in other processes: give cluster=, too."
                )
            return None
        from msplit.engines.base import ClusterOptions
        from msplit.formats.cluster import read

        return ClusterOptions(read(self.cluster), ps_strategy=self.ps_strategy, container=self.container)
