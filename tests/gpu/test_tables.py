"""On a GPU: lookup tables in the host's memory give what those on the GPU give, whatever the cache has, in steps that overlap, too."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import msplit
from msplit.engines.cuda.kernels import host_tables
from tests.engines.cuda.cases import outputs_of_tensorflow
from tests.engines.cuda.kernels.test_host_tables import looked_up
from tests.engines.cuda.test_mapped_tables import saved_in_shards
from tests.engines.cuda.test_table_memory import ROWS, WIDTH, int8, ranker, requests, saved_ranker, tables_of

pytestmark = pytest.mark.gpu
pytest.importorskip("tensorflow")
torch = pytest.importorskip("torch")

OPTIONS: dict[str, Any] = {"engine": "cuda", "streams": 4, "precision": "ieee"}
INT8 = "0.04,rows=int8"
MEMORY = 0.04
"""GB: half of the tables; 27 MB of it are notes and the numbers of rows."""
LARGE = 128
"""Times the rows of the tests on a CPU."""


def feeds(count: int, rows: int = 16, *, seed: int = 0) -> list[dict[str, Any]]:
    """Rows that come again and again, and others."""
    return [{**one, "ids": one["ids"] * [1, LARGE, LARGE, LARGE]} for one in requests(count, rows, seed=seed)]


@pytest.mark.parametrize("how", [{}, {"capture": False}, {"fuse": False, "group": False}])
def test_rows_of_the_host_are_those_of_the_gpu(how: dict[str, Any]) -> None:
    flat = ranker(scale=LARGE)
    with (
        msplit.prepare(flat, batch=16, table_memory=MEMORY, **OPTIONS, **how) as small,
        msplit.prepare(flat, batch=16, **OPTIONS, **how) as whole,
    ):
        assert small.facts["host_table_bytes"] == 4 * LARGE * ROWS * WIDTH * 4
        for number, one in enumerate(feeds(60)):
            found, wanted = small.step(one)["out"], whole.step(one)["out"]
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
            if not number % 20:
                np.testing.assert_allclose(found, outputs_of_tensorflow(flat, one)["out"], rtol=1e-4, atol=1e-4)
        assert small.executable.facts()["table_hit_rate"] > 0.2


@pytest.mark.parametrize("missed", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float64", "int8", "bf16"])
def test_rows_are_right_to_the_bit_however_many_the_cache_misses(kind: str, missed: float) -> None:
    """Of columns that are loaded by 16 bytes and others, of one id a row and bags, in tiles of several shapes."""
    chance, device = np.random.default_rng(0), torch.device("cuda", torch.cuda.current_device())
    for width in (128, 36, 7):
        columns = [(width, count, kind) for count in (1, 1, 3, 8, 27, 100)]
        looked_up(chance, device, columns, 1024, 1 - missed, (20_000,))


@pytest.mark.parametrize("how", [{}, {"capture": False}, {"precision": "bf16"}, {"fuse": False, "group": False}])
def test_int8_rows_are_those_of_a_model_with_rounded_tables(how: dict[str, Any]) -> None:
    options = {**OPTIONS, **how}
    near = {"rtol": 2e-2, "atol": 0.5} if "precision" in how else {"rtol": 1e-5, "atol": 1e-5}
    with (
        msplit.prepare(ranker(scale=LARGE), batch=16, table_memory=INT8, **options) as small,
        msplit.prepare(ranker(scale=LARGE, of_rows=int8), batch=16, **options) as whole,
    ):
        assert small.facts["host_table_bytes"] == 4 * LARGE * ROWS * 16
        for one in feeds(60):
            np.testing.assert_allclose(small.step(one)["out"], whole.step(one)["out"], **near)
        facts = small.executable.facts()
        assert facts["table_hit_rate"] > 0.2
        missed = facts["table_rows_looked_up"] - facts["table_rows_found"]
        assert facts["table_bus_bytes"] == (missed + facts["table_rows_admitted"]) * 16


@pytest.mark.parametrize("memory", [MEMORY, INT8])
def test_every_row_that_is_looked_up_is_counted(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while steps of several slots run, and counts are read."""
    monkeypatch.setattr(host_tables, "_EVERY", 1)
    with msplit.pool(ranker(scale=LARGE), batches=(16,), groups=4, table_memory=memory, **OPTIONS) as pool:
        every, a_step = feeds(200), 16 * 6
        pool.step(every[0])
        torch.cuda.synchronize()
        before = pool.stats()
        going = [pool.submit(one) for one in every]
        seen = []
        for future in going:
            future.result(60)
            seen.append(pool.stats())
        torch.cuda.synchronize()
        after = pool.stats()
        assert after.table_rows_looked_up - before.table_rows_looked_up == len(every) * a_step
        row = 16 if memory == INT8 else 4 * WIDTH
        for one, other in itertools.pairwise([before, *seen, after]):
            assert other.table_rows_looked_up >= one.table_rows_looked_up
            assert other.table_rows_found >= one.table_rows_found
            missed = other.table_rows_looked_up - other.table_rows_found
            assert other.table_bus_bytes == (missed + other.table_rows_admitted) * row
        assert 0.2 < after.table_hit_rate < 1


@pytest.mark.parametrize("memory", [MEMORY, INT8])
def test_steps_of_a_pool_overlap_while_rows_come_in_and_change(memory: Any) -> None:
    """Refreshes wait for steps of all slots, and those wait for refreshes: a row is never read while it is replaced."""
    every = feeds(400, 16)
    with msplit.prepare(ranker(scale=LARGE, of_rows=int8 if memory == INT8 else None), batch=16, **OPTIONS) as whole:
        wanted = [whole.step(one)["out"] for one in every]
    with msplit.pool(ranker(scale=LARGE), batches=(16,), groups=8, table_memory=memory, **OPTIONS) as pool:
        for _ in range(10):
            going = [pool.submit(one) for one in every]
            for future, right in zip(going, wanted, strict=True):
                np.testing.assert_allclose(future.result(60)["out"], right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("memory", [MEMORY, INT8])
def test_a_build_brings_its_kernels(memory: Any, tmp_path: Path) -> None:
    """It is opened where nothing compiles: the kernel that refreshes a cache is in it."""
    msplit.build(ranker(scale=LARGE), tmp_path / "build", batches=[16], table_memory=memory, **OPTIONS)
    of_rows = int8 if memory == INT8 else None
    with msplit.prepare(ranker(scale=LARGE, of_rows=of_rows), batch=16, **OPTIONS) as whole:
        every = feeds(20)
        np.savez(
            tmp_path / "feeds.npz",
            **{f"{name}_{at}": value for at, one in enumerate(every) for name, value in one.items()},
        )
        np.save(tmp_path / "out.npy", [whole.step(one)["out"] for one in every])
    code = (
        "import numpy as np, msplit, sys\n"
        "from msplit.engines.cuda.kernels import launch\n"
        "launch.can_compile = lambda: False\n"
        f"given = np.load({str(tmp_path / 'feeds.npz')!r}); right = np.load({str(tmp_path / 'out.npy')!r})\n"
        f"with msplit.open({str(tmp_path / 'build')!r}) as runner:\n"
        "    for at, wanted in enumerate(right):\n"
        "        found = runner.step({name: given[f'{name}_{at}'] for name in ('ids', 'bag')})['out']\n"
        "        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)\n"
        "    assert runner.executable.facts()['table_hit_rate'] > 0.2\n"
    )
    kept = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", code], env=kept, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("memory", [MEMORY, INT8])
def test_new_rows_take_the_place_of_those_in_the_cache(memory: Any, tmp_path: Path) -> None:
    from tests.engines.cuda.test_table_memory import saved_ranker

    path = saved_ranker(tmp_path / "model", scale=LARGE)
    with (
        msplit.pool(path, batches=(16,), groups=4, table_memory=memory, **OPTIONS) as pool,
        msplit.prepare(path, batch=16, **OPTIONS) as whole,
    ):
        if memory == INT8:
            whole.update({name: int8(value) for name, value in tables_of(path).items() if name != "table_0"})
        for turn in range(3):
            every = feeds(100, seed=turn)
            going = [pool.submit(one) for one in every]
            for one, future in zip(every, going, strict=True):
                np.testing.assert_allclose(future.result(60)["out"], whole.step(one)["out"], rtol=1e-5, atol=1e-5)
            ids = np.arange(0, 2 * LARGE * ROWS, 7 + turn)
            rows = np.full((len(ids), WIDTH), turn, np.float32)
            pool.update(rows={"table_2": (ids, rows)})
            whole.update(rows={"table_2": (ids, int8(rows) if memory == INT8 else rows)})


@pytest.mark.parametrize("how", [{}, {"capture": False}, {"precision": "bf16"}])
def test_tables_of_the_host_are_trained_to_the_bit_as_those_of_the_gpu(how: dict[str, Any], tmp_path: Path) -> None:
    """Checkpoints are the same, and training goes on from them."""
    from tests.training import test_host_tables as training

    model, options = training.ranker(tmp_path / "model.meta"), {**OPTIONS, **how}
    fed = training.batches(40, 64)
    with (
        msplit.Trainer(model, "train_op", ["loss"], table_memory=training.MEMORY, **options) as small,
        msplit.Trainer(model, "train_op", ["loss"], **options) as whole,
    ):
        assert training.losses(small.run(fed[:20], fetch_every=1)) == training.losses(
            whole.run(fed[:20], fetch_every=1)
        )
        assert small.runner is not None
        assert small.runner.facts["host_state_bytes"] == training.SIZE
        ours = small.save(tmp_path / "ours")
        assert training.tensors(ours) == training.tensors(whole.save(tmp_path / "whole"))
        after = training.losses(small.run(fed[20:], fetch_every=1))
        small.restore(ours)
        assert training.losses(small.run(fed[20:], fetch_every=1)) == after
        assert training.losses(whole.run(fed[20:], fetch_every=1)) == after
        assert training.same(small.variables, whole.variables)


@pytest.mark.parametrize("whole", [False, True])
def test_tables_are_read_in_files_and_new_rows_go_to_a_copy(whole: bool, tmp_path: Path) -> None:
    """The captured graph reads the copy under the addresses that the file had."""
    path = saved_ranker(tmp_path / "model", scale=LARGE)
    path = saved_in_shards(path, tmp_path / "shards", {1: (0, 16), 2: (1, 48), 3: (1, 0)})
    new: Any = {"rows": {"table_2": (np.arange(50), np.full((50, WIDTH), 7, np.float32))}}
    if whole:
        new = {"source": str(saved_ranker(tmp_path / "other", scale=LARGE, seed=1))}
    with (
        msplit.prepare(path, batch=16, table_memory=MEMORY, **OPTIONS) as small,
        msplit.prepare(path, batch=16, **OPTIONS) as plain,
    ):
        assert small.executable.facts()["host_tables"] == "mapped from files"
        for seed in range(2):
            for one in feeds(40, seed=seed):
                np.testing.assert_allclose(small.step(one)["out"], plain.step(one)["out"], rtol=1e-5, atol=1e-5)
            if not seed:
                small.update(**new)
                plain.update(**new)
        assert "updated" in small.executable.facts()["host_tables"]
