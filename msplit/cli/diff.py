"""`msplit diff`: what changed between two annotated models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from msplit.cli import options
from msplit.cli.keys import option, together


@dataclass(frozen=True)
class Rules(options.Rules):
    """Rules behind the new ids."""

    ruleset: str | None = option(
        "--rules",
        shell_complete=options.complete_rules,
        help="Rules file or rule set behind the new ids: says which rule moved a node.",
    )


@click.command()
@click.argument("old", type=options.PATH)
@click.argument("model", metavar="NEW", type=options.PATH)
@click.option("--all", "everything", is_flag=True, help="List every node, not only the costliest.")
@click.option("--exit-code", is_flag=True, help="Exit with 1 if anything changed.")
@options.format_option
@together(choice=options.Choice, rules=Rules, work=options.RecordedWork)
def command(
    old: Path,
    model: Path,
    choice: options.Choice,
    rules: Rules,
    everything: bool,
    exit_code: bool,
    work: options.RecordedWork,
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
