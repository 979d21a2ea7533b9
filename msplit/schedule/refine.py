"""Makes an assignment simpler without making it slower, and faster where a single move does it.

Fewer streams: more than there may be, and such as never run at the same time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from msplit.core.dag import distinct
from msplit.core.graph import Ints
from msplit.schedule.problem import Problem, components
from msplit.schedule.simulate import Evaluation, Simulation, evaluate


def canonical(problem: Problem, stream: Ints) -> Ints:
    """Canonical form of an assignment, without gaps: the stream with the most work is 0, the others follow by their first blocks."""
    _, first, number = np.unique(stream, return_index=True, return_inverse=True)
    if not len(first):
        return stream.astype(np.int32)
    work = np.bincount(number, problem.work_us)
    key = np.where(np.arange(len(first)) == int(np.argmax(work)), -1, first)
    new = np.empty(len(first), np.int32)
    new[np.argsort(key, kind="stable")] = np.arange(len(first), dtype=np.int32)
    return np.asarray(new[number.reshape(-1)])


def pack_streams(problem: Problem, stream: Ints, streams: int) -> Ints:
    """Puts the blocks of many streams on at most `streams`. O(n + m + s × streams) for s streams.

    Each stream is taken as one task that becomes ready when its first block could start at the earliest; tasks go, by that time, to the
    stream where they start first, preferably one that their first block's producers are on. This is what CANN's "LoadBalance:N"
    does with the paths of its path cover, with times in place of counts.

    Source: CANN's graph engine (hicann/ge), docs/en/design/features/stream_allocator.md.
    """
    stream = canonical(problem, stream)
    count = int(stream.max(initial=-1)) + 1
    if count <= streams:
        return stream
    earliest = _earliest_start(problem)
    head = np.full(count, len(problem), np.int64)
    np.minimum.at(head, stream, np.arange(len(problem)))
    work = np.bincount(stream, problem.work_us, count)
    begin = earliest[head]
    end = np.zeros(count)
    np.maximum.at(end, stream, earliest + problem.work_us)
    lane_of = [-1] * count
    free = [0.0] * streams
    src, start, owner = problem.dag.src, problem.dag.start, stream.tolist()
    for number in np.lexsort((np.arange(count), -work, begin)).tolist():
        node = int(head[number])
        related = {lane_of[owner[producer]] for producer in src[start[node] : start[node + 1]].tolist()}
        ready = float(begin[number])
        lane = min(range(streams), key=lambda lane: (max(free[lane], ready), lane not in related, -free[lane], lane))
        free[lane] = max(free[lane] + float(work[number]), float(end[number]))
        lane_of[number] = lane
    return canonical(problem, np.asarray(lane_of, np.int32)[stream])


def _earliest_start(problem: Problem) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    start, src, work = problem.dag.start.tolist(), problem.dag.src.tolist(), problem.work_us.tolist()
    begin = [0.0] * len(problem)
    for node in range(len(problem)):
        for producer in src[start[node] : start[node + 1]]:
            end = begin[producer] + work[producer]
            if end > begin[node]:
                begin[node] = end
    return np.asarray(begin)


def merge_idle(problem: Problem, stream: Ints, simulation: Simulation) -> Ints:
    """Merges streams of which never two run at the same time: the concurrency stays, waits and streams go.

    First fit, streams in the order of their first starts. O(s² + s n log n) for s streams.
    """
    busy = np.flatnonzero(~problem.joints)
    order = busy[np.lexsort((simulation.end_us[busy], simulation.start_us[busy]))]
    lanes: list[tuple[list[int], np.ndarray[tuple[int], np.dtype[np.int64]]]] = []  # (streams, their blocks by time)
    first = {lane: index for index, lane in reversed(list(enumerate(stream[order].tolist())))}
    for lane in sorted(first, key=first.__getitem__):
        blocks = order[stream[order] == lane]
        for number, (members, others) in enumerate(lanes):
            if _apart(simulation, blocks, others):
                joined = np.concatenate([others, blocks])
                by_time = np.lexsort((simulation.end_us[joined], simulation.start_us[joined]))
                lanes[number] = ([*members, lane], joined[by_time])
                break
        else:
            lanes.append(([lane], blocks))
    target = {lane: number for number, (members, _) in enumerate(lanes) for lane in members}
    return np.asarray([target.get(lane, 0) for lane in stream.tolist()], np.int32)


def _apart(simulation: Simulation, blocks: np.ndarray, others: np.ndarray) -> bool:
    """True if no block of one list runs while one of the other does. Both are sorted by time and run one after the other."""
    begun = np.searchsorted(simulation.start_us[others], simulation.end_us[blocks], "left")
    ended = np.searchsorted(simulation.end_us[others], simulation.start_us[blocks], "right")
    return bool((begun == ended).all())


EFFORT = 150_000
"""Blocks that may be simulated for trying single moves: a limit in work, not in seconds, so that results do not depend on the machine."""

PASSES = 200_000
"""Likewise, blocks and edges between them that may be simulated for changes all over the graph. Above some 15,000 blocks not all of these
are tried, merging streams first, and no single moves."""


def refine(problem: Problem, found: Evaluation, streams: int, effort: int = EFFORT) -> Evaluation:
    """Merges streams that never overlap and undoes moves that gain nothing.

    A part is a connected piece of the graph on one stream. Moving it to the stream that most of its neighbours are on saves waits;
    it stays there if the score (see `Evaluation`) does not rise. Small parts are first moved all at once, then each part
    by itself (CANN calls this pass "OptimizeIneffectiveMultiStream"); what is left of the effort, blocks that may be simulated, goes into
    moving single blocks to any of the streams.
    """
    if (problem.pin >= 0).any():
        return found  # streams mean something to the user: what is left to move is not worth the risk of mixing them up
    gate = problem.machine.fork_join_us()
    passes: list[Callable[[Problem, Evaluation], Ints]] = [
        _merged,
        *(partial(_without_small_parts, gate_us=gate * factor) for factor in (1, 2, 4)),
    ]
    many = max(1, PASSES // max(problem.size, 1))
    for change in passes[:many]:
        found = _better(found, _try(problem, found, change(problem, found)))
    if many <= len(passes):
        return found
    if len(problem) < effort:  # else not one move could be tried
        found, left = _part_by_part(problem, found, effort)
        found = _block_by_block(problem, found, streams, left)
    return _better(found, _try(problem, found, _merged(problem, found)))


def _merged(problem: Problem, found: Evaluation) -> Ints:
    return merge_idle(problem, found.stream, found.simulation)


def _try(problem: Problem, found: Evaluation, stream: Ints) -> Evaluation:
    """An assignment with its streams numbered anew; what is known already is not worked out again."""
    stream = canonical(problem, stream)
    return found if np.array_equal(stream, found.stream) else evaluate(problem, stream)


def _better(old: Evaluation, new: Evaluation) -> Evaluation:
    if new.at_best_us > old.score_us * (1 + 1e-9):
        return old  # most are not: this spares the simulations of their score
    simpler = new.plan.waits <= old.plan.waits and new.plan.streams <= old.plan.streams
    return new if new.score_us < old.score_us or (simpler and new.score_us <= old.score_us * (1 + 1e-9)) else old


def _parts(problem: Problem, stream: Ints) -> tuple[Ints, Ints, Ints]:
    """Per block its part, and the edges between blocks on different streams. Blocks that are tied are one part."""
    src, dst = problem.dag.src, problem.dag.dst()
    same = stream[src] == stream[dst]
    one, other = problem.tied_pairs
    first = components(len(problem), np.concatenate([src[same], one]), np.concatenate([dst[same], other]))
    part = np.unique(first, return_inverse=True)[1].reshape(-1).astype(np.int32)
    return part, src[~same], dst[~same]


def _neighbours(part: Ints, src: Ints, dst: Ints, stream: Ints) -> tuple[Ints, Ints]:
    """Per part the stream that most edges link it with, the lowest of several and -1 where none does, and how many edges it has."""
    parts, streams = int(part.max(initial=-1)) + 1, int(stream.max(initial=-1)) + 1
    own = np.concatenate([part[src], part[dst]]).astype(np.int64)
    keys, links = np.unique(own * streams + np.concatenate([stream[dst], stream[src]]), return_counts=True)
    number, lane = keys // max(streams, 1), keys % max(streams, 1)
    target = np.full(parts, -1, np.int32)
    order = np.lexsort((-lane, links, number))
    target[number[order]] = lane[order]  # the last of each part is written last
    return target, np.bincount(own, minlength=parts).astype(np.int32)


def _beside(part: Ints, src: Ints, dst: Ints) -> tuple[list[int], list[int]]:
    """(start, other): the parts that edges link part p with are ``other[start[p]:start[p + 1]]``."""
    parts = int(part.max(initial=-1)) + 1
    one, other = part[src].astype(np.int64), part[dst].astype(np.int64)
    pairs = distinct(np.concatenate([one * parts + other, other * parts + one]))
    start = np.searchsorted(pairs, np.arange(parts + 1) * parts)
    return start.tolist(), (pairs % max(parts, 1)).tolist()


def _without_small_parts(problem: Problem, found: Evaluation, gate_us: float) -> Ints:
    """All parts up to a size on the streams of their neighbours; of two neighbours only one moves."""
    stream = found.stream
    part, src, dst = _parts(problem, stream)
    total = np.bincount(part, problem.work_us)
    target, _ = _neighbours(part, src, dst, stream)
    start, beside = _beside(part, src, dst)
    moves = [False] * len(total)
    by_total = np.argsort(total, kind="stable")
    for number in by_total[(total <= gate_us)[by_total] & (target >= 0)[by_total]].tolist():
        moves[number] = not any(moves[other] for other in beside[start[number] : start[number + 1]])
    return np.where(np.asarray(moves, bool)[part], target[part], stream).astype(np.int32)


def _part_by_part(problem: Problem, found: Evaluation, left: int) -> tuple[Evaluation, int]:
    """Tries to move each part, those with the most waits for their time first, until a round changes nothing or the effort is spent."""
    changed = True
    while changed and left > 0:
        changed = False
        part, src, dst = _parts(problem, found.stream)
        total = np.bincount(part, problem.work_us)
        targets, links = _neighbours(part, src, dst, found.stream)
        linked = np.flatnonzero(links > 0)
        for number in linked[np.argsort(total[linked] / links[linked], kind="stable")].tolist():
            left -= len(problem)
            if left <= 0:
                break
            blocks, target = part == number, targets[number]
            if (found.stream[blocks] == target).all():
                continue  # an earlier move brought it there
            better = _better(found, evaluate(problem, np.where(blocks, target, found.stream).astype(np.int32)))
            if better is not found:
                found, changed = better, True
    return _try(problem, found, found.stream), left


def _block_by_block(problem: Problem, found: Evaluation, streams: int, left: int) -> Evaluation:
    """Tries to move each block, and what is tied to it, to each stream, a new one included, until a round changes nothing or the effort is
    spent."""
    changed = True
    by_work = np.argsort(-problem.work_us, kind="stable").tolist()
    while changed and left > 0:
        changed = False
        for block in by_work:
            for target in range(min(int(found.stream.max()) + 2, streams)):
                if target == found.stream[block]:
                    continue
                left -= len(problem)
                if left <= 0:
                    return _try(problem, found, found.stream)
                moved = found.stream.copy()
                moved[problem.tie == problem.tie[block] if problem.tie[block] >= 0 else block] = target
                better = _better(found, evaluate(problem, moved))
                if better.score_us < found.score_us * (1 - 1e-9):
                    found, changed = better, True
    return _try(problem, found, found.stream)
