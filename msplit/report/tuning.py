"""What tuning tried and took, as a part of the report of `bench`."""

from __future__ import annotations

from typing import Any

from msplit.measure.statistics import Ratio
from msplit.measure.tuning import Tuned
from msplit.report.document import Table
from msplit.report.text import micros, plural
from msplit.schedule.search.search import Found, Heat

SHOWN = 8
"""Candidates in the table; JSON has them all."""


def table(tuned: Tuned) -> Table:
    """The best candidates, side by side."""
    heats = tuned.found.heats
    shown = [heat for heat in heats if heat.gain is not None][:SHOWN]
    one = next((heat for heat in heats if heat.trial.key() == tuned.found.one.key()), None)
    if one is not None and one not in shown:
        shown[-1] = one
    rows = [_row(heat) for heat in shown]
    left = [heat for heat in heats if heat not in shown]
    measured = sum(heat.gain is not None for heat in left)
    reasons: dict[str, int] = {}
    for heat in left:
        if heat.gain is None:
            reasons[_reason(heat)] = reasons.get(_reason(heat), 0) + 1
    more = [f"{measured} more measured"] if measured else []
    more += [f"{number} not measured: {reason}" for reason, number in reasons.items()]
    note = "gain: over one stream, in the same rounds; memory: over one stream's" + (
        f"; {', '.join(more)}" if more else ""
    )
    return Table("Candidates", ("", ">streams", ">waits", ">predicted", ">measured", ">gain", ">memory"), rows, note)


def _reason(heat: Heat) -> str:
    return "needs too much memory" if "memory" in heat.skipped else heat.skipped


def _row(heat: Heat) -> tuple[str, ...]:
    trial = heat.trial
    return (
        trial.name if trial.arm == "plain" else f"{trial.name}, {trial.arm}",
        str(trial.streams),
        str(trial.waits),
        micros(trial.predicted_us),
        "-" if heat.seconds is None else micros(heat.seconds * 1e6),
        "-" if heat.gain is None else f"{heat.gain:.2f}",
        f"{heat.memory:.2f}",
    )


def notes(tuned: Tuned) -> list[str]:
    """How the search went, and what was taken, in words."""
    found = tuned.found
    tried = sum(heat.gain is not None for heat in found.heats)
    lines = [
        f"Tuning took {found.seconds:.0f} s: {plural(tried, 'candidate')} and {plural(found.tried, 'change')} of the best were "
        f"measured, {len(found.gains)} of which led to the winner. It ended because {found.stopped}."
    ]
    if tuned.gain is None:
        return [*lines, f"One stream is kept: {tuned.why}."]
    beside = "one stream" if tuned.kernels == "plain" else "one stream of plain kernels"
    taken = f"Taken: {tuned.trial.name}, on {plural(tuned.streams, 'stream')} with {plural(tuned.waits, 'wait')}"
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
        "streams": tuned.streams,
        "waits": tuned.waits,
        "kernels": tuned.kernels,
        "name": tuned.trial.name,
        "why": tuned.why,
        "memory": tuned.memory,
        "memory_ratio": tuned.memory,
        "gain": tuned.gain.to_dict() if tuned.gain else None,
        "over_one": tuned.over_one.to_dict() if tuned.over_one else None,
        "over_candidate": tuned.over_candidate.to_dict() if tuned.over_candidate else None,
        "made_for": dict(tuned.made_for),
        "search": search_payload(tuned.found),
    }


def search_payload(found: Found) -> dict[str, Any]:
    """What was tried."""
    return {
        "seconds": found.seconds,
        "stopped": found.stopped,
        "changes_tried": found.tried,
        "changes_kept": [
            {"change": gain.change, "ratio": gain.ratio, "at": gain.at, "at_s": gain.at} for gain in found.gains
        ],
        "candidates": [
            {
                "name": heat.trial.name,
                "kernels": heat.trial.arm,
                "streams": heat.trial.streams,
                "waits": heat.trial.waits,
                "predicted_us": heat.trial.predicted_us,
                "measured_us": None if heat.seconds is None else heat.seconds * 1e6,
                "gain": heat.gain,
                "memory": heat.memory,
                "memory_ratio": heat.memory,
                "skipped": heat.skipped or None,
            }
            for heat in found.heats
        ],
    }
