"""Measures variants of one model side by side.

In each round every variant runs a short burst of steps, in an order drawn anew, so that whatever slows the machine down slows all of
them. A variant whose outputs are wrong is not measured at all.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from msplit.benchmark.diagnose import Hints, diagnose
from msplit.core import statistics
from msplit.engines.base import Arrays, timed
from msplit.engines.environment import environment, utilization
from msplit.errors import EndOfData
from msplit.inputs.reference import Reference
from msplit.inputs.special import Fresh
from msplit.progress import Progress, prepared, silent
from msplit.verify.check import rebuild, verified
from msplit.verify.results import BenchResult, Running, Settings, Variant, VariantResult
from msplit.verify.stepping import Verification

_SLOW = 20.0
"""Factor on the asked duration that a run may take to reach its fewest rounds."""


def bench(
    variants: Sequence[Variant],
    *,
    fresh: Callable[[int], Arrays] | Fresh,
    settings: Settings | None = None,
    reference: Reference | None = None,
    about: Hints | None = None,
    command: Sequence[str] = (),
    progress: Progress | None = None,
    timelines: Sequence[str] = (),
) -> BenchResult:
    """Verifies and measures variants of one model.

    Args:
        variants: What to compare; ratios are over the first one.
        fresh: Makes a new set of inputs from a seed, for verification; perhaps of special kinds, too.
        reference: Inputs with outputs that every variant must give, if there is one.
        about: What the cost model says, for the diagnosis.
        command: The command line, for the record.
        timelines: Labels of variants of which one more step is run at the end and its parts are timed.

    Raises:
        EngineError: An engine can not run a variant that is not optional.
        ValueError: Labels are not unique, or one that is named is not there.
    """
    settings = settings or Settings()
    tell = progress or silent
    how = Verification(fresh, settings, reference, tell, None if reference is None else reference.computed)
    with verified(variants, how) as running:
        prepared()
        for build in range(settings.builds):
            if build:
                rebuild(running, how)
            measured = [one for one in running if one.alive]
            if measured:
                _warm_up(measured, settings, tell)
                _measure(measured, settings, tell, build)
        for one in running:
            if one.variant.label in timelines and one.alive:
                tell(f"tracing {one.variant.label}", 1.0)
                one.timeline = one.running.timeline()
        _ask_driver([one for one in running if one.alive], settings, tell)
        facts = [dict(one.executable.facts()) if one.executable is not None else {} for one in running]
    baseline = variants[0].label
    results = tuple(_result(one, known, running, baseline) for one, known in zip(running, facts, strict=True))
    ended = [one for one in running if one.ends]
    warned = [line for one in results if one.host for line in statistics.warnings(one.label, one.host_times)]
    return BenchResult(
        variants=results,
        baseline=baseline,
        settings=settings,
        environment=environment(command),
        warnings=(*warned, *map(_ended, ended)),
        diagnosis=diagnose(results, about),
    )


def _ask_driver(measured: Sequence[Running], settings: Settings, tell: Progress) -> None:
    """Asks the driver for the GPU's utilization by each variant, after all was measured, because asking takes the driver time."""
    for number, one in enumerate(measured):
        on_gpu = not str(one.running.facts().get("device", "CPU")).upper().startswith("CPU")
        if settings.duration and on_gpu and one.host:
            tell(f"asking the driver about {one.variant.label}", number / len(measured))
            one.utilization_percent = utilization(partial(_burst, one))


def _ended(one: Running) -> str:
    times = "once" if one.ends == 1 else f"{one.ends} times"
    return (
        f"{one.variant.label}: the data that the model reads itself came to their end and began anew {times}; that is in no "
        "time above"
    )


def _warm_up(measured: Sequence[Running], settings: Settings, tell: Progress) -> None:
    for number, one in enumerate(measured):
        tell(f"warming up {one.variant.label}", number / len(measured))
        spent: list[float] = []
        until = time.perf_counter() + settings.warmup
        while len(spent) < 3 or time.perf_counter() < until:
            spent.append(_step(one))
            if len(spent) >= 3 and spent[-1] > settings.duration:
                break
        one.burst = max(1, min(settings.max_burst, int(settings.burst / max(np.median(spent), 1e-7))))


def _step(one: Running) -> float:
    """Seconds of a step. To begin data anew takes long, and is no part of it."""
    executable, feeds, start = one.running, one.feeds, time.perf_counter()
    try:
        executable.step(feeds)
    except EndOfData as problem:
        one.begin_anew(problem)
        executable, start = one.running, time.perf_counter()
        executable.step(feeds)
    spent = time.perf_counter() - start
    one.since += 1
    return spent


def _burst(one: Running) -> list[float]:
    """Seconds of each step of a burst."""
    own = one.running.times(one.burst)
    return [_step(one) for _ in range(one.burst)] if own is None else own


def _measure(measured: Sequence[Running], settings: Settings, tell: Progress, build: int) -> None:
    duration = settings.duration / settings.builds
    least = -(-settings.min_rounds // settings.builds)
    # A fixed rotation would let the same variant run before each other one every time, and what that leaves in the caches with it.
    shuffle = random.Random(settings.seed + build)
    for one in measured:
        one.host.append([])
        one.device.append([])
    start = time.perf_counter()
    rounds = 0
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        while True:
            spent = time.perf_counter() - start
            if rounds and spent >= (duration if rounds >= least else _SLOW * max(duration, 0.1)):
                break
            share = min(1.0, spent / duration) if duration > 0 else 1.0
            tell("measuring", (build + share) / settings.builds)
            for one in shuffle.sample(measured, len(measured)):
                if one.burst > 1:
                    _step(one)  # what ran before it has filled the caches
                one.host[-1].append(_burst(one))
                device = one.running.device_times(max(2, one.burst))
                if device:
                    one.device[-1].append(list(device))
                    one.launch += [timed(one.running.launch) for _ in range(one.burst)]
            rounds += 1
    finally:
        if collecting:
            gc.enable()


def _result(one: Running, facts: Mapping[str, Any], running: Sequence[Running], baseline: str) -> VariantResult:
    # What was measured before a later build turned out wrong does not count.
    host = [value for build in one.host for burst in build for value in burst] if one.passed else []
    device = [value for build in one.device for burst in build for value in burst] if one.passed else []
    launch = one.launch if one.passed else []
    return VariantResult(
        label=one.variant.label,
        engine=one.variant.engine.name,
        streams=one.variant.used or one.variant.job.streams,
        asked=one.variant.asked,
        facts=facts,
        checks=tuple(one.checks),
        skipped=one.skipped,
        host=statistics.summarize(host) if host else None,
        launch=statistics.summarize(launch) if launch else None,
        device=statistics.summarize(device) if device else None,
        ratios=tuple(_ratios(one, running, baseline)) if host else (),
        timeline=one.timeline,
        utilization_percent=one.utilization_percent if host else None,
        host_times=tuple(host),
        launch_times=tuple(launch),
        device_times=tuple(device),
    )


def _ratios(one: Running, running: Sequence[Running], baseline: str) -> list[statistics.Ratio]:
    found = []
    by_label = {other.variant.label: other for other in running}
    for label in dict.fromkeys([baseline, one.partner, *one.variant.over]):
        if label is None or label == one.variant.label:
            continue
        other = by_label[label]
        if not other.passed:
            continue
        for clock, theirs, ours in (("host", other.host, one.host), ("device", other.device, one.device)):
            # Rounds of one build are the same for all; a variant that was skipped on the way has fewer builds.
            builds = [(a, b) for a, b in zip(theirs, ours, strict=False) if a and len(a) == len(b)]
            if builds:
                medians = [
                    [[float(np.median(burst)) for burst in build] for build in side]
                    for side in zip(*builds, strict=True)
                ]
                found.append(statistics.ratio(medians[0], medians[1], over=label, clock=clock))
    return found
