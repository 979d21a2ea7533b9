"""`msplit diff`: what changed between two annotated models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from msplit.cli import options


@click.command()
@click.argument("old", type=click.Path(path_type=Path))
@options.model_options
@click.option("--rules", "ruleset", help="Rules file or rule set behind the new ids: says which rule moved a node.")
@click.option("--streams", type=click.IntRange(1), help="Number of streams of the rules, instead of what they say.")
@click.option("--all", "everything", is_flag=True, help="List every node, not only the costliest.")
@click.option("--exit-code", is_flag=True, help="Exit with 1 if anything changed.")
@options.cost_options
@options.format_option
def command(
    old: Path,
    model: Path,
    tags: Sequence[str] | None,
    signature: str | None,
    inputs: Sequence[str] | None,
    outputs: Sequence[str] | None,
    ruleset: str | None,
    streams: int | None,
    everything: bool,
    exit_code: bool,
    batch: int | None,
    shapes: Sequence[tuple[str, tuple[int, ...]]],
    gpu: str,
    style: str,
) -> int:
    """Compare the stream ids of two models, OLD and NEW: what moved, why, and what it does to the plan.

    Nodes are matched by name. Neither model is executed.
    """
    from msplit import api, rules
    from msplit.report import difference
    from msplit.report.compare import Side, compare

    chosen = rules.load(ruleset, streams=streams) if ruleset else None

    def side(path: Path) -> Side:
        flat = options.load(path, tags, signature, inputs, outputs)
        return Side.of(flat, api.price(flat, batch=batch, shapes=dict(shapes), gpu=gpu)[1])

    found = compare(side(old), side(model), chosen)
    document = difference.document(found, None if everything else difference.SHOWN)
    options.show(style, "diff", document, lambda: difference.payload(found))
    return int(exit_code and not found.same)


for _parameter in command.params:
    if _parameter.name == "model":
        _parameter.metavar = "NEW"
