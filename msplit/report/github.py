"""Findings as workflow commands of GitHub Actions, which become annotations of the pull request."""

from __future__ import annotations

from msplit.checks import Report, Severity
from msplit.escape import workflow_data, workflow_property
from msplit.report.findings import file_of, omissions

_COMMANDS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "notice"}


def dumps(*reports: Report) -> str:
    """One line per finding."""
    return "".join(f"{line}\n" for report in reports for line in _lines(report))


def _lines(report: Report) -> list[str]:
    lines = []
    for found in report.findings:
        properties = {"title": found.code, "file": file_of(report, found)}
        if found.finding.line is not None:
            properties["line"] = str(found.finding.line)
        listed = ",".join(f"{key}={workflow_property(value)}" for key, value in properties.items())
        said = workflow_data(f"{found.finding.text}. {' '.join(found.mend).removesuffix('.')}")
        lines.append(f"::{_COMMANDS[found.severity]} {listed}::{said}")
    lines += [f"::notice title=msplit check::{workflow_data(text)}" for text in omissions(report)]
    return lines
