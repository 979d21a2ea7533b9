"""`msplit tune`: search for the fastest plan by measuring, and write it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from msplit.cli import baseline_options, options
from msplit.cli.keys import option, together
from msplit.cli.measuring import Measured, Run
from msplit.progress import telling


@dataclass(frozen=True)
class Search(options.Search):
    """The search for a plan, and where it goes."""

    output: Path | None = option(
        "-o", "--output", type=options.PATH, help="Write the tuned streams as an annotated model."
    )
    plan_out: Path | None = option(
        "--plan-out", type=options.PATH, help="Write the tuned plan: streams, order and waits."
    )


@click.command()
@options.model_argument
@click.option("--force", is_flag=True, help="Replace existing outputs.")
@options.format_option
@together(choice=options.Choice, run=Run, work=options.RecordedWork, measured=Measured, search=Search)
def command(
    model: Path,
    choice: options.Choice,
    run: Run,
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
        found = bench_for(flat, request, progress=tell)
    written: list[str] = []
    if found.tuned is not None and not found.result.failed:
        written = write(
            flat, found.tuned, output=search.output, plan=search.plan_out, force=force, workload=found.workload
        )
    document, payload = benchmark.document(flat, found, written), benchmark.payload(flat, found, written)
    return baseline_options.show(flat, baseline_options.Shown(document, payload, (found,), {}), None, None, style)
