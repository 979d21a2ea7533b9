"""Commands on a model's file that run nothing: `show`, `strip`, `report`, `diff`, `replicate`, `cut`, `rules` and `sample`.

`msplit show`: what is in a model's file.

`msplit strip`: the model without stream ids.

`msplit report`: one HTML file to look at.

`msplit rules`: the shipped rule sets.

`msplit sample`: builds one of the sample models.

`msplit diff`: what changed between two models.

`msplit replicate`: an ensemble, several copies of a model in one graph.

`msplit cut`: a part of a model.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from msplit import progress
from msplit.cli import options, output
from msplit.cli.keys import option, together
from msplit.cli.many import jobs_option, of_folders
from msplit.cli.output import say
from msplit.errors import MsplitError
from msplit.report.document import plural

if TYPE_CHECKING:
    from msplit.flatten.flat import FlatGraph
    from msplit.report.html.page import Page


@click.command()
@click.argument("model", type=options.PATH)
@click.option("--all", "everything", is_flag=True, help="List every function, not only the largest.")
@options.format_option
def show_command(model: Path, everything: bool, style: str) -> None:
    """Show what is in MODEL's file: tag sets, signatures, inputs, outputs, functions. The model is not executed.

    It says what --part and --shape of other commands can name. Of a build it shows what it runs, what for, and how fast that was.
    """
    from msplit import formats
    from msplit.formats import build
    from msplit.report import contents

    if build.is_build(model):
        from msplit.report import contents as report
        from msplit.run.build import Build

        made = Build(model, build.read(model))
        options.show(style, "build", report.build_document(made), lambda: report.build_payload(made))
        return
    found = formats.contents(model)
    options.show(style, "show", contents.document(found, everything=everything), lambda: contents.payload(found))


def _api() -> Any:
    """The library, which takes a while to import."""
    from msplit import api

    return api


@click.command()
@options.model_argument
@click.option("-o", "--output", type=options.PATH, required=True, help="Where to write the model.")
@click.option("--force", is_flag=True, help="Replace an existing output.")
@together
def strip_command(model: Path, choice: options.Choice, output: Path, force: bool) -> None:
    """Write MODEL without any stream id and without the record of its assignment. Nothing else changes.

    The ids of the whole file go, those that were set by hand included. The model is not executed.
    """
    report = _api().strip(choice.load(model), output, force=force)
    say(f"Written: {report.path}, {plural(report.removed, 'stream id')} removed.")
    for note in (*report.notes, *report.warnings):
        options.note(note)


@dataclass(frozen=True)
class Reports:
    """What a report has, and where it goes."""

    output: Path | None = option("-o", "--output", help="The HTML file to write.")
    explorer: Path | None = option("--model-explorer", help="Write files for Google's Model Explorer into this folder.")
    no_candidates: bool = option(help="Do not simulate other assignments, which takes long on huge graphs.")
    benches: Sequence[Path] = option(
        "--bench",
        multiple=True,
        help="What `bench` measured: its result (--format json) or its timeline (--trace). Repeatable.",
    )
    force: bool = option(help="Replace an existing output.")

    def check(self, flat: FlatGraph) -> None:
        """Raises a WriteError where something could not be written."""
        from msplit.report.trace import EXPLORER_FILES

        folder = self.explorer
        files = [folder / name for name in EXPLORER_FILES] if folder and folder.is_dir() else [folder]
        _api().check_places(flat, [place for place in (self.output, *files) if place is not None], force=self.force)

    def write(self, page: Page) -> None:
        """Writes what was asked for."""
        from msplit import formats
        from msplit.formats.atomic import reported
        from msplit.report import trace
        from msplit.report.html.page import render

        if self.output is not None:
            with progress.phase("drawing"):
                text = render(page).encode()
            formats.write_bytes_atomic(self.output, text, force=self.force)
        if self.explorer is not None:
            with reported(self.explorer):
                self.explorer.mkdir(exist_ok=True)
            for name, content in trace.model_explorer(page).items():
                formats.write_bytes_atomic(self.explorer / name, content, force=self.force)


@click.command()
@options.model_argument
@together
def report_command(
    model: Path,
    choice: options.Choice,
    rules: options.Rules,
    wanted: Reports,
    work: options.RecordedWork,
) -> None:
    """Write a report of MODEL: its graph coloured by stream, the simulated timeline, other assignments, findings.

    The file is self-contained and needs no network. The model is not executed. What is not given is as `msplit assign` has recorded it
    with the model.
    """
    from msplit import rules as rule_sets
    from msplit.assignment.model import Given, price, resolve
    from msplit.cost.gpus import DEFAULT_GPU
    from msplit.report.html import page as build
    from msplit.report.html import runs

    if wanted.output is None and wanted.explorer is None:
        raise click.UsageError("-o/--output is missing: the HTML file to write. Or give --model-explorer, a folder.")
    given = work.arguments()
    loaded = None if rules.ruleset is None else rule_sets.load(rules.ruleset, streams=rules.streams)
    flat = choice.load(model, record=work.record)
    wanted.check(flat)
    defaults = resolve(flat, Given(loaded, rules.streams, **given))
    settled = defaults.workload
    sizes, costs = price(flat, settled)
    further = {
        **choice.further(),
        "--batch": settled.batch,
        "--shape": tuple(settled.shapes.items()),
        "--costs": () if settled.gpu == DEFAULT_GPU else options.pairs(gpu=(settled.gpu,)),
    }
    measured = runs.measured(flat, wanted.benches)
    page = build.page(
        flat,
        costs,
        ruleset=rules.ruleset,
        streams=rules.streams,
        candidates=not wanted.no_candidates and wanted.output is not None,
        shapes=sizes,
        options=" ".join(options.command_line("assign", model, further)[1:]),
        defaults=defaults,
    )
    wanted.write(replace(page, measured=measured))
    found, place = page.prediction, wanted.output or wanted.explorer
    options.note(f"{place}: {len(flat):,} nodes, {len(found.lanes)} streams, predicted {found.makespan_us:.1f} µs")


@click.command()
@click.argument("name", required=False, shell_complete=options.complete_rule_set)
def rules_command(name: str | None) -> None:
    """List the shipped rule sets, or print the one called NAME: a file to start your own from."""
    from msplit import rules

    if name is None:
        for known in rules.available():
            output.say(options.folded(f"{known:9}{_about(rules.text_of(known))}", " " * 9))
        return
    output.say(rules.text_of(name).removesuffix("\n"))


def _about(text: str) -> str:
    """The first sentence of the comment that a rules file begins with."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
    return " ".join(line.lstrip("# ") for line in lines).partition(". ")[0].rstrip(".")


@click.command()
@click.argument("name", required=False, shell_complete=options.complete_sample)
@click.option("-o", "--output", type=options.PATH, help="Where to write the frozen GraphDef.")
@click.option(
    "--size", "sizes", multiple=True, metavar="KEY=N", help="A size of the model, such as experts=4. Repeatable."
)
@click.option("--seed", default=0, show_default=True, help="Seed of the weights.")
@click.option("--strip", is_flag=True, help="Leave the weights out; msplit.samples.fill brings them back.")
@click.option("--force", is_flag=True, help="Replace an existing output.")
def sample_command(
    name: str | None, output: Path | None, sizes: tuple[str, ...], seed: int, strip: bool, force: bool
) -> None:
    """Build one of the sample models (needs TensorFlow). Without NAME, lists them with their sizes."""
    from msplit import formats, samples
    from msplit.engines.tensorflow.runtime import quiet_stderr, tensorflow
    from msplit.formats.atomic import check_target

    if name is None:
        for known in samples.names():
            say(f"{known:17}{_listed(samples.sizes(known))}")
        return
    if name not in samples.names():
        raise MsplitError(f"no sample named {name!r}", fix=f"one of: {', '.join(samples.names())}")
    if output is None:
        raise click.UsageError("-o/--output is missing: where to write the model.")
    check_target(output, force=force)
    chosen = dict(_size(text, name, samples.sizes(name)) for text in sizes)
    tensorflow()
    try:
        with progress.phase(f"building {name}"), quiet_stderr():
            sample = samples.build(name, seed=seed, **chosen)
    except (TypeError, ValueError, IndexError) as problem:
        raise MsplitError(
            f"TensorFlow builds no {name} of this size: {problem}", fix=f"sizes are {_listed(samples.sizes(name))}"
        ) from problem
    graph_def = samples.strip(sample.graph_def) if strip else sample.graph_def
    with progress.phase("writing"):
        formats.write_bytes_atomic(output, graph_def.SerializeToString(deterministic=True), force=force)
    options.note(f"{output}: {len(graph_def.node):,} nodes")


def _listed(sizes: Mapping[str, Any]) -> str:
    """Sizes that the command line can set, which are whole numbers."""
    return ", ".join(f"{key}={'any' if value is None else value}" for key, value in _numbers(sizes).items())


def _numbers(sizes: Mapping[str, Any]) -> dict[str, int | None]:
    return {key: value for key, value in sizes.items() if value is None or type(value) is int}


def _size(text: str, name: str, known: Mapping[str, Any]) -> tuple[str, int]:
    key, _, number = text.partition("=")
    if not number.isdecimal() or int(number) < 1:
        raise click.BadParameter(f"{text!r}: write it as KEY=N, with N of 1 or more", param_hint="'--size'")
    if key not in _numbers(known):
        raise MsplitError(f"{name} has no size {key!r}", fix=f"its sizes are {_listed(known)}")
    return key, int(number)


@dataclass(frozen=True)
class Rules(options.Rules):
    """Rules behind the new ids."""

    ruleset: str | None = option(
        "--rules",
        shell_complete=options.complete_rules,
        help="Rules file or rule set behind the new ids: says which rule moved a node.",
    )


@dataclass(frozen=True)
class DiffOutput:
    """How a comparison is told."""

    everything: bool = option("--all", help="List every node, not only the costliest.")
    exit_code: bool = option(help="Exit with 1 if anything changed: nodes by name, their ops or streams.")
    html: Path | None = option(help="Also write one HTML file: both models side by side.")
    force: bool = option(help="Replace an existing HTML file.")


@click.command()
@click.argument("old", type=options.PATH)
@click.argument("model", metavar="NEW", type=options.PATH)
@options.format_option
@jobs_option
@together
@of_folders
def diff_command(
    old: Path,
    model: Path,
    choice: options.Choice,
    rules: Rules,
    told: DiffOutput,
    work: options.RecordedWork,
    style: str,
) -> int:
    """Compare two models, OLD and NEW: which nodes moved to other streams, why, what it does to the plan, and what else changed. Of two
    folders of models: a row for each that is in both.

    For streams, nodes are matched by name; for ops, shapes, attributes, values and cost by structure, so that scopes may be renamed. No
    model is executed. What is not given is as `msplit assign` has recorded it with NEW.
    """
    from msplit import rules as rule_sets
    from msplit.assignment import analysis, changes
    from msplit.assignment.model import Given, price, resolve
    from msplit.formats.atomic import check_target, write_bytes_atomic
    from msplit.report import difference

    if told.html is not None:
        check_target(told.html, force=told.force)
    chosen = rule_sets.load(rules.ruleset, streams=rules.streams) if rules.ruleset else None
    given = Given(chosen, rules.streams, **work.arguments())
    before, now = (choice.load(path, record=work.record) for path in (old, model))
    defaults = resolve(now, given).of_both(before)
    priced = [(flat, *price(flat, defaults.workload)) for flat in (before, now)]
    old_side, new_side = (analysis.Side.of(flat, costs) for flat, _, costs in priced)
    found = analysis.compare(old_side, new_side, defaults.ruleset)
    with progress.phase("comparing"):
        made = changes.structure(*(changes.PricedModel(flat, shapes, costs.time_us) for flat, shapes, costs in priced))
    limit, judged = None if told.everything else difference.SHOWN, defaults.words()
    document = difference.with_structure(difference.document(found, limit, judged_with=judged), made, limit)
    if told.html is not None:
        write_bytes_atomic(told.html, difference.page(document, made).encode(), force=told.force)
    options.show(style, "diff", document, lambda: difference.payload(found, made, judged_with=judged))
    return int(told.exit_code and not found.same)


@dataclass(frozen=True)
class Copies:
    """What to make."""

    times: int | None = option(
        type=click.IntRange(1, 1024), metavar="N", help="Replicas (default: as many as --weights)."
    )
    weights: Sequence[Path] = option(
        multiple=True,
        metavar="PATH",
        help="Weights of a replica, the first one's first: a checkpoint, a SavedModel, or a frozen model like MODEL. Repeatable.",
    )
    combine: str = option(
        type=click.Choice(["mean", "stack"]), default="mean", help="What becomes of the replicas' outputs."
    )
    streams: int | None = option(
        type=options.STREAMS, help="Replica k goes on stream k modulo N (default: one stream each)."
    )
    devices: Sequence[str] = option(
        type=options.NAMES, default=(), help="Replica k goes on the k-th of these, and again: /gpu:0,/gpu:1"
    )


@click.command()
@options.model_argument
@click.option("-o", "--output", type=options.PATH, required=True, help="Where to write the ensemble.")
@click.option("--force", is_flag=True, help="Replace an existing output.")
@together
def replicate_command(model: Path, choice: options.Choice, copies: Copies, output: Path, force: bool) -> None:
    """Write an ensemble: N copies of MODEL in one graph, with the same inputs, their outputs averaged or stacked.

    A GraphDef becomes a GraphDef, anything else a SavedModel (TensorFlow writes its variables). The model is not executed.
    """
    api = _api()
    times = len(copies.weights) if copies.times is None else copies.times
    if not times:
        raise click.UsageError("--times or --weights is missing: how many copies to make.")
    replication = api.Replication(times, copies.weights, copies.combine, copies.streams, copies.devices)
    made = api.replicate(choice.load(model), replication, output, force=force)
    say(
        f"Written: {made.path}, {plural(times, 'replica')} of {plural(made.copied, 'node')}, {made.shared:,} shared; "
        f"{copies.combine} of {', '.join(made.outputs)}."
    )
    for note in made.notes:
        say(note)


@dataclass(frozen=True)
class Ends:
    """Tensors that a part lies between."""

    inputs: Sequence[str] = option(
        type=options.NAMES, default=(), help="Tensors to feed (default: the inputs of the model that the outputs need)."
    )
    outputs: Sequence[str] = option(
        type=options.NAMES, default=(), help="Tensors to fetch (default: the outputs of the model)."
    )


@click.command()
@options.model_argument
@click.option("-o", "--output", type=options.PATH, required=True, help="Where to write the part.")
@click.option("--force", is_flag=True, help="Replace an existing output.")
@together
def cut_command(model: Path, choice: options.GraphChoice, ends: Ends, output: Path, force: bool) -> None:
    """Write the part of MODEL that leads from some tensors to others, in the same format, with a signature of its own.

    A tensor is an input or output of the model, or node or node:1, inside of called functions, too; the end of a name, behind a slash, is
    enough where one node has it. The model is not executed.
    """
    made = _api().cut(choice.load(model), output, inputs=ends.inputs or None, outputs=ends.outputs or None, force=force)
    say(f"Written: {made.path}, {plural(made.nodes, 'node')} with {plural(made.variables, 'variable')}.")
    for name, tensors in (("inputs", made.inputs), ("outputs", made.outputs)):
        say(options.folded(f"{name}: {', '.join(tensors) or 'none'}", "  "))
    for note in made.notes:
        options.note(note)
