"""Bounds of a measured model, as a part of the report of `bench`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from msplit.benchmark.utilization import Limits
from msplit.report.document import Table
from msplit.report.text import micros, percent
from msplit.schedule.choose import WORTH
from msplit.schedule.simulate import Breakdown
from msplit.verify.results import VariantResult

_OVER = 1.005


def table(found: Limits, variants: Sequence[VariantResult]) -> Table:
    """Bounds, static and measured, and how much of the largest each variant reaches."""
    static, steps = found.static, found.steps
    rows: list[tuple[str, ...]] = [
        ("critical path", micros(static.critical_path_us), micros(steps.critical_path_us), ""),
        ("memory bandwidth", micros(static.bandwidth_us), micros(steps.bandwidth_us), ""),
        ("arithmetic", micros(static.flops_us), micros(steps.flops_us), ""),
        ("SM time", micros(static.sm_time_us), micros(steps.sm_time_us), ""),
        ("lower bound", micros(static.lower_bound_us), micros(steps.lower_us), ""),
        ("one after the other", micros(static.serial_us), micros(steps.serial_us), ""),
        ("with larger kernels", micros(static.fused_us), micros(steps.fused_us), ""),
    ]
    for variant in variants:
        share, larger = found.reached(variant), ""
        if share is None:
            share, larger = found.fused(variant), " of larger"
        if share is not None and variant.device is not None:
            reached = percent(share, 1.0) + larger
            rows.append((short(variant.label), "", micros(variant.device.median * 1e6), reached))
    head = found.source if found.source == "measured" else f"by {found.source}"
    over = any((found.reached(variant) or 0.0) > _OVER for variant in variants)
    return Table("Bounds", ("", ">static", f">{head}", ">reached"), rows, _note(found, over))


def short(label: str) -> str:
    """A variant's name without what msplit's variants share."""
    return label.removeprefix("msplit, ").removesuffix(", CUDA graph")


def _note(found: Limits, over: bool) -> str:
    steps = found.steps
    note = "no plan of these kernels is faster than the lower bound"
    if found.source == "measured" and steps.measured < steps.steps:
        note += f"; {steps.measured} of {steps.steps} kernels were timed, the others are estimated"
    if over:
        note += "; over 100 %: kernels were slower alone than one behind the other"
    return f"{note}; bandwidth: static of all traffic, beside it of weights, inputs and outputs once; times are the device's"


def sentence(found: Limits, variants: Sequence[VariantResult]) -> list[str]:
    """Sentence on the gain that streams could have, and have."""
    steps = found.steps
    if steps.max_gain < WORTH:
        return [f"Streams have nothing to gain: {steps.limit} alone takes as long as all kernels one after the other."]
    reached = {variant.label: share for variant in variants if (share := found.reached(variant)) is not None}
    if not reached:
        return []
    best = max(reached, key=reached.__getitem__)
    said = [
        f"Streams could gain {steps.max_gain:.2f} at most, limited by {steps.limit}; {short(best)} reaches "
        f"{percent(reached[best], 1.0)} of the bound."
    ]
    spent = found.spent.get(best)
    return said if spent is None else [*said, _where(short(best), spent)]


_WORDS = {
    "contention": "because they slow each other down",
    "company": "because they find less in the caches than alone",
    "starts and waits": "to start them and to wait",
    "bandwidth": "because they share the memory's bandwidth",
    "the step itself": "to start and end the step",
}
_TOLD = 0.01


def _where(label: str, spent: Breakdown) -> str:
    """Parts of the time, the largest first; those below a hundredth are left out."""
    parts = sorted(spent.parts.items(), key=lambda part: -part[1])
    told = [f"{micros(us)} {_WORDS[name]}" for name, us in parts if us > _TOLD * spent.makespan_us]
    return f"Of the {micros(spent.makespan_us)} that {label} should take, {', '.join([f'{micros(spent.kernels_us)} are kernels', *told])}."


def payload(found: Limits, variants: Sequence[VariantResult]) -> dict[str, Any]:
    """Everything for JSON."""
    return {
        "source": found.source,
        "static": {key: value for key, value in vars(found.static).items() if key != "path"},
        "steps": {**asdict(found.steps), "max_gain": found.steps.max_gain},
        "reached": {variant.label: found.reached(variant) for variant in variants},
        "reached_of_larger_kernels": {variant.label: found.fused(variant) for variant in variants},
        "spent": found.spent,
    }
