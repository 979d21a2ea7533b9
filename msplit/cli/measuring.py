"""Options of what is measured beside what: shared by `bench`, `tune` and `bisect`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from msplit.cli import options, tensorflow_options
from msplit.cli.keys import FILE, Key, keyed

if TYPE_CHECKING:
    from msplit.run.request import RunRequest
    from msplit.verify.results import Settings


@dataclass(frozen=True)
class Sweep(options.Work):
    """What sizes and prices the model, once or for several batches."""

    batches: tuple[int, ...] | None = None

    def arguments(self) -> dict[str, Any]:
        """For the functions of the library, of the first batch."""
        return {**super().arguments(), "batch": self.batches[0] if self.batches else None}

    @property
    def several(self) -> tuple[int, ...]:
        """The batches, where there is more than one."""
        return self.batches if self.batches and len(self.batches) > 1 else ()


@dataclass(frozen=True)
class Measured:
    """How long and how often, and beside what."""

    duration: float
    warmup: float
    min_rounds: int
    builds: int
    tolerance: float | None
    compare_tensorflow: bool
    save_reference: Path | None

    def settings(self, seed: int) -> Settings:
        """The same for the library."""
        from msplit.verify.results import Settings

        return Settings(self.duration, self.warmup, self.min_rounds, self.builds, seed, tolerance=self.tolerance)


@dataclass(frozen=True)
class Run(tensorflow_options.Stock, options.Kernels):
    """What runs: engine, streams, kernels, and what outputs are held against."""

    streams: tuple[int, ...]
    devices: tuple[int, ...]
    cluster: str | None
    ps_strategy: str

    def request(self, work: options.Work, measured: Measured, **further: Any) -> RunRequest:
        """What the options ask for."""
        from msplit.run.request import RunRequest

        return RunRequest(
            streams=self.streams,
            devices=self.devices,
            compare_tensorflow=measured.compare_tensorflow,
            save_reference=measured.save_reference,
            settings=measured.settings(self.seed),
            place=self.place,
            log_placement=self.log_placement,
            tensorflow=self.tensorflow(),
            cluster=tensorflow_options.over(self.cluster, self.ps_strategy),
            command=("msplit", *sys.argv[1:]),
            **work.arguments(),
            **self.arguments(),
            **further,
        )


TOLERANCE = Key(
    "tolerance", "Relative and absolute tolerance of outputs (none: by type and precision).", click.FloatRange(0)
)
MEASURE = (
    Key("duration", "Seconds of measuring, in all.", click.FloatRange(0), 3.0),
    Key("warmup", "Seconds of warming up, per variant.", click.FloatRange(0), 0.2),
    Key("min-iters", "Fewest rounds.", click.IntRange(1), 10, "min_rounds"),
    Key("builds", "How often everything is built anew while measuring.", click.IntRange(1), 3),
    TOLERANCE,
    Key(
        "tensorflow",
        "no: cuda: do not measure TensorFlow and ONNX Runtime beside it.",
        bool,
        True,
        "compare_tensorflow",
    ),
    Key("save-reference", "Save inputs and reference outputs as this .npz.", FILE),
)

measure_option = keyed("--measure", "How it is measured, and beside what; keys below.", *MEASURE)

streams_option = click.option(
    "--streams",
    type=options.Numbers(options.STREAMS),
    default="1,2,4",
    show_default=True,
    help="Numbers of streams to compare; tune: up to the largest.",
)

batch_option = click.option("--batch", type=click.IntRange(1), help="Size of unknown leading dimensions (default: 1).")

basis_options = options.together(options.shape_option, options.basis_option)
"""What sizes and prices the model, batches left out."""

runtime_option = options.tensorflow_option(*tensorflow_options.STOCK, *tensorflow_options.CLUSTER)
