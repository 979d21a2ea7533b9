"""Search for the fastest schedule by measuring, among the candidates that may be measured.

Finds the fastest schedule by measuring: the best candidates first, then local search from the winner.

Nothing here knows a GPU: a `MeasuringDevice` measures and a function tells the time, so that the search itself can be tested with both
made up.

Source of the search: first-improvement local search with a surrogate (the simulator picks which neighbours are worth a measurement), as
in TVM's auto-tuner (Chen et al. 2018). A gain counts only if it holds in paired rounds *and* in a second build: the same CUDA graph,
captured twice, can differ by several per cent for as long as it lives.

What may be measured: schedules that the algorithms propose for several numbers of streams, in several kinds of kernels.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol

import numpy as np

from msplit.core.graph import Ints
from msplit.progress import Progress, silent
from msplit.schedule.algorithms import LIST, ONE
from msplit.schedule.choose import choose, constrain
from msplit.schedule.neighbours import Schedule, neighbours
from msplit.schedule.problem import Problem
from msplit.schedule.simulate import evaluate

WIDTHS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Numbers of streams that candidates are made for, up to the most that there may be."""

POOL_EFFORT = 8_000
"""Blocks that may be simulated for one pool."""

REFINING = 10_000
"""Blocks that may be simulated to refine the best candidate of each width: what is left to gain, measuring finds."""


@dataclass(frozen=True, eq=False)
class PlanCandidate:
    """Something to measure. The mode says which kernels: it is a key of the problems that are searched. Waits are those over blocks."""

    mode: str
    name: str
    schedule: Schedule
    predicted_us: float
    waits: int
    streams: int

    def key(self) -> tuple[str, bytes]:
        """Equal for candidates that run the same."""
        return self.mode, self.schedule.key()


def single(problem: Problem, mode: str) -> PlanCandidate:
    """Everything on one stream, as a candidate."""
    return candidate_of(problem, mode, ONE, np.zeros(len(problem), np.int32))


def candidate_of(problem: Problem, mode: str, name: str, stream: Ints, order: Ints | None = None) -> PlanCandidate:
    """A candidate of an assignment, in the better record order where none is given."""
    found = evaluate(problem, stream, order)
    schedule = Schedule(stream, found.order)
    return simulated_candidate(problem, mode, name, schedule, found.simulation.makespan_us, found.plan.waits)


def simulated_candidate(
    problem: Problem, mode: str, name: str, schedule: Schedule, predicted: float, waits: int
) -> PlanCandidate:
    """A candidate of a schedule that was simulated."""
    used = np.unique(schedule.stream[~problem.joints])
    return PlanCandidate(mode, name, schedule, predicted, waits, max(len(used), 1))


def candidates(problem: Problem, mode: str, streams: int, given: Sequence[tuple[str, Ints]]) -> list[PlanCandidate]:
    """Different candidates for two and up to so many streams, those given first."""
    # Large graphs take seconds to simulate: one number of streams more, in between, has to do.
    widths = WIDTHS if len(problem) <= POOL_EFFORT else (10,)
    found: dict[tuple[str, bytes], PlanCandidate] = {}

    def add(candidate: PlanCandidate) -> None:
        found.setdefault(candidate.key(), candidate)

    for name, stream in given:
        add(candidate_of(problem, mode, name, constrain(problem, stream, streams)))
    for width in [streams, *(width for width in reversed(widths) if 1 < width < streams)]:
        names = None if width == streams or len(problem) <= POOL_EFFORT else (LIST,)
        for proposal in choose(problem, width, names, refining=REFINING):
            if proposal.skipped is None and proposal.name != ONE:
                few = f" on {width}" if width < streams and proposal.streams >= width else ""
                name = proposal.name if proposal.name.endswith(f"-{width}") else proposal.name + few
                schedule = Schedule(proposal.stream, proposal.order)
                add(simulated_candidate(problem, mode, name, schedule, proposal.makespan_us, proposal.waits))
    return [candidate for candidate in found.values() if candidate.streams > 1]


AT_ONCE = 6
"""Candidates that are measured side by side, beside one stream."""

FINALISTS = 4
"""Candidates that are measured a second time; local search starts from the best and, where time is left, from the others."""

PARENTS = 12
"""Candidates from which local search takes pieces."""

ROUNDS, SCREEN_ROUNDS, CONFIRM_ROUNDS = 7, 3, 11
"""Rounds of a batch of candidates, of a first look at neighbours, and of the proof that one is faster."""

NEIGHBOURS = 4
"""Neighbours that are measured side by side with the best so far."""

POOL = 16
"""Neighbours that are simulated for that; fewer on large graphs, see `POOL_EFFORT`."""

PATIENCE = 20
"""Batches of neighbours without a gain after which local search ends."""

LEAST_GAIN = 0.003
"""A neighbour must be faster by this share."""

AGREEMENT = 0.8
"""Share of the rounds in which it must be."""

CANDIDATES_SHARE = 0.4
"""Share of the time that candidates may take."""


class MeasuringDevice(Protocol):
    """A device, real or simulated, that runs candidates."""

    def times(self, candidates: Sequence[PlanCandidate], rounds: int) -> Sequence[Sequence[float]]:
        """Seconds of a step: per candidate one median per round. In every round all run, in an order drawn anew. It stays built."""

    def renew(self) -> None:
        """Forgets what is built: what is measured next is built anew."""

    def memory(self, candidate: PlanCandidate) -> float:
        """Highest use of memory, as a multiple of that of one stream with the same kernels; 1 where both are too small to matter."""

    def describe(self) -> str:
        """A description of the device, for people."""


@dataclass(frozen=True)
class SearchLimits:
    """Limits of a search: seconds in all, so many streams, and memory, over one stream's. The seed is for what is drawn."""

    seconds: float = 20.0
    streams: int = 16
    max_memory: float = 1.5
    seed: int = 0


@dataclass(frozen=True, eq=False)
class Measurement:
    """Measurement of a candidate.

    Attributes:
        seconds: Median of its rounds, None if it was not measured.
        gain: How many times faster than one stream of the first mode, in the same rounds.
        memory: Over one stream's.
        skipped: Why it was not measured, "" if it was.
    """

    candidate: PlanCandidate
    seconds: float | None
    gain: float | None
    memory: float
    skipped: str = ""


@dataclass(frozen=True)
class Gain:
    """A change that made the best so far so many times faster, in paired rounds of two builds, and at how many seconds since the start."""

    change: str
    ratio: float
    at: float


@dataclass(frozen=True, eq=False)
class Found:
    """Result of a search.

    Attributes:
        one: One stream of the first mode.
        candidate: The fastest candidate, before local search.
        winner: The fastest of all: to be confirmed against `one` and `candidate`, which it may be.
        measurements: Of the candidates, those that were measured first, fastest first.
        gains: What local search changed on the way to the winner, in order.
        tried: Neighbours that were measured.
    """

    one: PlanCandidate
    candidate: PlanCandidate
    winner: PlanCandidate
    measurements: tuple[Measurement, ...]
    gains: tuple[Gain, ...]
    tried: int
    seconds: float
    stopped: str


@dataclass(eq=False)
class _Search:
    """State of one search."""

    problems: Mapping[str, Problem]
    device: MeasuringDevice
    limits: SearchLimits
    now: Callable[[], float]
    progress: Progress
    start: float = 0.0
    seen: set[tuple[str, bytes]] = field(default_factory=set)
    memory: dict[tuple[str, bytes], float] = field(default_factory=dict)
    tried: int = 0
    gains: list[Gain] = field(default_factory=list)
    parents: list[tuple[str, Schedule]] = field(default_factory=list)

    def spent(self) -> float:
        return self.now() - self.start

    def left(self) -> float:
        return self.limits.seconds - self.spent()

    def say(self, what: str) -> None:
        self.progress(what, min(1.0, self.spent() / max(self.limits.seconds, 1e-9)))

    def fits(self, candidate: PlanCandidate) -> bool:
        return self.memory_of(candidate) <= self.limits.max_memory + 1e-9

    def memory_of(self, candidate: PlanCandidate) -> float:
        """Over one stream's, asked for once."""
        key = candidate.key()
        if key not in self.memory:
            self.memory[key] = self.device.memory(candidate)
        return self.memory[key]


def search(
    problems: Mapping[str, Problem],
    device: MeasuringDevice,
    limits: SearchLimits,
    *,
    given: Mapping[str, Sequence[tuple[str, Ints]]] | None = None,
    now: Callable[[], float],
    progress: Progress | None = None,
) -> Found:
    """Searches.

    Args:
        problems: Kernel mode -> its blocks: the same model in different kernels. All are compared with one stream of the first.
        given: Kernel mode -> further candidates: a name, and a stream per block.
        now: Seconds on some clock.
        progress: Is called with what is being done and the share of the time that is spent.
    """
    state = _Search(problems, device, limits, now, progress or silent, start=now())
    first = next(iter(problems))
    one = single(problems[first], first)
    candidates = [
        candidate
        for mode, problem in problems.items()
        for candidate in _candidates(state, mode, problem, given or {}, one)
    ]
    measurements = _measured(state, one, candidates)
    measured = [measurement for measurement in measurements if measurement.gain is not None]
    finalists = _finals(state, one, [measurement.candidate for measurement in measured[:FINALISTS]])
    candidate = best = finalists[0]
    state.parents = [
        (measurement.candidate.mode, measurement.candidate.schedule)
        for measurement in measured[:PARENTS]
        if measurement.candidate.streams > 1
    ]
    ends: list[PlanCandidate] = []
    gains: dict[tuple[str, bytes], tuple[Gain, ...]] = {}
    for number, start in enumerate(finalists):
        if state.left() <= 0:
            break
        if number and start.schedule.stream.max(initial=0) == 0:
            continue
        before = len(state.gains)
        end = _climb(state, start, f"from {start.name}")
        ends.append(end)
        gains[end.key()] = tuple(state.gains[before:])
    stopped = "the time is up" if state.left() <= 0 else "no further change gains"
    if any(end is not best for end in ends):
        best = _finals(state, one, [candidate, *ends])[0]
    kept = gains.get(best.key(), ())
    return Found(one, candidate, best, tuple(measurements), kept, state.tried, state.spent(), stopped)


def _candidates(
    state: _Search, mode: str, problem: Problem, given: Mapping[str, Sequence[tuple[str, Ints]]], one: PlanCandidate
) -> list[PlanCandidate]:
    state.say("simulating candidates" + (f" ({mode})" if len(state.problems) > 1 else ""))
    if not len(problem):
        return []
    alone = [] if mode == one.mode else [single(problem, mode)]
    return [*alone, *candidates(problem, mode, state.limits.streams, given.get(mode, ()))]


def _measured(state: _Search, one: PlanCandidate, candidates: Sequence[PlanCandidate]) -> list[Measurement]:
    """Measures candidates, what the simulator likes best first, as long as the time for them lasts."""
    measurements = [Measurement(one, None, 1.0, 1.0)]
    fitting = []
    for candidate in sorted(candidates, key=lambda candidate: candidate.predicted_us):
        if state.fits(candidate):
            fitting.append(candidate)
        else:
            ratio = state.memory_of(candidate)
            measurements.append(Measurement(candidate, None, None, ratio, f"needs {ratio:.1f} times the memory"))
    chunks = [fitting[at : at + AT_ONCE] for at in range(0, len(fitting), AT_ONCE)] or [[]]
    for number, chunk in enumerate(chunks):
        if number and state.spent() > CANDIDATES_SHARE * state.limits.seconds:
            measurements += [
                Measurement(candidate, None, None, state.memory_of(candidate), "the time was up") for candidate in chunk
            ]
            continue
        state.say(f"measuring candidates {number * AT_ONCE + 1} to {number * AT_ONCE + len(chunk)} of {len(fitting)}")
        times = state.device.times([one, *chunk], ROUNDS)
        if number == 0:
            measurements[0] = Measurement(one, median(times[0]), 1.0, 1.0)
        for candidate, rounds in zip(chunk, times[1:], strict=True):
            state.seen.add(candidate.key())
            gain, memory = _ratio(times[0], rounds), state.memory_of(candidate)
            measurements.append(Measurement(candidate, median(rounds), gain, memory))
        state.device.renew()
    return sorted(measurements, key=lambda measurement: (measurement.gain is None, -(measurement.gain or 0.0)))


def _finals(state: _Search, one: PlanCandidate, candidates: Sequence[PlanCandidate]) -> list[PlanCandidate]:
    """Candidates by their gain over one stream in two further builds, best first. One stream wins ties."""
    distinct = list({candidate.key(): candidate for candidate in [one, *candidates]}.values())
    logs = np.zeros(len(distinct))
    for build in range(2):
        state.say(f"comparing the best {len(distinct)}, build {build + 1} of 2")
        state.device.renew()
        times = state.device.times(distinct, CONFIRM_ROUNDS)
        logs += [np.log(_ratio(times[0], rounds)) for rounds in times]
    ranked = sorted(range(len(distinct)), key=lambda number: (-logs[number], number))
    return [distinct[number] for number in ranked]


def _climb(state: _Search, start: PlanCandidate, origin: str) -> PlanCandidate:
    """Local search until `PATIENCE` batches of neighbours in a row gain nothing, or the time is up."""
    problem = state.problems[start.mode]
    chance = random.Random(state.limits.seed)
    best, idle = start, 0
    pool = max(NEIGHBOURS, min(POOL, POOL_EFFORT // max(len(problem), 1)))
    while idle < PATIENCE and state.left() > 0:
        state.say(f"improving {origin}: {state.tried} changes tried, {len(state.gains)} kept")
        batch = _pick(state, problem, best, chance, pool)
        if not batch:
            break
        idle += 1
        state.tried += len(batch)
        times = state.device.times([best, *[candidate for _, candidate in batch]], SCREEN_ROUNDS)
        ratios = [_ratio(times[0], rounds) for rounds in times[1:]]
        fastest = int(np.argmax(ratios))
        if ratios[fastest] <= 1 + LEAST_GAIN / 2:
            continue
        change, candidate = batch[fastest]
        gain = _holds(state, best, candidate)
        if gain is not None:
            best, idle = candidate, 0
            state.gains.append(Gain(change, gain, state.spent()))
    return best


def _holds(state: _Search, best: PlanCandidate, candidate: PlanCandidate) -> float | None:
    """The gain of one candidate over another if it holds in this build and in the next, else None."""
    logs = 0.0
    for build in range(2):
        if build:
            state.device.renew()
        old, new = state.device.times([best, candidate], CONFIRM_ROUNDS)
        faster = sum(b < a for a, b in zip(old, new, strict=True))
        ratio = _ratio(old, new)
        if ratio <= 1 + LEAST_GAIN or faster < AGREEMENT * len(new):
            return None
        logs += float(np.log(ratio)) / 2
    return float(np.exp(logs))


def _pick(
    state: _Search, problem: Problem, best: PlanCandidate, chance: random.Random, pool: int
) -> list[tuple[str, PlanCandidate]]:
    """Some neighbours that have not been measured and fit into memory: those that the simulator likes best, and one at random."""
    found: list[tuple[str, PlanCandidate]] = []
    looked = 0
    others = [schedule for mode, schedule in state.parents if mode == best.mode]
    for change, schedule in neighbours(problem, best.schedule, state.limits.streams, chance, others):
        looked += 1
        if looked > 4 * pool:
            break
        key = best.mode, schedule.key()
        if key in state.seen:
            continue
        evaluation = evaluate(problem, schedule.stream, schedule.order)
        name, waits = best.name.removesuffix(_TUNED) + _TUNED, evaluation.plan.waits
        found.append((change, simulated_candidate(problem, best.mode, name, schedule, evaluation.score_us, waits)))
        if len(found) >= pool:
            break
    found.sort(key=lambda entry: entry[1].predicted_us)
    if len(found) > NEIGHBOURS:
        found.insert(NEIGHBOURS - 1, found.pop(chance.randrange(NEIGHBOURS - 1, len(found))))
    chosen: list[tuple[str, PlanCandidate]] = []
    for change, candidate in found:
        if len(chosen) == NEIGHBOURS:
            break
        if candidate.key() not in state.seen and state.fits(candidate):
            chosen.append((change, candidate))
        state.seen.add(candidate.key())
    return chosen


_TUNED = ", improved"


def _ratio(old: Sequence[float], new: Sequence[float]) -> float:
    """Speedup of the new one, in paired rounds."""
    return float(median(max(a, 1e-12) / max(b, 1e-12) for a, b in zip(old, new, strict=True)))
