"""`msplit bench`: run, verify, measure."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from msplit.cli import baseline_options, clusters, options, tensorflow_options
from msplit.progress import telling
from msplit.report.text import plural

if TYPE_CHECKING:
    from msplit.flatten.flat import FlatGraph
    from msplit.run.request import RunRequest


@dataclass(frozen=True)
class Run(tensorflow_options.Stock, options.Execution):
    """What runs: engine, streams, kernels, and what outputs are held against."""

    streams: tuple[int, ...]
    ruleset: str | None
    engine: str | None
    devices: tuple[int, ...]
    effort: str
    split: tuple[int, ...] | None
    no_capture: bool
    no_fuse: bool
    no_group: bool
    no_tensorflow: bool
    reference: Path | None
    save_reference: Path | None
    plan: Path | None
    cluster: str | None
    ps_strategy: str


@dataclass(frozen=True)
class Sweep(options.Work):
    """What sizes and prices the model, once or for several batches."""

    batches: tuple[int, ...] | None = None

    def arguments(self) -> dict[str, Any]:
        """For a `RunRequest`, of the first batch."""
        return {**super().arguments(), "batch": self.batches[0] if self.batches else None}

    @property
    def several(self) -> tuple[int, ...]:
        """The batches, where there is more than one."""
        return self.batches if self.batches and len(self.batches) > 1 else ()


@dataclass(frozen=True)
class Measured:
    """How long and how often."""

    duration: float
    warmup: float
    min_rounds: int
    builds: int
    tolerance: float | None


@dataclass(frozen=True)
class Tuning(options.Search):
    """The search for a plan, and where it goes."""

    output: Path | None
    plan_out: Path | None


@dataclass(frozen=True)
class Asked:
    """What is asked of the result, and how it is printed."""

    trace: Path | None
    bisect: bool
    force: bool
    style: str


@click.command()
@options.model_options
@click.option(
    "--streams",
    type=options.Numbers(options.STREAMS),
    default="1,2,4",
    show_default=True,
    help="Numbers of streams to compare.",
)
@click.option(
    "--split",
    type=options.Numbers(click.IntRange(0)),
    help="cuda: also run one step on several GPUs, such as 0,1, its streams divided over them (with --rules device), launch by launch.",
)
@options.rules_option
@options.engine_option
@options.gpus_option
@options.run_options
@click.option(
    "--duration", default=3.0, show_default=True, type=click.FloatRange(0), help="Seconds of measuring, in all."
)
@click.option(
    "--warmup", default=0.2, show_default=True, type=click.FloatRange(0), help="Seconds of warming up, per variant."
)
@click.option("--min-iters", "min_rounds", default=10, show_default=True, type=click.IntRange(1), help="Fewest rounds.")
@click.option(
    "--builds",
    default=3,
    show_default=True,
    type=click.IntRange(1),
    help="How often everything is built anew while measuring.",
)
@options.kernel_options
@tensorflow_options.stock_options
@clusters.cluster_options
@click.option("--no-tensorflow", is_flag=True, help="cuda: do not measure TensorFlow and ONNX Runtime beside it.")
@click.option(
    "--tolerance",
    type=click.FloatRange(0),
    help="Relative and absolute tolerance of outputs (default: by type and precision).",
)
@options.reference_option
@click.option("--save-reference", type=options.PATH, help="Save inputs and reference outputs as .npz.")
@options.tune_options
@click.option("-o", "--output", type=options.PATH, help="Write the tuned streams as an annotated model.")
@click.option("--plan-out", type=options.PATH, help="Write the tuned plan: streams, order and waits.")
@click.option("--plan", type=options.PATH, help="cuda: also run a plan that --plan-out wrote.")
@click.option(
    "--trace",
    type=options.PATH,
    help="Write when each kernel of one step ran, for Perfetto or chrome://tracing.",
)
@click.option(
    "--bisect",
    is_flag=True,
    help="cuda: measure nothing; find the first node whose value is not TensorFlow's, value by value.",
)
@click.option("--force", is_flag=True, help="Replace existing outputs.")
@click.option(
    "--batch",
    "batches",
    type=options.Numbers(click.IntRange(1)),
    help="Size of unknown leading dimensions (default: 1). Several, such as 1,8,32, are measured one after the other.",
)
@options.shape_option
@options.gpu_option(default=None)
@options.profile_option
@options.record_option
@baseline_options.beside_options
@click.option(
    "--format",
    "style",
    type=click.Choice(["table", "json", "md", "csv"]),
    default="table",
    show_default=True,
    help="How to print the result. csv: a row per variant and batch.",
)
@options.together(run=Run, work=Sweep, measured=Measured, tuning=Tuning, asked=Asked)
def command(
    model: Path,
    choice: options.Choice,
    run: Run,
    work: Sweep,
    measured: Measured,
    tuning: Tuning,
    asked: Asked,
    beside: baseline_options.Beside,
) -> int:
    """Run MODEL on one and on several streams, verify that outputs are equal, and measure. This executes the model.

    What sizes and prices MODEL and is not given is as `msplit assign` has recorded it with the model. MODEL may be a build: it is opened,
    verified, and measured beside one stream of the same kernels.
    """
    from msplit.assignment.assignment import check_places
    from msplit.benchmark.benchmark import bench_for
    from msplit.benchmark.sweep import sweep
    from msplit.formats import build
    from msplit.report import benchmark
    from msplit.run.tuning import write

    if build.is_build(model):
        return _bench_build(model, measured, run.seed, asked.style)
    _refuse(run, work, tuning, asked, beside)
    then = beside.load()
    given = work.arguments()
    flat = choice.load(model, record=not work.no_record)
    places = (tuning.output, tuning.plan_out, asked.trace, run.save_reference, beside.plot)
    check_places(flat, [path for path in places if path is not None], force=asked.force)
    request = _request(run, given, measured, tuning, asked)
    if asked.bisect:
        return _bisect(flat, request, asked.style)
    baseline_options.refuse(then, request, beside.limit, flat)
    if work.several:
        with telling() as tell:
            swept = sweep(flat, request, work.several, progress=tell)
        return baseline_options.report(flat, swept, beside, then, asked.style, force=asked.force)
    with telling() as tell:
        found = bench_for(flat, request, progress=tell)
    written: list[str] = []
    if found.tuned is not None and not found.result.failed:
        written = write(
            flat,
            found.tuned,
            output=tuning.output,
            plan=tuning.plan_out,
            force=asked.force,
            workload=found.workload,
        )
    if asked.trace is not None and found.traced:  # what gives wrong outputs is not traced
        from msplit import formats
        from msplit.report import trace

        formats.write_bytes_atomic(asked.trace, trace.to_bytes(trace.from_bench(flat, found)), force=asked.force)
        written.append(
            f"Written: {asked.trace}, one measured step of {plural(len(found.traced), 'variant')}, for https://ui.perfetto.dev."
        )
    shown = baseline_options.Shown(
        benchmark.document(flat, found, written), benchmark.payload(flat, found, written), (found,), {}
    )
    return baseline_options.show(flat, shown, then, beside.limit, asked.style)


_OF_A_BUILD = ("model", "duration", "warmup", "min_rounds", "builds", "tolerance", "seed", "style")
"""What can be asked of a build: the rest was settled when it was made."""


def _bench_build(path: Path, measured: Measured, seed: int, style: str) -> int:
    """Measures a build. Exit code 1 where its outputs are wrong."""
    from msplit.benchmark.build_bench import bench_build
    from msplit.report import build as report
    from msplit.verify.results import Settings

    context = click.get_current_context()
    for name in context.params:
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE and name not in _OF_A_BUILD:
            option = next(one.opts[0] for one in context.command.params if one.name == name)
            raise click.UsageError(f"{option} is for a model: {path} is a build, where all of that is settled.")
    if style == "csv":
        raise click.UsageError("A build has no rows for csv: give --format json.")
    with telling() as tell:
        command = ("msplit", *sys.argv[1:])
        found = bench_build(path, Settings(**vars(measured), seed=seed), command=command, progress=tell)
    options.show(style, "build_bench", report.bench_document(path, found), lambda: report.bench_payload(path, found))
    return int(found.failed)


def _refuse(run: Run, work: Sweep, tuning: Tuning, asked: Asked, beside: baseline_options.Beside) -> None:
    """Raises a UsageError for options that do not go together."""
    others = {
        "--tune": tuning.tune,
        "-o": tuning.output,
        "--plan-out": tuning.plan_out,
        "--plan": run.plan,
        "--trace": asked.trace,
        "--save-reference": run.save_reference,
        "--gpus": run.devices,
    }
    if asked.bisect and (extra := [name for name, value in others.items() if value]):
        raise click.UsageError(f"--bisect measures nothing: leave {extra[0]} out.")
    if asked.bisect and (run.engine == "tensorflow" or run.cluster is not None):
        raise click.UsageError("--bisect looks into the cuda engine: leave --engine and --cluster out.")
    if asked.bisect and (work.several or asked.style == "csv"):
        raise click.UsageError(
            "--bisect looks at one batch, and has no rows for csv: give one --batch, and --format json."
        )
    if run.place is not None and options.was_given("streams"):
        raise click.UsageError("--place says where nodes go, and so does --streams: leave one of the two out.")
    if tuning.tune and run.effort == "fast":
        raise click.UsageError("--tune measures, and --effort fast does not: leave one of the two out.")
    if tuning.tune and run.no_capture:
        raise click.UsageError("--tune measures CUDA graphs: leave --no-capture out.")
    if not tuning.tune and (tuning.output is not None or tuning.plan_out is not None):
        option = "--output" if tuning.output is not None else "--plan-out"
        raise click.UsageError(
            f"{option} writes what --tune finds: give --tune, too (`msplit assign` writes what rules find)."
        )
    if work.several:
        one_batch = {
            "--tune": tuning.tune,
            "--plan": run.plan,
            "--trace": asked.trace,
            "--reference": run.reference,
            "--save-reference": run.save_reference,
            "--log-placement": run.log_placement,
        }
        if extra := [name for name, value in one_batch.items() if value]:
            raise click.UsageError(f"{extra[0]} takes one --batch: bench one at a time.")
    elif beside.plot is not None:
        raise click.UsageError("--plot draws times over batches: give several, such as --batch 1,8,32.")
    if beside.plot is not None and beside.plot.suffix.lower() != ".html":
        raise click.UsageError("--plot writes an HTML page: name a file that ends in .html.")


def _request(run: Run, given: Mapping[str, Any], measured: Measured, tuning: Tuning, asked: Asked) -> RunRequest:
    """What the options ask for."""
    from msplit.run.request import RunRequest
    from msplit.verify.results import Settings

    return RunRequest(
        streams=run.streams,
        ruleset=run.ruleset,
        engine=run.engine,
        devices=run.devices,
        effort=run.effort,
        split=run.split or (),
        capture=not run.no_capture,
        fuse=not run.no_fuse,
        group=not run.no_group,
        compare_tensorflow=not run.no_tensorflow,
        reference=run.reference,
        save_reference=run.save_reference,
        force=asked.force,
        settings=Settings(**vars(measured), seed=run.seed),
        tune=tuning.settings(run),
        plan=run.plan,
        place=run.place,
        log_placement=run.log_placement,
        tensorflow=run.tensorflow(),
        cluster=clusters.over(run.cluster, run.ps_strategy),
        timelines=asked.trace is not None,
        command=("msplit", *sys.argv[1:]),
        **given,
        **run.arguments(),
    )


def _bisect(flat: FlatGraph, request: RunRequest, style: str) -> int:
    """Finds the node at which outputs begin to differ. Exit code 1 where there is one."""
    from msplit.benchmark import bisect
    from msplit.report import bisect as report

    with telling() as tell:
        found = bisect.bisect(flat, request, progress=tell)
    options.show(style, "bisect", report.document(flat, found), lambda: report.payload(flat, found))
    return int(found.culprit is not None or found.drift is not None)
