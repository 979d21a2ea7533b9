"""Options of stock TensorFlow: where it puts nodes, and how long a step of it may take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from msplit.cli import options

if TYPE_CHECKING:
    from msplit.engines.base import TensorFlowOptions


@dataclass(frozen=True)
class Stock:
    """How TensorFlow runs a model."""

    place: str | None
    no_soft_placement: bool
    log_placement: bool
    timeout: float | None
    gpu_memory: float | None
    merge_streams: bool
    private_threads: int
    device_priorities: tuple[int, ...]
    device_memory: tuple[int, ...]

    def tensorflow(self) -> TensorFlowOptions:
        """The same for its sessions."""
        from msplit.engines.base import TensorFlowOptions

        return TensorFlowOptions(
            soft=not self.no_soft_placement,
            timeout=self.timeout,
            memory=self.gpu_memory,
            merge_streams=self.merge_streams,
            private_threads=self.private_threads,
            priorities=self.device_priorities,
            limits=self.device_memory,
        )


stock_options = options.together(
    click.option(
        "--place",
        metavar="MODULE:FUNCTION|FILE",
        help="tensorflow: put each node on the device that a function of yours, or what `assign --emit placement` wrote, gives it.",
    ),
    click.option(
        "--no-soft-placement",
        is_flag=True,
        help="tensorflow: refuse devices that are not there or have no kernel, in place of moving nodes.",
    ),
    click.option("--log-placement", is_flag=True, help="tensorflow: show which device each node was put on."),
    click.option(
        "--timeout",
        type=click.FloatRange(0, min_open=True),
        metavar="SECONDS",
        help="tensorflow: give a step up that takes longer (default: none; 60 where it reads a queue).",
    ),
    click.option(
        "--gpu-memory",
        type=click.FloatRange(0, 1, min_open=True),
        metavar="SHARE",
        help="tensorflow: share of the GPU's free memory that it takes at once (default: as it needs it; 0.45 for logical devices).",
    ),
    click.option("--merge-streams", is_flag=True, help="tensorflow: a row whose copies use the stream of the kernels."),
    click.option(
        "--private-threads",
        type=click.IntRange(0),
        default=0,
        metavar="N",
        help="tensorflow: a row with N threads for each device alone.",
    ),
    click.option(
        "--device-priorities",
        type=options.Numbers(click.IntRange(-100, 100)),
        default=(),
        help="tensorflow: a row with priorities of logical devices, such as -1,0 (-1 comes first).",
    ),
    click.option(
        "--device-memory",
        type=options.Numbers(click.IntRange(1)),
        default=(),
        metavar="MIB,MIB,…",
        help="tensorflow: a row with limits of memory of logical devices.",
    ),
)
