"""`msplit check`: is the annotation of a model valid, whole, safe, and still worth it?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from msplit.cli import options

if TYPE_CHECKING:
    from msplit.checks import Report, Settings

FORMATS = ("table", "json", "md", "github", "junit", "sarif")


def _explain(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    del param
    if value is None or ctx.resilient_parsing:
        return
    from msplit.checks import CHECKS, lookup
    from msplit.report import findings

    checks = tuple(CHECKS.values()) if value.lower() == "all" else (lookup(value),)
    pages = "\n".join(findings.page(check) for check in checks)
    click.echo("\n".join(options.folded(line) if len(line) > 80 else line for line in pages.split("\n")), nl=False)
    ctx.exit()


@click.command()
@options.model_options
@click.option("--rules", metavar="FILE|NAME", help="Rules that the ids should come from.")
@click.option("--plan", type=click.Path(path_type=Path), help="Plan to prove (from `msplit assign --emit plan`).")
@click.option("--against", type=click.Path(path_type=Path), metavar="OLD", help="The model that the ids were made for.")
@click.option("--streams", type=click.IntRange(1), help="Ids are 0..N-1 (default: as the rules or the plan say).")
@click.option(
    "--select", type=options.Names(), metavar="CODES", help="Only these codes; beginnings such as MS01 are fine."
)
@click.option("--ignore", type=options.Names(), metavar="CODES", help="Not these codes.")
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    help="Settings (default: the nearest msplit.yaml, or pyproject.toml with [tool.msplit], from here upward).",
)
@click.option("--fail-on", type=click.Choice(["error", "warning", "info"]), help="Severity that makes the exit code 1.")
@click.option("--exit-zero", is_flag=True, help="Exit 0 whatever is found.")
@click.option(
    "--explain",
    metavar="CODE|all",
    callback=_explain,
    is_eager=True,
    expose_value=False,
    help="Explain a code and exit.",
)
@options.size_options
@click.option("--gpu", help="GPU whose data sheet prices the nodes (default: h200).")
@click.option("--format", "style", type=click.Choice(FORMATS), default="table", show_default=True, help="How to print.")
def command(
    model: Path,
    tags: Sequence[str] | None,
    signature: str | None,
    inputs: Sequence[str] | None,
    outputs: Sequence[str] | None,
    rules: str | None,
    plan: Path | None,
    against: Path | None,
    streams: int | None,
    select: Sequence[str] | None,
    ignore: Sequence[str] | None,
    config: Path | None,
    fail_on: str | None,
    exit_zero: bool,
    batch: int | None,
    shapes: Sequence[tuple[str, tuple[int, ...]]],
    gpu: str | None,
    style: str,
) -> int:
    """Check the stream ids of MODEL: are they valid, whole, safe, and still worth it? The model is not executed.

    Exit code 0: nothing found; 1: an error (or what --fail-on says) was found; 2: it could not be checked. Options win over settings.
    """
    from msplit import checks, formats
    from msplit import rules as rule_sets
    from msplit.checks.registry import chosen
    from msplit.schedule import planfile

    settings = _settings(config)
    given: dict[str, Any] = {
        "streams": streams,
        "select": None if select is None else tuple(select),
        "ignore": None if ignore is None else tuple(ignore),
        "fail_on": None if fail_on is None else checks.Severity(fail_on),
        "rules": rules,
        "plan": None if plan is None else str(plan),
        "batch": batch,
        "gpu": gpu,
        "shapes": {**settings.shapes, **dict(shapes)},
    }
    settings = replace(settings, **{key: value for key, value in given.items() if value is not None})
    chosen(settings.select, settings.ignore)  # a wrong code is said before a large model is read
    ruleset = None if settings.rules is None else rule_sets.load(settings.rules, streams=settings.streams)
    plan_file = None if settings.plan is None else planfile.load(settings.plan)
    flat = options.load(model, tags, signature, inputs, outputs)
    old = (
        None
        if against is None
        else formats.read(against, tags=tags, signature=signature, inputs=inputs, outputs=outputs)
    )
    report = checks.check(flat, settings, ruleset=ruleset, plan=plan_file, against=old)
    _show(style, report, settings, verbose=options.is_set("verbose"))
    return int(report.failed and not exit_zero)


def _settings(config: Path | None) -> Settings:
    from msplit.checks import Settings
    from msplit.checks import config as reader

    path = config or reader.find(Path.cwd())
    return Settings() if path is None else reader.load(path)


def _show(style: str, report: Report, settings: Settings, *, verbose: bool) -> None:
    from msplit.cli import progress
    from msplit.report import findings

    progress.clear()

    def payload() -> Mapping[str, Any]:
        return findings.payload(report)

    if style == "github":
        from msplit.report import github

        click.echo(github.dumps(report), nl=False)
    elif style == "junit":
        from msplit.report import junit

        click.echo(junit.dumps(report, settings.fail_on), nl=False)
    elif style == "sarif":
        from msplit.report import sarif

        click.echo(sarif.dumps(report))
    else:
        options.show(style, "check", findings.document(report, verbose=verbose), payload)
