"""Bounds on the speed of a measured model, and the share of them that its variants reach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from msplit.core.graph import Ints
from msplit.engines.base import Job
from msplit.engines.cuda.engine import ENGINE
from msplit.errors import EngineError
from msplit.schedule.bounds import Bounds, StepBounds, bounds
from msplit.schedule.simulate import Breakdown
from msplit.verify.results import VariantResult

if TYPE_CHECKING:
    from msplit.engines.cuda.engine import CompiledVariant

MEASURE_SECONDS = 8.0
"""Most time for timing kernels alone; kernels that there is no time for keep their static cost."""


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


def limits(job: Job, *, plain: CompiledVariant | None = None, ids: Mapping[str, Ints] | None = None) -> Limits | None:
    """Works out what limits a job's kernels, timing them alone where it runs on a GPU and no profile did.

    Args:
        job: The model, as the cuda engine runs it on one stream.
        plain: Its plain kernels, where tuning has timed them already.
        ids: By variant that runs the same kernels the streams of the graph's nodes.

    Returns:
        None where the model can not be captured, so that times of steps mean little.
    """
    if job.costs is None:
        return None
    if plain is None:
        alone = np.full(len(job.flat), -1, np.int32)
        try:
            plain = ENGINE.variants(job, alone, ("plain",), seconds=MEASURE_SECONDS)["plain"]
        except (RuntimeError, EngineError):
            # Out of memory, say: what was measured before is worth more than bounds by the clock.
            plain = ENGINE.variants(job, alone, ("plain",))["plain"]
    if plain.compiled.dynamic:
        return None
    profiled = job.costs.constants is not None
    found = plain.bounds()
    if profiled:
        found = replace(found, measured=found.steps)
    source = "the profile" if profiled else "measured" if found.measured else "the data sheet"
    spent = {label: plain.breakdown(streams) for label, streams in (ids or {}).items()}
    return Limits(bounds(job.flat, job.costs), found, source, spent)
