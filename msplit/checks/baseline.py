"""Known findings: what a project has looked at and lives with, so that only what is new fails a run.

    {"schema_version": 1, "kind": "baseline",
     "findings": [{"model": "models/ranker.pb", "code": "MS012", "file": null, "text": "stream # has # µs of work …",
                   "nodes": [], "node_count": 0}, …]}

`docs/schemas/baseline.json` describes it. Paths are relative to the folder of the baseline, so that it can be committed with the models.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from msplit.checks.run import Report, Reported
from msplit.checks.settings import CheckSettings
from msplit.errors import MsplitError
from msplit.formats.text import JsonValue

SCHEMA_VERSION = 1
KIND = "baseline"
MAX_BYTES = 64 << 20
"""Longest baseline."""

_KEYS = ("model", "code", "file", "text", "nodes", "node_count")
_NUMBER = re.compile(r"[0-9][0-9.,]*")
_FIX = "write it anew: msplit check MODEL… --write-baseline FILE"


@dataclass(frozen=True)
class Known:
    """A known finding.

    Attributes:
        model: The model, relative to the baseline's folder.
        file: The file that it is about where that is not the model, likewise; None: the model.
        text: What it says, with `#` for numbers: for findings that name no nodes.
        nodes: The first nodes that it is about.
        count: All nodes that it is about.
    """

    model: str
    code: str
    file: str | None
    text: str
    nodes: tuple[str, ...]
    count: int

    def covers(self, other: Known) -> bool:
        """Whether a finding is this one, or less of it: about no node that this one is not about."""
        if (self.model, self.code, self.file) != (other.model, other.code, other.file) or other.count > self.count:
            return False
        return set(other.nodes) <= set(self.nodes) if other.nodes else self.text == other.text


def load(path: str | os.PathLike[str]) -> tuple[Known, ...]:
    """Reads a baseline.

    Raises:
        MsplitError: It can not be read, or is none; the message says what is wrong with it, and where.
    """
    top = JsonValue.read(path, MAX_BYTES, what=KIND, fix=_FIX).of_version(KIND, SCHEMA_VERSION)
    top.object(("schema_version", "kind", "findings"))
    return tuple(_known(item) for item in top.at("findings").items())


def _known(item: JsonValue) -> Known:
    item.object(_KEYS)
    return Known(
        model=item.at("model").text(),
        code=item.at("code").text(),
        file=item.at("file").or_none(JsonValue.text),
        text=item.at("text").text(),
        nodes=tuple(name.text() for name in item.at("nodes").items()),
        count=item.at("node_count").whole(),
    )


def dumps(reports: Sequence[Report], folder: Path) -> bytes:
    """The findings of some reports as a baseline that lies in a folder. The same findings give the same bytes."""
    found = [_of(report, one, folder) for report in reports for one in report.findings]
    findings = [
        {
            "model": one.model,
            "code": one.code,
            "file": one.file,
            "text": one.text,
            "nodes": list(one.nodes),
            "node_count": one.count,
        }
        for one in found
    ]
    return (
        json.dumps({"schema_version": SCHEMA_VERSION, "kind": KIND, "findings": findings}, indent=1) + "\n"
    ).encode()


def is_baseline(path: Path) -> bool:
    """Whether a file is a baseline, which may be replaced by another."""
    try:
        load(path)
    except MsplitError:
        return False
    return True


def without_known(report: Report, known: Sequence[Known], folder: Path, settings: CheckSettings) -> Report:
    """A report without the findings that are known to the baseline in a folder. The settings say what is severe enough to fail."""
    places = [_of(report, one, folder) for one in report.findings]
    new = tuple(
        one
        for one, place in zip(report.findings, places, strict=True)
        if not any(entry.covers(place) for entry in known)
    )
    model = _relative(report.model, folder)
    ran = {check.code for check in report.checks if check.code not in report.skipped}
    gone = sum(
        entry.model == model and entry.code in ran and not any(entry.covers(place) for place in places)
        for entry in known
    )
    return replace(
        report,
        findings=new,
        known=len(report.findings) - len(new),
        gone=gone,
        failed=any(one.severity.rank <= settings.fail_on.rank for one in new),
    )


def _of(report: Report, one: Reported, folder: Path) -> Known:
    finding = one.finding
    file = None if finding.file is None else _relative(finding.file, folder)
    return Known(
        _relative(report.model, folder), one.code, file, _NUMBER.sub("#", finding.text), finding.nodes, finding.count
    )


def _relative(path: str, folder: Path) -> str:
    return Path(os.path.relpath(os.path.realpath(path), os.path.realpath(folder))).as_posix()
