"""Tables whose rows are found by keys on the device: held against TensorFlow's own lookup."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import msplit
from msplit.engines.cuda.coverage import cover
from msplit.engines.cuda.ir.node import Node
from msplit.engines.cuda.kernels import host_tables
from msplit.engines.table_rows import KeyedTable
from msplit.errors import MsplitError

torch = pytest.importorskip("torch")
from msplit.engines.cuda.ops.embedding import or_defaults, rows_of_keys  # noqa: E402

ON_CPU: dict[str, Any] = {"engine": "cuda", "device": "cpu", "streams": (2,)}
LEAST, MOST = -(2**63), 2**63 - 1
keys_of = st.lists(st.one_of(st.integers(-4, 4), st.sampled_from([LEAST, LEAST + 1, MOST, MOST - 1])), max_size=12)


@settings(max_examples=300, deadline=None)
@given(keys=keys_of, wanted=keys_of, each=st.booleans(), kind=st.sampled_from(["int64", "int32"]))
def test_rows_are_those_of_a_dictionary(keys: list[int], wanted: list[int], each: bool, kind: str) -> None:
    """Of keys that are there twice the last one counts, as TensorFlow puts one after the other in."""
    if kind == "int32":
        keys, wanted = ([max(min(one, 2**31 - 1), -(2**31)) for one in some] for some in (keys, wanted))
    rows = np.arange(2 * len(keys), dtype=np.float32).reshape(-1, 2)
    table, known = KeyedTable(np.array(keys, kind), rows), dict(zip(keys, rows, strict=True))
    one = np.array([-1, -2], np.float32)
    defaults = -np.arange(2 * len(wanted), dtype=np.float32).reshape(-1, 2) if each else one
    numbers = rows_of_keys(
        Node("n", "_RowsOfKeys", {}), torch.from_numpy(table.keys), torch.tensor(wanted, dtype=getattr(torch, kind))
    )
    found = torch.from_numpy(table.with_default(one))[numbers]
    found = or_defaults(Node("n", "_OrDefaults", {"count": len(keys)}), found, numbers, torch.from_numpy(defaults))
    right = [known.get(key, defaults[at] if each else one) for at, key in enumerate(wanted)]
    np.testing.assert_array_equal(found.numpy(), np.array(right, np.float32).reshape(-1, 2))


def test_a_default_is_added_once() -> None:
    table = KeyedTable(np.array([3, 1]), np.array([[3.0], [1.0]]))
    first = table.with_default(np.array([7.0]))
    assert table.with_default(np.array([7.0])) is first
    assert table.with_default(np.array([8.0])).tolist() == [[1], [3], [8]]
    assert first.tolist() == [[1], [3], [7]]


def saved(path: Path, kind: str, keys: Any, rows: Any, *, how: str = "one", dtype: str = "int64") -> Path:
    """A model that looks keys up and multiplies rows; `how` says what default there is, or what else happens."""
    import tensorflow as tf

    tables, module, width = tf.lookup.experimental, tf.Module(), rows.shape[1]
    default = tf.range(1, width + 1, dtype=rows.dtype.name)
    types = tf.dtypes.as_dtype(dtype), tf.dtypes.as_dtype(rows.dtype)
    if kind == "mutable":
        module.table = tables.MutableHashTable(*types, default)
    else:
        module.table = tables.DenseHashTable(*types, default, empty_key=-1, deleted_key=-2, initial_num_buckets=8)
    if len(keys):
        module.table.insert(tf.constant(keys, types[0]), tf.constant(rows))
    if kind == "dense":
        module.table.insert(tf.constant([12345], types[0]), tf.ones([1, width], rows.dtype))
        module.table.remove(tf.constant([12345], types[0]))

    def read(ids: Any, other: Any) -> Any:
        if how == "inserts":
            module.table.insert(ids, tf.zeros([4, width], rows.dtype))
        given = {"dynamic_default_values": tf.stack([other] * width, 1)} if how == "each" else {}
        found = module.table.lookup(ids, **given)
        if how == "twice":
            found += module.table.lookup(ids + 1)
        size = {"size": tf.cast(module.table.size(), tf.int32) + tf.shape(ids)[0]} if how == "twice" else {}
        return {"out": found * 2, "seen": other + 1, **size}

    inputs = [tf.TensorSpec([None], dtype, "ids"), tf.TensorSpec([None], rows.dtype, "other")]
    tf.saved_model.save(module, str(path), signatures=tf.function(read, input_signature=inputs))
    return path


def answer(path: Path, feeds: dict[str, Any]) -> Any:
    import tensorflow as tf

    return {
        name: value.numpy()
        for name, value in tf.saved_model.load(str(path))
        .signatures["serving_default"](**{name: tf.constant(value) for name, value in feeds.items()})
        .items()
    }


@pytest.mark.parametrize(
    ("kind", "how", "dtype", "values"),
    [
        ("mutable", "one", "int64", "float32"),
        ("mutable", "each", "int64", "float32"),
        ("mutable", "twice", "int64", "float64"),
        ("mutable", "one", "int32", "int32"),
        ("dense", "one", "int64", "float32"),
        ("dense", "twice", "int64", "float32"),
    ],
)
def test_a_model_finds_the_rows_that_tensorflow_finds(
    kind: str, how: str, dtype: str, values: str, tmp_path: Path
) -> None:
    ends = (LEAST, MOST) if dtype == "int64" else (-(2**31), 2**31 - 1)
    keys = [*ends, 0, 5, 10, 7, 1000]
    rows = np.random.default_rng(0).standard_normal((7, 3)) * 100
    rows[2] = [0, -1, 1] if "int" in values else [np.nan, np.inf, -0.0]
    model = saved(tmp_path / "model", kind, keys, rows.astype(values), how=how, dtype=dtype)
    ids = np.array([*ends, 0, 0, 5, 6, 999, 1000, 1001, ends[0] + 2], dtype)
    feeds = {"ids": ids, "other": np.arange(10).astype(values)}
    with msplit.prepare(model, batch=10, **ON_CPU) as runner:
        if how != "twice":  # where the host says how large the table is, too
            assert "_RowsOfKeys" in [step.op.op for step in runner.executable.program.steps]
        found, wanted = runner.step(feeds), answer(model, feeds)
        for name, value in wanted.items():
            np.testing.assert_array_equal(found[name], value)


def test_a_table_without_a_checkpoint_can_be_analyzed(tmp_path: Path) -> None:
    model = saved(tmp_path / "model", "mutable", [1, 2], np.ones((2, 3), np.float32))
    for file in (model / "variables").iterdir():
        file.unlink()
    assert not cover(msplit.load(model)).missing


@pytest.mark.parametrize("kind", ["mutable", "dense"])
def test_an_empty_table_gives_defaults(kind: str, tmp_path: Path) -> None:
    model = saved(tmp_path / "model", kind, [], np.zeros((0, 3), np.float32))
    with msplit.prepare(model, batch=3, **ON_CPU) as runner:
        feeds = {"ids": np.array([0, MOST, LEAST]), "other": np.zeros(3, np.float32)}
        np.testing.assert_array_equal(runner.step(feeds)["out"], answer(model, feeds)["out"])


def test_rows_stay_with_the_host_and_a_build_holds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_tables, "_NOTES_OF_CPU", 1 << 10)
    chance = np.random.default_rng(0)
    keys = chance.choice(10**12, 5000, replace=False) - 10**11
    rows = chance.standard_normal((5000, 8)).astype(np.float32)
    model = saved(tmp_path / "model", "mutable", keys, rows)
    known = dict(zip(keys.tolist(), rows, strict=True))
    msplit.build(model, tmp_path / "build", batches=[16], table_memory=0.0001, **ON_CPU)
    with (
        msplit.prepare(model, batch=16, table_memory=0.0001, **ON_CPU) as runner,
        msplit.open(tmp_path / "build") as opened,
    ):
        for _ in range(20):
            ids = np.where(chance.random(16) < 0.8, keys[np.minimum(chance.zipf(1.3, 16), 5000) - 1], 77)
            wanted = 2 * np.array([known.get(key, np.arange(1, 9)) for key in ids.tolist()], np.float32)
            for one in (runner, opened):
                np.testing.assert_array_equal(one.step({"ids": ids, "other": np.zeros(16, np.float32)})["out"], wanted)
        assert runner.executable.facts()["host_table_bytes"] == 5001 * 32
        assert runner.executable.facts()["table_hit_rate"] > 0.2


@pytest.mark.parametrize("count", [6, 9])
def test_another_model_brings_its_table(count: int, tmp_path: Path) -> None:
    rows = np.random.default_rng(0).standard_normal((9, 3)).astype(np.float32)
    one = saved(tmp_path / "one", "mutable", np.arange(6), rows[:6])
    other = saved(tmp_path / "other", "mutable", np.arange(2, 2 + count), rows[:count] + 1)
    feeds = {"ids": np.arange(12), "other": np.zeros(12, np.float32)}
    with msplit.pool(one, batches=[12], **ON_CPU) as pool:
        np.testing.assert_array_equal(pool.step(feeds)["out"], answer(one, feeds)["out"])
        if count != 6:
            with pytest.raises(MsplitError, match="another program"):
                pool.update(str(other))
            return
        pool.update(str(other))
        np.testing.assert_array_equal(pool.step(feeds)["out"], answer(other, feeds)["out"])


def test_a_table_that_a_step_changes_is_none_of_the_device(tmp_path: Path) -> None:
    rows = np.ones((6, 3), np.float32)
    model = saved(tmp_path / "model", "mutable", np.arange(6), rows, how="inserts")
    with pytest.raises(MsplitError, match="LookupTableInsertV2"):
        msplit.prepare(model, batch=4, **ON_CPU)


def test_rows_that_are_found_wrong_are_seen_by_verification(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs are made up of keys that are there."""
    rows = np.random.default_rng(0).standard_normal((50, 3)).astype(np.float32)
    model = saved(tmp_path / "model", "mutable", np.arange(50) * 10**15, rows)
    made = KeyedTable.with_default
    monkeypatch.setattr(KeyedTable, "with_default", lambda self, default: np.roll(made(self, default), 1, 0))
    with pytest.raises(MsplitError, match="gives other outputs"):
        msplit.prepare(model, batch=4, **ON_CPU)
