"""From a model, or a build, to a pool."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from msplit.decide.model import opened
from msplit.engines.base import Arrays, Executable, Feeds
from msplit.engines.cuda import engine as cuda
from msplit.engines.cuda.options import EngineOptions
from msplit.errors import MsplitError
from msplit.flatten.flat import FlatGraph
from msplit.formats.build import Manifest, is_build
from msplit.measure.build import make, rows_of
from msplit.measure.execution import make_ready
from msplit.measure.opening import Loaded, load, verify_step, whole_reference
from msplit.measure.request import BenchRequest
from msplit.measure.results import Check
from msplit.measure.variants import choose_engine
from msplit.progress import Progress, phase, silent
from msplit.serving.pool import About, Answer, Arena, Pool
from msplit.serving.ports import Ports, Shape
from msplit.serving.settings import AUTO, PoolSettings
from msplit.shapes.inputs import stated_shapes

MAX_BATCH = 64
"""Most rows of a step, where nothing else is said: on an H200, 64 rows of a recommender take 1.4 times as long as one."""
_STEP = 4
"""From one batch to the next larger one: at most three quarters of a step are nobody's rows."""

Rows = tuple[Mapping[str, int], Mapping[str, int]]


class StepArena:
    """An arena whose steps executables do from beginning to end.

    Args:
        steps: By batch; what is under 0 runs any.
        owned: What is closed with it.
    """

    def __init__(
        self, steps: Mapping[int, Callable[[Feeds], Answer]], ports: Ports, owned: Sequence[Executable] = ()
    ) -> None:
        self._steps, self._ports, self._owned = steps, ports, owned
        self._outputs: Answer = {}

    def start(self, rung: int, feeds: Sequence[Feeds]) -> None:
        """See `Arena`."""
        step = self._steps[rung if rung in self._steps else 0]
        self._outputs = step(self._ports.join(feeds, rung))

    def over(self) -> bool:
        """See `Arena`."""
        return True

    def wait(self) -> None:
        """See `Arena`."""

    def outputs(self) -> Answer:
        """See `Arena`."""
        return self._outputs

    def facts(self) -> Mapping[str, Any]:
        """See `Arena`."""
        return self._owned[-1].facts() if self._owned else {}

    def close(self) -> None:
        """See `Arena`."""
        for executable in self._owned:
            executable.close()


class SimulatedArena:
    """An arena whose steps a thread runs, so that they are begun and looked after as those of a GPU are."""

    def __init__(self, arena: Arena) -> None:
        self._arena, self._thread = arena, ThreadPoolExecutor(1, thread_name_prefix="msplit-simulated")
        self._running: Future[None] | None = None

    def start(self, rung: int, feeds: Sequence[Feeds]) -> None:
        """See `Arena`."""
        self._running = self._thread.submit(self._arena.start, rung, feeds)

    def over(self) -> bool:
        """See `Arena`."""
        assert self._running is not None
        if not self._running.done():
            return False
        self._running.result()
        return True

    def wait(self) -> None:
        """See `Arena`."""
        assert self._running is not None
        self._running.exception()

    def outputs(self) -> Answer:
        """See `Arena`."""
        return self._arena.outputs()

    def facts(self) -> Mapping[str, Any]:
        """See `Arena`."""
        return self._arena.facts()

    def close(self) -> None:
        """See `Arena`."""
        self._thread.shutdown()
        self._arena.close()


def pool(
    model: FlatGraph | str | os.PathLike[str],
    request: BenchRequest | None = None,
    settings: PoolSettings | None = None,
    *,
    progress: Progress | None = None,
) -> Pool:
    """See `api.pool`."""
    settings, request = settings or PoolSettings(), request or BenchRequest()
    if settings.groups == AUTO:
        settings = replace(settings, groups=8)
    assert isinstance(settings.groups, int)
    if settings.groups < settings.priorities:
        raise MsplitError(
            f"{settings.priorities} levels of priority share {settings.groups} groups, and each has one of its own",
            fix=f"give {settings.priorities} groups or more",
        )
    if not isinstance(model, FlatGraph) and is_build(model):
        return _of_build(load(model), os.fspath(model), settings, progress or silent)
    flat = opened(model)
    engine, why = choose_engine(request, flat)
    rows, mixes = rows_of(flat, request)
    batches, notes = _batches(flat, request, settings, rows, mixes)
    if engine.name != cuda.ENGINE.name:
        return _of_sessions(flat, request, settings, batches, (rows, mixes), notes, progress)
    made = make(flat, request, batches=batches, progress=progress)
    whole = _in_memory(made)
    if not batches:  # a shape is settled by the request, and not by rows
        whole = replace(
            whole,
            manifest=replace(whole.manifest, rungs=tuple(replace(one, batch=None) for one in whole.manifest.rungs)),
        )
    return _of_build(replace(whole, notes=(*whole.notes, *notes)), why, settings, progress or silent)


def _batches(
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
                fix="leave max_batch and batches out",
            )
        return (), ()
    if rows is None and (settings.max_batch or 1) > 1:
        raise MsplitError(
            f"requests can not share a step of {settings.max_batch} rows: {mixes}",
            fix="leave max_batch out: each request is a step",
        )
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


def _in_memory(made: Any) -> Loaded:
    """What was made, on its device, as `load` has what was kept."""
    manifest: Manifest = made.manifest
    device = "cpu" if manifest.made_for.get("device") == "cpu" else "cuda"
    options = EngineOptions(device=device, capture=manifest.capture, measure=manifest.measured)
    with phase("loading weights"):
        pieces = [np.frombuffer(piece, np.uint8) for piece in made.weights.pieces()]
        memory = np.concatenate(pieces) if pieces else np.zeros(0, np.uint8)
        found = cuda.Opened(memory, None, options, ieee=manifest.ieee, fits=True)
    references, restored = {}, {}
    for rung in manifest.rungs:
        one = made.packed[rung.program]
        references[rung.program] = whole_reference(made.references[rung.program], rung, manifest.computed)
        restored[rung.program] = found.restore(one.program, one.feeds, one.host)
    return Loaded(manifest, references, (), found, restored)


def _of_build(loaded: Loaded, why: str, settings: PoolSettings, tell: Progress) -> Pool:
    """A pool of what is on its device already."""
    manifest, groups = loaded.manifest, settings.groups
    assert isinstance(groups, int)
    rungs = {rung.batch or 0: rung for rung in manifest.rungs}
    rows = manifest.rows if 0 not in rungs else None
    largest = max(rungs)
    if settings.max_batch is not None and settings.max_batch not in (1, largest):
        raise MsplitError(
            f"max_batch is {settings.max_batch}, and the largest batch of the build {largest or 'is fixed'}",
            fix="leave it out",
        )
    if rows is None and (settings.max_batch or 1) > 1:
        raise MsplitError(
            f"requests can not share a step: {manifest.mixes}", fix="leave max_batch out: each request is a step"
        )
    feeds = loaded.references[rungs[largest].program].feeds
    shapes: dict[int, dict[str, Shape]] = {batch: dict(rung.inputs) for batch, rung in sorted(rungs.items())}
    ports = Ports({name: value.dtype for name, value in feeds.items()}, shapes, rows, manifest.mixes)
    restored = {batch: loaded.restored[rung.program] for batch, rung in rungs.items()}
    flies = loaded.opened.can_fly(restored.values())
    simulated = manifest.made_for.get("device") == "cpu"
    hosted = any(one.compiled.optimized.host is not None for one in restored.values())
    arenas: list[tuple[int, Arena]] = []
    try:
        for number in range(groups):
            tell("making arenas", number / groups)
            level = number * settings.priorities // groups
            if flies:
                entries = dict(rows[0]) if rows is not None else dict.fromkeys(feeds, 0)
                urgency = settings.priorities - 1 - level
                arenas.append((level, loaded.opened.arena(restored, entries, urgency=urgency)))
                continue
            running = {batch: loaded.opened.run(one, alone=True) for batch, one in restored.items()}
            arena: Arena = StepArena({batch: one.step for batch, one in running.items()}, ports, [*running.values()])
            arenas.append((level, SimulatedArena(arena) if simulated and not hosted else arena))
        checks = list[Check]()
        for _, arena in arenas:
            for batch, rung in rungs.items():
                tell("verifying", len(checks) / (len(arenas) * len(rungs)))
                checks.append(verify_step(_step(arena, batch), loaded.references[rung.program], manifest))
    except BaseException:
        for _, arena in arenas:
            arena.close()
        raise
    polls = flies or (simulated and not hosted)
    example = loaded.references[rungs[largest].program].outputs
    return Pool(
        ports,
        arenas,
        settings,
        About(
            manifest.label,
            ports.outputs(example),
            tuple(checks),
            (*manifest.notes, *loaded.notes),
            {"why": why, **arenas[0][1].facts()},
        ),
        threads=0 if polls else settings.host_threads or groups,
    )


def _step(arena: Arena, batch: int) -> Callable[[Arrays], Arrays]:
    """One step of an arena, from beginning to end."""

    def step(feeds: Arrays) -> Arrays:
        arena.start(batch, [feeds])
        while not arena.over():
            pass
        return arena.outputs()

    return step


def _of_sessions(
    flat: FlatGraph,
    request: BenchRequest,
    settings: PoolSettings,
    batches: Sequence[int],
    proof: tuple[Rows | None, str],
    notes: tuple[str, ...],
    progress: Progress | None,
) -> Pool:
    """A pool whose arenas are calls of one TensorFlow session, which takes steps of any batch."""
    largest = max(batches, default=None)
    ready = make_ready(flat, replace(request, batch=largest) if largest else request, progress=progress)
    executable, feeds = ready.runner.executable, ready.chosen.job.feeds
    rows = proof[0] if batches else None
    entries = rows[0] if rows is not None else {}
    shapes: dict[int, dict[str, Shape]] = {
        batch: {
            name: (batch * entries[name], *value.shape[1:]) if entries.get(name) else value.shape
            for name, value in feeds.items()
        }
        for batch in (batches if rows is not None else batches[-1:]) or (0,)
    }
    ports = Ports({name: value.dtype for name, value in feeds.items()}, shapes, rows, proof[1], pads=False)

    def step(given: Feeds) -> Answer:
        return {
            name: np.array(value) for name, value in executable.step(given).items()
        }  # a session hands out its very constants

    groups = settings.groups
    assert isinstance(groups, int)
    arenas = [
        (number * settings.priorities // groups, StepArena({0: step}, ports, [] if number else [executable]))
        for number in range(groups)
    ]
    return Pool(
        ports,
        arenas,
        settings,
        About(
            f"{ready.runner.label}, {groups} threads",
            ports.outputs(executable.step(feeds)),
            ready.runner.checks,
            (*ready.runner.notes, *notes),
            ready.runner.facts,
        ),
        threads=settings.host_threads or groups,
    )
