"""What plans are compared by."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from msplit.schedule.problem import Problem
from msplit.schedule.search import evaluate as module
from msplit.schedule.search.evaluate import SPREAD, WAIT_PRICE, evaluate, varied
from tests.schedule.problems import FREE, Builder, problems


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
    assert all(np.array_equal(work, again) for work, again in zip(works, varied(problem), strict=True))
    for work in works:
        assert (np.abs(work - problem.work_us) <= np.sqrt(3) * SPREAD * problem.work_us * (1 + 1e-9)).all()


@given(count=st.integers(50, 400))
def test_the_deviation_is_what_it_is_said_to_be(count):
    b = Builder()
    for _ in range(count):
        b.kernel(time=10.0)
    for work in varied(b.problem(contracted=False)):
        assert np.std(work / 10.0) == pytest.approx(SPREAD, rel=0.1)
