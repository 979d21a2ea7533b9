"""`msplit report`: one HTML file to look at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click

from msplit.cli import options
from msplit.cli.keys import together
from msplit.progress import phase


@click.command()
@options.model_argument
@click.option("-o", "--output", type=options.PATH, required=True, help="The HTML file to write.")
@click.option(
    "--no-candidates", is_flag=True, help="Do not simulate other assignments, which takes long on huge graphs."
)
@click.option(
    "--bench",
    "bench_paths",
    type=options.PATH,
    multiple=True,
    help="What `bench` measured: its result (--format json) or its timeline (--trace). Repeatable.",
)
@click.option("--force", is_flag=True, help="Replace an existing output.")
@together(choice=options.Choice, rules=options.Rules, work=options.RecordedWork)
def command(
    model: Path,
    choice: options.Choice,
    rules: options.Rules,
    output: Path,
    no_candidates: bool,
    bench_paths: Sequence[Path],
    force: bool,
    work: options.RecordedWork,
) -> None:
    """Write a report of MODEL: its graph coloured by stream, the simulated timeline, other assignments, findings.

    The file is self-contained and needs no network. The model is not executed. What is not given is as `msplit assign` has recorded it
    with the model.
    """
    from msplit import formats
    from msplit import rules as rule_sets
    from msplit.assignment.assignment import check_places
    from msplit.assignment.defaults import Given, settle
    from msplit.assignment.model import price
    from msplit.cost.gpus import DEFAULT_GPU
    from msplit.report.html import build, runs
    from msplit.report.html.page import render

    given = work.arguments()
    loaded = None if rules.ruleset is None else rule_sets.load(rules.ruleset, streams=rules.streams)
    flat = choice.load(model, record=work.record)
    check_places(flat, [output], force=force)
    basis = settle(flat, Given(loaded, rules.streams, **given))
    settled = basis.workload
    sizes, costs = price(flat, settled)
    further = {
        **choice.further(),
        "--batch": settled.batch,
        "--shape": tuple(settled.shapes.items()),
        "--costs": () if settled.gpu == DEFAULT_GPU else options.pairs(gpu=(settled.gpu,)),
    }
    measured = runs.measured(flat, bench_paths)
    page = build.page(
        flat,
        costs,
        ruleset=rules.ruleset,
        streams=rules.streams,
        candidates=not no_candidates,
        shapes=sizes,
        options=" ".join(options.command_line("assign", model, further)[1:]),
        basis=basis,
    )
    with phase("drawing"):
        text = render(replace(page, measured=measured)).encode()
    formats.write_bytes_atomic(output, text, force=force)
    found = page.prediction
    options.note(f"{output}: {len(flat):,} nodes, {len(found.lanes)} streams, predicted {found.makespan_us:.1f} µs")
