"""Pools of a build, of a model that is compiled here, or of a TensorFlow session: the recipe of each for its slots."""

from __future__ import annotations

import os
import timeit
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import numpy as np

from msplit.assignment.model import load, opened
from msplit.core.arguments import Precision, path
from msplit.engines.base import STEPS, Arrays, Feeds
from msplit.engines.cuda.engine import ENGINE
from msplit.engines.cuda.options import EngineOptions
from msplit.engines.environment import mps
from msplit.engines.user_rows import UserRows
from msplit.engines.variables import rounded_tables
from msplit.errors import EngineError, MsplitError
from msplit.flatten.flat import FlatGraph
from msplit.formats import build as files
from msplit.formats.build import Manifest, is_build
from msplit.formats.model import ReadOptions
from msplit.progress import Progress, phase, silent
from msplit.run.buckets import rows_of
from msplit.run.build import LoadedBuild, Made, check_lengths, make, values_of, verify_step, whole_reference
from msplit.run.build import load as load_build
from msplit.run.prepare import make_ready
from msplit.run.renew import ModelValues, executable_beside, making_beside, verify_made
from msplit.run.request import RunRequest
from msplit.run.variants import choose_engine, refuse_devices
from msplit.serving.pool.making import Recipe, make_processes, make_with_workers
from msplit.serving.pool.making import make as make_pool
from msplit.serving.pool.pool import Pool, Renews
from msplit.serving.pool.ports import Ports, Shape
from msplit.serving.pool.scheduler import Bucket, rows_in
from msplit.serving.pool.settings import AUTO, PoolSettings
from msplit.serving.pool.slots import Answer, HostedSlot, SimulatedSlot, Slot, StepSlot
from msplit.shapes.infer import stated_shapes
from msplit.verify.results import OutputCheck

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
    first_step: int = 0,
    recipe_of: Callable[[PoolSettings], Recipe] | None = None,
) -> Pool:
    """Makes a pool; see `api.pool`.

    Args:
        first_step: Number of the step whose random numbers the first one draws.
        recipe_of: Recipes of the model, where it is compiled, or loaded, for several pools.
    """
    settings, request = settings or PoolSettings(), request or RunRequest()
    if settings.groups != AUTO and int(settings.groups) < settings.priorities:
        raise MsplitError(
            f"{settings.priorities} levels of priority share {settings.groups} groups, and each has one of its own",
            fix=f"give {settings.priorities} groups or more",
        )
    if settings.workers == AUTO:
        return make_with_workers(partial(_in_processes, model, request, tell=progress or silent), settings)
    if len(request.devices) > 1 or settings.workers:
        return _in_processes(model, request, settings, progress or silent)
    recipe = (recipe_of or recipes(model, request, (settings,), progress))(settings)
    made = make_pool(recipe, settings, progress or silent)
    recipe.rewind(first_step)
    return made


_STEPS = 1 << 40
"""Steps of a process before it would draw the random numbers of the next one."""


def _in_processes(
    model: FlatGraph | str | os.PathLike[str], request: RunRequest, settings: PoolSettings, tell: Progress
) -> Pool:
    """Makes a pool of one or several processes for each device of the request."""
    choice, workers = None, int(settings.workers or 1)
    if isinstance(model, FlatGraph) or not is_build(path(model)):
        flat = opened(model)
        refuse_devices(request, *choose_engine(request, flat))
        choice, model = flat.model.choice, flat.model.path
        if not os.path.exists(model):
            raise MsplitError("processes read the model from its file, and it has none", fix="save it, or name one GPU")
    if workers > 1 and request.device == "cuda" and not ENGINE.unavailable() and (why := mps(start=True)):
        what = f"{workers} processes of a GPU answer half of what one does without NVIDIA's MPS: {why}"
        raise MsplitError(what, fix="leave workers out, and give more groups; `msplit doctor` says whether MPS runs")
    where, started = os.path.abspath(os.fspath(model)), count()
    places = request.places * workers

    def make(number: int, own: PoolSettings) -> Callable[[Progress], Pool]:
        index = number % len(request.places)
        one = replace(request, devices=request.devices[index : index + 1])
        return partial(_in_this_process, where, choice, one, own, next(started) * _STEPS)

    return make_processes(make, places, settings, tell, together=choice is None)


def _in_this_process(
    where: str, choice: ReadOptions | None, request: RunRequest, settings: PoolSettings, first: int, tell: Progress
) -> Pool:
    """Makes the pool of one of these processes, of a build where there is no choice of what a file has."""
    model = where if choice is None else load(where, **vars(choice))
    return pool(model, request, settings, progress=tell, first_step=first)


def recipes(
    model: FlatGraph | str | os.PathLike[str],
    request: RunRequest,
    several: Sequence[PoolSettings],
    progress: Progress | None,
) -> Callable[[PoolSettings], Recipe]:
    """Makes what gives recipes for a model, which is compiled once with the buckets of several settings, or for a build.

    Raises:
        EngineError: The engine can not run the model, or its outputs are not those of the reference.
        MsplitError: Requests are to share steps, and can not.
    """
    if not isinstance(model, FlatGraph) and is_build(path(model)):
        return _recipes_of_build(model, request, several)
    flat = opened(model)
    lengths = tuple(sorted({length for settings in several for length in settings.lengths or ()}))
    if lengths:
        check_lengths(request, lengths)
        request = replace(request, engine=ENGINE.name)
    engine, why = choose_engine(request, flat)
    refuse_devices(request, engine, why)
    rows, mixes = rows_of(flat, request)
    wanted = partial(batches_of, flat, request, rows=rows, mixes=mixes)
    compiled: LoadedBuild | None = None
    if engine.name == ENGINE.name:
        every = tuple(sorted({batch for settings in several for batch in wanted(settings)}))
        made = make(flat, request, batches=every, lengths=lengths, progress=progress)
        if not every:  # the request settles a shape that has no rows
            buckets = tuple(replace(one, batch=None) for one in made.manifest.rungs)
            made = replace(made, manifest=replace(made.manifest, rungs=buckets))
        compiled = _in_memory(made, request.places[0])

    def recipe_of(settings: PoolSettings) -> Recipe:
        batches = wanted(settings)
        if compiled is None:
            return _of_session(flat, request, batches, (rows, mixes), settings.max_rows, progress)
        recipe = _of_build(_with(compiled, lambda batch: not batches or batch in batches), why, settings)
        # With lengths the model that runs was written anew, and would have to be for other values.
        return recipe if lengths else replace(recipe, renews=_renews_model(flat, made, compiled, request))

    return recipe_of


def _recipes_of_build(
    model: str | os.PathLike[str], request: RunRequest, several: Sequence[PoolSettings]
) -> Callable[[PoolSettings], Recipe]:
    """`recipes` for a build, on the first device of the request."""
    loaded = load_build(model, request.places[0])
    if any(settings.lengths for settings in several):
        own = ", ".join(map(str, _lengths_of(sizes_of(loaded.manifest))))
        what = f"{os.fspath(model)} has the lengths that it was built with: {own or 'none'}"
        raise MsplitError(what, fix="leave lengths out (--pool lengths=), or build it anew with them")
    once = loaded.restored[loaded.manifest.rungs[-1].program].shared
    if request.shared and not once.entries:
        raise MsplitError(f"{os.fspath(model)} was built without shared rows", fix="build it anew with --shared")
    tables, hosted = request.options.table_memory, loaded.manifest.tables
    if tables is not None and (tables.rows or not hosted):
        said = "has the rows of tables that it was built with" if hosted else "was built with all tables on the GPU"
        raise MsplitError(f"{os.fspath(model)} {said}", fix="build it anew with --table-memory")
    if request.users not in (1, once.users):
        what = f"{os.fspath(model)} was built for {once.users} users in a step, not {request.users}"
        raise MsplitError(what, fix="build it anew with --users")

    def renews_build(source: Any, rows: Any) -> tuple[Any, Sequence[OutputCheck], Callable[[], object]]:
        with making_beside(loaded.place, object):
            return *values_of(loaded, source, rows), lambda: None

    why_build = f"{os.fspath(model)} is a build for it"
    return lambda settings: replace(_of_build(loaded, why_build, settings), renews=renews_build)


def _with(loaded: LoadedBuild, wanted: Callable[[int], bool]) -> LoadedBuild:
    """Some of the buckets of a build."""
    buckets = tuple(bucket for bucket in loaded.manifest.rungs if wanted(bucket.batch or 0))
    return replace(loaded, manifest=replace(loaded.manifest, rungs=buckets))


def _limited(loaded: LoadedBuild, settings: PoolSettings) -> LoadedBuild:
    """The buckets of a build up to `max_batch`. It has the batches that it has, and without independent rows nothing is joined.

    Raises:
        MsplitError: It has no such batch.
    """
    most, batches = settings.max_batch or 0, sorted(bucket.batch or 0 for bucket in loaded.manifest.rungs)
    if not most or (most == 1 and (loaded.manifest.rows is None or not batches[0])):
        return loaded
    if most not in batches:
        own = ", ".join(str(batch) if batch else "the model's own" for batch in batches)
        raise MsplitError(f"max_batch is {most}, and the batches of the build are {own}", fix="give one, or none")
    return _with(loaded, lambda batch: batch <= most)


def batches_of(
    flat: FlatGraph, request: RunRequest, settings: PoolSettings, rows: Rows | None, mixes: str
) -> tuple[int, ...]:
    """Buckets to prepare, none where shapes are fixed.

    Raises:
        MsplitError: Requests are to share steps, and can not.
    """
    if not any(shape is None or shape[:1] == (None,) for shape in stated_shapes(flat).values()):
        if (settings.max_batch or 1) > 1 or settings.batches:
            fix = "leave --max-batch and --batch out (max_batch and batches in Python)"
            raise MsplitError("the model's inputs have fixed shapes, so that no step has room for more", fix=fix)
        return ()
    _refuse_to_join(rows, settings, mixes)
    if settings.batches:
        if settings.max_batch is not None and settings.max_batch != max(settings.batches):
            what = f"max_batch is {settings.max_batch}, and the largest of the batches {max(settings.batches)}"
            raise MsplitError(what, fix="leave one of the two out")
        return tuple(sorted(set(settings.batches)))
    if rows is None:
        return (request.workload.batch or 1,)
    largest = settings.max_batch or max(MAX_BATCH, request.workload.batch or 1)
    ladder = [1]
    while ladder[-1] * _STEP < largest:
        ladder.append(ladder[-1] * _STEP)
    return tuple(dict.fromkeys([*ladder, largest]))


def _apart(rows: Rows | None, mixes: str) -> tuple[str, ...]:
    """A note, of a model whose batch may change, where requests can not be joined, cut or filled up: most of them may be refused."""
    return () if rows is not None else (f"each request is a step of its own, with the shapes of a batch: {mixes}",)


def _refuse_to_join(rows: Rows | None, settings: PoolSettings, mixes: str) -> None:
    """Refuses settings that join requests, where rows are not independent."""
    if rows is None and (settings.max_batch or 1) > 1:
        fix = "leave --max-batch (max_batch in Python) out: each request is a step"
        raise MsplitError(f"requests can not share a step of {settings.max_batch} rows: {mixes}", fix=fix)


def _in_memory(made: Made, place: str) -> LoadedBuild:
    """Loads a build that is in memory onto a device, as `run.build.load` does with one on disk."""
    manifest: Manifest = made.manifest
    with phase("loading weights"):
        memory, tables = made.weights.memory(), made.weights.tables()
    options = EngineOptions(device=place, capture=manifest.capture, measure=manifest.measured)
    builds, ieee = ENGINE.builds(place), Precision(manifest.precision).ieee
    opened = builds.open(memory, None, options, ieee=ieee, fits=builds.fits(manifest.made_for), tables=tables)
    references, restored = {}, {}
    for bucket in manifest.rungs:
        one = made.packed[bucket.program]
        references[bucket.program] = whole_reference(made.references[bucket.program], bucket, manifest.computed)
        feeds = references[bucket.program].feeds
        feeds = feeds if one.host is None else one.host.run(feeds)[0]
        restored[bucket.program] = opened.restore(one.program, feeds, one.host)
    return LoadedBuild(manifest, references, (), opened, restored, place)


def _renews_model(flat: FlatGraph, made: Made, loaded: LoadedBuild, request: RunRequest) -> Renews:
    """Makes what gives a model that was compiled here other values."""
    state, tables = [*made.jobs.values()][-1].state, rounded_tables(flat, request.options.table_memory)
    values, renewal = ModelValues(flat, state, tables), ENGINE.builds(request.places[0]).renewal

    def renews(source: Any, rows: Any) -> tuple[Any, Sequence[OutputCheck], Callable[[], object]]:
        other, state = values.changed(source, rows)
        jobs = [replace(job, flat=other, state=state) for job in made.jobs.values()]
        running = [loaded.restored[program] for program in made.jobs]
        live = [one.compiled.program for one in running]
        checks, new, largest, stack = list[OutputCheck](), [], loaded.restored[[*made.jobs][-1]], ExitStack()
        with making_beside(request.places[0], object):
            try:
                if source is None and largest.host is None:
                    beside = partial(executable_beside, largest.compiled, largest.plan, jobs[-1], stack)
                    alone, checks = values.row_renewal(jobs[-1], rows, live, beside, request)
                    if alone is not None:
                        stack.callback(values.keep, other, state)
                        return alone, checks, stack.close
                for one, again in zip(running, jobs, strict=True):
                    with renewal.sharing_with(one.compiled.program):
                        compiled = ENGINE.compile(again)
                    if not _same_on_host(one.host, compiled.optimized.host):
                        what = "a part of the model runs on the host, which keeps its old values, and has other ones"
                        raise EngineError(what, fix="make another pool")
                    checks.append(verify_made(compiled, again, request))
                    new.append(compiled.program)
                return renewal.Renewal.of(live, new), checks, lambda: values.keep(other, state)
            finally:
                ENGINE.forget(other)

    return renews


def _same_on_host(one: Any, other: Any) -> bool:
    """True if two models have the host run the same, with the same tables, vocabularies and values. False where that can not be told."""
    if one is None or other is None:
        return one is other
    with suppress(EngineError):
        return bool(one.packed() == other.packed())
    return False


def _of_build(loaded: LoadedBuild, why: str, settings: PoolSettings) -> Recipe:
    """Makes the recipe for a build that is loaded onto its device."""
    manifest, found = _limited(loaded, settings).manifest, loaded.opened
    buckets = sizes_of(manifest)
    rows = manifest.rows if 0 not in buckets else None
    largest, about = max(buckets), manifest.lengths
    _refuse_to_join(rows, settings, manifest.mixes)
    # Everything by size, 0 for the one batch of a model without rows.
    restored = {batch: loaded.restored[bucket.program] for batch, bucket in buckets.items()}
    once = restored[largest].shared
    references = {batch: loaded.references[bucket.program] for batch, bucket in buckets.items()}
    example = references[min(buckets)].feeds
    example = {**example, **once.first(example)}  # any user goes with any row
    dtypes = {name: value.dtype for name, value in references[largest].feeds.items()}
    # Steps fly where one call starts a captured graph, and on the CPU they seem to. Else they run in threads, as those do whose host part
    # takes so long that several at once pay.
    hosts = {batch: one.host for batch, one in restored.items() if one.host is not None}
    flies = _is_quick(hosts.get(largest), loaded.references[buckets[largest].program].feeds, settings.host_threads)
    asynchronous = flies and found.is_asynchronous(restored.values())
    ports = ports_of(
        manifest,
        dtypes,
        device="cuda" if asynchronous and not hosts and once.users == 1 and about is None else None,
        max_rows=settings.max_rows,
        example=example,
        once=once,
    )
    polls = asynchronous or (manifest.made_for.get("device") == "cpu" and flies)
    entries = dict(rows[0]) if rows is not None else dict.fromkeys(dtypes, 0)
    taken = _taken(restored)
    if about is None:
        ports, entries = _in_front([*hosts.values()], taken, ports, entries, polls=polls)
    slot = _slots(found, restored, ports, taken, entries, settings.priorities, asynchronous=asynchronous, polls=polls)

    def verify(slot: Slot) -> Sequence[OutputCheck]:
        checks = []
        for size, one in references.items():
            found.rewind()
            checks.append(verify_step(_step(slot, size, ports), one, manifest))
        return checks

    return Recipe(
        ports,
        slot,
        verify,
        ports.example if about else example,
        manifest.label,
        ports.outputs(references[largest].outputs),
        (*manifest.notes, *loaded.notes, *(_apart(rows, manifest.mixes) if 0 not in buckets else ())),
        {"why": why, "streams": buckets[largest].streams, "kernels": buckets[largest].kernels},
        threads=not polls,
        weight_bytes=found.weight_bytes,
        slot_bytes=found.slot_bytes(restored.values()),
        free_bytes=found.free_bytes,
        reserved_bytes=found.reserved_bytes,
        urgencies=found.urgencies(),
        streams=max(bucket.streams for bucket in buckets.values()),
        rewind=found.rewind,
        lookups=found.lookups(restored.values()),
    )


def _slots(
    found: Any,
    restored: Mapping[Bucket, Any],
    ports: Ports,
    taken: Mapping[Bucket, Any],
    entries: Mapping[str, int],
    priorities: int,
    *,
    asynchronous: bool,
    polls: bool,
) -> Callable[[int, bool], Slot]:
    """What makes a slot of a build, for a level of priority, with all on one stream or not; see `_of_build`."""
    hosts = {batch: one.host for batch, one in restored.items() if one.host is not None} if polls else {}
    parts = {batch: one.device_part for batch, one in restored.items()} if hosts else restored
    around = ports.before is None and (bool(hosts) or (polls and ports.users > 1))
    if around:  # what the device part gets has all rows
        entries = dict.fromkeys(taken[max(taken)], 0)

    def device_slot(level: int, one_stream: bool) -> Slot:
        if asynchronous:
            made: Slot = found.slot(parts, entries, urgency=priorities - 1 - level, one_stream=one_stream)
            return made
        running = {batch: found.run(one, alone=True, one_stream=one_stream) for batch, one in parts.items()}
        steps = {batch: one.step for batch, one in running.items()}
        whole = StepSlot(steps, None if around else ports, [*running.values()])
        return SimulatedSlot(whole) if polls else whole

    def slot(level: int, one_stream: bool) -> Slot:
        made = device_slot(level, one_stream)
        once = {batch: one.compiled.optimized.once for batch, one in restored.items()}
        return HostedSlot(made, hosts, taken, once, ports) if around else made

    return slot


def sizes_of(manifest: Manifest) -> dict[Bucket, files.Bucket]:
    """The buckets of a build by size, 0 for the one batch of a model without rows."""
    first = manifest.lengths.inputs[0] if manifest.lengths is not None else None
    return {(one.inputs[first][1], one.batch or 0) if first else one.batch or 0: one for one in manifest.rungs}


def _lengths_of(buckets: Iterable[Bucket]) -> list[int]:
    return sorted({one[0] for one in buckets if not isinstance(one, int)})


def ports_of(manifest: Manifest, dtypes: Mapping[str, np.dtype[Any]], *, once: UserRows, **more: Any) -> Ports:
    """Inputs and outputs of a build, with what it shares, and with `more` of `Ports`."""
    buckets = sizes_of(manifest)
    shapes = {  # of several lengths those of the longest stay
        rows_in(size): {**bucket.inputs}
        | {name: (entries, *bucket.inputs[name][1:]) for name, entries in once.entries.items()}
        for size, bucket in sorted(buckets.items())
    }
    found = Ports(dtypes, shapes, None if 0 in buckets else manifest.rows, manifest.mixes, **more).sharing(once)
    return found if manifest.lengths is None else found.having(manifest.lengths, _lengths_of(buckets))


def _taken(restored: Mapping[Bucket, Any]) -> dict[Bucket, dict[str, tuple[str, Shape]]]:
    """By bucket, type and shape of what the device part is fed."""
    fed = {batch: one.compiled.program.fed.items() for batch, one in restored.items()}
    return {batch: {key: (dtype, shape) for key, (shape, dtype) in one if key != STEPS} for batch, one in fed.items()}


def _in_front(
    hosts: Sequence[Any], taken: Mapping[Bucket, Any], ports: Ports, entries: dict[str, int], *, polls: bool
) -> tuple[Ports, dict[str, int]]:
    """Ports behind a host part that is run on each request by itself, and the entries of a row of what steps take then; both as they are
    where it has to run around steps."""
    programs = [one.before.program for one in hosts if one.apart and polls and ports.joins]
    if len(programs) < len(taken) or len({*programs}) > 1 or not programs[0].compiled:
        return ports, entries
    shapes = {rows_in(size): {name: shape for name, (_, shape) in one.items()} for size, one in taken.items()}
    found = {name: (entries | hosts[0].apart)[name] for name in taken[max(taken)]}
    if any(
        one[name][0] != batch * found[name] for batch, one in shapes.items() for name in {*hosts[0].apart} & {*found}
    ):
        return ports, entries
    return ports.behind(programs[0], shapes, found), found


_QUICK, _LOOKS = 1e-3, 5
"""Most seconds of the host part of a step that runs in the thread that starts the step, and how often that is measured: on a busy machine
it may take a hundred times as long once. Eight string features of 800 rows take 0.17 ms; in
eight threads a server of them answered 762 requests a second on an H200, and 8,707 of ids, whose steps need no threads."""


def _is_quick(host: Any, feeds: Arrays, threads: int | None) -> bool:
    """Whether what the host runs takes less than to have other threads run it, which were not asked for: without TensorFlow, which has
    threads of its own."""
    if host is None:
        return True
    if threads is not None or host.in_tensorflow or not host.repeatable:
        return False
    return min(timeit.repeat(lambda: host.run(feeds), number=1, repeat=_LOOKS)) < _QUICK


def _step(slot: Slot, size: Bucket, ports: Ports) -> Callable[[Arrays], Arrays]:
    """Function that runs a step in a slot from beginning to end, on requests of one user each."""

    def step(feeds: Arrays) -> Arrays:
        slot.start(size, ports.of_users(feeds))
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
        lambda level, one_stream: StepSlot({0: step}, ports),
        lambda slot: (),
        {name: value[: entries[name] * min(shapes)] if entries.get(name) else value for name, value in feeds.items()},
        runner.label,
        ports.outputs(step(feeds)),
        (*runner.notes, *(_apart(*proof) if batches else ())),
        {"why": runner.why, **runner.facts},
        threads=True,
        owned=[runner.executable],
    )
