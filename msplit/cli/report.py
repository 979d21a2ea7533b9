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
    help="Rules file or rule set that gives the ids (default: the model's own ids; for a model without any, what fits it).",
)
@click.option("--streams", type=click.IntRange(1), help="Number of streams of the rules, instead of what they say.")
@click.option(
    "--no-candidates", is_flag=True, help="Do not simulate other assignments, which takes long on huge graphs."
)
@click.option("--force", is_flag=True, help="Replace an existing output.")
@options.cost_options
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
    force: bool,
    batch: int | None,
    shapes: Sequence[tuple[str, tuple[int, ...]]],
    gpu: str,
) -> None:
    """Write a report of MODEL: its graph coloured by stream, the simulated timeline, other assignments, findings.

    The file is self-contained and needs no network. The model is not executed.
    """
    from msplit import api, formats
    from msplit.report.html import build, render

    flat = options.load(model, tags, signature, inputs, outputs)
    sizes, costs = api.price(flat, batch=batch, shapes=dict(shapes), gpu=gpu)
    page: Page = build.page(
        flat, costs, ruleset=ruleset, streams=streams, candidates=not no_candidates, warnings=sizes.assumed
    )
    with phase("drawing"):
        content = render(page).encode()
    formats.write_bytes_atomic(output, content, force=force)
    found = page.prediction
    options.note(f"{output}: {len(flat):,} nodes, {len(found.lanes)} streams, predicted {found.makespan_us:.1f} µs")
