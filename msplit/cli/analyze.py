"""`msplit analyze`: what is independent in a model, and what streams could gain.

`msplit report`: one HTML file to look at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from msplit.cli import options
from msplit.cli.keys import key, together
from msplit.progress import phase

DEVICE_GPUS = 2
"""GPUs of the shipped rule set `device`."""

VIEWS = ("summary", "branches", "embeddings", "regions", "nodes", "all")


@dataclass(frozen=True)
class Inside(options.Choice):
    """The choices that a model's file may leave open, and a part of it."""

    function: str | None = key(
        "--part", "function", "Look inside this function, such as the body of a While, instead of at the model."
    )


@click.command()
@options.model_argument
@click.option(
    "--show", "views", type=click.Choice(VIEWS), multiple=True, help="What to show (default: summary). Repeatable."
)
@click.option("--engine", type=click.Choice(["cuda"]), help="Also tell which ops this engine can run.")
@click.option(
    "--gpus",
    type=click.IntRange(2, 64),
    metavar="N",
    help="Also tell whether to split the model over N such GPUs, by the simulator.",
)
@options.format_option
@together(choice=Inside, work=options.Work)
def command(
    model: Path,
    choice: Inside,
    views: Sequence[str],
    engine: str | None,
    gpus: int | None,
    work: options.Work,
    style: str,
) -> None:
    """Analyze MODEL: what is independent in it, and what streams could gain. The model is not executed."""
    from msplit import api
    from msplit.opset.traits import written
    from msplit.report import analysis

    costing = work.arguments()
    flat = choice.load(model, choice.function)
    found = api.analyze(flat, **costing)
    coverage = None
    if engine == "cuda":
        from msplit.engines.cuda.coverage import cover

        coverage = cover(flat, found.shapes, build=True)
    split = None if gpus is None else found.on_gpus(gpus)
    chosen = tuple(dict.fromkeys(views)) or ("summary",)
    following: list[Sequence[str]] = []
    if choice.function is None:
        gpu = (work.gpu,) if options.was_given("gpu") else None
        profile = None if work.profile_path is None else (work.profile_path,)
        given: dict[str, Any] = {
            **choice.further(),
            "--batch": work.batch,
            "--shape": work.shapes,
            "--costs": options.pairs(gpu=gpu, profile=profile),
        }
        judged = found.judgement
        # in the folder where the user is, beside nothing that is there
        name = f"{model.stem}.streams{model.suffix}" if model.suffix else f"{model.name}.streams"
        if judged.kind != "nothing":
            launched = "capture=no" if coverage is not None and coverage.uncaptured else None
            runs = {**given, "--costs": options.pairs(profile=profile), "--cuda": launched}  # what runs it is its GPU
            following.append(options.command_line("bench", model, runs))
            shares = not any(map(written, flat.graph.ops)) and (coverage is None or not coverage.reasons)
            if shares and coverage is not None and (coverage.of_host or launched):  # no build holds that
                if not (choice.inputs or choice.outputs):
                    kept = {"--part": given["--part"], "--shape": work.shapes, "--cuda": launched}
                    following.append(options.command_line("serve", model, kept))
            elif shares:
                built = Path(f"{model.stem}.build")
                following.append(options.command_line("build", model, {**runs, "-o": built}))
                following.append(options.command_line("serve", built, {}))
        if split is not None and split.helps:
            if gpus == DEVICE_GPUS:  # another number stands in a rules file of the user's own
                following.append(options.command_line("assign", model, {"--rules": "device", **given, "-o": name}))
        elif judged.helps:
            given = {"--rules": "auto", "--streams": judged.streams, **given, "-o": name}
            following.append(options.command_line("assign", model, given))
    options.show(
        style,
        "analyze",
        analysis.document(found, chosen, coverage, following, split),
        lambda: analysis.payload(found, chosen, coverage, following, split),
    )


@click.command()
@options.model_argument
@click.option("-o", "--output", type=options.PATH, required=True, help="The HTML file to write.")
@click.option(
    "--no-candidates", is_flag=True, help="Do not simulate other assignments, which takes long on huge graphs."
)
@click.option(
    "--bench",
    "bench_paths",
    type=options.PATH,
    multiple=True,
    help="What `bench` measured: its result (--format json) or its timeline (--trace). Repeatable.",
)
@click.option("--force", is_flag=True, help="Replace an existing output.")
@together(choice=options.Choice, rules=options.Rules, work=options.RecordedWork)
def report_command(
    model: Path,
    choice: options.Choice,
    rules: options.Rules,
    output: Path,
    no_candidates: bool,
    bench_paths: Sequence[Path],
    force: bool,
    work: options.RecordedWork,
) -> None:
    """Write a report of MODEL: its graph coloured by stream, the simulated timeline, other assignments, findings.

    The file is self-contained and needs no network. The model is not executed. What is not given is as `msplit assign` has recorded it
    with the model.
    """
    from msplit import formats
    from msplit import rules as rule_sets
    from msplit.assignment.assignment import check_places
    from msplit.assignment.model import Given, price, resolve
    from msplit.cost.gpus import DEFAULT_GPU
    from msplit.report.html import page as build
    from msplit.report.html import runs
    from msplit.report.html.page import render

    given = work.arguments()
    loaded = None if rules.ruleset is None else rule_sets.load(rules.ruleset, streams=rules.streams)
    flat = choice.load(model, record=work.record)
    check_places(flat, [output], force=force)
    defaults = resolve(flat, Given(loaded, rules.streams, **given))
    settled = defaults.workload
    sizes, costs = price(flat, settled)
    further = {
        **choice.further(),
        "--batch": settled.batch,
        "--shape": tuple(settled.shapes.items()),
        "--costs": () if settled.gpu == DEFAULT_GPU else options.pairs(gpu=(settled.gpu,)),
    }
    measured = runs.measured(flat, bench_paths)
    page = build.page(
        flat,
        costs,
        ruleset=rules.ruleset,
        streams=rules.streams,
        candidates=not no_candidates,
        shapes=sizes,
        options=" ".join(options.command_line("assign", model, further)[1:]),
        defaults=defaults,
    )
    with phase("drawing"):
        text = render(replace(page, measured=measured)).encode()
    formats.write_bytes_atomic(output, text, force=force)
    found = page.prediction
    options.note(f"{output}: {len(flat):,} nodes, {len(found.lanes)} streams, predicted {found.makespan_us:.1f} µs")
