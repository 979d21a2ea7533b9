"""Choice of streams in the simulator, on the blocks of a graph or on larger ones.

Tries every way to assign streams in the simulator and says which is best.

Larger grains: side branches that are not worth a stream join the block they hang on.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf

import numpy as np
from numpy.typing import NDArray

from msplit import progress
from msplit.core import dag
from msplit.core.graph import Floats, Ints
from msplit.schedule.algorithms import ALGORITHMS, LIST, ONE
from msplit.schedule.algorithms.list_schedule import Algorithm, Skipped
from msplit.schedule.problem import Problem
from msplit.schedule.refine import EFFORT as REFINING
from msplit.schedule.refine import canonical, pack_streams, refine
from msplit.schedule.simulate import Evaluation, evaluate

WORTH = 1.05
"""A gain below this is none: what is predicted and what is measured differ by as much."""

MUCH = 0.25
"""A prediction in which more than this share of the kernels is guessed is called a guess."""

STREAMS = 16
"""Streams that the simulator may take; more gained nothing on any model measured."""

ROUNDS = 12
"""More would hardly change anything: each round halves at least what can still be merged in practice."""


def coarsen(problem: Problem, gate_us: float) -> Ints:
    """Groups blocks so that what is left to schedule is worth scheduling.

    Three merges alternate, none of which can make a cycle, since no second path joins the two blocks:
    a block with one producer joins it; a block with one consumer joins that; what became a linear chain becomes one group. A group
    takes in at most `gate_us` of side branches at its fork and as much at its join, so that wide forks of tiny branches stay wide.
    Linear in the number of edges per round.

    Source: edge zeroing as in Sarkar's clustering (1989), restricted to the two local patterns for which a merge keeps the graph
    acyclic, as in Herrmann et al., "Multilevel Algorithms for Acyclic Partitioning of Directed Acyclic Graphs", SIAM J. Sci. Comput. 2019.

    Returns:
        Per block its group, for `Problem.grouped`.
    """
    group = np.arange(len(problem), dtype=np.int32)
    at_fork, at_join = np.zeros(len(problem)), np.zeros(len(problem))
    for _ in range(ROUNDS):
        before = len(problem)
        for forward in (True, False):
            into = _forks(problem, at_fork, gate_us) if forward else _joins(problem, at_join, gate_us)
            absorbed = at_fork if forward else at_join
            moved = np.flatnonzero(into != np.arange(len(problem)))
            np.add.at(absorbed, into[moved], problem.time_us[moved])
            problem, group, kept = _regroup(problem, group, into)
            at_fork, at_join = at_fork[kept], at_join[kept]
        head = dag.chains(problem.dag, problem.labels)
        tail = np.arange(len(problem))
        tail[head] = np.arange(len(problem))  # the last of a chain has the largest number, and is written last
        at_fork = at_fork[tail]
        problem, group, kept = _regroup(problem, group, head)
        at_fork, at_join = at_fork[kept], at_join[kept]
        if len(problem) == before:
            break
    return group


def _forks(problem: Problem, absorbed: Floats, gate_us: float) -> Ints:
    """Blocks whose only producer takes them in: the shortest first, while they fit."""
    alone = np.flatnonzero(np.diff(problem.dag.start) == 1)
    return _merge(problem, alone, problem.dag.src[problem.dag.start[alone]], absorbed, gate_us)


def _joins(problem: Problem, absorbed: Floats, gate_us: float) -> Ints:
    """Blocks whose only consumer takes them in."""
    start, dst = problem.consumers
    alone = np.flatnonzero(np.diff(start) == 1)
    return _merge(problem, alone, dst[start[alone]], absorbed, gate_us)


def _merge(problem: Problem, side: NDArray[np.int64], into: Ints, absorbed: Floats, gate_us: float) -> Ints:
    labels, times = problem.labels, problem.time_us
    good = (labels[side] == labels[into]) & (times[side] <= gate_us)
    side, into = side[good], into[good]
    moving = np.zeros(len(problem), bool)
    moving[side] = True
    still = ~moving[into]  # one level at a time: what moves takes nothing in
    side, into = side[still], into[still]
    order = np.lexsort((side, times[side], into))
    side, into = side[order], into[order]
    total = np.cumsum(times[side])
    first = np.searchsorted(into, into)
    taken = total - (total - times[side])[first] + absorbed[into] <= gate_us * (1 + 1e-9)
    result = np.arange(len(problem), dtype=np.int32)
    result[side[taken]] = into[taken]
    return result


def _regroup(problem: Problem, group: Ints, into: Ints) -> tuple[Problem, Ints, Ints]:
    """Applies a merge. The block that takes others in keeps its place in the topological numbering."""
    kept, number = np.unique(into, return_inverse=True)
    if len(kept) == len(problem):
        return problem, group, kept
    numbers: Ints = number.astype(np.int32)
    return problem.grouped(numbers), numbers[group], kept


REFINED = "refined"

TIE = 0.01
"""One stream is kept unless something else is faster by more than this share."""

MORE_MEMORY = 1.5
"""Most memory that a plan may take, as a multiple of one stream's."""

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
"""Grains of list scheduling, instead of blocks: groups with side branches of up to so many fork-joins merged."""


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
    """True if `choose` can be asked for it."""
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
    # The list scheduler on all streams, at each grain.
    grains: list[tuple[str, Algorithm]] = [(grain, _grained(factor)) for grain, factor in GRAINS.items()]
    grains.insert(1, ("", ALGORITHMS[LIST]))
    if LIST in wanted and streams > 1:
        for grain, algorithm in grains:
            yield f"{LIST}-{streams}{grain}", algorithm, streams
    # The other algorithms on all streams, then the list scheduler on fewer.
    for name in wanted:
        if name not in (ONE, LIST):
            yield name, _untied(ALGORITHMS[name]), streams
    if LIST in wanted and streams > 1:
        for width in (width for width in reversed(WIDTHS) if width < streams):
            for grain, algorithm in grains:
                yield f"{LIST}-{width}{grain}", algorithm, width
    # Widths that the caller names and nobody has tried.
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
