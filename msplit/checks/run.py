"""Runs the checks on a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from msplit.checks.base import Check, Finding, Severity, Skip
from msplit.checks.registry import chosen
from msplit.checks.settings import Settings
from msplit.checks.subject import Subject
from msplit.cost import DEFAULT_GPU, estimate, infer
from msplit.flatten.flat import FlatGraph
from msplit.formats import read
from msplit.formats.model import Model
from msplit.progress import phase
from msplit.rules import RuleSet
from msplit.rules import load as load_rules
from msplit.schedule.planfile import PlanFile
from msplit.schedule.planfile import load as load_plan

MOST_FINDINGS = 100
"""Findings of one code that are told; the others are counted."""

_NEEDS = {"rules": "no rules were given", "plan": "no plan was given", "against": "no other model was given"}


@dataclass(frozen=True)
class Reported:
    """A finding with its code and severity."""

    code: str
    severity: Severity
    finding: Finding


@dataclass(frozen=True)
class Report:
    """What the checks found.

    Attributes:
        model: The model's file.
        findings: By code.
        checks: The checks that were asked for.
        skipped: Code -> why the check could not say anything.
        omitted: Code -> findings beyond `MOST_FINDINGS`.
        streams: Streams that kernels run on.
        assumed: What was taken for granted about the shapes of inputs.
        failed: Whether there is a finding as severe as the settings' `fail_on`.
    """

    model: str
    findings: tuple[Reported, ...]
    checks: tuple[Check, ...]
    skipped: Mapping[str, str]
    omitted: Mapping[str, int]
    streams: tuple[int, ...]
    assumed: tuple[str, ...]
    failed: bool

    def count(self, severity: Severity) -> int:
        """Findings of a severity, those that are not told included."""
        severities = {found.code: found.severity for found in self.findings}
        more = sum(number for code, number in self.omitted.items() if severities[code] is severity)
        return more + sum(found.severity is severity for found in self.findings)


def check(
    flat: FlatGraph,
    settings: Settings | None = None,
    *,
    ruleset: str | Path | RuleSet | None = None,
    plan: str | Path | PlanFile | None = None,
    against: str | Path | Model | None = None,
) -> Report:
    """Checks the stream ids of a model. Nothing of it is executed.

    Args:
        flat: The model, from `msplit.load`.
        settings: Which checks, how severe, which limits, and what prices the nodes.
        ruleset: The rules that the ids should come from: loaded already, a file, or the name of a shipped rule set; those of the
            settings where it is not given.
        plan: The plan that the model should run by, or its file; that of the settings where it is not given.
        against: The model that the ids were made for, or its file.

    Raises:
        MsplitError: A file can not be read, or the settings name a check, a GPU or an input that does not exist.
    """
    settings = settings or Settings()
    chosen(settings.select, settings.ignore)  # a wrong code is said before any work is done
    ruleset = settings.rules if ruleset is None else ruleset
    if isinstance(ruleset, str | Path):
        ruleset = load_rules(ruleset, streams=settings.streams)
    plan = settings.plan if plan is None else plan
    if isinstance(plan, str | Path):
        plan = load_plan(plan)
    if isinstance(against, str | Path):
        against = read(against)
    with phase("shapes and costs"):
        shapes = infer(flat, batch=settings.batch, shapes=settings.shapes)
        costs = estimate(flat, shapes, settings.gpu or DEFAULT_GPU)
    return examine(Subject(flat, costs, settings, ruleset, plan, against), shapes.assumed)


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
        findings += [Reported(one.code, severity, finding) for finding in found[:MOST_FINDINGS]]
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
    )
