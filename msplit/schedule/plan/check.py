"""A second, independent proof that a plan orders everything it must.

It shares no code and no idea with `plan`: it knows nothing of clocks or minimal waits, and asks of the record order only that each wait
comes behind its event. Then it asks one question of two matrices. `needs[v, s]`: how far into stream s do the ancestors of v in the graph
reach? `ended[v, s]`: how far into stream s is everything over when v starts, going only by the order of each stream and the waits? The plan
is right if and only if ``ended >= needs`` everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from msplit.core.dag import Dag
from msplit.core.graph import Ints
from msplit.schedule.plan.plan import Plan

_LANES_AT_ONCE = 64
"""Columns of the matrices held at a time: bounds memory for plans with very many streams."""


@dataclass(frozen=True)
class Violation:
    """A node that may start before something it needs has ended.

    Attributes:
        producer: What must end first; -1 where the plan can not run at all.
        consumer: What must wait.
        text: What is wrong.
    """

    producer: int
    consumer: int
    text: str


def check(plan: Plan, dag: Dag, *, also: Iterable[tuple[int, int]] = (), limit: int = 20) -> list[Violation]:
    """Proves a plan, or says where it fails.

    Args:
        plan: The plan.
        dag: Data and control edges between all nodes, those without a stream included.
        also: Further pairs (first, second) of nodes on streams that must not overlap: the last reader of a buffer, its next writer.
        limit: How many violations to collect.
    """
    rows = {int(node): row for row, node in enumerate(plan.order)}
    place, members = _places(plan)
    broken = _incomplete(plan, rows)
    if broken:
        return broken
    happens = _topological(len(plan.order), _happens_before_edges(plan, rows))
    if happens is None:
        return [Violation(-1, int(plan.order[0]), "streams wait for each other in a circle: the plan can never end")]
    found = _recorded_late(plan, rows, limit)
    if found:
        heard = np.asarray([rows[int(node)] for node in plan.wait_node]) > [rows[int(node)] for node in plan.wait_on]
        plan = replace(plan, wait_node=plan.wait_node[heard], wait_on=plan.wait_on[heard])
        happens = _topological(len(plan.order), _happens_before_edges(plan, rows))
        assert happens is not None  # what is left leads from earlier rows to later ones
    order, before = happens
    pairs = [(int(first), int(second)) for first, second in also]
    for low in range(0, max(plan.streams, 1), _LANES_AT_ONCE):
        lanes = range(low, min(low + _LANES_AT_ONCE, plan.streams))
        ended = _ended(order, before, plan, place, lanes)
        found += _compare(plan, ended, _needs(dag, plan, place, lanes), members, lanes, limit - len(found))
        for first, second in pairs:
            lane = int(plan.stream[first])
            if lane in lanes and ended[rows[second], lane - low] < place[first]:
                found.append(Violation(first, second, "shares memory with a node that may still run"))
        if len(found) >= limit:
            break
    return found[:limit]


def _places(plan: Plan) -> tuple[dict[int, int], list[list[int]]]:
    members: list[list[int]] = [[] for _ in range(plan.streams)]
    place = {}
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


def _recorded_late(plan: Plan, rows: dict[int, int], limit: int) -> list[Violation]:
    """Waits that come before their event in the order of recording.

    A stream that waits for an event that nobody has recorded yet waits for nothing: the event is done, as CUDA sees it. So such a wait
    orders nothing, whatever else there is.
    """
    found: list[Violation] = []
    for waiter, event in zip(plan.wait_node.tolist(), plan.wait_on.tolist(), strict=True):
        if rows[waiter] <= rows[event] and len(found) < limit:
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


def _topological(count: int, before: list[list[int]]) -> tuple[list[int], list[list[int]]] | None:
    """Depth-first order on an explicit stack, None on a cycle. (`plan` and `order` use Kahn's algorithm.)"""
    state = bytearray(count)
    order = []
    for root in range(count):
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
    return order, before


def _ended(order: list[int], before: list[list[int]], plan: Plan, place: dict[int, int], lanes: range) -> Ints:
    ended = np.full((len(order), len(lanes)), -1, np.int32)
    nodes = plan.order.tolist()
    lane_of = plan.stream.tolist()
    for row in order:
        line = ended[row]
        for producer in before[row]:
            np.maximum(line, ended[producer], out=line)
            lane = lane_of[nodes[producer]]
            if lane in lanes:
                column = lane - lanes.start
                line[column] = max(line[column], place[nodes[producer]])
    return ended


def _needs(dag: Dag, plan: Plan, place: dict[int, int], lanes: range) -> Ints:
    """Row per node of the graph, in the graph's numbering: how far its ancestors reach into each stream."""
    count = len(dag)
    needs = np.full((count, len(lanes)), -1, np.int32)
    start, src, lane_of = dag.start.tolist(), dag.src.tolist(), plan.stream.tolist()
    producers = [src[start[node] : start[node + 1]] for node in range(count)]
    sorted_rows = _topological(count, producers)
    if sorted_rows is None:
        raise ValueError("the graph has a cycle")
    for node in sorted_rows[0]:
        line = needs[node]
        for producer in producers[node]:
            np.maximum(line, needs[producer], out=line)
            lane = lane_of[producer]
            if lane in lanes:
                column = lane - lanes.start
                line[column] = max(line[column], place[producer])
    return needs


def _compare(
    plan: Plan, ended: Ints, needs: Ints, members: list[list[int]], lanes: range, limit: int
) -> list[Violation]:
    found = []
    late = np.argwhere(ended < needs[plan.order])
    for row, column in late[: max(limit, 0)]:
        lane = lanes.start + int(column)
        consumer = int(plan.order[row])
        producer = members[lane][int(needs[consumer, column])]
        found.append(Violation(producer, consumer, f"may start before its input on stream {lane} has ended"))
    return found
