"""Reports of `check`: for people, for programs, and for CI systems.

Findings of the checks, as a document (terminal, Markdown), as plain data for JSON, and as pages of explanation.

Findings for CI systems: workflow commands of GitHub Actions, JUnit XML, and SARIF, which code scanning services read.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree

from msplit._version import __version__
from msplit.checks import Report
from msplit.checks.run import CHECKS, Reported
from msplit.checks.subject import Check, Severity, Thresholds
from msplit.escape import json_document, visible, workflow_data, workflow_property, xml_document
from msplit.formats.reader import SAVED_MODEL_FILES
from msplit.report.document import Document, Table, picked, plural


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


def together(reports: Sequence[Report], errors: Mapping[str, str]) -> Mapping[str, Any]:
    """Several reports for JSON, with a message for each model that has none."""
    return {
        "failed": any(report.failed for report in reports),
        "summary": {severity.value: sum(report.count(severity) for report in reports) for severity in Severity},
        "reports": [payload(report) for report in reports],
        "errors": [{"model": model, "error": why} for model, why in errors.items()],
    }


def summary(reports: Sequence[Report], errors: Mapping[str, str]) -> Document:
    """A last word on several models."""
    found = [
        f"{plural(sum(counts), severity.value)} in {plural(len(counts), 'model')}"
        for severity in Severity
        if (counts := [number for report in reports if (number := report.count(severity))])
    ]
    clean = sum(not report.findings for report in reports)
    notes = [f"{plural(len(reports), 'model')}: {', '.join([*found, f'{clean:,} without findings'])}."]
    if errors:
        notes.append(f"{plural(len(errors), 'model')} could not be checked.")
    return Document("msplit check: all together", notes=notes)


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


def junit(*reports: Report, fail_on: Severity = Severity.ERROR, errors: Mapping[str, str] | None = None) -> str:
    """JUnit XML: a suite per model, in it a test case per check. Findings of `fail_on` or worse fail it; others are its output. A model
    that could not be checked is a suite with an error."""
    errors = errors or {}
    failing = [{found.code for found in report.findings if found.severity.rank <= fail_on.rank} for report in reports]
    counts = {
        "tests": str(sum(len(report.checks) for report in reports) + len(errors)),
        "failures": str(sum(map(len, failing))),
        "errors": str(len(errors)),
    }
    root = ElementTree.Element("testsuites", {"name": "msplit check", **counts})
    for report, codes in zip(reports, failing, strict=True):
        _suite(root, report, codes)
    for model, why in errors.items():
        shown = visible(model)
        attributes = {"name": shown, "time": "0", "tests": "1", "failures": "0", "errors": "1", "skipped": "0"}
        suite = ElementTree.SubElement(root, "testsuite", attributes)
        case = ElementTree.SubElement(suite, "testcase", name="read", classname=visible(f"msplit.{model}"), time="0")
        ElementTree.SubElement(case, "error", message=visible(why), type="error")
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


def sarif(*reports: Report, errors: Mapping[str, str] | None = None) -> str:
    """SARIF 2.1.0 (OASIS, Static Analysis Results Interchange Format): one run, a rule per check that was asked for."""
    checks = reports[0].checks if reports else ()
    number = {check.code: place for place, check in enumerate(checks)}
    notes = []
    for report in reports:
        said = [f"{code} was skipped: {why}" for code, why in report.skipped.items()]
        said += [*omissions(report), *baseline_notes(report)]
        notes += said if len(reports) == 1 else [f"{report.model}: {note}" for note in said]
    told = [{"level": "note", "message": {"text": note}} for note in notes]
    told += [{"level": "error", "message": {"text": why}} for why in (errors or {}).values()]
    run: dict[str, Any] = {
        "tool": {"driver": {"name": "msplit", "version": __version__, "rules": [_rule(check) for check in checks]}},
        "columnKind": "unicodeCodePoints",
        "results": [_result(report, found, number[found.code]) for report in reports for found in report.findings],
        "invocations": [{"executionSuccessful": not errors, "toolExecutionNotifications": told}],
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
