"""Models with more lookup tables than there is memory for on the device: prepared, built, in a pool, and with new rows."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import msplit
from msplit.engines.cuda.device.device import Device
from msplit.engines.cuda.kernels import host_tables
from msplit.engines.cuda.kernels.host_tables import HostTables, RowCache
from msplit.errors import MsplitError
from tests.engines.cuda.cases import graph_of

torch = pytest.importorskip("torch")

ROWS, WIDTH = 5_000, 8
ON_CPU: dict[str, Any] = {"engine": "cuda", "device": "cpu", "streams": (2,)}
MEMORY = 0.0003
"""GB: less than half of the tables."""


@pytest.fixture(autouse=True)
def few_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_tables, "_NOTES_OF_CPU", 1 << 10)


def ranker(*, read_whole: bool = False, scale: int = 1) -> Any:
    """Three large tables, of which one is read by two columns, and a small one; `scale` makes the large ones larger."""

    def build(tf: Any, v1: Any) -> None:
        chance = np.random.default_rng(0)
        ids = v1.placeholder(tf.int64, [None, 4], name="ids")
        bag = v1.placeholder(tf.int32, [None, 3], name="bag")
        sizes = (100, scale * ROWS, 2 * scale * ROWS, scale * ROWS)
        tables = [
            tf.identity(
                tf.constant(chance.standard_normal((size, WIDTH)).astype(np.float32), name=f"table_{size}_{at}")
            )
            for at, size in enumerate(sizes)
        ]
        columns = [tf.gather(table, ids[:, number]) for number, table in enumerate(tables)]
        columns.append(tf.reduce_mean(tf.gather(tables[1], bag), 1))
        wide = tf.concat(columns, 1)
        weights = tf.constant(chance.standard_normal((5 * WIDTH, 3)).astype(np.float32))
        out = tf.nn.relu(wide @ weights)
        if read_whole:
            out += tf.reduce_max(tf.matmul(columns[0], tables[2], transpose_b=True))
        tf.identity(out, name="out")

    return graph_of(build, outputs=["out"])


def requests(count: int, rows: int = 16, *, seed: int = 0) -> list[dict[str, Any]]:
    """Rows that come again and again, and others."""
    chance = np.random.default_rng(seed)
    return [
        {
            "ids": np.minimum(chance.zipf(1.3, (rows, 4)) - 1, [99, ROWS - 1, 2 * ROWS - 1, ROWS - 1]),
            "bag": chance.integers(0, ROWS, (rows, 3)).astype(np.int32),
        }
        for _ in range(count)
    ]


def test_rows_of_the_host_are_those_of_the_device() -> None:
    flat = ranker()
    with (
        msplit.prepare(flat, batch=16, table_memory=MEMORY, **ON_CPU) as small,
        msplit.prepare(flat, batch=16, **ON_CPU) as whole,
    ):
        for one in requests(40):
            np.testing.assert_array_equal(small.step(one)["out"], whole.step(one)["out"])
        facts = small.executable.facts()
    assert facts["host_table_bytes"] == 4 * ROWS * WIDTH * 4
    assert facts["table_cache_bytes"] < MEMORY * 1e9
    assert 0.2 < facts["table_hit_rate"] < 1
    assert facts["weight_bytes"] < whole.facts["weight_bytes"] - facts["host_table_bytes"] + 4096


def test_a_table_that_something_else_reads_stays_on_the_device() -> None:
    with msplit.prepare(ranker(read_whole=True), batch=4, table_memory=MEMORY, **ON_CPU) as runner:
        assert runner.facts["host_table_bytes"] == 2 * ROWS * WIDTH * 4


@pytest.mark.parametrize(
    "how", [{"fuse": False, "group": False}, {"group": False}, {"capture": False}, {"effort": "fast"}]
)
def test_other_kernels_read_the_same_rows(how: dict[str, Any]) -> None:
    flat = ranker()
    with (
        msplit.prepare(flat, batch=4, table_memory=MEMORY, **ON_CPU, **how) as small,
        msplit.prepare(flat, batch=4, **ON_CPU) as whole,
    ):
        for one in requests(4, 4):
            np.testing.assert_allclose(small.step(one)["out"], whole.step(one)["out"], rtol=1e-5)


def test_a_build_keeps_its_tables_with_the_host(tmp_path: Path) -> None:
    flat = ranker()
    msplit.build(flat, tmp_path / "build", batches=[4, 16], table_memory=MEMORY, **ON_CPU)
    with msplit.open(tmp_path / "build") as runner, msplit.prepare(flat, batch=16, **ON_CPU) as whole:
        gc.collect()
        assert len(Device.of(torch.device("cpu")).owned(HostTables).caches) == 1, "both batches share it"
        for rows in (16, 4, 16, 3):
            for one in requests(4, rows):
                wanted = whole.step({name: np.concatenate([value] * 6)[:16] for name, value in one.items()})
                np.testing.assert_allclose(runner.step(one)["out"], wanted["out"][:rows], rtol=1e-5)
        facts = runner.executable.facts()
    assert facts["host_table_bytes"] == 4 * ROWS * WIDTH * 4
    assert facts["table_hit_rate"] > 0.2


@pytest.mark.parametrize("what", ["capacity", "start", "shape"])
def test_a_damaged_table_is_told(what: str, tmp_path: Path) -> None:
    from tests.run.test_build import change

    msplit.build(ranker(), tmp_path / "build", batches=[4], table_memory=MEMORY, **ON_CPU)

    def damage(data: bytes) -> bytes:
        program = json.loads(data)
        where = next(where for _, _, where in program["constants"] if len(where) == 5)
        where[{"capacity": 4, "start": 3, "shape": 1}[what]] = {
            "capacity": 2**40,
            "start": where[3] + 2**30,
            "shape": [2**40, 8],
        }[what]
        return json.dumps(program).encode()

    change(tmp_path / "build", "1.json", damage)
    with pytest.raises(MsplitError, match="the build is damaged"):
        msplit.open(tmp_path / "build")


def test_a_pool_of_a_build_has_the_tables_where_the_build_has_them(tmp_path: Path) -> None:
    msplit.build(ranker(), tmp_path / "whole", batches=[4], **ON_CPU)
    with pytest.raises(MsplitError, match="built with all tables on the GPU"):
        msplit.pool(tmp_path / "whole", table_memory=MEMORY, device="cpu")


def next_row(cache: RowCache, rows: Any, slots: Any) -> None:
    COPY(cache, (rows + 1).clamp(max=cache.slot_of.numel() - 2), slots)


def slightly_wrong(cache: RowCache, rows: Any, slots: Any) -> None:
    COPY(cache, rows, slots)
    cache.rows[slots[slots < cache.capacity], 0] += 1e-2


def nothing(cache: RowCache, rows: Any, slots: Any) -> None:
    del cache, rows, slots


COPY = RowCache._copy


@pytest.mark.parametrize("wrong", [next_row, slightly_wrong, nothing])
def test_a_cache_with_wrong_rows_is_seen_by_verification(
    wrong: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flat = ranker()
    msplit.build(flat, tmp_path / "build", batches=[16], table_memory=MEMORY, **ON_CPU)
    monkeypatch.setattr(RowCache, "_copy", wrong)
    with pytest.raises(MsplitError, match="gives other outputs"):
        msplit.prepare(flat, batch=16, table_memory=MEMORY, effort="fast", **ON_CPU)
    with pytest.raises(MsplitError, match="gives other outputs"):
        msplit.open(tmp_path / "build")


def test_tables_that_do_not_fit_stay_with_the_host_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "free_bytes", lambda _: 500_000)
    with msplit.prepare(ranker(), batch=4, **ON_CPU) as runner:
        assert runner.facts["host_table_bytes"] == 4 * ROWS * WIDTH * 4
        assert runner.facts["table_cache_bytes"] < 300_000
        assert any("stay in the host's memory" in note for note in runner.notes)
    monkeypatch.setattr(Device, "free_bytes", lambda _: 900_000)
    with msplit.prepare(ranker(), batch=4, **ON_CPU) as runner:
        assert "host_table_bytes" not in runner.facts


def test_a_single_lookup_has_a_cache_too() -> None:
    def build(tf: Any, v1: Any) -> None:
        table = tf.constant(np.arange(2 * ROWS * WIDTH).reshape(-1, WIDTH).astype(np.float32))
        tf.identity(2.0 * tf.gather(table, v1.placeholder(tf.int32, [5], name="ids")), name="out")

    with msplit.prepare(graph_of(build, outputs=["out"]), table_memory=MEMORY, **ON_CPU) as runner:
        for _ in range(3):
            ids = np.array([0, 1, 1, 2 * ROWS - 1, 7], np.int32)
            np.testing.assert_array_equal(runner.step({"ids": ids})["out"][:, 0], 2.0 * WIDTH * ids)
        assert runner.executable.facts()["table_hit_rate"] > 0.2


def saved_ranker(path: Path, *, scale: int = 1) -> Path:
    """A model with tables that are variables."""
    import tensorflow as tf

    chance, module = np.random.default_rng(0), tf.Module()
    module.tables = [
        tf.Variable(chance.standard_normal((size, WIDTH)).astype(np.float32), name=f"table_{number}")
        for number, size in enumerate((100, scale * ROWS, 2 * scale * ROWS, scale * ROWS))
    ]
    weights = tf.constant(chance.standard_normal((5 * WIDTH, 3)).astype(np.float32))

    def rank(ids: Any, bag: Any) -> Any:
        columns = [tf.nn.embedding_lookup(table, ids[:, at]) for at, table in enumerate(module.tables)]
        columns.append(tf.reduce_mean(tf.nn.embedding_lookup(module.tables[1], bag), 1))
        return {"out": tf.nn.relu(tf.concat(columns, 1) @ weights)}

    inputs = [tf.TensorSpec([None, 4], tf.int64, "ids"), tf.TensorSpec([None, 3], tf.int32, "bag")]
    tf.saved_model.save(module, str(path), signatures=tf.function(rank, input_signature=inputs))
    return path


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_ranker(tmp_path_factory.mktemp("models") / "ranker")


@pytest.mark.parametrize("whole", [False, True])
def test_a_pool_answers_from_them_and_takes_new_rows(whole: bool, saved: Path) -> None:
    with (
        msplit.pool(saved, batches=[16], groups=2, table_memory=MEMORY, **ON_CPU) as pool,
        msplit.prepare(saved, batch=16, **ON_CPU) as runner,
    ):
        for one in requests(30):
            np.testing.assert_allclose(pool.step(one)["out"], runner.step(one)["out"], rtol=1e-5)
        if whole:
            new: dict[str, Any] = {"source": {"table_2": np.full((2 * ROWS, WIDTH), 7, np.float32)}}
        else:
            new = {"rows": {"table_2": (np.arange(50), np.full((50, WIDTH), 7, np.float32))}}
        pool.update(**new)
        runner.update(**new)
        for one in requests(30, seed=1):
            np.testing.assert_allclose(pool.step(one)["out"], runner.step(one)["out"], rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "tensorflow", "device": "cuda"}, "excludes"),
        ({"split": (0, 1)}, "excludes"),
        ({"table_memory": -1.0}, "memory for tables"),
        ({"table_memory": 1e-6}, "too little for the tables"),
    ],
)
def test_what_can_not_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(MsplitError, match=message):
        msplit.prepare(ranker(), batch=4, **{"table_memory": MEMORY, **ON_CPU, **options})
