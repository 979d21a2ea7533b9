"""Tries every way to assign streams in the simulator and says which is best."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf

import numpy as np

from msplit import progress
from msplit.core.graph import Ints
from msplit.schedule.algorithms import ALGORITHMS, LIST, ONE, Algorithm, Skipped
from msplit.schedule.coarsen import coarsen
from msplit.schedule.problem import Problem
from msplit.schedule.search.evaluate import Evaluation, evaluate
from msplit.schedule.search.pack_streams import canonical, pack_streams
from msplit.schedule.search.refine import EFFORT as REFINING
from msplit.schedule.search.refine import refine

REFINED = "refined"

TIE = 0.01
"""One stream is kept unless something else is faster by more than this share."""

MORE_MEMORY = 1.5
"""How many times one stream's memory a plan may take."""

MEMORY_FLOOR = 1_000_000
"""Bytes below which memory is no matter."""

SLOWER = 0.02
"""Share by which a plan may be slower in the simulator to take less memory."""

EFFORT = 600_000
"""Blocks and edges between them that may be scheduled in all, candidate by candidate: a limit in work, so that results do not depend on
the machine. It binds above some 15,000 blocks; the first `ALWAYS` candidates are tried in any case."""

ALWAYS = 4

HUGE = 1_000_000
"""Blocks and edges above which only half of these are."""

WIDTHS = (2, 4, 8, 16)
"""Numbers of streams for which list scheduling is tried, beside the most that there may be."""

GRAINS = {"-coarse": 2.0, "-coarser": 5.0}
"""What list scheduling works on instead of blocks: groups with side branches of up to so many fork-joins merged."""


@dataclass(frozen=True, eq=False)
class Proposal:
    """One way to assign streams, and what the simulator says of it.

    Attributes:
        name: The algorithm's name, for list scheduling with its number of streams and its grain; "refined ..." for the last.
        stream: Per block its stream, numbered without gaps; empty if it was skipped.
        order: Record order of the blocks that the figures hold for.
        score_us: What is compared: see `Evaluation`.
        skipped: Why it was not tried, or None.
    """

    name: str
    stream: Ints
    order: Ints
    makespan_us: float
    waits: int
    streams: int
    score_us: float
    skipped: str | None = None


def choose(
    problem: Problem, streams: int, names: Sequence[str] | None = None, *, refining: int = REFINING
) -> list[Proposal]:
    """Simulates all candidates.

    Args:
        streams: Most streams; what uses more is packed onto fewer.
        names: Keys of `ALGORITHMS` to try, or names of candidates such as ``list-8-coarse``; by default all. One stream is always tried.
        refining: Blocks that may be simulated to refine the best; see `refine`.

    Returns:
        All candidates, in the order in which they were tried; the last one is the best of them refined. `best` picks the winner.

    Raises:
        ValueError: There is no such algorithm, or no stream.
    """
    if streams < 1:
        raise ValueError("there must be at least one stream")
    unknown = [name for name in names or () if not is_algorithm(name)]
    if unknown:
        raise ValueError(f"no algorithm is called {unknown[0]!r}; there are: {', '.join(ALGORITHMS)}")
    effort, always = EFFORT, ALWAYS if problem.size <= HUGE else ALWAYS // 2
    known: dict[bytes, Evaluation] = {}
    candidates: list[Proposal] = []
    variants = list(_variants(streams, names))
    for number, (name, algorithm, width) in enumerate(variants):
        if effort < problem.size and number >= always:
            candidates.append(_skip(name, f"the graph is large and {EFFORT:,} blocks and edges were scheduled already"))
            continue
        effort -= problem.size
        with progress.phase(name, detail=True):
            progress.done(number / (len(variants) + 1))
            try:
                stream = constrain(problem, pack_streams(problem, algorithm(problem, width), streams), streams)
            except Skipped as reason:
                candidates.append(_skip(name, str(reason)))
                continue
            key = stream.tobytes()
            if key not in known:
                known[key] = evaluate(problem, stream)
        candidates.append(_candidate(name, known[key]))
    winner = best(candidates)
    if winner.name != ONE:
        found = known[winner.stream.tobytes()]
        with progress.phase(f"refining {winner.name}", detail=True):
            progress.done(len(variants) / (len(variants) + 1))
            candidates.append(_candidate(f"{REFINED} {winner.name}", refine(problem, found, streams, refining)))
    return candidates


def is_algorithm(name: str) -> bool:
    """Whether `choose` can be asked for it."""
    return name in ALGORITHMS or _LISTED.fullmatch(name) is not None


_LISTED = re.compile(rf"{LIST}-(\d{{1,4}})({'|'.join(GRAINS)})?")
"""List scheduling for a number of streams, and at a grain."""


def best(candidates: Sequence[Proposal]) -> Proposal:
    """The lowest score; one stream unless that is faster by more than `TIE`. Among equals fewer waits, fewer streams, tried first."""
    tried = [candidate for candidate in candidates if candidate.skipped is None]
    winner = min(tried, key=lambda candidate: (candidate.score_us, candidate.waits, candidate.streams))
    one = next((candidate for candidate in tried if candidate.name == ONE), winner)
    return one if one.score_us <= winner.score_us * (1 + TIE) else winner


def constrain(problem: Problem, stream: Ints, streams: int) -> Ints:
    """Makes an assignment keep to what is given: ties are on one stream, pinned blocks on theirs.

    A group of tied blocks goes where its costliest block is, or where one of it is pinned. Where streams are pinned, the others are
    numbered so that as much pinned work as possible is where the algorithm wanted it.
    """
    pinned = problem.pin >= 0
    if pinned.any():
        stream = _align(problem, stream, streams)
    stream = np.where(pinned, problem.pin, stream).astype(np.int32)
    tied = np.flatnonzero(problem.tie >= 0)
    if len(tied):
        order = tied[np.lexsort((tied, -problem.work_us[tied], ~pinned[tied], problem.tie[tied]))]
        group, first = np.unique(problem.tie[order], return_index=True)
        leader = stream[order[first]]
        free = tied[~pinned[tied]]
        stream[free] = leader[np.searchsorted(group, problem.tie[free])]
    return stream if pinned.any() else canonical(problem, stream)


def _align(problem: Problem, stream: Ints, streams: int) -> Ints:
    pinned = np.flatnonzero(problem.pin >= 0)
    count = int(stream.max(initial=-1)) + 1
    shared: dict[tuple[int, int], float] = defaultdict(float)
    columns = (stream, problem.pin, problem.work_us)
    for lane, pin, work in zip(*(column[pinned].tolist() for column in columns), strict=True):
        shared[lane, pin] += work
    new: dict[int, int] = {}
    for lane, pin in sorted(shared, key=lambda pair: (-shared[pair], pair)):
        if lane not in new and pin not in new.values():
            new[lane] = pin
    unused = [number for number in range(max(streams, count)) if number not in new.values()]
    for lane in range(count):
        if lane not in new:
            new[lane] = unused.pop(0)
    return np.asarray([new[lane] for lane in range(count)], np.int32)[stream]


def _variants(streams: int, names: Sequence[str] | None) -> Iterator[tuple[str, Algorithm, int]]:
    """(name, algorithm, streams to ask it for), what promises most first: on huge graphs the effort does not last for all."""
    wanted = [name for name in ALGORITHMS if names is None or name in names or name == ONE]
    yield ONE, ALGORITHMS[ONE], streams
    grains: list[tuple[str, Algorithm]] = [(grain, _grained(factor)) for grain, factor in GRAINS.items()]
    grains.insert(1, ("", ALGORITHMS[LIST]))
    if LIST in wanted and streams > 1:
        for grain, algorithm in grains:
            yield f"{LIST}-{streams}{grain}", algorithm, streams
    for name in wanted:
        if name not in (ONE, LIST):
            yield name, _untied(ALGORITHMS[name]), streams
    if LIST in wanted and streams > 1:
        for width in (width for width in reversed(WIDTHS) if width < streams):
            for grain, algorithm in grains:
                yield f"{LIST}-{width}{grain}", algorithm, width
    tried = {f"{LIST}-{width}" for width in (streams, *WIDTHS) if LIST in wanted and width <= streams}
    by_grain = {grain or None: algorithm for grain, algorithm in grains}
    for found in filter(None, map(_LISTED.fullmatch, names or ())):
        width = max(1, min(int(found[1]), streams))
        if f"{LIST}-{width}" not in tried:
            yield found[0], by_grain[found[2]], width


def _grained(factor: float) -> Algorithm:
    """List scheduling of groups of blocks, which are the same for any number of streams."""

    @cache
    def groups(problem: Problem) -> tuple[Ints, Problem]:
        group = coarsen(problem, factor * problem.machine.fork_join_us())
        return group, problem.grouped(group)

    def algorithm(problem: Problem, streams: int) -> Ints:
        if not len(problem):
            return np.empty(0, np.int32)
        group, coarse = groups(problem)
        return ALGORITHMS[LIST](coarse, streams)[group]

    return algorithm


def _untied(algorithm: Algorithm) -> Algorithm:
    """An algorithm on tied blocks as one: it sees what `constrain` would make of its choice otherwise."""

    def tied(problem: Problem, streams: int) -> Ints:
        group, merged = problem.untied
        return algorithm(merged, streams)[group]

    return tied


def _candidate(name: str, found: Evaluation) -> Proposal:
    return Proposal(
        name=name,
        stream=found.stream,
        order=found.order,
        makespan_us=found.simulation.makespan_us,
        waits=found.plan.waits,
        streams=len(np.unique(found.plan.stream[found.plan.stream >= 0])),
        score_us=found.score_us,
    )


def leanest(candidates: Sequence[Proposal], peak_bytes: Callable[[Proposal], int]) -> Proposal:
    """The best, or, where it takes much more memory than one stream, what takes less and is hardly slower.

    Much is more than `MORE_MEMORY` times one stream's, above `MEMORY_FLOOR`. Hardly slower is at most `SLOWER`: of those candidates the
    fastest that keeps to it is taken, else, where none does, the one with the least memory. `peak_bytes` tells the memory of a candidate's
    values at its highest, and is asked for few of them.
    """
    winner = best(candidates)
    one = next(candidate for candidate in candidates if candidate.name == ONE)
    if winner is one or (taken := peak_bytes(winner)) <= (most := max(MEMORY_FLOOR, MORE_MEMORY * peak_bytes(one))):
        return winner
    found = winner
    for candidate in sorted(candidates, key=lambda candidate: candidate.score_us):
        if candidate.skipped is None and candidate.score_us <= winner.score_us * (1 + SLOWER):
            asked = peak_bytes(candidate)
            if asked < taken:
                found, taken = candidate, asked
            if taken <= most:
                break
    return found


def _skip(name: str, reason: str) -> Proposal:
    nothing = np.empty(0, np.int32)
    return Proposal(name, nothing, nothing, inf, 0, 0, inf, reason)
