"""Builds variants, checks that they agree, and measures them side by side.

In each round every variant runs a short burst of steps, in an order drawn anew, so that whatever slows the machine down slows all of
them. A variant whose outputs are wrong is not measured at all.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from msplit.decide.environment import environment
from msplit.engines.base import Arrays, Engine, Executable, HasTimeline, Job, Timeline
from msplit.errors import EngineError
from msplit.inputs.reference import Reference
from msplit.measure import statistics
from msplit.measure.diagnose import Hints, diagnose
from msplit.measure.results import BenchResult, Check, Settings, VariantResult
from msplit.measure.verification import Comparison, compare, computed_in
from msplit.progress import Progress

_SLOW = 20.0
"""How many times the asked duration a run may take to reach its fewest rounds."""


@dataclass(frozen=True, eq=False)
class Variant:
    """One way to run the model.

    Attributes:
        label: Its name in the report.
        engine: What runs it.
        job: What it runs; `job.feeds` are the measured inputs.
        against: Label of the variant whose outputs it must give, and over which its gain is told; None for the first variant before
            it of the same engine on one stream. Where there is none, outputs are held against the first variant.
        optional: Whether an engine that can not run it is no error: it is then reported as skipped.
        over: Labels of further variants over which its gain is told.
        asked: What was asked for that it stands for, such as ``16 streams``.
        used: How many streams do something; None where nobody has looked, and `job.streams` is taken for it.
    """

    label: str
    engine: Engine
    job: Job
    against: str | None = None
    optional: bool = False
    over: tuple[str, ...] = ()
    asked: tuple[str, ...] = ()
    used: int | None = None


@runtime_checkable
class HasState(Protocol):
    """An executable whose steps change variables."""

    def save_state(self) -> Mapping[str, NDArray[Any]]:
        """The values of its variables."""
        ...

    def load_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Gives its variables values."""
        ...


@runtime_checkable
class NeedsStreams(Protocol):
    """An engine that must know the largest number of streams before it builds anything."""

    def prepare(self, streams: int) -> None:
        """Tells it."""
        ...


@runtime_checkable
class KnowsDevice(Protocol):
    """An engine that tells where a job will run before it builds it."""

    def device(self, job: Job) -> str:
        """ "CPU" or "GPU", perhaps with more behind it."""
        ...


@dataclass(eq=False)
class _Running:
    """A variant on its way."""

    variant: Variant
    partner: str | None
    executable: Executable | None = None
    checks: list[Check] = field(default_factory=list)
    skipped: str = ""
    burst: int = 1
    host: list[list[list[float]]] = field(default_factory=list)
    device: list[list[list[float]]] = field(default_factory=list)
    launch: list[float] = field(default_factory=list)
    timeline: Timeline | None = None

    @property
    def alive(self) -> bool:
        return self.executable is not None and all(check.passed for check in self.checks)

    @property
    def running(self) -> Executable:
        if self.executable is None:
            raise EngineError(f"variant {self.variant.label!r} is not built")
        return self.executable

    def close(self) -> None:
        if self.executable is not None:
            self.executable.close()
            self.executable = None


def bench(
    variants: Sequence[Variant],
    *,
    fresh: Callable[[int], Arrays],
    settings: Settings | None = None,
    reference: Reference | None = None,
    baseline: str | None = None,
    about: Hints | None = None,
    command: Sequence[str] = (),
    progress: Progress | None = None,
    timelines: Sequence[str] = (),
) -> BenchResult:
    """Verifies and measures variants of one model.

    Args:
        variants: What to compare.
        fresh: Makes a new set of inputs from a seed, for verification.
        settings: How to measure.
        reference: Inputs with outputs that every variant must give, if there is one.
        baseline: Label of the variant that ratios are over; the first one by default.
        about: What the cost model says, for the diagnosis.
        command: The command line, for the record.
        progress: Told how far it is.
        timelines: Labels of variants of which one more step is run at the end and its parts are timed.

    Raises:
        EngineError: An engine can not run a variant that is not optional.
        ValueError: Labels are not unique, or one that is named is not there.
    """
    settings = settings or Settings()
    tell = progress or _nothing
    if baseline is not None and baseline not in {variant.label for variant in variants}:
        raise ValueError(f"no variant is called {baseline!r}")
    with _verified(variants, fresh, settings, reference, tell) as running:
        for build in range(settings.builds):
            if build:
                _rebuild(running, fresh, settings, tell)
            measured = [one for one in running if one.alive]
            if measured:
                _warm_up(measured, settings, tell)
                _measure(measured, settings, tell, build)
        for one in running:
            if one.variant.label in timelines and one.alive and isinstance(one.running, HasTimeline):
                tell(f"tracing {one.variant.label}", 1.0)
                one.timeline = one.running.timeline()
        facts = [dict(one.executable.facts()) if one.executable is not None else {} for one in running]
    first = variants[0].label if baseline is None else baseline
    results = tuple(_result(one, known, running, first) for one, known in zip(running, facts, strict=True))
    warned = [line for one in results if one.host for line in statistics.warnings(one.label, one.host_times)]
    ordered = sorted(results, key=lambda result: result.label != first)
    return BenchResult(
        variants=results,
        baseline=first,
        settings=settings,
        environment=environment(command),
        warnings=tuple(warned),
        diagnosis=diagnose(ordered, about),
    )


def prepare(
    variants: Sequence[Variant],
    *,
    fresh: Callable[[int], Arrays],
    settings: Settings | None = None,
    reference: Reference | None = None,
    progress: Progress | None = None,
) -> tuple[Executable, tuple[Check, ...]]:
    """Builds and verifies variants of one model as `bench` does, and gives the last of them, ready to run, with its checks.

    Args:
        variants: That one, behind those that its outputs are held against.
        fresh: Makes a new set of inputs from a seed, for verification.
        settings: How to verify.
        reference: Inputs with outputs that every variant must give, if there is one.
        progress: Told how far it is.

    Raises:
        EngineError: An engine can not run a variant, or one gives other outputs than it must.
    """
    with _verified(variants, fresh, settings or Settings(), reference, progress or _nothing) as running:
        for one in running:
            for check in one.checks:
                if not check.passed:
                    raise EngineError(
                        f"{one.variant.label} gives other outputs than {check.against} ({check.precision}):",
                        details=check.comparison.describe().splitlines(),
                        fix="see `msplit bench`, which compares every way to run the model",
                    )
        last = running.pop()
        return last.running, tuple(last.checks)


@contextmanager
def _verified(
    variants: Sequence[Variant],
    fresh: Callable[[int], Arrays],
    settings: Settings,
    reference: Reference | None,
    tell: Progress,
) -> Iterator[list[_Running]]:
    """Builds all and verifies them; what is wrong in IEEE precision is not built again. At the end, those still listed are closed."""
    running = [_Running(variant, partner) for variant, partner in zip(variants, _partners(variants), strict=True)]
    _prepare(variants)
    try:
        _verify_in_ieee(running, fresh, settings, reference, tell)
        for number, one in enumerate(running):
            tell(f"building {one.variant.label}", number / len(running))
            if not one.skipped and all(check.passed for check in one.checks):
                _build(one, one.variant.job)
        _verify(running, fresh, settings, reference, tell, ieee=False)
        yield running
    finally:
        for one in running:
            one.close()


def _nothing(what: str, share: float) -> None:
    del what, share


def _partners(variants: Sequence[Variant]) -> list[str | None]:
    """What each variant's outputs are held against: what it names, or its engine's first variant on one stream."""
    labels = [variant.label for variant in variants]
    if len(set(labels)) != len(labels) or not labels:
        raise ValueError(f"variants need labels of their own, not {labels}")
    partners: list[str | None] = []
    for number, variant in enumerate(variants):
        if variant.against is not None:
            if variant.against not in labels:
                raise ValueError(f"no variant is called {variant.against!r}")
            partners.append(variant.against)
            continue
        earlier = [v for v in variants[:number] if v.engine.name == variant.engine.name and v.job.streams == 1]
        partners.append(earlier[0].label if earlier else None)
    return partners


def _prepare(variants: Sequence[Variant]) -> None:
    most: dict[int, tuple[Engine, int]] = {}
    for variant in variants:
        _, streams = most.get(id(variant.engine), (variant.engine, 1))
        most[id(variant.engine)] = (variant.engine, max(streams, variant.job.streams))
    for engine, streams in most.values():
        if isinstance(engine, NeedsStreams):
            engine.prepare(streams)


def _build(one: _Running, job: Job) -> None:
    try:
        one.executable = one.variant.engine.build(job)
    except EngineError as error:
        if not one.variant.optional:
            raise
        one.skipped = error.what


def _verify_in_ieee(
    running: Sequence[_Running],
    fresh: Callable[[int], Arrays],
    settings: Settings,
    reference: Reference | None,
    tell: Progress,
) -> None:
    """Where the measured precision is TF32, checks everything once in IEEE float32 and its tight tolerance first, or the given one."""
    loose = [one for one in running if not one.variant.job.ieee and not _on_cpu(one.variant)]
    if not loose:
        return
    strict = [_Running(replace(one.variant, job=replace(one.variant.job, ieee=True)), one.partner) for one in running]
    try:
        for number, one in enumerate(strict):
            tell(f"building {one.variant.label} in IEEE precision", number / len(strict))
            _build(one, one.variant.job)
        _verify(strict, fresh, settings, reference, tell, ieee=True)
        for one, checked in zip(running, strict, strict=True):
            one.checks += checked.checks
            one.skipped = checked.skipped
    finally:
        for one in strict:
            one.close()


def _on_cpu(variant: Variant) -> bool:
    """Whether a variant will run on a CPU, which has no TF32, as far as its engine tells before it is built."""
    return isinstance(variant.engine, KnowsDevice) and variant.engine.device(variant.job).upper().startswith("CPU")


def _verify(
    running: Sequence[_Running],
    fresh: Callable[[int], Arrays],
    settings: Settings,
    reference: Reference | None,
    tell: Progress,
    *,
    ieee: bool,
) -> None:
    """Steps all variants in lock-step on the same inputs and compares them."""
    built = [one for one in running if one.executable is not None]
    if not built:
        return
    state = built[0].running.save_state() if isinstance(built[0].running, HasState) else {}
    if state:
        for one in built[1:]:
            if isinstance(one.running, HasState):
                one.running.load_state(state)
    computed = computed_in(built[0].variant.job.flat)
    precise = {id(one): ieee or one.variant.job.ieee or _on_cpu(one.variant) for one in built}
    if reference is not None:
        for number, one in enumerate(built):
            tell(f"verifying {one.variant.label}", number / len(built))
            comparison = compare(
                one.running.step(reference.feeds),
                reference.outputs,
                ieee=precise[id(one)],
                tolerance=settings.tolerance,
                computed=computed,
            )
            one.checks.append(Check(reference.source, _precision(precise[id(one)]), 1, comparison))
    outcomes: dict[int, Comparison] = {}
    partner_of = {one.variant.label: one for one in built}
    # A variant without a partner that runs is held against the first that does, whatever its engine.
    pairs = [(one, partner_of.get(one.partner or "", built[0])) for one in built]
    pairs = [(one, partner) for one, partner in pairs if one is not partner]
    for number in range(settings.verify_inputs if pairs else 0):
        tell("verifying", number / settings.verify_inputs)
        feeds = fresh(settings.seed + 1 + number)
        outputs = {id(one): one.running.step(feeds) for one in built}
        for one, partner in pairs:
            both = precise[id(one)] and precise[id(partner)]
            found = compare(
                outputs[id(one)],
                outputs[id(partner)],
                ieee=both,
                tolerance=settings.tolerance,
                computed=computed,
            )
            if id(one) not in outcomes or (outcomes[id(one)].passed and not found.passed):
                outcomes[id(one)] = found
    for one, partner in pairs:
        if id(one) in outcomes:
            both = precise[id(one)] and precise[id(partner)]
            check = Check(partner.variant.label, _precision(both), settings.verify_inputs, outcomes[id(one)])
            one.checks.append(check)
    if state:
        _verify_state(pairs, settings, precise)


def _verify_state(pairs: Sequence[tuple[_Running, _Running]], settings: Settings, precise: Mapping[int, bool]) -> None:
    """Compares what training made of the variables."""
    for one, partner in pairs:
        if isinstance(one.running, HasState) and isinstance(partner.running, HasState):
            both = precise[id(one)] and precise[id(partner)]
            got, expected = one.running.save_state(), partner.running.save_state()
            shared = {name: value for name, value in got.items() if name in expected}
            comparison = compare(
                shared, {name: expected[name] for name in shared}, ieee=both, tolerance=settings.tolerance
            )
            if not comparison.passed:
                name = f"variables of {partner.variant.label}"
                one.checks.append(Check(name, _precision(both), settings.verify_inputs, comparison))


def _precision(ieee: bool) -> str:
    return "ieee" if ieee else "tf32"


def _rebuild(running: Sequence[_Running], fresh: Callable[[int], Arrays], settings: Settings, tell: Progress) -> None:
    """Builds what is still alive anew and checks once that it agrees."""
    alive = [one for one in running if one.alive]
    for one in alive:
        one.close()
    for number, one in enumerate(alive):
        tell(f"building {one.variant.label} anew", number / len(alive))
        _build(one, one.variant.job)
    before = [len(one.checks) for one in alive]
    _verify(alive, fresh, replace(settings, verify_inputs=min(1, settings.verify_inputs)), None, tell, ieee=False)
    for one, count in zip(alive, before, strict=True):
        one.checks[count:] = [check for check in one.checks[count:] if not check.passed]


def _warm_up(measured: Sequence[_Running], settings: Settings, tell: Progress) -> None:
    for number, one in enumerate(measured):
        tell(f"warming up {one.variant.label}", number / len(measured))
        spent: list[float] = []
        until = time.perf_counter() + settings.warmup
        while len(spent) < 3 or time.perf_counter() < until:
            spent.append(_step(one))
            if len(spent) >= 3 and spent[-1] > settings.duration:
                break
        one.burst = max(1, min(settings.max_burst, int(settings.burst / max(np.median(spent), 1e-7))))


def _step(one: _Running) -> float:
    executable, feeds = one.running, one.variant.job.feeds
    start = time.perf_counter()
    executable.step(feeds)
    return time.perf_counter() - start


def _timed(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _measure(measured: Sequence[_Running], settings: Settings, tell: Progress, build: int) -> None:
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
                one.host[-1].append([_step(one) for _ in range(one.burst)])
                device = one.running.device_times(max(2, one.burst))
                if device:
                    one.device[-1].append(list(device))
                    one.launch += [_timed(one.running.launch) for _ in range(one.burst)]
            rounds += 1
    finally:
        if collecting:
            gc.enable()


def _result(one: _Running, facts: Mapping[str, Any], running: Sequence[_Running], baseline: str) -> VariantResult:
    # What was measured before a later build turned out wrong does not count.
    wrong = not all(check.passed for check in one.checks)
    host = [] if wrong else [value for build in one.host for burst in build for value in burst]
    device = [] if wrong else [value for build in one.device for burst in build for value in burst]
    launch = [] if wrong else one.launch
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
        host_times=tuple(host),
        launch_times=tuple(launch),
        device_times=tuple(device),
    )


def _ratios(one: _Running, running: Sequence[_Running], baseline: str) -> list[statistics.Ratio]:
    found = []
    by_label = {other.variant.label: other for other in running}
    for label in dict.fromkeys([baseline, one.partner, *one.variant.over]):
        if label is None or label == one.variant.label:
            continue
        other = by_label[label]
        if not all(check.passed for check in other.checks):
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
