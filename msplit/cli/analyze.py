"""`msplit analyze`: what is independent in a model, and what streams could gain.

`msplit assign`: stream ids by rules, and the annotated model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from msplit.cli import options, output
from msplit.cli.keys import key, option, together
from msplit.cli.many import each, jobs_option, models_in
from msplit.progress import telling

if TYPE_CHECKING:
    from msplit.api import Assigned
    from msplit.flatten.flat import FlatGraph
    from msplit.report.assignment import Outputs
    from msplit.report.document import Document


DEVICE_GPUS = 2
"""GPUs of the shipped rule set `device`."""

VIEWS = ("summary", "branches", "embeddings", "regions", "nodes", "all")


@dataclass(frozen=True)
class Inside(options.Choice):
    """The choices that a model's file may leave open, and a part of it."""

    function: str | None = key(
        "--part", "Look inside this function, such as the body of a While, instead of at the model."
    )


@dataclass(frozen=True)
class Question:
    """What is asked of a model, or of each of several."""

    views: Sequence[str] = option(
        "--show", type=click.Choice(VIEWS), multiple=True, help="What to show (default: summary). Repeatable."
    )
    engine: str | None = option(type=click.Choice(["cuda"]), help="Also tell which ops this engine can run.")
    gpus: int | None = option(
        type=click.IntRange(2, 64),
        metavar="N",
        help="Also tell whether to split the model over N such GPUs, by the simulator.",
    )
    shared: Sequence[str] = option(
        multiple=True, metavar="PATTERN", help="What these inputs have to themselves. Repeatable."
    )


@click.command()
@click.argument("models", metavar="MODEL…", type=options.PATH, nargs=-1, required=True)
@jobs_option
@options.format_option
@together
def command(
    models: tuple[Path, ...], choice: Inside, question: Question, work: options.Work, jobs: int | None, style: str
) -> int:
    """Analyze MODEL: what is independent in it, and what streams could gain. Of several, or of a folder of models: a row for each. No model
    is executed.
    """
    from msplit.report import analysis

    models = models_in(models)
    given = {name for name in ("gpu",) if options.was_given(name)}
    if len(models) == 1:
        options.show(style, "analyze", *_look(choice, question, work, given, models[0]))
        return 0
    looked = each("analyze", partial(_payload, choice, question, work, given), models, jobs)
    errors = {str(model): why for model, (_, why) in zip(models, looked, strict=True) if why}
    found = [payload for payload, _ in looked if payload is not None]
    options.show(style, "analyze", analysis.overview(found, errors), lambda: analysis.overview_payload(found, errors))
    for why in errors.values():
        output.tell(f"error: {why}")
    return 2 if errors else 0


def _payload(choice: Inside, question: Question, work: options.Work, said: Set[str], model: Path) -> Any:
    """The analysis of a model as plain data, as it would be printed."""
    import json

    from msplit.report.document import dumps

    return json.loads(dumps("analyze", _look(choice, question, work, said, model)[1]()))


def _look(
    choice: Inside, question: Question, work: options.Work, said: Set[str], model: Path
) -> tuple[Document, Callable[[], Mapping[str, Any]]]:
    """The analysis of a model, as a document and, when asked for, as data.

    Args:
        said: Parameters of `work` that were given.
    """
    from msplit import api
    from msplit.analysis.shared import repeated_work, shared_work
    from msplit.opset.traits import written
    from msplit.report import analysis

    costing, engine, gpus, shared = work.arguments(), question.engine, question.gpus, question.shared
    flat = choice.load(model, choice.function)
    found = api.analyze(flat, **costing)
    coverage = None
    loose, trains = analysis.loose_inputs(found), any(map(written, flat.graph.ops))
    if engine == "cuda" or (found.guesses.ops and not (loose or trains)):
        from msplit.engines.cuda.coverage import by_values, cover

        # Whether its steps can be captured decides if a build is what to run next.
        if engine == "cuda" or by_values(flat, found.guesses.ops):
            coverage = cover(flat, found.shapes, build=True)
            if engine is None and not coverage.uncaptured:
                coverage = None  # nobody asked
    split = None if gpus is None else found.on_gpus(gpus)
    once = shared_work(found.flat, found.costs, shared, dict(work.shapes)) if shared or (work.batch or 1) > 1 else None
    repeated = repeated_work(found.flat, found.costs, found.shapes)
    chosen = tuple(dict.fromkeys(question.views)) or ("summary",)
    following: list[Sequence[str]] = []
    if choice.function is None:
        gpu = (work.gpu,) if "gpu" in said else None
        profile = None if work.profile_path is None else (work.profile_path,)
        given: dict[str, Any] = {
            **choice.further(),
            "--batch": work.batch,
            "--shape": work.shapes,
            "--costs": options.pairs(gpu=gpu, profile=profile),
        }
        judged = found.judgement
        # in the folder where the user is, beside nothing that is there
        name = f"{model.stem}.streams{model.suffix}" if model.suffix not in ("", ".keras") else f"{model.stem}.streams"
        if judged.kind != "nothing":
            launched = "capture=no" if (loose if coverage is None else coverage.uncaptured) else None
            named = {"--shared": [] if once is None or once.mixes else [*shared], "--cuda": launched}
            runs = {**given, "--costs": options.pairs(profile=profile), **named}  # what runs it is its GPU
            following.append(options.command_line("bench", model, runs))
            shares = not (loose or trains) and (coverage is None or not coverage.reasons)
            if shares and coverage is not None and (coverage.kept_out or launched):  # no build holds that
                if not (choice.inputs or choice.outputs):
                    kept = {"--part": given["--part"], "--shape": work.shapes, **named}
                    following.append(options.command_line("serve", model, kept))
            elif shares:
                runs["-o"] = built = Path(f"{model.stem}.build")
                following += [options.command_line("build", model, runs), options.command_line("serve", built, {})]
        if split is not None and split.helps:
            if gpus == DEVICE_GPUS:  # another number stands in a rules file of the user's own
                following.append(options.command_line("assign", model, {"--rules": "device", **given, "-o": name}))
        elif judged.helps:
            given = {"--rules": "auto", "--streams": judged.streams, **given, "-o": name}
            following.append(options.command_line("assign", model, given))
    return (
        analysis.document(found, chosen, coverage, following, split, (once, repeated), loose),
        lambda: analysis.payload(found, chosen, coverage, following, split, (once, repeated)),
    )


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
@together
def assign_command(
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
