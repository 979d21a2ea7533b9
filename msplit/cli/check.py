"""`msplit check`: is the annotation of a model valid, whole, safe, and still worth it?"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from msplit.cli import options, output
from msplit.cli.keys import option, together
from msplit.cli.many import Looked, each, jobs_option, models_in
from msplit.errors import WriteError, is_read
from msplit.report.document import plural

if TYPE_CHECKING:
    from msplit.checks import Report
    from msplit.checks.subject import CheckSettings
    from msplit.rules.ruleset import RuleSet

MOST_CLEAN = 8
"""Most models of which those without findings are shown, too."""

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


@dataclass(frozen=True)
class Outcome:
    """What it is held against, and what becomes of the result."""

    against: Path | None = option(metavar="OLD", help="The model that the ids were made for.")
    write_baseline: Path | None = option(
        metavar="FILE", help="Write what is found as known, and exit 0. Replaces an earlier baseline."
    )
    place: Path | None = option("-o", "--output", metavar="FILE", help="Write the result to this file, whole.")
    force: bool = option(help="Replace an existing output.")
    exit_zero: bool = option(help="Exit 0 whatever is found.")

    def refuse(self, models: Sequence[Path]) -> None:
        """Raises a WriteError where the result can not be written, or would take the place of a model."""
        from msplit.formats.atomic import check_target

        if self.place is None:
            return
        check_target(self.place, force=self.force)
        target = Path(os.path.realpath(self.place))
        if any(one in (target, *target.parents) for one in map(Path, map(os.path.realpath, models))):
            what = "is a model that is checked, or lies in its folder"
            raise WriteError(what, where=str(self.place), fix="choose another name")


@click.command()
@click.argument("models", metavar="MODEL…", type=options.PATH, nargs=-1, required=True)
@click.option(
    "--explain",
    metavar="CODE|all",
    shell_complete=options.complete_code,
    callback=_explain,
    is_eager=True,
    expose_value=False,
    help="Explain a code and exit.",
)
@jobs_option
@click.option("--format", "style", type=click.Choice(FORMATS), default="table", show_default=True, help="How to print.")
@together
def command(
    models: tuple[Path, ...],
    choice: options.Choice,
    wanted: Wanted,
    outcome: Outcome,
    work: options.RecordedWork,
    jobs: int | None,
    style: str,
) -> int:
    """Check the stream ids of models, or of all models in a folder: are they valid, whole, safe, and still worth it? None is executed.

    Exit code 0: nothing found; 1: an error (or what --fail-on says) was found; 2: it could not be checked. Options win over settings, and
    settings over what `msplit assign` has recorded with the model.
    """
    from msplit import formats
    from msplit import rules as rule_sets
    from msplit.checks import run as baselines
    from msplit.checks.run import chosen
    from msplit.schedule import planfile

    models, against, write_baseline = models_in(models), outcome.against, outcome.write_baseline
    if len(models) > 1 and (wanted.plan is not None or against is not None):
        option = "--plan" if wanted.plan is not None else "--against"
        raise click.UsageError(f"{option} belongs to one model, and {len(models)} were given.")
    settings = wanted.settings(work)
    chosen(settings.select, settings.ignore)  # a wrong code is said before a large model is read
    ruleset = None if settings.rules is None else rule_sets.load(settings.rules, streams=settings.streams)
    plan_file = None if settings.plan is None else planfile.load(settings.plan)
    known = () if settings.baseline is None or write_baseline is not None else baselines.load(settings.baseline)
    outcome.refuse(models)
    look = partial(_look, choice, settings, ruleset, record=work.record)
    if len(models) == 1:
        old = None if against is None else formats.read(against, **vars(choice))
        looked: list[Looked] = [(look(models[0], plan=plan_file, against=old), "")]
    else:
        looked = each("check", look, models, jobs)
    reports: list[Report] = [report for report, _ in looked if report is not None]
    if settings.baseline is not None and write_baseline is None:
        folder = Path(settings.baseline).parent
        reports = [baselines.without_known(report, known, folder, settings) for report in reports]
    errors = {str(model): why for model, (_, why) in zip(models, looked, strict=True) if why}
    output.clear()
    for why in errors.values():
        output.tell(f"error: {why}")
    with output.into(outcome.place, force=outcome.force):
        _show(style, reports, errors, settings, together=len(models) > 1)
    if errors:
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
    return int(any(report.failed for report in reports) and not outcome.exit_zero)


def _look(
    choice: options.Choice, settings: CheckSettings, ruleset: RuleSet | None, model: Path, *, record: bool, **of: Any
) -> Report:
    """Findings about a model."""
    from msplit import checks

    found = checks.check(choice.load(model, record=record), settings, ruleset=ruleset, **of)
    return replace(found, model=str(model))  # a file that is exported to be read keeps its name


def _show(
    style: str, reports: Sequence[Report], errors: Mapping[str, str], settings: CheckSettings, *, together: bool
) -> None:
    from msplit.report import document, findings

    if style == "github":
        output.commands(findings.github(*reports))
    elif style == "junit":
        output.xml(findings.junit(*reports, fail_on=settings.fail_on, errors=errors))
    elif style == "sarif":
        output.json(findings.sarif(*reports, errors=errors))
    elif style == "json" and together:
        output.json(document.dumps("check", findings.together(reports, errors)))
    else:
        verbose = options.is_set("verbose")
        for report in reports:
            if len(reports) <= MOST_CLEAN or report.findings or verbose:
                payload = partial(findings.payload, report)
                options.show(style, "check", findings.document(report, verbose=verbose), payload)
        if together:
            options.show(style, "check", findings.summary(reports, errors), dict)
