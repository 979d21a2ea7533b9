"""Recording in an order that keeps lanes changes nothing but the order."""

from __future__ import annotations

import numpy as np
from hypothesis import given

from msplit.core.dag import Dag
from msplit.schedule.plan.check import check
from msplit.schedule.plan.plan import make_plan, record_order
from msplit.schedule.plan.reorder import keep_lanes
from tests.schedule.plan.test_plan import assigned_dags, make


@given(assigned_dags())
def test_streams_and_waits_stay_and_the_plan_still_holds(case):
    dag, stream, weights = case
    plan = make(dag, stream, weights)
    better = keep_lanes(plan)
    assert sorted(better.order.tolist()) == sorted(plan.order.tolist())
    for lane in range(plan.streams):
        assert [n for n in better.order if stream[n] == lane] == [n for n in plan.order if stream[n] == lane]
    assert check(better, dag) == []
    recorded: set[int] = set()
    waits: dict[int, set[int]] = {}
    for node, event in zip(better.wait_node.tolist(), better.wait_on.tolist(), strict=True):
        waits.setdefault(node, set()).add(event)
    for node in better.order.tolist():
        assert waits.get(node, set()) <= recorded, "an event must be recorded before it is waited for"
        recorded.add(node)


def lost_lanes(plan) -> int:
    """Waits at which the waiting stream's previous node is recorded after the node that is waited for."""
    place = {int(node): number for number, node in enumerate(plan.order)}
    previous = {}
    last = {}
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


def test_a_wavefront_keeps_every_layer_on_its_lane():
    layers, steps = 6, 9

    def cell(layer, step):
        return layer * steps + step

    edges = [(cell(layer, step - 1), cell(layer, step)) for layer in range(layers) for step in range(1, steps)]
    edges += [(cell(layer - 1, step), cell(layer, step)) for layer in range(1, layers) for step in range(steps)]
    dag = Dag.of(layers * steps, *zip(*edges, strict=True))
    stream = np.repeat(np.arange(layers), steps).astype(np.int32)
    plan = make_plan(dag, stream, record_order(dag, np.ones(layers * steps)))
    assert lost_lanes(plan) > 0
    assert lost_lanes(keep_lanes(plan)) == 0


def test_a_plan_of_nothing_stays_empty():
    dag = Dag.of(2, [0], [1])
    plan = make_plan(dag, np.full(2, -1, np.int32), np.arange(2, dtype=np.int32))
    assert len(keep_lanes(plan).order) == 0
