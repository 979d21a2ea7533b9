"""Makes an assignment simpler without making it slower, and faster where a single move does it."""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from msplit.graph import Ints
from msplit.schedule.evaluate import Evaluation, evaluate
from msplit.schedule.fold import canonical, merge_idle
from msplit.schedule.problem import Problem
from msplit.schedule.segments import components

EFFORT = 150_000
"""Blocks that may be simulated for trying single moves: a limit in work, not in seconds, so that results do not depend on the machine."""


def refine(problem: Problem, found: Evaluation, streams: int, effort: int = EFFORT) -> Evaluation:
    """Merges streams that never overlap and undoes moves that gain nothing.

    A part is a connected piece of the graph on one stream. Moving it to the stream that most of its neighbours are on saves waits;
    it stays there if the score (the makespan and a price per wait) does not rise. Small parts are first moved all at once, then each part
    by itself (CANN calls this pass "OptimizeIneffectiveMultiStream"); what is left of `EFFORT` goes into moving single blocks anywhere.

    Args:
        problem: The blocks.
        found: What to refine.
        streams: Most streams.
        effort: Blocks that may be simulated for single moves.
    """
    if (problem.pin >= 0).any():
        return found  # streams mean something to the user: what is left to move is not worth the risk of mixing them up
    found = _better(found, _try(problem, merge_idle(problem, found.stream, found.simulation)))
    gate = problem.machine.fork_join_us()
    for factor in (1, 2, 4):
        found = _better(found, _try(problem, _without_small_parts(problem, found.stream, gate * factor)))
    found, left = _part_by_part(problem, found, effort)
    found = _block_by_block(problem, found, streams, left)
    return _better(found, _try(problem, merge_idle(problem, found.stream, found.simulation)))


def _try(problem: Problem, stream: Ints) -> Evaluation:
    return evaluate(problem, canonical(problem, stream))


def _better(old: Evaluation, new: Evaluation) -> Evaluation:
    simpler = new.plan.waits <= old.plan.waits and new.plan.streams <= old.plan.streams
    return new if new.score_us < old.score_us or (simpler and new.score_us <= old.score_us * (1 + 1e-9)) else old


def _parts(problem: Problem, stream: Ints) -> tuple[Ints, Ints, Ints]:
    """Per block its part, and the edges between blocks on different streams."""
    src, dst = problem.dag.src, problem.dag.dst()
    same = stream[src] == stream[dst]
    first = components(len(problem), src[same], dst[same])
    part = np.unique(first, return_inverse=True)[1].reshape(-1).astype(np.int32)
    return part, src[~same], dst[~same]


def _neighbours(part: Ints, src: Ints, dst: Ints, stream: Ints) -> dict[int, Counter[int]]:
    """Per part how many edges link it with each other stream."""
    links: dict[int, Counter[int]] = {}
    for first, second in zip(src.tolist(), dst.tolist(), strict=True):
        links.setdefault(int(part[first]), Counter())[int(stream[second])] += 1
        links.setdefault(int(part[second]), Counter())[int(stream[first])] += 1
    return links


def _tied(problem: Problem, part: Ints) -> NDArray[np.bool_]:
    """Parts with blocks that must share a stream with others, which may be in other parts: they stay where they are."""
    return np.asarray(np.bincount(part, problem.tie >= 0) > 0)


def _target(links: Counter[int]) -> int:
    return min(links, key=lambda lane: (-links[lane], lane))


def _without_small_parts(problem: Problem, stream: Ints, gate_us: float) -> Ints:
    """All parts up to a size on the streams of their neighbours; of two neighbours only one moves."""
    part, src, dst = _parts(problem, stream)
    total = np.bincount(part, problem.work_us)
    tied = _tied(problem, part)
    links = _neighbours(part, src, dst, stream)
    beside: dict[int, set[int]] = {}
    for first, second in zip(part[src].tolist(), part[dst].tolist(), strict=True):
        beside.setdefault(first, set()).add(second)
        beside.setdefault(second, set()).add(first)
    goes_to = np.full(len(total), -1, np.int32)
    for number in np.argsort(total, kind="stable").tolist():
        if total[number] > gate_us:
            break
        if number in links and not tied[number] and not any(goes_to[other] >= 0 for other in beside[number]):
            goes_to[number] = _target(links[number])
    return np.where(goes_to[part] >= 0, goes_to[part], stream).astype(np.int32)


def _part_by_part(problem: Problem, found: Evaluation, left: int) -> tuple[Evaluation, int]:
    """Tries to move each part, those with the most waits for their time first, until a round changes nothing or the effort is spent."""
    changed = True
    while changed and left > 0:
        changed = False
        part, src, dst = _parts(problem, found.stream)
        total = np.bincount(part, problem.work_us)
        tied = _tied(problem, part)
        links = _neighbours(part, src, dst, found.stream)
        for number in sorted(links, key=lambda part: (total[part] / links[part].total(), part)):
            if tied[number]:
                continue
            left -= len(problem)
            if left <= 0:
                break
            blocks = part == number
            target = _target(links[number])
            if (found.stream[blocks] == target).all():
                continue  # an earlier move brought it there
            better = _better(found, evaluate(problem, np.where(blocks, target, found.stream).astype(np.int32)))
            if better is not found:
                found, changed = better, True
    return evaluate(problem, canonical(problem, found.stream)), left


def _block_by_block(problem: Problem, found: Evaluation, streams: int, left: int) -> Evaluation:
    """Tries to move each block to each stream, a new one included, until a round changes nothing or the effort is spent."""
    changed = True
    by_work = np.argsort(-problem.work_us, kind="stable").tolist()
    while changed and left > 0:
        changed = False
        for block in by_work:
            for target in range(min(int(found.stream.max()) + 2, streams)):
                if target == found.stream[block] or problem.tie[block] >= 0:
                    continue
                left -= len(problem)
                if left <= 0:
                    return evaluate(problem, canonical(problem, found.stream))
                moved = found.stream.copy()
                moved[block] = target
                better = _better(found, evaluate(problem, moved))
                if better.score_us < found.score_us * (1 - 1e-9):
                    found, changed = better, True
    return evaluate(problem, canonical(problem, found.stream))
