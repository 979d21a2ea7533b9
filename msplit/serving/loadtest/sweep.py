"""Sweep of a load test: every combination of some settings, and the one to set under a bound on latency."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from msplit.assignment.model import opened
from msplit.errors import MsplitError
from msplit.flatten.flat import FlatGraph
from msplit.formats.build import is_build
from msplit.progress import Progress
from msplit.run.request import RunRequest
from msplit.serving.loadtest.clients import ServerUnderTest
from msplit.serving.loadtest.results import Common, LoadResult, LoadSweep, Point, TargetResult
from msplit.serving.pool.settings import PoolSettings, Tried, choose
from msplit.serving.pool.sources import recipes

OPTIONS = {"rows": "", "max_batch": "--max-batch {} ", "groups": "--groups {} ", "workers": "--pool workers={} "}
"""Settings that may differ -> how `serve`, `load` and `export` take them."""

_LOST = 0.01
"""Most of the requests that a level of use may leave unanswered."""


def sweep(
    load: Callable[..., LoadResult],
    model: FlatGraph | str | os.PathLike[str],
    request: RunRequest,
    values: Mapping[str, Sequence[int]],
    *,
    settings: Any,
    pool: PoolSettings,
    server: ServerUnderTest | None,
    progress: Progress,
) -> LoadResult:
    """Measures every combination of settings; each is a target of the result. In this process a model is compiled once.

    Args:
        load: Measures one: `run.load`.
        model, request, pool, server, progress: As for that. The bound is the pool's `latency_us`.
        settings: `run.LoadSettings`.
        values: Values by setting out of `OPTIONS`.

    Raises:
        EngineError, MsplitError: No combination can be measured; that of the first one.
    """
    every = _combinations(values, [*OPTIONS] if server is None else ["rows"])
    pools = [replace(pool, **{name: one[name] for name in one if name != "rows"}) for one in every.values()]
    found, failed = dict[str, LoadResult](), dict[str, MsplitError]()

    def told(what: str, share: float) -> None:
        progress(what, (len(found) + len(failed) + share) / len(every))

    source = model if not isinstance(model, FlatGraph) and is_build(model) else opened(model)
    recipe_of = None
    if server is None and len(request.devices) < 2 and not any(own.workers for own in pools):
        recipe_of = recipes(source, request.sized(batch=settings.rows), pools, told)
    commons = {one.get("rows"): Common(recipe_of) for one in every.values()}
    for (label, one), own in zip(every.items(), pools, strict=True):
        asked = replace(settings, rows=one.get("rows", settings.rows), beside=() if found else settings.beside)
        how = {"server": server, "progress": told, "common": commons[one.get("rows")]}
        try:
            found[label] = load(source, request, settings=asked, pool=own, **how)
        except MsplitError as problem:
            failed[label] = problem
    if not found:
        raise next(iter(failed.values()))
    return _merged(every, found, failed, pool.latency_us)


def _combinations(values: Mapping[str, Sequence[int]], allowed: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Every combination of values, by its description, such as "max-batch 16, groups 4".

    Raises:
        MsplitError: A setting is none of those, or has no values.
    """
    for name in values:
        if name not in allowed or not values[name]:
            raise MsplitError(f"{name} can not be tried here", fix=f"give values of: {', '.join(allowed)}")
    every = [dict(zip(values, one, strict=True)) for one in itertools.product(*values.values())]
    return {", ".join(f"{name.replace('_', '-')} {value}" for name, value in one.items()): one for one in every}


def _merged(
    every: Mapping[str, Mapping[str, int]],
    found: Mapping[str, LoadResult],
    failed: Mapping[str, MsplitError],
    bound: float | None,
) -> LoadResult:
    """Puts the results of all combinations together. What else was measured is that of the first one."""
    targets, points = list[TargetResult](), list[Point]()
    for label, result in found.items():
        main, *_ = result.targets
        targets.append(replace(main, label=label, facts={**main.facts, "settings": every[label]}))
        points += [replace(point, target=label) for point in result.points if point.target == main.label]
    first, choice = next(iter(found.values())), _choice(every, bound, points)
    points += [point for point in first.points if point.target != first.targets[0].label]
    notes = tuple(dict.fromkeys(note for result in found.values() for note in result.notes))
    targets += [*first.targets[1:], *(TargetResult(label, "", skipped=one.what) for label, one in failed.items())]
    return replace(first, targets=tuple(targets), points=tuple(points), notes=notes, sweep=choice)


def _choice(every: Mapping[str, Mapping[str, int]], bound: float | None, points: Sequence[Point]) -> LoadSweep:
    """Chooses the best level of each combination, and the best of all."""
    tried: dict[str, list[Tried]] = {}
    for point in points:
        p99, one, asked = point.latency("p99"), every[point.target], point.total("requests")
        bad = point.total("wrong") + point.total("failed")
        if p99 is not None and not bad and asked - point.total("answered") <= _LOST * asked:
            cost = tuple(float(one.get(name, 0)) for name in ("workers", "groups", "max_batch"))
            rate = point.throughput.value * one.get("rows", 1)
            tried.setdefault(point.target, []).append(Tried(rate, p99.value, cost, point))
    least = {label: min(each, key=lambda one: one.p99_us) for label, each in tried.items()}
    levels = {label: (choose(each, bound) or least[label]).settings for label, each in tried.items()}
    best = choose([one for each in tried.values() for one in each], bound)
    label = best.settings.target if best else ""
    options = "".join(OPTIONS[name].format(value) for name, value in every.get(label, {}).items())
    return LoadSweep([*next(iter(every.values()))], bound, levels, label, options.strip())
