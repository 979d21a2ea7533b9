"""`msplit analyze`: what is independent in a model, and what streams could gain."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from msplit.cli import options

VIEWS = ("summary", "branches", "embeddings", "regions", "nodes", "all")


@click.command()
@options.model_options
@click.option(
    "--show", "views", type=click.Choice(VIEWS), multiple=True, help="What to show (default: summary). Repeatable."
)
@click.option("--function", help="Look inside this function, such as the body of a While, instead of at the model.")
@click.option("--engine", type=click.Choice(["cuda"]), help="Also tell which ops this engine can run.")
@options.cost_options
@options.profile_option
@options.format_option
def command(
    model: Path,
    tags: Sequence[str] | None,
    signature: str | None,
    inputs: Sequence[str] | None,
    outputs: Sequence[str] | None,
    views: Sequence[str],
    function: str | None,
    engine: str | None,
    batch: int | None,
    shapes: Sequence[tuple[str, tuple[int, ...]]],
    gpu: str,
    profile_path: Path | None,
    style: str,
) -> None:
    """Analyze MODEL: what is independent in it, and what streams could gain. The model is not executed."""
    from msplit import api
    from msplit.report import analysis

    measured = options.profile(profile_path)
    flat = options.load(model, tags, signature, inputs, outputs, function)
    found = api.analyze(flat, batch=batch, shapes=dict(shapes), gpu=gpu, profile=measured)
    coverage = None
    if engine == "cuda":
        from msplit.engines.cuda.coverage import cover

        coverage = cover(flat, found.shapes, build=True)
    chosen = tuple(dict.fromkeys(views)) or ("summary",)
    following: Sequence[str] = ()
    if function is None:
        given: dict[str, Any] = {
            "--tag": tags,
            "--signature": signature,
            "--inputs": inputs,
            "--outputs": outputs,
            "--batch": batch,
            "--shape": tuple(shapes),
            "--gpu": gpu if options.was_given("gpu") else None,
            "--profile": profile_path,
        }
        judged = found.judgement
        if judged.helps:
            given = {"--rules": "auto", "--streams": judged.streams, **given, "-o": options.annotated(model)}
            following = options.command_line("assign", model, given)
        elif judged.kind != "nothing":
            given.pop("--gpu")  # what runs it is its GPU
            following = options.command_line("bench", model, given)
    options.show(
        style,
        "analyze",
        analysis.document(found, chosen, coverage, following),
        lambda: analysis.payload(found, chosen, coverage, following),
    )
