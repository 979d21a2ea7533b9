"""Plans are complete, minimal, and proved by the second checker."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from msplit.core.dag import Dag
from msplit.schedule.plan import Plan, make_plan, record_order, topological, upward_rank
from msplit.schedule.plan_check import check
from tests.campaign import examples


@st.composite
def assigned_dags(draw, largest: int = 24):
    """A random DAG with a stream per node (-1 for some) whose numbering is not topological."""
    count = draw(st.integers(1, largest))
    density = draw(st.sampled_from([0.05, 0.15, 0.4]))
    random = np.random.default_rng(draw(st.integers(0, 2**31)))
    upper = np.triu(random.random((count, count)) < density, 1)
    names = random.permutation(count)
    src, dst = np.nonzero(upper)
    streams = draw(st.integers(1, 5))
    stream = random.integers(-1 if draw(st.booleans()) else 0, streams, count).astype(np.int32)
    return Dag.of(count, names[src], names[dst]), stream, random.random(count)


def closure(count: int, edges: list[tuple[int, int]]) -> np.ndarray:
    """Reachability by repeated squaring: slow, obvious, and shared with nothing."""
    reach = np.eye(count, dtype=bool)
    for src, dst in edges:
        reach[src, dst] = True
    while True:
        wider = (reach.astype(int) @ reach.astype(int)) > 0
        if (wider == reach).all():
            return reach
        reach = wider


def plan_edges(plan: Plan) -> list[tuple[int, int]]:
    edges = list(zip(plan.wait_on.tolist(), plan.wait_node.tolist(), strict=True))
    last: dict[int, int] = {}
    for node in plan.order.tolist():
        lane = int(plan.stream[node])
        if lane in last:
            edges.append((last[lane], node))
        last[lane] = node
    return edges


def make(dag: Dag, stream: np.ndarray, weights: np.ndarray) -> Plan:
    return make_plan(dag, stream, record_order(dag, weights))


@settings(max_examples=examples(80, 300))
@given(assigned_dags())
def test_every_dependency_is_ordered_and_no_wait_is_redundant(case):
    dag, stream, weights = case
    plan = make(dag, stream, weights)
    graph = closure(len(dag), list(zip(dag.src.tolist(), dag.dst().tolist(), strict=True)))
    edges = plan_edges(plan)
    ordered = closure(len(dag), edges)
    placed = [node for node in range(len(dag)) if stream[node] >= 0]
    for first in placed:
        for second in placed:
            if graph[first, second]:
                assert ordered[first, second]
    assert check(plan, dag) == []
    # Minimal: without any one wait some dependency of the graph is not ordered any more.
    for number in range(plan.waits):
        fewer = closure(len(dag), [edge for index, edge in enumerate(edges) if index != number])
        assert any(graph[a, b] and not fewer[a, b] for a in placed for b in placed)


@settings(max_examples=examples(80, 300))
@given(assigned_dags(), st.randoms(use_true_random=False))
def test_a_plan_with_a_wait_dropped_is_caught(case, random):
    dag, stream, weights = case
    plan = make(dag, stream, weights)
    for number in range(plan.waits):
        keep = np.arange(plan.waits) != number
        broken = replace(plan, wait_node=plan.wait_node[keep], wait_on=plan.wait_on[keep])
        assert check(broken, dag) != []


@given(assigned_dags())
def test_reduction_never_adds_waits(case):
    dag, stream, weights = case
    plan = make(dag, stream, weights)
    assert plan.waits <= plan.merged_waits <= plan.edges


@given(assigned_dags())
def test_fork_and_join_hold_every_stream(case):
    dag, stream, weights = case
    plan = make(dag, stream, weights)
    edges = plan_edges(plan)
    start, end = len(dag), len(dag) + 1
    edges += [(start, int(node)) for node in plan.fork] + [(int(node), end) for node in plan.join]
    origin = [int(node) for node in plan.order if plan.stream[node] == 0]
    edges += [(start, origin[0]), (origin[-1], end)] if origin else [(start, end)]
    reach = closure(len(dag) + 2, edges)
    for node in plan.order.tolist():
        assert reach[start, node]
        assert reach[node, end]


def test_a_circle_of_waits_is_caught():
    dag = Dag.of(4, [], [])
    stream = np.array([0, 0, 1, 1], np.int32)
    plan = make_plan(dag, stream, np.arange(4, dtype=np.int32))
    stuck = replace(plan, wait_node=np.array([0, 2], np.int32), wait_on=np.array([3, 1], np.int32))
    assert "circle" in check(stuck, dag)[0].text


def test_a_node_left_out_of_the_order_is_caught():
    dag = Dag.of(2, [0], [1])
    plan = make_plan(dag, np.zeros(2, np.int32), np.arange(2, dtype=np.int32))
    assert "not in the plan" in check(replace(plan, order=plan.order[:1]), dag)[0].text


def test_more_streams_than_fit_one_pass_are_checked():
    count = 150
    dag = Dag.of(count + 1, range(count), [count] * count)
    stream = np.append(np.arange(count), 0).astype(np.int32)
    plan = make(dag, stream, np.ones(count + 1))
    assert plan.waits == count - 1
    assert check(plan, dag) == []
    keep = plan.wait_on != 140
    assert [
        v.producer for v in check(replace(plan, wait_node=plan.wait_node[keep], wait_on=plan.wait_on[keep]), dag)
    ] == [140]


def test_the_critical_child_is_recorded_first():
    dag = Dag.of(4, [0, 0, 1, 2], [1, 2, 3, 3])
    assert record_order(dag, np.array([1.0, 1.0, 5.0, 1.0])).tolist() == [0, 2, 1, 3]


def test_upward_rank_is_the_longest_path_to_a_sink():
    dag = Dag.of(4, [0, 0, 1, 2], [1, 2, 3, 3])
    assert upward_rank(dag, np.array([1.0, 1.0, 5.0, 1.0]), topological(dag)).tolist() == [7.0, 2.0, 6.0, 1.0]


def test_a_long_chain_takes_linear_time():
    count = 200_000
    dag = Dag.of(count, np.arange(count - 1), np.arange(1, count))
    plan = make(dag, (np.arange(count) % 2).astype(np.int32), np.ones(count))
    assert plan.waits == count - 1
