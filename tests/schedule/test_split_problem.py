"""Several GPUs in the simulator: with one it is the simulator of one, and copies take what the data sheet says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msplit.core.dag import Dag
from msplit.schedule.plan_check import check
from msplit.schedule.problem import Problem
from msplit.schedule.simulate import plan_of
from msplit.schedule.simulate import simulate as simulate_one
from msplit.schedule.split_problem import INPUTS, BlockMemory, GpuLink, SplitProblem, join, simulate
from tests.campaign import examples
from tests.schedule.problems import FREE, Builder, problems

NEAR = GpuLink(bytes_per_us=1e3, copy_us=4.0, launch_us=0.0)


def split_of(problem: Problem, gpus: int = 2, link: GpuLink = NEAR, **more) -> SplitProblem:
    count = len(problem)
    return SplitProblem(problem, gpus, link, 1e12, **{"sent": np.full(count, 1e3), "fetched": np.zeros(count), **more})


def play(split: SplitProblem, lane: list[int] | np.ndarray, streams: int = 1):
    joined = join(split, np.asarray(lane, np.int32), streams)
    return joined, simulate(joined.problem, joined.plan, joined.device, joined.work_us, joined.earliest_us)


@settings(max_examples=examples(60, 200))
@given(problem=problems(), seed=st.integers(0, 2**31), streams=st.integers(1, 6))
def test_one_gpu_is_what_the_simulator_of_one_says(problem, seed, streams):
    stream = np.random.default_rng(seed).integers(0, streams, len(problem)).astype(np.int32)
    plan = plan_of(problem, stream)
    expected = simulate_one(problem, plan)
    found = simulate(problem, plan, [0] * plan.streams, problem.work_us, np.zeros(len(problem)))
    assert found.makespan_us == pytest.approx(expected.makespan_us, rel=1e-9, abs=1e-9)
    np.testing.assert_allclose(found.start_us, expected.start_us, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(found.end_us, expected.end_us, rtol=1e-9, atol=1e-9)


@settings(max_examples=examples(60, 200))
@given(
    problem=problems(contracted=False), seed=st.integers(0, 2**31), gpus=st.integers(2, 4), streams=st.integers(1, 3)
)
def test_every_edge_is_ordered_and_what_crosses_comes_with_its_copy(problem, seed, gpus, streams):
    lane = np.random.default_rng(seed).integers(0, gpus * streams, len(problem)).astype(np.int32)
    split = split_of(problem, gpus, fetched=np.where(np.arange(len(problem)) % 3, 0.0, 10.0))
    joined, found = play(split, lane, streams)
    # The second checker knows nothing of copies: the problem's own edges hold in the plan, through copies or without.
    whole = joined.problem.dag
    assert check(joined.plan, whole) == []
    count = len(problem)
    src, dst = problem.dag.src, problem.dag.dst()
    own = Dag.of(count + len(joined.copies), src, dst)
    assert check(joined.plan, own) == []
    number = {copy: count + place for place, copy in enumerate(joined.copies)}
    gpu = lane // streams
    for block, user in zip(src.tolist(), dst.tolist(), strict=True):
        if problem.joints[block] or problem.joints[user] or gpu[block] == gpu[user]:
            continue
        copy = number[block, int(gpu[user])]
        assert found.start_us[copy] >= found.end_us[block]
        assert found.end_us[copy] - found.start_us[copy] >= split.link.takes_us(1e3) * (1 - 1e-9)
        assert found.start_us[user] >= found.end_us[copy]


def test_independent_chains_on_two_gpus_do_not_slow_each_other_down():
    b = Builder()
    for _ in range(2):
        b.kernel(time=100.0, share=1.0)
    problem = b.problem(machine=FREE, contracted=False)
    assert simulate_one(problem, plan_of(problem, np.asarray([0, 1]))).makespan_us == pytest.approx(200)
    assert play(split_of(problem), [0, 1])[1].makespan_us == pytest.approx(100)
    late = split_of(problem, link=replace(NEAR, launch_us=28.0))
    assert play(late, [0, 1])[1].makespan_us == pytest.approx(128)


def test_a_result_is_copied_once_to_each_gpu_and_copies_of_one_link_queue():
    b = Builder()
    first, second = b.kernel(time=10.0), b.kernel(time=10.0)
    for _ in range(3):
        b.kernel(first, second, time=1.0)
    problem = b.problem(machine=FREE, contracted=False)
    joined, found = play(split_of(problem), [0, 0, 1, 1, 1])
    assert list(joined.copies.values()) == [1e3, 1e3]
    # 20 µs for both, and the copy of the first runs beside the second: 5 µs for the last copy, then 3 kernels in a row.
    assert found.makespan_us == pytest.approx(20 + 5 + 3)
    joined, found = play(split_of(problem), [0, 1, 0, 0, 0])
    assert found.makespan_us == pytest.approx(10 + 5 + 3)


def test_inputs_are_on_the_first_gpu_and_outputs_are_wanted_there():
    b = Builder()
    b.kernel(time=10.0)
    problem = b.problem(machine=FREE)
    fed = {"inputs": (BlockMemory("x", 2e3, (0,)),), "fetched": np.asarray([3e3])}
    joined, found = play(split_of(problem, **fed), [1])
    assert joined.copies == {(0, 0): 3e3, (INPUTS, 1): 2e3}
    assert found.makespan_us == pytest.approx(6 + 10 + 7)
    assert play(split_of(problem, **fed), [0])[1].makespan_us == pytest.approx(10)
