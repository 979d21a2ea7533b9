"""Why streams gain what they gain, in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from msplit.cost.costs import Costs
from msplit.flatten.flat import FlatGraph
from msplit.schedule.bounds import bounds
from msplit.schedule.choose import WORTH
from msplit.verify.results import VariantResult

_HOST_BOUND = 2.0
_FULL = 0.75
_DOMINATED = 0.6


@dataclass(frozen=True)
class Hints:
    """Figures of the cost model for a graph.

    Attributes:
        work_us: Sum of all times.
        span_us: The critical path, with loops kept whole.
        share: Share of the device that a kernel fills on average, weighted by time.
        heaviest: Node with the longest time, and its share of the work.
        most: No number of streams gains more, see `Bounds`.
        limit: Why not.
    """

    work_us: float
    span_us: float
    share: float
    heaviest: tuple[str, float]
    most: float
    limit: str


def hints(flat: FlatGraph, costs: Costs) -> Hints:
    """Work, critical path and average share of a flat graph."""
    time = np.where(flat.host, 0.0, costs.time_us)
    work = float(time.sum())
    if not work:
        return Hints(0.0, 0.0, 0.0, ("", 0.0), 1.0, "")
    of = bounds(flat, costs)
    heaviest = int(np.argmax(time))
    return Hints(
        work_us=work,
        span_us=max(of.critical_path_us, of.whole_us),
        share=float((time * costs.share).sum() / work),
        heaviest=(flat.graph.names[heaviest], float(time[heaviest]) / work),
        most=of.max_gain,
        limit=of.limit,
    )


def diagnose(variants: Sequence[VariantResult], about: Hints | None = None) -> tuple[str, ...]:
    """Explains what was measured, by the times of the variants and what the cost model says of the graph, if it was asked."""
    measured = [variant for variant in variants if variant.host is not None]
    found = [*_devices(measured), *_host_bound(measured), *_gains(measured)]
    several = [variant for variant in measured if variant.streams > 1 or variant.asked]
    if about is not None and about.work_us > 0 and (several or not measured):
        found += _structure(about)
    return tuple(found)


def _devices(measured: Sequence[VariantResult]) -> list[str]:
    if measured and all(map(_on_cpu, measured)):
        checked = "; only the outputs were checked" if any(variant.checks for variant in measured) else ""
        return [f"Every stream was a CPU device. Such timings say nothing about GPU streams{checked}."]
    return []


def _on_cpu(variant: VariantResult) -> bool:
    return str(variant.facts.get("device", "")).upper().startswith("CPU")


def _host_bound(measured: Sequence[VariantResult]) -> list[str]:
    alone = [(one.device.median, one.label) for one in measured if one.device is not None and one.streams == 1]
    found = []
    for variant in measured:
        if variant.host is None:
            continue
        if variant.device is not None:
            device = variant.device.median
            works = f", of which the device works {device * 1e6:.0f} µs."
        elif alone and not _on_cpu(variant):
            device, label = min(alone, key=lambda one: one[0])
            works = f"; on one stream, {label} needs the device for {device * 1e6:.0f} µs."
        else:
            continue
        host = variant.host.median
        if host > _HOST_BOUND * device:
            found.append(f"{variant.label} is host-bound: a step takes {host * 1e6:.0f} µs{works}")
    return found


def _gains(measured: Sequence[VariantResult]) -> list[str]:
    found = []
    if _devices(measured):
        return []
    for variant in measured:
        if variant.streams < 2:
            continue
        alone = [one for one in measured if one.engine == variant.engine and one.streams == 1]
        ratios = [variant.ratio_over(one.label) for one in alone]
        slower = [ratio for ratio in ratios if ratio is not None and ratio.high < 1.0]
        if slower:
            most = min(slower, key=lambda ratio: ratio.value)
            found.append(f"{variant.label} is slower than {most.over} ({most.value:.2f} times): keep one stream.")
    return found


def _structure(about: Hints) -> list[str]:
    if about.most < WORTH:
        return [
            f"There is nothing to overlap: by the cost model {about.limit}, "
            f"so no number of streams gains more than {about.most:.2f} times."
        ]
    found = []
    name, part = about.heaviest
    if part > _DOMINATED:
        found.append(
            f"One node dominates: {name} is {part:.0%} of all work by the cost model, the rest can only hide behind it."
        )
    elif about.span_us > _DOMINATED * about.work_us:
        found.append(
            f"One branch dominates: the critical path is {about.span_us / about.work_us:.0%} of all work by the cost model, "
            f"so streams gain at most {about.most:.2f} times."
        )
    if about.share > _FULL:
        found.append(
            f"The kernels already fill the GPU ({about.share:.0%} of it on average by the cost model): side by side they gain little. "
            "A smaller batch leaves more room."
        )
    return found
