"""Options of what answers requests: what runs a model, and how its pool shares the device."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from msplit.cli import options
from msplit.cli.keys import Parameter, key, option

if TYPE_CHECKING:
    from msplit.run.request import RunRequest
    from msplit.serving.pool.settings import PoolSettings


@dataclass(frozen=True, kw_only=True)
class Engine(options.InputShapes, options.Backend, options.OnDevice, options.Kernels):
    """What runs a model, and how."""

    streams: int = option(
        "--streams", type=options.STREAMS, default=8, show_default=True, help="The largest number of streams."
    )
    devices: tuple[int, ...] = ()

    def arguments(self) -> dict[str, Any]:
        """For the functions of the library; shapes left out, which not all of them take."""
        engine = self.engine or ("cuda" if self.device == "cpu" else None)
        own = {"streams": (self.streams,), "engine": engine, "device": self.device, "devices": self.devices}
        return {**super().arguments(), **own}

    def request(self) -> RunRequest:
        """The same for what prepares it."""
        from msplit.run.request import RunRequest

        return RunRequest.of(**self.arguments(), shapes=dict(self.shapes))


@dataclass(frozen=True)
class SharedEngine(options.Devices, Engine):
    """Likewise, on several GPUs."""


class Groups(Parameter):
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

    groups: int | str = option(
        "--groups",
        type=Groups(),
        default="4",
        show_default=True,
        envvar="TF_GPU_STREAM_GROUP_COUNT",
        help="Steps in flight at once (or TF_GPU_STREAM_GROUP_COUNT); auto: as many as measure best.",
    )
    max_batch: int | None = option(
        "--max-batch", type=click.IntRange(1), help="Most rows of a step that requests share (default: 64)."
    )
    batches: tuple[int, ...] | None = option(
        "--batch",
        type=options.Numbers(click.IntRange(1)),
        help="Rows of the steps to have ready, such as 1,8,32 (default: 1, 4, 16 … up to --max-batch).",
    )
    max_delay_us: float = key(
        "--pool", "max-delay-us", "How long a step that is not full waits for more rows.", click.FloatRange(0), 0.0
    )
    priorities: int = key("--pool", "priorities", "Levels of priority.", click.IntRange(1), 1)
    max_queue: int = key("--pool", "max-queue", "Most requests that wait; 0: any number.", click.IntRange(0), 0)
    max_memory: float | None = key(
        "--pool", "max-memory", "Most memory of the device, in GiB.", click.FloatRange(0, min_open=True)
    )
    host_threads: int | None = key("--pool", "host-threads", "Threads for what runs on the host.", click.IntRange(1))

    def settings(self) -> PoolSettings:
        """The same for `msplit.pool`."""
        from msplit.serving.pool.settings import PoolSettings

        memory = None if self.max_memory is None else int(self.max_memory * (1 << 30))
        return PoolSettings(**{**dataclasses.asdict(self), "max_memory": memory})
