"""Several processes on one GPU, which NVIDIA's multi-process service has run beside each other."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import msplit
from msplit.engines.environment import mps
from msplit.serving.pool.pool import Pool
from tests.serving.pool.remote import alive, kill, wait, whole

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


GIB = 1 << 30


@pytest.mark.tf
@pytest.mark.skipif(shutil.which("nvidia-cuda-mps-control") is None, reason="nvidia-cuda-mps-control is not installed")
def test_weights_of_a_build_lie_there_once(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    if why := mps(start=True):
        pytest.skip(why)
    torch, tf = pytest.importorskip("torch"), pytest.importorskip("tensorflow")
    for number in (1, 2):
        module = tf.Module()
        module.table = tf.Variable(np.full((GIB // 256, 64), number, np.float32))
        step = tf.function(
            lambda ids: {"y": tf.gather(module.table, ids) * 3.0},  # noqa: B023  traced below
            input_signature=[tf.TensorSpec((None,), tf.int32, name="ids")],
        )
        tf.saved_model.save(module, str(tmp_path / f"model{number}"), signatures=step.get_concrete_function())
        msplit.build(tmp_path / f"model{number}", tmp_path / f"{number}", engine="cuda", batches=(1, 64), effort="fast")

    def right(pool: Pool, number: int) -> None:
        given = [{"ids": np.arange(rows, dtype=np.int32) * 1000} for rows in (1, 64, 200, 5) * 4]
        for one, answer in zip(given, [pool.submit(one) for one in given], strict=True):
            assert answer.result(60)["y"].tolist() == [[3.0 * number] * 64] * len(one["ids"])

    free = dict[int, int]()
    for workers in (1, 3):
        with msplit.pool(tmp_path / "1", groups=2, workers=workers) as pool:
            right(pool, 1)
            free[workers] = torch.cuda.mem_get_info()[0]
            assert not any("weights of their own" in note for note in pool.about.notes)
    each = (free[1] - free[3]) / 2
    record_property("MiB of a further process, beside weights of 1 GiB", round(each / 2**20))
    assert each < 0.9 * GIB
    with msplit.pool(tmp_path / "1", groups=2, workers=2) as pool:
        pool.update(tmp_path / "2")
        right(pool, 2)
        pid = kill(pool)
        wait(lambda: not alive(pid) and whole(pool))
        right(pool, 2)
        pool.update(tmp_path / "1")
        right(pool, 1)


@pytest.mark.skipif(not mps(), reason="MPS runs here")
@pytest.mark.skipif(shutil.which("nvidia-cuda-mps-control") is not None, reason="msplit would start MPS")
def test_without_it_they_are_refused(tmp_path: Path) -> None:
    built = tmp_path / "small.build"
    msplit.build("sample_graphs/mmoe_small.pb", built, engine="cuda", batches=(1,), effort="fast")
    with pytest.raises(
        msplit.MsplitError, match="2 processes of a GPU answer half of what one does without NVIDIA's MPS"
    ):
        msplit.pool(built, groups=2, workers=2)
