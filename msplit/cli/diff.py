"""`msplit diff`: what changed between two annotated models."""

from __future__ import annotations

from pathlib import Path

import click

from msplit.cli import options


@click.command()
@click.argument("old", type=options.PATH)
@click.argument("model", metavar="NEW", type=options.PATH)
@options.choice_options
@click.option(
    "--rules",
    "ruleset",
    shell_complete=options.complete_rules,
    help="Rules file or rule set behind the new ids: says which rule moved a node.",
)
@click.option("--streams", type=options.STREAMS, help="Number of streams of the rules, instead of what they say.")
@click.option("--all", "everything", is_flag=True, help="List every node, not only the costliest.")
@click.option("--exit-code", is_flag=True, help="Exit with 1 if anything changed.")
@options.basis_options
@options.format_option
@options.together(rules=options.Rules)
def command(
    old: Path,
    model: Path,
    choice: options.Choice,
    rules: options.Rules,
    everything: bool,
    exit_code: bool,
    work: options.Work,
    style: str,
) -> int:
    """Compare the stream ids of two models, OLD and NEW: what moved, why, and what it does to the plan.

    Nodes are matched by name. Neither model is executed. What is not given is as `msplit assign` has recorded it with NEW.
    """
    from msplit import rules as rule_sets
    from msplit.assignment.defaults import Given, settle
    from msplit.assignment.model import price
    from msplit.report import difference
    from msplit.report.compare import Side, compare

    chosen = rule_sets.load(rules.ruleset, streams=rules.streams) if rules.ruleset else None
    given = Given(chosen, rules.streams, **work.arguments())
    before, now = (choice.load(path, record=work.record) for path in (old, model))
    basis = settle(now, given).of_both(before)
    old_side, new_side = (Side.of(flat, price(flat, basis.workload)[1]) for flat in (before, now))
    found = compare(old_side, new_side, basis.ruleset)
    document = difference.document(found, None if everything else difference.SHOWN, judged_with=basis.words())
    options.show(style, "diff", document, lambda: difference.payload(found, judged_with=basis.words()))
    return int(exit_code and not found.same)
