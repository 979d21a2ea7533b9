"""Options of commands that measure, and the batches or the earlier measurement that `bench` compares with.

Options of what is measured beside what: shared by `bench`, `tune` and `bisect`.

What `msplit bench` holds a measurement against: other batches, and an earlier measurement.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from msplit.cli import engine_options, options, output
from msplit.cli.keys import key, option
from msplit.errors import MsplitError

if TYPE_CHECKING:
    from msplit.benchmark.results import Baseline, BatchSweep, Bench
    from msplit.flatten.flat import FlatGraph
    from msplit.report.document import Document
    from msplit.run.request import RunRequest
    from msplit.run.setup import BenchRequest
    from msplit.verify.results import Settings


@dataclass(frozen=True)
class Closeness:
    """How closely outputs are compared."""

    tolerance: float | None = key(
        "--measure", "Relative and absolute tolerance of outputs (none: by type and precision).", click.FloatRange(0)
    )


@dataclass(frozen=True)
class Measured(Closeness):
    """How long and how often, and beside what."""

    duration: float = key("--measure", "Seconds of measuring, in all.", click.FloatRange(0), 3.0)
    warmup: float = key("--measure", "Seconds of warming up, per variant.", click.FloatRange(0), 0.2)
    min_rounds: int = key("--measure", "Fewest rounds.", click.IntRange(1), 10, name="min-iters")
    builds: int = key("--measure", "How often everything is built anew while measuring.", click.IntRange(1), 3)
    compare_tensorflow: bool = key(
        "--measure", "no: cuda: do not measure TensorFlow and ONNX Runtime beside it.", default=True, name="tensorflow"
    )
    save_reference: Path | None = key("--measure", "Save inputs and reference outputs as this .npz.")

    def settings(self, seed: int) -> Settings:
        """The same for the library."""
        from msplit.verify.results import Settings

        return Settings(self.duration, self.warmup, self.min_rounds, self.builds, seed, tolerance=self.tolerance)


@dataclass(frozen=True)
class Run(options.Devices, engine_options.Processes, engine_options.TensorFlowKeys, options.Kernels):
    """What runs: engine, streams, kernels, and what outputs are held against."""

    streams: tuple[int, ...] = option(
        type=options.numbers(options.STREAMS),
        default="1,2,4",
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


def _percent(text: str) -> float:
    """The share that ``5%`` or ``5`` is."""
    try:
        number = float(text.strip().removesuffix("%"))
    except ValueError:
        number = -1.0
    if not 0 <= number < 1e6:
        raise ValueError(f"{text!r} is no percentage such as 5%")
    return number / 100


@dataclass(frozen=True)
class Beside:
    """What --plot, --baseline and --fail-if-slower say.

    Attributes:
        plot: Where to draw.
        baseline: An earlier measurement.
        limit: By what share of its time a variant may be slower; None where nothing fails.
    """

    plot: Path | None = option(metavar="FILE.html", help="Draw the time of a step over the batches.")
    baseline: Path | None = option(
        metavar="OLD.json", help="Compare with what an earlier run printed with --format json."
    )
    limit: float | None = option(
        "--fail-if-slower",
        type=options.Parsed("percent", _percent),
        metavar="PERCENT",
        help="Exit with 1 if a variant is slower than in --baseline by more than so much and by more than noise.",
    )

    def load(self) -> Baseline | None:
        """The earlier measurement, if there is one.

        Raises:
            UsageError: There is a limit and nothing to hold it against.
            MsplitError: It can not be read.
        """
        from msplit.benchmark import results

        if self.baseline is None and self.limit is not None:
            raise click.UsageError("--fail-if-slower compares with --baseline: give that, too.")
        return None if self.baseline is None else results.load(self.baseline)


@dataclass(frozen=True, eq=False)
class Shown:
    """A result to print.

    Attributes:
        document: As text.
        payload: As plain data.
        runs: One bench, or one for each batch.
        failed: Batch -> why it could not be run.
    """

    document: Document
    payload: Mapping[str, Any]
    runs: Sequence[Bench]
    failed: Mapping[int, str]


def refuse(then: Baseline | None, request: RunRequest, limit: float | None, flat: FlatGraph) -> None:
    """Before anything is measured: a baseline of another machine decides on nothing.

    Raises:
        MsplitError: There is a limit, and the baseline is of another engine, GPU or processor.
    """
    from msplit.benchmark import results
    from msplit.engines.environment import environment
    from msplit.run.variants import as_recorded, choose_engine

    if then is None or limit is None:
        return
    engine, _ = choose_engine(as_recorded(flat, request)[0], flat)
    now = {"engine": engine.name, "result": {"environment": environment(), "variants": []}}
    _refuse_differences(then, results.differences(then.circumstances, results.circumstances([now])))


def _refuse_differences(then: Baseline, differs: Sequence[str]) -> None:
    if differs:
        raise MsplitError(
            f"it can not decide what is slower: it was measured with {'; '.join(differs)}",
            where=str(then.path),
            fix="measure a baseline here and in the same way, or leave --fail-if-slower out to see both side by side",
        )


def report(
    flat: FlatGraph, found: BatchSweep, beside: Beside, then: Baseline | None, style: str, *, force: bool
) -> int:
    """Draws and prints what several batches gave. The exit code."""
    from msplit import formats
    from msplit.report import sweep as sweeps

    written = []
    if beside.plot is not None and any(run.result.variants for run in found.runs.values()):
        formats.write_bytes_atomic(beside.plot, sweeps.page(flat, found).encode(), force=force)
        written.append(f"Written: {beside.plot}, the times by batch.")
    document, payload = sweeps.document(flat, found, written), sweeps.payload(flat, found, written)
    return show(flat, Shown(document, payload, tuple(found.runs.values()), found.failed), then, beside.limit, style)


def show(flat: FlatGraph, shown: Shown, then: Baseline | None, limit: float | None, style: str) -> int:
    """Prints a result, beside its baseline where there is one.

    Returns:
        The exit code: 1 where outputs are wrong or something is slower than it may be; 2 where a batch could not be run.

    Raises:
        MsplitError: There is a limit, and the baseline is of other inputs or another precision. The result is printed all the same.
    """
    from msplit.benchmark import results
    from msplit.report import bench_sections, sweep
    from msplit.report import document as jsonio

    document, payload = shown.document, jsonio.plain(shown.payload)  # a baseline is plain data, too
    compared = None
    if then is not None:
        compared = results.compare(then, payload.get("runs", [payload]), limit)
        payload["baseline"] = bench_sections.regression_payload(compared)
        warnings = [*document.warnings, *bench_sections.warnings(compared)]
        document = replace(
            document, tables=[*document.tables, bench_sections.regression_table(compared)], warnings=warnings
        )
    if style == "csv":
        output.clear()
        output.rendered(sweep.text(flat, shown.runs))
    else:
        options.show(style, "bench", document, lambda: payload)
    if compared is not None and limit is not None:
        _refuse_differences(compared.baseline, compared.differs)
    code = 0
    for run in shown.runs:
        if run.result.failed:
            fix = "\n  fix: `msplit bisect` names the first node whose value differs" if run.engine == "cuda" else ""
            output.tell(f"error: outputs differ\n{run.result.describe_failures()}{fix}")
            code = 1
    if compared is not None and compared.failing:
        output.tell(
            "\n".join(["error: slower than the baseline", *map("  {}".format, bench_sections.failures(compared))])
        )
        code = 1
    for batch, why in shown.failed.items():
        output.tell(f"error: batch {batch} could not be run: {why}")
        code = 2
    return code
