"""How long a plan takes: an event-driven model of a GPU that replays it.

The kernels of one stream run in order. What runs at once shares three things: the SMs, the memory bandwidth and the rate at which
the device starts kernels. Where more than all of one is asked for, everything that runs is slowed down by the same factor
(processor sharing), and so it is by the delay that kernels cause each other when they start. Kernels for which there are SMs enough
slow each other down too, in caches and memory: each by the share of the SMs that the others keep busy, of which the mean over all that
run counts. All running blocks then progress at one common rate, so one virtual clock serves for all: a block
ends when that clock has advanced by its work, however the rate changes meanwhile, and an event costs a heap operation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import inf

import numpy as np

from msplit.core.graph import Floats, Ints
from msplit.schedule.plan.plan import Plan, make_plan
from msplit.schedule.problem import Problem


@dataclass(frozen=True, eq=False)
class Simulation:
    """What a plan does over time.

    Attributes:
        makespan_us: Of a step: until all streams have joined, and what every step takes whatever it runs. 0 where nothing runs.
        start_us: Per block when its first kernel starts, from the start of the first; -1 for joints.
        end_us: Per block when its last kernel ends; -1 for joints.
    """

    makespan_us: float
    start_us: Floats
    end_us: Floats


def plan_of(problem: Problem, stream: Ints, order: Ints | None = None) -> Plan:
    """The plan of an assignment, whatever stream it has for joints.

    `order` is a topological one of the blocks; by default those with the longest path to the end come first.
    """
    order = problem.by_rank if order is None else order
    return make_plan(problem.dag, np.where(problem.joints, -1, stream).astype(np.int32), order)


def simulate(problem: Problem, plan: Plan, work_us: Floats | None = None) -> Simulation:  # noqa: C901  one loop that every search runs in
    """Plays a plan. O(n log n) for n blocks and waits.

    Args:
        plan: Over the blocks of the problem; joints have stream -1 in it.
        work_us: Per block the time that it takes, in place of the problem's `work_us`.

    Raises:
        ValueError: The streams of the plan wait for each other in a circle.
    """
    count, machine = len(problem), problem.machine
    start, end = [-1.0] * count, [-1.0] * count
    following = [-1] * count
    missing = [0] * count  # how many of its predecessors, in its stream and by waits, have not ended
    last: dict[int, int] = {}
    placed = plan.order.tolist()
    lanes = plan.stream.tolist()
    for node in placed:
        before = last.get(lanes[node], -1)
        if before >= 0:
            following[before] = node
            missing[node] = 1
        last[lanes[node]] = node
    waits = [0] * count
    waiters: dict[int, list[int]] = {}
    for node, event in zip(plan.wait_node.tolist(), plan.wait_on.tolist(), strict=True):
        missing[node] += 1
        waits[node] += 1
        waiters.setdefault(event, []).append(node)
    more_waits = [max(many - 1, 0) * machine.join_us for many in waits]

    work = (problem.work_us if work_us is None else work_us).tolist()
    sms, bandwidth, issue = problem.demands
    wait_us = machine.wait_us
    ready = [0.0] * count  # the earliest start, over the predecessors that have ended
    upcoming: list[tuple[float, int]] = []  # (real time, block): may start then
    running: list[tuple[float, int]] = []  # (virtual time, block): ends then
    now = virtual = 0.0
    used_sms = used_bandwidth = used_issue = 0.0
    crowd = machine.crowd_us / machine.issue_us if machine.issue_us > 0 else 0.0
    lanes_at_once, contention = machine.issue_lanes, machine.contention
    for node in placed:
        if missing[node] == 0:
            heappush(upcoming, (0.0, node))
    left = len(placed)
    while running or upcoming:
        if running:
            # Real time per virtual time of what runs now. Written out: this is most of what scheduling a large graph takes.
            many = len(running)
            rate = 1.0  # and no less, even where a damaged profile's demands are not numbers
            if used_sms > rate:
                rate = used_sms
            if used_bandwidth > rate:
                rate = used_bandwidth
            if many > 1:
                others = (many - 1) / many
                slower = 1.0 + contention * used_sms * others
                if slower > rate:
                    rate = slower
                starts = 1.0 + crowd * used_issue * others
                if starts > rate:
                    rate = starts
                starts = used_issue * (many / lanes_at_once) if many > lanes_at_once else used_issue
                if starts > rate:
                    rate = starts
                if rate > many:
                    rate = float(many)  # together they are never slower than one after the other
            finish = now + (running[0][0] - virtual) * rate
            if upcoming and upcoming[0][0] <= finish:
                then, node = heappop(upcoming)
                virtual += (then - now) / rate
                now = then
            else:
                target, ended = heappop(running)
                virtual, now = target, finish
                end[ended] = now
                left -= 1
                if running:
                    used_sms -= sms[ended]
                    used_bandwidth -= bandwidth[ended]
                    used_issue -= issue[ended]
                else:
                    used_sms = used_bandwidth = used_issue = virtual = 0.0
                for node in waiters.get(ended, ()):
                    if ready[node] < now + wait_us:
                        ready[node] = now + wait_us
                    missing[node] -= 1
                    if missing[node] == 0:
                        heappush(upcoming, (max(ready[node] + more_waits[node], now), node))
                node = following[ended]
                if node < 0:
                    continue
                if ready[node] < now:
                    ready[node] = now
                missing[node] -= 1
                if missing[node]:
                    continue
                then = ready[node] + more_waits[node]
                if then > now or (upcoming and upcoming[0] < (now, node)):
                    heappush(upcoming, (then, node))
                    continue
                # Nothing comes before it: it starts at once.
        else:
            now, node = heappop(upcoming)
        start[node] = now
        used_sms += sms[node]
        used_bandwidth += bandwidth[node]
        used_issue += issue[node]
        heappush(running, (virtual + work[node], node))
    if left:
        raise ValueError("the streams of the plan wait for each other in a circle")
    makespan = now + machine.join_us * len(plan.join) + machine.step_us if placed else 0.0
    return Simulation(makespan, np.asarray(start), np.asarray(end))


SWITCHES: tuple[tuple[str, Mapping[str, float]], ...] = (
    ("contention", {"contention": 0.0}),
    ("company", {"company": 1.0}),
    ("starts and waits", {"wait_us": 0.0, "join_us": 0.0, "issue_us": 0.0, "crowd_us": 0.0, "node_us": 0.0}),
    ("bandwidth", {"bandwidth": inf}),
    ("the step itself", {"step_us": 0.0}),
)
"""What is switched off, and the fields of `Machine` that do it. See there for what they mean."""


@dataclass(frozen=True)
class Breakdown:
    """The simulated time of a step in parts, µs.

    Attributes:
        kernels_us: What the kernels take where nothing but the order and the SMs hold them up: the critical path, where those suffice.
        parts: What else it goes into, by the names in `SWITCHES`. Each is what the step is shorter when that is switched off after those
            before it; a scheduling anomaly can make one a little negative.
    """

    makespan_us: float
    kernels_us: float
    parts: Mapping[str, float]


def breakdown(problem: Problem, plan: Plan) -> Breakdown:
    """Takes the simulated time of a plan over the blocks of a problem apart."""
    whole = left = simulate(problem, plan).makespan_us
    parts = {}
    for name, off in SWITCHES:
        problem = replace(problem, machine=replace(problem.machine, **off))
        rest = simulate(problem, plan).makespan_us
        parts[name], left = left - rest, rest
    return Breakdown(whole, left, parts)
