"""Kernels chosen in the simulator, on a real GPU: they are verified, they gain, and the plan that `assign` writes runs as it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from msplit import api, rules
from msplit.api import bench, compare
from msplit.assignment.plans import stored_job
from msplit.core.arguments import Precision
from msplit.cost.profile import Workload
from msplit.engines.cuda.engine import ENGINE
from msplit.inputs.reference import Reference, save_reference
from msplit.run.compilation import job_of
from msplit.schedule import planfile

pytestmark = pytest.mark.gpu

SAMPLES = Path(__file__).parents[2] / "sample_graphs"
BEST = "{version: 1, streams: 8, rules: [auto: {kernels: best}, colocation, propagate]}"
ONE = "msplit, 1 stream, CUDA graph"


@pytest.mark.parametrize("name", ["mmoe_small.pb", "lstm_small.pb", "towers_small.pb"])
def test_what_auto_likes_best_is_right_and_gains_about_what_is_predicted(name: str, tmp_path: Path) -> None:
    flat = api.load(SAMPLES / name)
    job = job_of(flat, api.price(flat, batch=16)[1], Workload(16))
    reference = tmp_path / "reference.npz"
    save_reference(
        reference,
        Reference(job.feeds, ENGINE.build(replace(job, precision=Precision.IEEE)).step(job.feeds), "one stream"),
    )
    plan = tmp_path / "plan.json"
    assigned = api.assign(flat, rules.parse(BEST, "text"), batch=16)
    assert assigned.kernels is not None
    api.emit(assigned, "plan", plan)
    file = planfile.load(plan)
    assert file.made_for["gpu"]
    planned, notes = stored_job(job, file)
    assert notes == []
    assert ENGINE.compile(planned).runs_as_stored(planned)
    found = bench(
        flat,
        streams=(1, 8),
        engine="cuda",
        batch=16,
        compare_tensorflow=False,
        reference=reference,
        settings=api.Settings(duration=0.5, warmup=0.05, builds=2),
        ruleset="auto",
        plan=plan,
    )
    assert not found.result.failed, found.result.describe_failures()
    (stored,) = [variant for variant in found.result.variants if variant.label == found.labels[f"msplit, {plan}"]]
    gain = stored.ratio_over(ONE, "device")
    assert gain is not None
    assert gain.value > 1.2
    assert assigned.kernels.gain / 4 < gain.value < assigned.kernels.gain * 4


def test_each_way_to_make_kernels_is_measured() -> None:
    found = compare(api.load(SAMPLES / "mmoe_small.pb"), streams=4, batch=16)
    assert found.no_kernels == ""
    assert all(row.measured_us for row in found.kernels)
    assert found.kernels[-1].gain is not None
    assert found.kernels[-1].gain.value > 1.2
