"""From a model, or a build, to a pool: as many arenas as are asked for, have room, and are worth it."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from msplit.engines.base import Feeds
from msplit.errors import MsplitError
from msplit.flatten.flat import FlatGraph
from msplit.progress import Progress, silent
from msplit.run.request import RunRequest
from msplit.serving.pool.pool import About, Pool
from msplit.serving.pool.scheduler import Arena
from msplit.serving.pool.settings import AUTO, PoolSettings
from msplit.serving.pool.sources import Recipe, recipe_of
from msplit.verify.results import OutputCheck

_MOST_ARENAS = 16
"""That ``auto`` tries; with 32 in flight an H200 answers fewer requests than with 8."""
_WORTH = 1.05
"""How many times more requests twice as many arenas have to answer."""
_TRIAL = 0.2
"""Seconds for which ``auto`` has requests answered."""
_TAIL = 3.0
"""How many times a step the slowest of 100 requests may take, where nothing is said."""


def pool(
    model: FlatGraph | str | os.PathLike[str],
    request: RunRequest | None = None,
    settings: PoolSettings | None = None,
    *,
    progress: Progress | None = None,
) -> Pool:
    """See `api.pool`."""
    settings, request, tell = settings or PoolSettings(), request or RunRequest(), progress or silent
    if settings.groups != AUTO and int(settings.groups) < settings.priorities:
        raise MsplitError(
            f"{settings.priorities} levels of priority share {settings.groups} groups, and each has one of its own",
            fix=f"give {settings.priorities} groups or more",
        )
    recipe = recipe_of(model, request, settings, progress)
    try:
        if settings.groups == AUTO:
            return _chosen(recipe, settings, tell)
        return _whole(recipe, settings, int(settings.groups), tell)
    except BaseException:
        for one in recipe.owned:
            one.close()
        raise


def _whole(recipe: Recipe, settings: PoolSettings, groups: int, tell: Progress, one_stream: bool = False) -> Pool:
    """A pool of so many arenas on each GPU. What the first ones take tells whether there is room for the others."""
    _check_memory(recipe, settings, groups)
    arenas: list[Arena] = []
    try:
        before = recipe.reserved_bytes()
        checks = _more(recipe, settings, arenas, groups, tell, one_stream, upto=1)
        if taken := (recipe.reserved_bytes() - before) // recipe.gpus:
            recipe = replace(recipe, arena_bytes=max(recipe.arena_bytes, taken))
        _check_memory(recipe, settings, groups, made=1)
        checks += _more(recipe, settings, arenas, groups, tell, one_stream)
        return _pool(recipe, settings, arenas, checks)
    except BaseException:
        for arena in arenas:
            arena.close()
        raise


def _check_memory(recipe: Recipe, settings: PoolSettings, groups: int, made: int = 0) -> None:
    """Refuses arenas for which there is no room, before they are made.

    Raises:
        MsplitError: That; it says how many there is room for.
    """
    if recipe.urgencies is not None and settings.priorities > recipe.urgencies:
        raise MsplitError(
            f"streams of this GPU have {recipe.urgencies} levels of priority, and {settings.priorities} are asked for",
            fix=f"ask for {recipe.urgencies} or fewer",
        )
    each = max(recipe.arena_bytes, 1)
    free = recipe.free_bytes()
    limits = [
        ("may be taken (max_memory)", settings.max_memory, recipe.weight_bytes),
        ("are free on the device", None if free is None else free + made * each, 0),
    ]
    for what, limit, shared in limits:
        if limit is not None and shared + groups * each > limit:
            room = max((limit - shared) // each, 0)
            raise MsplitError(
                f"{groups} arenas of {recipe.arena_bytes / 1e6:,.1f} MB, with weights of {recipe.weight_bytes / 1e6:,.1f} MB, do not fit:"
                f" {limit / 1e6:,.1f} MB {what}",
                fix=f"ask for {room} groups or fewer" if room else "ask for a smaller max_batch, or for more memory",
            )


def _more(
    recipe: Recipe,
    settings: PoolSettings,
    arenas: list[Arena],
    groups: int,
    tell: Progress,
    one_stream: bool = False,
    upto: int | None = None,
) -> list[OutputCheck]:
    """Makes further arenas out of so many on each GPU, one GPU after the other, and verifies each. The later ones are for what is less
    urgent."""
    checks = list[OutputCheck]()
    for number in range(len(arenas), (groups if upto is None else upto) * recipe.gpus):
        tell("making arenas", number / (groups * recipe.gpus))
        arena = recipe.arena(_level(number // recipe.gpus, groups, settings), one_stream, number % recipe.gpus)
        arenas.append(arena)
        checks += recipe.verify(arena)
    return checks


def _level(number: int, groups: int, settings: PoolSettings) -> int:
    """Of priority, of an arena."""
    return number * settings.priorities // groups


def _pool(recipe: Recipe, settings: PoolSettings, arenas: Sequence[Arena], checks: Sequence[OutputCheck]) -> Pool:
    """A pool of arenas."""
    groups = len(arenas) // recipe.gpus
    bytes_of_each = recipe.weight_bytes + groups * recipe.arena_bytes
    return Pool(
        recipe.ports,
        [(_level(number // recipe.gpus, groups, settings), arena) for number, arena in enumerate(arenas)],
        replace(settings, groups=groups),
        About(
            recipe.label,
            recipe.outputs,
            tuple(checks),
            recipe.notes,
            {
                **recipe.facts,
                "weight_bytes": recipe.weight_bytes,
                "arena_bytes": recipe.arena_bytes,
                "bytes": recipe.gpus * bytes_of_each,
                **({"gpus": recipe.gpus} if recipe.gpus > 1 else {}),
            },
        ),
        threads=(settings.host_threads or len(arenas)) if recipe.threads else 0,
        owned=recipe.owned,
        gpus=[number % recipe.gpus for number in range(len(arenas))],
    )


def _chosen(recipe: Recipe, settings: PoolSettings, tell: Progress) -> Pool:
    """The pool with as many arenas, and streams in each, as answer most requests; 99 of 100 of them soon enough."""
    tried: list[tuple[float, int, bool]] = []
    said = []
    bound = settings.latency_us
    for one_stream in (False, True) if recipe.streams > 1 and not recipe.threads else (False,):
        arenas: list[Arena] = []
        try:
            groups, before = settings.priorities, 0.0
            while groups <= _MOST_ARENAS and _fits(recipe, settings, groups):
                checks = _more(recipe, settings, arenas, groups, tell, one_stream)
                trial = _pool(recipe, replace(settings, max_queue=0, max_delay_us=0.0), arenas, checks)
                try:
                    rate, high = _flood(trial, recipe.feeds, groups * recipe.gpus)
                finally:
                    trial.stop(finish=False)
                bound = bound or _TAIL * high
                said.append(f"{groups}{' of one stream' if one_stream else ''}: {rate:,.0f}/s, p99 {high:,.0f} µs")
                if high <= bound or not tried:
                    tried.append((rate, groups, one_stream))
                if rate < before * _WORTH:
                    break
                groups, before = groups * 2, rate
        finally:
            for arena in arenas:
                arena.close()
    most = max((rate for rate, _, _ in tried), default=0.0)
    few = [one for one in tried if one[0] * _WORTH >= most] or [(0.0, settings.priorities, False)]
    _, groups, one_stream = min(few, key=lambda one: one[1])
    note = f"arenas were chosen by measuring: {'; '.join(said)}"
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
    """Requests per second with so many at a time, and the 99th percentile of µs from request to answer."""
    going: deque[tuple[Any, float]] = deque()
    times = []
    start = now = time.perf_counter()
    while now < start + _TRIAL or going:
        if now < start + _TRIAL and len(going) < window:
            going.append((pool.submit(feeds), now))
        else:
            pending, since = going.popleft()
            pending.result()
            times.append(time.perf_counter() - since)
        now = time.perf_counter()
    return len(times) / (now - start), float(np.quantile(times, 0.99)) * 1e6
