"""Options of stock TensorFlow: where it puts nodes, and how long a step of it may take."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import click

from msplit.cli import options
from msplit.cli.keys import Key

if TYPE_CHECKING:
    from msplit.engines.base import ClusterOptions, TensorFlowOptions


_SHARE = click.FloatRange(0, 1, min_open=True)
_PRIORITIES = options.Numbers(click.IntRange(-100, 100))


@dataclass(frozen=True)
class Stock:
    """How TensorFlow runs a model."""

    soft_placement: bool
    log_placement: bool
    timeout: float | None
    gpu_memory: float | None
    merge_streams: bool
    private_threads: int
    device_priorities: tuple[int, ...]
    device_memory: tuple[int, ...]
    place: str | None = field(default=None, kw_only=True)

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


STOCK = (
    Key(
        "soft-placement",
        "no: refuse devices that are not there or have no kernel, in place of moving nodes.",
        bool,
        True,
    ),
    Key("log-placement", "Show which device each node was put on.", bool, False),
    Key(
        "timeout",
        "Seconds that a step may take (none: any; 60 where it reads a queue).",
        click.FloatRange(0, min_open=True),
    ),
    Key(
        "gpu-memory",
        "Share of the GPU's free memory to take at once (none: what it needs; 0.45 for logical devices).",
        _SHARE,
    ),
    Key("merge-streams", "A row whose copies use the stream of the kernels.", bool, False),
    Key("private-threads", "A row with so many threads for each device alone.", click.IntRange(0), 0),
    Key(
        "device-priorities", "A row with priorities of logical devices, such as -1,0 (-1 comes first).", _PRIORITIES, ()
    ),
    Key(
        "device-memory",
        "A row with limits of memory of logical devices, in MiB.",
        options.Numbers(click.IntRange(1)),
        (),
    ),
)
place_option = click.option(
    "--place",
    metavar="MODULE:FUNCTION|FILE",
    help="tensorflow: put each node on the device that a function of yours, or what `assign --emit placement` wrote, gives it.",
)

PLACE = "FILE|TF_CONFIG"
WHAT = "Processes by job and address, in YAML or JSON as TensorFlow's ClusterSpec has them; TF_CONFIG: as that variable says."
"""Of --cluster, wherever it is an option."""

CLUSTER = (
    Key("cluster", f"FILE or TF_CONFIG: run over several processes (`msplit worker`). {WHAT}"),
    Key("ps-strategy", "Which task of job ps keeps which variable.", click.Choice(["bytes", "round-robin"]), "bytes"),
)
CONTAINER = Key(
    "container", "A name under which the cluster keeps variables, for later clients or others beside this one."
)


def over(cluster: str | None, ps_strategy: str, container: str | None = None) -> ClusterOptions | None:
    """What these options ask for; None for one process.

    Raises:
        MsplitError: It is no cluster.
    """
    if cluster is None:
        if container is not None:
            raise click.UsageError("--tensorflow container= is for variables in other processes: give cluster=, too.")
        return None
    from msplit.engines.base import ClusterOptions
    from msplit.formats.cluster import read

    return ClusterOptions(read(cluster), ps_strategy=ps_strategy, container=container)
