"""Runs a model on its streams and measures what they gain."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Unpack

from msplit.assignment.model import DisplayMixin, Facts, opened
from msplit.benchmark.bounds import Limits, limits
from msplit.benchmark.diagnose import hints
from msplit.benchmark.timing import bench as measure
from msplit.core.graph import Assignment, Ints
from msplit.cost.costs import Costs
from msplit.cost.profile import Workload
from msplit.engines.base import Job, Timeline
from msplit.engines.cuda.engine import ENGINE as CUDA
from msplit.engines.cuda.options import KernelMode
from msplit.engines.tensorflow.engine import ENGINE as TENSORFLOW
from msplit.engines.tensorflow.session import Placement
from msplit.flatten.flat import FlatGraph
from msplit.inputs.examples import Hits, hits
from msplit.progress import Progress, Sums, timing
from msplit.run.ablation import AblationStep
from msplit.run.compilation import beside_float32, chosen_variant, compiled
from msplit.run.request import BenchOptions, RunRequest, as_recorded, request_of
from msplit.run.stream_ids import StreamIds
from msplit.run.tuning import Tuned, confirmed
from msplit.run.variants import cuda_options, naming_open_shapes, on_all, set_up
from msplit.verify.check import seconds_of
from msplit.verify.mixed_precision import MixedPrecision
from msplit.verify.results import BenchResult, Variant


@dataclass(frozen=True, eq=False)
class Traced:
    """One step of a variant as it ran, the stream of each node of the flat graph, and which rules decided that, if any did."""

    label: str
    timeline: Timeline
    ids: Ints
    assignment: Assignment | None


@dataclass(frozen=True, eq=False, repr=False)
class Bench(DisplayMixin):
    """A measured model.

    Attributes:
        why: Why this engine.
        notes: What was done to the assignment, and what was not verified.
        tuned: What tuning found, if it was asked for.
        traced: Timelines, where they were asked for, of the variants whose engine can tell.
        layers: From one stream to streams to larger kernels, on the cuda engine: which variant shows what.
        limits: What bounds the kernels, where a device told times.
        lookups: What share of the inputs' ids and strings is in the model's tables.
        labels: What variants would be called after what was asked for -> label of the variant that runs that. Several may come to one.
        workload: What sized and priced the model. Its batch is None where nobody says one.
        inputs: Dtype and shape of what was fed.
        mixed: What stays in float32 so that errors are as small as asked for, if that was asked for.
        placements: Where TensorFlow put each node, by label, if that was asked for.
        preparation: Where time went before the first step that was measured, by what was done.
    """

    result: BenchResult
    engine: str
    why: str
    notes: tuple[str, ...]
    tuned: Tuned | None = None
    costs: Costs | None = None
    traced: tuple[Traced, ...] = ()
    layers: tuple[AblationStep, ...] = ()
    limits: Limits | None = None
    lookups: tuple[Hits, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    workload: Workload = field(default_factory=Workload)
    inputs: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    mixed: MixedPrecision | None = None
    placements: Mapping[str, Placement] = field(default_factory=dict)
    preparation: Sums = field(default_factory=lambda: Sums(0.0, ()))

    @property
    def batch(self) -> int | None:
        """Size of unknown leading dimensions."""
        return self.workload.batch

    def _facts(self) -> Facts:
        times = [
            (one.label, f"{(one.device or one.host).median * 1e6:,.1f} µs")
            for one in self.result.variants
            if one.host is not None
        ]
        return [("engine", self.engine), *times]


def bench(
    flat: FlatGraph | str | os.PathLike[str], *, progress: Progress | None = None, **options: Unpack[BenchOptions]
) -> Bench:
    """Runs a model on one and on several streams, verifies that the outputs are equal, and measures what streams gain.

    This executes the model. What sizes and prices it and is not given is as the record of its assignment says, where it has one.

    Args:
        flat: From `load`, or where the model is.
        progress: Told what is being done and how much of it is done.
        options: What to run, and beside what; the defaults are those of `msplit bench`. See `BenchOptions`.

    Raises:
        EngineError: The engine can not run the model; the message names what and the way out.
        MsplitError: An input does not fit.
    """
    return bench_for(flat, request_of(bench, BenchOptions, options), progress=progress)


def bench_for(
    flat: FlatGraph | str | os.PathLike[str], request: RunRequest, *, progress: Progress | None = None
) -> Bench:
    """`bench`, with its options as a request."""
    with timing() as phases, ExitStack() as errors:
        flat = opened(flat)
        request, said = as_recorded(flat, request)
        errors.enter_context(naming_open_shapes(flat, request))
        setup = set_up(flat, request, progress=progress)
        made = compiled(setup, progress)
        request, tuned = setup.request, made.tuned
        variants = beside_float32(setup, made)
        if request.shared:
            variants = (*variants, on_all(chosen_variant(setup, made), request))
        result = measure(
            variants,
            fresh=setup.fresh,
            settings=request.settings,
            reference=setup.reference,
            about=None if setup.job.costs is None else hints(flat, setup.job.costs),
            command=request.command,
            progress=progress,
            timelines=[one.label for one in variants if request.timelines and one.engine is setup.engine],
        )
        placements = {
            one.label: TENSORFLOW.placement(one.job)
            for one in variants
            if request.log_placement and one.engine is TENSORFLOW
        }
    limited = None
    if setup.engine is CUDA and request.capture and any(variant.device for variant in result.variants):
        limited = _limited(replace(setup.job, options=cuda_options(request)), variants, tuned)
    sums = phases.stop()
    return Bench(
        result=result,
        engine=setup.engine.name,
        why=setup.why,
        notes=(*said, *made.notes, *made.rows, *setup.unverified, *setup.fresh.covered(seconds_of(sums))),
        tuned=None if tuned is None else confirmed(tuned, result, made.tuned_label),
        costs=setup.job.costs,
        traced=_traced(result, variants, setup.assignments),
        layers=made.steps,
        limits=limited,
        lookups=hits(flat, setup.job.feeds),
        labels=made.labels,
        workload=request.workload,
        inputs={name: (value.dtype.name, value.shape) for name, value in setup.job.feeds.items()},
        mixed=setup.mixed,
        placements=placements,
        preparation=sums,
    )


def _limited(job: Job, variants: Sequence[Variant], tuned: Tuned | None) -> Limits | None:
    """Limits of a job's kernels, and a breakdown of the time of each variant that captures them as they are."""
    ids = {one.label: one.job.ids for one in variants if one.engine is CUDA and _captures_plain(one.job)}
    return limits(job, plain=tuned.variants.get("plain") if tuned is not None else None, ids=ids)


def _captures_plain(job: Job) -> bool:
    """True if a job runs as one graph, of kernels as they are."""
    return job.options.captures and job.options.mode is KernelMode.PLAIN and not job.options.devices


def _traced(result: BenchResult, variants: Sequence[Variant], assignments: Sequence[StreamIds]) -> tuple[Traced, ...]:
    jobs = {variant.label: variant.job for variant in variants}
    decided = {id(each.ids): each.assignment for each in assignments}
    found = []
    for one in result.variants:
        if one.timeline is not None:
            ids = jobs[one.label].ids
            found.append(Traced(one.label, one.timeline, ids, decided.get(id(ids))))
    return tuple(found)
