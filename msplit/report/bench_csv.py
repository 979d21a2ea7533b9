"""Results of `bench` as CSV: a row per variant and batch."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable

from msplit import escape
from msplit.benchmark.results import Bench
from msplit.core.statistics import Ratio, Summary
from msplit.flatten.flat import FlatGraph
from msplit.verify.results import VariantResult

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
            cells = {"model": str(flat.model.path), "batch": run.batch, **_row(variant, run.result.baseline)}
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
        row |= _gain(clock, variant.ratio_over(over, clock))
    return row


def _us(summary: Summary | None, key: str) -> str | None:
    return None if summary is None else f"{getattr(summary, key) * 1e6:.3f}"


def _gain(clock: str, ratio: Ratio | None) -> dict[str, object]:
    if ratio is None:
        return {}
    plain = ratio.to_dict()
    ends = {"": ratio.value, "_low": plain["low"], "_high": plain["high"]}
    return {f"{clock}_gain{key}": None if value is None else f"{value:.4f}" for key, value in ends.items()}


def _cell(value: object) -> str:
    return "" if value is None else escape.csv_cell(str(value))
