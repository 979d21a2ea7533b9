"""Options of what answers requests: what runs a model, and how its pool shares the device."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from msplit.cli import options

if TYPE_CHECKING:
    from msplit.run.request import RunRequest
    from msplit.serving.pool.settings import PoolSettings


@dataclass(frozen=True)
class Engine(options.Execution):
    """What runs a model, and how."""

    streams: int
    ruleset: str | None
    engine: str | None
    device: str
    effort: str
    no_capture: bool
    no_fuse: bool
    no_group: bool
    reference: Path | None
    shapes: Sequence[tuple[str, tuple[int, ...]]]
    devices: tuple[int, ...] = ()

    def keywords(self) -> dict[str, Any]:
        """The same for the functions of the library; shapes left out, which not all of them take."""
        return {
            "streams": (self.streams,),
            "ruleset": self.ruleset,
            "engine": self.engine or ("cuda" if self.device == "cpu" else None),
            "device": self.device,
            "devices": self.devices,
            "effort": self.effort,
            "capture": not self.no_capture,
            "fuse": not self.no_fuse,
            "group": not self.no_group,
            "reference": self.reference,
            **self.arguments(),
        }

    def request(self) -> RunRequest:
        """The same for what prepares it."""
        from msplit.run.request import RunRequest

        return RunRequest(**self.keywords(), shapes=dict(self.shapes), command=("msplit", *sys.argv[1:]))


engine_options = options.together(
    click.option(
        "--streams", type=options.STREAMS, default=8, show_default=True, help="The largest number of streams."
    ),
    options.rules_option,
    options.engine_option,
    options.device_option,
    options.run_options,
    options.kernel_options,
    options.reference_option,
    options.shape_option,
    engine=Engine,
)
"""What runs a model, and how."""


class Groups(options.Parameter):
    """A number of arenas, or ``auto``."""

    name = "n|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Of NVIDIA's variable, which may have a number for each GPU, the first."""
        if value == "auto":
            return value
        number = str(value).partition(",")[0].strip()
        if not (number.isascii() and number.isdigit() and int(number)):
            self.fail(f"{value!r} is neither a number of one or more nor auto", param, ctx)
        return int(number)


@dataclass(frozen=True)
class Pooling:
    """How a pool answers requests."""

    groups: int | str
    max_batch: int | None
    batches: tuple[int, ...] | None
    max_delay_us: float
    priorities: int
    max_queue: int
    max_memory: float | None
    host_threads: int | None

    def settings(self) -> PoolSettings:
        """The same for `msplit.pool`."""
        from msplit.serving.pool.settings import PoolSettings

        memory = None if self.max_memory is None else int(self.max_memory * (1 << 30))
        return PoolSettings(**{**dataclasses.asdict(self), "max_memory": memory})


pool_options = options.together(
    click.option(
        "--groups",
        type=Groups(),
        default="4",
        show_default=True,
        envvar="TF_GPU_STREAM_GROUP_COUNT",
        help="Steps in flight at once (or TF_GPU_STREAM_GROUP_COUNT); auto: as many as measure best.",
    ),
    click.option("--max-batch", type=click.IntRange(1), help="Most rows of a step that requests share (default: 64)."),
    click.option(
        "--batch",
        "batches",
        type=options.Numbers(click.IntRange(1)),
        help="Rows of the steps to have ready, such as 1,8,32 (default: 1, 4, 16 … up to --max-batch).",
    ),
    click.option(
        "--max-delay-us",
        default=0.0,
        show_default=True,
        type=click.FloatRange(0),
        help="How long a step that is not full waits for more rows.",
    ),
    click.option("--priorities", default=1, show_default=True, type=click.IntRange(1), help="Levels of priority."),
    click.option(
        "--max-queue",
        default=0,
        show_default=True,
        type=click.IntRange(0),
        help="Most requests that wait; 0: any number.",
    ),
    click.option(
        "--max-memory", type=click.FloatRange(0, min_open=True), metavar="GIB", help="Most memory of the device."
    ),
    click.option("--host-threads", type=click.IntRange(1), help="Threads for what runs on the host."),
    pooling=Pooling,
)
"""How a pool answers requests."""
