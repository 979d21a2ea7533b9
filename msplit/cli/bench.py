"""`msplit bench`: run, verify, measure."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from msplit.cli import comparing, options, progress
from msplit.report.text import plural

if TYPE_CHECKING:
    from msplit.flatten.flat import FlatGraph
    from msplit.measure.request import BenchRequest


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
    "--rules",
    "ruleset",
    shell_complete=options.complete_rules,
    help="Rules for a graph without ids (default: auto), or in place of its ids.",
)
@click.option(
    "--engine",
    type=click.Choice(["cuda", "tensorflow"]),
    help="What runs it (default: cuda where it can, else tensorflow).",
)
@options.run_options
@click.option(
    "--duration", default=3.0, show_default=True, type=click.FloatRange(0), help="Seconds of measuring, in all."
)
@click.option(
    "--warmup", default=0.2, show_default=True, type=click.FloatRange(0), help="Seconds of warming up, per variant."
)
@click.option("--min-iters", default=10, show_default=True, type=click.IntRange(1), help="Fewest rounds.")
@click.option(
    "--builds",
    default=3,
    show_default=True,
    type=click.IntRange(1),
    help="How often everything is built anew while measuring.",
)
@click.option("--no-capture", is_flag=True, help="cuda: launch kernel by kernel instead of one CUDA graph.")
@click.option("--no-fuse", is_flag=True, help="cuda: do not show what one kernel per group of pointwise ops adds.")
@click.option("--no-group", is_flag=True, help="cuda: do not show what batching alike branches adds.")
@click.option("--no-tensorflow", is_flag=True, help="cuda: do not measure TensorFlow beside it.")
@click.option(
    "--tolerance",
    type=click.FloatRange(0),
    help="Relative and absolute tolerance of outputs (default: by type and precision).",
)
@click.option(
    "--reference", type=click.Path(path_type=Path), help="Verify against this .npz instead of TensorFlow on the CPU."
)
@click.option("--save-reference", type=click.Path(path_type=Path), help="Save inputs and reference outputs as .npz.")
@click.option(
    "--tune",
    is_flag=True,
    help="cuda: search for the fastest plan, on up to the largest number of --streams, by measuring.",
)
@click.option(
    "--tune-seconds", default=20.0, show_default=True, type=click.FloatRange(0), help="Seconds that --tune may search."
)
@click.option(
    "--max-memory",
    default=1.5,
    show_default=True,
    type=click.FloatRange(1),
    metavar="RATIO",
    help="--tune takes no plan that needs more than so many times the memory of one stream.",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the tuned streams as an annotated model.")
@click.option("--plan-out", type=click.Path(path_type=Path), help="Write the tuned plan: streams, order and waits.")
@click.option("--plan", type=click.Path(path_type=Path), help="cuda: also run a plan that --plan-out wrote.")
@click.option(
    "--trace",
    type=click.Path(path_type=Path),
    help="Write when each kernel of one step ran, for Perfetto or chrome://tracing.",
)
@click.option(
    "--bisect",
    is_flag=True,
    help="cuda: measure nothing; find the first node whose value is not TensorFlow's, value by value.",
)
@click.option("--force", is_flag=True, help="Replace existing outputs.")
@options.sweep_options
@options.profile_option
@options.record_option
@comparing.options
@click.option(
    "--format",
    "style",
    type=click.Choice(["table", "json", "md", "csv"]),
    default="table",
    show_default=True,
    help="How to print the result. csv: a row per variant and batch.",
)
@click.pass_context
def command(
    ctx: click.Context,
    model: Path,
    tags: Sequence[str] | None,
    signature: str | None,
    inputs: Sequence[str] | None,
    outputs: Sequence[str] | None,
    streams: tuple[int, ...],
    ruleset: str | None,
    engine: str | None,
    given: Sequence[str],
    duration: float,
    warmup: float,
    min_iters: int,
    builds: int,
    seed: int,
    precision: str,
    no_capture: bool,
    layout: str,
    no_fuse: bool,
    no_group: bool,
    no_tensorflow: bool,
    tolerance: float | None,
    reference: Path | None,
    save_reference: Path | None,
    tune: bool,
    tune_seconds: float,
    max_memory: float,
    output: Path | None,
    plan_out: Path | None,
    plan: Path | None,
    trace: Path | None,
    bisect: bool,
    force: bool,
    op_libraries: Sequence[Path],
    batches: tuple[int, ...] | None,
    shapes: Sequence[tuple[str, tuple[int, ...]]],
    gpu: str | None,
    profile_path: Path | None,
    no_record: bool,
    beside: comparing.Beside,
    style: str,
) -> None:
    """Run MODEL on one and on several streams, verify that outputs are equal, and measure. This executes the model.

    What sizes and prices MODEL and is not given is as `msplit assign` has recorded it with the model.
    """
    from msplit.decide.export import check_places
    from msplit.measure.benchmark import bench
    from msplit.measure.request import BenchRequest
    from msplit.measure.results import Settings
    from msplit.measure.tuning import TuneSettings, write
    from msplit.report import benchmark

    others = {
        "--tune": tune,
        "-o": output,
        "--plan-out": plan_out,
        "--plan": plan,
        "--trace": trace,
        "--save-reference": save_reference,
    }
    if bisect and (extra := [name for name, value in others.items() if value]):
        raise click.UsageError(f"--bisect measures nothing: leave {extra[0]} out.")
    if bisect and engine == "tensorflow":
        raise click.UsageError("--bisect looks into the cuda engine: leave --engine out.")
    if bisect and (len(batches or ()) > 1 or style == "csv"):
        raise click.UsageError(
            "--bisect looks at one batch, and has no rows for csv: give one --batch, and --format json."
        )
    if tune and no_capture:
        raise click.UsageError("--tune measures CUDA graphs: leave --no-capture out.")
    if not tune and (output is not None or plan_out is not None):
        option = "--output" if output is not None else "--plan-out"
        raise click.UsageError(
            f"{option} writes what --tune finds: give --tune, too (`msplit assign` writes what rules find)."
        )
    several = len(batches or ()) > 1
    if several:
        one_batch = {"--tune": tune, "--plan": plan, "--trace": trace, "--reference": reference}
        comparing.refuse_several({**one_batch, "--save-reference": save_reference})
    elif beside.plot is not None:
        raise click.UsageError("--plot draws times over batches: give several, such as --batch 1,8,32.")
    if beside.plot is not None and beside.plot.suffix.lower() != ".svg":
        raise click.UsageError("--plot draws an SVG: name a file that ends in .svg.")
    then = beside.load()
    measured = options.profile(profile_path)
    flat = options.load(model, tags, signature, inputs, outputs, record=not no_record)
    places = (output, plan_out, trace, save_reference, beside.plot)
    check_places(flat, [path for path in places if path is not None], force=force)
    request = BenchRequest(
        streams=streams,
        ruleset=ruleset,
        engine=engine,
        batch=batches[0] if batches else None,
        shapes=dict(shapes),
        inputs=options.input_files(given),
        gpu=gpu,
        profile=measured,
        seed=seed,
        ieee=precision == "ieee",
        capture=not no_capture,
        layout=layout,
        fuse=not no_fuse,
        group=not no_group,
        compare_tensorflow=not no_tensorflow,
        reference=reference,
        save_reference=save_reference,
        force=force,
        op_libraries=tuple(op_libraries),
        settings=Settings(
            duration=duration, warmup=warmup, min_rounds=min_iters, builds=builds, seed=seed, tolerance=tolerance
        ),
        tune=TuneSettings(tune_seconds, max_memory, seed=seed) if tune else None,
        plan=plan,
        timelines=trace is not None,
        command=("msplit", *sys.argv[1:]),
    )
    if bisect:
        ctx.exit(_bisect(flat, request, style))
    comparing.refuse(then, request, beside.limit, flat)
    if several:
        swept = comparing.sweep(flat, request, batches or ())
        ctx.exit(comparing.report(flat, swept, beside, then, style, force=force))
    with progress.reporting() as show:
        found = bench(flat, request, progress=show)
    written: list[str] = []
    if found.tuned is not None and not found.result.failed:
        written = write(flat, found.tuned, output=output, plan=plan_out, force=force, workload=found.workload)
    if trace is not None and found.traced:  # what gives wrong outputs is not traced
        from msplit.report import timelines

        timelines.write(flat, found, trace, force=force)
        written.append(
            f"Written: {trace}, one measured step of {plural(len(found.traced), 'variant')}, for https://ui.perfetto.dev."
        )
    shown = comparing.Shown(
        benchmark.document(flat, found, written), benchmark.payload(flat, found, written), (found,), {}
    )
    ctx.exit(comparing.show(flat, shown, then, beside.limit, style))


def _bisect(flat: FlatGraph, request: BenchRequest, style: str) -> int:
    """Finds the node at which outputs begin to differ. Exit code 1 where there is one."""
    from msplit.measure import bisect
    from msplit.report import bisect as report

    with progress.reporting() as show:
        found = bisect.bisect(flat, request, progress=show)
    options.show(style, "bisect", report.document(flat, found), lambda: report.payload(flat, found))
    return int(found.culprit is not None or found.drift is not None)
