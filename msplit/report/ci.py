"""Findings for CI systems: workflow commands of GitHub Actions, JUnit XML, and SARIF, which code scanning services read."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree

from msplit._version import __version__
from msplit.checks import Report
from msplit.checks.finding import Severity
from msplit.checks.run import Reported
from msplit.checks.subject import Check
from msplit.escape import json_document, visible, workflow_data, workflow_property, xml_document
from msplit.report.findings import baseline_notes, file_of, omissions, page, place_of

_COMMANDS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "notice"}
_LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "note"}


def github(*reports: Report) -> str:
    """A workflow command per finding, which becomes an annotation of the pull request."""
    lines = []
    for report in reports:
        for found in report.findings:
            properties = {"title": found.code, "file": file_of(report, found)}
            if found.finding.line is not None:
                properties["line"] = str(found.finding.line)
            listed = ",".join(f"{key}={workflow_property(value)}" for key, value in properties.items())
            said = workflow_data(f"{found.finding.text}. {' '.join(found.mend).removesuffix('.')}")
            lines.append(f"::{_COMMANDS[found.severity]} {listed}::{said}\n")
        lines += [f"::notice title=msplit check::{workflow_data(text)}\n" for text in omissions(report)]
    return "".join(lines)


def junit(*reports: Report, fail_on: Severity = Severity.ERROR) -> str:
    """JUnit XML: a suite per model, in it a test case per check. Findings of `fail_on` or worse fail it; others are its output."""
    failing = [{found.code for found in report.findings if found.severity.rank <= fail_on.rank} for report in reports]
    counts = {
        "tests": str(sum(len(report.checks) for report in reports)),
        "failures": str(sum(map(len, failing))),
        "errors": "0",
    }
    root = ElementTree.Element("testsuites", {"name": "msplit check", **counts})
    for report, codes in zip(reports, failing, strict=True):
        _suite(root, report, codes)
    ElementTree.indent(root)
    return xml_document(f'<?xml version="1.0" encoding="UTF-8"?>\n{ElementTree.tostring(root, encoding="unicode")}\n')


def _suite(root: ElementTree.Element, report: Report, failing: set[str]) -> None:
    counts = {
        "name": visible(report.model),
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
        ElementTree.SubElement(suite, "system-out").text = "\n".join(map(visible, said))


def _case(suite: ElementTree.Element, report: Report, check: Check, found: list[Reported], *, failed: bool) -> None:
    case = ElementTree.SubElement(
        suite, "testcase", name=f"{check.code} {check.name}", classname=visible(f"msplit.{report.model}"), time="0"
    )
    text = "\n".join(_line(report, one) for one in found)
    if check.code in report.skipped:
        ElementTree.SubElement(case, "skipped", message=visible(report.skipped[check.code]))
    elif failed:
        message = found[0].finding.text if len(found) == 1 else f"{len(found)} findings: {check.title}"
        ElementTree.SubElement(case, "failure", message=visible(message), type=check.code).text = text
    elif found:
        ElementTree.SubElement(case, "system-out").text = text


def _line(report: Report, found: Reported) -> str:
    mend = " ".join(found.mend).removesuffix(".")
    return visible(f"{found.severity.value}: {place_of(report, found)}: {found.finding.text}. {mend}")


def sarif(*reports: Report) -> str:
    """SARIF 2.1.0 (OASIS, Static Analysis Results Interchange Format): one run, a rule per check that was asked for."""
    checks = reports[0].checks
    number = {check.code: place for place, check in enumerate(checks)}
    notes = []
    for report in reports:
        said = [f"{code} was skipped: {why}" for code, why in report.skipped.items()]
        said += [*omissions(report), *baseline_notes(report)]
        notes += said if len(reports) == 1 else [f"{report.model}: {note}" for note in said]
    told = [{"level": "note", "message": {"text": note}} for note in notes]
    run: dict[str, Any] = {
        "tool": {"driver": {"name": "msplit", "version": __version__, "rules": [_rule(check) for check in checks]}},
        "columnKind": "unicodeCodePoints",
        "results": [_result(report, found, number[found.code]) for report in reports for found in report.findings],
        "invocations": [{"executionSuccessful": True, "toolExecutionNotifications": told}],
    }
    log = {"$schema": "https://json.schemastore.org/sarif-2.1.0.json", "version": "2.1.0", "runs": [run]}
    return json_document(json.dumps(log, indent=2, ensure_ascii=False))


def _rule(check: Check) -> Mapping[str, Any]:
    return {
        "id": check.code,
        "name": "".join(word.capitalize() for word in check.name.split("-")),
        "shortDescription": {"text": f"{check.title}."},
        "fullDescription": {"text": check.what},
        "help": {"text": f"{check.why} {check.mend}", "markdown": page(check)},
        "defaultConfiguration": {"level": _LEVELS[check.severity]},
    }


def _result(report: Report, found: Reported, rule: int) -> Mapping[str, Any]:
    finding = found.finding
    file = file_of(report, found)
    physical: dict[str, Any] = {"artifactLocation": {"uri": _uri(file)}}
    if finding.line is not None:
        physical["region"] = {"startLine": finding.line}
    location: dict[str, Any] = {"physicalLocation": physical}
    if finding.nodes:
        location["logicalLocations"] = [
            {"name": node.rpartition("/")[2] or node, "fullyQualifiedName": node, "kind": "element"}
            for node in finding.nodes
        ]
    return {
        "ruleId": found.code,
        "ruleIndex": rule,
        "level": _LEVELS[found.severity],
        "message": {"text": f"{finding.text}. {' '.join(found.mend)}"},
        "locations": [location],
        "partialFingerprints": {"msplitFinding/v1": _fingerprint(found, file)},
    }


def _uri(file: str) -> str:
    path = Path(file)
    return path.as_uri() if path.is_absolute() else quote(os.fsencode(path))


def _fingerprint(found: Reported, file: str) -> str:
    """Fingerprint that a finding keeps in the next run, though its figures may differ: code, file and first node."""
    first = found.finding.nodes[0] if found.finding.nodes else ""
    return hashlib.sha256("\n".join((found.code, file, first)).encode("utf-8", "surrogatepass")).hexdigest()
