"""Several processes on one GPU, which NVIDIA's multi-process service has run beside each other."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import msplit
from msplit.engines.environment import mps

pytestmark = pytest.mark.gpu


@pytest.mark.skipif(shutil.which("nvidia-cuda-mps-control") is None, reason="nvidia-cuda-mps-control is not installed")
def test_two_processes_share_a_gpu(tmp_path: Path) -> None:
    if why := mps(start=True):
        pytest.skip(why)
    built = tmp_path / "small.build"
    msplit.build("sample_graphs/mmoe_small.pb", built, engine="cuda", batches=(1, 16), effort="fast")
    rng = np.random.default_rng(0)
    with msplit.open(built) as runner, msplit.pool(built, groups=2, workers=2) as pool:
        assert [one.place for one in pool.processes()] == ["cuda", "cuda"]
        given = [{"x": rng.standard_normal((1 + n % 16, 64)).astype(np.float32)} for n in range(200)]
        for one, answer in zip(given, [pool.submit(one) for one in given], strict=True):
            expected = runner.step({"x": np.resize(one["x"], (16, 64))})
            for name, value in answer.result(60).items():
                np.testing.assert_allclose(value, expected[name][: len(value)], rtol=2e-3, atol=2e-3)
        assert all(one.stats.steps for one in pool.processes())


@pytest.mark.skipif(not mps(), reason="MPS runs here")
@pytest.mark.skipif(shutil.which("nvidia-cuda-mps-control") is not None, reason="msplit would start MPS")
def test_without_it_they_are_refused(tmp_path: Path) -> None:
    built = tmp_path / "small.build"
    msplit.build("sample_graphs/mmoe_small.pb", built, engine="cuda", batches=(1,), effort="fast")
    with pytest.raises(
        msplit.MsplitError, match="2 processes of a GPU answer half of what one does without NVIDIA's MPS"
    ):
        msplit.pool(built, groups=2, workers=2)
