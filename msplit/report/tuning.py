"""Candidates that tuning tried and took, as a part of the report of `bench`."""

from __future__ import annotations

from collections import Counter
from typing import Any

from msplit.core.statistics import Ratio
from msplit.flatten.flat import FlatGraph
from msplit.report.document import Table
from msplit.report.jsonio import picked
from msplit.report.text import micros, plural
from msplit.run.tuning import Tuned
from msplit.schedule.search import Found, Measurement
from msplit.verify.results import MixedPrecision

SHOWN = 8
"""Candidates in the table; JSON has them all."""


def table(tuned: Tuned) -> Table:
    """The best candidates, side by side."""
    measurements = tuned.found.measurements
    shown = [one for one in measurements if one.gain is not None][:SHOWN]
    first = next((one for one in measurements if one.candidate.key() == tuned.found.one.key()), None)
    if first is not None and first not in shown:
        shown[-1] = first
    rows = [_row(one) for one in shown]
    left = [one for one in measurements if one not in shown]
    measured = sum(one.gain is not None for one in left)
    reasons = Counter(
        "needs too much memory" if "memory" in one.skipped else one.skipped for one in left if one.gain is None
    )
    more = [f"{measured} more measured"] if measured else []
    more += [f"{number} not measured: {reason}" for reason, number in reasons.items()]
    note = "; ".join(filter(None, [_HEADINGS, ", ".join(more)]))
    return Table("Candidates", ("", ">streams", ">waits", ">predicted", ">measured", ">gain", ">memory"), rows, note)


_HEADINGS = "gain: over one stream, in the same rounds; memory: over one stream's"


def _row(measurement: Measurement) -> tuple[str, ...]:
    candidate = measurement.candidate
    return (
        candidate.name if candidate.mode == "plain" else f"{candidate.name}, {candidate.mode}",
        str(candidate.streams),
        str(candidate.waits),
        micros(candidate.predicted_us),
        "-" if measurement.seconds is None else micros(measurement.seconds * 1e6),
        "-" if measurement.gain is None else f"{measurement.gain:.2f}",
        f"{measurement.memory:.2f}",
    )


def notes(tuned: Tuned) -> list[str]:
    """Notes on the search, and on the candidate that was taken."""
    found = tuned.found
    tried = sum(measurement.gain is not None for measurement in found.measurements)
    lines = [
        f"Tuning took {found.seconds:.0f} s: {plural(tried, 'candidate')} and {plural(found.tried, 'change')} of the best were "
        f"measured, {len(found.gains)} of which led to the winner. It ended because {found.stopped}."
    ]
    if tuned.gain is None:
        return [*lines, f"One stream is kept: {tuned.why}."]
    beside = "one stream" if tuned.kernels == "plain" else "one stream of plain kernels"
    taken = f"Taken: {tuned.taken.name}, on {plural(tuned.streams, 'stream')} with {plural(tuned.waits, 'wait')}"
    if tuned.kernels != "plain":
        taken += f", {tuned.kernels} kernels"
    lines.append(
        f"{taken}: {_ratio(tuned.gain)} times as fast as {beside} in {tuned.gain.builds} fresh builds, {tuned.why}."
    )
    if tuned.over_one is not None and tuned.over_one is not tuned.gain:
        lines.append(f"Over one stream of the same kernels: {_ratio(tuned.over_one)}.")
    if tuned.over_candidate is not None:
        lines.append(f"Over the best candidate, {tuned.over_candidate.over}: {_ratio(tuned.over_candidate)}.")
    return lines


def _ratio(ratio: Ratio) -> str:
    return f"{ratio.value:.2f} ({ratio.low:.2f}–{ratio.high:.2f})"


def payload(tuned: Tuned) -> dict[str, Any]:
    """Everything for JSON."""
    return {
        **picked(tuned, "streams waits kernels name=taken.name why memory memory_ratio=memory"),
        **picked(tuned, "gain over_one over_candidate made_for"),
        "search": search_payload(tuned.found),
    }


def mixed_notes(mixed: MixedPrecision) -> list[str]:
    """Notes on the nodes that stay in float32."""
    away = f"the outputs are {mixed.error:.2g} away from IEEE float32 at most (root mean square, relative)"
    if not mixed.holds:
        return [
            f"No error as small as {mixed.most:g} can be had: with all ops in float32 {away}, so they stay there. "
            "With --precision ieee products are more exact."
        ]
    return [
        f"Of the ops that half precision is for, {mixed.in_half} of {mixed.ops} run in it and the others in float32, to keep within an "
        f"error of {mixed.most:g}: {away}, in {plural(mixed.evaluations, 'choice')} that were tried."
    ]


def mixed_payload(flat: FlatGraph, mixed: MixedPrecision) -> dict[str, Any]:
    """Nodes in float32 for JSON, by name. An error that is infinite is None."""
    return {
        **picked(mixed, "max_error=most kept=holds error errors ops ops_in_half=in_half"),
        "float32": [flat.graph.names[node] for node in sorted(mixed.wide)],
        "evaluations": mixed.evaluations,
    }


def search_payload(found: Found) -> dict[str, Any]:
    """Candidates that were tried, for JSON."""
    return {
        **picked(found, "seconds stopped changes_tried=tried"),
        "changes_kept": [picked(gain, "change ratio at at_s=at") for gain in found.gains],
        "candidates": [
            {
                **picked(one.candidate, "name kernels=mode streams waits predicted_us"),
                "measured_us": None if one.seconds is None else one.seconds * 1e6,
                **picked(one, "gain memory memory_ratio=memory skipped?"),
            }
            for one in found.measurements
        ],
    }
