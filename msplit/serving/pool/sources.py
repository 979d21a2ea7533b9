"""Pools of a build, of a model that is compiled here, or of a TensorFlow session: the recipe of each for its slots."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from msplit.assignment.model import opened
from msplit.core.arguments import Precision, path
from msplit.engines.base import Arrays, Feeds
from msplit.engines.cuda.engine import ENGINE
from msplit.engines.cuda.options import EngineOptions
from msplit.errors import EngineError, MsplitError
from msplit.flatten.flat import FlatGraph
from msplit.formats.build import Manifest, is_build
from msplit.progress import Progress, phase, silent
from msplit.run.buckets import rows_of
from msplit.run.build import LoadedBuild, Made, load_on, make, values_of, verify_step, whole_reference
from msplit.run.prepare import make_ready
from msplit.run.renew import ModelValues, making_beside, verify_made
from msplit.run.request import RunRequest
from msplit.run.variants import choose_engine, refuse_devices
from msplit.serving.pool.making import Recipe
from msplit.serving.pool.making import make as make_pool
from msplit.serving.pool.pool import Pool, Renews
from msplit.serving.pool.ports import Ports, Shape
from msplit.serving.pool.settings import AUTO, PoolSettings
from msplit.serving.pool.steps import Answer, SimulatedSlot, Slot, StepSlot
from msplit.shapes.infer import stated_shapes
from msplit.verify.results import NewRows, NewValues, OutputCheck

MAX_BATCH = 64
"""Default of the most rows of a step: on an H200, 64 rows of a recommender take 1.4 times as long as one."""
_STEP = 4
"""Factor from one bucket to the next: at most three quarters of a step are padding."""

Rows = tuple[Mapping[str, int], Mapping[str, int]]


def pool(
    model: FlatGraph | str | os.PathLike[str],
    request: RunRequest | None = None,
    settings: PoolSettings | None = None,
    *,
    progress: Progress | None = None,
) -> Pool:
    """Makes a pool; see `api.pool`."""
    settings, request = settings or PoolSettings(), request or RunRequest()
    if settings.groups != AUTO and int(settings.groups) < settings.priorities:
        raise MsplitError(
            f"{settings.priorities} levels of priority share {settings.groups} groups, and each has one of its own",
            fix=f"give {settings.priorities} groups or more",
        )
    return make_pool(recipe_of(model, request, settings, progress), settings, progress or silent)


def recipe_of(
    model: FlatGraph | str | os.PathLike[str], request: RunRequest, settings: PoolSettings, progress: Progress | None
) -> Recipe:
    """Makes the recipe for a model, which is compiled, or for a build.

    Raises:
        EngineError: The engine can not run the model, or its outputs are not those of the reference.
        MsplitError: Requests are to share steps, and can not.
    """
    if not isinstance(model, FlatGraph) and is_build(path(model)):
        every = load_on(model, request.devices)

        def renews_build(source: Any, rows: Any) -> tuple[Any, Sequence[OutputCheck], Callable[[], object]]:
            with making_beside(every[0].place, object):
                return *values_of(every, source, rows, request.devices), lambda: None

        recipe = _of_build(every, f"{os.fspath(model)} is a build for it", settings)
        return replace(recipe, renews=renews_build)
    flat = opened(model)
    engine, why = choose_engine(request, flat)
    refuse_devices(request, engine, why)
    rows, mixes = rows_of(flat, request)
    batches, notes = batches_of(flat, request, settings, rows, mixes)
    if engine.name != ENGINE.name:
        recipe = _of_session(flat, request, batches, (rows, mixes), settings.max_rows, progress)
    else:
        made = make(flat, request, batches=batches, progress=progress)
        if not batches:  # the request settles a shape that has no rows
            buckets = tuple(replace(one, batch=None) for one in made.manifest.rungs)
            made = replace(made, manifest=replace(made.manifest, rungs=buckets))
        every = _in_memory(made, request.places)
        recipe = replace(_of_build(every, why, settings), renews=_renews_model(flat, made, every, request))
    return replace(recipe, notes=(*recipe.notes, *notes))


def batches_of(
    flat: FlatGraph, request: RunRequest, settings: PoolSettings, rows: Rows | None, mixes: str
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Buckets to prepare, none where shapes are fixed; and notes.

    Raises:
        MsplitError: Requests are to share steps, and can not.
    """
    if not any(shape is None or shape[:1] == (None,) for shape in stated_shapes(flat).values()):
        if (settings.max_batch or 1) > 1 or settings.batches:
            fix = "leave --max-batch and --batch out (max_batch and batches in Python)"
            raise MsplitError("the model's inputs have fixed shapes, so that no step has room for more", fix=fix)
        return (), ()
    _refuse_to_join(rows, settings, mixes)
    if settings.batches:
        if settings.max_batch is not None and settings.max_batch != max(settings.batches):
            what = f"max_batch is {settings.max_batch}, and the largest of the batches {max(settings.batches)}"
            raise MsplitError(what, fix="leave one of the two out")
        return tuple(sorted(set(settings.batches))), ()
    if rows is None:
        return (request.workload.batch or 1,), (f"each request is a step of its own: {mixes}",)
    largest = settings.max_batch or max(MAX_BATCH, request.workload.batch or 1)
    ladder = [1]
    while ladder[-1] * _STEP < largest:
        ladder.append(ladder[-1] * _STEP)
    return tuple(dict.fromkeys([*ladder, largest])), ()


def _refuse_to_join(rows: Rows | None, settings: PoolSettings, mixes: str) -> None:
    """Refuses settings that join requests, where rows are not independent."""
    if rows is None and (settings.max_batch or 1) > 1:
        fix = "leave --max-batch (max_batch in Python) out: each request is a step"
        raise MsplitError(f"requests can not share a step of {settings.max_batch} rows: {mixes}", fix=fix)


def _in_memory(made: Made, places: Sequence[str]) -> tuple[LoadedBuild, ...]:
    """Loads a build that is in memory onto each device, as `load_on` does with one on disk."""
    manifest: Manifest = made.manifest
    with phase("loading weights"):
        memory = made.weights.memory()
    steps, found = None, []
    for place in places:
        options = EngineOptions(device=place, capture=manifest.capture, measure=manifest.measured)
        builds, ieee = ENGINE.builds(place), Precision(manifest.precision).ieee
        fits = builds.fits(manifest.made_for)
        opened = builds.open(memory, None, options, ieee=ieee, fits=fits, steps=steps)
        steps = opened.steps
        references, restored = {}, {}
        for bucket in manifest.rungs:
            one = made.packed[bucket.program]
            references[bucket.program] = whole_reference(made.references[bucket.program], bucket, manifest.computed)
            restored[bucket.program] = opened.restore(one.program, one.feeds, one.host)
        found.append(LoadedBuild(manifest, references, (), opened, restored, place))
    return tuple(found)


def _renews_model(flat: FlatGraph, made: Made, every: Sequence[LoadedBuild], request: RunRequest) -> Renews:
    """Makes what gives a model that was compiled here other values."""
    values, renewal = ModelValues(flat, {}), ENGINE.builds(request.places[0]).renewal

    def renews(
        source: NewValues | None, rows: NewRows | None
    ) -> tuple[Any, Sequence[OutputCheck], Callable[[], object]]:
        other, state = values.changed(source, rows)
        checks, live, new = list[OutputCheck](), [], []
        with making_beside(request.places[0], object):
            try:
                for program, job in made.jobs.items():
                    again = replace(job, flat=other, state=state)
                    with renewal.sharing_with(every[0].restored[program].compiled.program):
                        compiled = ENGINE.compile(again)
                    if compiled.optimized.host is not None:
                        fix = "make another pool"
                        raise EngineError("a part of the model runs on the host, which keeps the old values", fix=fix)
                    checks.append(verify_made(compiled, again, request))
                    live += [one.restored[program].compiled.program for one in every]
                    new += [compiled.program for _ in every]
                return (
                    renewal.Renewal.of(live, new),
                    checks,
                    lambda: values.keep(other, state),
                )
            finally:
                ENGINE.forget(other)

    return renews


def _of_build(every: Sequence[LoadedBuild], why: str, settings: PoolSettings) -> Recipe:
    """Makes the recipe for a build that is loaded onto each device."""
    loaded = every[0]
    manifest, found = loaded.manifest, loaded.opened
    buckets = {bucket.batch or 0: bucket for bucket in manifest.rungs}
    rows = manifest.rows if 0 not in buckets else None
    largest = max(buckets)
    # A build has the batches that it has: another largest one can not be asked for, and without independent rows nothing is joined.
    if settings.max_batch is not None and settings.max_batch not in (1, largest):
        said = f"the largest batch of the build is {largest}" if largest else "the build has one batch, of its own"
        raise MsplitError(f"max_batch is {settings.max_batch}, and {said}", fix="leave it out")
    _refuse_to_join(rows, settings, manifest.mixes)
    # Everything by batch, 0 for the one batch of a model without rows; what was restored is there once for each GPU.
    references = {batch: loaded.references[bucket.program] for batch, bucket in buckets.items()}
    restored = [{batch: one.restored[bucket.program] for batch, bucket in buckets.items()} for one in every]
    shapes: dict[int, Mapping[str, Shape]] = {batch: bucket.inputs for batch, bucket in sorted(buckets.items())}
    dtypes = {name: value.dtype for name, value in references[largest].feeds.items()}
    # Steps fly where one call starts a captured graph. Else they run in threads; on the CPU without a host part they only seem to fly.
    asynchronous, hosted = found.is_asynchronous(restored[0].values()), any(one.hosted for one in restored[0].values())
    ports = Ports(
        dtypes,
        shapes,
        rows,
        manifest.mixes,
        device="cuda" if asynchronous else None,
        max_rows=settings.max_rows,
        example=references[min(buckets)].feeds,
    )
    polls = asynchronous or (manifest.made_for.get("device") == "cpu" and not hosted)
    entries = dict(rows[0]) if rows is not None else dict.fromkeys(dtypes, 0)

    def slot(level: int, one_stream: bool, gpu: int) -> Slot:
        opened, urgency = every[gpu].opened, settings.priorities - 1 - level
        if asynchronous:
            return opened.slot(restored[gpu], entries, urgency=urgency, one_stream=one_stream)
        running = {batch: opened.run(one, alone=True, one_stream=one_stream) for batch, one in restored[gpu].items()}
        whole = StepSlot({batch: one.step for batch, one in running.items()}, ports, [*running.values()])
        return SimulatedSlot(whole) if polls else whole

    def verify(slot: Slot) -> Sequence[OutputCheck]:
        checks = []
        for batch, one in references.items():
            found.rewind()
            checks.append(verify_step(_step(slot, batch), one, manifest))
        return checks

    return Recipe(
        ports,
        slot,
        verify,
        references[min(buckets)].feeds,
        manifest.label,
        ports.outputs(references[largest].outputs),
        tuple(dict.fromkeys([*manifest.notes, *(note for one in every for note in one.notes)])),
        {"why": why, "streams": buckets[largest].streams, "kernels": buckets[largest].kernels},
        threads=not polls,
        gpus=len(every),
        weight_bytes=found.weight_bytes,
        slot_bytes=found.slot_bytes(restored[0].values()),
        free_bytes=lambda: min([free for one in every if (free := one.opened.free_bytes()) is not None], default=None),
        reserved_bytes=lambda: sum(one.opened.reserved_bytes() for one in every),
        urgencies=min([levels for one in every if (levels := one.opened.urgencies()) is not None], default=None),
        streams=max(bucket.streams for bucket in buckets.values()),
    )


def _step(slot: Slot, batch: int) -> Callable[[Arrays], Arrays]:
    """Function that runs a step in a slot from beginning to end."""

    def step(feeds: Arrays) -> Arrays:
        slot.start(batch, [feeds])
        while not slot.over():
            slot.wait()
        return slot.outputs()

    return step


def _of_session(
    flat: FlatGraph,
    request: RunRequest,
    batches: Sequence[int],
    proof: tuple[Rows | None, str],
    max_rows: int | None,
    progress: Progress | None,
) -> Recipe:
    """Makes the recipe for a TensorFlow session: slots call it, with steps of any number of rows."""
    largest = max(batches, default=None)
    ready = make_ready(flat, request.sized(batch=largest) if largest else request, progress=progress)
    runner, feeds = ready.runner, ready.chosen.job.feeds
    rows = proof[0] if batches else None
    entries = rows[0] if rows is not None else {}
    shapes: dict[int, Mapping[str, Shape]] = {
        batch: {
            name: (batch * entries[name], *value.shape[1:]) if entries.get(name) else value.shape
            for name, value in feeds.items()
        }
        for batch in (batches if rows is not None else batches[-1:]) or (0,)
    }
    dtypes = {name: value.dtype for name, value in feeds.items()}
    ports = Ports(dtypes, shapes, rows, proof[1], pads=False, max_rows=max_rows, example=feeds)

    def step(given: Feeds) -> Answer:
        outputs = runner.executable.step(given)
        return {name: np.array(value) for name, value in outputs.items()}  # it gives out its own constants

    return Recipe(
        ports,
        lambda level, one_stream, gpu: StepSlot({0: step}, ports),
        lambda slot: (),
        {name: value[: entries[name] * min(shapes)] if entries.get(name) else value for name, value in feeds.items()},
        runner.label,
        ports.outputs(step(feeds)),
        runner.notes,
        {"why": runner.why, **runner.facts},
        threads=True,
        owned=[runner.executable],
    )
