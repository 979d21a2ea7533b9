"""Simulation of plans: the event-driven model of a GPU, record orders, and what an assignment is worth.

Simulates a plan: an event-driven model of a GPU that replays it.

The kernels of one stream run in order. What runs at once shares three things: the SMs, the memory bandwidth and the rate at which
the device starts kernels. Where more than all of one is asked for, everything that runs is slowed down by the same factor
(processor sharing), and so it is by the delay that kernels cause each other when they start. Kernels for which there are SMs enough
slow each other down too, in caches and memory: each by the share of the SMs that the others keep busy, of which the mean over all that
run counts. All running blocks then progress at one common rate, so one virtual clock serves for all: a block
ends when that clock has advanced by its work, however the rate changes meanwhile, and an event costs a heap operation.

Record orders made for given streams: one that keeps each stream on one lane of a replayed CUDA graph, one by when blocks would start.

A CUDA graph knows no streams. When it replays, a node that joins several branches goes on in the lane of that parent which was
recorded first. So at every wait the previous node of the waiting stream should be recorded before the node that is waited for;
otherwise the waiting stream moves into the other one's lane, and two streams take turns where they could overlap.

What an assignment is worth: its plan, in the better of two record orders, and how long the simulator says it takes.

Costs are never right, and a plan whose branches are just hidden behind the longest one is slower where one of them takes a little
longer. So plans are compared by their mean makespan over several simulations in which the time of every block is off by about a tenth.
(On an H200, of assignments of Inception-v3 that the simulator takes for equal, those with room to spare were up to 5 % faster; the rank
correlation rose from 0.85 to 0.97. Sampling durations is how stochastic scheduling compares static plans: Ludwig, Möhring and Stork,
"A computational study on bounding the makespan distribution in stochastic project networks", Annals of Operations Research 2001.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from heapq import heapify, heappop, heappush
from math import inf

import numpy as np

from msplit.core.dag import Dag
from msplit.core.graph import Floats, Ints
from msplit.schedule.plan import Plan, make_plan, places, topological
from msplit.schedule.problem import Problem


@dataclass(frozen=True, eq=False)
class Simulation:
    """A simulated run of a plan over time.

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
    following, needed, waits, waiters = plan.links
    missing, placed = needed.copy(), plan.order.tolist()
    more_waits = [(many - 1 if many > 1 else 0) * machine.join_us for many in waits]

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
    # Begin with the blocks that wait for nothing.
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
            # The next event: a block that is ready by then starts, or the running one that ends first ends.
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
                # Blocks on other streams that wait for the one that ended, at the price of the wait.
                for node in waiters.get(ended, ()):
                    if ready[node] < now + wait_us:
                        ready[node] = now + wait_us
                    missing[node] -= 1
                    if missing[node] == 0:
                        heappush(upcoming, (max(ready[node] + more_waits[node], now), node))
                # The next block of its stream, which may start at once.
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
            # Nothing runs: time goes on to the next start.
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
"""Effects that can be switched off, and the fields of `Machine` that do it. See there for what they mean."""


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


def keep_lanes(plan: Plan) -> Plan:
    """This plan recorded in another order: streams, their orders and the waits stay as they are.

    Kahn's algorithm over dependencies, stream orders and waits. Among ready nodes those come first whose recording lets no waiting
    stream lose its lane, in the order of the plan; a node that would make one lose it waits as long as anything else is ready.

    Measured on an H200: NASNet-mobile 2 to 5 % faster, other models within noise.
    """
    count = len(plan.order)
    place = np.full(len(plan.stream), -1, np.int64)
    place[plan.order] = np.arange(count)
    # What must come before each node: the node before it on its stream, and what it waits for.
    before: list[list[int]] = [[] for _ in range(count)]  # what must be recorded earlier
    last: dict[int, int] = {}
    previous = [-1] * count  # on its stream
    lanes = plan.stream[plan.order].tolist()
    for number, lane in enumerate(lanes):
        if lane in last:
            previous[number] = last[lane]
            before[number].append(last[lane])
        last[lane] = number
    # Waits and stream order cover every dependency of the graph: that is what a plan is.
    waits = list(zip(place[plan.wait_node].tolist(), place[plan.wait_on].tolist(), strict=True))
    hopes: list[list[int]] = [[] for _ in range(count)]  # recorded -> nodes that are better recorded after it
    missing = [0] * count
    for waiter, event in waits:
        before[waiter].append(event)
        if previous[waiter] >= 0:
            hopes[previous[waiter]].append(event)
            missing[event] += 1
    # The other way round, and the nodes that can be recorded: welcome where no stream loses its lane by it.
    after: list[list[int]] = [[] for _ in range(count)]
    for number, producers in enumerate(before):
        for producer in producers:
            after[producer].append(number)
    waiting = [len(producers) for producers in before]
    welcome = [number for number in range(count) if waiting[number] == 0 and missing[number] == 0]
    deferred = [number for number in range(count) if waiting[number] == 0 and missing[number] > 0]
    heapify(welcome)
    heapify(deferred)
    recorded = [False] * count
    order = []
    while welcome or deferred:
        number = heappop(welcome if welcome else deferred)
        if recorded[number]:
            continue  # it was deferred once and became welcome later
        recorded[number] = True
        order.append(number)
        for event in hopes[number]:
            missing[event] -= 1
            if missing[event] == 0 and waiting[event] == 0 and not recorded[event]:
                heappush(welcome, event)
        for number_after in after[number]:
            waiting[number_after] -= 1
            if waiting[number_after] == 0:
                heappush(deferred if missing[number_after] else welcome, number_after)
    return replace(plan, order=plan.order[np.asarray(order, dtype=np.int64)] if count else plan.order)


def timed_order(problem: Problem, stream: Ints) -> Ints:
    """Topological order of the blocks by when they would start.

    The order by rank alone lets an urgent block that is not ready yet hold up a less urgent one on its stream. This one plays the
    graph: when a stream is free it takes the block with the longest path to the end among those whose producers have ended. List
    scheduling with the machines given (Graham 1969); nothing slows down here. O(n log n + m).
    """
    count = len(problem)
    out_start, out, hold = _edges(problem, stream)
    missing = np.diff(problem.dag.start).tolist()
    lanes, work = stream.tolist(), problem.work_us.tolist()
    joint, feeds_joint = problem.joints.tolist(), _feeds_joint(problem)
    place, node_at = places(problem.rank)
    arrival = [0.0] * count
    ready: dict[int, list[int]] = {lane: [] for lane in sorted(set(lanes))}  # places
    idle = dict.fromkeys(ready, True)
    order: list[int] = []
    # (time, block that is ready | count + block that ends): ready first, so that an end sees all that is ready.
    events = [(0.0, node) for node in range(count) if missing[node] == 0]
    while events:
        now = events[0][0]
        touched: list[int] = []
        while events and events[0][0] <= now:
            node = heappop(events)[1]
            if node < count and not joint[node]:
                lane = lanes[node]
                heappush(ready[lane], place[node])
                touched.append(lane)
                continue
            if node < count:
                order.append(node)
                queued = True  # others may be ready just now, and come first
            else:
                node -= count
                lane = lanes[node]
                idle[lane] = True
                touched.append(lane)
                queued = feeds_joint[node]
            for edge in range(out_start[node], out_start[node + 1]):
                consumer, when = out[edge], now + hold[edge]
                if when > arrival[consumer]:
                    arrival[consumer] = when
                missing[consumer] -= 1
                if missing[consumer]:
                    continue
                if queued or arrival[consumer] > now:
                    heappush(events, (arrival[consumer], consumer))
                else:
                    lane = lanes[consumer]
                    heappush(ready[lane], place[consumer])
                    touched.append(lane)
        for lane in touched:
            if idle[lane] and ready[lane]:
                node = node_at[heappop(ready[lane])]
                idle[lane] = False
                order.append(node)
                heappush(events, (now + work[node], count + node))
    return np.asarray(order, np.int32)


def _edges(problem: Problem, stream: Ints) -> tuple[list[int], list[int], list[float]]:
    """The consumers of each block, as in `Problem.consumers`, and what each edge costs: a wait where it crosses streams."""
    start, dst = problem.consumers
    src = np.repeat(np.arange(len(problem)), np.diff(start))
    crossing = (stream[src] != stream[dst]) & ~problem.joints[src] & ~problem.joints[dst]
    return start.tolist(), dst.tolist(), (crossing * problem.machine.wait_us).tolist()


def _feeds_joint(problem: Problem) -> list[bool]:
    feeds = np.zeros(len(problem), bool)
    feeds[problem.dag.src[problem.joints[problem.dag.dst()]]] = True
    return feeds.tolist()


BOTH_ORDERS = 20_000
"""Up to this many blocks both record orders are tried; above it the timed one, which is rarely worse."""

SPREAD = 0.1
"""Standard deviation of a block's time in the simulations that plans are compared by, as a share of it."""

TURNS = (0.7548776662466927, 0.5698402909980532)
"""Powers of the plastic number: multiples of them, without what is before the point, fill the square evenly (Roberts's R2 sequence)."""

LARGEST_VARIED = 5_000
"""Up to this many blocks. Above it one simulation has to do: the means of many blocks in a row hardly vary."""

WAIT_PRICE = 0.1
"""Fixed cost of a wait beside the time it takes, in `join_us`: the device has to send and receive a signal even where nobody is late."""


@dataclass(frozen=True, eq=False)
class Evaluation:
    """An assignment, worked out. Its record order is of all blocks, joints included."""

    problem: Problem
    stream: Ints
    order: Ints
    plan: Plan
    simulation: Simulation

    @property
    def at_best_us(self) -> float:
        """The makespan, and the price of the waits. The mean of maxima is no less than the maximum of the means, so that the score is not
        below it, but for scheduling anomalies."""
        return self.simulation.makespan_us + WAIT_PRICE * self.problem.machine.join_us * self.plan.waits

    @cached_property
    def score_us(self) -> float:
        """The mean makespan when times vary, and the price of the waits: what is compared."""
        if self.plan.streams < 2 or len(self.problem) > LARGEST_VARIED:
            return self.at_best_us
        makespans = [simulate(self.problem, self.plan, work).makespan_us for work in varied(self.problem)]
        return self.at_best_us + sum(makespans) / len(makespans) - self.simulation.makespan_us


def evaluate(problem: Problem, stream: Ints, order: Ints | None = None) -> Evaluation:
    """Plans and simulates an assignment, in a record order or else in the better of the order by rank and the timed order."""
    orders = [timed_order(problem, stream)] if order is None else [order]
    if order is None and len(problem) <= BOTH_ORDERS:
        orders.insert(0, problem.by_rank)
    found = []
    for one in orders:
        plan = plan_of(problem, stream, one)
        found.append(Evaluation(problem, stream, one, plan, simulate(problem, plan)))
    return min(found, key=lambda evaluation: evaluation.at_best_us)


@lru_cache(maxsize=8)  # a search asks for those of one problem thousands of times
def varied(problem: Problem) -> list[Floats]:
    """Work of the blocks with their times off by `SPREAD`, up and down in pairs, so that the means are the times themselves.

    The same for the same problem on every machine: no random numbers.
    """
    found = []
    for turn in TURNS:
        even = np.modf(np.arange(1, len(problem) + 1) * turn)[0] * 2 - 1  # between -1 and 1, its deviation 1 / sqrt(3)
        found += [problem.work_us * (1 + sign * SPREAD * np.sqrt(3) * even) for sign in (1, -1)]
    return found


def node_order(problem: Problem, order: Ints, dag: Dag) -> Ints:
    """The record order of the graph that a problem was made from, in its own numbering: its nodes in the order of their blocks.

    Nodes that launch nothing come as early as they can.
    """
    position = np.empty(len(problem), np.float64)
    position[order] = np.arange(len(order))
    if not len(problem):
        return topological(dag)
    return topological(dag, np.where(problem.block >= 0, -position[np.maximum(problem.block, 0)], np.inf))
