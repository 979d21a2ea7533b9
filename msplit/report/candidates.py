"""The report of `assign --compare`: every way to choose streams, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msplit.benchmark.comparison import Compared, Row
from msplit.report.document import Document, Table
from msplit.report.jsonio import picked
from msplit.report.text import heading, micros, plural, ratio

_MARK = " ←"


def document(found: Compared, written: Sequence[str] = ()) -> Document:
    """A table of them, what was skipped and why, and which `auto` takes."""
    tried = [row for row in found.rows if row.skipped is None]
    note = "predicted: simulated; gain: over one stream"
    if _measured(tried):
        note += "; memory: of values at their highest, over one stream's"
    tables = [_table("Candidates", tried, note, found.auto)]
    if found.kernels:
        note = "over the kernels that run, each way on its best streams; gain: over plain kernels on one stream"
        tables.append(_table("Kernels", found.kernels, note))
    skipped = [f"{row.name} was skipped: {row.skipped}." for row in found.rows if row.skipped is not None]
    return Document(
        title=heading(found.flat.model.path, found.flat.model.format),
        facts=_facts(found),
        tables=tables,
        notes=[
            *skipped,
            *_verdict(found, tried),
            *_of_kernels(found),
            *(written or ["Nothing was written: --compare only compares."]),
        ],
    )


def _facts(found: Compared) -> list[tuple[str, str]]:
    one = found.rows[0].predicted_us
    most = f", {ratio(one / found.bound_us)} at most" if found.bound_us > 0 else ""
    return [
        ("streams", f"{found.streams} at most"),
        ("costs", found.costs.gpu if found.costs.source == "static" else found.costs.source),
        ("one stream", f"{micros(one)}, simulated"),
        ("lower bound", f"{micros(found.bound_us)}{most}"),
        ("measured", f"on {found.device}" if found.device else f"no: {found.why_not}"),
    ]


def _measured(rows: Sequence[Row]) -> bool:
    return any(row.measured_us is not None for row in rows)


def _table(title: str, rows: Sequence[Row], note: str, auto: str = "") -> Table:
    measured = _measured(rows)
    columns = ["", ">streams", ">waits", ">predicted", ">gain"]
    if measured:
        columns += [">measured", ">gain", ">memory"]
    return Table(title, columns, [_cells(row, auto, measured) for row in rows], note)


def _cells(row: Row, auto: str, measured: bool) -> tuple[str, ...]:
    cells = [
        row.name + (_MARK if row.name == auto else ""),
        str(row.streams),
        str(row.waits),
        micros(row.predicted_us),
        f"{row.predicted_gain:.2f}",
    ]
    if measured:
        cells += [
            "-" if row.measured_us is None else micros(row.measured_us),
            "1.00" if row.gain is None else f"{row.gain.value:.2f}",
            "-" if row.memory is None else f"{row.memory:.2f}",
        ]
    return tuple(cells)


def _of_kernels(found: Compared) -> list[str]:
    if not found.kernels:
        return [f"Larger kernels are left out: {found.no_kernels}."]
    lines = []
    if found.same:
        lines.append(f"The same as simpler kernels, and left out: {', '.join(found.same)}.")
    top = min(found.kernels, key=lambda row: row.predicted_us)
    if top is not found.kernels[0]:
        lines.append(
            f"With larger kernels, '{top.name}' is predicted to take {micros(top.predicted_us)}: "
            "`msplit bench --rules auto` runs what is best of these."
        )
    return lines


def _verdict(found: Compared, tried: Sequence[Row]) -> list[str]:
    auto = next(row for row in tried if row.name == found.auto)
    lines = [
        f"The rule `auto` takes '{auto.name}' ({_MARK.strip()}): {micros(auto.predicted_us)} on {plural(auto.streams, 'stream')}."
    ]
    quickest = min(row.predicted_us for row in tried if not row.name.startswith("rules "))
    if micros(quickest) != micros(auto.predicted_us):
        lines.append(
            "What is predicted to be faster gains less than 1 %, or has less room to spare: ways are compared by their mean when "
            "kernels take a tenth more or less."
        )
    gains = [row for row in tried if row.gain is not None]
    if gains:
        top = max(gains, key=lambda row: row.gain.value if row.gain else 0.0)
        assert top.gain is not None
        if top.gain.value <= 1:
            lines.append("Measured, none is faster than one stream.")
        elif top.name != auto.name:
            lines.append(f"Measured, '{top.name}' is the fastest: {top.gain.value:.2f} times one stream.")
        lines.append("`msplit tune` starts from the best of them and searches on.")
    return lines


def payload(found: Compared, written: Sequence[str] = ()) -> dict[str, Any]:
    """Everything for JSON."""
    return {
        **picked(
            found, "model=flat.model.path streams costs=costs.source gpu=costs.gpu bound_us auto measured_on=device?"
        ),
        "not_measured": found.why_not or None,
        "candidates": [_row(row) for row in found.rows],
        "kernels": [_row(row) for row in found.kernels],
        "no_kernels": found.no_kernels or None,
        "written": written,
    }


def _row(row: Row) -> dict[str, Any]:
    found = picked(
        row, "name streams waits predicted_us predicted_gain measured_us gain memory memory_ratio=memory skipped"
    )
    return found | dict.fromkeys(("predicted_us", "predicted_gain") if row.skipped else ())
