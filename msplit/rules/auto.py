"""The rule `auto`: streams by cost, from whichever algorithm does best in the simulator. `propagate`, which it ends with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from msplit.analysis.branches import finish_times
from msplit.core.graph import CONTROL, UNASSIGNED, Assignment, Graph, Ints
from msplit.formats.settings import nearest
from msplit.rules.base import KernelStreams, Remark, RuleContext, RuleOptions
from msplit.schedule.algorithms import ALGORITHMS, ONE
from msplit.schedule.choose import Proposal, best, choose, is_algorithm
from msplit.schedule.machine import Machine
from msplit.schedule.problem import Problem

PLAIN, BEST = "plain", "best"
KERNELS = (PLAIN, BEST)
"""Allowed values of `Auto.kernels`."""

NOT_CHOSEN = "kernels-not-chosen"
"""Kind of the remark that larger kernels were asked for and could not be looked for, so that ids are others than where they can."""


@dataclass(frozen=True)
class Auto:
    """Assigns everything by cost. All algorithms are simulated; one stream is kept unless another is faster.

    Nodes that earlier rules claimed stay where they are and count for the others. Nodes that launch nothing follow those that do. What must
    share a stream (loops, colocation classes, variables with their users) does. Host nodes have no stream.

    Attributes:
        streams: Most streams to use; 0: as many as there are.
        candidates: Algorithms to try; empty: all of them.
        wait_us: What a wait for another stream costs, µs, from the end of one node to the start of the other; None: what the data sheet
            of the GPU says.
        kernels: ``plain``: streams serve any executor. ``best``: for msplit's own engine; fused and grouped kernels compete with plain
            ones, and nodes that share a kernel share a stream. That runs the model once.
    """

    key: ClassVar[str] = "auto"
    settles: ClassVar[bool] = True
    """Nothing that comes later moves what it decides: what must share a stream is given to it, and it keeps to that."""
    streams: int = 0
    candidates: tuple[str, ...] = ()
    wait_us: float | None = None
    kernels: str = PLAIN

    @classmethod
    def from_options(cls, options: RuleOptions) -> Auto:
        """Read the options of the rule from YAML."""
        names = []
        for name, line in options.texts("candidates"):
            if is_algorithm(name):
                names.append(name)
            else:
                options.problem(
                    f"auto.candidates: no algorithm is called '{name}'{nearest(name, ALGORITHMS)}",
                    fix=f"choose from {', '.join(ALGORITHMS)}",
                    at=line,
                )
        wait = options.number("wait_us", -1.0, 0.0)
        streams = options.integer("streams", 0, 0, options.reading.streams)
        kernels = options.choice("kernels", PLAIN, KERNELS)
        return cls(streams, tuple(names), None if wait < 0 else wait, kernels)

    def apply(self, context: RuleContext, assignment: Assignment) -> tuple[Assignment, tuple[Remark, ...]]:
        """Claim every node but host nodes."""
        problem = self.problem(context, assignment)
        if len(problem) == 0:
            return assignment, (Remark(self.key, "no-gain", "no node launches a kernel"),)
        streams = min(self.streams or context.streams, context.streams)
        said: tuple[Remark, ...] = ()
        if self.kernels == BEST:
            placed = self._larger(context, assignment, streams)
            if isinstance(placed, KernelStreams):
                return claim_ids(context, assignment, placed.ids, placed.why, self.key), (
                    Remark(self.key, "kernels", placed.why),
                )
            said = (placed,)
        candidates = choose(problem, streams, self.candidates or None)
        winner = best(candidates)
        one = next(candidate for candidate in candidates if candidate.name == ONE)
        ids = problem.spread(winner.stream)
        if winner.name == ONE and streams > 1:
            said = (*said, Remark(self.key, "no-gain", _no_gain(problem, candidates)))
        return claim_ids(context, assignment, ids, _why(winner, one), self.key), said

    def _larger(self, context: RuleContext, assignment: Assignment, streams: int) -> KernelStreams | Remark:
        """The best kernels, where this rule decides on all nodes."""
        claimed = int(np.count_nonzero((assignment.ids != UNASSIGNED) & ~context.flat.host))
        if claimed:
            text = (
                f"kernels stay plain: earlier rules have placed {claimed} node{'s' * (claimed != 1)}, and nodes that "
                "share a kernel must share a stream"
            )
            return Remark(self.key, "kernels", text)
        if context.kernels is None:
            text = "kernels stay plain here: choosing larger ones runs the model, and this does not"
            return Remark(self.key, NOT_CHOSEN, text)
        return context.kernels(streams, tied=context.tied, candidates=self.candidates or None, wait_us=self.wait_us)

    def problem(self, context: RuleContext, assignment: Assignment) -> Problem:
        """The scheduling problem behind a graph: `choose` on it gives what the rule chooses from."""
        machine, order = Machine.of_costs(context.costs), context.order_after(assignment)
        if self.wait_us is not None:
            machine = replace(machine, wait_us=self.wait_us)
        return Problem.from_flat(
            context.flat,
            context.costs,
            tie=_by_order(context.tied, order),
            same=context.same,
            pin=np.where(assignment.ids == UNASSIGNED, -1, assignment.ids),
            order=order,
            machine=machine,
        )


def _by_order(of: Ints, order: Ints) -> Ints:
    """Groups numbered by their first node in an order: algorithms decide between equal groups by their numbers."""
    found, first = np.unique(of[order], return_index=True)
    groups, first = found[found >= 0], first[found >= 0]
    number = np.full(int(of.max(initial=-1)) + 2, -1, np.int32)  # the last one is for what is in no group
    number[groups[np.argsort(first)]] = np.arange(len(groups), dtype=np.int32)
    return np.asarray(number[of], np.int32)


def _why(winner: Proposal, one: Proposal) -> str:
    if winner.name == ONE:
        return "no assignment to more streams is faster in the simulator"
    return (
        f"'{winner.name}' is fastest in the simulator: {winner.makespan_us:.0f} µs on {winner.streams} streams "
        f"with {winner.waits} wait{'s' * (winner.waits != 1)}, {one.makespan_us:.0f} µs on one"
    )


def _no_gain(problem: Problem, candidates: list[Proposal]) -> str:
    serial, bound = float(problem.work_us.sum()), problem.bound_us()
    most = serial / bound if bound > 0 else 1.0
    tried = sum(candidate.skipped is None for candidate in candidates)
    if (problem.pin >= 0).any():
        return f"what earlier rules left over stays on stream 0: none of {tried} assignments is faster"
    return (
        f"none of {tried} assignments is faster than one stream: the kernels need {serial:.0f} µs one after the other, "
        f"and no schedule needs less than {bound:.0f} µs ({most:.2f} times faster)"
    )


def claim_ids(context: RuleContext, assignment: Assignment, ids: Ints, why: str, key: str) -> Assignment:
    """Claims the nodes with an id, in the name of a rule, and then those that launch nothing, which follow."""
    claims = [(np.flatnonzero(ids == lane).astype(np.int32), lane, why) for lane in np.unique(ids[ids >= 0]).tolist()]
    return claim_rest(context, assignment.claim_many(claims, key), key)


def claim_rest(context: RuleContext, assignment: Assignment, key: str = Auto.key) -> Assignment:
    """Claims, in the name of a rule, nodes without a kernel: with what they are tied to, else with their last input or their consumers.

    Where consumers do not agree, the lowest of their streams is taken. Nodes that are tied to each other only follow the first of them.
    """
    assignment = _claim_tied(context, assignment, key)
    followed, _ = Propagate().apply(context, assignment)
    ids: Ints = followed.ids.copy()
    graph = context.flat.graph
    rest = (ids == UNASSIGNED) & ~context.flat.host
    consumers, starts, lanes = graph.out_dst.tolist(), graph.out_start.tolist(), ids.tolist()
    for node in context.order[::-1][rest[context.order[::-1]]].tolist():
        lane = min(
            (lanes[other] for other in consumers[starts[node] : starts[node + 1]] if lanes[other] >= 0), default=0
        )
        lanes[node] = lane
    ids = np.asarray(lanes, np.int32)
    free = (assignment.ids == UNASSIGNED) & ~context.flat.host
    together = context.order[(free & (context.tied >= 0))[context.order]]
    _, first, member = np.unique(context.tied[together], return_index=True, return_inverse=True)
    ids[together] = ids[together[first]][member]
    new = np.flatnonzero(free).astype(np.int32)
    return assignment.claim(new, ids[new], key, "launches no kernel: follows its inputs or its consumers")


def _claim_tied(context: RuleContext, assignment: Assignment, key: str) -> Assignment:
    """Claims what is tied to a node with an id. Of several ids in one group, which only hand-written rules leave, the lowest counts."""
    ids, tied = assignment.ids, context.tied
    placed = np.flatnonzero((tied >= 0) & (ids != UNASSIGNED) & ~context.flat.host)
    if not len(placed):
        return assignment
    lane = np.full(int(tied.max()) + 1, np.iinfo(np.int32).max, np.int32)
    np.minimum.at(lane, tied[placed], ids[placed])
    free = np.flatnonzero((tied >= 0) & (ids == UNASSIGNED) & ~context.flat.host)
    free = free[lane[tied[free]] != np.iinfo(np.int32).max].astype(np.int32)
    return assignment.claim(free, lane[tied[free]], key, "must share a stream with what is there")


@dataclass(frozen=True)
class Propagate:
    """NVIDIA's forward propagation made deterministic. It has no options.

    A node without an id takes the stream of the input that finishes last, data inputs before control inputs and lower slots first where
    several finish together. Where no input has an id, but all consumers have the same one, it takes theirs. Host nodes have no part in it.
    """

    key: ClassVar[str] = "propagate"

    @classmethod
    def from_options(cls, options: RuleOptions) -> Propagate:
        """Read the options of the rule from YAML."""
        return cls()

    def apply(self, context: RuleContext, assignment: Assignment) -> tuple[Assignment, tuple[Remark, ...]]:
        """Claim what has a claimed neighbour."""
        graph, host = context.flat.graph, context.flat.host
        seen = np.where(host, UNASSIGNED, assignment.ids)
        if not np.any(seen != UNASSIGNED):
            return assignment, ()
        ids: list[int] = seen.tolist()
        order = graph.topological
        finish = finish_times(graph, context.costs.time_us).tolist()
        waiting = order[((seen == UNASSIGNED) & ~host)[order]].tolist()
        by_inputs = _forward(graph, waiting, ids, finish)
        rest = [node for node in reversed(waiting) if ids[node] == UNASSIGNED]
        # What this settles has settled consumers only, so that another pass forward would find nothing.
        by_consumers = _backward(graph, rest, ids, host.tolist())
        final = np.asarray(ids, np.int32)
        for nodes, why in (
            (by_inputs, "follows the input that finishes last"),
            (by_consumers, "all its consumers are on this stream"),
        ):
            claimed = np.asarray(sorted(nodes), np.int32)
            assignment = assignment.claim(claimed, final[claimed], self.key, why)
        return assignment, ()


def _forward(graph: Graph, waiting: list[int], ids: list[int], finish: list[float]) -> list[int]:
    starts, sources, slots = graph.in_start.tolist(), graph.edges.src.tolist(), graph.edges.slot.tolist()
    done = []
    for node in waiting:
        best, by_control = -1.0, False
        for edge in range(starts[node], starts[node + 1]):
            stream = ids[sources[edge]]
            if stream == UNASSIGNED:
                continue
            end = finish[sources[edge]]
            # Control inputs have no order of their own, so that the lowest stream decides between them.
            if end > best or (end == best and slots[edge] == CONTROL and by_control and stream < ids[node]):
                best, by_control = end, slots[edge] == CONTROL
                ids[node] = stream
        if best >= 0.0:
            done.append(node)
    return done


def _backward(graph: Graph, waiting: list[int], ids: list[int], host: list[bool]) -> list[int]:
    starts, targets = graph.out_start.tolist(), graph.out_dst.tolist()
    done = []
    for node in waiting:
        streams = {ids[target] for target in targets[starts[node] : starts[node + 1]] if not host[target]}
        if len(streams) == 1 and UNASSIGNED not in streams:
            ids[node] = streams.pop()
            done.append(node)
    return done
