"""Options of what is measured beside what: shared by `bench`, `tune` and `bisect`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from msplit.cli import options, tensorflow_options
from msplit.cli.keys import FILE, key, option

if TYPE_CHECKING:
    from msplit.run.setup import BenchRequest
    from msplit.verify.results import Settings


@dataclass(frozen=True)
class Closeness:
    """How closely outputs are compared."""

    tolerance: float | None = key(
        "--measure",
        "tolerance",
        "Relative and absolute tolerance of outputs (none: by type and precision).",
        click.FloatRange(0),
    )


@dataclass(frozen=True)
class Measured(Closeness):
    """How long and how often, and beside what."""

    duration: float = key("--measure", "duration", "Seconds of measuring, in all.", click.FloatRange(0), 3.0)
    warmup: float = key("--measure", "warmup", "Seconds of warming up, per variant.", click.FloatRange(0), 0.2)
    min_rounds: int = key("--measure", "min-iters", "Fewest rounds.", click.IntRange(1), 10)
    builds: int = key(
        "--measure", "builds", "How often everything is built anew while measuring.", click.IntRange(1), 3
    )
    compare_tensorflow: bool = key(
        "--measure", "tensorflow", "no: cuda: do not measure TensorFlow and ONNX Runtime beside it.", bool, True
    )
    save_reference: Path | None = key(
        "--measure", "save-reference", "Save inputs and reference outputs as this .npz.", FILE
    )

    def settings(self, seed: int) -> Settings:
        """The same for the library."""
        from msplit.verify.results import Settings

        return Settings(self.duration, self.warmup, self.min_rounds, self.builds, seed, tolerance=self.tolerance)


@dataclass(frozen=True)
class Run(options.Devices, tensorflow_options.Processes, tensorflow_options.Stock, options.Kernels):
    """What runs: engine, streams, kernels, and what outputs are held against."""

    streams: tuple[int, ...] = option(
        "--streams",
        type=options.Numbers(options.STREAMS),
        default="1,2,4",
        show_default=True,
        help="Numbers of streams to compare; tune: up to the largest.",
    )

    def request(self, work: options.Work, measured: Measured, **further: Any) -> BenchRequest:
        """What the options ask for."""
        from msplit.run.setup import BenchRequest

        return BenchRequest.of(
            streams=self.streams,
            devices=self.devices,
            compare_tensorflow=measured.compare_tensorflow,
            save_reference=measured.save_reference,
            settings=measured.settings(self.seed),
            log_placement=self.log_placement,
            tensorflow=self.tensorflow(),
            cluster=self.over(),
            command=("msplit", *sys.argv[1:]),
            **work.arguments(),
            **self.arguments(),
            **further,
        )
