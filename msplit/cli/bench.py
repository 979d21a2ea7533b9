"""`msplit bench`: run, verify, measure.

`msplit tune`: search for the fastest plan by measuring, and write it.

`msplit bisect`: find the first node whose value is not TensorFlow's.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import click

from msplit.cli import measuring, options, output
from msplit.cli.keys import Keys, given, key, option, together
from msplit.cli.measuring import Measured
from msplit.cli.measuring import Run as ComparedRun
from msplit.core.arguments import spelled
from msplit.progress import telling
from msplit.report.document import plural


@dataclass(frozen=True)
class Run(options.SharedInputs, options.TableMemory, options.Backend, measuring.Run):
    """What runs."""

    split: tuple[int, ...] = key(
        "--cuda",
        "Also run one step on several GPUs, such as 0,1, its streams divided over them (with --rules device).",
        options.numbers(click.IntRange(0)),
        (),
    )
    place: str | None = option(
        metavar="MODULE:FUNCTION|FILE",
        help="tensorflow: put each node on the device that a function of yours, or what `assign --emit placement` wrote, gives it.",
    )
    plan: Path | None = option(help="cuda: also run a plan that `tune --plan-out` wrote.")


@dataclass(frozen=True)
class Asked:
    """What is asked of the result, and how it is printed."""

    trace: Path | None = option(help="Write when each kernel of one step ran, for Perfetto or chrome://tracing.")
    force: bool = option(help="Replace existing outputs.")
    style: str = option(
        "--format",
        type=click.Choice(["table", "json", "md", "csv"]),
        default="table",
        help="How to print the result. csv: a row per variant and batch.",
    )


@click.command()
@options.model_argument
@together
def command(
    model: Path,
    choice: options.Choice,
    run: Run,
    work: options.Batches,
    measured: Measured,
    asked: Asked,
    beside: measuring.Beside,
) -> int:
    """Run MODEL on one and on several streams, verify that outputs are equal, and measure. This executes the model.

    What sizes and prices MODEL and is not given is as `msplit assign` has recorded it with the model. MODEL may be a build: it is opened,
    verified, and measured beside one stream of the same kernels.
    """
    from msplit.assignment.assignment import check_places
    from msplit.benchmark.benchmark import bench_for, sweep
    from msplit.formats import build
    from msplit.report import benchmark
    from msplit.run.request import refuse_exclusions

    if build.is_build(model):
        return _bench_build(model, measured, run.seed, asked.style)
    _refuse(work, beside)
    request = run.request(
        work,
        measured,
        engine=run.engine,
        split=run.split,
        shared=run.shared,
        users=run.users,
        table_memory=run.table_memory,
        place=run.place,
        plan=run.plan,
        timelines=asked.trace is not None,
        force=asked.force,
    )
    if work.several:
        refuse_exclusions({**request.given, "batches_in_turn": work.several})
    then = beside.load()
    flat = choice.load(model, record=work.record)
    places = (asked.trace, measured.save_reference, beside.plot)
    check_places(flat, [path for path in places if path is not None], force=asked.force)
    measuring.refuse(then, request.run, beside.limit, flat)
    if work.several:
        with telling() as tell:
            swept = sweep(flat, request, work.several, progress=tell, warn=output.tell)
        return measuring.report(flat, swept, beside, then, asked.style, force=asked.force)
    with telling() as tell:
        found = bench_for(flat, request, progress=tell, warn=output.tell)
    written: list[str] = []
    if asked.trace is not None and found.traced:  # what gives wrong outputs is not traced
        from msplit import formats
        from msplit.report import trace

        formats.write_bytes_atomic(asked.trace, trace.to_bytes(trace.from_bench(flat, found)), force=asked.force)
        written.append(
            f"Written: {asked.trace}, one measured step of {plural(len(found.traced), 'variant')}, for https://ui.perfetto.dev."
        )
    shown = measuring.Shown(
        benchmark.document(flat, found, written), benchmark.payload(flat, found, written), (found,), {}
    )
    return measuring.show(flat, shown, then, beside.limit, asked.style)


_OF_A_BUILD = ("model", "duration", "warmup", "min_rounds", "builds", "tolerance", "seed", "style")
"""What can be asked of a build: the rest was settled when it was made."""


def _bench_build(path: Path, measured: Measured, seed: int, style: str) -> int:
    """Measures a build. Exit code 1 where its outputs are wrong."""
    from msplit.benchmark.benchmark import bench_build
    from msplit.report import contents as report

    context = click.get_current_context()
    own = [one.name or "" for one in context.command.params if not isinstance(one.type, Keys)]
    for name in (*own, *given(context)):
        if options.was_given(name) and name not in _OF_A_BUILD:
            raise click.UsageError(f"{spelled(name)} is for a model: {path} is a build, where all of that is settled.")
    if style == "csv":
        raise click.UsageError("A build has no rows for csv: give --format json.")
    with telling() as tell:
        command = ("msplit", *sys.argv[1:])
        found = bench_build(path, measured.settings(seed), command=command, progress=tell)
    options.show(style, "build_bench", report.bench_document(path, found), lambda: report.bench_payload(path, found))
    return int(found.failed)


def _refuse(work: options.Batches, beside: measuring.Beside) -> None:
    """Raises a UsageError for a figure that can not be drawn."""
    if not work.several and beside.plot is not None:
        raise click.UsageError("--plot draws times over batches: give several, such as --batch 1,8,32.")
    if beside.plot is not None and beside.plot.suffix.lower() != ".html":
        raise click.UsageError("--plot writes an HTML page: name a file that ends in .html.")


@dataclass(frozen=True)
class Search(options.Search):
    """The search for a plan, and where it goes."""

    output: Path | None = option("-o", "--output", help="Write the tuned streams as an annotated model.")
    plan_out: Path | None = option(help="Write the tuned plan: streams, order and waits.")


@click.command()
@options.model_argument
@click.option("--force", is_flag=True, help="Replace existing outputs.")
@options.format_option
@together
def tune_command(
    model: Path,
    choice: options.Choice,
    run: ComparedRun,
    work: options.RecordedWork,
    measured: Measured,
    search: Search,
    force: bool,
    style: str,
) -> int:
    """Search for the fastest plan of MODEL on the cuda engine, on up to the largest number of --streams, by measuring; verify and measure
    it beside the others as `bench` does. This executes the model.
    """
    from msplit.assignment.assignment import check_places
    from msplit.benchmark.benchmark import bench_for
    from msplit.report import benchmark
    from msplit.run.tuning import write

    request = run.request(work, measured, tune=search.settings(run), force=force)
    flat = choice.load(model, record=work.record)
    places = (search.output, search.plan_out, measured.save_reference)
    check_places(flat, [path for path in places if path is not None], force=force)
    with telling() as tell:
        found = bench_for(flat, request, progress=tell, warn=output.tell)
    written: list[str] = []
    if found.tuned is not None and not found.result.failed:
        written = write(
            flat, found.tuned, output=search.output, plan=search.plan_out, force=force, workload=found.workload
        )
    document, payload = benchmark.document(flat, found, written), benchmark.payload(flat, found, written)
    return measuring.show(flat, measuring.Shown(document, payload, (found,), {}), None, None, style)


@dataclass(frozen=True)
class Compared(measuring.Closeness, options.Verified):
    """What is compared, and how closely."""


@click.command()
@options.model_argument
@options.format_option
@together
def bisect_command(
    model: Path, choice: options.Choice, compared: Compared, work: options.RecordedWork, style: str
) -> int:
    """Find the first node of MODEL whose value on the cuda engine is not TensorFlow's on the CPU, value by value, in float32. Nothing is
    measured. This executes the model.
    """
    from msplit.benchmark import bisect
    from msplit.report import commands as report
    from msplit.run.request import RunRequest
    from msplit.verify.results import Settings

    flat = choice.load(model, record=work.record)
    request = RunRequest.of(
        settings=Settings(seed=compared.seed, tolerance=compared.tolerance),
        **work.arguments(),
        **compared.arguments(),
    )
    with telling() as tell:
        found = bisect.bisect(flat, request, progress=tell)
    options.show(style, "bisect", report.bisect_document(flat, found), lambda: report.bisect_payload(flat, found))
    return int(found.culprit is not None or found.drift is not None)
