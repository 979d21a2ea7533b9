"""Why streams gain what they gain, in words.

Utilization of the GPU by a model, the bounds on its speed, and advice on the first thing to do to come closer to them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from msplit.cost.costs import Costs
from msplit.cost.gpus import data_sheet
from msplit.flatten.flat import FlatGraph
from msplit.schedule.choose import WORTH
from msplit.schedule.judge import Bounds, StepBounds, bounds
from msplit.schedule.simulate import Breakdown
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


def sharing_loses(flat: FlatGraph, costs: Costs, gpus: int) -> str:
    """Says by what it can not pay to share the rows of a step between GPUs, by the cost model; "" where it may.

    The least that a step takes on one GPU is divided evenly. One thread starts a step on each further one, and copies its inputs there.
    """
    about = hints(flat, costs)
    sheet = data_sheet(costs.gpu)
    one, more = about.work_us / about.most, gpus - 1
    launched, copied = more * sheet.other_gpu_us, more * sheet.link_us
    if one - one / gpus > launched + copied:
        return ""
    return (
        f"{gpus} GPUs can hardly share a step and gain: by the cost model it takes {one:.0f} µs on one GPU at best, of which "
        f"sharing its rows saves {one - one / gpus:.0f} µs; to start it on {more} more takes {launched:.0f} µs, and copies "
        f"{copied:.0f} µs. Give each GPU requests of its own: `msplit load --gpus`."
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


_WORKS, _FILLED = 0.8, 0.6
"""Above these shares a GPU is as good as full: kernels end with fewer and fewer blocks, and steps begin and end."""

_STREAMS = 8
"""With so many streams, more of them seldom gain."""


@dataclass(frozen=True, eq=False)
class Limits:
    """Lower bounds of a model on the cuda engine.

    Attributes:
        static: From the data sheet, over the nodes of the graph.
        steps: Over the steps that run, without larger kernels.
        source: Where the steps' times come from: "measured", "the profile" or "the data sheet".
        spent: By variant that runs these steps, where its simulated time goes.
    """

    static: Bounds
    steps: StepBounds
    source: str
    spent: Mapping[str, Breakdown] = field(default_factory=dict)

    def reached(self, variant: VariantResult) -> float | None:
        """The lower bound over the time of a variant that runs these steps; None for others, and where no device told the time."""
        same = variant.facts.get("kernels") == self.steps.steps
        return _share(self.steps.lower_us, variant) if same else None

    def fused(self, variant: VariantResult) -> float | None:
        """The bound of larger kernels over the time of a variant, whatever its kernels."""
        return _share(self.steps.fused_us, variant)


def _share(bound_us: float, variant: VariantResult) -> float | None:
    if variant.device is None or variant.engine != "cuda" or bound_us <= 0:
        return None
    return bound_us / (variant.device.median * 1e6)


@dataclass(frozen=True)
class Utilization:
    """Utilization of the GPU by one variant. Shares from 0 to 1, None where nobody can tell.

    Attributes:
        works: Of a user's step, in which the device works, by its own clock.
        driver: Of the time in which steps follow each other, in which a kernel ran, as the driver tells (NVML's utilization).
        filled: Of the GPU's processors that kernels fill while the device works, by what each kernel takes alone.
    """

    label: str
    works: float | None
    driver: float | None
    filled: float | None


def busy(variants: Sequence[VariantResult], limits: Limits | None) -> tuple[Utilization, ...]:
    """Utilization of the GPU by each variant for which it is known."""
    found = []
    for one in variants:
        if one.host is None:
            continue
        works = None if one.device is None else min(1.0, one.device.median / one.host.median)
        driver = None if one.utilization_percent is None else one.utilization_percent / 100
        if works is not None or driver is not None:
            found.append(Utilization(one.label, works, driver, None if limits is None else _filled(one, limits)))
    return tuple(found)


def _filled(variant: VariantResult, limits: Limits) -> float | None:
    """Only of what runs the kernels that were timed: larger ones fill more."""
    if variant.device is None or limits.reached(variant) is None:
        return None
    return min(1.0, limits.steps.sm_time_us / (variant.device.median * 1e6))


def advice(found: Sequence[Utilization], variants: Sequence[VariantResult]) -> list[str]:
    """Advice on how to use the GPU more, in a sentence or two: fuse and group, more streams, more requests, then more GPUs."""
    by_label = {one.label: one for one in found}
    measured = [one for one in variants if one.host is not None and one.label in by_label]
    if not measured:
        return []
    best = min(measured, key=lambda one: one.host.median if one.host is not None else 0.0)
    one = by_label[best.label]
    works = one.works if one.works is not None else one.driver
    filled = (
        one.filled if one.filled is not None else max((b.filled for b in found if b.filled is not None), default=None)
    )
    told = [f"{best.label}, the fastest here, keeps the GPU busy {works:.0%} of the time"] if works is not None else []
    if filled is not None:
        told.append(f"its kernels fill {filled:.0%} of the processors while they run")
    if works is not None and works >= _WORKS and (filled is None or filled >= _FILLED):
        return [f"{'; '.join(told)}: this GPU is full, and more GPUs are what is left."]
    steps = []
    if not any("fused" in label or "grouped" in label for label in by_label):
        steps.append("fused and grouped kernels (--engine cuda, without --cuda fuse=no,group=no)")
    if max(variant.streams for variant in measured) < _STREAMS and (filled is None or filled < _FILLED):
        steps.append("more streams (--streams 16)")
    steps.append("more requests in flight (msplit load)")
    order = "; then ".join(steps)
    return [f"{'; '.join(told)}. To use it more, first {order}; more GPUs come last."]
