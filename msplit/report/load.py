"""The report of `load`: as a document, as plain data, as CSV, and as one HTML file with the curves."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from msplit import escape
from msplit.report.benchmark import machine
from msplit.report.document import Document, Table, count, micros, percent, picked, plural, ratio, size
from msplit.report.html import document as html
from msplit.report.html.document import Plot
from msplit.serving.loadtest.results import Latency, LoadResult, LoadRun, LoadSweep, Point, RepeatSpread, TargetResult

_QUANTITIES = ("p50", "p90", "p99", "mean", "max")
_TABLED = ("p50", "p90", "p99", "max")


def document(found: LoadResult) -> Document:
    """Highest rate of each target, and the latency of each level."""
    measured = [target for target in found.targets if not target.skipped]
    answers = sum(point.total("checked") for point in found.points)
    apart = f"{found.distinct[1]} of {count(found.distinct[0])}"
    rows, times = plural(found.rows, "row"), plural(found.repeat, "time")
    rows = "as many rows as below" if found.sweep and "rows" in found.sweep.names else rows
    wrong = _wrong(found.points)
    facts = [
        *([("WRONG ANSWERS", "; ".join(wrong))] if wrong else []),
        *([("set", found.sweep.options or found.sweep.best or "none is within the bound")] if found.sweep else []),
        ("requests", f"{rows} each; {apart} prepared ones have an answer that would pass for no other's"),
        ("verified", f"{'all ' if not found.wrong else ''}{count(answers)} answers, against {found.checked_against}"),
        ("measured", f"{found.seconds:g} s, {times}, in turns, each after {found.warmup:g} s of warming up"),
        ("machine", machine(found.environment)),
    ]
    each = [table for one in measured for table in _tables(one, _points(found, one))]
    return Document(
        title=found.model,
        facts=facts,
        tables=[_swept(found.sweep, measured)] if found.sweep else [_most(found, measured), *each],
        warnings=[
            *_warnings(found.points),
            *(f"{target.label}: not measured: {target.skipped}" for target in found.targets if target.skipped),
        ],
        notes=[*(f"{one.label}: {one.about}{_steps(one)}" for one in measured if not found.sweep), *found.notes],
    )


_GIVEN_UP = "still waiting a second after the end"


def _points(found: LoadResult, target: TargetResult) -> list[Point]:
    return [point for point in found.points if point.target == target.label]


def _steps(target: TargetResult) -> str:
    """Counts of a pool, in words."""
    facts = target.facts
    if not facts.get("steps") or "filled" not in facts:
        return ""
    filled = f", {percent(facts['filled'], facts['rows'])} of whose rows were nobody's" if facts["filled"] else ""
    return f"; {count(facts['requests'])} requests in {plural(facts['steps'], 'step')}{filled}"


def _wrong(points: Sequence[Point]) -> list[str]:
    """Errors in answers, by point."""
    return [
        f"{point.target}, {point.name}: {count(wrong)} of {count(point.total('checked'))}; {_first(run.says for run in point.runs)}"
        for point in points
        if (wrong := point.total("wrong"))
    ]


def _first(texts: Iterable[str]) -> str:
    return next(filter(None, texts), "")


def _warnings(points: Sequence[Point]) -> list[str]:
    return [
        f"{point.target}, {point.name}: {plural(failed, 'request')} failed: {_first(run.why for run in point.runs)}"
        for point in points
        if (failed := point.total("failed"))
    ]


def _most(found: LoadResult, measured: Sequence[TargetResult]) -> Table:
    """The level at which each target answered most."""
    rows = []
    first: float | None = None
    for target in measured:
        points = _points(found, target)
        if not points:
            continue
        best = max(points, key=lambda point: point.throughput.value)
        answered = best.throughput.value
        first = first or answered
        gain = ratio(first / answered) if first and answered and target.echo else "-"
        rows.append((target.label, best.name, count(round(answered)), _time(best.latency("p50")), gain))
    note = f"median of the repeats; the last column: {measured[0].label} over this" if measured else ""
    return Table("Most answers per second", ("", "at", ">per s", ">p50", ">gain"), rows, note)


def _swept(sweep: LoadSweep, measured: Sequence[TargetResult]) -> Table:
    """The best level of each combination, and which of them to choose."""
    combinations = [target for target in measured if "settings" in target.facts]
    rows = []
    for target in combinations:
        point, memory = sweep.levels.get(target.label), target.facts.get("memory_bytes")
        figures, mark = ("-", "-", "-", "-"), "unanswered"
        if point is not None and (p99 := point.latency("p99")) is not None:
            most = count(round(point.throughput.value)) + (" *" if point.limited else "")
            figures = (point.name, most, _time(point.latency("p50")), _time(p99))
            within = sweep.latency_us is None or p99.value <= sweep.latency_us
            mark = "best" if target.label == sweep.best else "" if within else "over the bound"
        rows.append((*map(str, target.facts["settings"].values()), *figures, size(memory) if memory else "-", mark))
    heads = [name.replace("_", "-") for name in sweep.names]
    columns = [f">{name}" for name in (*heads, "load", "per s", "p50", "p99", "memory")]
    bound = "" if sweep.latency_us is None else f" with a p99 of at most {micros(sweep.latency_us)}"
    note = f"best: nearly the most rows per second{bound}, and of these what takes least; *: the generator is the limit"
    return Table("Sweep", (*columns, ""), rows, note)


def _tables(target: TargetResult, points: Sequence[Point]) -> list[Table]:
    """Latency and throughput by level, and by priority where a pool has several; what is open in a table of its own."""
    found = []
    for is_open, title, head in ((False, "closed loop", "clients"), (True, "open loop", "arrivals")):
        chosen = [point for point in points if point.level.is_open is is_open]
        if not chosen:
            continue
        rows = [
            (_short(point) + (" *" if point.limited else ""), count(round(point.throughput.value)), *_latencies(point))
            for point in chosen
        ]
        notes = list(dict.fromkeys(f"* {point.name}: {point.limited}" for point in chosen if point.limited))
        notes += [f"{point.name}: {lost}" for point in chosen if (lost := _lost(point))]
        columns = [f">{quantity}" for quantity in _TABLED]
        found.append(Table(f"{target.label}, {title}", (head, ">per s", *columns), rows, "; ".join(notes)))
        by_priority = [
            (_short(point), str(level), *_latencies(point, level))
            for point in chosen
            for level in (point.priorities if "steps" in target.facts else ())
        ]
        if by_priority:
            found.append(Table(f"{target.label}, {title}, by priority", (head, ">priority", *columns), by_priority))
    return found


def _latencies(point: Point, priority: int | None = None) -> list[str]:
    return [_time(point.latency(quantity, priority)) for quantity in _TABLED]


def _short(point: Point) -> str:
    """A level below a heading that says which kind it is."""
    return str(point.level.clients) if point.level.clients else point.name


def _lost(point: Point) -> str:
    """Requests without an answer, in words."""
    said = {"refused": "refused", "timed_out": "timed out", "given_up": _GIVEN_UP, "failed": "failed"}
    lost = {text: point.total(key) for key, text in said.items()}
    return ", ".join(f"{percent(number, point.total('requests'))} {text}" for text, number in lost.items() if number)


def _time(spread: RepeatSpread | None) -> str:
    return "-" if spread is None else micros(spread.value)


def payload(found: LoadResult) -> dict[str, Any]:
    """Everything for JSON: each repeat of each level of each target."""
    return {
        **picked(found, "model rows"),
        "distinct": dict(zip(("requests", "told_apart"), found.distinct, strict=True)),
        **picked(found, "checked_against tolerances wrong failed=broken time_s=seconds warmup_s=warmup repeat"),
        "arms": [
            {
                **picked(target, "label about echo? skipped? facts"),
                "points": [_point(point) for point in _points(found, target)],
            }
            for target in found.targets
        ],
        **picked(found, "notes environment"),
        **({"sweep": picked(found.sweep, "latency_bound_us=latency_us best options")} if found.sweep else {}),
    }


_SETTINGS = ("rows", "max_batch", "groups", "workers")
_COUNTS = ("requests", "answered", "refused", "timed_out", "given_up", "failed", "checked", "wrong")


def text(found: LoadResult) -> str:
    """CSV with a line of headings, and a row per target and level. Later releases add columns at the end."""
    out, facts, sweep = io.StringIO(), {target.label: target.facts for target in found.targets}, found.sweep
    for number, point in enumerate(found.points):
        own = facts[point.target]
        settings = {**dict.fromkeys(_SETTINGS), "rows": found.rows, **own.get("settings", {})}
        cells = {"model": found.model, "target": point.target, **settings, "memory_bytes": own.get("memory_bytes")}
        cells |= {**_point(point), "runs": len(point.runs)} | {name: point.total(name) for name in _COUNTS}
        cells["best"] = "yes" if sweep and sweep.levels.get(sweep.best) is point else None
        writer = csv.DictWriter(out, list(cells), lineterminator="\n")
        if not number:
            writer.writeheader()
        writer.writerow({name: "" if value is None else escape.csv_cell(str(value)) for name, value in cells.items()})
    return out.getvalue()


def _point(point: Point) -> dict[str, Any]:
    result = picked(point, "name clients=level.clients rate_per_s=level.rate")
    for name, spread, unit in (
        ("throughput", point.throughput, "per_s"),
        *((quantity, point.latency(quantity), "us") for quantity in _QUANTITIES),
    ):
        for key, part in (("", "value"), ("_least", "low"), ("_most", "high")):
            result[f"{name}{key}_{unit}"] = None if spread is None else getattr(spread, part)
    return {**result, "limited": point.limited or None, "runs": [_run(run) for run in point.runs]}


def _run(run: LoadRun) -> dict[str, Any]:
    return {
        **picked(run, "time_s=seconds requests answered refused timed_out given_up failed checked wrong says? why?"),
        "throughput_per_s": run.throughput,
        "latency": _latency(run.latency),
        "by_priority": [{"priority": level, "latency": _latency(one)} for level, one in run.by_priority.items()],
        **picked(run, "most_in_flight late_us cut"),
    }


def _latency(one: Latency | None) -> dict[str, float] | None:
    return None if one is None else {f"{quantity}_us": getattr(one, quantity) for quantity in _QUANTITIES}


_HINT = (
    "Latency over throughput, a point per level: the median of the repeats, with the least and the most of them as a whisker. "
    "What the benchmark itself costs (echo) has no curve."
)


def page(found: LoadResult) -> str:
    """One HTML file: the curves and the tables. Nothing in it is fetched."""
    said = document(found)
    return html.page(replace(said, title=f"load: {said.title}"), _plots(found), _HINT)


def _plots(found: LoadResult) -> list[Plot]:
    """p50 and p99 over throughput, for the closed and for the open loop, of what answers: an echo would stretch the axes."""
    plots = []
    for is_open, loop in ((False, "closed loop"), (True, "open loop")):
        for quantity in ("p50", "p99"):
            curves = {one.label: _curve(found, one, quantity, is_open=is_open) for one in found.targets if one.echo}
            shown = {label: points for label, points in curves.items() if points}
            if shown:
                title = f"{quantity} over throughput, {loop}"
                plots.append(Plot(title, "answers per second", f"{quantity} latency, µs", shown))
    return plots


def _curve(
    found: LoadResult, target: TargetResult, quantity: str, *, is_open: bool
) -> dict[float, tuple[float, float, float]]:
    return {
        point.throughput.value: (spread.value, spread.low, spread.high)
        for point in _points(found, target)
        if point.level.is_open is is_open
        and (spread := point.latency(quantity)) is not None
        and point.throughput.value > 0
    }
