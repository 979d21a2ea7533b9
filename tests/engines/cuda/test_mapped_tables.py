"""Tables that are read where they lie in the files of a model, or copied where that can not be."""

from __future__ import annotations

import gc
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import msplit
from msplit import formats
from msplit.engines.cuda.device.device import Device
from msplit.engines.cuda.device.shared_memory import FileTable
from msplit.engines.cuda.kernels.host_tables import HostTables
from msplit.errors import EngineError, MsplitError
from msplit.formats.bundle import Checkpoint
from msplit.formats.tensors import numpy_dtype
from tests.engines.cuda.test_table_memory import (
    MEMORY,
    ON_CPU,
    ROWS,
    WIDTH,
    few_notes,
    requests,
    saved,
    saved_ranker,
)
from tests.formats.test_bundle import block, header
from tests.formats.test_bundle import table as bundle_table

torch = pytest.importorskip("torch")

__all__ = ["few_notes", "saved"]  # fixtures


def test_a_checkpoint_is_read_once_and_again_where_it_was_changed(saved: Path, tmp_path: Path) -> None:
    """Tensors of both reads are the same memory, so that tables of both lie on a device, or beside it, once."""
    path = tmp_path / "model"
    shutil.copytree(saved, path)
    model = msplit.load(path).model
    first, second = (formats.variables(model)["table_2"] for _ in range(2))
    assert first.ctypes.data == second.ctypes.data
    (shard,) = (path / "variables").glob("*.data-*")
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.unlink()
    shard.write_bytes(data)
    with pytest.raises(MsplitError, match="does not fit its checksum"):
        formats.variables(model)
    with pytest.raises(MsplitError, match="does not fit its checksum"):
        formats.variables(model)


def saved_in_shards(model: Path, path: Path, places: dict[int, tuple[int, int]]) -> Path:
    """A copy of a model whose checkpoint has tables, by number, in a shard and behind so many bytes, modulo 64; others in the last one."""
    shutil.copytree(model, path)
    prefix, count = path / "variables" / "variables", 1 + max(shard for shard, _ in places.values())
    checkpoint, shards = Checkpoint(prefix), [bytearray() for _ in range(count)]
    pairs = [header(num_shards=count)]
    for key, one in sorted((checkpoint._entries or {}).items()):
        number = re.match("tables/(.)", key)
        shard, before = places.get(int(number[1]) if number else -1, (count - 1, 0))
        shards[shard] += bytes((before - len(shards[shard])) % 64)
        data, _ = checkpoint._content(key, one)
        one.shard_id, one.offset = shard, len(shards[shard])
        shards[shard] += data.tobytes()
        pairs.append((key.encode(), one.SerializeToString()))
    for old in path.glob("variables/*"):
        old.unlink()
    Path(f"{prefix}.index").write_bytes(bundle_table([block(pairs)]))
    for number, data in enumerate(shards):
        Path(f"{prefix}.data-{number:05d}-of-{count:05d}").write_bytes(data)
    return path


def no_file(_: Any) -> str:
    return "no file"


@pytest.mark.parametrize(
    ("places", "told"),
    [
        ({1: (0, 32), 2: (1, 0), 3: (1, 48)}, "mapped from files"),
        ({1: (0, 32), 2: (1, 8), 3: (1, 8)}, "0.00016 GB mapped from files, else copied: unaligned"),
        ({1: (0, 4), 2: (1, 1), 3: (2, 12)}, "copied: no file, unaligned"),
    ],
)
def test_tables_are_read_where_they_lie_in_files(
    places: dict[int, tuple[int, int]], told: str, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is copied gives the same numbers. A file that is replaced meanwhile stays the one that was opened."""
    path = saved_in_shards(saved, tmp_path / "model", places)
    with msplit.prepare(path, batch=16, table_memory=MEMORY, **ON_CPU) as files:
        facts = files.executable.facts()
        assert facts["host_tables"] == told
        assert any(f"memory ({told})" in note for note in files.notes)
        sizes = {1: ROWS, 2: 2 * ROWS, 3: ROWS}
        aligned = {1} if "GB" in told else {1, 2, 3} if told.startswith("mapped") else set()
        assert facts["mapped_table_bytes"] == sum(sizes[one] * 32 for one in aligned)
        for shard in path.glob("variables/*.data-*"):
            other = shard.with_name("other")
            other.write_bytes(bytes(shard.stat().st_size))
            other.replace(shard)
        found = [files.step(one)["out"] for one in requests(20)]
        shutil.rmtree(path)
        monkeypatch.setattr(FileTable, "of", no_file)
        with msplit.prepare(saved, batch=16, table_memory=MEMORY, **ON_CPU) as copied:
            assert copied.executable.facts()["host_tables"] == "copied: no file"
            for one, out in zip(requests(20), found, strict=True):
                np.testing.assert_array_equal(out, copied.step(one)["out"])


@pytest.mark.parametrize(
    ("how", "whole"), [("prepare", True), ("prepare", False), ("pool", True), ("pool", False), ("build", True)]
)
def test_new_rows_of_a_file_go_to_a_copy(how: str, whole: bool, saved: Path, tmp_path: Path) -> None:
    model = saved_in_shards(saved, tmp_path / "model", {1: (0, 0), 2: (0, 0), 3: (0, 0)})
    rows: dict[str, Any] = {"rows": {"table_2": (np.arange(50), np.full((50, WIDTH), 7, np.float32))}}
    ours = theirs = {"source": str(saved_ranker(tmp_path / "other", seed=1))} if whole else rows
    options: dict[str, Any] = {"table_memory": MEMORY, **ON_CPU}
    if how == "build":
        msplit.build(model, tmp_path / "build", batches=[16], **options)
        msplit.build(tmp_path / "other", tmp_path / "new", batches=[16], **options)
        ours = {"source": str(tmp_path / "new")}
    held = {one: one.read_bytes() for one in tmp_path.rglob("*") if one.is_file()}
    gc.collect()
    places = Device.of(torch.device("cpu")).owned(HostTables)._places
    before = set(places)
    with (
        msplit.prepare(saved, batch=16, **ON_CPU) as plain,
        msplit.open(tmp_path / "build")
        if how == "build"
        else msplit.prepare(model, batch=16, **options)
        if how == "prepare"
        else msplit.pool(model, batches=[16], **options) as opened,
    ):

        def check(seed: int, mapped: int) -> None:
            gc.collect()
            ways = [one.cache.ways[one.first][0] for address, one in places.items() if address not in before]
            assert ways.count("mapped") == mapped
            assert ways.count("updated") == 3 - mapped
            for one in requests(20, seed=seed):
                np.testing.assert_allclose(opened.step(one)["out"], plain.step(one)["out"], rtol=1e-5)

        check(0, 3)
        addresses = set(places)
        opened.update(**ours)
        plain.update(**theirs)
        check(1, 0 if whole else 2)
        assert set(places) == addresses, "captured graphs know the addresses"
    assert {one: one.read_bytes() for one in held} == held, "files stay as they are"


def test_where_a_table_can_not_be_copied_no_values_change(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def memory(_: FileTable) -> None:
        raise EngineError("the host has no memory")

    model = saved_in_shards(saved, tmp_path / "model", {1: (0, 0), 2: (0, 0), 3: (0, 0)})
    monkeypatch.setattr(FileTable, "memory", memory)
    with msplit.prepare(model, batch=16, table_memory=MEMORY, **ON_CPU) as runner:
        before = [runner.step(one)["out"] for one in requests(5)]
        with pytest.raises(EngineError, match="no memory"):
            runner.update(rows={"table_2": (np.arange(50), np.full((50, WIDTH), 7, np.float32))})
        for one, wanted in zip(requests(5), before, strict=True):
            np.testing.assert_array_equal(runner.step(one)["out"], wanted)
        assert runner.executable.facts()["host_tables"] == "mapped from files"


def in_parts(path: Path, parts: int, strategy: str, dtype: str, *, seed: int = 0) -> Path:
    """A model of TensorFlow 1 that looks two rows up in a table of several variables; `concat` joins them first."""
    import tensorflow as tf

    v1, random = tf.compat.v1, np.random.default_rng(seed)
    with tf.Graph().as_default(), v1.Session() as session, v1.variable_scope("model", use_resource=True):
        ids = v1.placeholder(tf.int64, [None, 2], name="ids")
        names = "ids", "out"

        def rows(shape: Any, dtype: Any = None, partition_info: Any = None) -> Any:
            return tf.cast(tf.constant(random.integers(-99, 99, shape)), dtype)

        table = v1.get_variable("table", [ROWS + 3, WIDTH], dtype, rows, partitioner=v1.fixed_size_partitioner(parts))
        if strategy == "concat":
            whole = tf.convert_to_tensor(table)
            columns = [tf.gather(whole, ids[:, number]) for number in range(2)]
        else:
            given = table if strategy == "div" else [*table]
            columns = [
                v1.nn.embedding_lookup(given, ids[:, number], partition_strategy=strategy) for number in range(2)
            ]
        out = tf.cast(columns[0], tf.float32) - 2 * tf.cast(columns[1], tf.float32)
        session.run(v1.global_variables_initializer())
        v1.saved_model.simple_save(session, str(path), {names[0]: ids}, {names[1]: out})
    return path


@pytest.mark.tf
@pytest.mark.parametrize(
    ("how", "parts", "strategy", "dtype", "told"),
    [
        ("prepare", 5, "concat", "float32", "mapped from files"),
        ("prepare", 11, "concat", "int8", "copied: no file"),
        ("prepare", 23, "div", "float16", "mapped from files"),
        ("pool", 12, "mod", "float32", ""),
        ("build", 7, "mod", "bfloat16", "mapped from files"),
    ],
)
def test_a_table_of_several_variables_is_one_table_of_a_file(
    how: str, parts: int, strategy: str, dtype: str, told: str, tmp_path: Path
) -> None:
    """Rows of the checkpoint, of `update` with some rows, and of another checkpoint, where a part is in another place of the whole."""
    model, other = (in_parts(tmp_path / name, parts, strategy, dtype, seed=seed) for seed, name in enumerate("ab"))
    size = np.dtype(numpy_dtype(dtype)).itemsize
    options: dict[str, Any] = {"table_memory": (0.1 * ROWS * WIDTH * size + 34_800) / 1e9, **ON_CPU}
    if how == "build":
        for one in (model, other):
            msplit.build(one, tmp_path / f"{one.name}.build", batches=[16], **options)
    values = {name: np.array(value) for name, value in formats.variables(msplit.load(model).model).items()}
    one = f"model/table/part_{parts // 2}"
    ids, rows = np.array([0, len(values[one]) - 1]), np.full((2, WIDTH), 7, values[one].dtype)

    def check(opened: Any) -> None:
        found = [np.asarray(values[f"model/table/part_{number}"], np.float32) for number in range(parts)]
        table = np.concatenate(found)
        if strategy == "mod":
            table = np.stack([found[at % parts][at // parts] for at in range(len(table))])
        for part in np.array_split(np.random.default_rng(0).permutation(len(table))[: ROWS // 16 * 16], ROWS // 16):
            wanted = table[part] - 2 * table[part[::-1]]
            np.testing.assert_array_equal(
                opened.step({"ids": np.stack([part, part[::-1]], 1)[:16]})["out"], wanted[:16]
            )

    with (
        msplit.open(tmp_path / "a.build")
        if how == "build"
        else msplit.prepare(model, batch=16, **options)
        if how == "prepare"
        else msplit.pool(model, batches=[16], **options)
    ) as opened:
        if told:
            facts = opened.executable.facts()
            assert (facts["host_tables"], facts["host_table_bytes"]) == (told, (ROWS + 3) * WIDTH * size)
        check(opened)
        if how != "build":
            opened.update(rows={one: (ids, rows)})
            values[one][ids] = rows
            check(opened)
        opened.update(source=str(tmp_path / "b.build" if how == "build" else other))
        values = formats.variables(msplit.load(other).model)
        check(opened)
