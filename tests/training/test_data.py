"""Batches: from arrays, records and functions, from any one on, the same for the same settings; what does not fit is named."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from msplit.errors import LoadError
from msplit.inputs.sparse_ragged import InputSpec
from msplit.training.batches import Prefetched
from msplit.training.data import BatchOptions, constant, open_data
from tests.leftovers import Leftovers

SPECS = {
    "x": InputSpec("x", "float32", (None, 2), 0, 0),
    "id": InputSpec("id", "int32", (None,), 1, 0),
}
DATA = {"x": np.arange(22, dtype=np.float32).reshape(11, 2), "id": np.arange(11, dtype=np.int32)}


def saved(path: Path, **arrays: np.ndarray) -> str:
    np.savez(path, **{**DATA, **arrays})
    return str(path)


def ids(batches: Iterator[Any], count: int | None = None) -> list[list[int]]:
    return [batch["id"].tolist() for batch in itertools.islice(batches, count)]


@given(
    batch=st.integers(1, 11),
    epochs=st.integers(1, 3),
    shuffle=st.booleans(),
    seed=st.integers(0, 3),
    start=st.integers(0, 40),
)
def test_arrays_go_on_where_they_were(
    batch: int, epochs: int, shuffle: bool, seed: int, start: int, arrays: str
) -> None:
    data = open_data([arrays], SPECS, BatchOptions(batch, epochs, shuffle, seed))
    everything = list(data.start(0))
    per_epoch = 11 // batch
    assert len(everything) == epochs * per_epoch
    assert ids(data.start(start)) == ids(iter(everything))[start:]
    for epoch in range(epochs):
        rows = [row for one in everything[epoch * per_epoch : (epoch + 1) * per_epoch] for row in one["id"].tolist()]
        assert len(set(rows)) == len(rows) == per_epoch * batch
        assert shuffle or rows == list(range(len(rows)))
    for one in everything:
        np.testing.assert_array_equal(one["x"], DATA["x"][one["id"]])


@pytest.fixture(scope="module")
def arrays(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(tmp_path_factory.mktemp("data") / "data.npz", extra=np.zeros(3))


def test_shuffled_epochs_and_seeds_differ(arrays: str) -> None:
    found = [ids(open_data([arrays], SPECS, BatchOptions(11, 2, True, seed)).start(0)) for seed in range(2)]
    assert len({tuple(epoch) for both in found for epoch in both}) == 4
    endless = open_data([arrays], SPECS, BatchOptions(11)).start(1000)
    assert ids(endless, 2) == [list(range(11))] * 2


def test_values_that_stay_the_same(arrays: str, tmp_path: Path) -> None:
    specs = {
        **SPECS,
        "rate": InputSpec("rate", "float32", (), 2, 0),
        "table": InputSpec("table", "float32", (3, 2), 3, 0),
    }
    np.save(tmp_path / "rate.npy", np.float32(0.5))
    fixed = constant(specs, {"rate": tmp_path / "rate.npy"})
    path = saved(tmp_path / "data.npz", table=np.ones((3, 2), np.float32))
    batch = next(open_data([path], specs, BatchOptions(2), fixed=fixed).start(0))
    assert batch["rate"] == np.float32(0.5)
    assert batch["table"].shape == (3, 2)
    assert batch["x"].shape == (2, 2)
    with pytest.raises(LoadError, match="the model has no input 'rat'"):
        constant(specs, {"rat": tmp_path / "rate.npy"})


@pytest.mark.parametrize(
    ("change", "batch", "said"),
    [
        ({"x": np.zeros((11, 3), np.float32)}, 2, "input 'x' has shape"),
        ({"x": np.zeros((11, 2))}, 2, "input 'x' is float32, the file float64"),
        ({"id": np.zeros(7, np.int32)}, 2, "different numbers of rows: x 11, id 7"),
        ({}, 12, "there are 11 rows, less than a batch"),
    ],
)
def test_arrays_that_do_not_fit(change: dict[str, np.ndarray], batch: int, said: str, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=said):
        open_data([saved(tmp_path / "data.npz", **change)], SPECS, BatchOptions(batch))


def test_what_is_not_there(tmp_path: Path, arrays: str) -> None:
    with pytest.raises(LoadError, match="there is no array for input 'y', but extra, id, x"):
        open_data([arrays], {**SPECS, "y": InputSpec("y", "float32", (None,), 2, 0)}, BatchOptions(2))
    with pytest.raises(LoadError, match="there is no such data"):
        open_data([str(tmp_path / "*.tfrecord")], SPECS, BatchOptions(2))
    with pytest.raises(LoadError, match="there is no module 'no_such_module_here'"):
        open_data(["no_such_module_here:f"], SPECS, BatchOptions(2))
    with pytest.raises(LoadError, match="module 'math' has no function 'pie'"):
        open_data(["math:pie"], SPECS, BatchOptions(2))
    fixed = {"x": InputSpec("x", "float32", (4, 2), 0, 0), "id": SPECS["id"]}
    with pytest.raises(LoadError, match=r"input 'x' has shape .*4, 2\], which is no batch of 2\n.*--batch 4"):
        open_data([arrays], fixed, BatchOptions(2))


FUNCTIONS = """
import numpy as np

def finite():
    for at in range(4):
        yield {"x": np.full((2, 2), at, np.float32), "id": np.full(2, at, np.int32)}

def from_start(start, batch, seed):
    for at in range(start, 6):
        yield {"x": np.zeros((batch, 2), np.float32), "id": np.full(batch, at + seed, np.int32)}

def nothing():
    return []

def wrong():
    yield {"x": 1}
    raise ValueError("no more")

def leaves():
    yield {"x": 1}
    raise SystemExit(0)

def uneven():
    for rows in (2, 1, 2, 1):
        yield {"x": np.zeros((rows, 2), np.float32), "id": np.arange(rows, dtype=np.int32)}
"""


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"functions_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def test_functions_go_on_where_they_were(functions: str) -> None:
    data = open_data([f"{functions}:finite"], SPECS, BatchOptions(2, 3))
    everything = ids(data.start(0))
    assert everything == [[at, at] for at in [*range(4)] * 3]
    for start in (1, 4, 6, 11, 12):
        assert ids(data.start(start)) == everything[start:]
    data = open_data([f"{functions}:from_start"], SPECS, BatchOptions(3, 1, seed=7))
    assert ids(data.start(4)) == [[11] * 3, [12] * 3]
    assert data.described == {"data": f"{functions}:from_start", "batch": 3, "seed": 7}


def test_functions_that_do_wrong(functions: str) -> None:
    with pytest.raises(LoadError, match="gives no batch"):
        list(open_data([f"{functions}:nothing"], SPECS, BatchOptions(2)).start(0))
    with pytest.raises(LoadError, match="wrong: raised ValueError: no more"):
        list(open_data([f"{functions}:wrong"], SPECS, BatchOptions(2)).start(0))
    with pytest.raises(LoadError, match="leaves: raised SystemExit: 0"):
        list(open_data([f"{functions}:leaves"], SPECS, BatchOptions(2)).start(0))


def test_what_a_function_leaves_over_at_the_end_of_an_epoch_is_left_out(functions: str) -> None:
    data = open_data([f"{functions}:uneven"], SPECS, BatchOptions(2, 2))
    everything = ids(data.start(0))
    assert everything == [[0, 1], [0], [0, 1]] * 2, "one in the middle is no rest, and the trainer refuses it"
    for start in (1, 3, 4):
        assert ids(data.start(start)) == everything[start:]


@pytest.mark.tf
def test_records(tmp_path: Path) -> None:
    import tensorflow as tf

    specs = {
        **SPECS,
        "flag": InputSpec("flag", "bool", (None, 1), 2, 0),
        "word": InputSpec("word", "string", (None,), 3, 0),
    }
    for file in range(2):
        with tf.io.TFRecordWriter(str(tmp_path / f"{file}.tfrecord")) as writer:
            for row in range(5):
                number = file * 5 + row
                features = {
                    "x": tf.train.Feature(float_list=tf.train.FloatList(value=[number, -number])),
                    "id": tf.train.Feature(int64_list=tf.train.Int64List(value=[number])),
                    "flag": tf.train.Feature(int64_list=tf.train.Int64List(value=[number % 2])),
                    "word": tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"w%d" % number])),
                }
                writer.write(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())
    pattern = str(tmp_path / "*.tfrecord")
    data = open_data([pattern], specs, BatchOptions(3, 2))
    everything = list(data.start(0))
    assert ids(iter(everything)) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]] * 2
    assert {name: value.dtype.name for name, value in everything[0].items()} == {
        "x": "float32", "id": "int32", "flag": "bool", "word": "object",
    }  # fmt: skip
    assert everything[1]["flag"].tolist() == [[True], [False], [True]]
    assert everything[1]["word"].tolist() == [b"w3", b"w4", b"w5"]
    assert ids(data.start(4)) == ids(iter(everything))[4:]
    mixed = open_data([pattern], specs, BatchOptions(3, 2, True, 5))
    assert ids(mixed.start(2)) == ids(mixed.start(0))[2:] != ids(iter(everything))[2:]
    (tmp_path / "cut.rec").write_bytes((tmp_path / "0.tfrecord").read_bytes()[:-2])
    with pytest.raises(LoadError, match=r"(?s)cut.rec: the records are damaged or cut off: .*truncated record at"):
        list(open_data([str(tmp_path / "cut.rec")], specs, BatchOptions(2)).start(0))
    raw = open_data([pattern], {"text": InputSpec("text", "string", (None,), 0, 0)}, BatchOptions(2, 1))
    assert len(next(raw.start(0))["text"]) == 2
    with pytest.raises(LoadError, match=r"(?s)the records do not fit the model: .*other"):
        list(
            open_data([pattern], {**specs, "other": InputSpec("other", "int64", (None,), 4, 0)}, BatchOptions(3)).start(
                0
            )
        )
    for shape, said in (((None, None), "--shape y=1,1"), ((), "has no rows"), (None, "has no shape")):
        with pytest.raises(LoadError, match=said):
            open_data([pattern], {**specs, "y": InputSpec("y", "float32", shape, 4, 0)}, BatchOptions(3))
    open_data(
        [pattern],
        {"x": InputSpec("x", "float32", (None, None), 0, 0), "id": SPECS["id"]},
        BatchOptions(3),
        shapes={"x": (3, 2)},
    )
    with pytest.raises(LoadError, match="fewer records than a batch"):
        list(open_data([pattern], specs, BatchOptions(11)).start(0))


def test_what_comes_next_is_made_ahead_and_no_further() -> None:
    made, leftovers = list[int](), Leftovers()

    def items() -> Iterator[int]:
        for number in range(100):
            made.append(number)
            yield number

    with closing(Prefetched(items(), 2)) as found:
        assert next(found) == 0
        deadline = time.monotonic() + 10
        while len(made) < 4 and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.01)
        assert made == [0, 1, 2, 3]  # two are ready, and one waits
    assert leftovers.threads() == []
    assert list(Prefetched(iter(range(50)))) == list(range(50))


def test_what_the_data_raise_comes_in_its_place() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise LoadError("no more")

    found = Prefetched(items())
    assert next(found) == 1
    with pytest.raises(LoadError, match="no more"):
        next(found)
