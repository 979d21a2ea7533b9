"""Makes a pool of a recipe for its slots: as many as are asked for and have room, or as many as are worth it. And a pool of processes."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from msplit.engines.base import Arrays, Executable, Feeds
from msplit.engines.process import shared_weights
from msplit.engines.table_rows import LookupCounts, no_lookups
from msplit.errors import MsplitError
from msplit.progress import Progress
from msplit.serving.pool.given_values import GivenValues
from msplit.serving.pool.members import Member, PoolProcess
from msplit.serving.pool.pool import About, Pool, Renews
from msplit.serving.pool.ports import Port, Ports
from msplit.serving.pool.processes import of_members
from msplit.serving.pool.settings import AUTO, WORTH, PoolSettings, Tried, choose
from msplit.serving.pool.slots import Slot
from msplit.verify.results import OutputCheck

_MOST_SLOTS = 16
"""Most slots that ``auto`` tries; with 32, an H200 answers fewer requests than with 8."""
_MOST_WORKERS = 4
"""Most processes on each GPU that ``auto`` tries."""
_TRIAL = 0.2
"""Seconds of one measurement of ``auto``."""
_TAIL = 3.0
"""Default of the 99th percentile of latency that ``auto`` accepts, in multiples of a step."""


@dataclass(frozen=True, eq=False)
class Recipe:
    """Recipe for the slots of a pool.

    Attributes:
        ports: Inputs and outputs.
        slot: Makes a slot, from its priority level, and True to run all of it on one stream.
        verify: Runs a step of each bucket of a slot, and compares the outputs with their reference.
        feeds: Inputs of a step of the smallest bucket.
        label: Name in the rows of a bench.
        outputs: Type and shape of every output by name.
        notes: Remarks for the user.
        facts: Facts such as the number of streams.
        threads: True where a step keeps a thread busy from beginning to end.
        weight_bytes: Bytes on the GPU that all slots share.
        slot_bytes: Bytes of each slot, at least, as far as known before one is made.
        free_bytes: Gives the free bytes of the GPU; None: not known.
        reserved_bytes: Gives the bytes that this process holds there.
        urgencies: Number of priority levels of the GPU's streams; None: not known.
        streams: Most streams of a slot.
        owned: Executables that all slots share, closed together with the pool.
        rewind: Has the next step draw the random numbers of the step of a number.
        renews: Makes the model again with other values; None where it can not be.
        lookups: Counts rows that steps look up in tables of the host's memory.
    """

    ports: Ports
    slot: Callable[[int, bool], Slot]
    verify: Callable[[Slot], Sequence[OutputCheck]]
    feeds: Arrays
    label: str
    outputs: Mapping[str, Port]
    notes: tuple[str, ...]
    facts: Mapping[str, Any]
    threads: bool
    weight_bytes: int = 0
    slot_bytes: int = 0
    free_bytes: Callable[[], int | None] = lambda: None
    reserved_bytes: Callable[[], int] = lambda: 0
    urgencies: int | None = None
    streams: int = 1
    owned: Sequence[Executable] = ()
    rewind: Callable[[int], None] = lambda step: None
    renews: Renews | None = None
    lookups: LookupCounts = no_lookups


def make(recipe: Recipe, settings: PoolSettings, tell: Progress) -> Pool:
    """Makes a pool of a recipe. What its slots share is closed where that fails."""
    try:
        if settings.groups == AUTO:
            return _chosen(recipe, settings, tell)
        return _whole(recipe, settings, int(settings.groups), tell)
    except BaseException:
        for one in recipe.owned:
            one.close()
        raise


def _whole(recipe: Recipe, settings: PoolSettings, groups: int, tell: Progress, one_stream: bool = False) -> Pool:
    """Makes a pool of so many slots. The memory that the first ones take tells if there is room for the others."""
    _check_memory(recipe, settings, groups)
    slots: list[Slot] = []
    try:
        before = recipe.reserved_bytes()
        checks = _more(recipe, settings, slots, groups, tell, one_stream, upto=1)
        if taken := recipe.reserved_bytes() - before:
            recipe = replace(recipe, slot_bytes=max(recipe.slot_bytes, taken))
        _check_memory(recipe, settings, groups, made=1)
        checks += _more(recipe, settings, slots, groups, tell, one_stream)
        return _pool(recipe, settings, slots, checks)
    except BaseException:
        for slot in slots:
            slot.close()
        raise


def _check_memory(recipe: Recipe, settings: PoolSettings, groups: int, made: int = 0) -> None:
    """Refuses slots for which there is no room, before they are made.

    Raises:
        MsplitError: There is no room; the message says for how many there is.
    """
    if recipe.urgencies is not None and settings.priorities > recipe.urgencies:
        what = (
            f"streams of this GPU have {recipe.urgencies} levels of priority, and {settings.priorities} are asked for"
        )
        raise MsplitError(what, fix=f"ask for {recipe.urgencies} or fewer")
    each = max(recipe.slot_bytes, 1)
    free = recipe.free_bytes()
    limits = [
        ("may be taken (max_memory)", settings.max_memory, recipe.weight_bytes),
        ("are free on the device", None if free is None else free + made * each, 0),
    ]
    for what, limit, shared in limits:
        if limit is not None and shared + groups * each > limit:
            room = max((limit - shared) // each, 0)
            fix = f"ask for {room} groups or fewer" if room else "ask for a smaller max_batch, or for more memory"
            slots = f"{groups} slots of {recipe.slot_bytes / 1e6:,.1f} MB"
            weights = f"weights of {recipe.weight_bytes / 1e6:,.1f} MB"
            raise MsplitError(f"{slots}, with {weights}, do not fit: {limit / 1e6:,.1f} MB {what}", fix=fix)


def _more(
    recipe: Recipe,
    settings: PoolSettings,
    slots: list[Slot],
    groups: int,
    tell: Progress,
    one_stream: bool = False,
    upto: int | None = None,
) -> list[OutputCheck]:
    """Makes slots until there are as many as asked for, and verifies each. The later ones are for less urgent
    levels."""
    checks = list[OutputCheck]()
    for number in range(len(slots), groups if upto is None else upto):
        tell("making slots", number / groups)
        slot = recipe.slot(settings.level_of(number, groups), one_stream)
        slots.append(slot)
        checks += recipe.verify(slot)
    return checks


def _pool(recipe: Recipe, settings: PoolSettings, slots: Sequence[Slot], checks: Sequence[OutputCheck]) -> Pool:
    """Makes a pool of slots."""
    groups = len(slots)
    facts = {
        **recipe.facts,
        "weight_bytes": recipe.weight_bytes,
        "arena_bytes": recipe.slot_bytes,
        "bytes": recipe.weight_bytes + groups * recipe.slot_bytes,
    }
    made = Pool(
        recipe.ports,
        [(settings.level_of(number, groups), slot) for number, slot in enumerate(slots)],
        replace(settings, groups=groups),
        About(recipe.label, recipe.outputs, tuple(checks), recipe.notes, facts),
        threads=(settings.host_threads or len(slots)) if recipe.threads else 0,
        owned=recipe.owned,
        renews=recipe.renews,
    )
    made.lookups = recipe.lookups
    return made


def _chosen(recipe: Recipe, settings: PoolSettings, tell: Progress) -> Pool:
    """Makes a pool with the number of slots, and of streams in each, that answers most requests per second, 99 of 100 of them within the
    bound on latency."""
    tried, trials = list[Tried](), list[str]()
    bound = settings.latency_us
    for one_stream in (False, True) if recipe.streams > 1 and not recipe.threads else (False,):
        slots: list[Slot] = []
        try:
            groups, before = settings.priorities, 0.0
            while groups <= _MOST_SLOTS and _fits(recipe, settings, groups):
                checks = _more(recipe, settings, slots, groups, tell, one_stream)
                trial = _pool(recipe, replace(settings, max_queue=0, max_delay_us=0.0), slots, checks)
                try:
                    rate, high = _flood(trial, recipe.feeds, groups)
                finally:
                    trial.stop(finish=False)
                bound = bound or _TAIL * high
                trials.append(f"{groups}{' of one stream' if one_stream else ''}: {rate:,.0f}/s, p99 {high:,.0f} µs")
                tried.append(Tried(rate, high if tried else min(high, bound), (groups,), (groups, one_stream)))
                if rate < before * WORTH:
                    break
                groups, before = groups * 2, rate
        finally:
            for slot in slots:
                slot.close()
    best = choose(tried, bound)
    groups, one_stream = best.settings if best else (settings.priorities, False)
    note = f"slots were chosen by measuring: {'; '.join(trials)}"
    streams = {"streams": 1} if one_stream else {}
    recipe = replace(recipe, notes=(*recipe.notes, note), facts={**recipe.facts, **streams})
    return _whole(recipe, settings, groups, tell, one_stream)


def _fits(recipe: Recipe, settings: PoolSettings, groups: int) -> bool:
    try:
        _check_memory(recipe, settings, groups)
    except MsplitError:
        return False
    return True


def _flood(pool: Pool, feeds: Feeds, window: int) -> tuple[float, float]:
    """Measures requests per second with so many at a time, and the 99th percentile of latency in µs."""
    going: deque[tuple[Any, float]] = deque()
    times = []
    start = now = time.perf_counter()
    while now < start + _TRIAL or going:
        if now < start + _TRIAL and len(going) < window:
            going.append((pool.submit(feeds), now))
        else:
            future, since = going.popleft()
            future.result()
            times.append(time.perf_counter() - since)
        now = time.perf_counter()
    return len(times) / (now - start), float(np.quantile(times, 0.99)) * 1e6


def make_with_workers(open_pool: Callable[[PoolSettings], Pool], settings: PoolSettings) -> Pool:
    """Makes a pool with the number of processes on each GPU that answers most requests per second, 99 of 100 of them within the bound on
    latency. Each number is tried with a pool of its own, which is asked from here.

    Raises:
        MsplitError: Not even one process can be started; or what `open_pool` raises when the choice is made.
    """
    tried, trials = list[Tried](), list[str]()
    bound, workers, before = settings.latency_us, 1, 0.0
    while workers <= _MOST_WORKERS:
        try:
            with open_pool(replace(settings, workers=workers, max_queue=0, max_delay_us=0.0)) as pool:
                groups = int(pool.settings.groups)
                rate, high = _flood(pool, pool.ports.example, groups * len(pool.processes()))
        except MsplitError as problem:
            if not tried:
                raise
            trials.append(f"{workers} can not be: {problem.what}")
            break
        bound = bound or _TAIL * high
        trials.append(f"{workers} of {groups} slots: {rate:,.0f}/s, p99 {high:,.0f} µs")
        tried.append(Tried(rate, high if tried else min(high, bound), (workers,), (workers, groups)))
        if rate < before * WORTH:
            break
        workers, before = workers * 2, rate
    best = choose(tried, bound)
    workers, groups = best.settings if best else tried[0].settings
    pool = open_pool(replace(settings, workers=workers, groups=groups))
    note = f"processes on each GPU were chosen by measuring: {'; '.join(trials)}"
    pool.about = replace(pool.about, notes=(*pool.about.notes, note))
    return pool


Make = Callable[[int, PoolSettings], Callable[[Progress], Pool]]
"""Gives the function that makes the pool of a process, which is sent there: from its number and its settings."""


def make_processes(
    make: Make, places: Sequence[str], settings: PoolSettings, tell: Progress, *, together: bool
) -> Pool:
    """Makes a pool of processes.

    Args:
        make: Gives what makes the pool of a process.
        places: Device of each process; one that is there several times is shared.
        settings: Settings; slots and memory are those of each device.
        tell: Told of progress.
        together: True to start all at once; else the first one chooses kernels, which the others find.

    Raises:
        EngineError: A process can not be started.
    """
    cores = len(os.sched_getaffinity(0)) // len(places)
    shares = max(places.count(place) for place in places)
    memory = None if settings.max_memory is None else settings.max_memory // shares
    own = [replace(settings, max_queue=0, max_memory=memory, workers=None)]  # the last one holds from now on
    processes, members, given = list[PoolProcess](), list[Member](), GivenValues()
    # What is compiled here may have other weights in each process: a kernel that measures faster reads them in another order.
    weights = {place: shared_weights() for place in places if together and places.count(place) > 1}

    def started(number: int) -> PoolProcess:
        ends = weights.get(places[number], ())
        return PoolProcess(places[number], lambda: make(number, own[-1]), cores, ends, lambda: not given.begun)

    try:
        for number, place in enumerate(places):
            tell("starting processes", number / len(places))
            if len(processes) <= number:
                last = len(places) if number or (together and settings.groups != AUTO) else 1
                processes += map(started, range(number, last))
            processes[number].ready(tell, bool)
            given.bring(processes[number], bool)
            members.append(Member(place, processes[number].listener.getsockname(), processes[number], bool))
            assert members[0].line is not None
            own.append(replace(own[0], groups=members[0].line.hello.settings.groups))
        return of_members(members, replace(settings, groups=own[-1].groups), given)
    except BaseException:
        for process in processes:
            process.process.hang_up()
        for process in processes:
            process.close()
        raise
