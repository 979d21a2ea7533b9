"""`msplit assign`: stream ids by rules, and the annotated model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from msplit.cli import options, progress

if TYPE_CHECKING:
    from msplit.api import Assigned


EMITS = ("stream-file", "placement", "json", "yaml", "plan")
"""What `msplit.api.EMITS` lists, here without importing it."""


@click.command()
@options.model_options
@click.option(
    "--rules",
    "ruleset",
    default="auto",
    show_default=True,
    shell_complete=options.complete_rules,
    help="A rules file, or the name of a shipped rule set.",
)
@click.option("--streams", type=options.STREAMS, help="Number of streams (default: what the rules say).")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Where to write the annotated model.")
@click.option("--dry-run", is_flag=True, help="Assign and report, write nothing.")
@click.option("--diff", is_flag=True, help="List the nodes whose stream changes.")
@click.option("--explain", metavar="NODE", help="Say which rule decided this node's stream, and why.")
@click.option(
    "--compare", is_flag=True, help="Show all ways to choose streams side by side: simulated and, on a GPU, measured."
)
@click.option("--no-measure", is_flag=True, help="--compare only simulates: the model is not executed on a GPU either.")
@click.option(
    "--emit",
    "emits",
    type=(click.Choice(EMITS), click.Path(path_type=Path)),
    multiple=True,
    metavar="KIND PATH",
    help=f"Also write the assignment as KIND: {', '.join(EMITS)}. Repeatable.",
)
@click.option(
    "--trace", type=click.Path(path_type=Path), help="Write the simulated timeline, for Perfetto or chrome://tracing."
)
@click.option(
    "--wrap", is_flag=True, help="Take ids modulo the number of streams instead of refusing those out of range."
)
@click.option(
    "--keep-ids/--no-keep-ids",
    default=None,
    help="Whether the rule `manual` keeps ids that are on the model: all, or none (default: those that msplit did not write).",
)
@click.option("--force", is_flag=True, help="Replace existing outputs.")
@options.cost_options
@options.profile_option
@options.format_option
def command(
    model: Path,
    tags: Sequence[str] | None,
    signature: str | None,
    inputs: Sequence[str] | None,
    outputs: Sequence[str] | None,
    ruleset: str,
    streams: int | None,
    output: Path | None,
    dry_run: bool,
    diff: bool,
    explain: str | None,
    compare: bool,
    no_measure: bool,
    emits: Sequence[tuple[str, Path]],
    trace: Path | None,
    wrap: bool,
    keep_ids: bool | None,
    force: bool,
    batch: int | None,
    shapes: Sequence[tuple[str, tuple[int, ...]]],
    gpu: str,
    profile_path: Path | None,
    style: str,
) -> None:
    """Assign a stream id to every node of MODEL by rules. Only `_stream_id` changes.

    The model is not executed, unless --compare finds a GPU or the rules say `kernels: best`.
    """
    if compare and (explain or diff):
        raise click.UsageError(
            f"--compare and {'--explain' if explain else '--diff'} are two questions: ask one at a time."
        )
    if output is None and not (dry_run or explain or emits or diff or trace or compare):
        raise click.UsageError("nothing to write: give -o OUT, or --dry-run to see what would be assigned.")
    from msplit import api
    from msplit.report import assignment

    measured = options.profile(profile_path)
    flat = options.load(model, tags, signature, inputs, outputs)
    places = [path for path in (output, trace, *(path for _, path in emits)) if path is not None]
    if not dry_run:
        api.check_places(flat, places, force=force)
    compared = None
    if compare:
        with progress.reporting() as tell:
            compared = api.compare(
                flat,
                streams=streams,
                ruleset=ruleset,
                batch=batch,
                shapes=dict(shapes),
                gpu=gpu,
                profile=measured,
                measure=not no_measure,
                tell=tell,
            )
    assigned = api.assign(
        flat,
        ruleset,
        streams=streams,
        wrap=wrap,
        batch=batch,
        shapes=dict(shapes),
        gpu=gpu,
        profile=measured,
        keep_ids=keep_ids,
    )
    explained = None if explain is None else assignment.explain(assigned, explain)
    written: list[str] = []
    notes: list[str] = []
    warnings: list[str] = []
    if not dry_run:
        written, notes, warnings = _write(assigned, output, emits, trace, force=force)
    if compared is not None:
        from msplit.report import candidates

        shown, found = compared, [*warnings, *notes, *written]
        options.show(style, "assign", candidates.document(shown, found), lambda: candidates.payload(shown, found))
        return
    if explained is not None:
        options.show(
            style,
            "assign",
            replace(explained, warnings=warnings, notes=[*notes, *written]),
            lambda: {**assignment.explanation(assigned, str(explain)), "written": written, "notes": notes},
        )
        return
    options.show(
        style,
        "assign",
        assignment.document(
            assigned,
            written=written,
            unwritten="--dry-run" if dry_run else "there is no -o OUT",
            notes=notes,
            warnings=warnings,
            diff=diff,
        ),
        lambda: assignment.payload(assigned, written=written, notes=notes, warnings=warnings, diff=diff),
    )


def _write(
    assigned: Assigned, output: Path | None, emits: Sequence[tuple[str, Path]], trace: Path | None, *, force: bool
) -> tuple[list[str], list[str], list[str]]:
    """Writes what was asked for.

    Returns:
        What was written, notes on it, and warnings.
    """
    from msplit import api
    from msplit.report import assignment

    written: list[str] = []
    notes: list[str] = []
    warnings: list[str] = []
    if output is not None:
        report, conflicts = api.save(assigned.flat, assigned, output, force=force)
        written.append(f"Written: {report.path}, {assignment.counted(report, len(assigned.changed))}.")
        warnings += [*report.warnings, *assignment.conflict_warnings(conflicts)]
        notes += report.notes
    for kind, path in emits:
        api.emit(assigned, kind, path, force=force)
        written.append(f"Written: {path}, as {kind}{assignment.about_plan(assigned) if kind == 'plan' else ''}.")
    if trace is not None:
        _write_trace(assigned, trace, force)
        written.append(f"Written: {trace}, the simulated timeline.")
    return written, notes, warnings


def _write_trace(assigned: Assigned, path: Path, force: bool) -> None:
    from msplit import formats
    from msplit.report import trace
    from msplit.schedule.predict import predict

    prediction = predict(assigned.flat, assigned.costs, assigned.ids)
    timeline = trace.from_simulation(assigned.flat, assigned.costs, prediction, assigned.outcome.assignment)
    formats.write_bytes_atomic(path, trace.to_bytes(timeline), force=force)
