"""A record order for a given assignment: what each stream would run if it always took its most urgent block that is ready."""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np

from msplit.graph import Ints
from msplit.schedule.problem import Problem


def timed_order(problem: Problem, stream: Ints) -> Ints:
    """Topological order of the blocks by when they would start.

    The order by rank alone lets an urgent block that is not ready yet hold up a less urgent one on its stream. This one plays the
    graph: when a stream is free it takes the block with the longest path to the end among those whose producers have ended. List
    scheduling with the machines given (Graham 1969); nothing slows down here. O(n log n + m).

    Args:
        problem: The blocks.
        stream: Per block its stream; what joints have is ignored.
    """
    count, wait = len(problem), problem.machine.wait_us
    out_start, out = (column.tolist() for column in problem.consumers)
    missing = np.diff(problem.dag.start).tolist()
    lanes, key, work = stream.tolist(), (-problem.rank).tolist(), problem.work_us.tolist()
    joint = problem.joints.tolist()
    arrival = [0.0] * count
    ready: dict[int, list[tuple[float, int]]] = {lane: [] for lane in sorted(set(lanes))}
    idle = dict.fromkeys(ready, True)
    order: list[int] = []
    events: list[
        tuple[float, int, int]
    ] = []  # (time, 0 ready | 1 end, block); ready first, so that an end sees all that is ready
    for node in range(count):
        if missing[node] == 0:
            heappush(events, (0.0, 0, node))
    while events:
        now = events[0][0]
        touched: dict[int, None] = {}
        while events and events[0][0] <= now:
            _, ended, node = heappop(events)
            lane = lanes[node]
            if not ended and not joint[node]:
                heappush(ready[lane], (key[node], node))
                touched[lane] = None
                continue
            if joint[node]:
                order.append(node)
            else:
                idle[lane] = True
                touched[lane] = None
            for consumer in out[out_start[node] : out_start[node + 1]]:
                crossing = lanes[consumer] != lane and not joint[consumer] and not joint[node]
                arrival[consumer] = max(arrival[consumer], now + wait if crossing else now)
                missing[consumer] -= 1
                if missing[consumer] == 0:
                    heappush(events, (arrival[consumer], 0, consumer))
        for lane in touched:
            if idle[lane] and ready[lane]:
                node = heappop(ready[lane])[1]
                idle[lane] = False
                order.append(node)
                heappush(events, (now + work[node], 1, node))
    return np.asarray(order, np.int32)
