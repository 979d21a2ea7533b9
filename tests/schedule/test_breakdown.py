"""Where the time of a plan goes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msplit.core.dag import Dag
from msplit.schedule.machine import Machine
from msplit.schedule.problem import Problem
from msplit.schedule.simulate import SWITCHES, breakdown, plan_of, simulate
from tests.schedule.problems import FREE, problems


@settings(max_examples=200)
@given(problem=problems(), seed=st.integers(0, 2**31), streams=st.integers(1, 6))
def test_the_parts_are_the_whole_and_the_rest_is_what_kernels_need(problem, seed, streams):
    stream = np.random.default_rng(seed).integers(0, streams, len(problem)).astype(np.int32)
    plan = plan_of(problem, stream)
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
