"""Models with more lookup tables than there is memory for on the device: prepared, built, in a pool, and with new rows."""

from __future__ import annotations

import functools
import gc
import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import msplit
from msplit.engines.base import side_by_side
from msplit.engines.cuda.device.device import Device
from msplit.engines.cuda.kernels import host_tables
from msplit.engines.cuda.kernels.host_tables import CachedTable, HostTables, RowCache
from msplit.engines.table_rows import divided, rounded
from msplit.engines.variables import table_value
from msplit.errors import MsplitError
from tests.engines.cuda.cases import graph_of

torch = pytest.importorskip("torch")

ROWS, WIDTH = 5_000, 8
ON_CPU: dict[str, Any] = {"engine": "cuda", "device": "cpu", "streams": (2,)}
WHOLE: dict[str, Any] = {**ON_CPU, "settings": msplit.Settings(verify_inputs=0)}
"""All tables on the device. What is held against that is verified itself."""
MEMORY = 0.0003
"""GB: less than half of the tables."""


@pytest.fixture(autouse=True)
def few_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_tables, "_NOTES_OF_CPU", 1 << 10)


@functools.cache
def ranker(*, read_whole: bool = False, scale: int = 1, of_rows: Any = None) -> Any:
    """Three large tables, of which one is read by two columns, and a small one; `scale` makes the large ones larger, and `of_rows` gives
    these other rows. TensorFlow makes each once, and answers the same question once."""

    def build(tf: Any, v1: Any) -> None:
        chance = np.random.default_rng(0)
        ids = v1.placeholder(tf.int64, [None, 4], name="ids")
        bag = v1.placeholder(tf.int32, [None, 3], name="bag")
        sizes = (100, scale * ROWS, 2 * scale * ROWS, scale * ROWS)
        rows = [chance.standard_normal((size, WIDTH)).astype(np.float32) for size in sizes]
        rows = [rows[0], *(rows[1:] if of_rows is None else map(of_rows, rows[1:]))]
        tables = [tf.identity(tf.constant(one, name=f"table_{len(one)}_{at}")) for at, one in enumerate(rows)]
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
        msplit.prepare(flat, batch=16, **WHOLE) as whole,
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
        msplit.prepare(flat, batch=4, **WHOLE) as whole,
    ):
        for one in requests(12, 4):
            np.testing.assert_allclose(small.step(one)["out"], whole.step(one)["out"], rtol=1e-5)
        facts = small.executable.facts()
    # Each lookup counts, and finds rows in the cache, whichever kernels there are.
    assert 0.2 < facts["table_hit_rate"] < 1
    assert facts["table_rows_looked_up"] > 10 * 4 * 6


def test_ways_to_run_a_model_are_timed_with_what_they_look_up_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all rows come over the bus, all of them take as long."""
    monkeypatch.setattr(host_tables, "_ADMITTED", 4)
    (fed,), flat = requests(1, 16), ranker()
    with (
        msplit.prepare(flat, batch=16, table_memory=MEMORY, **ON_CPU) as one,
        msplit.prepare(flat, batch=16, table_memory=MEMORY, fuse=False, group=False, **ON_CPU) as other,
    ):
        running = [one.executable, other.executable]
        times = dict[Any, list[float]]()

        def device_times(self: Any, count: int) -> list[float]:
            found = []
            for _ in range(count):
                before = self.facts()
                self.step(fed)
                HostTables._refresh(Device.of(torch.device("cpu")).owned(HostTables))  # which counts
                after = self.facts()
                hits, all_rows = (after[f"table_rows_{what}"] - before[f"table_rows_{what}"] for what in COUNTED)
                found.append(1.0 + all_rows - hits)
            times.setdefault(self, []).extend(found)
            return found

        monkeypatch.setattr(type(running[0]), "device_times", device_times)
        assert side_by_side(running, 3, random.Random(0)) == [[1.0] * 3] * 2
        assert times[running[0]][0] > 10, "the cache was not cold"


COUNTED = ("found", "looked_up")


def test_a_build_keeps_its_tables_with_the_host(tmp_path: Path) -> None:
    flat = ranker()
    msplit.build(flat, tmp_path / "build", batches=[4, 16], table_memory=MEMORY, **ON_CPU)
    with msplit.open(tmp_path / "build") as runner, msplit.prepare(flat, batch=16, **WHOLE) as whole:
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


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tables") / "build"
    msplit.build(ranker(), path, batches=[16], table_memory=MEMORY, **ON_CPU)
    return path


@pytest.mark.parametrize("wrong", [next_row, slightly_wrong, nothing])
def test_a_cache_with_wrong_rows_is_seen_by_verification(
    wrong: Any, build: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flat = ranker()
    monkeypatch.setattr(RowCache, "_copy", wrong)
    with pytest.raises(MsplitError, match="gives other outputs"):
        msplit.prepare(flat, batch=16, table_memory=MEMORY, effort="fast", **ON_CPU)
    with pytest.raises(MsplitError, match="gives other outputs"):
        msplit.open(build)


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


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_tables_that_are_half_already_stay_as_they_are(kind: str, tmp_path: Path) -> None:
    import tensorflow as tf

    module, chance = tf.Module(), np.random.default_rng(0)
    rows = chance.standard_normal((2 * ROWS, WIDTH))
    rows[7] = [np.nan, np.inf, -np.inf, 65504 if kind == "float16" else 3.38e38, 2.0**-24, -0.0, 1.0, 1 / 3]
    module.table = tf.Variable(tf.cast(rows, kind), name="table")
    inputs = [tf.TensorSpec([None, 3], tf.int64, "ids")]
    signature = tf.function(
        lambda ids: {"out": tf.cast(tf.gather(module.table, ids), tf.float32)}, input_signature=inputs
    )
    tf.saved_model.save(module, str(tmp_path / "model"), signatures=signature)
    ids = chance.integers(0, 2 * ROWS, (16, 3))
    ids[0] = [7, 0, 2 * ROWS - 1]
    for memory in ("0.0001", "0.0001,rows=bf16"):
        with msplit.prepare(tmp_path / "model", batch=16, table_memory=memory, **ON_CPU) as runner:
            for _ in range(2):  # over the bus, then from the cache
                found = runner.step({"ids": ids})["out"]
                np.testing.assert_array_equal(found, tf.cast(module.table, tf.float32).numpy()[ids])
            assert runner.executable.facts()["host_table_bytes"] == 4 * ROWS * WIDTH
            assert any("rows=bf16: no table leaves" in note for note in runner.notes) == ("rows" in memory)


def saved_ranker(path: Path, *, scale: int = 1, seed: int = 0) -> Path:
    """A model with tables that are variables."""
    import tensorflow as tf

    chance, module = np.random.default_rng(seed), tf.Module()
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
        msplit.prepare(saved, batch=16, **WHOLE) as runner,
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


INT8 = f"{MEMORY},rows=int8"
"""The same memory, and rows of the tables that leave the device as int8 with a scale."""


def int8(table: np.ndarray) -> np.ndarray:
    return rounded("table", table)[0]


def bf16(table: np.ndarray) -> np.ndarray:
    """Rounded by PyTorch."""
    return torch.tensor(table).bfloat16().float().numpy()  # type: ignore[no-any-return]


BF16 = f"{MEMORY},rows=bf16"


@pytest.mark.parametrize("how", [{}, {"effort": "fast"}, {"fuse": False, "group": False}])
def test_bf16_rows_are_those_of_a_model_with_rounded_tables(how: dict[str, Any]) -> None:
    """The error is told, too, and a build keeps them."""
    with (
        msplit.prepare(ranker(), batch=16, table_memory=BF16, **ON_CPU, **how) as small,
        msplit.prepare(ranker(of_rows=bf16), batch=16, **WHOLE, **how) as whole,
    ):
        for one in requests(30):
            np.testing.assert_array_equal(small.step(one)["out"], whole.step(one)["out"])
        facts, notes = small.executable.facts(), " ".join(small.notes)
    assert facts["host_table_bytes"] == 4 * ROWS * 2 * WIDTH
    assert 0.2 < facts["table_hit_rate"] < 1
    assert "rows of 3 tables are bf16: their numbers differ" in notes
    assert ("rows of bf16 move outputs" in notes) == ("effort" not in how)


def test_a_build_keeps_bf16_rows_and_new_ones_become_so(saved: Path, tmp_path: Path) -> None:
    msplit.build(saved, tmp_path / "build", batches=[16], table_memory=BF16, **ON_CPU)
    chance = np.random.default_rng(1)
    ids, some = np.array([3, 7, 3]), chance.standard_normal((3, WIDTH)).astype(np.float32)
    with (
        msplit.open(tmp_path / "build") as opened,
        msplit.prepare(saved, batch=16, table_memory=BF16, **ON_CPU) as small,
        msplit.prepare(saved, batch=16, **WHOLE) as whole,
    ):
        whole.update({name: bf16(value) for name, value in tables_of(saved).items() if name != "table_0"})
        for new in (
            {},
            {"rows": {"table_2": (ids, some)}},
            {"source": {"table_3": np.ones((ROWS, WIDTH), np.float32) / 3}},
        ):
            if new:
                small.update(**new)
                rounded_rows = {"table_2": (ids, bf16(some))}
                whole.update(rows=rounded_rows) if "rows" in new else whole.update(
                    {"table_3": bf16(new["source"]["table_3"])}
                )
            for one in requests(10, seed=3):
                wanted = whole.step(one)["out"]
                np.testing.assert_allclose(small.step(one)["out"], wanted, rtol=1e-5)
                if not new:
                    np.testing.assert_allclose(opened.step(one)["out"], wanted, rtol=1e-5)
        with pytest.raises(MsplitError, match="larger than its largest"):
            small.update(rows={"table_2": (np.array([3]), np.full((1, WIDTH), np.finfo(np.float32).max))})


@pytest.mark.parametrize(
    "how", [{}, {"capture": False}, {"effort": "fast"}, {"precision": "bf16"}, {"fuse": False, "group": False}]
)
def test_int8_rows_are_those_of_a_model_with_rounded_tables(how: dict[str, Any]) -> None:
    with (
        msplit.prepare(ranker(), batch=16, table_memory=INT8, **ON_CPU, **how) as small,
        msplit.prepare(ranker(of_rows=int8), batch=16, **WHOLE, **how) as whole,
        msplit.prepare(ranker(), batch=16, **WHOLE, **how) as exact,
    ):
        for one in requests(30):
            found, wanted = small.step(one)["out"], whole.step(one)["out"]
            np.testing.assert_array_equal(found, wanted)
            assert not np.array_equal(found, exact.step(one)["out"])
        facts = small.executable.facts()
    assert facts["host_table_bytes"] == 4 * ROWS * 16, "8 numbers and a scale, up to a multiple of 16 bytes"
    assert 0.2 < facts["table_hit_rate"] < 1
    missed = facts["table_rows_looked_up"] - facts["table_rows_found"]
    assert facts["table_bus_bytes"] == (missed + facts["table_rows_admitted"]) * 16


def test_the_error_of_int8_rows_is_told() -> None:
    flat = ranker()
    with (
        msplit.prepare(flat, batch=16, table_memory=INT8, **ON_CPU) as small,
        msplit.prepare(flat, batch=16, **WHOLE) as exact,
    ):
        rows, outputs = (
            next(one for one in small.notes if text in one) for text in ("int8 with a scale", "move outputs")
        )
        told = float(outputs.rpartition("out ")[2])
        found = [(small.step(one)["out"], exact.step(one)["out"]) for one in requests(20)]
        far = np.sqrt(np.mean([(one - other) ** 2 for one, other in found]) / np.mean([other**2 for _, other in found]))
        assert told / 3 < far < told * 3
        assert not any("int8" in one for one in exact.notes)
    assert "rows of 3 tables" in rows
    most, mean = (float(one) for one in re.findall(r"by up to ([0-9.e-]+) \(([0-9.e-]+)", rows)[0])
    chance = np.random.default_rng(0)
    tables = [chance.standard_normal((size, WIDTH)).astype(np.float32) for size in (100, ROWS, 2 * ROWS, ROWS)][1:]
    distances = [np.abs(int8(table) - table) for table in tables]
    assert most == pytest.approx(max(one.max() for one in distances), rel=0.01)
    assert mean == pytest.approx(max(one.mean() for one in distances), rel=0.01)


def test_a_build_keeps_int8_rows(tmp_path: Path) -> None:
    msplit.build(ranker(), tmp_path / "build", batches=[4, 16], table_memory=INT8, **ON_CPU)
    msplit.build(ranker(), tmp_path / "float", batches=[4, 16], table_memory=MEMORY, **ON_CPU)
    sizes = [(tmp_path / name / "weights.bin").stat().st_size for name in ("build", "float")]
    assert sizes[1] - sizes[0] == pytest.approx(4 * ROWS * (4 * WIDTH - 16), abs=3 * 512)
    with msplit.open(tmp_path / "build") as runner, msplit.prepare(ranker(of_rows=int8), batch=16, **WHOLE) as whole:
        assert any("int8 with a scale" in note for note in runner.notes)
        for rows in (16, 4, 3):
            for one in requests(4, rows):
                wanted = whole.step({name: np.concatenate([value] * 6)[:16] for name, value in one.items()})
                np.testing.assert_allclose(runner.step(one)["out"], wanted["out"][:rows], rtol=1e-5)
    with pytest.raises(MsplitError, match="has the rows of tables that it was built with"):
        msplit.pool(tmp_path / "build", table_memory=INT8, device="cpu")


UNPACKED, PACK = CachedTable.unpacked, host_tables.packed


def of_next_row(cached: CachedTable, rows: Any, width: int) -> Any:
    return UNPACKED(cached, rows.roll(1, 0), width)


def scale_of_next_row(cached: CachedTable, rows: Any, width: int) -> Any:
    return UNPACKED(cached, torch.cat([rows[..., :-1], rows[..., -1:].roll(1, 0)], -1), width)


def other_sign(cached: CachedTable, rows: Any, width: int) -> Any:
    found = UNPACKED(cached, rows, width)
    return torch.cat([found[..., :1] * -1, found[..., 1:]], -1)


def one_percent_off(cached: CachedTable, rows: Any, width: int) -> Any:
    return UNPACKED(cached, rows, width) * 1.01


def unsigned(cached: CachedTable, rows: Any, width: int) -> Any:
    return rows.contiguous().view(torch.uint8)[..., :width].float() * rows[..., -1:].contiguous().view(torch.float32)


def last_number_is_lost(cached: CachedTable, rows: Any, width: int) -> Any:
    found = UNPACKED(cached, rows, width)
    return torch.cat([found[..., :-1], torch.zeros_like(found[..., -1:])], -1)


@pytest.fixture(scope="module")
def int8_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("int8") / "build"
    msplit.build(ranker(), path, batches=[16], table_memory=INT8, **ON_CPU)
    return path


@pytest.mark.parametrize(
    "wrong", [of_next_row, scale_of_next_row, other_sign, one_percent_off, unsigned, last_number_is_lost]
)
def test_int8_rows_that_are_read_wrong_are_seen_by_verification(
    wrong: Any, int8_build: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flat = ranker()
    monkeypatch.setattr(CachedTable, "unpacked", wrong)
    for effort in ("fast", "full"):
        with pytest.raises(MsplitError, match="gives other outputs"):
            msplit.prepare(flat, batch=16, table_memory=INT8, effort=effort, **ON_CPU)
    with pytest.raises(MsplitError, match="gives other outputs"):
        msplit.open(int8_build)


def one_row_off(words: np.ndarray) -> np.ndarray:
    return np.roll(words, 1, 0)


def scales_one_row_off(words: np.ndarray) -> np.ndarray:
    return np.concatenate([words[:, :-1], np.roll(words[:, -1:], 1, 0)], 1)


def scales_one_percent_off(words: np.ndarray) -> np.ndarray:
    scales = (words[:, -1:].view(np.float32) * np.float32(1.01)).view(np.int32)
    return np.concatenate([words[:, :-1], scales], 1)


@pytest.mark.parametrize(
    ("wrong", "memory"),
    [(one_row_off, INT8), (scales_one_row_off, INT8), (scales_one_percent_off, INT8), (one_row_off, BF16)],
)
def test_rows_that_are_kept_wrong_are_seen_by_verification(
    wrong: Any, memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_tables, "packed", lambda array, kind: wrong(PACK(array, kind)))
    with pytest.raises(MsplitError, match="gives other outputs"):
        msplit.prepare(ranker.__wrapped__(), batch=16, table_memory=memory, **ON_CPU)  # whose rows nobody has packed


@pytest.mark.parametrize("kind", ["rows", "arrays", "model"])
@pytest.mark.parametrize("how", ["pool", "runner"])
def test_new_rows_become_int8(how: str, kind: str, saved: Path, tmp_path: Path) -> None:
    flat = loaded(saved)
    chance = np.random.default_rng(1)
    table = chance.standard_normal((2 * ROWS, WIDTH)).astype(np.float32)
    ids = np.concatenate([np.arange(50), [7]])
    some = chance.standard_normal((51, WIDTH)).astype(np.float32)
    given: dict[str, Any] = {
        "rows": {"rows": {"table_2": (ids, some)}},
        "arrays": {"source": {"table_2": table}},
        "model": {"source": saved_ranker(tmp_path / "other", seed=5)} if kind == "model" else {},
    }[kind]
    opened: Any = (
        msplit.pool(flat, batches=[16], groups=2, table_memory=INT8, **ON_CPU)
        if how == "pool"
        else msplit.prepare(flat, batch=16, table_memory=INT8, **ON_CPU)
    )
    with opened as small, msplit.prepare(flat, batch=16, **WHOLE) as whole:
        rounded_now = {name: int8(value) for name, value in tables_of(saved).items() if name != "table_0"}
        whole.update(rounded_now)
        for one in requests(20):
            np.testing.assert_allclose(small.step(one)["out"], whole.step(one)["out"], rtol=1e-5)
        small.update(**given)
        if kind == "model":
            other = tables_of(given["source"])
            whole.update(given["source"])
            whole.update({name: value if name == "table_0" else int8(value) for name, value in other.items()})
        elif kind == "rows":
            whole.update(rows={"table_2": (ids, int8(some))})
        else:
            whole.update({"table_2": int8(table)})
        for one in requests(20, seed=1):
            np.testing.assert_allclose(small.step(one)["out"], whole.step(one)["out"], rtol=1e-5)
        wrong = np.full((1, WIDTH), np.inf, np.float32)
        with pytest.raises(MsplitError, match="not finite"):
            small.update(rows={"table_2": (np.array([3]), wrong)})
        if how == "runner":
            assert small.executable.facts()["host_table_bytes"] == 4 * ROWS * 16


loaded = functools.cache(msplit.load)


def tables_of(path: Path) -> dict[str, np.ndarray]:
    """Values of the tables of a saved ranker."""
    flat = loaded(path)
    names = [f"table_{number}" for number in range(4)]
    return {name: table_value(flat, {}, name) for name in names}


def test_int8_rows_that_can_not_be_are_refused_or_told() -> None:
    def broken(table: np.ndarray) -> np.ndarray:
        table = table.copy()
        table[1234, 5] = np.nan
        return table

    with pytest.raises(
        MsplitError, match=r"row 1234 of table table_(10000_2|5000_1|5000_3) has numbers that are not finite"
    ):
        msplit.prepare(ranker(of_rows=broken), batch=4, table_memory=INT8, **ON_CPU)
    with pytest.raises(MsplitError, match="rows=int4"):
        msplit.prepare(ranker(), batch=4, table_memory="1,rows=int4", **ON_CPU)
    with msplit.prepare(ranker(), batch=4, table_memory="1,rows=int8", **ON_CPU) as runner:
        assert any("no table leaves the GPU" in note for note in runner.notes)
        assert "host_table_bytes" not in runner.facts


def test_tables_that_are_read_otherwise_keep_float32_rows() -> None:
    with msplit.prepare(ranker(read_whole=True), batch=4, table_memory=INT8, **ON_CPU) as runner:
        assert runner.facts["host_table_bytes"] == 2 * ROWS * 16


def test_the_tables_that_leave_the_device_are_those_that_were_rounded(saved: Path) -> None:
    """Of tables of one size, too, of which one fits on the device."""
    with msplit.prepare(saved, batch=16, table_memory="0.0004,rows=int8", **ON_CPU) as runner:
        assert runner.facts["host_table_bytes"] == 3 * ROWS * 16
        assert any("rows of 2 tables" in note for note in runner.notes)
    assert divided([7, 5, 5, 1], 12, first=[1]) == ([0, 1], 6)
    assert divided([7, 5, 5, 1], 12, first=[2]) == ([0, 2], 6)
    assert divided([7, 5, 5, 1], 12) == ([0, 2], 6)
