"""The simulator obeys the laws of what it models, and reproduces what was measured.

What plans are compared by.

Recording in an order that keeps lanes changes nothing but the order.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msplit.core.dag import Dag
from msplit.schedule import simulate as module
from msplit.schedule.choose import best, choose
from msplit.schedule.machine import Machine
from msplit.schedule.plan import Plan, make_plan, record_order
from msplit.schedule.plan_check import check
from msplit.schedule.problem import Problem
from msplit.schedule.simulate import (
    SPREAD,
    SWITCHES,
    WAIT_PRICE,
    breakdown,
    evaluate,
    keep_lanes,
    node_order,
    plan_of,
    simulate,
    timed_order,
    varied,
)
from tests.campaign import examples
from tests.schedule.problems import FREE, Builder, lstm, problems
from tests.schedule.test_plan import assigned_dags, make


def assigned(problem: Problem, seed: int, streams: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, streams, len(problem)).astype(np.int32)


CASES = {"problem": problems(), "seed": st.integers(0, 2**31), "streams": st.integers(1, 6)}


@settings(max_examples=examples(80, 300))
@given(**CASES)
def test_no_plan_beats_the_bound_or_is_slower_than_everything_in_a_row(problem, seed, streams):
    plan = plan_of(problem, assigned(problem, seed, streams))
    found = simulate(problem, plan)
    machine = problem.machine
    assert found.makespan_us >= problem.bound_us() * (1 - 1e-9)
    waiting = machine.step_us + plan.waits * max(machine.wait_us, machine.join_us) + len(plan.join) * machine.join_us
    assert found.makespan_us <= problem.work_us.sum() + waiting + 1e-6


@settings(max_examples=examples(60, 200))
@given(factor=st.sampled_from([0.25, 3.0, 1000.0]), **CASES)
def test_scaling_all_costs_scales_the_makespan(problem, seed, streams, factor):
    plan = plan_of(problem, assigned(problem, seed, streams))
    machine = problem.machine
    slower = replace(
        problem,
        time_us=problem.time_us * factor,
        bytes=problem.bytes * factor,
        machine=replace(
            machine,
            wait_us=machine.wait_us * factor,
            join_us=machine.join_us * factor,
            issue_us=machine.issue_us * factor,
            crowd_us=machine.crowd_us * factor,
            step_us=machine.step_us * factor,
        ),
    )
    expected = simulate(problem, plan).makespan_us * factor
    assert simulate(slower, plan).makespan_us == pytest.approx(expected, rel=1e-6, abs=1e-6)


@settings(max_examples=examples(80, 300))
@given(**CASES)
def test_everything_starts_after_what_it_needs_and_one_at_a_time_per_stream(problem, seed, streams):
    stream = assigned(problem, seed, streams)
    plan = plan_of(problem, stream)
    found = simulate(problem, plan)
    for waiter, event in zip(plan.wait_node, plan.wait_on, strict=True):
        assert found.start_us[waiter] >= found.end_us[event] + problem.machine.wait_us - 1e-6
    last: dict[int, float] = {}
    for node in plan.order.tolist():
        lane = int(stream[node])
        assert found.start_us[node] >= last.get(lane, 0.0) - 1e-6
        assert found.end_us[node] >= found.start_us[node] + problem.work_us[node] - 1e-6
        last[lane] = found.end_us[node]
    assert (found.start_us[problem.joints] == -1).all()


@settings(max_examples=examples(60, 200))
@given(seed=st.integers(0, 2**31), count=st.integers(2, 20))
def test_more_edges_never_make_one_stream_faster(seed, count):
    random = np.random.default_rng(seed)
    src, dst = np.nonzero(np.triu(random.random((count, count)) < 0.3, 1))
    time, share = random.random(count) + 0.1, random.random(count)
    few = Problem.of(Dag.of(count, src[::2], dst[::2]), time, share, contracted=False)
    many = Problem.of(Dag.of(count, src, dst), time, share, contracted=False)
    one = np.zeros(count, np.int32)
    assert simulate(many, plan_of(many, one)).makespan_us >= simulate(few, plan_of(few, one)).makespan_us - 1e-9


@settings(max_examples=examples(60, 200))
@given(problem=problems())
def test_one_stream_takes_all_the_work_and_no_wait(problem):
    plan = plan_of(problem, np.zeros(len(problem), np.int32))
    assert plan.waits == 0
    expected = problem.work_us.sum() + problem.machine.step_us
    assert simulate(problem, plan).makespan_us == pytest.approx(expected if len(plan.order) else 0.0)


def pair(share: float, bytes_us: float = 0.0, machine: Machine = FREE) -> float:
    """Makespan of two equal kernels of 10 µs on two streams."""
    problem = Problem.of(Dag.of(2, [], []), 10.0, share, bytes_us, machine=machine)
    return simulate(problem, plan_of(problem, np.asarray([0, 1], np.int32))).makespan_us


def test_small_kernels_run_side_by_side_and_large_ones_share():
    assert pair(0.5) == pytest.approx(10.0)
    assert pair(1.0) == pytest.approx(20.0)
    assert pair(0.75) == pytest.approx(15.0)


def test_bandwidth_is_shared_like_sms():
    machine = replace(FREE, bandwidth=1e6)
    assert pair(0.1, 10e6, machine) == pytest.approx(20.0)
    assert pair(0.1, 5e6, machine) == pytest.approx(10.0)


def test_what_is_left_runs_at_full_speed_again():
    problem = Problem.of(Dag.of(2, [], []), [10.0, 4.0], 1.0, machine=FREE)
    found = simulate(problem, plan_of(problem, np.asarray([0, 1], np.int32)))
    assert found.end_us.tolist() == pytest.approx([14.0, 8.0])


def test_a_wait_costs_only_who_is_waited_for_late():
    machine = replace(FREE, wait_us=3.0)
    #  a(10) -> c, b(2) -> c, c behind a: b has long ended
    problem = Problem.of(Dag.of(3, [0, 1], [2, 2]), [10.0, 2.0, 1.0], 0.1, machine=machine)
    assert simulate(problem, plan_of(problem, np.asarray([0, 1, 0], np.int32))).makespan_us == pytest.approx(11.0)
    assert simulate(problem, plan_of(problem, np.asarray([1, 0, 0], np.int32))).makespan_us == pytest.approx(14.0)


BY_HAND = replace(Machine(), step_us=0.0)
"""Graphs that were written by hand have no kernel before their first ones, and deliver nothing."""


def fork_join(width: int, depth: int, repeat: int) -> float:
    b = Builder()
    node = b.kernel(time=1.085)
    lanes = [0]
    for _ in range(repeat):
        ends = []
        for lane in range(width):
            end = node
            for _ in range(depth):
                end = b.kernel(end, time=1.085, share=0.01)
                lanes.append(lane)
            ends.append(end)
        node = b.kernel(*ends, time=1.085, share=0.01)
        lanes.append(0)
    problem = b.problem(contracted=False, machine=BY_HAND)
    return evaluate(problem, np.asarray(lanes, np.int32)).simulation.makespan_us


@pytest.mark.parametrize(
    ("width", "depth", "repeat", "measured"),
    [
        (1, 99, 10, 1085),
        (1, 1, 20, 45),
        (2, 1, 20, 67),
        (4, 1, 20, 74),
        (8, 1, 20, 111),
        (16, 1, 20, 143),
        (1, 10, 5, 63),
        (4, 10, 5, 71),
        (16, 10, 5, 207),
    ],
)
def test_the_model_is_within_a_fifth_of_what_an_h200_took(width, depth, repeat, measured):
    assert fork_join(width, depth, repeat) == pytest.approx(measured, rel=0.2)


@pytest.mark.parametrize(("streams", "measured"), [(2, 1.84), (5, 4.19), (10, 6.95)])
def test_a_wavefront_of_ten_layers_gains_what_an_h200_gained(streams, measured):
    problem = lstm(layers=10, steps=100, contracted=False, machine=BY_HAND)
    kernels = np.flatnonzero(problem.block >= 0)
    stream = np.zeros(len(problem), np.int32)
    stream[problem.block[kernels]] = kernels // (len(problem.block) // 10) * streams // 10
    gain = problem.work_us.sum() / evaluate(problem, stream).simulation.makespan_us
    assert gain == pytest.approx(measured, rel=0.04)


def fan_in(count: int, kernels: int, time: float, tail: list[float], streams: int = 1) -> tuple[Problem, np.ndarray]:
    """Equal branches which a chain follows that needs all of them; and the branches dealt out over streams."""
    b = Builder()
    lanes, ends = [], []
    for branch in range(count):
        node = None
        for _ in range(kernels):
            node = b.kernel(node, time=time, share=0.06)
            lanes.append(branch * streams // count)
        ends.append(node)
    node = b.kernel(*ends, time=tail[0])
    for us in tail[1:]:
        node = b.kernel(node, time=us)
    lanes += [0] * len(tail)
    return b.problem(contracted=False, machine=BY_HAND), np.asarray(lanes, np.int32)


EXPERTS = (16, 3, (326 - 25) / 48, [25 / 9] * 9)
"""The MMoE at batch 128: after the experts nine kernels in a row took 25 µs of 326."""

TOWERS = (40, 3, 330 / 122, [330 / 122] * 2)
"""40 embedding towers at batch 128: 122 kernels of 2.7 µs on average."""


@pytest.mark.parametrize(("streams", "measured"), [(1, 326), (2, 173), (4, 108), (8, 73), (16, 59)])
def test_an_mmoe_of_16_experts_takes_what_it_took_on_an_h200(streams, measured):
    assert evaluate(*fan_in(*EXPERTS, streams)).simulation.makespan_us == pytest.approx(measured, rel=0.1)


def test_so_16_streams_are_chosen_for_it():
    problem, _ = fan_in(*EXPERTS)
    candidates = choose(problem, 16)
    assert best(candidates).streams == 16
    assert best(candidates).makespan_us <= min(candidate.makespan_us for candidate in candidates) * 1.01


@pytest.mark.parametrize(("streams", "measured"), [(1, 330), (2, 177), (4, 110), (8, 71), (16, 57)])
def test_40_embedding_towers_take_what_they_took_on_an_h200(streams, measured):
    assert evaluate(*fan_in(*TOWERS, streams)).simulation.makespan_us == pytest.approx(measured, rel=0.2)


def test_a_step_takes_something_whatever_it_runs():
    machine = replace(FREE, step_us=6.0)
    problem = Problem.of(Dag.of(1, [], []), 10.0, machine=machine)
    assert simulate(problem, plan_of(problem, np.zeros(1, np.int32))).makespan_us == pytest.approx(16.0)
    nothing = Problem.of(Dag.of(0, [], []), [], machine=machine)
    assert simulate(nothing, plan_of(nothing, np.zeros(0, np.int32))).makespan_us == 0.0


def test_kernels_take_longer_in_the_model_than_alone():
    problem = Problem.of(Dag.of(2, [0], [1]), 10.0, machine=replace(FREE, company=1.2))
    assert simulate(problem, plan_of(problem, np.zeros(len(problem), np.int32))).makespan_us == pytest.approx(24.0)


def test_kernels_slow_each_other_down_where_there_are_sms_for_all():
    machine = replace(FREE, contention=0.8)
    assert pair(0.25, machine=machine) == pytest.approx(10.0 * (1 + 0.8 * 0.25))
    assert pair(1.0, machine=machine) == pytest.approx(20.0)  # never slower than one after the other
    problem = Problem.of(Dag.of(2, [], []), 10.0, [0.1, 0.3], machine=machine)
    slower = 1 + 0.8 * (0.1 + 0.3) / 2  # each by what the other keeps busy, on average
    found = simulate(problem, plan_of(problem, np.asarray([0, 1], np.int32)))
    assert found.makespan_us == pytest.approx(10.0 * slower)


def test_kernels_that_run_side_by_side_start_later():
    machine = replace(FREE, issue_us=0.1, crowd_us=0.05)
    problem = Problem.of(Dag.of(4, [], []), 1.0, 0.1, machine=machine)
    found = simulate(problem, plan_of(problem, np.arange(4, dtype=np.int32)))
    assert found.makespan_us == pytest.approx(1.0 + 3 * 0.05)


def test_a_plan_whose_streams_wait_in_a_circle_is_refused():
    problem = Problem.of(Dag.of(4, [], []), 1.0)
    circle = Plan(
        stream=np.asarray([0, 0, 1, 1], np.int32),
        order=np.asarray([0, 1, 2, 3], np.int32),
        wait_node=np.asarray([0, 2], np.int32),
        wait_on=np.asarray([3, 1], np.int32),
        fork=np.empty(0, np.int32),
        join=np.empty(0, np.int32),
        streams=2,
        edges=2,
        merged_waits=2,
    )
    with pytest.raises(ValueError, match="circle"):
        simulate(problem, circle)


@settings(max_examples=examples(80, 300))
@given(**CASES)
def test_the_timed_order_is_topological(problem, seed, streams):
    order = timed_order(problem, assigned(problem, seed, streams))
    position = np.empty(len(problem), int)
    position[order] = np.arange(len(order))
    assert sorted(order.tolist()) == list(range(len(problem)))
    assert (position[problem.dag.src] < position[problem.dag.dst()]).all()


def test_the_timed_order_lets_nobody_be_held_up_by_what_is_not_ready():
    #  slow(50) -> urgent(1) -> long(100); quick(5) shares urgent's stream but is ready at once
    problem = Problem.of(
        Dag.of(5, [0, 1, 0], [1, 2, 4]), [50.0, 1.0, 100.0, 5.0, 1.0], 0.1, machine=FREE, contracted=False
    )
    stream = np.asarray([0, 1, 1, 1, 0], np.int32)
    order = timed_order(problem, problem_streams(problem, stream)).tolist()
    blocks = problem.block.tolist()
    assert order.index(blocks[3]) < order.index(blocks[1])
    assert evaluate(problem, problem_streams(problem, stream)).simulation.makespan_us == pytest.approx(151.0)


def problem_streams(problem: Problem, nodes: np.ndarray) -> np.ndarray:
    stream = np.zeros(len(problem), np.int32)
    stream[problem.block] = nodes
    return stream


@settings(max_examples=examples(60, 200))
@given(problem=problems(contracted=True), seed=st.integers(0, 2**31))
def test_the_order_of_blocks_gives_an_order_of_the_graph(problem, seed):
    # The graph in any other numbering than the problem's.
    count = len(problem.block)
    nodes = Dag.of(count, [], [])
    order = evaluate(problem, assigned(problem, seed, 3)).order
    found = node_order(problem, order, nodes)
    assert sorted(found.tolist()) == list(range(count))
    blocks = [int(problem.block[node]) for node in found if problem.block[node] >= 0]
    wanted = [block for block in order.tolist() if not problem.joints[block]]
    assert list(dict.fromkeys(blocks)) == wanted


def test_large_graphs_are_simulated():
    count = examples(50_000, 200_000)
    random = np.random.default_rng(0)
    dst = np.repeat(np.arange(100, count), 2)
    dag = Dag.of(count, dst - random.integers(1, 100, len(dst)), dst)
    problem = Problem.of(dag, random.random(count) + 1, 0.2)
    stream = (np.arange(len(problem)) % 8).astype(np.int32)
    plan = make_plan(problem.dag, stream, timed_order(problem, stream))
    assert simulate(problem, plan).makespan_us >= problem.bound_us()


@settings(max_examples=examples(60, 200))
@given(**CASES)
def test_the_parts_are_the_whole_and_the_rest_is_what_kernels_need(problem, seed, streams):
    plan = plan_of(problem, assigned(problem, seed, streams))
    found = breakdown(problem, plan)
    assert found.makespan_us == simulate(problem, plan).makespan_us
    assert found.kernels_us + sum(found.parts.values()) == pytest.approx(found.makespan_us, abs=1e-6)
    # No cost of the machine is left: what remains is bounded by the path and the SMs, as every schedule is.
    alone = replace(problem, machine=FREE)
    assert found.kernels_us >= alone.bound_us() * (1 - 1e-9)


def test_each_part_is_what_its_switch_saves():
    machine = replace(FREE, contention=0.8, company=1.5, wait_us=0.5, step_us=6.0)
    problem = Problem.of(Dag.of(3, [0, 1], [2, 2]), [10.0, 10.0, 4.0], 0.25, machine=machine, contracted=False)
    found = breakdown(problem, plan_of(problem, np.asarray([0, 1, 0], np.int32)))
    assert found.kernels_us == pytest.approx(14.0)
    assert found.parts["contention"] == pytest.approx(15.0 * 0.8 * 0.25)
    assert found.parts["company"] == pytest.approx(7.0)
    assert found.parts["starts and waits"] == pytest.approx(0.5)
    assert found.parts["the step itself"] == pytest.approx(6.0)
    assert found.parts["bandwidth"] == 0.0


def test_every_cost_of_the_machine_is_switched_off_by_one_of_them():
    off = {name for _, fields in SWITCHES for name in fields}
    assert off | {"issue_lanes"} == set(vars(Machine()))  # lanes of a start that costs nothing


def _forked(**options) -> Problem:
    """A branch of 10 µs beside two of 6 and 4, and what joins them."""
    b = Builder()
    branches = [b.kernel(time=us, share=0.01) for us in (10.0, 6.0, 4.0)]
    b.kernel(*branches, time=2.0)
    return b.problem(contracted=False, machine=replace(FREE, **options))


def _evaluated(problem: Problem, *stream: int):
    return evaluate(problem, np.asarray(stream, np.int32))


def test_of_plans_with_the_same_makespan_the_one_with_room_to_spare_is_better():
    problem = _forked()
    tight, roomy = _evaluated(problem, 0, 1, 1, 0), _evaluated(problem, 0, 1, 2, 0)
    assert tight.simulation.makespan_us == roomy.simulation.makespan_us == 12.0
    assert roomy.score_us == pytest.approx(12.0)  # its long branch is as often shorter as longer
    assert 12.0 < tight.score_us < 12.0 * (1 + SPREAD)


def test_every_wait_has_a_price_and_one_stream_has_none():
    problem = _forked(join_us=0.5)
    one, three = _evaluated(problem, 0, 0, 0, 0), _evaluated(problem, 0, 1, 2, 0)
    assert one.score_us == one.simulation.makespan_us == 22.0
    assert three.plan.waits == 2
    assert three.at_best_us == pytest.approx(three.simulation.makespan_us + 2 * WAIT_PRICE * 0.5)


def test_what_is_too_much_to_simulate_again_is_compared_by_its_makespan(monkeypatch):
    found = _evaluated(_forked(), 0, 1, 1, 0)
    monkeypatch.setattr(module, "LARGEST_VARIED", 3)
    assert found.score_us == found.at_best_us == 12.0


@given(problem=problems())
def test_times_vary_up_and_down_by_a_tenth_and_on_the_mean_not_at_all(problem):
    works = varied(problem)
    assert np.mean(works, axis=0) == pytest.approx(problem.work_us)
    assert all(np.array_equal(work, again) for work, again in zip(works, varied(replace(problem)), strict=True))
    for work in works:
        assert (np.abs(work - problem.work_us) <= np.sqrt(3) * SPREAD * problem.work_us * (1 + 1e-9)).all()


@given(count=st.integers(50, 400))
def test_the_deviation_is_what_it_is_said_to_be(count):
    b = Builder()
    for _ in range(count):
        b.kernel(time=10.0)
    for work in varied(b.problem(contracted=False)):
        assert np.std(work / 10.0) == pytest.approx(SPREAD, rel=0.1)


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
