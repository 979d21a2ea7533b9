"""Results of a load test: latency and throughput by target and level, and their spread over repeats."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.serving.loadtest.corpus import Prepared, Verdict
from msplit.serving.loadtest.generator import SENT, Level, RequestState, RequestTable, Sent
from msplit.serving.pool.settings import PoolSettings


@dataclass(frozen=True)
class Latency:
    """Times of requests, in µs."""

    p50: float
    p90: float
    p99: float
    mean: float
    max: float

    @staticmethod
    def of(times: NDArray[Any]) -> Latency | None:
        """Statistics of times in ns; None where there are none."""
        if not len(times):
            return None
        p50, p90, p99 = np.percentile(times, [50, 90, 99]) / 1e3
        return Latency(float(p50), float(p90), float(p99), float(times.mean()) / 1e3, float(times.max()) / 1e3)


@dataclass(frozen=True)
class LoadRun:
    """One target at one level, once. Warm-up is left out of all but `failed`, `checked`, `wrong`, `says` and
    `why`.

    Attributes:
        seconds: Length of the measurement.
        requests: Requests that belong to that time: sent in it, or due in it where the load is open.
        answered: Requests among them that have an answer.
        refused, timed_out: Requests that have none, for that reason.
        given_up: Requests that still waited a second after the run: more came than could be answered.
        failed: Requests that have none for another reason.
        throughput: Answers per second of that time.
        latency: From sending to the answer, of an open load from when a request was due; None where none was answered.
        by_priority: Latency by priority, where there are several.
        checked: Answers that were held against what they should be.
        wrong: Answers among them that are wrong.
        says: Description of the first wrong one; "" where none is.
        why: Reason why a request failed; "" where none did.
        most_in_flight: Most requests that were sent and not answered.
        late_us: 99th percentile of the time from when a request was due to when it was sent, in µs; 0 for a closed loop.
        cut: True if the table was full before the time was over.
    """

    seconds: float
    requests: int
    answered: int
    refused: int
    timed_out: int
    given_up: int
    failed: int
    throughput: float
    latency: Latency | None
    by_priority: Mapping[int, Latency | None]
    checked: int
    wrong: int
    says: str
    why: str
    most_in_flight: int
    late_us: float
    cut: bool


def measured(table: RequestTable, sent: Sent, verdict: Verdict, *, is_open: bool, why: str = "") -> LoadRun:
    """Makes the result of a finished run from its table and the verdict on its answers."""
    count = table.counters[SENT]
    status, answered = table.status[:count], table.answered[:count]
    began = table.scheduled[:count] if is_open else table.sent[:count]
    inside = (began >= sent.begin) & (began < sent.end)
    done = inside & (status == RequestState.DONE)
    times = answered - began
    priorities = table.priority[:count]
    levels = np.unique(priorities[inside]).tolist()
    seconds = max((sent.end - sent.begin) / 1e9, 1e-9)
    ended = (answered >= sent.begin) & (answered < sent.end) & (status == RequestState.DONE)
    late = (table.sent[:count] - table.scheduled[:count])[inside] if is_open else np.zeros(0)
    return LoadRun(
        seconds=seconds,
        requests=int(inside.sum()),
        answered=int(done.sum()),
        refused=int((inside & (status == RequestState.REFUSED)).sum()),
        timed_out=int((inside & (status == RequestState.TIMED_OUT)).sum()),
        given_up=int((inside & (status == RequestState.GIVEN_UP)).sum()),
        failed=int(((status == RequestState.FAILED) | (status == RequestState.MISSHAPEN)).sum()),
        throughput=float(ended.sum()) / seconds,
        latency=Latency.of(times[done]),
        by_priority={level: Latency.of(times[done & (priorities == level)]) for level in levels if len(levels) > 1},
        checked=verdict.checked,
        wrong=verdict.wrong,
        says=verdict.says,
        why=why,
        most_in_flight=in_flight(table.sent[:count], answered),
        late_us=float(np.percentile(late, 99)) / 1e3 if len(late) else 0.0,
        cut=sent.full,
    )


def in_flight(sent: NDArray[np.int64], answered: NDArray[np.int64]) -> int:
    """Most requests that were on their way at once. What is answered when another is sent is on its way no more."""
    if not len(sent):
        return 0
    before = np.searchsorted(np.sort(answered), np.sort(sent), side="right")
    return int((np.arange(1, len(sent) + 1) - before).max())


@dataclass(frozen=True)
class RepeatSpread:
    """A number over the repeats: the median, the least and the most."""

    value: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> RepeatSpread | None:
        """Spread of values; None where there are none."""
        return RepeatSpread(float(np.median(values)), min(values), max(values)) if values else None


@dataclass(frozen=True)
class Point:
    """A target at a level, over all repeats.

    Attributes:
        target: Its label.
        level: Load.
        name: Name of the load in the report.
        runs: Each repeat.
        limited: Reason why the generator, not the target, sets the figure; "" where it does not.
    """

    target: str
    level: Level
    name: str
    runs: tuple[LoadRun, ...]
    limited: str = ""

    @property
    def throughput(self) -> RepeatSpread:
        """Answers per second."""
        found = RepeatSpread.of([run.throughput for run in self.runs])
        assert found is not None
        return found

    def latency(self, quantity: str, priority: int | None = None) -> RepeatSpread | None:
        """``p50``, ``p90``, ``p99``, ``mean`` or ``max`` in µs, of all requests or of a priority; None where nothing was answered."""
        found = [run.latency if priority is None else run.by_priority.get(priority) for run in self.runs]
        return RepeatSpread.of([getattr(one, quantity) for one in found if one is not None])

    @property
    def priorities(self) -> tuple[int, ...]:
        """Those that there were, where there were several."""
        return tuple(sorted({level for run in self.runs for level in run.by_priority}))

    def total(self, quantity: str) -> int:
        """A count over all repeats, such as ``wrong``."""
        return sum(getattr(run, quantity) for run in self.runs)


@dataclass(frozen=True)
class TargetResult:
    """Something that answered.

    Attributes:
        label: Name in the report.
        about: Description.
        echo: Label of the target that shows what handing over to it costs by itself; "" for such a target.
        facts: Facts, such as the counts of a pool.
        skipped: Reason why it was not measured; "" where it was.
    """

    label: str
    about: str
    echo: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    skipped: str = ""


@dataclass(frozen=True)
class LoadSweep:
    """Choice among combinations of settings. Each is a target, whose facts have them as ``settings``.

    Attributes:
        names: Settings that differ.
        latency_us: Bound on the 99th percentile of latency, µs; None: there is none.
        levels: Target -> its level with the highest rate within the bound; where none is, that of the least latency.
        best: The target to choose; "" where none is within the bound.
        options: Command line that sets it, as far as a pool has such settings.
    """

    names: Sequence[str]
    latency_us: float | None
    levels: Mapping[str, Point]
    best: str
    options: str


@dataclass(frozen=True)
class LoadResult:
    """Result of `load`.

    Attributes:
        model: Path of the model or build.
        targets: Targets in the order of the report, echoes last.
        points: Target by target, level by level.
        seconds, warmup, repeat: Settings of the measurement.
        rows: Rows of a request; 0 where the model has none.
        distinct: Prepared requests, and of those how many have an answer that would pass for no other's.
        checked_against: Source of the answers that they are compared with.
        tolerances: By output, of the first target.
        notes: Remarks for the user.
        environment: Machine and versions.
        sweep: What was chosen, if there was a choice.
    """

    model: str
    targets: tuple[TargetResult, ...]
    points: tuple[Point, ...]
    seconds: float
    warmup: float
    repeat: int
    rows: int
    distinct: tuple[int, int]
    checked_against: str
    tolerances: Mapping[str, float]
    notes: tuple[str, ...]
    environment: Mapping[str, Any]
    sweep: LoadSweep | None = None

    @property
    def wrong(self) -> int:
        """Answers that were not right."""
        return sum(point.total("wrong") for point in self.points)

    @property
    def broken(self) -> int:
        """Requests that failed for another reason than those that a load may have: too many waited, or one waited too long."""
        return sum(point.total("failed") for point in self.points)


@dataclass(eq=False)
class Common:
    """Parts that load tests of a model with other settings of its pool have in common; each adds what is not there yet.

    Attributes:
        recipe_of: Recipes for the pool; None: the model is compiled, or loaded, for it.
        ready: Requests and right answers.
        echo: Runs of the echo, by target and level.
    """

    recipe_of: Callable[[PoolSettings], Any] | None = None
    ready: Prepared | None = None
    echo: Mapping[tuple[str, str], tuple[Level, list[LoadRun]]] = field(default_factory=dict)
