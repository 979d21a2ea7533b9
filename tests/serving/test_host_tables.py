"""Counts of lookups in tables that stay in the host's memory: of pools, of pools of processes, and of a real server."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import msplit
from msplit.engines.cuda.kernels import host_tables
from msplit.serving.pool.settings import Stats
from tests import forked
from tests.engines.cuda.test_table_memory import MEMORY, ON_CPU, ROWS, WIDTH, ranker, requests
from tests.serving.server.running import Server, start
from tests.serving.server.test_metrics import samples

torch = pytest.importorskip("torch")

BATCH = 16
A_STEP = BATCH * (3 + 3)
"""Rows that a step looks up in the tables of the host: one for each row in three of them, and three of a bag."""
BETWEEN = 16
"""Steps from one refresh of the cache to the next at most."""


_forked = forked.always(forked.instead, forked.TENSORFLOW)


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tables") / "ranker"
    msplit.build(ranker(), path, batches=[BATCH], table_memory=MEMORY, **ON_CPU)
    return path


def check(stats: Stats) -> None:
    """What holds whenever somebody looks."""
    assert stats.table_rows_looked_up % A_STEP == 0
    assert 0 <= stats.table_rows_found <= stats.table_rows_looked_up
    missed = stats.table_rows_looked_up - stats.table_rows_found
    assert stats.table_bus_bytes == (missed + stats.table_rows_admitted) * WIDTH * 4
    assert stats.host_table_bytes % (4 * ROWS * WIDTH * 4) == 0
    assert 0 < stats.table_cache_bytes <= MEMORY * 1e9 * (stats.host_table_bytes // (4 * ROWS * WIDTH * 4))


def added(pool: Any, turns: int) -> Stats:
    """Counts of so many steps, of pools that count up to the last refresh."""
    before = pool.stats()
    for one in requests(turns, BATCH, seed=1):
        pool.step(one)
    after = pool.stats()
    for stats in (before, after):
        check(stats)
    names = ("table_rows_looked_up", "table_rows_found", "table_rows_admitted", "table_bus_bytes")
    return Stats(**{name: getattr(after, name) - getattr(before, name) for name in names})


def test_a_pool_counts_each_row_that_is_looked_up_once(build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_tables, "_EVERY", 1)
    with msplit.pool(build, device="cpu", groups=2) as pool:
        found = added(pool, 40)
        assert found.table_rows_looked_up == 40 * A_STEP
        assert 0.2 < found.table_hit_rate < 1  # type: ignore[operator]
        assert pool.stats().host_table_bytes == 4 * ROWS * WIDTH * 4
    assert Stats().table_hit_rate is None


def test_what_is_counted_is_what_the_cache_had(build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that all are in the cache, and rows of which none is."""
    monkeypatch.setattr(host_tables, "_EVERY", 1)
    with msplit.pool(build, device="cpu", groups=1) as pool:
        same = {"ids": np.ones((BATCH, 4), np.int64), "bag": np.ones((BATCH, 3), np.int32)}
        for _ in range(3):
            pool.step(same)
        before = pool.stats()
        pool.step(same)
        hot = pool.stats()
        assert hot.table_rows_found - before.table_rows_found == A_STEP
        assert hot.table_bus_bytes == before.table_bus_bytes
        rows = np.arange(BATCH)
        new = {"ids": np.stack([rows, *[ROWS - 1 - rows] * 3], 1), "bag": np.stack([ROWS - 20 - rows] * 3, 1)}
        new["ids"][:, 2] += ROWS
        pool.step({"ids": new["ids"], "bag": new["bag"].astype(np.int32)})
        cold = pool.stats()
        assert cold.table_rows_found == hot.table_rows_found
        assert cold.table_rows_looked_up - hot.table_rows_looked_up == A_STEP
        assert 0 < cold.table_rows_admitted - hot.table_rows_admitted <= 4 * BATCH


def test_counts_are_right_while_steps_run(build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_tables, "_EVERY", 1)
    with msplit.pool(build, device="cpu", groups=2) as pool:
        over, seen = threading.Event(), [pool.stats()]

        def look() -> None:
            while not over.is_set():
                seen.append(pool.stats())

        thread = threading.Thread(target=look)
        thread.start()
        for future in [pool.submit(one) for one in requests(60, BATCH)]:
            future.result(60)
        over.set()
        thread.join()
        for before, after in itertools.pairwise(seen):
            check(after)
            assert after.table_rows_looked_up >= before.table_rows_looked_up
            assert after.table_bus_bytes >= before.table_bus_bytes


def test_counts_of_processes_are_added(build: Path) -> None:
    with msplit.pool(build, device="cpu", groups=1, workers=2) as pool:
        assert pool.stats().host_table_bytes == 2 * 4 * ROWS * WIDTH * 4, "before any request"
        found = added(pool, 100)
        # Each process counts up to its last refresh.
        assert abs(found.table_rows_looked_up - 100 * A_STEP) <= 2 * (BETWEEN - 1) * A_STEP
        assert found.table_rows_found
        each = [process.stats for process in pool.processes()]
        for one in each:
            check(one)
        assert sum(one.table_rows_looked_up for one in each) == pool.stats().table_rows_looked_up


def test_a_model_without_such_tables_has_none() -> None:
    with msplit.pool(ranker(), batches=[BATCH], groups=1, effort="fast", **ON_CPU) as pool:
        pool.step(requests(1, BATCH)[0])
        assert pool.stats().host_table_bytes == pool.stats().table_rows_looked_up == 0


@pytest.fixture(scope="module", params=["", "workers=2"])
def server(request: Any, build: Path) -> Iterator[Server]:
    options = ["--pool", request.param] if request.param else []
    running = start(build, "--device", "cpu", *options)
    yield running
    running.stop()


def counted(server: Server) -> dict[str, float]:
    """The model's metrics."""
    found = samples(server.text("/metrics"))
    return {name[0].removeprefix("msplit_pool_"): value for name, value in found.items() if "msplit_pool_" in name[0]}


def test_a_server_tells_them(server: Server, build: Path) -> None:
    before = counted(server)
    assert before["host_table_bytes"] % (4 * ROWS * WIDTH * 4) == 0
    assert 0 < before["table_cache_bytes"] < 2 * MEMORY * 1e9
    for one in requests(60, BATCH):
        body = {"inputs": {name: value.tolist() for name, value in one.items()}}
        assert server.http(f"/v1/models/{build.name}:predict", body)[0] == 200
    after = counted(server)
    more = after["table_rows_looked_up_total"] - before["table_rows_looked_up_total"]
    assert more % A_STEP == 0
    assert abs(more / A_STEP - 60) <= 2 * (BETWEEN - 1)
    rate = after["table_rows_found_total"] / after["table_rows_looked_up_total"]
    assert after["table_hit_rate"] == pytest.approx(rate)
    missed = after["table_rows_looked_up_total"] - after["table_rows_found_total"]
    assert after["table_bus_bytes_total"] == (missed + after["table_rows_admitted_total"]) * WIDTH * 4
