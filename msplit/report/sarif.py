"""Findings as SARIF 2.1.0 (OASIS, Static Analysis Results Interchange Format), which code scanning services read."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from msplit._version import __version__
from msplit.checks import Check, Report, Reported, Severity
from msplit.escape import json_document
from msplit.report.findings import baseline_notes, file_of, omissions, page

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"

_LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "note"}


def dumps(*reports: Report) -> str:
    """The JSON document."""
    return json_document(json.dumps(log(*reports), indent=2, ensure_ascii=False))


def log(*reports: Report) -> Mapping[str, Any]:
    """The SARIF log: one run, with a rule per check that was asked for, the same of every model."""
    checks = reports[0].checks
    number = {check.code: place for place, check in enumerate(checks)}
    notes = []
    for report in reports:
        said = [f"{code} was skipped: {why}" for code, why in report.skipped.items()]
        said += [*omissions(report), *baseline_notes(report)]
        notes += said if len(reports) == 1 else [f"{report.model}: {note}" for note in said]
    run: dict[str, Any] = {
        "tool": {"driver": {"name": "msplit", "version": __version__, "rules": [_rule(check) for check in checks]}},
        "columnKind": "unicodeCodePoints",
        "results": [_result(report, found, number[found.code]) for report in reports for found in report.findings],
        "invocations": [
            {
                "executionSuccessful": True,
                "toolExecutionNotifications": [{"level": "note", "message": {"text": note}} for note in notes],
            }
        ],
    }
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


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
    """The same for the same finding in the next run, though its figures may differ: code, file and first node."""
    first = found.finding.nodes[0] if found.finding.nodes else ""
    return hashlib.sha256("\n".join((found.code, file, first)).encode("utf-8", "surrogatepass")).hexdigest()
