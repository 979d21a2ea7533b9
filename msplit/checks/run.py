"""Runs the checks on a model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from msplit.assignment.defaults import GIVEN, ON_COSTS, ON_RULES, Basis, Given, settle
from msplit.assignment.display import Facts, Shown
from msplit.assignment.model import opened, price
from msplit.checks.finding import Finding, Severity, Skip
from msplit.checks.registry import chosen
from msplit.checks.settings import CheckSettings
from msplit.checks.subject import Check, Subject
from msplit.core.memory import no_collection
from msplit.cost import profile_file
from msplit.flatten.flat import FlatGraph
from msplit.formats import read
from msplit.formats.model import Model
from msplit.progress import phase
from msplit.rules import RuleSet
from msplit.rules import load as load_rules
from msplit.schedule.plan.planfile import PlanFile
from msplit.schedule.plan.planfile import load as load_plan

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
        """How to mend it and, where it depends on something beside the model, what it was judged with: a sentence each."""
        judged = (f"Judged with {self.judged_with}.",) if self.judged_with else ()
        return (f"Fix: {self.finding.fix.removesuffix('.')}.", *judged)


@dataclass(frozen=True, repr=False)
class Report(Shown):
    """What the checks found.

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

    def _facts(self) -> Facts:
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
    basis = settle(flat, asked)
    sizes, costs = price(flat, basis.workload)
    return examine(Subject(flat, costs, settings, basis.ruleset, plan, against, sizes, basis), sizes.assumed)


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
            Reported(one.code, severity, finding, _judged_with(one, finding, subject.basis))
            for finding in found[:MOST_FINDINGS]
        ]
        if len(found) > MOST_FINDINGS:
            omitted[one.code] = len(found) - MOST_FINDINGS
    return Report(
        model=str(subject.flat.model.path),
        findings=tuple(findings),
        checks=checks,
        skipped=skipped,
        omitted=omitted,
        streams=subject.used,
        assumed=assumed,
        failed=any(found.severity.rank <= settings.fail_on.rank for found in findings),
        judged_with="" if subject.basis is None else subject.basis.words(),
    )


def _judged_with(one: Check, finding: Finding, basis: Basis | None) -> str:
    depends = one.depends if finding.depends is None else finding.depends
    if not depends or basis is None:
        return ""
    return basis.words(ON_RULES if depends == "rules" else ON_COSTS)
