"""Findings as JUnit XML: a test case per check, failed by findings that make the exit code 1, with the others as its output."""

from __future__ import annotations

from xml.etree import ElementTree

from msplit.checks import Check, Report, Reported, Severity
from msplit.escape import xml_document, xml_text
from msplit.report.findings import baseline_notes, omissions, place_of


def dumps(*reports: Report, fail_on: Severity = Severity.ERROR) -> str:
    """The XML document: a suite per model.

    Args:
        reports: The findings.
        fail_on: Findings of this severity, or worse, are failures.
    """
    failing = [{found.code for found in report.findings if found.severity.rank <= fail_on.rank} for report in reports]
    root = ElementTree.Element(
        "testsuites",
        {
            "name": "msplit check",
            "tests": str(sum(len(report.checks) for report in reports)),
            "failures": str(sum(map(len, failing))),
            "errors": "0",
        },
    )
    for report, codes in zip(reports, failing, strict=True):
        _suite(root, report, codes)
    ElementTree.indent(root)
    return xml_document(f'<?xml version="1.0" encoding="UTF-8"?>\n{ElementTree.tostring(root, encoding="unicode")}\n')


def _suite(root: ElementTree.Element, report: Report, failing: set[str]) -> None:
    counts = {
        "name": xml_text(report.model),
        "time": "0",
        "tests": str(len(report.checks)),
        "failures": str(len(failing)),
        "errors": "0",
        "skipped": str(len(report.skipped)),  # of suites only: Jenkins' schema has no such count for all of them
    }
    suite = ElementTree.SubElement(root, "testsuite", counts)
    for check in report.checks:
        found = [one for one in report.findings if one.code == check.code]
        _case(suite, report, check, found, failed=check.code in failing)
    said = [*omissions(report), *baseline_notes(report)]
    if said:
        ElementTree.SubElement(suite, "system-out").text = "\n".join(map(xml_text, said))


def _case(suite: ElementTree.Element, report: Report, check: Check, found: list[Reported], *, failed: bool) -> None:
    case = ElementTree.SubElement(
        suite, "testcase", name=f"{check.code} {check.name}", classname=xml_text(f"msplit.{report.model}"), time="0"
    )
    text = "\n".join(_line(report, one) for one in found)
    if check.code in report.skipped:
        ElementTree.SubElement(case, "skipped", message=xml_text(report.skipped[check.code]))
    elif failed:
        message = found[0].finding.text if len(found) == 1 else f"{len(found)} findings: {check.title}"
        ElementTree.SubElement(case, "failure", message=xml_text(message), type=check.code).text = text
    elif found:
        ElementTree.SubElement(case, "system-out").text = text


def _line(report: Report, found: Reported) -> str:
    mend = " ".join(found.mend).removesuffix(".")
    return xml_text(f"{found.severity.value}: {place_of(report, found)}: {found.finding.text}. {mend}")
