"""Findings as JUnit XML: a test case per check, failed by findings that make the exit code 1, with the others as its output."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from msplit.checks import Check, Report, Reported, Severity
from msplit.report.findings import omissions, place_of

_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What XML 1.0 can not hold, even escaped."""


def dumps(report: Report, fail_on: Severity = Severity.ERROR) -> str:
    """The XML document.

    Args:
        report: The findings.
        fail_on: Findings of this severity, or worse, are failures.
    """
    failing = {found.code for found in report.findings if found.severity.rank <= fail_on.rank}
    counts: dict[str, str] = {
        "tests": str(len(report.checks)),
        "failures": str(len(failing)),
        "errors": "0",
    }
    skipped = str(len(report.skipped))  # of suites only: Jenkins' schema has no such count for all of them
    root = ElementTree.Element("testsuites", {"name": "msplit check", **counts})
    suite = ElementTree.SubElement(
        root, "testsuite", {"name": _clean(report.model), "time": "0", **counts, "skipped": skipped}
    )
    for check in report.checks:
        found = [one for one in report.findings if one.code == check.code]
        _case(suite, report, check, found, failed=check.code in failing)
    if report.omitted:
        ElementTree.SubElement(suite, "system-out").text = "\n".join(omissions(report))
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _case(suite: ElementTree.Element, report: Report, check: Check, found: list[Reported], *, failed: bool) -> None:
    case = ElementTree.SubElement(
        suite, "testcase", name=f"{check.code} {check.name}", classname=_clean(f"msplit.{report.model}"), time="0"
    )
    text = _clean("\n".join(_line(report, one) for one in found))
    if check.code in report.skipped:
        ElementTree.SubElement(case, "skipped", message=_clean(report.skipped[check.code]))
    elif failed:
        message = found[0].finding.text if len(found) == 1 else f"{len(found)} findings: {check.title}"
        ElementTree.SubElement(case, "failure", message=_clean(message), type=check.code).text = text
    elif found:
        ElementTree.SubElement(case, "system-out").text = text


def _line(report: Report, found: Reported) -> str:
    return f"{found.severity.value}: {place_of(report, found)}: {found.finding.text}. Fix: {found.finding.fix}"


def _clean(text: str) -> str:
    return _FORBIDDEN.sub("\ufffd", text)
