"""A second, independent proof that a plan orders everything it must.

It shares no code and no idea with `plan`: it knows nothing of clocks or minimal waits, and asks of the record order only that each wait
comes behind its event. Then it asks one question of two matrices. `needs[v, s]`: how far into stream s do the ancestors of v in the graph
reach? `ended[v, s]`: how far into stream s is everything over when v starts, going only by the order of each stream and the waits? The plan
is right if and only if ``ended >= needs`` everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from msplit.core.dag import Dag
from msplit.core.graph import Ints
from msplit.schedule.plan import Plan

MOST = 20
"""Violations that are told."""

_LANES_AT_ONCE = 64
"""Columns of the matrices held at a time: bounds memory for plans with very many streams."""


@dataclass(frozen=True)
class Violation:
    """A node that may start before something it needs, the producer, has ended; that is -1 where the plan can not run at all."""

    producer: int
    consumer: int
    text: str


def check(plan: Plan, dag: Dag) -> list[Violation]:
    """Proves that a plan orders all data and control edges of a graph, or says where it does not, up to `MOST` times.

    Raises:
        ValueError: `dag` has a cycle.
    """
    rows = {int(node): row for row, node in enumerate(plan.order)}
    place, members = _places(plan)
    broken = _incomplete(plan, rows)
    if broken:
        return broken
    before = _happens_before_edges(plan, rows)
    order = _topological(before)
    if order is None:
        return [Violation(-1, int(plan.order[0]), "streams wait for each other in a circle: the plan can never end")]
    found = _recorded_late(plan, rows)
    if found:
        heard = np.asarray([rows[int(node)] for node in plan.wait_node]) > [rows[int(node)] for node in plan.wait_on]
        plan = replace(plan, wait_node=plan.wait_node[heard], wait_on=plan.wait_on[heard])
        before = _happens_before_edges(plan, rows)
        order = list(range(len(before)))  # what is left leads from earlier rows to later ones
    start, src, lane = dag.start.tolist(), dag.src.tolist(), plan.stream.tolist()
    producers = [src[first:last] for first, last in pairwise(start)]
    whole = _topological(producers)
    if whole is None:
        raise ValueError("the graph has a cycle")
    nodes = plan.order.tolist()
    lane_of_row, place_of_row = [lane[node] for node in nodes], [place[node] for node in nodes]
    for low in range(0, max(plan.streams, 1), _LANES_AT_ONCE):
        lanes = range(low, min(low + _LANES_AT_ONCE, plan.streams))
        ended = _reached(order, before, lane_of_row, place_of_row, lanes)
        needs = _reached(whole, producers, lane, place, lanes)
        found += _compare(plan, ended, needs, members, low)[: MOST - len(found)]
        if len(found) >= MOST:
            break
    return found


def _places(plan: Plan) -> tuple[list[int], list[list[int]]]:
    """Per node its place in its stream, and per stream its nodes."""
    members: list[list[int]] = [[] for _ in range(plan.streams)]
    place = [-1] * len(plan.stream)
    for node in plan.order.tolist():
        lane = int(plan.stream[node])
        place[node] = len(members[lane])
        members[lane].append(node)
    return place, members


def _incomplete(plan: Plan, rows: dict[int, int]) -> list[Violation]:
    expected = np.flatnonzero(plan.stream >= 0)
    missing = [int(node) for node in expected if int(node) not in rows]
    stray = [int(node) for node in (*plan.wait_node, *plan.wait_on) if int(node) not in rows]
    return [Violation(-1, node, "has a stream but is not in the plan's order") for node in missing] + [
        Violation(-1, node, "waits or is waited for but is not in the plan") for node in stray
    ]


def _recorded_late(plan: Plan, rows: dict[int, int]) -> list[Violation]:
    """Waits that come before their event in the order of recording.

    A stream that waits for an event that nobody has recorded yet waits for nothing: the event is done, as CUDA sees it. So such a wait
    orders nothing, whatever else there is.
    """
    found: list[Violation] = []
    for waiter, event in zip(plan.wait_node.tolist(), plan.wait_on.tolist(), strict=True):
        if rows[waiter] <= rows[event] and len(found) < MOST:
            found.append(Violation(event, waiter, "waits for an event that is recorded after it, and so for nothing"))
    return found


def _happens_before_edges(plan: Plan, rows: dict[int, int]) -> list[list[int]]:
    """Per row of the plan's order the rows that end before it starts: its stream's previous node and what it waits for."""
    before: list[list[int]] = [[] for _ in rows]
    last: dict[int, int] = {}
    for row, node in enumerate(plan.order.tolist()):
        lane = int(plan.stream[node])
        if lane in last:
            before[row].append(last[lane])
        last[lane] = row
    for waiter, event in zip(plan.wait_node.tolist(), plan.wait_on.tolist(), strict=True):
        before[rows[waiter]].append(rows[event])
    return before


def _topological(before: list[list[int]]) -> list[int] | None:
    """Depth-first order on an explicit stack, None on a cycle. (`plan` uses Kahn's algorithm.)"""
    state = bytearray(len(before))
    order = []
    for root in range(len(before)):
        if state[root]:
            continue
        stack = [(root, iter(before[root]))]
        state[root] = 1
        while stack:
            row, producers = stack[-1]
            for producer in producers:
                if state[producer] == 1:
                    return None
                if state[producer] == 0:
                    state[producer] = 1
                    stack.append((producer, iter(before[producer])))
                    break
            else:
                state[row] = 2
                order.append(row)
                stack.pop()
    return order


def _reached(order: list[int], before: list[list[int]], lane: list[int], place: list[int], lanes: range) -> Ints:
    """Row per node: how far into each stream reaches what comes before it."""
    reached = np.full((len(order), len(lanes)), -1, np.int32)
    for node in order:
        line = reached[node]
        for producer in before[node]:
            np.maximum(line, reached[producer], out=line)
            if lane[producer] in lanes:
                column = lane[producer] - lanes.start
                line[column] = max(line[column], place[producer])
    return reached


def _compare(plan: Plan, ended: Ints, needs: Ints, members: list[list[int]], low: int) -> list[Violation]:
    found = []
    for row, column in np.argwhere(ended < needs[plan.order])[:MOST]:
        stream, consumer = low + int(column), int(plan.order[row])
        producer = members[stream][int(needs[consumer, column])]
        found.append(Violation(producer, consumer, f"may start before its input on stream {stream} has ended"))
    return found
