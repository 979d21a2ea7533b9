"""The best stages of small sections, by dynamic programming."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np

from msplit.core.graph import Ints
from msplit.schedule.algorithms.list_schedule import Skipped, list_schedule
from msplit.schedule.machine import Machine
from msplit.schedule.problem import Problem, between_cuts, members

LARGEST_SECTION = 20
"""Blocks between two blocks that everything passes through."""

MOST_GROUPS = 8
LONGEST_GROUP = 3
MOST_STEPS = 20_000
"""Steps of the search for stages per section; a section that asks for more keeps the streams of list scheduling."""

MOST_IN_ALL = 200_000
"""Steps per problem."""

LARGEST = 200_000
"""Blocks of a problem."""


def staged(problem: Problem, streams: int) -> Ints:
    """Cuts each small section into stages of groups that run side by side, so that the sum of the stages' times is the least.

    A section lies between two blocks that everything passes through. The state is the set of blocks still to do; a stage is a set that
    nothing left depends on, of at most 8 connected groups of at most 3 blocks (the pruning of the paper). Where IOS measures a stage
    on the device, the simulator's model is used: groups share the GPU, and more than one cost a fork and a join. Equal sections are solved
    once. Larger sections keep what list scheduling gives them.
    Skipped above `LARGEST` blocks.

    Source: Ding, Zhu, Zhang, Pekhimenko and Han, "IOS: Inter-Operator Scheduler for CNN Acceleration", MLSys 2021
    (https://arxiv.org/abs/2011.01302).
    """
    if len(problem) > LARGEST:
        raise Skipped(f"sections are searched for in up to {LARGEST:,} blocks, there are {len(problem):,}")
    sections = [(low, high) for low, high in between_cuts(problem.dag) if high - low <= LARGEST_SECTION]
    if not sections:
        raise Skipped(f"no section of 2 to {LARGEST_SECTION} blocks in which anything is independent")
    stream = list_schedule(problem, streams)
    known: dict[object, list[list[list[int]]] | None] = {}
    budget = MOST_IN_ALL
    solved = 0
    for low, high in sections:
        solver = _Section.of(problem, low, high, min(streams, MOST_GROUPS))
        if solver.signature not in known and budget > 0:
            known[solver.signature] = solver.solve()
            budget -= solver.steps
        stages = known.get(solver.signature)
        if stages is not None:
            _place(stream, stages, problem, low)
            solved += 1
    if not solved:
        raise Skipped(f"every section asks for more than {MOST_STEPS:,} steps of search")
    return stream


@dataclass
class _Section:
    """One section as bit sets over its blocks."""

    after: list[int]  # per block the blocks that read it
    linked: list[int]  # per block its neighbours
    work: list[float]
    demand: list[list[float]]
    most_groups: int
    machine: Machine
    signature: object
    steps: int = 0

    def __post_init__(self) -> None:
        # The same sets come up in many endings.
        self.reach, self.groups = cache(self._reach), cache(self._groups)
        self.cost, self.mean_demand = cache(self._cost), cache(self._mean_demand)

    @staticmethod
    def of(problem: Problem, low: int, high: int, most_groups: int) -> _Section:
        size = high - low
        after, linked = [0] * size, [0] * size
        edges = []
        for node in range(low, high):
            for producer in problem.dag.src[problem.dag.start[node] : problem.dag.start[node + 1]].tolist():
                if producer >= low:
                    edges.append((producer - low, node - low))
                    after[producer - low] |= 1 << node - low
                    linked[producer - low] |= 1 << node - low
                    linked[node - low] |= 1 << producer - low
        work, demand = problem.work_us[low:high].tolist(), problem.demand[low:high].tolist()
        rounded = tuple(np.round(np.column_stack([work, demand]), 6).ravel().tolist())
        return _Section(after, linked, work, demand, most_groups, problem.machine, (tuple(edges), rounded))

    def solve(self) -> list[list[list[int]]] | None:
        """Stages in order, each a list of groups of blocks; None if there are too many to try."""
        whole = (1 << len(self.work)) - 1
        best: dict[int, tuple[float, tuple[int, ...], int]] = {0: (0.0, (), 0)}
        # Every ending of a set is smaller than the set, so sets are solved by an explicit stack, deepest first.
        stack = [whole]
        options: dict[int, list[int]] = {}
        while stack:
            left = stack[-1]
            if left in best:
                stack.pop()
                continue
            if left not in options:
                options[left] = list(self._endings(left))
                if self.steps > MOST_STEPS:
                    return None
                missing = [rest for chosen in options[left] if (rest := left & ~chosen) not in best]
                if missing:
                    stack += missing
                    continue
            best[left] = min((best[left & ~end][0] + self.cost(end), self.groups(end), end) for end in options[left])
            stack.pop()
        stages = []
        left = whole
        while left:
            _, groups, chosen = best[left]
            stages.append([members(group) for group in groups])
            left &= ~chosen
        return stages[::-1]

    def _endings(self, left: int) -> Iterator[int]:
        """Non-empty sets without a consumer in the rest, whose connected groups are within the pruning."""
        nodes = members(left)[::-1]  # consumers before producers
        stack: list[tuple[int, int]] = [(0, 0)]
        while stack and self.steps <= MOST_STEPS:
            self.steps += 1
            index, chosen = stack.pop()
            if index == len(nodes):
                if chosen and len(self.groups(chosen)) <= self.most_groups:
                    yield chosen
                continue
            stack.append((index + 1, chosen))
            node = nodes[index]
            wider = chosen | 1 << node
            if not self.after[node] & left & ~chosen and self.reach(wider, node).bit_count() <= LONGEST_GROUP:
                stack.append((index + 1, wider))

    def _reach(self, chosen: int, node: int) -> int:
        group = frontier = 1 << node
        while frontier:
            following = 0
            for member in members(frontier):
                following |= self.linked[member]
            frontier = following & chosen & ~group
            group |= frontier
        return group

    def _groups(self, chosen: int) -> tuple[int, ...]:
        groups = []
        while chosen:
            group = self._reach(chosen, chosen.bit_length() - 1)
            groups.append(group)
            chosen &= ~group
        return tuple(groups)

    def _cost(self, chosen: int) -> float:
        """Time of groups that share the GPU, each by itself one block after the other."""
        groups = self.groups(chosen)
        lengths = sorted((self.mean_demand(group)[0], group) for group in groups)
        demand = [self.mean_demand(group)[1] for _, group in lengths]
        total = reached = 0.0
        for index, (length, _) in enumerate(lengths):
            used = [sum(column) for column in zip(*demand[index:], strict=True)]
            total += (length - reached) * self.machine.slowdown(len(lengths) - index, *used)
            reached = length
        waiting = self.machine.fork_join_us(len(groups)) if len(groups) > 1 else 0.0
        return total + waiting

    def _mean_demand(self, group: int) -> tuple[float, list[float]]:
        """Length of a group, one block after the other, and what it demands on average."""
        nodes = members(group)
        length = sum(self.work[node] for node in nodes)
        areas = [sum(self.work[node] * self.demand[node][kind] for node in nodes) for kind in range(3)]
        return length, [area / (length or 1.0) for area in areas]


def _place(stream: Ints, stages: list[list[list[int]]], problem: Problem, low: int) -> None:
    """Groups go on where one of their producers ran, the costliest group first; the others take the lowest free stream."""
    start, src = problem.dag.start, problem.dag.src
    for groups in stages:
        taken: set[int] = set()
        by_cost = sorted(
            groups, key=lambda group: (-float(problem.work_us[[low + node for node in group]].sum()), group)
        )
        for group in by_cost:
            before = [
                int(stream[producer])
                for node in group
                for producer in src[start[low + node] : start[low + node + 1]].tolist()
                if producer - low not in group
            ]
            lane = next((lane for lane in before if lane not in taken), None)
            if lane is None:
                lane = next(lane for lane in range(len(taken) + 1) if lane not in taken)
            taken.add(lane)
            stream[[low + node for node in group]] = lane
