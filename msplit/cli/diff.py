"""`msplit diff`: what changed between two annotated models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from msplit.cli import options


@click.command()
@click.argument("old", type=click.Path(path_type=Path))
@options.model_options
@click.option(
    "--rules",
    "ruleset",
    shell_complete=options.complete_rules,
    help="Rules file or rule set behind the new ids: says which rule moved a node.",
)
@click.option("--streams", type=options.STREAMS, help="Number of streams of the rules, instead of what they say.")
@click.option("--all", "everything", is_flag=True, help="List every node, not only the costliest.")
@click.option("--exit-code", is_flag=True, help="Exit with 1 if anything changed.")
@options.size_options
@options.gpu_option(default=None)
@options.profile_option
@options.record_option
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
    gpu: str | None,
    profile_path: Path | None,
    no_record: bool,
    style: str,
) -> int:
    """Compare the stream ids of two models, OLD and NEW: what moved, why, and what it does to the plan.

    Nodes are matched by name. Neither model is executed. What is not given is as `msplit assign` has recorded it with NEW.
    """
    from msplit import rules
    from msplit.decide.basis import Given, settle
    from msplit.decide.model import price
    from msplit.report import difference
    from msplit.report.compare import Side, compare

    chosen = rules.load(ruleset, streams=streams) if ruleset else None
    given = Given(chosen, streams, batch, dict(shapes), gpu, options.profile(profile_path))
    before, now = (options.load(path, tags, signature, inputs, outputs, record=not no_record) for path in (old, model))
    basis = settle(now, given)
    basis = basis.of_both(before)
    old_side, new_side = (Side.of(flat, price(flat, basis.workload)[1]) for flat in (before, now))
    found = compare(old_side, new_side, basis.ruleset)
    document = difference.document(found, None if everything else difference.SHOWN, judged_with=basis.words())
    options.show(style, "diff", document, lambda: difference.payload(found, judged_with=basis.words()))
    return int(exit_code and not found.same)


for _parameter in command.params:
    if _parameter.name == "model":
        _parameter.metavar = "NEW"
