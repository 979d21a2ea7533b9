"""Between nodes and steps: stored plans come back to the last wait, ids say where steps run, ties hold steps of one node together."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from msplit.engines.cuda import steps
from msplit.engines.cuda.engine import ENGINE, plan_for
from msplit.flatten import flatten
from msplit.formats import read
from msplit.measure.inputs import make_inputs
from tests.engines.cuda.cases import SAMPLES, job, program_of, scattered

MODELS = ["mmoe_small.pb", "lstm_small.pb", "towers_small.pb", "keras_inception"]


def load(name):
    flat = flatten(read(SAMPLES / name))
    return flat, make_inputs(flat, {}, batch=2)


@pytest.mark.parametrize("name", MODELS)
def test_a_stored_plan_comes_back_the_same(name):
    flat, feeds = load(name)
    program = program_of(flat, feeds)
    plan = plan_for(program, scattered(flat, 4), None)
    again = steps.restore(program, steps.store(program, plan))
    assert plan.waits > 0
    for field in ("stream", "order"):
        np.testing.assert_array_equal(getattr(again, field), getattr(plan, field), err_msg=field)
    assert (set(again.fork.tolist()), set(again.join.tolist())) == (set(plan.fork.tolist()), set(plan.join.tolist()))
    pairs = [set(zip(p.wait_node.tolist(), p.wait_on.tolist(), strict=True)) for p in (plan, again)]
    assert pairs[0] == pairs[1]


@pytest.mark.parametrize("name", MODELS)
def test_ids_of_a_plan_put_every_step_where_the_plan_has_it(name):
    flat, feeds = load(name)
    program = program_of(flat, feeds)
    tie = steps.ties(program, np.full(len(flat), -1, np.int32))
    lanes = np.asarray([-1 if not step.launches else number % 3 for number, step in enumerate(program.steps)], np.int32)
    for group in np.unique(tie[(tie >= 0) & (lanes >= 0)]):
        lanes[(tie == group) & (lanes >= 0)] = 1
    ids = steps.ids_of(program, lanes, len(flat))
    found, count = program.lanes(np.maximum(ids, 0))
    assert count == 3
    np.testing.assert_array_equal(found, lanes)


def test_steps_of_tied_nodes_are_tied():
    flat, feeds = load("mmoe_small.pb")
    program = program_of(flat, feeds)
    first, second = [step.op.covers[0] for step in program.steps if step.launches][:2]
    groups = np.full(len(flat), -1, np.int32)
    groups[[first, second]] = 0
    tie = steps.ties(program, groups)
    tied = {program.steps[number].op.covers[0] for number in np.flatnonzero(tie == 0)}
    assert tied == {first, second}


def test_a_plan_of_other_steps_does_not_fit():
    flat, feeds = load("towers_small.pb")
    program = program_of(flat, feeds)
    stored = steps.store(program, plan_for(program, scattered(flat, 2), None))
    for kernels in (stored.kernels[1:], (*stored.kernels, (0, 99, 0)), (*stored.kernels[1:], stored.kernels[1])):
        assert steps.restore(program, steps.StoredPlan(kernels)) is None


def test_a_job_runs_by_the_plan_that_it_brings():
    flat, feeds = load("towers_small.pb")
    program = program_of(flat, feeds)
    stored = steps.store(program, plan_for(program, scattered(flat, 3, seed=5), None))
    made = job(flat, feeds)
    executable = ENGINE.build(replace(made, options={**made.options, "plan": stored}))
    assert [(a.step, a.lane) for a in executable.lanes.actions] == [
        (int(step), int(lane))
        for step, lane in zip(
            steps.restore(program, stored).order, [lane for _, _, lane in stored.kernels], strict=True
        )
    ]
    outputs = executable.step(feeds)
    alone = ENGINE.build(made).step(feeds)
    for name, value in alone.items():
        np.testing.assert_array_equal(outputs[name], value)


def test_a_job_whose_plan_does_not_fit_runs_by_its_ids():
    flat, feeds = load("towers_small.pb")
    made = job(flat, feeds, scattered(flat, 3), streams=3)
    executable = ENGINE.build(replace(made, options={**made.options, "plan": steps.StoredPlan(((0, 0, 0),))}))
    assert executable.facts()["streams"] == 3
