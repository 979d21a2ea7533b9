"""Run of the checks on a model: which there are, what they find, and what a project knows already.

Runs the checks on a model.

The checks by their codes.

Known findings: what a project has looked at and lives with, so that only what is new fails a run.

    {"schema_version": 1, "kind": "baseline",
     "findings": [{"model": "models/ranker.pb", "code": "MS012", "file": null, "text": "stream # has # µs of work …",
                   "nodes": [], "node_count": 0}, …]}

`docs/schemas/baseline.json` describes it. Paths are relative to the folder of the baseline, so that it can be committed with the models.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from msplit.assignment.model import GIVEN, ON_COSTS, ON_RULES, Defaults, DisplayMixin, Given, opened, price, resolve
from msplit.checks.subject import Check, CheckSettings, Finding, Severity, Skip, Subject
from msplit.core.graph import no_collection
from msplit.cost import profile as profile_file
from msplit.errors import MsplitError
from msplit.flatten.flat import FlatGraph
from msplit.formats import read
from msplit.formats.files import JsonValue
from msplit.formats.model import Model
from msplit.progress import phase
from msplit.rules import load as load_rules
from msplit.rules.ruleset import RuleSet
from msplit.schedule.planfile import PlanFile
from msplit.schedule.planfile import load as load_plan

_FOUND: list[Check] = [
    import_module(f"msplit.checks.{name}").CHECK
    for name in sorted(module.name for module in iter_modules([str(Path(__file__).parent)]))
    if re.match(r"ms[0-9]{3}_", name)
]

CHECKS: dict[str, Check] = {check.code: check for check in _FOUND}
"""Code -> check, ascending: that of every file that is called like one."""


def chosen(select: Sequence[str], ignore: Sequence[str]) -> tuple[Check, ...]:
    """The checks whose codes, or their beginnings ("MS01"), are selected (none: all) and not ignored.

    Raises:
        MsplitError: An entry is the beginning of no code.
    """
    wanted = set(expand(select)) if select else set(CHECKS)
    wanted -= set(expand(ignore))
    return tuple(check for code, check in CHECKS.items() if code in wanted)


def expand(prefixes: Iterable[str]) -> list[str]:
    """The codes that begin with one of some prefixes.

    Raises:
        MsplitError: A prefix is the beginning of no code.
    """
    found = []
    for prefix in prefixes:
        codes = [code for code in CHECKS if prefix and code.startswith(prefix.upper())]
        if not codes:
            raise MsplitError(f"no check's code begins with {prefix!r}{near(prefix)}", fix=_known_codes())
        found += codes
    return found


def lookup(code: str) -> Check:
    """The check of a code, or of a name such as ``id-out-of-range``.

    Raises:
        MsplitError: There is none.
    """
    for check in CHECKS.values():
        if code.upper() == check.code or code.lower() == check.name:
            return check
    raise MsplitError(f"there is no check {code!r}{near(code)}", fix=_known_codes())


def near(word: str) -> str:
    """A hint at the code or the name that an unknown one may stand for, or nothing."""
    number = re.fullmatch(r"(?:ms)?0*([0-9]{1,3})", word.lower())
    code = f"MS{int(number[1]):03}" if number else ""
    names = [check.name for check in CHECKS.values()]
    found = [code] if code in CHECKS else difflib.get_close_matches(word.lower(), names, 1)
    return f"; did you mean {found[0]}?" if found else ""


def _known_codes() -> str:
    return f"codes are {next(iter(CHECKS))} to {next(reversed(CHECKS))}; `msplit check --explain all` lists them"


MOST_FINDINGS = 100
"""Findings of one code that are told; the others are counted."""

_NEEDS = {"rules": "no rules were given", "plan": "no plan was given", "against": "no other model was given"}


@dataclass(frozen=True)
class Reported:
    """A finding with its code and severity.

    Attributes:
        severity: As the settings want it.
        judged_with: What it depends on beside the model, with where that is from; "" where it depends on nothing else.
    """

    code: str
    severity: Severity
    finding: Finding
    judged_with: str = ""

    @property
    def mend(self) -> tuple[str, ...]:
        """Advice on how to mend it and, where it depends on something beside the model, what it was judged with: a sentence each."""
        judged = (f"Judged with {self.judged_with}.",) if self.judged_with else ()
        return (f"Fix: {self.finding.fix.removesuffix('.')}.", *judged)


@dataclass(frozen=True, repr=False)
class Report(DisplayMixin):
    """Result of a run of the checks.

    Attributes:
        findings: By code.
        checks: The checks that were asked for.
        skipped: Code -> why the check could not say anything.
        omitted: Code -> findings beyond `MOST_FINDINGS`.
        streams: Streams that kernels run on.
        assumed: What was taken for granted about the shapes of inputs.
        failed: Whether there is a finding as severe as the settings' `fail_on`.
        judged_with: What the model was judged with and where that is from, "" where nobody knows.
        known: Findings that the baseline knows; they are not among `findings`.
        gone: Findings that the baseline knows and that are none any more.
    """

    model: str
    findings: tuple[Reported, ...]
    checks: tuple[Check, ...]
    skipped: Mapping[str, str]
    omitted: Mapping[str, int]
    streams: tuple[int, ...]
    assumed: tuple[str, ...]
    failed: bool
    judged_with: str = ""
    known: int = 0
    gone: int = 0

    def _facts(self) -> Sequence[tuple[str, str]]:
        found = [(str(severity), f"{self.count(severity):,}") for severity in Severity if self.count(severity)]
        codes = ", ".join(dict.fromkeys(one.code for one in self.findings)) or "none"
        return [("model", self.model), ("failed", "yes" if self.failed else "no"), *found, ("findings", codes)]

    def count(self, severity: Severity) -> int:
        """Findings of a severity, those that are not told included."""
        severities = {found.code: found.severity for found in self.findings}
        more = sum(number for code, number in self.omitted.items() if severities.get(code) is severity)
        return more + sum(found.severity is severity for found in self.findings)


def check(
    flat: FlatGraph | str | os.PathLike[str],
    settings: CheckSettings | None = None,
    *,
    ruleset: str | Path | RuleSet | None = None,
    plan: str | Path | PlanFile | None = None,
    against: str | Path | Model | None = None,
    streams: int | None = None,
    batch: int | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    gpu: str | None = None,
) -> Report:
    """Checks the stream ids of a model. Nothing of it is executed.

    Args:
        flat: The model, from `msplit.load`, or where it is.
        settings: Which checks, how severe, which limits, and what prices the nodes.
        ruleset: The rules that the ids should come from: loaded already, a file, or the name of a shipped rule set; those of the
            settings where it is not given.
        plan: The plan that the model should run by, or its file; that of the settings where it is not given.
        against: The model that the ids were made for, or its file.
        streams: Ids are 0..streams-1; here and below that of the settings where it is not given.
        batch: Size of unknown leading dimensions.
        shapes: Whole shapes by input name, over and above those of the settings.
        gpu: Data sheet that prices the nodes.

    What is not given is as the record of the assignment says, where the model has one.

    Raises:
        MsplitError: A file can not be read, or the settings name a check, a GPU or an input that does not exist.
    """
    settings = settings or CheckSettings()
    given: dict[str, Any] = {
        "streams": streams,
        "batch": batch,
        "gpu": gpu,
        "shapes": {**settings.shapes, **shapes} if shapes else None,
    }
    said = {name: value for name, value in given.items() if value is not None}
    settings = replace(settings, **said, origin={**settings.origin, **dict.fromkeys(said, GIVEN)})
    flat = opened(flat)
    chosen(settings.select, settings.ignore)  # a wrong code is said before any work is done
    origin = {} if settings.source is None else dict.fromkeys(ON_RULES, settings.source)
    if ruleset is not None and "rules" not in settings.origin and settings.rules is None:
        origin["rules"] = GIVEN
    ruleset = settings.rules if ruleset is None else ruleset
    if isinstance(ruleset, str | Path):
        ruleset = load_rules(ruleset, streams=settings.streams)
    plan = settings.plan if plan is None else plan
    if isinstance(plan, str | Path):
        plan = load_plan(plan)
    if isinstance(against, str | Path):
        against = read(against)
    profile = None if settings.profile is None else profile_file.load(settings.profile)
    asked = Given(
        ruleset, settings.streams, settings.batch, settings.shapes, settings.gpu, profile, {**origin, **settings.origin}
    )
    defaults = resolve(flat, asked)
    sizes, costs = price(flat, defaults.workload)
    return examine(Subject(flat, costs, settings, defaults.ruleset, plan, against, sizes, defaults), sizes.assumed)


@no_collection()
def examine(subject: Subject, assumed: tuple[str, ...] = ()) -> Report:
    """Runs the chosen checks on a subject."""
    settings = subject.settings
    checks = chosen(settings.select, settings.ignore)
    findings: list[Reported] = []
    skipped: dict[str, str] = {}
    omitted: dict[str, int] = {}
    given = {"rules": subject.ruleset, "plan": subject.plan_file, "against": subject.against}
    for one in checks:
        missing = next((need for need in one.needs if given[need] is None), None)
        if missing is not None:
            skipped[one.code] = _NEEDS[missing]
            continue
        try:
            with phase(f"check {one.code}"):
                found = list(one.find(subject))
        except Skip as reason:
            skipped[one.code] = str(reason)
            continue
        severity = settings.severity.get(one.code, one.severity)
        findings += [
            Reported(one.code, severity, finding, _judged_with(one, finding, subject.defaults))
            for finding in found[:MOST_FINDINGS]
        ]
        if len(found) > MOST_FINDINGS:
            omitted[one.code] = len(found) - MOST_FINDINGS
    return Report(
        model=str(subject.flat.model.source),
        findings=tuple(findings),
        checks=checks,
        skipped=skipped,
        omitted=omitted,
        streams=subject.used,
        assumed=assumed,
        failed=any(found.severity.rank <= settings.fail_on.rank for found in findings),
        judged_with="" if subject.defaults is None else subject.defaults.words(),
    )


def _judged_with(one: Check, finding: Finding, defaults: Defaults | None) -> str:
    depends = one.depends if finding.depends is None else finding.depends
    if not depends or defaults is None:
        return ""
    return defaults.words(ON_RULES if depends == "rules" else ON_COSTS)


SCHEMA_VERSION = 1
KIND = "baseline"
MAX_BYTES = 64 << 20
"""Longest baseline."""

_NUMBER = re.compile(r"[0-9][0-9.,]*")
_FIX = "write it anew: msplit check MODEL… --write-baseline FILE"


@dataclass(frozen=True)
class Known:
    """A known finding.

    Attributes:
        model: The model, relative to the baseline's folder.
        file: The file that it is about where that is not the model, likewise; None: the model.
        text: What it says, with `#` for numbers: for findings that name no nodes.
        nodes: The first nodes that it is about.
        node_count: Number of all nodes that it is about.
    """

    model: str
    code: str
    file: str | None
    text: str
    nodes: tuple[str, ...]
    node_count: int

    def covers(self, other: Known) -> bool:
        """True if a finding is this one, or less of it: about no node that this one is not about."""
        same = (self.model, self.code, self.file) == (other.model, other.code, other.file)
        if not same or other.node_count > self.node_count:
            return False
        return set(other.nodes) <= set(self.nodes) if other.nodes else self.text == other.text


def load(path: str | os.PathLike[str]) -> tuple[Known, ...]:
    """Reads a baseline.

    Raises:
        MsplitError: It can not be read, or is none; the message says what is wrong with it, and where.
    """
    top = JsonValue.read(path, MAX_BYTES, what=KIND, fix=_FIX).of_version(KIND, SCHEMA_VERSION)
    return top.object(("findings",)).at("findings").to(tuple[Known, ...])


def dumps(reports: Sequence[Report], folder: Path) -> bytes:
    """The findings of some reports as a baseline that lies in a folder. The same findings give the same bytes."""
    findings = [asdict(_of(report, one, folder)) for report in reports for one in report.findings]
    return (
        json.dumps({"schema_version": SCHEMA_VERSION, "kind": KIND, "findings": findings}, indent=1) + "\n"
    ).encode()


def without_known(report: Report, known: Sequence[Known], folder: Path, settings: CheckSettings) -> Report:
    """A report without the findings that are known to the baseline in a folder. The settings say what is severe enough to fail."""
    places = [_of(report, one, folder) for one in report.findings]
    new = tuple(
        one
        for one, place in zip(report.findings, places, strict=True)
        if not any(entry.covers(place) for entry in known)
    )
    model = _relative(report.model, folder)
    ran = {check.code for check in report.checks if check.code not in report.skipped}
    gone = sum(
        entry.model == model and entry.code in ran and not any(entry.covers(place) for place in places)
        for entry in known
    )
    return replace(
        report,
        findings=new,
        known=len(report.findings) - len(new),
        gone=gone,
        failed=any(one.severity.rank <= settings.fail_on.rank for one in new),
    )


def _of(report: Report, one: Reported, folder: Path) -> Known:
    finding = one.finding
    file = None if finding.file is None else _relative(finding.file, folder)
    return Known(
        _relative(report.model, folder), one.code, file, _NUMBER.sub("#", finding.text), finding.nodes, finding.count
    )


def _relative(path: str, folder: Path) -> str:
    return Path(os.path.relpath(os.path.realpath(path), os.path.realpath(folder))).as_posix()
