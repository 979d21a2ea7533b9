"""Any number of rows on a real GPU: cut into captured steps and joined, equal to the bit to those steps, small requests beside them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
SAMPLES = ["mmoe_small.pb", "towers_small.pb"]


def rows_of(inputs: Any, rows: int, seed: int = 0) -> dict[str, Any]:
    """A made-up request; integers are small, as indices are."""
    rng = np.random.default_rng(seed)
    found = {}
    for name, (dtype, shape) in inputs.items():
        wanted = [rows, *shape[1:]]
        drawn = rng.integers(0, 8, wanted) if np.dtype(dtype).kind in "iu" else rng.standard_normal(wanted)
        found[name] = drawn.astype(dtype)
    return found


def part(feeds: dict[str, Any], start: int, end: int) -> dict[str, Any]:
    return {name: value[start:end] for name, value in feeds.items()}


@pytest.fixture(scope="module", params=SAMPLES)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    import msplit

    path = tmp_path_factory.mktemp("rows") / "build"
    msplit.build(ROOT / "sample_graphs" / request.param, path, streams=(4,), engine="cuda", batches=(1, 8, 32))
    return path


@pytest.mark.parametrize("rows", [0, 1, 31, 33, 96, 100])
def test_a_runner_takes_any_number_of_rows(built: Path, rows: int) -> None:
    import torch

    import msplit

    with msplit.open(built) as runner:
        feeds = rows_of(runner.inputs, rows)
        found = runner.step(feeds)
        parts = [runner.step(part(feeds, start, start + 32)) for start in range(0, rows, 32)]
        on_device = runner.step({name: torch.from_numpy(value).cuda() for name, value in feeds.items()}, on_device=True)
        for name, value in found.items():
            assert len(value) == rows
            wanted = np.concatenate([one[name] for one in parts]) if parts else value[:0]
            np.testing.assert_array_equal(value, wanted)
            assert on_device[name].is_cuda
            np.testing.assert_allclose(on_device[name].cpu().numpy(), value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [0, 5, 24])
def test_what_was_prepared_for_one_batch_takes_any_number(rows: int) -> None:
    import msplit

    with msplit.prepare(ROOT / "sample_graphs" / "mmoe_small.pb", streams=(1, 4), engine="cuda", batch=8) as runner:
        assert runner.facts["captured"]
        feeds = rows_of(runner.inputs, rows)
        found = runner.step(feeds)
        whole = [part(feeds, start, start + 8) for start in range(0, rows - rows % 8, 8)]
        for name, value in found.items():
            assert len(value) == rows
            for number, one in enumerate(whole):
                np.testing.assert_array_equal(value[8 * number : 8 * number + 8], runner.step(one)[name])


@pytest.mark.parametrize("on_device", [False, True])
def test_large_and_small_requests_of_a_pool(built: Path, on_device: bool) -> None:
    import msplit

    with msplit.pool(built, groups=4) as pool, msplit.open(built) as runner:
        sizes = [0, 1, 100, 3, 33, 320, 8, 1]
        requests = [rows_of(runner.inputs, rows, seed) for seed, rows in enumerate(sizes)]
        for _ in range(20):
            futures = [pool.submit(one, on_device=on_device) for one in requests]
            for one, future in zip(requests, futures, strict=True):
                answer = future.result(60)
                for name, value in runner.step(one).items():
                    got = answer[name].cpu().numpy() if on_device else answer[name]
                    assert got.shape == value.shape
                    np.testing.assert_allclose(got, value, rtol=2e-2, atol=2e-3)
        stats = pool.stats()
        assert (stats.failed, stats.waiting, stats.in_flight) == (0, 0, 0)


def test_a_small_request_does_not_wait_for_a_large_one(built: Path) -> None:
    import msplit

    with msplit.pool(built, groups=2) as pool, msplit.open(built) as runner:
        large, small = rows_of(runner.inputs, 32 * 200), rows_of(runner.inputs, 1)
        start = time.perf_counter()
        pool.step(large)
        alone = time.perf_counter() - start
        future = pool.submit(large)
        start = time.perf_counter()
        pool.step(small)
        waited = time.perf_counter() - start
        assert not future.done()
        future.result(60)
        assert waited < alone / 5
