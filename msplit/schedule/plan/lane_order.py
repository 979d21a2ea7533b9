"""The record order that keeps each stream on one lane of a replayed CUDA graph.

A CUDA graph knows no streams. When it replays, a node that joins several branches goes on in the lane of that parent which was
recorded first. So at every wait the previous node of the waiting stream should be recorded before the node that is waited for;
otherwise the waiting stream moves into the other one's lane, and two streams take turns where they could overlap.
"""

from __future__ import annotations

import heapq
from dataclasses import replace

import numpy as np

from msplit.schedule.plan.plan import Plan


def keep_lanes(plan: Plan) -> Plan:
    """The same plan recorded in another order: streams, their orders and the waits stay as they are.

    Kahn's algorithm over dependencies, stream orders and waits. Among ready nodes those come first whose recording lets no waiting
    stream lose its lane, in the order of the plan; a node that would make one lose it waits as long as anything else is ready.

    Measured on an H200: NASNet-mobile 2 to 5 % faster, other models within noise.
    """
    count = len(plan.order)
    place = np.full(len(plan.stream), -1, np.int64)
    place[plan.order] = np.arange(count)
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
    after: list[list[int]] = [[] for _ in range(count)]
    for number, producers in enumerate(before):
        for producer in producers:
            after[producer].append(number)
    waiting = [len(producers) for producers in before]
    welcome = [number for number in range(count) if waiting[number] == 0 and missing[number] == 0]
    deferred = [number for number in range(count) if waiting[number] == 0 and missing[number] > 0]
    heapq.heapify(welcome)
    heapq.heapify(deferred)
    recorded = [False] * count
    order = []
    while welcome or deferred:
        number = heapq.heappop(welcome if welcome else deferred)
        if recorded[number]:
            continue  # it was deferred once and became welcome later
        recorded[number] = True
        order.append(number)
        for event in hopes[number]:
            missing[event] -= 1
            if missing[event] == 0 and waiting[event] == 0 and not recorded[event]:
                heapq.heappush(welcome, event)
        for number_after in after[number]:
            waiting[number_after] -= 1
            if waiting[number_after] == 0:
                heapq.heappush(deferred if missing[number_after] else welcome, number_after)
    return replace(plan, order=plan.order[np.asarray(order, dtype=np.int64)] if count else plan.order)


def lost_lanes(plan: Plan) -> int:
    """Waits at which the waiting stream's previous node is recorded after the node that is waited for."""
    place = {int(node): number for number, node in enumerate(plan.order)}
    previous: dict[int, int] = {}
    last: dict[int, int] = {}
    for node in plan.order.tolist():
        lane = int(plan.stream[node])
        if lane in last:
            previous[node] = last[lane]
        last[lane] = node
    return sum(
        place[previous[waiter]] > place[event]
        for waiter, event in zip(plan.wait_node.tolist(), plan.wait_on.tolist(), strict=True)
        if waiter in previous
    )
