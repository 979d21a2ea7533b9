"""Findings of the checks, as a document (terminal, Markdown), as plain data for JSON, and as pages of explanation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msplit.checks import Report
from msplit.checks.finding import Severity, Thresholds
from msplit.checks.run import CHECKS, Reported
from msplit.checks.subject import Check
from msplit.formats.sniffer import SAVED_MODEL_FILES
from msplit.report.document import Document, Table
from msplit.report.jsonio import picked
from msplit.report.text import plural


def document(report: Report, *, verbose: bool = False) -> Document:
    """The findings as a table; `verbose` tells why checks were skipped."""
    texts = [": ".join(filter(None, (_in_file(found), found.finding.text))) for found in report.findings]
    rows = [
        (found.code, found.severity.value, (f"{text}.", *found.mend))
        for found, text in zip(report.findings, texts, strict=True)
    ]
    notes = [_summary(report), *baseline_notes(report)]
    if report.judged_with:
        notes.append(f"Judged with {report.judged_with}.")
    if verbose:
        notes += [f"{code} was skipped: {why}." for code, why in report.skipped.items()]
    elif report.skipped:
        notes.append(f"Not checked: {', '.join(report.skipped)} (--verbose says why).")
    if report.findings:
        notes.append("`msplit check --explain CODE` explains a code.")
    tables = [Table("Findings", ("code", "severity", "what"), rows)] if rows else []
    return Document(f"msplit check: {report.model}", tables=tables, notes=notes, warnings=omissions(report))


def _summary(report: Report) -> str:
    """One sentence: how many findings of which severity."""
    told = ", ".join(plural(number, severity.value) for severity in Severity if (number := report.count(severity)))
    ran, streams = len(report.checks) - len(report.skipped), plural(len(report.streams), "stream")
    return f"{told or 'No findings'}. {plural(ran, 'check')} ran; kernels are on {streams}."


def baseline_notes(report: Report) -> list[str]:
    """Notes on findings that the baseline left out, and on its entries that match nothing."""
    notes = []
    if report.known:
        are = "is" if report.known == 1 else "are"
        notes.append(f"{plural(report.known, 'finding')} known to the baseline {are} not listed.")
    if report.gone:
        are = "is none any more" if report.gone == 1 else "are none any more"
        notes.append(f"{plural(report.gone, 'finding')} of the baseline {are}: write it anew with --write-baseline.")
    return notes


def together(reports: Sequence[Report]) -> Mapping[str, Any]:
    """Several reports for JSON."""
    return {
        "failed": any(report.failed for report in reports),
        "summary": {severity.value: sum(report.count(severity) for report in reports) for severity in Severity},
        "reports": [payload(report) for report in reports],
    }


def omissions(report: Report) -> tuple[str, ...]:
    """Notes on findings that are not in the list."""
    return tuple(f"{number:,} more findings of {code} are not listed" for code, number in report.omitted.items())


def payload(report: Report) -> Mapping[str, Any]:
    """The report for JSON; `data/schemas/check.json` describes it."""
    return {
        **picked(report, "model failed streams"),
        "summary": {severity.value: report.count(severity) for severity in Severity},
        "findings": [
            {
                "code": found.code,
                "name": CHECKS[found.code].name,
                **picked(found, "severity text=finding.text fix=finding.fix"),
                "file": file_of(report, found),
                **picked(found, "line=finding.line nodes=finding.nodes node_count=finding.count judged_with?"),
            }
            for found in report.findings
        ],
        "checked": [check.code for check in report.checks if check.code not in report.skipped],
        **picked(report, "skipped omitted assumed judged_with? known gone"),
    }


def file_of(report: Report, found: Reported) -> str:
    """The file that a finding is about: for a SavedModel the message in its folder, since no tool annotates folders."""
    if found.finding.file is not None:
        return found.finding.file
    model = Path(report.model)
    if model.is_dir():
        return str(next((model / name for name in SAVED_MODEL_FILES if (model / name).exists()), model))
    return report.model


def place_of(report: Report, found: Reported) -> str:
    """File and line, or the first node, or the model."""
    nodes = found.finding.nodes
    return _in_file(found) or (nodes[0] if nodes else report.model)


def _in_file(found: Reported) -> str:
    """File and line of a finding; "" where it names no file."""
    finding = found.finding
    return f"{finding.file}:{finding.line}" if finding.line else finding.file or ""


def page(check: Check) -> str:
    """The explanation of a code, as Markdown."""
    parts = [
        f"## {check.code} {check.name}",
        f"{check.title}. Severity: {check.severity.value}.{_needs(check)}",
        f"**What it finds.** {check.what}",
        f"**Why it matters.** {check.why}",
        f"**Example.** {check.example}",
        f"**How to mend it.** {check.mend}",
    ]
    defaults = {field.name: field.default for field in dataclasses.fields(Thresholds)}
    if check.limits:
        values = {name: "no limit" if defaults[name] is None else f"{defaults[name]:g}" for name in check.limits}
        limits = ", ".join(f"`{name}` ({value})" for name, value in values.items())
        parts.append(f"**Settings and their defaults.** `limits:` {limits}.")
    return "\n\n".join(parts) + "\n"


def _needs(check: Check) -> str:
    needed = {"rules": "`--rules`", "plan": "`--plan`", "against": "`--against`"}
    return f" Needs {', '.join(needed[need] for need in check.needs)}." if check.needs else ""
