"""Every neighbour of a schedule is a schedule."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msplit.schedule.neighbours import Schedule, neighbours, sections
from msplit.schedule.plan_check import check
from msplit.schedule.problem import Problem
from msplit.schedule.simulate import evaluate
from tests.campaign import examples
from tests.schedule.problems import inception, lstm, problems, random_dag, towers


def start(problem: Problem, streams: int) -> Schedule:
    stream = (np.arange(len(problem)) % streams).astype(np.int32)
    return Schedule(stream, evaluate(problem, stream).order)


@settings(max_examples=examples(30, 60), deadline=None)
@given(problems(16), st.integers(1, 4), st.integers(0, 1000))
def test_every_neighbour_is_another_valid_schedule(problem, streams, seed):
    schedule = start(problem, streams)
    for _, found in itertools.islice(neighbours(problem, schedule, streams, random.Random(seed)), 25):
        assert found.key() != schedule.key()
        assert sorted(found.order.tolist()) == list(range(len(problem)))
        position = np.argsort(found.order)
        assert (position[problem.dag.src] < position[problem.dag.dst()]).all()
        assert found.stream.min() >= 0
        assert found.stream.max() < streams
        assert set(found.stream.tolist()) == set(range(found.stream.max() + 1))


@pytest.mark.parametrize("seed", range(5))
def test_the_plan_of_a_neighbour_is_proved_on_the_graph_behind_the_blocks(seed):
    dag = random_dag(seed, 40, 0.08)
    times = np.random.default_rng(seed).choice([0.0, 1.0, 4.0], 40)
    problem = Problem.of(dag, times, 0.1)
    for _, found in itertools.islice(neighbours(problem, start(problem, 3), 4, random.Random(seed)), 30):
        plan = found.plan(problem, dag)
        assert check(plan, dag) == []
        assert ((plan.stream >= 0) == (times > 0)).all()


def test_ties_hold():
    dag = random_dag(3, 12, 0.1)
    tie = np.where(np.arange(12) < 5, 7, -1)
    problem = Problem.of(dag, 1.0, 0.1, tie=tie, contracted=False)
    tied = np.flatnonzero(problem.tie == 7)
    for _, found in itertools.islice(neighbours(problem, start(problem, 1), 4, random.Random(0)), 60):
        assert len(set(found.stream[tied].tolist())) == 1


def test_all_kinds_of_changes_come_up():
    problem = inception(2)
    schedule, others = start(problem, 4), [start(problem, 3)]
    kinds = {what for what, _ in itertools.islice(neighbours(problem, schedule, 6, random.Random(1), others), 400)}
    assert kinds == {
        "a block earlier or later in all alike sections",
        "a block or branch to another stream in all alike sections",
        "one section's streams for all alike",
        "sections of another candidate",
        "a block earlier or later",
        "a branch earlier or later",
        "another record order",
        "a branch to another stream",
        "a block to another stream",
        "the end of a branch to another stream",
        "two branches swapped",
        "two streams merged",
        "a stream split",
    }


def test_modules_of_a_network_are_alike_whatever_their_times():
    problem = inception(4)
    found = sections(problem)
    assert [section.kind for section in found] == [0] * 4
    for section in found[1:]:
        np.testing.assert_array_equal(problem.kernels[section.blocks], problem.kernels[found[0].blocks])
        np.testing.assert_allclose(problem.time_us[section.blocks], problem.time_us[found[0].blocks])
    shuffled = problem.dag
    random_times = Problem.of(shuffled, np.random.default_rng(0).uniform(1, 9, len(problem)), 0.1, contracted=False)
    assert [section.kind for section in sections(random_times)] == [0] * 4
    assert sections(towers(5))[0].kind == 0
    assert len(sections(lstm(2, 3))) <= 2


@settings(max_examples=40, deadline=None)
@given(problems(16))
def test_sections_hold_each_block_once_and_follow_each_other(problem):
    found = sections(problem)
    blocks = [block for section in found for block in sorted(section.blocks.tolist())]
    assert blocks == sorted(set(blocks))
    owner = {block: number for number, section in enumerate(found) for block in section.blocks.tolist()}
    for a, b in zip(problem.dag.src.tolist(), problem.dag.dst().tolist(), strict=True):
        if a in owner and b in owner:
            assert owner[a] <= owner[b]


def test_where_nothing_can_be_changed_there_is_an_end():
    problem = Problem.of(random_dag(0, 1, 0.0), 1.0)
    kinds = [
        found.keep for _, found in itertools.islice(neighbours(problem, start(problem, 1), 1, random.Random(0)), 5)
    ]
    assert not any(kinds)  # all that one kernel leaves open is whether lanes are kept
    nothing = Problem.of(random_dag(0, 1, 0.0), 0.0)
    assert list(neighbours(nothing, start(nothing, 1), 4, random.Random(0))) == []


def test_one_stream_stays_one_stream():
    problem = inception(1)
    for _, found in itertools.islice(neighbours(problem, start(problem, 1), 1, random.Random(2)), 40):
        assert not found.stream.any()
