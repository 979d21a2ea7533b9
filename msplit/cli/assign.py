"""`msplit assign`: stream ids by rules, and the annotated model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from msplit.cli import options
from msplit.cli.keys import option, together
from msplit.progress import telling

if TYPE_CHECKING:
    from msplit.api import Assigned
    from msplit.flatten.flat import FlatGraph
    from msplit.report.assignment import Outputs


EMITS = ("stream-file", "placement", "json", "yaml", "plan")
"""What `msplit.api.EMITS` lists, here without importing it."""


EVERY = "*"
"""What --explain is given without a node: no node has this name."""


@dataclass(frozen=True)
class Rules(options.Rules):
    """What decides the ids."""

    ruleset: str = option(
        "--rules",
        default="auto",
        shell_complete=options.complete_rules,
        help="A rules file, or the name of a shipped rule set.",
    )
    streams: int | None = option(type=options.STREAMS, help="Number of streams (default: what the rules say).")
    wrap: bool = option(help="Take ids modulo the number of streams instead of refusing those out of range.")
    keep_ids: bool | None = option(
        "--keep-ids/--no-keep-ids",
        default=None,
        help="Whether the rule `manual` keeps ids that are on the model: all, or none (default: those that msplit did not write).",
    )


@dataclass(frozen=True)
class Asked:
    """What is to be told of them."""

    diff: bool = option(help="List the nodes whose stream changes.")
    explain: str | None = option(
        metavar="[NODE]",
        is_flag=False,
        flag_value=EVERY,
        help="Say which rule decided this node's stream, and why; without a NODE, the stream and device of every node.",
    )
    compare: bool = option(help="Show all ways to choose streams side by side: simulated and, on a GPU, measured.")
    no_measure: bool = option(help="--compare only simulates: the model is not executed on a GPU either.")


@dataclass(frozen=True)
class Places:
    """Where what is written goes."""

    output: Path | None = option("-o", "--output", help="Where to write the annotated model.")
    dry_run: bool = option(help="Assign and report, write nothing.")
    emits: Sequence[tuple[str, Path]] = option(
        "--emit",
        type=(click.Choice(EMITS), options.PATH),
        multiple=True,
        metavar="KIND PATH",
        help=f"Also write the assignment as KIND: {', '.join(EMITS)}. Repeatable.",
    )
    trace: Path | None = option(help="Write the simulated timeline, for Perfetto or chrome://tracing.")
    force: bool = option(help="Replace existing outputs.")

    def check(self, flat: FlatGraph) -> None:
        """Raises a WriteError where something could not be written."""
        from msplit import api

        paths = [path for path in (self.output, self.trace, *(path for _, path in self.emits)) if path is not None]
        if not self.dry_run:
            api.check_places(flat, paths, force=self.force)

    def write(self, assigned: Assigned) -> Outputs:
        """Writes what was asked for."""
        from msplit import api, formats
        from msplit.report import assignment, trace
        from msplit.schedule.judge import predict

        conflicts = assignment.conflict_warnings(assigned.outcome.conflicts)
        if self.dry_run:
            return assignment.Outputs(unwritten="--dry-run", warnings=conflicts)
        flat, costs = assigned.flat, assigned.costs
        found = assignment.Outputs(warnings=conflicts)
        if self.output is not None:
            report, _ = api.save(flat, assigned, self.output, force=self.force)
            found.written.append(f"Written: {report.path}, {assignment.counted(report, len(assigned.changed))}.")
            found.warnings.extend(report.warnings)
            found.notes.extend(report.notes)
        for kind, path in self.emits:
            api.emit(assigned, kind, path, force=self.force)
            about = assignment.about_plan(assigned) if kind == "plan" else ""
            found.written.append(f"Written: {path}, as {kind}{about}.")
        if self.trace is not None:
            prediction = predict(flat, costs, assigned.ids)
            timeline = trace.from_simulation(flat, costs, prediction, assigned.outcome.assignment)
            formats.write_bytes_atomic(self.trace, trace.to_bytes(timeline), force=self.force)
            found.written.append(f"Written: {self.trace}, the simulated timeline.")
        return found


@click.command()
@options.model_argument
@options.format_option
@together(choice=options.Choice, rules=Rules, asked=Asked, places=Places, work=options.Work)
def command(
    model: Path,
    choice: options.Choice,
    rules: Rules,
    asked: Asked,
    places: Places,
    work: options.Work,
    style: str,
) -> None:
    """Assign a stream id to every node of MODEL by rules. Only `_stream_id` changes.

    The model is not executed, unless --compare finds a GPU or the rules say `kernels: best`.
    """
    if asked.compare and (asked.explain or asked.diff):
        raise click.UsageError(
            f"--compare and {'--explain' if asked.explain else '--diff'} are two questions: ask one at a time."
        )
    outputs = places.output or places.dry_run or places.emits or places.trace
    if not (outputs or asked.explain or asked.diff or asked.compare):
        raise click.UsageError("nothing to write: give -o OUT, or --dry-run to see what would be assigned.")
    from msplit import api
    from msplit.report import assignment

    given = work.arguments()
    flat = choice.load(model)
    places.check(flat)
    if asked.compare:
        with telling() as tell:
            compared = api.compare(
                flat, streams=rules.streams, ruleset=rules.ruleset, measure=not asked.no_measure, tell=tell, **given
            )
    assigned = api.assign(flat, rules.ruleset, streams=rules.streams, wrap=rules.wrap, keep_ids=rules.keep_ids, **given)
    one = asked.explain if asked.explain != EVERY else None
    if one is not None:
        explained = assignment.explain(assigned, one)
    found = places.write(assigned)
    if asked.compare:
        from msplit.report import assignment

        said = [*found.warnings, *found.notes, *found.written]
        document, payload = (
            assignment.candidates_document(compared, said),
            partial(assignment.candidates_payload, compared, said),
        )
    elif one is not None:
        document = replace(explained, warnings=found.warnings, notes=[*found.notes, *found.written])
        payload = partial(assignment.explanation, assigned, one, found)
    else:
        listed = {"diff": asked.diff, "every": asked.explain is not None}
        document = assignment.document(assigned, found, **listed)
        payload = partial(assignment.payload, assigned, found, **listed)
    options.show(style, "assign", document, payload)
