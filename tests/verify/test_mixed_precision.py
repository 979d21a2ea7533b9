"""Half precision within an error that the user allows: what is chosen, told, and kept in a plan."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

import msplit
from msplit.assignment.plans import stored_job
from msplit.core.arguments import Precision
from msplit.engines.base import Job
from msplit.engines.cuda.options import EngineOptions
from msplit.errors import MsplitError
from msplit.inputs.make import make_inputs
from msplit.report.bench_sections import mixed_notes
from msplit.run.tuning import TuneSettings
from msplit.schedule import planfile
from msplit.verify.compare import compare
from msplit.verify.mixed_precision import MOST, choose, errors_of, keep_within
from msplit.verify.results import MixedPrecision
from tests.cli.runner import msplit as run

SAMPLES = Path(__file__).parents[2] / "sample_graphs"
SCHEMA = json.loads((SAMPLES.parent / "docs" / "schemas" / "bench.json").read_text("utf-8"))["$defs"]["one"][
    "properties"
]["mixed_precision"]


@given(
    st.lists(st.tuples(st.floats(0, 10), st.floats(0.1, 10)), min_size=1, max_size=60),
    st.floats(0, 12),
    st.floats(0, 0.5),
)
def test_what_is_chosen_keeps_within_the_bound_in_few_evaluations(units, most, floor):
    asked = []

    def error(chosen):
        asked.append(chosen)
        return math.hypot(floor, *(units[one][0] for one in chosen))

    gains = [gain for _, gain in units]
    found = choose(gains, error, most)
    assert error(found) <= most or not found
    assert len(set(asked)) <= MOST + 2
    assert choose(gains, error, most) == found
    if math.hypot(floor, *(harm for harm, _ in units)) <= most:
        assert len(found) == len(units)


@given(st.integers(2, 200), st.data())
def test_one_op_that_does_harm_is_the_only_one_that_stays_behind(count, data):
    bad = data.draw(st.integers(0, count - 1))
    found = choose([1.0] * count, lambda chosen: math.inf if bad in chosen else 1e-6 * len(chosen), 1e-2)
    assert found == frozenset(range(count)) - {bad}


def test_an_op_that_does_harm_only_beside_others_is_found():
    """An op between two products is in half precision only where these are."""
    found = choose([1.0] * 40, lambda chosen: 1.0 if {16, 17, 18} <= chosen else 0.0, 0.5)
    assert len(found) == 39


def test_outputs_that_are_not_numbers_are_infinitely_far():
    x = np.ones(3, np.float32)
    wrong = np.array([1, np.nan, 1], np.float32)
    assert errors_of([{"y": x}, {"y": wrong}], [{"y": x}, {"y": x}]) == {"y": math.inf}
    assert errors_of([{"i": np.array([1, 2])}], [{"i": np.array([1, 3])}]) == {"i": math.inf}
    assert errors_of([{"y": x * 1.5}, {"y": x}], [{"y": x}, {"y": x}]) == {"y": 0.5}


def job_of(name: str, precision: Precision = Precision.BF16) -> Job:
    flat = msplit.load(SAMPLES / name)
    _, costs = msplit.api.price(flat, batch=4)
    return Job(
        flat,
        np.zeros(len(flat), np.int32),
        1,
        make_inputs(flat, {}, batch=4),
        precision,
        EngineOptions("cpu"),
        costs=costs,
    )


@pytest.mark.parametrize("name", ["mmoe_small.pb", "towers_small.pb"])
@pytest.mark.parametrize("part", [2.0, 0.6, 0.2])
def test_every_output_keeps_within_the_bound_with_as_many_ops_in_half_as_that_leaves(name, part):
    pytest.importorskip("torch")
    from msplit.engines.cuda.engine import ENGINE

    job = job_of(name)
    inputs = [job.feeds, make_inputs(job.flat, {}, batch=4, seed=1)]
    whole = keep_within(job, 1.0, inputs)
    assert (whole.in_half, whole.wide, whole.evaluations) == (whole.ops, frozenset(), 1)
    found = keep_within(job, part * whole.error, inputs)
    assert found.holds
    assert found.evaluations <= MOST + 2
    assert (found.in_half == found.ops) == (part >= 1)
    assert found.in_half > 0
    executable = ENGINE.build(replace(job, wide=found.wide))
    exact = ENGINE.build(replace(job, precision=Precision.IEEE))
    errors = {
        one.name: one.distance
        for one in compare(executable.step(job.feeds), exact.step(job.feeds), precision=job.precision).outputs
    }
    assert max(errors.values()) <= part * whole.error
    assert keep_within(job, part * whole.error, inputs) == found


def test_a_bound_that_half_precision_never_keeps_leaves_all_in_float32():
    pytest.importorskip("torch")
    job = job_of("mmoe_small.pb")
    found = keep_within(job, 1e-7, [job.feeds])
    assert (found.holds, found.in_half, found.error) == (True, 0, 0.0)


def request(**more) -> dict[str, Any]:
    return dict(
        streams=(2,),
        engine="cuda",
        device="cpu",
        batch=4,
        settings=msplit.Settings(duration=0.05, warmup=0.0, min_rounds=2, builds=1, verify_inputs=1),
        **{"precision": "bf16", "fuse": False, "group": False, **more},
    )


@pytest.mark.tf
def test_a_bench_tells_what_was_chosen_and_a_plan_keeps_it(tmp_path):
    from msplit.report.benchmark import document, payload
    from msplit.run.tuning import write

    flat = msplit.load(SAMPLES / "mmoe_small.pb")
    found = msplit.bench(flat, **request(tune=TuneSettings(1.0, max_error=3e-3)))
    assert not found.result.failed
    assert found.mixed is not None
    assert 0 < found.mixed.in_half < found.mixed.ops
    told = payload(flat, found)["mixed_precision"]
    Draft202012Validator(SCHEMA).validate(told)
    assert told["error"] <= told["max_error"] == 3e-3
    assert (told["ops"], told["ops_in_half"]) == (found.mixed.ops, found.mixed.in_half)
    assert [flat.graph.index[name] for name in told["float32"]] == sorted(found.mixed.wide)
    note = next(note for note in document(flat, found).notes if "in float32" in note)
    assert f"{found.mixed.in_half} of {found.mixed.ops} run in it" in note
    for one in found.result.variants:
        for check in one.checks:
            if check.precision == "bf16" and not one.label.endswith("float32"):
                assert all(each.distance <= 2 * 3e-3 for each in check.comparison.outputs)
    plan = tmp_path / "plan.json"
    write(flat, found.tuned, plan=plan)
    assert json.loads(plan.read_text())["made_for"]["options"]["float32"] == told["float32"]
    file = planfile.load(plan)
    job = job_of("mmoe_small.pb")
    again, notes = stored_job(replace(job, flat=flat), file)
    assert again.wide == found.mixed.wide
    assert notes == []
    other, notes = stored_job(replace(job, flat=flat, precision=Precision.FP16), file)
    assert other.wide == frozenset()
    assert any("another precision" in note for note in notes)
    strange = replace(file, made_for={**file.made_for, "options": {"float32": ["nobody"]}})
    with pytest.raises(MsplitError, match="which the graph has not"):
        stored_job(replace(job, flat=flat), strange)
    errors = {}
    for name, more in (("plan", {"plan": plan}), ("whole", {}), ("exact", {"precision": "ieee"})):
        with msplit.prepare(flat, **request(**more)) as prepared:
            errors[name] = prepared.step(job.feeds)
    kept, whole = (max(errors_of([errors[name]], [errors["exact"]]).values()) for name in ("plan", "whole"))
    assert kept < 3e-3 < whole


@pytest.mark.parametrize("most", [0, -1.0, math.nan, math.inf, "many"])
def test_a_bound_is_a_number_above_zero(most):
    with pytest.raises(MsplitError, match="the largest error"):
        TuneSettings(max_error=most)


@pytest.mark.parametrize("precision", ["tf32", "ieee"])
def test_a_bound_is_for_half_precision(precision):
    with pytest.raises(MsplitError, match="nothing is in half precision") as caught:
        msplit.bench(SAMPLES / "mmoe_small.pb", **request(precision=precision, tune=TuneSettings(max_error=1e-2)))
    assert "bf16" in str(caught.value.fix)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["build", "-o", "x", "--max-error", "0.01", "--precision", "bf16"], "give --tune, too"),
        (["build", "-o", "x", "--max-error", "0.01", "--tune"], "give --precision bf16 or fp16"),
        (["tune", "--max-error", "0.01"], "give --precision bf16 or fp16"),
        (["tune", "--max-error", "0", "--precision", "bf16"], "not in the range"),
        (["tune", "--max-error", "-1", "--precision", "bf16"], "not in the range"),
        (["tune", "--max-error", "nan", "--precision", "fp16"], "the largest error is nan"),
    ],
)
def test_what_makes_no_bound_is_refused(arguments, said):
    done = run(arguments[0], SAMPLES / "mmoe_small.pb", *arguments[1:])
    assert done.code == 2
    assert said in " ".join(done.err.split())


def test_a_bound_below_what_float32_does_is_told():
    """On a GPU products are in TF32, which may be further away than the bound."""
    found = MixedPrecision(1e-4, 2e-3, {"y": 2e-3}, 5, 0, frozenset([1, 2]), 2)
    assert not found.holds
    assert choose([1.0] * 4, lambda chosen: 2e-3 + len(chosen), 1e-4) == frozenset()
    (said,) = mixed_notes(found)
    assert "all ops in float32 the outputs are 0.002 away" in said
    assert "--precision ieee" in said
