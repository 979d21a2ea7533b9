"""`msplit report`: one HTML file to look at."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from msplit.cli import options
from msplit.progress import phase

if TYPE_CHECKING:
    from msplit.report.html import Page


@click.command()
@options.model_options
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="The HTML file to write.")
@click.option(
    "--rules",
    "ruleset",
    shell_complete=options.complete_rules,
    help="Rules file or rule set that gives the ids (default: the model's own ids; for a model without any, what fits it).",
)
@click.option("--streams", type=options.STREAMS, help="Number of streams of the rules, instead of what they say.")
@click.option(
    "--no-candidates", is_flag=True, help="Do not simulate other assignments, which takes long on huge graphs."
)
@click.option(
    "--bench",
    "bench_paths",
    type=click.Path(path_type=Path),
    multiple=True,
    help="What `bench` measured: its result (--format json) or its timeline (--trace). Repeatable.",
)
@click.option("--force", is_flag=True, help="Replace an existing output.")
@options.size_options
@options.gpu_option(default=None)
@options.profile_option
@options.record_option
def command(
    model: Path,
    tags: Sequence[str] | None,
    signature: str | None,
    inputs: Sequence[str] | None,
    outputs: Sequence[str] | None,
    output: Path,
    ruleset: str | None,
    streams: int | None,
    no_candidates: bool,
    bench_paths: Sequence[Path],
    force: bool,
    batch: int | None,
    shapes: Sequence[tuple[str, tuple[int, ...]]],
    gpu: str | None,
    profile_path: Path | None,
    no_record: bool,
) -> None:
    """Write a report of MODEL: its graph coloured by stream, the simulated timeline, other assignments, findings.

    The file is self-contained and needs no network. The model is not executed. What is not given is as `msplit assign` has recorded it
    with the model.
    """
    from msplit import formats
    from msplit import rules as rule_sets
    from msplit.cost import DEFAULT_GPU
    from msplit.decide.basis import Given, settle
    from msplit.decide.export import check_places
    from msplit.decide.model import price
    from msplit.report.html import build, render, runs

    profile = options.profile(profile_path)
    loaded = None if ruleset is None else rule_sets.load(ruleset, streams=streams)
    flat = options.load(model, tags, signature, inputs, outputs, record=not no_record)
    check_places(flat, [output], force=force)
    basis = settle(flat, Given(loaded, streams, batch, dict(shapes), gpu, profile))
    work = basis.workload
    sizes, costs = price(flat, work)
    given = {"--tag": tags, "--signature": signature, "--inputs": inputs, "--outputs": outputs, "--batch": work.batch}
    chosen = {"--shape": tuple(work.shapes.items()), "--gpu": None if work.gpu == DEFAULT_GPU else work.gpu}
    page: Page = build.page(
        flat,
        costs,
        ruleset=ruleset,
        streams=streams,
        candidates=not no_candidates,
        warnings=sizes.assumed,
        shapes=sizes,
        options=" ".join(options.command_line("assign", model, {**given, **chosen})[1:]),
        measured=runs.measured(flat, bench_paths),
        basis=basis,
    )
    with phase("drawing"):
        content = render(page).encode()
    formats.write_bytes_atomic(output, content, force=force)
    found = page.prediction
    options.note(f"{output}: {len(flat):,} nodes, {len(found.lanes)} streams, predicted {found.makespan_us:.1f} µs")
