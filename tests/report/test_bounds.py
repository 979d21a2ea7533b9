"""Bounds in the report of a bench: which variants they hold for, and what is said of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from msplit import api
from msplit.benchmark.benchmark import limits
from msplit.core.statistics import summarize
from msplit.engines.base import Job
from msplit.engines.cuda import search
from msplit.engines.cuda.options import EngineOptions
from msplit.errors import EngineError
from msplit.inputs.make import make_inputs
from msplit.report import bench_sections
from msplit.report.document import plain
from msplit.schedule.machine import Machine
from msplit.schedule.simulate import SWITCHES, Breakdown
from msplit.verify.results import VariantResult

SAMPLES = Path(__file__).parents[2] / "sample_graphs"


def towers() -> Job:
    flat = api.load(SAMPLES / "towers_small.pb")
    _, costs = api.price(flat, batch=2)
    feeds = make_inputs(flat, {}, batch=2)
    return Job(flat, np.zeros(len(flat), np.int32), 1, feeds, costs=costs, options=EngineOptions("cpu"))


@pytest.fixture(scope="module")
def found():
    return limits(towers())


def variant(label: str, us: float | None, kernels: int, engine: str = "cuda") -> VariantResult:
    device = None if us is None else summarize([us / 1e6] * 5)
    return VariantResult(label, engine, 1, {"kernels": kernels}, host=summarize([1e-3] * 5), device=device)


def test_without_a_gpu_the_steps_go_by_the_data_sheet(found):
    assert found.source == "the data sheet"
    assert found.steps.measured == 0
    assert found.steps.lower_us == max(
        found.steps.critical_path_us, found.steps.bandwidth_us, found.steps.flops_us, found.steps.sm_time_us
    )
    assert found.steps.bandwidth_us <= found.static.bandwidth_us
    assert found.steps.lower_us <= found.steps.serial_us


@pytest.mark.parametrize("problem", [RuntimeError("CUDA error"), EngineError("Conv2D: CUDA out of memory.")])
def test_where_kernels_can_not_be_timed_the_data_sheet_bounds_them(problem, found, monkeypatch):
    """What a bench measured before is worth more than bounds by the clock: they must not end it."""

    def compile_variants(job, ids, names, *, seconds, **options):
        if seconds:
            raise problem
        return real(job, ids, names, seconds=seconds, **options)

    real = search.compile_variants
    monkeypatch.setattr(search, "compile_variants", compile_variants)
    told = limits(towers())
    assert told.source == "the data sheet"
    assert told.steps == found.steps


def test_only_variants_of_the_same_kernels_are_held_against_the_bound(found):
    same, lower = found.steps.steps, found.steps.lower_us
    assert found.reached(variant("a", 2 * lower, same)) == pytest.approx(0.5)
    assert found.reached(variant("b", 2 * lower, same - 3)) is None
    assert found.fused(variant("b", 2 * found.steps.fused_us, same - 3)) == pytest.approx(0.5)
    for other in (variant("c", None, same), variant("d", lower, same, "tensorflow")):
        assert found.reached(other) is None
        assert found.fused(other) is None


def test_the_report_names_the_best_and_what_limits_it(found):
    same, lower = found.steps.steps, found.steps.lower_us
    variants = [variant("one", 4 * lower, same), variant("four", 1.25 * lower, same), variant("fused", lower, same - 2)]
    table = bench_sections.bounds_table(found, variants)
    cells = {row[0]: row for row in table.rows}
    assert cells["four"][3] == "80 %"
    assert "larger" in cells["fused"][3]
    (said,) = bench_sections.sentence(found, variants)
    assert "four reaches 80 % of the bound" in said
    assert "limited by critical path" in said
    assert plain(bench_sections.bounds_payload(found, variants))["reached"]["fused"] is None


def test_the_report_says_where_the_time_of_the_best_goes(found):
    label = "msplit, 2 streams, CUDA graph"
    job = towers()
    ids = api.assign(job.flat, "recsys", streams=2, batch=2).outcome.assignment.ids
    with_ids = limits(job, ids={label: np.maximum(ids, 0)})
    spent = with_ids.spent[label]
    assert spent.makespan_us == pytest.approx(spent.kernels_us + sum(spent.parts.values()))
    assert spent.parts["the step itself"] == pytest.approx(Machine.of_costs(job.costs).step_us)
    assert spent.kernels_us >= with_ids.steps.critical_path_us * (1 - 1e-9)
    _, said = bench_sections.sentence(with_ids, [variant(label, 1.25 * found.steps.lower_us, found.steps.steps)])
    assert said.startswith("Of the ")
    assert "2 streams should take" in said
    assert "µs to start and end the step" in said
    assert plain(bench_sections.bounds_payload(with_ids, []))["spent"][label]["parts"]["company"] == 0.0
    every = Breakdown(100.0, 50.0, {name: 10.0 for name, _ in SWITCHES})
    said = bench_sections.sentence(replace(with_ids, spent={label: every}), [variant(label, 50.0, found.steps.steps)])[
        1
    ]
    assert said.count("10.0 µs") == len(SWITCHES)


def test_a_full_gpu_has_nothing_to_gain(found):
    steps = replace(found.steps, sm_time_us=found.steps.serial_us, lower_us=found.steps.serial_us, limit="SM time")
    (said,) = bench_sections.sentence(replace(found, steps=steps), [])
    assert "nothing to gain: SM time" in said
