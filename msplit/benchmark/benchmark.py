"""Benches: of one batch, of several, and of a build.

Runs a model on its streams and measures what they gain.

Repeats a bench for several batch sizes.

Measures the speed of a build, beside one stream of the same kernels.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Unpack

import numpy as np

from msplit.assignment.model import opened
from msplit.benchmark.diagnose import Limits, hints, sharing_loses
from msplit.benchmark.results import BatchSweep, Bench, Traced
from msplit.benchmark.timing import bench as measure
from msplit.core.arguments import Precision
from msplit.core.graph import Ints
from msplit.engines.base import Engine, Executable, Job
from msplit.engines.cuda.engine import ENGINE as CUDA
from msplit.engines.cuda.options import EngineOptions, KernelMode
from msplit.engines.tensorflow.engine import ENGINE as TENSORFLOW
from msplit.errors import EngineError, MsplitError
from msplit.flatten.flat import FlatGraph
from msplit.formats.build import Manifest
from msplit.inputs.examples import hits
from msplit.progress import Progress, silent, timing
from msplit.run.build import LoadedBuild, load
from msplit.run.compilation import beside_float32, chosen_variant, compiled
from msplit.run.request import BenchOptions, keywords_of, refuse_exclusions
from msplit.run.setup import BenchRequest, Setup, StreamIds, on_all, plural
from msplit.run.tuning import Tuned, confirmed
from msplit.run.variants import as_recorded, naming_open_shapes, set_up
from msplit.schedule.judge import bounds
from msplit.verify.results import BenchResult, Settings, Variant
from msplit.verify.stepping import seconds_of

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
    flat: FlatGraph | str | os.PathLike[str],
    asked: BenchRequest,
    *,
    progress: Progress | None = None,
    warn: Callable[[str], None] | None = None,
) -> Bench:
    """`bench`, with its options as a request. `warn` hears what is to be known before anything is measured; else `progress` does."""
    with timing() as phases, ExitStack() as errors:
        flat = opened(flat)
        comparison = asked.comparison
        request, said = as_recorded(flat, asked.run)
        errors.enter_context(naming_open_shapes(flat, request))
        setup = set_up(flat, request, comparison, progress=progress)
        said = (*said, *_warned(setup, warn or (lambda text: (progress or silent)(text, 0.0))))
        made = compiled(setup, progress)
        request, tuned = setup.request, made.tuned
        variants = beside_float32(setup, made)
        if request.sharing:
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


def _warned(setup: Setup, warn: Callable[[str], None]) -> list[str]:
    """Warns where GPUs that share a step can hardly gain. Gives what was said."""
    gpus, costs = len(setup.request.sharing), setup.job.costs
    loses = sharing_loses(setup.job.flat, costs, gpus) if gpus and costs is not None else ""
    if loses:
        warn(loses)
    return [loses] if loses else []


def _limited(job: Job, variants: Sequence[Variant], tuned: Tuned | None) -> Limits | None:
    """Limits of a job's kernels, and a breakdown of the time of each variant that captures them as they are."""
    ids = {one.label: one.job.ids for one in variants if one.engine is CUDA and _captures_plain(one.job)}
    return limits(job, plain=tuned.variants.get("plain") if tuned is not None else None, ids=ids)


def _captures_plain(job: Job) -> bool:
    """True if a job runs as one graph, of kernels as they are."""
    return job.options.captures_alone and job.options.mode is KernelMode.PLAIN and not job.options.devices


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


@dataclass(frozen=True, eq=False)
class BuildBench:
    """A measured build.

    Attributes:
        results: By batch, None where the model's inputs have shapes of their own.
        notes: What differs from what it was made for.
    """

    manifest: Manifest
    results: tuple[tuple[int | None, BenchResult], ...]
    notes: tuple[str, ...]

    @property
    def failed(self) -> bool:
        """True if outputs are wrong."""
        return any(result.failed for _, result in self.results)


@dataclass(frozen=True, eq=False)
class _OneBucket(Engine):
    """Engine that makes one batch of a build run."""

    loaded: LoadedBuild
    program: str
    one_stream: bool
    name: str = "cuda"

    def build(self, job: Job) -> Executable:
        # The job is not asked: all is settled.
        restored = self.loaded.restored[self.program]
        return self.loaded.opened.run(restored, alone=True, one_stream=self.one_stream)


def bench_build(
    path: str | os.PathLike[str],
    settings: Settings | None = None,
    *,
    command: Sequence[str] = (),
    progress: Progress | None = None,
) -> BuildBench:
    """Opens a build, verifies and measures each of its batches, and one stream of the same kernels beside it.

    Raises:
        LoadError: It is no build, is damaged, or somebody else may write to it.
        EngineError: It can not run here.
    """
    loaded = load(path)
    settings, manifest = settings or Settings(), loaded.manifest
    found = []
    for bucket in manifest.rungs:
        reference = loaded.references[bucket.program]
        one = f"msplit, 1 stream of {plural(bucket.kernels, 'kernel')}"
        job = Job(
            flat=None,  # type: ignore[arg-type]  # a build has no graph: the reference says what verification needs
            ids=np.zeros(0, np.int32),
            streams=1,
            feeds=reference.feeds,
            options=EngineOptions(measure=False),
            precision=Precision(manifest.precision),
        )
        variants = [Variant(one, _OneBucket(loaded, bucket.program, True), job)]
        if bucket.streams > 1:
            engine = _OneBucket(loaded, bucket.program, False)
            variants.append(Variant(manifest.label, engine, replace(job, streams=bucket.streams), one))
        result = measure(
            variants,
            fresh=lambda seed, feeds=reference.feeds: feeds,  # type: ignore[misc]
            settings=replace(settings, verify_inputs=1),
            reference=reference,
            command=command,
            progress=progress,
        )
        found.append((bucket.batch, result))
    return BuildBench(manifest, tuple(found), loaded.notes)


def sweep(
    flat: FlatGraph,
    request: BenchRequest,
    batches: Sequence[int],
    *,
    progress: Progress | None = None,
    warn: Callable[[str], None] | None = None,
) -> BatchSweep:
    """Measures a model with each of several batches, one after the other. See `bench`.

    What one batch can not do, such as fit into memory, does not lose what the others gave.

    Args:
        request: What to run. It can have no reference, no plan and no tuning: these are for one batch.
        batches: Sizes of unknown leading dimensions.

    Raises:
        MsplitError: The request does not go with several batches, or none of them could be run.
    """
    refuse_exclusions({**request.given, "batches_in_turn": batches})
    if len(batches) > 1 and not any(end.shape is None or None in end.shape for end in flat.model.inputs):
        raise MsplitError(
            "no input has an unknown size, so every batch would measure the same", fix="leave the batches out"
        )
    runs: dict[int, Bench] = {}
    failed: dict[int, str] = {}
    for number, batch in enumerate(dict.fromkeys(batches)):

        def tell(what: str, share: float, number: int = number, batch: int = batch) -> None:
            if progress is not None:
                progress(f"batch {batch}: {what}", (number + share) / len(batches))

        try:
            runs[batch] = bench_for(
                flat, replace(request, run=request.run.sized(batch=batch)), progress=tell, warn=warn
            )
        except EngineError as problem:
            failed[batch] = problem.what
            if not runs and len(failed) == len(set(batches)):
                raise
        finally:
            CUDA.forget(flat)  # programs of this batch
    return BatchSweep(runs, failed)
