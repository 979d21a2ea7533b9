"""Options of what runs a model: the pool and the device, and stock TensorFlow; and flags of TensorFlow's server.

Options of what answers requests: what runs a model, and how its pool shares the device.

Options of stock TensorFlow: where it puts nodes, and how long a step of it may take.

Flags of `tensorflow_model_server`: what `msplit serve` does with each that its users' command lines may have. `data/flags.txt` lists them.
An unknown flag is an error as on any command.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from msplit.cli import options
from msplit.cli.keys import key, option

if TYPE_CHECKING:
    from msplit.engines.base import ClusterOptions, TensorFlowOptions
    from msplit.run.request import RunRequest
    from msplit.serving.pool.settings import PoolSettings


@dataclass(frozen=True, kw_only=True)
class Engine(options.TableMemory, options.InputShapes, options.Backend, options.OnDevice, options.Kernels):
    """What runs a model, and how."""

    streams: int = option(type=options.STREAMS, default=8, help="The largest number of streams.")
    devices: tuple[int, ...] = ()

    def arguments(self) -> dict[str, Any]:
        """For the functions of the library; shapes left out, which not all of them take."""
        engine = self.engine or ("cuda" if self.device == "cpu" else None)
        own = {"streams": (self.streams,), "engine": engine, "device": self.device, "devices": self.devices}
        return {**super().arguments(), **own, "table_memory": self.table_memory}

    def request(self) -> RunRequest:
        """The same for what prepares it."""
        from msplit.run.request import RunRequest

        return RunRequest.of(**self.arguments(), shapes=dict(self.shapes))


@dataclass(frozen=True)
class SharedEngine(options.SharedInputs, options.Devices, Engine):
    """Likewise, on several GPUs, with rows that are the same in a step."""

    def arguments(self) -> dict[str, Any]:
        """For the functions of the library; shapes left out."""
        return {**super().arguments(), "shared": self.shared, "users": self.users}


def _number_or_auto(text: str) -> int | str:
    """A number, or ``auto``. Of NVIDIA's variable, which may have a number for each GPU, the first."""
    number = text.partition(",")[0].strip()
    if text != "auto" and not (number.isascii() and number.isdigit() and int(number)):
        raise ValueError(f"{text!r} is neither a number of one or more nor auto")
    return text if text == "auto" else int(number)


@dataclass(frozen=True)
class PoolOptions:
    """How a pool answers requests."""

    groups: int | str = option(
        type=options.Parsed("n|auto", _number_or_auto),
        default="4",
        envvar="TF_GPU_STREAM_GROUP_COUNT",
        help="Steps in flight at once (or TF_GPU_STREAM_GROUP_COUNT); auto: as many as measure best.",
    )
    max_batch: int | None = option(
        type=click.IntRange(1), help="Most rows of a step that requests share (default: 64)."
    )
    batches: tuple[int, ...] | None = option(
        "--batch",
        type=options.numbers(click.IntRange(1)),
        help="Rows of the steps to have ready, such as 1,8,32 (default: 1, 4, 16 … up to --max-batch).",
    )
    max_delay_us: float = key(
        "--pool", "How long a step that is not full waits for more rows.", click.FloatRange(0), 0.0
    )
    priorities: int = key("--pool", "Levels of priority.", click.IntRange(1), 1)
    max_queue: int = key("--pool", "Most requests that wait; 0: any number.", click.IntRange(0), 0)
    max_rows: int | None = key("--pool", "Most rows of a request (none: those of 256 steps).", click.IntRange(1))
    max_memory: float | None = key("--pool", "Most memory of the device, in GiB.", click.FloatRange(0, min_open=True))
    host_threads: int | None = key("--pool", "Threads for what runs on the host.", click.IntRange(1))
    workers: int | str | None = key(
        "--pool", "Processes on each GPU; auto: as many as measure best.", options.Parsed("n|auto", _number_or_auto)
    )
    lengths: tuple[int, ...] | None = key(
        "--pool",
        "Lengths of rows to have ready, of a model that leaves them open (of a build: its own).",
        options.numbers(click.IntRange(1)),
    )
    latency_us: float | None = key("--pool", "Most µs for 99 of 100 requests (auto, --sweep).", click.FloatRange(1))
    retries: int = key("--pool", "Further runs if a process ends.", click.IntRange(0), 1)

    def settings(self) -> PoolSettings:
        """The same for `msplit.pool`."""
        from msplit.serving.pool.settings import PoolSettings

        memory = None if self.max_memory is None else int(self.max_memory * (1 << 30))
        return PoolSettings(**{**dataclasses.asdict(self), "max_memory": memory})


@dataclass(frozen=True)
class TensorFlowKeys:
    """How TensorFlow runs a model."""

    soft_placement: bool = key(
        "--tensorflow",
        "no: refuse devices that are not there or have no kernel, in place of moving nodes.",
        default=True,
    )
    log_placement: bool = key("--tensorflow", "Show which device each node was put on.", default=False)
    timeout: float | None = key(
        "--tensorflow",
        "Seconds that a step may take (none: any; 60 where it reads a queue).",
        click.FloatRange(0, min_open=True),
    )
    gpu_memory: float | None = key(
        "--tensorflow",
        "Share of the GPU's free memory to take at once (none: what it needs; 0.45 for logical devices).",
        click.FloatRange(0, 1, min_open=True),
    )
    merge_streams: bool = key("--tensorflow", "A row whose copies use the stream of the kernels.", default=False)
    private_threads: int = key(
        "--tensorflow", "A row with so many threads for each device alone.", click.IntRange(0), 0
    )
    device_priorities: tuple[int, ...] = key(
        "--tensorflow",
        "A row with priorities of logical devices, such as -1,0 (-1 comes first).",
        options.numbers(click.IntRange(-100, 100)),
        (),
    )
    device_memory: tuple[int, ...] = key(
        "--tensorflow",
        "A row with limits of memory of logical devices, in MiB.",
        options.numbers(click.IntRange(1)),
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
        "--tensorflow", f"FILE or TF_CONFIG: run over several processes (`msplit worker`). {WHAT}"
    )
    ps_strategy: str = key(
        "--tensorflow", "Which task of job ps keeps which variable.", click.Choice(["bytes", "round-robin"]), "bytes"
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


_LINE = re.compile(r"^(taken|accepted|refused) --(\w+)(\[=BOOL\])?(?:: (.+))?$", re.MULTILINE)


class Flag(NamedTuple):
    """A flag of TensorFlow Serving.

    Attributes:
        verdict: ``taken``, by an option of the same name; ``accepted``, where it changes nothing; or ``refused``.
        name: Name, without dashes in front.
        switch: Not empty where its value is a truth value, which may be left out.
        why: Why it changes nothing, or what to do instead; "" where it is taken.
    """

    verdict: str
    name: str
    switch: str
    why: str


@cache
def flags() -> tuple[Flag, ...]:
    """All of them."""
    text = resources.files("msplit.cli").joinpath("data/flags.txt").read_text("utf-8")
    return tuple(Flag(*parts) for parts in _LINE.findall(text))


def with_flags(command: click.Command) -> click.Command:
    """Gives a command those flags that are no options of its own."""
    for flag in flags():
        if flag.verdict != "taken":
            how: dict[str, Any] = {"is_flag": False, "flag_value": "true", "type": click.BOOL} if flag.switch else {}
            name = f"--{flag.name.replace('_', '-')}"
            command.params.append(click.Option([name], hidden=True, expose_value=False, callback=_heed(flag), **how))
    return command


def _heed(flag: Flag) -> Callable[..., None]:
    """Callback that takes note of a flag, or refuses it."""

    def callback(context: click.Context, parameter: click.Parameter, value: Any) -> None:
        if flag.verdict == "refused" and value not in (None, False, ""):
            raise click.UsageError(f"--{flag.name} is not done here: {flag.why}.")
        if flag.verdict == "accepted" and value is not None:
            context.meta.setdefault(__name__, []).append(f"--{flag.name} changes nothing here: {flag.why}")

    return callback


def notes(context: click.Context) -> Sequence[str]:
    """Notes on the flags that were given, and change nothing."""
    return tuple(context.meta.get(__name__, ()))
