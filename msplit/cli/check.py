"""`msplit check`: is the annotation of a model valid, whole, safe, and still worth it?"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from msplit.cli import options, output
from msplit.cli.keys import option, together
from msplit.errors import MsplitError, WriteError, is_read
from msplit.report.document import plural

if TYPE_CHECKING:
    from msplit.checks import Report
    from msplit.checks.subject import CheckSettings

FORMATS = ("table", "json", "md", "github", "junit", "sarif")


def _explain(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    if value is None or ctx.resilient_parsing:
        return
    from msplit.checks import lookup
    from msplit.checks.run import CHECKS
    from msplit.report import findings

    checks = tuple(CHECKS.values()) if value.lower() == "all" else (lookup(value),)
    pages = "\n".join(findings.page(check) for check in checks)
    output.say("\n".join(options.folded(line) if len(line) > 80 else line for line in pages.rstrip("\n").split("\n")))
    ctx.exit()


_CODES: dict[str, Any] = {
    "type": options.NAMES,
    "metavar": "CODES",
    "shell_complete": options.complete_codes,
}


@dataclass(frozen=True)
class Wanted:
    """What a file of settings can say, too."""

    rules: str | None = option(
        metavar="FILE|NAME", shell_complete=options.complete_rules, help="Rules that the ids should come from."
    )
    plan: Path | None = option(help="Plan to prove (from `msplit assign --emit plan`).")
    streams: int | None = option(type=options.STREAMS, help="Ids are 0..N-1 (default: as the rules or the plan say).")
    select: tuple[str, ...] | None = option(**_CODES, help="Only these codes; beginnings such as MS01 are fine.")
    ignore: tuple[str, ...] | None = option(**_CODES, help="Not these codes.")
    config: Path | None = option(
        help="Settings (default: the nearest msplit.yaml, or pyproject.toml with [tool.msplit], from here upward)."
    )
    fail_on: str | None = option(
        type=click.Choice(["error", "warning", "info"]), help="Severity that makes the exit code 1."
    )
    baseline: Path | None = option(help="Known findings, which --write-baseline wrote: only others are told, and fail.")

    def settings(self, work: options.RecordedWork) -> CheckSettings:
        """The settings of the project, with what the options say in their place."""
        from msplit.assignment.model import GIVEN
        from msplit.checks import config as reader
        from msplit.checks.subject import CheckSettings, Severity

        path = self.config or reader.find(Path.cwd())
        settings = CheckSettings() if path is None else reader.load(path)
        given: dict[str, Any] = {
            "streams": self.streams,
            "select": self.select,
            "ignore": self.ignore,
            "fail_on": self.fail_on and Severity(self.fail_on),
            "rules": self.rules,
            "plan": self.plan and str(self.plan),
            "batch": work.batch,
            "gpu": work.gpu,
            "profile": work.profile_path and str(work.profile_path),
            "baseline": self.baseline and str(self.baseline),
            "shapes": {**settings.shapes, **dict(work.shapes)} if work.shapes else None,
        }
        said = {key: value for key, value in given.items() if value is not None}
        return replace(settings, **said, origin=dict.fromkeys(said, GIVEN))


@click.command()
@click.argument("models", metavar="MODEL…", type=options.PATH, nargs=-1, required=True)
@click.option("--against", type=options.PATH, metavar="OLD", help="The model that the ids were made for.")
@click.option(
    "--write-baseline",
    type=options.PATH,
    metavar="FILE",
    help="Write what is found as known, and exit 0. Replaces an earlier baseline.",
)
@click.option("--exit-zero", is_flag=True, help="Exit 0 whatever is found.")
@click.option(
    "--explain",
    metavar="CODE|all",
    shell_complete=options.complete_code,
    callback=_explain,
    is_eager=True,
    expose_value=False,
    help="Explain a code and exit.",
)
@click.option("--format", "style", type=click.Choice(FORMATS), default="table", show_default=True, help="How to print.")
@together
def command(
    models: tuple[Path, ...],
    choice: options.Choice,
    wanted: Wanted,
    against: Path | None,
    write_baseline: Path | None,
    exit_zero: bool,
    work: options.RecordedWork,
    style: str,
) -> int:
    """Check the stream ids of one or more models: are they valid, whole, safe, and still worth it? No model is executed.

    Exit code 0: nothing found; 1: an error (or what --fail-on says) was found; 2: it could not be checked. Options win over settings, and
    settings over what `msplit assign` has recorded with the model.
    """
    from msplit import checks, formats
    from msplit import rules as rule_sets
    from msplit.checks import run as baselines
    from msplit.checks.run import chosen
    from msplit.schedule import planfile

    if len(models) > 1 and (wanted.plan is not None or against is not None):
        option = "--plan" if wanted.plan is not None else "--against"
        raise click.UsageError(f"{option} belongs to one model, and {len(models)} were given.")
    settings = wanted.settings(work)
    chosen(settings.select, settings.ignore)  # a wrong code is said before a large model is read
    ruleset = None if settings.rules is None else rule_sets.load(settings.rules, streams=settings.streams)
    plan_file = None if settings.plan is None else planfile.load(settings.plan)
    known = () if settings.baseline is None or write_baseline is not None else baselines.load(settings.baseline)
    old = None if against is None else formats.read(against, **vars(choice))
    reports: list[Report] = []
    unread = 0
    for model in models:
        try:
            flat = choice.load(model, record=work.record)
            report = checks.check(flat, settings, ruleset=ruleset, plan=plan_file, against=old)
        except MsplitError as problem:
            if len(models) == 1:
                raise
            unread += 1
            output.tell(f"error: {problem}")
            continue
        if settings.baseline is not None and write_baseline is None:
            report = baselines.without_known(report, known, Path(settings.baseline).parent, settings)
        reports.append(report)
    if reports:
        _show(style, reports, settings, together=len(models) > 1)
    if unread:
        return 2
    if write_baseline is not None:
        if os.path.lexists(write_baseline) and not is_read(baselines.load, write_baseline):
            raise WriteError(
                "is there already, and is no baseline", where=str(write_baseline), fix="choose another name"
            )
        formats.write_bytes_atomic(write_baseline, baselines.dumps(reports, write_baseline.parent), force=True)
        count = sum(len(report.findings) for report in reports)
        options.note(f"Written: {write_baseline}, {plural(count, 'known finding')}.")
        return 0
    return int(any(report.failed for report in reports) and not exit_zero)


def _show(style: str, reports: Sequence[Report], settings: CheckSettings, *, together: bool) -> None:
    from msplit.cli import output
    from msplit.report import document, findings

    output.clear()
    if style == "github":
        output.commands(findings.github(*reports))
    elif style == "junit":
        output.xml(findings.junit(*reports, fail_on=settings.fail_on))
    elif style == "sarif":
        output.json(findings.sarif(*reports))
    elif style == "json" and together:
        output.json(document.dumps("check", findings.together(reports)))
    else:
        for report in reports:
            payload = partial(findings.payload, report)
            options.show(style, "check", findings.document(report, verbose=options.is_set("verbose")), payload)
