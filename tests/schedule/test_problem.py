"""Problems keep the dependencies of the graph they are made from, and its cost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msplit.analysis.order import canonical
from msplit.core.dag import Dag, bypass, topological_numbers
from msplit.schedule.choose import coarsen
from msplit.schedule.problem import Problem, ancestors, cuts, transitive_reduction
from tests.campaign import examples
from tests.graphs import parse
from tests.schedule.problems import experts, lstm, problems, random_dag


def reach(dag: Dag) -> np.ndarray:
    """reach[u, v]: u comes before v or is v. By repeated squaring."""
    matrix = np.eye(len(dag), dtype=bool)
    matrix[dag.src, dag.dst()] = True
    while True:
        wider = (matrix.astype(int) @ matrix.astype(int)) > 0
        if (wider == matrix).all():
            return matrix
        matrix = wider


@settings(max_examples=examples(60, 200))
@given(st.integers(0, 2**31), st.integers(1, 20), st.sampled_from([0.05, 0.2, 0.5]), st.booleans())
def test_a_problem_orders_exactly_what_the_graph_orders(seed, count, density, contracted):
    dag = random_dag(seed, count, density)
    time = np.random.default_rng(seed).choice([0.0, 1.0, 3.0], count)
    problem = Problem.of(dag, time, 0.5, contracted=contracted)
    graph, blocks = reach(dag), reach(problem.dag)
    kernels = np.flatnonzero(time > 0)
    for first in kernels:
        for second in kernels:
            one, other = problem.block[first], problem.block[second]
            if one != other:
                assert graph[first, second] == blocks[one, other]
            else:  # a chain: all in a row
                assert graph[first, second] or graph[second, first]
    assert (problem.dag.src < problem.dag.dst()).all()
    assert problem.time_us.sum() == pytest.approx(time.sum())
    assert problem.kernels.sum() == len(kernels)
    assert (problem.block[time == 0] == -1).all()


@settings(max_examples=examples(40, 100))
@given(st.integers(0, 2**31), st.integers(1, 25), st.sampled_from([0.05, 0.2, 0.5]))
def test_what_is_bypassed_hangs_on_no_order(seed, count, density):
    dag = random_dag(seed, count, density)
    free = np.random.default_rng(seed).random(count) < 0.5

    def left(order):
        found, kept = bypass(dag, free, order)
        return kept.tolist(), {*zip(found.src.tolist(), found.dst().tolist(), strict=True)}

    first = topological_numbers(dag)
    last = topological_numbers(Dag.of(count, dag.dst(), dag.src))[::-1]
    assert left(first) == left(last)


def test_chains_become_blocks_and_views_vanish():
    dag = Dag.of(6, [0, 1, 2, 3, 3], [1, 2, 3, 4, 5])
    problem = Problem.of(dag, [1, 2, 0, 3, 4, 5], [1.0, 0.5, 1.0, 0.2, 1.0, 1.0], [10, 20, 30, 40, 50, 60])
    assert problem.block.tolist() == [0, 0, -1, 0, 1, 2]
    assert problem.time_us.tolist() == [6, 4, 5]
    assert problem.share[0] == pytest.approx((1 * 1 + 2 * 0.5 + 3 * 0.2) / 6)
    assert problem.bytes.tolist() == [70, 50, 60]
    assert problem.kernels.tolist() == [3, 1, 1]
    assert problem.dag.src.tolist() == [0, 0]


def test_a_group_node_does_not_multiply_edges():
    wide = 300
    src = [*range(wide), *[wide] * wide]
    dst = [*[wide] * wide, *range(wide + 1, 2 * wide + 1)]
    problem = Problem.of(Dag.of(2 * wide + 1, src, dst), [1.0] * wide + [0.0] + [1.0] * wide)
    assert len(problem) == 2 * wide + 1
    assert problem.joints.sum() == 1
    assert len(problem.dag.src) == 2 * wide


def test_a_chain_is_cut_where_a_pin_begins_and_between_two_ties():
    dag = Dag.of(4, [0, 1, 2], [1, 2, 3])
    assert len(Problem.of(dag, 1.0)) == 1
    assert Problem.of(dag, 1.0, pin=[-1, 2, 2, -1]).pin.tolist() == [-1, 2, -1]
    beside = Dag.of(6, [0, 1, 2], [1, 2, 3])  # 4 and 5 stand alone
    tied = Problem.of(beside, 1.0, tie=[-1, 7, -1, 8, 7, 8])
    assert (tied.tie.tolist(), tied.block.tolist()) == ([7, 8, 7, 8], [0, 0, 0, 1, 2, 3])


def test_what_is_tied_to_nothing_else_that_launches_is_free():
    dag = Dag.of(5, [0, 1, 2], [1, 2, 3])
    assert Problem.of(dag, [1.0, 1.0, 1.0, 1.0, 0.0], tie=[7, 7, -1, 9, 9]).tie.tolist() == [-1]


def test_tied_blocks_are_one_where_that_leaves_no_cycle():
    # 0 → 1 → 2, and 3 → 4 → 5: 0 and 2 have 1 between them, 3 and 4 nothing.
    dag = Dag.of(6, [0, 1, 3, 4], [1, 2, 4, 5])
    problem = Problem.of(dag, 1.0, tie=[7, -1, 7, 8, 8, -1], contracted=False)
    group, merged = problem.untied
    assert len(merged) == 5
    assert group[3] == group[4]
    assert len(set(group[[0, 1, 2]].tolist())) == 3
    assert (merged.dag.src < merged.dag.dst()).all()
    assert merged.time_us.sum() == problem.time_us.sum()


def test_a_cycle_and_impossible_times_are_refused():
    with pytest.raises(ValueError, match="cycle"):
        Problem.of(Dag.of(2, [0, 1], [1, 0]), 1.0)
    with pytest.raises(ValueError, match="negative"):
        Problem.of(Dag.of(1, [], []), -1.0)
    with pytest.raises(ValueError, match="finite"):
        Problem.of(Dag.of(1, [], []), float("nan"))


def test_an_empty_graph_and_one_without_kernels_are_problems():
    for problem in (Problem.of(Dag.of(0, [], []), []), Problem.of(Dag.of(3, [0, 1], [1, 2]), 0.0)):
        assert len(problem) == 0
        assert problem.bound_us() == 0.0
        assert problem.spread(np.zeros(0, np.int32)).tolist() == [-1] * len(problem.block)


def test_a_chain_of_100000_kernels_is_one_block():
    count = 100_000
    problem = Problem.of(Dag.of(count, np.arange(count - 1), np.arange(1, count)), 1.0)
    assert len(problem) == 1
    assert problem.bound_us() == count


@settings(max_examples=examples(60, 200))
@given(problems(), st.sampled_from([0.5, 2.0, 8.0, 1000.0]))
def test_coarsening_leaves_no_cycle_and_loses_no_cost(problem, gate):
    group = coarsen(problem, gate)
    coarse = problem.grouped(group)
    assert (coarse.dag.src < coarse.dag.dst()).all()
    assert sorted(set(group.tolist())) == list(range(len(coarse)))
    assert coarse.time_us.sum() == pytest.approx(problem.time_us.sum())
    before, after = reach(problem.dag), reach(coarse.dag)
    first, second = np.nonzero(before)
    assert after[group[first], group[second]].all()


def test_coarsening_makes_few_grains_of_an_lstm_cell_but_leaves_experts_apart():
    cells = lstm(4, 20)
    assert len(cells) > 10 * 80 * 0.9
    assert coarsen(cells, 5.5).max() + 1 < 4 * 80
    assert len(np.unique(coarsen(experts(16), 5.5))) >= 16


def test_a_wide_fork_of_tiny_branches_stays_wide():
    count = 100
    dag = Dag.of(count + 2, [0] * count + list(range(1, count + 1)), [*range(1, count + 1), *[count + 1] * count])
    assert coarsen(Problem.of(dag, 1.0), 5.0).max() + 1 > count * 0.85


@settings(max_examples=examples(60, 200))
@given(st.integers(0, 2**31), st.integers(1, 20), st.sampled_from([0.05, 0.2, 0.5]))
def test_cuts_are_the_nodes_that_everything_is_before_or_behind(seed, count, density):
    dag = random_dag(seed, count, density)
    number = np.empty(count, np.int32)
    number[topological_numbers(dag)] = np.arange(count)
    dag = Dag.of(count, number[dag.src], number[dag.dst()])
    matrix = reach(dag)
    assert cuts(dag).tolist() == (matrix | matrix.T).all(axis=0).tolist()


@settings(max_examples=examples(60, 200))
@given(st.integers(0, 2**31), st.integers(1, 20), st.sampled_from([0.05, 0.2, 0.5]))
def test_the_transitive_reduction_is_networkx(seed, count, density):
    import networkx

    dag = random_dag(seed, count, density)
    number = np.empty(count, np.int32)
    number[topological_numbers(dag)] = np.arange(count)
    dag = Dag.of(count, number[dag.src], number[dag.dst()])
    graph = networkx.DiGraph(list(zip(dag.src.tolist(), dag.dst().tolist(), strict=True)))
    reduced = transitive_reduction(dag, ancestors(dag))
    found = set(zip(reduced.src.tolist(), reduced.dst().tolist(), strict=True))
    assert found == set(networkx.transitive_reduction(graph).edges)


LOOPS = """
x:Placeholder; e:Enter(x) region=a; m:Merge(e) region=a; s:Switch(m) region=a; b:Op(s:1)@10us region=a; c:Op(b)@20us region=a
n:NextIteration(c) region=a; q:Exit(s) region=a; f:Enter(q) region=b; t:Merge(f) region=b; u:Switch(t) region=b
v:Op(u:1)@30us region=b; w:NextIteration(v) region=b; y:Exit(u) region=b; z:Op(y)@5us; k:Op(x)@7us
"""
"""Two loops one behind the other. Their back edges are cut, so that no path leads from what the first does to its exit."""


def test_what_leaves_a_loop_waits_for_all_of_it() -> None:
    flat, costs = parse(LOOPS)
    problem = Problem.from_flat(flat, costs)
    assert problem.bound_us() == 65  # 10 + 20 + 30 + 5, and not the 35 of the longest path of edges
    assert problem.time_us.sum() == 72
    assert int(problem.kernels.sum()) == 5
    block = dict(zip(flat.graph.names, problem.block.tolist(), strict=True))
    assert block["b"] == block["c"]
    assert {block[name] for name in "xemsnq"} == {-1}
    for order in (canonical(flat, costs.time_us), topological_numbers(Dag.from_graph(flat.graph))):
        assert Problem.from_flat(flat, costs, order=order).bound_us() == 65


def test_loops_whose_kernels_have_several_streams_are_no_unit() -> None:
    flat, costs = parse(LOOPS)
    pin = np.where(np.asarray(flat.graph.names) == "c", 1, 0)
    problem = Problem.from_flat(flat, costs, tie=-1, pin=pin)
    assert problem.bound_us() == 35  # the exit of the first is ready once it is entered
    assert sorted(problem.time_us.tolist()) == [7, 10, 20, 35]


def test_a_loop_that_would_be_in_a_circle_with_what_stands_outside_of_it_is_taken_apart() -> None:
    flat, costs = parse(
        "a:Op@1us region=l; o:Op(a)@2us; b:Op(o)@3us region=l; c:Op(b)@4us region=m; d:Op(b)@5us region=m"
    )
    problem = Problem.from_flat(flat, costs)
    assert problem.bound_us() == 15  # one of the two of the second behind the other, since they share a stream
    assert int(problem.kernels.sum()) == 5


def test_what_shares_a_stream_runs_one_after_the_other() -> None:
    problem = Problem.of(Dag.of(3, [], []), [3.0, 4.0, 5.0], 0.1, tie=[0, 0, -1])
    assert problem.bound_us() == 7
