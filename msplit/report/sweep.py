"""Report of `bench` for several batches, and its rows as CSV.

The report of `bench` for several batches: one table, one plot.

Results of `bench` as CSV: a row per variant and batch.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from msplit import escape
from msplit.benchmark.results import BatchSweep, Bench, Line, lines
from msplit.core.statistics import Ratio, Summary
from msplit.flatten.flat import FlatGraph
from msplit.report import benchmark
from msplit.report.document import Document, Table, heading, micros
from msplit.report.html import document as html
from msplit.report.html.document import Plot
from msplit.verify.results import VariantResult


def document(flat: FlatGraph, found: BatchSweep, written: Sequence[str] = ()) -> Document:
    """Times and gains by batch, and what the benches of the batches have to say."""
    shown = lines(found)
    single = {batch: benchmark.document(flat, run) for batch, run in found.runs.items()}
    facts: list[tuple[str, str]] = []
    for name in dict.fromkeys(name for one in single.values() for name, _ in one.facts):
        values = {batch: [value for known, value in one.facts if known == name] for batch, one in single.items()}
        facts += [(name, value) for value in _by_batch(values)]
    return Document(
        title=heading(flat.model.source, flat.model.format),
        facts=facts,
        tables=[_times(found, shown), *_gains(found, shown)],
        warnings=[
            *(f"batch {batch} could not be run: {why}" for batch, why in found.failed.items()),
            *_by_batch({batch: one.warnings for batch, one in single.items()}),
        ],
        notes=[*_by_batch({batch: one.notes for batch, one in single.items()}), *written],
    )


def clock_of(shown: Sequence[Line]) -> str:
    """The device's clock where every variant has it; else the host's, which all have."""
    variants = [variant for line in shown for variant in line.variants.values()]
    return "device" if variants and all(variant.device for variant in variants) else "host"


def _summary(variant: VariantResult | None, clock: str) -> Summary | None:
    return None if variant is None else variant.device if clock == "device" else variant.host


def _times(found: BatchSweep, shown: Sequence[Line]) -> Table:
    clock = clock_of(shown)
    rows = []
    for line in shown:
        summaries = [_summary(line.variants.get(batch), clock) for batch in found.runs]
        rows.append((line.name, *("-" if one is None else micros(one.median * 1e6) for one in summaries)))
    about = "back-to-back steps by the GPU's own clock" if clock == "device" else "a user's step by the host's clock"
    return Table("One step, by batch", ("", *(f">{batch}" for batch in found.runs)), rows, f"median; {about}")


def _gains(found: BatchSweep, shown: Sequence[Line]) -> list[Table]:
    """Speedup over the first line that others are compared with in every batch."""
    clock = clock_of(shown)
    variants = [variant for line in shown for variant in line.variants.values()]
    over = list(dict.fromkeys(ratio.over for variant in variants for ratio in variant.ratios if ratio.clock == clock))
    label = over[0] if len(over) == 1 else next((label for label in over if "1 stream" in label), None)
    if label is None:
        return []
    rows = []
    for line in shown:
        known = [line.variants.get(batch) for batch in found.runs]
        ratios = [None if variant is None else variant.ratio_over(label, clock) for variant in known]
        if any(ratios):
            rows.append((line.name, *map(_gain, ratios)))
    note = f"by the {clock}'s clock; above 1 is faster; ?: may as well be 1 (--format csv and json have the intervals)"
    return [Table(f"Times faster than {label}", ("", *(f">{batch}" for batch in found.runs)), rows, note)]


def _gain(ratio: Ratio | None) -> str:
    """A ratio without its interval, which a column for each batch has no room for."""
    return "-" if ratio is None else f"{ratio.value:.2f}{'' if ratio.significant else ' ?'}"


def _by_batch(said: Mapping[int, Sequence[str]]) -> list[str]:
    """Each sentence once, with the batches that it is said of where it is not said of all."""
    batches: dict[str, list[int]] = {}
    for batch, sentences in said.items():
        for sentence in sentences:
            batches.setdefault(sentence, []).append(batch)
    return [
        sentence if len(of) == len(said) else f"Batch {', '.join(map(str, of))}: {sentence}"
        for sentence, of in batches.items()
    ]


def payload(flat: FlatGraph, found: BatchSweep, written: Sequence[str] = ()) -> dict[str, Any]:
    """Everything for JSON: each batch as `benchmark.payload` has it, and the table."""
    shown = lines(found)
    clock = clock_of(shown)
    return {
        "model": flat.model.source,
        "sweep": {
            "batches": list(found.runs),
            "failed": [{"batch": batch, "why": why} for batch, why in found.failed.items()],
            "clock": clock,
            "lines": [
                {
                    "name": line.name,
                    "points": [
                        {"batch": batch, "variant": variant.label, "median_us": summary.median * 1e6}
                        for batch, variant in line.variants.items()
                        if (summary := _summary(variant, clock)) is not None
                    ],
                }
                for line in shown
            ],
        },
        "runs": [benchmark.payload(flat, run) for run in found.runs.values()],
        "written": list(written),
    }


def page(flat: FlatGraph, found: BatchSweep) -> str:
    """One HTML file: the time of a step over the batches, and the tables."""
    shown = lines(found)
    clock = clock_of(shown)
    curves = {}
    for line in shown:
        points = {}
        for batch, variant in sorted(line.variants.items()):
            summary = _summary(variant, clock)
            if summary is not None:
                half = summary.iqr / 2
                low = max(summary.minimum, summary.median - half)
                points[float(batch)] = (summary.median * 1e6, low * 1e6, (summary.median + half) * 1e6)
        if points:
            curves[line.name] = points
    said = document(flat, found)
    plot = Plot("One step, by batch", "batch, rows", f"one step by the {clock}'s clock, µs", curves, ticks=True)
    hint = "The median time of a step over the batch, with the middle half of the times as a whisker."
    return html.page(replace(said, title=f"bench: {said.title}"), [plot], hint)


COLUMNS = (
    "model", "batch", "variant", "asked", "engine", "streams", "verified", "skipped",
    "host_median_us", "host_p90_us", "host_p99_us", "host_iqr_us", "launch_median_us", "device_median_us", "device_iqr_us",
    "spread_percent", "over", "host_gain", "host_gain_low", "host_gain_high", "device_gain", "device_gain_low", "device_gain_high",
    "kernels", "waits", "peak_bytes",
)  # fmt: skip
"""In this order. Later releases add columns at the end."""


def text(flat: FlatGraph, runs: Iterable[Bench]) -> str:
    """The file's text, with a line of headings: of one bench, or of one for each batch."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for run in runs:
        for variant in run.result.variants:
            cells = {"model": str(flat.model.source), "batch": run.batch, **_row(variant, run.result.baseline)}
            writer.writerow([_cell(cells.get(column)) for column in COLUMNS])
    return out.getvalue()


def _row(variant: VariantResult, over: str) -> dict[str, object]:
    checked = "no" if variant.failed else "yes" if variant.checks else ""
    over = next((ratio.over for ratio in variant.ratios if "1 stream" in ratio.over), over)
    row: dict[str, object] = {
        "variant": variant.label,
        "asked": "; ".join(variant.asked),
        "engine": variant.engine,
        "streams": variant.streams,
        "verified": checked,
        "skipped": variant.skipped,
        "launch_median_us": _us(variant.launch, "median"),
        "spread_percent": None if variant.host is None else f"{100 * variant.host.cv:.2f}",
        "over": "" if variant.label == over else over,
        **{key: variant.facts.get(key) for key in ("kernels", "waits", "peak_bytes")},
    }
    for clock, summary in (("host", variant.host), ("device", variant.device)):
        row |= {f"{clock}_{key}_us": _us(summary, key) for key in ("median", "p90", "p99", "iqr")}
        row |= _csv_gain(clock, variant.ratio_over(over, clock))
    return row


def _us(summary: Summary | None, key: str) -> str | None:
    return None if summary is None else f"{getattr(summary, key) * 1e6:.3f}"


def _csv_gain(clock: str, ratio: Ratio | None) -> dict[str, object]:
    if ratio is None:
        return {}
    plain = ratio.to_dict()
    ends = {"": ratio.value, "_low": plain["low"], "_high": plain["high"]}
    return {f"{clock}_gain{key}": None if value is None else f"{value:.4f}" for key, value in ends.items()}


def _cell(value: object) -> str:
    return "" if value is None else escape.csv_cell(str(value))
