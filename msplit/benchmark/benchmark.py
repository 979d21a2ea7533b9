"""Runs a model on its streams and measures what they gain."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Unpack

import numpy as np

from msplit.assignment.model import opened
from msplit.benchmark.diagnose import hints
from msplit.benchmark.results import Bench, Traced
from msplit.benchmark.timing import bench as measure
from msplit.benchmark.utilization import Limits
from msplit.core.graph import Ints
from msplit.engines.base import Job
from msplit.engines.cuda.engine import ENGINE as CUDA
from msplit.engines.cuda.options import KernelMode
from msplit.engines.tensorflow.engine import ENGINE as TENSORFLOW
from msplit.errors import EngineError
from msplit.flatten.flat import FlatGraph
from msplit.inputs.examples import hits
from msplit.progress import Progress, timing
from msplit.run.compilation import beside_float32, chosen_variant, compiled
from msplit.run.request import BenchOptions, keywords_of
from msplit.run.setup import BenchRequest, StreamIds, on_all
from msplit.run.tuning import Tuned, confirmed
from msplit.run.variants import as_recorded, naming_open_shapes, set_up
from msplit.schedule.bounds import bounds
from msplit.verify.check import seconds_of
from msplit.verify.results import BenchResult, Variant

if TYPE_CHECKING:
    from msplit.engines.cuda.engine import CompiledVariant

MEASURE_SECONDS = 8.0
"""Most time for timing kernels alone; kernels that there is no time for keep their static cost."""


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
    return bench_for(flat, BenchRequest.of(**keywords_of(bench, BenchOptions, options)), progress=progress)


def bench_for(
    flat: FlatGraph | str | os.PathLike[str], asked: BenchRequest, *, progress: Progress | None = None
) -> Bench:
    """`bench`, with its options as a request."""
    with timing() as phases, ExitStack() as errors:
        flat = opened(flat)
        comparison = asked.comparison
        request, said = as_recorded(flat, asked.run)
        errors.enter_context(naming_open_shapes(flat, request))
        setup = set_up(flat, request, comparison, progress=progress)
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
            command=comparison.command,
            progress=progress,
            timelines=[one.label for one in variants if comparison.timelines and one.engine is setup.engine],
        )
        placements = {
            one.label: TENSORFLOW.placement(one.job)
            for one in variants
            if comparison.log_placement and one.engine is TENSORFLOW
        }
    limited = None
    if setup.engine is CUDA and request.capture and any(variant.device for variant in result.variants):
        limited = _limited(replace(setup.job, options=request.options), variants, tuned)
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
            plain = CUDA.variants(job, alone, ("plain",), seconds=MEASURE_SECONDS)["plain"]
        except (RuntimeError, EngineError):
            # Out of memory, say: what was measured before is worth more than bounds by the clock.
            plain = CUDA.variants(job, alone, ("plain",))["plain"]
    if plain.compiled.dynamic:
        return None
    profiled = job.costs.constants is not None
    found = plain.bounds()
    if profiled:
        found = replace(found, measured=found.steps)
    source = "the profile" if profiled else "measured" if found.measured else "the data sheet"
    spent = {label: plain.breakdown(streams) for label, streams in (ids or {}).items()}
    return Limits(bounds(job.flat, job.costs), found, source, spent)
