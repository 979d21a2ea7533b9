"""Utilization of the GPU by a model, the bounds on its speed, and advice on the first thing to do to come closer to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from msplit.schedule.bounds import Bounds, StepBounds
from msplit.schedule.simulate import Breakdown
from msplit.verify.results import VariantResult

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
