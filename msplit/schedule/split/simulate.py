"""How long a step on several GPUs takes.

Each GPU is the event-driven model of `schedule.simulate`, with a clock of its own: what runs on one slows nothing down on another. A
link is a device, too, on which one copy runs after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf

import numpy as np

from msplit.core.graph import Floats
from msplit.schedule.machine import Machine
from msplit.schedule.plan.plan import Plan
from msplit.schedule.problem import Problem
from msplit.schedule.simulate import Simulation


class _Device:
    """What runs on one GPU or link. All of it progresses at one rate, so that one virtual clock serves (see `schedule.simulate`)."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.running: list[tuple[float, int]] = []  # (virtual time, block): ends then
        self.used = (0.0, 0.0, 0.0)
        self.now = self.virtual = 0.0

    def rate(self) -> float:
        """Real time per virtual time of what runs now."""
        machine, many, (sms, bandwidth, issue) = self.machine, len(self.running), self.used
        others = 1 - 1 / many
        crowd = machine.crowd_us / machine.issue_us if machine.issue_us > 0 else 0.0
        slowest = max(
            1.0,
            sms,
            bandwidth,
            1.0 + machine.contention * sms * others,
            1.0 + crowd * issue * others,
            issue * max(many / machine.issue_lanes, 1.0),
        )
        return min(slowest, float(many)) if many > 1 else max(1.0, sms, bandwidth, issue)

    def ends(self) -> float:
        """When the first of what runs ends."""
        return self.now + (self.running[0][0] - self.virtual) * self.rate() if self.running else inf

    def start(self, now: float, block: int, work: float, demand: tuple[float, ...]) -> None:
        """Lets a block run."""
        if self.running:
            self.virtual += (now - self.now) / self.rate()
        self.now = now
        self.used = (self.used[0] + demand[0], self.used[1] + demand[1], self.used[2] + demand[2])
        heappush(self.running, (self.virtual + work, block))

    def end(self, demands: Sequence[tuple[float, ...]]) -> tuple[float, int]:
        """When the first block ends, and which."""
        self.now = self.ends()
        self.virtual, block = heappop(self.running)
        if self.running:
            gone = demands[block]
            self.used = (self.used[0] - gone[0], self.used[1] - gone[1], self.used[2] - gone[2])
        else:
            self.used, self.virtual = (0.0, 0.0, 0.0), 0.0
        return self.now, block


def simulate(problem: Problem, plan: Plan, device: Sequence[int], work_us: Floats, earliest_us: Floats) -> Simulation:
    """Plays a plan. O(n (log n + devices)) for n blocks and waits; with one device it says what `schedule.simulate` does.

    Args:
        device: Per stream of the plan.
        work_us: Per block.
        earliest_us: Per block, when it may start at the earliest.

    Raises:
        ValueError: The streams of the plan wait for each other in a circle.
    """
    count, machine = len(problem), problem.machine
    start, end = np.full(count, -1.0), np.full(count, -1.0)
    lanes, placed = plan.stream.tolist(), plan.order.tolist()
    following, missing = [-1] * count, [0] * count
    last: dict[int, int] = {}
    for node in placed:
        before = last.get(lanes[node], -1)
        if before >= 0:
            following[before] = node
            missing[node] = 1
        last[lanes[node]] = node
    waits = np.bincount(plan.wait_node, minlength=count)
    waiters: dict[int, list[int]] = {}
    for node, event in zip(plan.wait_node.tolist(), plan.wait_on.tolist(), strict=True):
        missing[node] += 1
        waiters.setdefault(event, []).append(node)
    more = (np.maximum(waits - 1, 0) * machine.join_us).tolist()
    work, ready = work_us.tolist(), earliest_us.tolist()
    demands = [tuple(row) for row in problem.demand.tolist()]
    devices = [_Device(machine) for _ in range(max(device, default=0) + 1)]
    upcoming: list[tuple[float, int]] = []
    now, left = 0.0, len(placed)
    for node in placed:
        if missing[node] == 0:
            heappush(upcoming, (ready[node], node))

    def over(node: int, wait: float) -> None:
        """One of the block's predecessors has ended, `wait` µs before it may start."""
        ready[node] = max(ready[node], now + wait)
        missing[node] -= 1
        if missing[node] == 0:
            heappush(upcoming, (max(ready[node] + more[node], now), node))

    while left:
        first = min(devices, key=_Device.ends)
        then = first.ends()
        if upcoming and upcoming[0][0] <= then:
            now, node = heappop(upcoming)
            start[node] = now
            devices[device[lanes[node]]].start(now, node, work[node], demands[node])
            continue
        if then == inf:
            raise ValueError("the streams of the plan wait for each other in a circle")
        now, ended = first.end(demands)
        end[ended] = now
        left -= 1
        for node in waiters.get(ended, ()):
            over(node, machine.wait_us)
        if following[ended] >= 0:
            over(following[ended], 0.0)
    return Simulation(now + machine.join_us * len(plan.join) + machine.step_us if placed else 0.0, start, end)
