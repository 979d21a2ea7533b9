"""`msplit profile` on a real GPU."""

from __future__ import annotations

import json

import numpy as np
import pytest

from msplit import api
from msplit.cost import profile as profile_file
from msplit.engines.base import Job
from msplit.engines.cuda.engine import ENGINE
from msplit.inputs.make import make_inputs
from msplit.run.profile import profile
from msplit.run.request import RunRequest
from tests.cli.runner import SAMPLES, fine, msplit

pytestmark = pytest.mark.gpu
BATCH = 64


@pytest.fixture(scope="module")
def flat():
    return api.load(SAMPLES / "mmoe_small.pb")


@pytest.fixture(scope="module")
def found(flat):
    return profile(flat, RunRequest.of(batch=BATCH), seconds=20)[0]


@pytest.mark.alone
def test_the_constants_of_the_device_are_plausible(found):
    known = found.constants
    assert 0.3 < known.node_us < 5
    assert 0 <= known.wait_us < 5
    assert 0 < known.issue_us < known.node_us
    assert known.copy_bytes_per_us > 1e5
    assert known.deep_us[16] > known.deep_us[1]
    assert all(0.8 < ratio < 3 for ratio in known.concurrency.values()), known.concurrency


def test_every_step_has_a_time_a_share_and_a_grid(found):
    assert found.measured == len(found.steps)
    for kernel in found.kernels:
        assert 0.3 < kernel.time_us < 200
        assert kernel.share is None or 0 < kernel.share <= 1
        assert kernel.blocks is not None, "the profiler recorded no grid"
        assert kernel.blocks > 0
        assert kernel.resident >= found.device.sms


@pytest.mark.alone
def test_measured_times_add_up_to_one_stream(flat, found):
    job = Job(flat, np.zeros(len(flat), np.int32), 1, make_inputs(flat, {}, batch=BATCH))
    executable = ENGINE.build(job)
    try:
        executable.device_times(5)
        took = float(np.median(executable.device_times(30))) * 1e6
    finally:
        executable.close()
    total = sum(found.kernels[step.kernel].time_us for step in found.steps)
    assert total == pytest.approx(took, rel=0.3)


def test_two_profiles_agree(flat, found):
    again = profile(flat, RunRequest.of(batch=BATCH), seconds=20, grids=False)[0]
    ratios = [b.time_us / a.time_us for a, b in zip(found.kernels, again.kernels, strict=True)]
    assert 0.9 < float(np.median(ratios)) < 1.1


def test_the_command_writes_what_the_others_read(tmp_path):
    path = tmp_path / "p.json"
    # The profiler may warn on standard error.
    done = msplit("profile", SAMPLES / "mmoe_small.pb", "-o", path, "--batch", str(BATCH), columns=100)
    assert done.code == 0, done.err
    assert "Written" in done.out
    assert profile_file.load(path).measured == 25
    out = fine(
        "assign",
        SAMPLES / "mmoe_small.pb",
        "--costs",
        f"profile={path}",
        "--rules",
        "auto",
        "--dry-run",
        "--format",
        "json",
    ).out
    assert "measured on NVIDIA" in json.loads(out)["costs"]
