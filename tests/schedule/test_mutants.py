"""Broken plans: the checker finds each, and no other.

One wait is dropped: the checker says so whenever that leaves an edge unordered, and only then. Or streams are recorded in another order:
it says so whenever a wait comes before its event, and only then.

The oracle is a third implementation: the set of all ancestors of each node, as a bit mask, over stream order and waits.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from msplit.core.dag import Dag
from msplit.schedule.plan import Plan, make_plan, record_order
from msplit.schedule.plan_check import check
from msplit.schedule.simulate import keep_lanes
from tests.campaign import campaign
from tests.schedule.problems import random_dag


def reached(plan: Plan, order: list[int]) -> dict[int, int]:
    """Per node on a stream the mask of all nodes that are over before it starts, itself included."""
    before: dict[int, list[int]] = {node: [] for node in order}
    last: dict[int, int] = {}
    for node in order:
        lane = int(plan.stream[node])
        if lane in last:
            before[node].append(last[lane])
        last[lane] = node
    for node, event in zip(plan.wait_node.tolist(), plan.wait_on.tolist(), strict=True):
        before[node].append(event)
    masks: dict[int, int] = {}
    for node in order:
        mask = 1 << node
        for earlier in before[node]:
            mask |= masks[earlier]
        masks[node] = mask
    return masks


def needed(dag: Dag, order: list[int], placed: np.ndarray) -> dict[int, int]:
    """Per node the mask of the nodes on streams that it depends on, through whatever launches nothing."""
    masks: dict[int, int] = {}
    for node in order:
        mask = 0
        for producer in dag.src[dag.start[node] : dag.start[node + 1]].tolist():
            mask |= masks[producer] | (1 << producer if placed[producer] else 0)
        masks[node] = mask
    return masks


def orders_everything(plan: Plan, dag: Dag, topological: list[int]) -> bool:
    needs = needed(dag, topological, plan.stream >= 0)
    have = reached(plan, plan.order.tolist())
    return all(needs[node] & ~have[node] == 0 for node in have)


def mutants(count: int, seed: int = 0):
    """Plans with one wait dropped: (plan, graph, a topological order). To every third some waits are added first that nobody needs."""
    random = np.random.default_rng(seed)
    made = 0
    while made < count:
        nodes = int(random.integers(3, 60))
        dag = random_dag(int(random.integers(2**31)), nodes, float(random.choice([0.03, 0.08, 0.2, 0.4])))
        lowest = -1 if random.random() < 0.5 else 0
        stream = random.integers(lowest, int(random.integers(2, 9)), nodes).astype(np.int32)
        order = record_order(dag, random.random(nodes))
        plan = make_plan(dag, stream, order)
        if random.random() < 0.5:
            plan = keep_lanes(plan)
        if random.random() < 0.33:
            plan = with_more_waits(plan, random)
        if not plan.waits:
            continue
        assert check(plan, dag) == []
        dropped = int(random.integers(plan.waits))
        keep = np.arange(plan.waits) != dropped
        yield replace(plan, wait_node=plan.wait_node[keep], wait_on=plan.wait_on[keep]), dag, order.tolist()
        made += 1


def with_more_waits(plan: Plan, random: np.random.Generator) -> Plan:
    """The plan with waits of later nodes for earlier ones: right, but more than it needs."""
    count = len(plan.order)
    pairs = []
    for _ in range(int(random.integers(1, 5))):
        first, second = sorted(random.integers(0, count, 2).tolist()) if count else (0, 0)
        node, event = int(plan.order[second]), int(plan.order[first]) if count else 0
        if first < second and plan.stream[node] != plan.stream[event]:
            pairs.append((node, event))
    node = np.asarray([node for node, _ in pairs], np.int32)
    event = np.asarray([event for _, event in pairs], np.int32)
    return replace(plan, wait_node=np.append(plan.wait_node, node), wait_on=np.append(plan.wait_on, event))


def judge(count: int) -> tuple[int, int]:
    """(broken, still right) among so many mutants. The checker is of one mind with the oracle about every one."""
    broken = right = 0
    for plan, dag, order in mutants(count):
        holds = orders_everything(plan, dag, order)
        assert (check(plan, dag) == []) == holds
        broken += not holds
        right += holds
    return broken, right


def test_of_400_plans_with_one_wait_dropped_every_broken_one_is_caught():
    broken, right = judge(400)
    assert broken > 300
    assert right > 10


def interleavings(count: int, seed: int = 0):
    """Plans whose streams are recorded in another order, each stream as before: (plan, graph, whether every wait finds its event)."""
    random = np.random.default_rng(seed)
    made = 0
    while made < count:
        nodes = int(random.integers(3, 60))
        dag = random_dag(int(random.integers(2**31)), nodes, float(random.choice([0.03, 0.08, 0.2, 0.4])))
        stream = random.integers(0, int(random.integers(2, 9)), nodes).astype(np.int32)
        plan = make_plan(dag, stream, record_order(dag, random.random(nodes)))
        if not plan.waits:
            continue
        lanes = [plan.order[plan.stream[plan.order] == lane].tolist() for lane in range(plan.streams)]
        turns = random.permutation(plan.stream[plan.order]).tolist()
        order = np.asarray([lanes[lane].pop(0) for lane in turns], np.int32)
        row = np.empty(nodes, np.int32)
        row[order] = np.arange(nodes, dtype=np.int32)
        yield replace(plan, order=order), dag, bool((row[plan.wait_on] < row[plan.wait_node]).all())
        made += 1


def judge_interleavings(count: int) -> tuple[int, int]:
    """(refused, accepted) of so many: refused exactly where a wait is recorded before its event."""
    refused = 0
    for plan, dag, holds in interleavings(count):
        found = check(plan, dag)
        assert (found == []) == holds
        assert holds or "recorded after it" in found[0].text
        refused += not holds
    return refused, count - refused


def test_of_1_000_orders_of_recording_every_one_with_a_wait_before_its_event_is_caught():
    refused, accepted = judge_interleavings(1_000)
    assert refused > 800
    assert accepted > 10


@campaign
def test_of_10_000_plans_with_one_wait_dropped_every_broken_one_is_caught():
    broken, right = judge(10_000)
    assert broken + right == 10_000
    assert broken > 9_000
    assert right > 500


@campaign
def test_of_10_000_orders_of_recording_every_one_with_a_wait_before_its_event_is_caught():
    refused, accepted = judge_interleavings(10_000)
    assert refused + accepted == 10_000
    assert refused > 8_000
