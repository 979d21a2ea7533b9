"""A record order for a given assignment: what each stream would run if it always took its most urgent block that is ready."""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np

from msplit.core.graph import Ints
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
    count = len(problem)
    out_start, out, hold = _edges(problem, stream)
    missing = np.diff(problem.dag.start).tolist()
    lanes, work = stream.tolist(), problem.work_us.tolist()
    joint, feeds_joint = problem.joints.tolist(), _feeds_joint(problem)
    # Blocks by rank, then by number: a heap of places in this order is faster than one of pairs.
    by_rank = np.argsort(-problem.rank, kind="stable")
    at = np.empty(count, np.int64)
    at[by_rank] = np.arange(count)
    place, node_at = at.tolist(), by_rank.tolist()
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
