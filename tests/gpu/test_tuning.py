"""Tuning on a real GPU: what candidates cost, what the tuned plan gains, and that it runs again as it was written."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from msplit import api
from msplit.api import bench, compare
from msplit.core.arguments import Precision
from msplit.engines.base import Job
from msplit.engines.cuda import search
from msplit.engines.cuda.engine import ENGINE
from msplit.inputs.make import make_inputs
from msplit.inputs.reference import Reference, save_reference
from msplit.run.tuning import TuneSettings, write
from msplit.schedule.search import candidates as all_candidates
from msplit.schedule.search import single

pytestmark = pytest.mark.gpu

SAMPLES = Path(__file__).parents[2] / "sample_graphs"
QUICK = api.Settings(duration=0.5, warmup=0.05, builds=2)


def job_of(name: str, batch: int = 16) -> Job:
    flat = api.load(SAMPLES / name)
    _, costs = api.price(flat, batch=batch)
    return Job(flat, np.zeros(len(flat), np.int32), 1, make_inputs(flat, {}, batch=batch), costs=costs)


@pytest.mark.parametrize("name", ["mmoe_small.pb", "lstm_small.pb", "keras_inception"])
def test_the_tuned_plan_is_verified_no_slower_than_one_stream_and_runs_again(name: str, tmp_path: Path) -> None:
    job = job_of(name)
    reference = tmp_path / "reference.npz"
    save_reference(
        reference,
        Reference(job.feeds, ENGINE.build(replace(job, precision=Precision.IEEE)).step(job.feeds), "one stream"),
    )
    request = {
        "streams": (1, 8),
        "engine": "cuda",
        "batch": 16,
        "compare_tensorflow": False,
        "reference": reference,
        "settings": QUICK,
        "tune": TuneSettings(6.0, kernels=("plain",)),
        "fuse": False,
        "group": False,
    }
    found = bench(job.flat, **request)
    assert not found.result.failed, found.result.describe_failures()
    assert found.limits is not None
    assert found.limits.source == "measured"
    tuned = found.tuned
    assert tuned is not None
    if tuned.gain is None:  # one stream it stays, which the smallest models may deserve
        assert tuned.streams == 1
        assert name != "mmoe_small.pb"
        return
    assert tuned.gain.low > 1
    (label,) = [now for asked, now in found.labels.items() if asked.startswith("msplit, tuned")]
    measured = next(variant for variant in found.result.variants if variant.label == label)
    assert measured.ratio_over("msplit, 1 stream, CUDA graph", "device").value > 0.98
    write(job.flat, tuned, plan=tmp_path / "plan.json")
    again = bench(
        job.flat,
        streams=(1,),
        engine="cuda",
        batch=16,
        compare_tensorflow=False,
        reference=reference,
        settings=QUICK,
        plan=tmp_path / "plan.json",
        fuse=False,
        group=False,
    )
    assert not again.result.failed
    label = again.labels[f"msplit, {tmp_path / 'plan.json'}"]
    stored = next(variant for variant in again.result.variants if variant.label == label)
    assert (stored.facts["streams"], stored.facts["waits"]) == (tuned.streams, tuned.waits)


def test_candidates_are_cheap_and_agree_with_the_engine() -> None:
    """A candidate takes the time that the engine's own executable of it takes."""
    job = job_of("mmoe_small.pb", batch=128)
    variants = search.compile_variants(job, np.full(len(job.flat), -1, np.int32), ("plain",), seconds=2.0)
    plain = variants["plain"]
    device = search.GpuRunner(variants)
    candidates = all_candidates(plain.problem, "plain", 8, ())
    runners = [single(plain.problem, "plain"), *candidates[:5]]
    device.times(runners, 1)
    device.renew()
    start = time.perf_counter()
    times = device.times(runners, 5)
    assert (time.perf_counter() - start) / len(runners) < 0.25
    executable = ENGINE.build(job)
    own = float(np.median(executable.device_times(50)))
    executable.close()
    assert np.median(times[0]) == pytest.approx(own, rel=0.1)
    device.renew()


def test_compare_measures() -> None:
    found = compare(api.load(SAMPLES / "mmoe_small.pb"), streams=8, batch=128)
    assert found.device
    rows = [row for row in found.rows if row.measured_us is not None]
    assert len(rows) > 5
    assert max(row.gain.value for row in rows if row.gain is not None) > 1.1
