"""Larger grains: side branches that are not worth a stream join the block they hang on."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from msplit.core import contraction
from msplit.core.graph import Floats, Ints
from msplit.schedule.problem import Problem

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
        head = contraction.chains(problem.dag, problem.labels)
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
