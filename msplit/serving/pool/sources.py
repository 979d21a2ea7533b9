"""What a pool's arenas are made of: a build, a model that is compiled here, or a TensorFlow session."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from msplit.assignment.model import opened
from msplit.core.arguments import path
from msplit.core.precision import Precision
from msplit.engines.base import Arrays, Executable, Feeds
from msplit.engines.cuda.engine import ENGINE
from msplit.engines.cuda.options import EngineOptions
from msplit.errors import MsplitError
from msplit.flatten.flat import FlatGraph
from msplit.formats.build import Manifest, is_build
from msplit.progress import Progress, phase
from msplit.run.build import Made, make, rows_of
from msplit.run.open import Loaded, load_on, verify_step, whole_reference
from msplit.run.prepare import make_ready
from msplit.run.request import BenchRequest
from msplit.run.variants import choose_engine, refuse_devices
from msplit.serving.pool.ports import Port, Ports, Shape
from msplit.serving.pool.scheduler import Answer, Arena
from msplit.serving.pool.settings import PoolSettings
from msplit.serving.pool.slots import SimulatedArena, StepArena
from msplit.shapes.inputs import stated_shapes
from msplit.verify.results import Check

MAX_BATCH = 64
"""Most rows of a step, where nothing else is said: on an H200, 64 rows of a recommender take 1.4 times as long as one."""
_STEP = 4
"""From one batch to the next larger one: at most three quarters of a step are nobody's rows."""

Rows = tuple[Mapping[str, int], Mapping[str, int]]


@dataclass(frozen=True, eq=False)
class Recipe:
    """What arenas are made of.

    Attributes:
        arena: Makes one, for a level of priority; with all of it on one stream, if that is asked for; on one of the GPUs.
        verify: Runs a step of each batch of an arena, and holds it against its reference.
        feeds: Inputs of a small step.
        threads: Whether each step keeps a thread busy.
        gpus: How many there are.
        weight_bytes: What they share, on each GPU.
        arena_bytes: What each takes, at least, as far as that is known before one is made.
        free_bytes: What the GPU has besides that has the least; None: it is not known.
        reserved_bytes: What the process holds on all GPUs.
        urgencies: Levels of priority that each GPU has; None: it is not known.
        streams: Of an arena, at most.
        owned: What all arenas run, to be closed when they are.
    """

    ports: Ports
    arena: Callable[[int, bool, int], Arena]
    verify: Callable[[Arena], Sequence[Check]]
    feeds: Arrays
    label: str
    outputs: Mapping[str, Port]
    notes: tuple[str, ...]
    facts: Mapping[str, Any]
    threads: bool
    gpus: int = 1
    weight_bytes: int = 0
    arena_bytes: int = 0
    free_bytes: Callable[[], int | None] = lambda: None
    reserved_bytes: Callable[[], int] = lambda: 0
    urgencies: int | None = None
    streams: int = 1
    owned: Sequence[Executable] = ()


def recipe_of(
    model: FlatGraph | str | os.PathLike[str], request: BenchRequest, settings: PoolSettings, progress: Progress | None
) -> Recipe:
    """What the arenas for a model or a build are made of. A model is compiled.

    Raises:
        EngineError: The engine can not run the model, or its outputs are not those of the reference.
        MsplitError: Requests are to share steps, and can not.
    """
    if not isinstance(model, FlatGraph) and is_build(path(model)):
        return _of_build(load_on(model, request.devices), f"{os.fspath(model)} is a build for it", settings)
    flat = opened(model)
    engine, why = choose_engine(request, flat)
    refuse_devices(request, engine, why)
    rows, mixes = rows_of(flat, request)
    batches, notes = batches_of(flat, request, settings, rows, mixes)
    if engine.name != ENGINE.name:
        recipe = _of_session(flat, request, batches, (rows, mixes), progress)
    else:
        made = make(flat, request, batches=batches, progress=progress)
        if not batches:  # the request settles a shape that has no rows
            rungs = tuple(replace(one, batch=None) for one in made.manifest.rungs)
            made = replace(made, manifest=replace(made.manifest, rungs=rungs))
        recipe = _of_build(_in_memory(made, request.places), why, settings)
    return replace(recipe, notes=(*recipe.notes, *notes))


def batches_of(
    flat: FlatGraph, request: BenchRequest, settings: PoolSettings, rows: Rows | None, mixes: str
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Rows of the steps to make, none where shapes are fixed; and what is worth a note.

    Raises:
        MsplitError: Requests are to share steps, and can not.
    """
    if not any(shape is None or shape[:1] == (None,) for shape in stated_shapes(flat).values()):
        if (settings.max_batch or 1) > 1 or settings.batches:
            raise MsplitError(
                "the model's inputs have fixed shapes, so that no step has room for more",
                fix="leave --max-batch and --batch out (max_batch and batches in Python)",
            )
        return (), ()
    _refuse_to_join(rows, settings, mixes)
    if settings.batches:
        if settings.max_batch is not None and settings.max_batch != max(settings.batches):
            raise MsplitError(
                f"max_batch is {settings.max_batch}, and the largest of the batches {max(settings.batches)}",
                fix="leave one of the two out",
            )
        return tuple(sorted(set(settings.batches))), ()
    if rows is None:
        return (request.batch or 1,), (f"each request is a step of its own: {mixes}",)
    largest = settings.max_batch or max(MAX_BATCH, request.batch or 1)
    ladder = [1]
    while ladder[-1] * _STEP < largest:
        ladder.append(ladder[-1] * _STEP)
    return tuple(dict.fromkeys([*ladder, largest])), ()


def _refuse_to_join(rows: Rows | None, settings: PoolSettings, mixes: str) -> None:
    """Refuses what asks for requests that share steps, where rows are not independent."""
    if rows is None and (settings.max_batch or 1) > 1:
        raise MsplitError(
            f"requests can not share a step of {settings.max_batch} rows: {mixes}",
            fix="leave --max-batch (max_batch in Python) out: each request is a step",
        )


def _in_memory(made: Made, places: Sequence[str]) -> tuple[Loaded, ...]:
    """What was made, on each device, as `load_on` has what was kept."""
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
        for rung in manifest.rungs:
            one = made.packed[rung.program]
            references[rung.program] = whole_reference(made.references[rung.program], rung, manifest.computed)
            restored[rung.program] = opened.restore(one.program, one.feeds, one.host)
        found.append(Loaded(manifest, references, (), opened, restored))
    return tuple(found)


def _of_build(every: Sequence[Loaded], why: str, settings: PoolSettings) -> Recipe:
    """Arenas of what is on each of the devices already."""
    loaded = every[0]
    manifest, found = loaded.manifest, loaded.opened
    rungs = {rung.batch or 0: rung for rung in manifest.rungs}
    rows = manifest.rows if 0 not in rungs else None
    largest = max(rungs)
    if settings.max_batch is not None and settings.max_batch not in (1, largest):
        said = f"the largest batch of the build is {largest}" if largest else "the build has one batch, of its own"
        raise MsplitError(f"max_batch is {settings.max_batch}, and {said}", fix="leave it out")
    _refuse_to_join(rows, settings, manifest.mixes)
    references = {batch: loaded.references[rung.program] for batch, rung in rungs.items()}
    restored = [{batch: one.restored[rung.program] for batch, rung in rungs.items()} for one in every]
    shapes: dict[int, Mapping[str, Shape]] = {batch: rung.inputs for batch, rung in sorted(rungs.items())}
    dtypes = {name: value.dtype for name, value in references[largest].feeds.items()}
    flies, hosted = found.can_fly(restored[0].values()), any(one.hosted for one in restored[0].values())
    ports = Ports(dtypes, shapes, rows, manifest.mixes, device="cuda" if flies else None)
    polls = flies or (manifest.made_for.get("device") == "cpu" and not hosted)
    entries = dict(rows[0]) if rows is not None else dict.fromkeys(dtypes, 0)

    def arena(level: int, one_stream: bool, gpu: int) -> Arena:
        opened, urgency = every[gpu].opened, settings.priorities - 1 - level
        if flies:
            return opened.arena(restored[gpu], entries, urgency=urgency, one_stream=one_stream)
        running = {batch: opened.run(one, alone=True, one_stream=one_stream) for batch, one in restored[gpu].items()}
        whole = StepArena({batch: one.step for batch, one in running.items()}, ports, [*running.values()])
        return SimulatedArena(whole) if polls else whole

    def verify(arena: Arena) -> Sequence[Check]:
        checks = []
        for batch, one in references.items():
            found.rewind()
            checks.append(verify_step(_step(arena, batch), one, manifest))
        return checks

    return Recipe(
        ports,
        arena,
        verify,
        references[min(rungs)].feeds,
        manifest.label,
        ports.outputs(references[largest].outputs),
        tuple(dict.fromkeys([*manifest.notes, *(note for one in every for note in one.notes)])),
        {"why": why, "streams": rungs[largest].streams, "kernels": rungs[largest].kernels},
        threads=not polls,
        gpus=len(every),
        weight_bytes=found.weight_bytes,
        arena_bytes=found.arena_bytes(restored[0].values()),
        free_bytes=lambda: min([free for one in every if (free := one.opened.free_bytes()) is not None], default=None),
        reserved_bytes=lambda: sum(one.opened.reserved_bytes() for one in every),
        urgencies=min([levels for one in every if (levels := one.opened.urgencies()) is not None], default=None),
        streams=max(rung.streams for rung in rungs.values()),
    )


def _step(arena: Arena, batch: int) -> Callable[[Arrays], Arrays]:
    """One step of an arena, from beginning to end."""

    def step(feeds: Arrays) -> Arrays:
        arena.start(batch, [feeds])
        while not arena.over():
            arena.wait()
        return arena.outputs()

    return step


def _of_session(
    flat: FlatGraph,
    request: BenchRequest,
    batches: Sequence[int],
    proof: tuple[Rows | None, str],
    progress: Progress | None,
) -> Recipe:
    """Arenas that are calls of one TensorFlow session, which takes steps of any batch."""
    largest = max(batches, default=None)
    ready = make_ready(flat, replace(request, batch=largest) if largest else request, progress=progress)
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
    ports = Ports({name: value.dtype for name, value in feeds.items()}, shapes, rows, proof[1], pads=False)

    def step(given: Feeds) -> Answer:
        outputs = runner.executable.step(given)
        return {name: np.array(value) for name, value in outputs.items()}  # it hands out its very constants

    return Recipe(
        ports,
        lambda level, one_stream, gpu: StepArena({0: step}, ports),
        lambda arena: (),
        {name: value[: entries[name] * min(shapes)] if entries.get(name) else value for name, value in feeds.items()},
        runner.label,
        ports.outputs(step(feeds)),
        runner.notes,
        {"why": runner.why, **runner.facts},
        threads=True,
        owned=[runner.executable],
    )
