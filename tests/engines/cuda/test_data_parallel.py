"""A step on several devices: rows are dealt out and come together again, all devices run at once, and what fails leaves none behind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from msplit.engines.base import Executable, Job  # noqa: E402
from msplit.engines.cuda.data_parallel import DataParallel, SharedBatch  # noqa: E402
from msplit.engines.cuda.engine import ENGINE  # noqa: E402
from msplit.engines.cuda.options import EngineOptions  # noqa: E402
from msplit.errors import EngineError  # noqa: E402
from tests.engines.cuda.cases import graph_of, job  # noqa: E402

ENTRIES = {"x": 1, "pairs": 2, "scale": 0}


def feeds_of(rows: int, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "x": rng.standard_normal((rows, 3)).astype(np.float32),
        "pairs": rng.integers(0, 100, (2 * rows, 2)),
        "scale": np.array(rng.standard_normal()),
    }


@given(st.integers(1, 40), st.integers(1, 8), st.booleans())
def test_what_is_cut_and_joined_is_what_it_was(rows: int, devices: int, tensors: bool) -> None:
    """Also where shares are filled up; every device has work, and none more than a row more than another."""
    devices = min(rows, devices)
    batch = SharedBatch(rows, devices, ENTRIES, ENTRIES)
    sizes = [len(share) for share in batch.shares]
    assert [row for share in batch.shares for row in share] == list(range(rows))
    assert 1 <= min(sizes) >= max(sizes) - 1
    assert max(sizes) == batch.step_rows
    feeds = feeds_of(rows)
    given_ = {name: torch.as_tensor(value) if tensors else value for name, value in feeds.items()}
    parts = batch.cut(given_)
    for part in parts:
        assert {name: len(part[name]) for name in ("x", "pairs")} == {"x": max(sizes), "pairs": 2 * max(sizes)}
        own = {tuple(row.tolist()) for row in feeds["x"]}
        assert {tuple(row.tolist()) for row in part["x"]} <= own, "it is filled up with rows that are legal"
    whole = batch.join(parts)
    assert {name: np.asarray(value).tobytes() for name, value in whole.items()} == {
        name: value.tobytes() for name, value in feeds.items()
    }


class Scripted(Executable):
    """Doubles `x`; does what its name says."""

    def __init__(self, log: list[str], name: str, *, begins: bool = True, fails: str = "") -> None:
        self._log, self._name, self._begins, self._fails = log, name, begins, fails
        self._x: Any = None

    def _note(self, what: str) -> None:
        self._log.append(f"{self._name} {what}")
        if self._fails == what:
            raise EngineError(f"{self._name} fails")

    def begin(self, feeds: Any) -> bool:
        if not self._begins:
            return False
        assert self._x is None, "a step in flight"
        self._note("begins")
        self._x = feeds["x"]
        return True

    def end(self) -> dict[str, Any]:
        x, self._x = self._x, None
        self._note("ends")
        return {"y": 2 * x}

    def step(self, feeds: Any) -> dict[str, Any]:
        self._note("steps")
        return {"y": 2 * feeds["x"]}

    def launch(self) -> None:
        self._note("launches")

    def device_times(self, count: int) -> list[float]:
        return [float(len(self._name) + number) for number in range(count)]

    def facts(self) -> dict[str, Any]:
        return {"kernels": 1}

    def close(self) -> None:
        self._note("closes")


def pair(log: list[str], **of_the_second: Any) -> DataParallel:
    feeds = {"x": np.zeros((5, 1), np.float32)}
    replicas = [Scripted(log, "one"), Scripted(log, "second", **of_the_second)]
    return DataParallel(replicas, SharedBatch(5, 2, {"x": 1}, {"y": 1}), feeds, ("cpu:0", "cpu:1"))


X = {"x": np.arange(5, dtype=np.float32).reshape(5, 1)}


def test_all_devices_run_before_one_is_waited_for() -> None:
    log: list[str] = []
    made = pair(log)
    assert made.step(X)["y"].ravel().tolist() == [0, 2, 4, 6, 8]
    assert log == ["one begins", "second begins", "one ends", "second ends"]
    made.launch()
    assert sorted(log[4:]) == ["one launches", "second launches"]
    assert made.device_times(2) == [6, 7], "of the slower one"
    assert made.facts() == {"kernels": 1, "devices": ["cpu:0", "cpu:1"], "step_rows": 3}
    made.close()
    assert log[6:] == ["one closes", "second closes"]


def test_what_can_not_begin_has_a_thread_for_each_device() -> None:
    log: list[str] = []
    made = pair(log, begins=False)
    assert made.step(X)["y"].ravel().tolist() == [0, 2, 4, 6, 8]
    assert sorted(log) == ["one begins", "one ends", "one steps", "second steps"]
    made.close()


@pytest.mark.parametrize("where", ["begins", "ends"])
def test_a_device_that_fails_leaves_no_step_in_flight(where: str) -> None:
    log: list[str] = []
    made = pair(log, fails=where)
    for _ in range(2):
        with pytest.raises(EngineError, match="second fails"):
            made.step(X)
        assert log.count("one begins") == log.count("one ends")
    made.close()


@pytest.mark.parametrize(
    ("feeds", "said"),
    [
        ({"x": np.zeros((6, 1), np.float32)}, r"prepared as float32 \(5, 1\), not float32 \(6, 1\)"),
        ({"x": np.zeros((5, 1))}, r"prepared as float32 \(5, 1\), not float64"),
        ({"x": torch.zeros(7, 1)}, r"prepared as float32 \(5, 1\), not float32 \(7, 1\)"),
        ({"x": [[1.0]] * 5}, "a list"),
        ({}, "no value for input x"),
        ({"x": torch.from_numpy(X["x"]), "z": X["x"]}, None),
    ],
)
def test_inputs_are_refused_in_the_words_of_the_whole_batch(feeds: Any, said: str | None) -> None:
    log: list[str] = []
    made = pair(log)
    if said is None:
        made.step(feeds)  # the runner refuses what is too much
    else:
        with pytest.raises(EngineError, match=said):
            made.step(feeds)
        assert log == []
    made.close()


def several(count: int) -> tuple[str, ...]:
    return tuple(f"cpu:{number}" for number in range(count))


@pytest.fixture(scope="module")
def flat() -> Any:
    def build(tf: Any, v1: Any) -> None:
        x, ids = v1.placeholder(tf.float32, (None, 3), "x"), v1.placeholder(tf.int64, (None,), "ids")
        scale = v1.placeholder(tf.float32, (), "scale")
        rng = np.random.default_rng(0)
        table = tf.constant(rng.standard_normal((10, 4)).astype(np.float32))
        hidden = tf.nn.relu(x @ tf.constant(rng.standard_normal((3, 4)).astype(np.float32)) + tf.gather(table, ids))
        tf.identity(hidden * scale, "y")
        tf.reduce_max(hidden, axis=1, name="best")
        tf.sqrt(scale, "shared")

    pytest.importorskip("tensorflow")
    return graph_of(build, outputs=["y", "best", "shared"])


def model_feeds(rows: int, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "x": rng.standard_normal((rows, 3)).astype(np.float32),
        "ids": rng.integers(0, 10, rows),
        "scale": np.array(2.0, np.float32),
    }


@pytest.mark.tf
@pytest.mark.parametrize("more", [{}, {"capture": False}, {"fuse": True, "group": True}], ids=str)
def test_devices_give_what_one_gives(flat: Any, more: dict[str, Any]) -> None:
    """Eleven rows on three devices, of which one is filled up; on the host and on the device."""
    first = model_feeds(11, 0)
    one = ENGINE.build(job(flat, first, **more))
    made = ENGINE.build(job(flat, first, devices=several(3), **more))
    assert isinstance(made, DataParallel)
    for seed in range(4):
        feeds = model_feeds(11, seed)
        expected = one.step(feeds)
        assert {name: value.shape for name, value in expected.items()} == {"y": (11, 4), "best": (11,), "shared": ()}
        on_device = made.step_on_device(feeds)
        for name, value in made.step(feeds).items():
            np.testing.assert_allclose(value, expected[name], rtol=1e-6, atol=1e-6)
            assert torch.is_tensor(on_device[name])
            assert on_device[name].numpy().tobytes() == value.tobytes()
    made.close()
    one.close()


@pytest.mark.tf
def test_devices_run_the_very_same_kernels(flat: Any) -> None:
    """A row gives the same bits on whichever device it is: what was chosen on the first runs on all."""
    feeds = model_feeds(8, 3)
    halves = {name: np.concatenate([value[:4]] * 2) if value.ndim else value for name, value in feeds.items()}
    made = ENGINE.build(job(flat, halves, devices=several(2), fuse=True))
    y = made.step(halves)["y"]
    assert y[:4].tobytes() == y[4:].tobytes()
    made.close()


def refused(flat: Any, feeds: Any, count: int = 2) -> str:
    with pytest.raises(EngineError) as caught:
        ENGINE.build(
            Job(flat, np.zeros(len(flat), np.int32), 1, feeds, options=EngineOptions("cpu:0", devices=several(count)))
        )
    return str(caught.value)


@pytest.mark.tf
def test_what_devices_can_not_share_is_refused(flat: Any) -> None:
    assert "3 devices can not share a batch of 2" in refused(flat, model_feeds(2, 0), 3)

    def mixing(tf: Any, v1: Any) -> None:
        x = v1.placeholder(tf.float32, (None, 3), "x")
        tf.identity(x - tf.reduce_mean(x, axis=0, name="over_the_batch"), "y")

    said = refused(graph_of(mixing), {"x": np.zeros((4, 3), np.float32)})
    assert "over_the_batch" in said
    assert "msplit serve --gpus" in said

    def fixed(tf: Any, v1: Any) -> None:
        tf.nn.relu(v1.placeholder(tf.float32, (4, 3), "x"), "y")

    assert "the first dimension of each is fixed" in refused(graph_of(fixed), {"x": np.zeros((4, 3), np.float32)})

    def training(tf: Any, v1: Any) -> None:
        x, total = v1.placeholder(tf.float32, (None, 3), "x"), v1.Variable(0.0, name="total", use_resource=False)
        with tf.control_dependencies([v1.assign_add(total, 1.0, name="count")]):
            tf.identity(x, "y")

    assert "count" in refused(graph_of(training), {"x": np.zeros((4, 3), np.float32)})
