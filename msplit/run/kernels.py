"""Kernels and streams chosen together, in the simulator: for the rule `auto` with `kernels: best`, and for `bench`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from msplit import progress
from msplit.assignment.plans import Chosen, Planned, planned
from msplit.core.graph import Ints
from msplit.cost.costs import Costs
from msplit.cost.profile import Workload
from msplit.engines.base import Job
from msplit.engines.cuda.engine import ENGINE
from msplit.engines.cuda.options import EngineOptions, KernelMode
from msplit.errors import INSTALL_PYTORCH, EngineError
from msplit.flatten.flat import FlatGraph
from msplit.inputs.make import feeds_for
from msplit.progress import Progress
from msplit.rules.auto import NOT_CHOSEN, PLAIN, Auto
from msplit.rules.base import KernelStreams, Remark

if TYPE_CHECKING:
    from msplit.engines.cuda.engine import SimulatedVariant, SimulatedVariants

MADE_HERE = ("gpu", "driver", "torch")
"""Conditions that a plan does not depend on if no GPU had a part in it."""


def why_not() -> str | None:
    """The reason why larger kernels can not be looked for here, or None."""
    if importlib.util.find_spec("torch") is None:
        return f"PyTorch, which tells what kernels a model becomes, is not installed: {INSTALL_PYTORCH}"
    return None


def job_of(flat: FlatGraph, costs: Costs, workload: Workload) -> Job:
    """The model on one stream with made-up inputs, on the GPU where there is one, otherwise on the CPU."""
    if workload.profile is not None and workload.batch is None:
        workload = replace(workload, shapes={**workload.profile.shapes, **workload.shapes})
    feeds = feeds_for(flat, workload)
    device = "cpu" if ENGINE.unavailable() else "cuda"
    return Job(flat, np.zeros(len(flat), np.int32), 1, feeds, costs=costs, options=EngineOptions(device))


def chooser_of(flat: FlatGraph, costs: Costs, workload: Workload) -> Chooser:
    """The chooser of kernels for a model, on the GPU where there is one, otherwise on the CPU."""
    return Chooser(lambda: job_of(flat, costs, workload), batch=workload.batch)


class Chooser:
    """Chooses kernels and streams for the rule `auto`; see `rules.base.ChoosesKernels`. Afterwards it tells what it found.

    Args:
        job: Makes the model, its inputs, its costs, and the engine's options, once that is asked for.
        batch: For the plan.
        names: Kernel modes that may be tried, plain ones first.
        tell: Told what is being done, in place of whoever listens to `msplit.progress`.

    Attributes:
        tried: All that was tried; None before, and where nothing could be.
        chosen: The best; None where that is plain kernels.
    """

    def __init__(
        self,
        job: Callable[[], Job],
        *,
        batch: int | None = None,
        names: Sequence[str] = tuple(KernelMode),
        tell: Progress | None = None,
    ) -> None:
        self._job, self._batch, self._names, self._tell = job, batch, names, tell
        self.tried: SimulatedVariants | None = None
        self.chosen: Chosen | None = None

    def __call__(
        self,
        streams: int,
        *,
        tied: Ints,
        candidates: Sequence[str] | None = None,
        wait_us: float | None = None,
    ) -> KernelStreams | Remark:
        """Choose kernels, as `rules.base.ChoosesKernels` says."""
        self.tried = self.chosen = None
        if (missing := why_not()) is not None:
            return _not(missing)
        job = self._job()
        try:
            with progress.telling() as tell:
                tell = self._tell or tell
                compiled = ENGINE.variants(job, tied, self._names, tell=tell)
                found = compiled.simulate(streams, candidates=candidates, wait_us=wait_us, tell=tell)
        except EngineError as error:
            return _not(error.what)
        if found is None:
            return _not("nothing launches a kernel")
        self.tried = found
        if found.dynamic:
            return _not("shapes depend on values, so the model can not be captured")
        taken = found.favourite
        plain = found.plain
        if taken is plain:
            larger = [name for name in found.variants if name != PLAIN]
            better = (
                f"in the simulator neither {' nor '.join(larger)} ones gain" if larger else "larger ones are the same"
            )
            return Remark(Auto.key, "kernels", f"kernels stay plain: {better}")
        variant = taken.compiled
        bound = variant.bind(taken.candidate())
        made = planned(variant.job, bound, layout=variant.compiled.layout, batch=self._batch)
        if not job.options.on_gpu:
            made = _portable(made)
        self.chosen = Chosen(made, taken.best.name, taken.best.makespan_us, found.one_us, plain.best.makespan_us)
        ids = np.where(job.flat.host, -1, made.node_ids).astype(np.int32)
        return KernelStreams(ids, describe(taken, plain))


def describe(taken: SimulatedVariant, plain: SimulatedVariant) -> str:
    """A sentence about what is taken, beside plain kernels."""
    best, other = taken.best, plain.best
    where = f"on {best.streams} streams" if best.streams > 1 else "on one stream"
    text = f"{taken.name} kernels {where} ('{best.name}') are fastest in the simulator: {best.makespan_us:.0f} µs"
    beside = f", {other.makespan_us:.0f} on {other.streams}" if other.streams > 1 else ""
    return f"{text}; plain ones take {plain.one.makespan_us:.0f} on one stream{beside}"


def _portable(made: Planned) -> Planned:
    """Without what only says how it was lowered: no GPU was there to choose a memory layout, say."""
    made_for = {key: value for key, value in made.made_for.items() if key not in MADE_HERE}
    options = {key: value for key, value in made_for.get("options", {}).items() if key != "layout"}
    return replace(made, made_for={**made_for, "options": options})


def _not(why: str) -> Remark:
    return Remark(Auto.key, NOT_CHOSEN, f"kernels stay plain: {why}")
