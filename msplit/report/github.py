"""Findings as workflow commands of GitHub Actions, which become annotations of the pull request."""

from __future__ import annotations

from msplit.checks import Report, Severity
from msplit.report.findings import file_of, omissions

_COMMANDS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "notice"}


def dumps(report: Report) -> str:
    """One line per finding."""
    lines = []
    for found in report.findings:
        properties = {"title": found.code, "file": file_of(report, found)}
        if found.finding.line is not None:
            properties["line"] = str(found.finding.line)
        listed = ",".join(f"{key}={_property(value)}" for key, value in properties.items())
        lines.append(
            f"::{_COMMANDS[found.severity]} {listed}::{_data(f'{found.finding.text}. Fix: {found.finding.fix}')}"
        )
    lines += [f"::notice title=msplit check::{_data(text)}" for text in omissions(report)]
    return "".join(f"{line}\n" for line in lines)


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
