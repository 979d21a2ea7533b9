"""Other values for a pool that answers requests: each answer is of one version, large ones too, and nobody waits for long."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import msplit
from msplit.errors import Closed, EngineError, MsplitError
from msplit.serving.pool.pool import About, Pool
from msplit.serving.pool.ports import Port
from msplit.serving.pool.settings import PoolSettings
from msplit.verify.results import OutputCheck
from tests import forked
from tests.serving.pool.remote import alive, kill, wait, whole
from tests.serving.pool.scripted import BOTH, SOON, Script, ScriptedSlot, feeds, ports, together, until
from tests.updating import check, expected, feeds_of, saved, values_of, version_of

SIMULATED: dict[str, Any] = {"streams": (2,), "engine": "cuda", "device": "cpu", "effort": "fast"}


class Versions:
    """Values that pools of scripts take over: what a step gives is multiplied by the version.

    Attributes:
        now: The version that steps have.
        running: Steps that run now; none may while a version is taken over.
        kept: Versions that the pool has said to have.
    """

    def __init__(self) -> None:
        self.now, self.running = 1.0, 0
        self.kept: list[float] = []
        self.faults: list[str] = []
        self.bytes = 8

    def renews(self, source: Any, rows: Any) -> tuple[Any, tuple[OutputCheck, ...], Any]:
        if source == "wrong":
            raise EngineError("it gives other outputs", fix="give right ones")
        self.wanted = float(source)
        return self, (), lambda: self.kept.append(self.now)

    def take_over(self, agree: Any) -> None:
        agree()
        if self.running:
            self.faults.append(f"{self.running} steps run")
        time.sleep(1e-3)
        self.now = self.wanted


class VersionedSlot(ScriptedSlot):
    """A slot whose steps read the version twice, when they begin and when they end."""

    def __init__(self, script: Script, versions: Versions) -> None:
        super().__init__(script, ports())
        self._versions = versions

    def start(self, bucket: int, feeds: Any) -> None:
        self._versions.running += 1
        self._began = self._versions.now
        try:
            super().start(bucket, feeds)
        except BaseException:
            self._versions.running -= 1
            raise

    def outputs(self, into: Any = None) -> Any:
        found = super().outputs()
        if self._began != self._versions.now:
            self._versions.faults.append("a step has two versions")
        self._versions.running -= 1
        rows = len(found["y"])
        return {"y": found["y"] * 0 + np.array([self._began, self._versions.now]), "twice": found["twice"] * 0 + rows}


def versioned(script: Script, versions: Versions, threads: int, groups: int = 2, **settings: Any) -> Pool:
    slots = [(0, VersionedSlot(script, versions)) for _ in range(groups)]
    outputs = {"y": Port("float64", (None, 2)), "twice": Port("float64", ())}
    about = About("versions", outputs, (), (), {})
    return Pool(ports(), slots, PoolSettings(groups=groups, **settings), about, threads=threads, renews=versions.renews)


def version(answer: Mapping[str, Any]) -> float:
    """The only one that made an answer."""
    seen = np.unique(answer["y"])
    assert len(seen) == 1, f"a mixture of versions: {seen}"
    return float(seen[0])


@BOTH
def test_answers_beside_updates_are_of_one_version_each(threads: int) -> None:
    script, versions = Script(seconds=(1e-4, 0.0, 3e-4)), Versions()
    with versioned(script, versions, threads) as pool:
        stop, count = threading.Event(), [0]

        def client(number: int) -> None:
            before = 1.0
            while not stop.is_set():
                rows = (1, 3, 13, 40)[(number + count[0]) % 4]
                one = feeds(number, rows)
                found = pool.step(one) if count[0] % 2 else pool.submit(one).result(SOON)
                assert len(found["y"]) == rows
                assert version(found) >= before
                before = version(found)
                count[0] += 1

        def updates() -> None:
            for number in range(2, 12):
                pool.update(str(number))
                assert version(pool.step(feeds(0.0, 9))) == number
                time.sleep(1e-2)
            stop.set()

        assert together(updates, *[lambda number=number: client(number) for number in range(4)]) == []
        assert count[0] > 10
    assert (versions.faults, script.faults) == ([], [])
    assert versions.kept == [float(number) for number in range(2, 12)]
    stats = pool.stats()
    assert stats.requests == stats.answered + stats.cancelled
    assert (stats.failed, stats.waiting, stats.in_flight) == (0, 0, 0)


@BOTH
def test_a_large_request_that_has_begun_is_begun_again(threads: int) -> None:
    script, versions = Script(held=threading.Event()), Versions()
    with versioned(script, versions, threads, groups=1) as pool:
        large = pool.submit(feeds(0.0, 400))
        until(lambda: script.steps)
        updating = threading.Thread(target=pool.update, args=("2",))
        updating.start()
        until(lambda: pool._steps.scheduler.paused)
        waits = pool.submit(feeds(5.0))
        time.sleep(0.01)
        assert (len(script.steps), versions.now) == (1, 1.0), "a step that runs is waited for"
        script.held.set()  # type: ignore[union-attr]
        found = large.result(SOON)
        assert (version(found), len(found["y"]), version(waits.result(SOON))) == (2.0, 400, 2.0)
        updating.join(SOON)
        assert len(script.steps) <= 103
    assert (versions.faults, script.faults) == ([], [])


@BOTH
def test_values_that_are_refused_stop_nothing(threads: int) -> None:
    script, versions = Script(), Versions()
    with versioned(script, versions, threads) as pool:
        with pytest.raises(EngineError, match="other outputs"):
            pool.update("wrong")
        with pytest.raises(EngineError, match="there are no values"):
            pool.update()
        assert version(pool.step(feeds(0.0))) == 1.0
        update = pool.update("2")
        assert (update.bytes, update.captured) == (8, False)
        assert version(pool.step(feeds(0.0))) == 2.0
    with pytest.raises(Closed):
        pool.update("3")
    assert versions.now == 2.0


def test_who_drives_the_pool_has_its_steps_ended_meanwhile() -> None:
    """A step of `submit_driven` is ended by whoever drives, and that is the one who updates."""
    script, versions = Script(seconds=(5e-3,)), Versions()
    with versioned(script, versions, 0) as pool:
        found: list[Future[Any]] = []
        pool.submit_driven(feeds(0.0), found.append)
        assert together(lambda: pool.update("2")) == []
        until(lambda: not pool.drive() and found)
        assert version(found[0].result()) == 1.0


def test_a_pool_whose_model_can_not_be_made_again_says_so() -> None:
    from tests.serving.pool.scripted import opened

    with opened() as (pool, _), pytest.raises(EngineError, match="takes no other values"):
        pool.update("2")


# Real models


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[int, Path]:
    pytest.importorskip("torch")
    pytest.importorskip("tensorflow")
    folder = tmp_path_factory.mktemp("versions")
    return {number: saved(folder / str(number), number) for number in (1, 2, 3)}


@pytest.mark.tf
def test_a_model_answers_beside_updates(models: Mapping[int, Path]) -> None:
    with msplit.pool(models[1], **SIMULATED, max_batch=4, groups=2) as pool:
        stop, seen = threading.Event(), set[float]()

        def client(number: int) -> None:
            while not stop.is_set():
                one = feeds_of((1, 4, 11)[number % 3], number)
                found = pool.step(one)
                seen.add(version_of(found))
                wanted = expected(values_of(int(version_of(found))), one)["y"]
                np.testing.assert_allclose(found["y"], wanted, rtol=1e-4, atol=1e-4)

        def updates() -> None:
            try:
                for number in (3, 2):
                    update = pool.update(models[number])
                    assert (update.captured, len(update.checks), update.bytes > 0) == (False, 2, True)
                    check(pool.step, values_of(number), 11)
            finally:
                stop.set()

        assert together(updates, *[lambda number=number: client(number) for number in range(2)]) == []
        assert seen >= {1.0, 3.0}
        pool.update(rows={"table": (np.array([1]), np.full((1, 4), 9, np.float32))})
        values = values_of(2)
        values["table"][1] = 9
        check(pool.step, values, 11)
        with pytest.raises(EngineError, match=r"it is another program.*\n.*open another one with the new model"):
            pool.update({"b": np.zeros(8, np.float32)})
        check(pool.step, values, 11)


@pytest.mark.tf
def test_processes_of_two_gpus_take_values_over_and_keep_them(models: Mapping[int, Path]) -> None:
    with (
        forked.instead(forked.TENSORFLOW),
        msplit.pool(models[1], **SIMULATED, batches=[4], groups=1, devices=(0, 1)) as pool,
    ):
        update, values = pool.update({name: values_of(2)[name] for name in ("table", "scale")}), values_of(1)
        values |= {name: values_of(2)[name] for name in ("table", "scale")}
        assert [one.against for one in update.checks] == ["TensorFlow on the CPU"] * 2
        check(pool.step, values, 40)
        for given, words in (
            ({"b": np.zeros(8)}, "variable 'b' is float32, there float64"),
            (Path("no/such/model"), "there is no such file"),
        ):
            with pytest.raises(MsplitError, match=f"(?s){words}"):
                pool.update(given)
        pool.update(rows={"table": (np.array([1]), np.full((1, 4), 9, np.float32))})
        values["table"][1] = 9
        check(pool.step, values, 40)
        pid = kill(pool)
        wait(lambda: not alive(pid) and whole(pool))
        check(pool.step, values, 40)


@pytest.mark.tf
def test_a_build_takes_the_values_of_another(models: Mapping[int, Path], tmp_path: Path) -> None:
    for number in (1, 2):
        msplit.build(models[number], tmp_path / str(number), **SIMULATED, batches=[1, 4])
    with msplit.pool(tmp_path / "1", groups=2) as pool:
        assert not pool.update(tmp_path / "2").captured
        for rows in (0, 1, 4, 11):
            check(pool.step, values_of(2), rows)
        with pytest.raises(EngineError, match="takes the values of another build"):
            pool.update({"b": np.zeros(8, np.float32)})


@pytest.mark.tf
def test_constants_that_were_equal_may_come_to_differ(tmp_path: Path) -> None:
    """Both biases are ones. What is equal in a build is there once, but for constants of one program."""
    pytest.importorskip("torch")
    pytest.importorskip("tensorflow")
    ones = {"w": np.ones((7, 9), np.float32), "w2": np.ones((9, 2), np.float32)}
    values = values_of(1) | ones | {"b": np.full(9, 2, np.float32), "b2": np.ones(9, np.float32)}
    with msplit.pool(saved(tmp_path / "wide", 1, width=9), **SIMULATED, batches=[1, 4], groups=1) as pool:
        pool.update({"b": values["b"]})
        check(pool.step, values, 5)
        pool.update({"b2": values["b"], "b": values["b2"]})
        check(pool.step, values | {"b2": values["b"], "b": values["b2"]}, 5)


def words_model(path: Path, words: Sequence[str], weight: float) -> Path:
    """Words, looked up on the host, whose numbers the device looks up in a variable."""
    import tensorflow as tf

    module = tf.Module()
    numbers = tf.lookup.KeyValueTensorInitializer(list(words), list(range(len(words))), value_dtype=tf.int64)
    module.words = tf.lookup.StaticHashTable(numbers, 0)
    module.table = tf.Variable(np.arange(12, dtype=np.float32).reshape(3, 4), name="table")
    module.weight = tf.Variable(np.full((4, 2), weight, np.float32), name="weight")

    def rank(word: Any) -> Any:
        return {"y": tf.nn.embedding_lookup(module.table, module.words.lookup(word)) @ module.weight}

    signature = tf.function(rank, input_signature=[tf.TensorSpec([None], tf.string, name="word")])
    tf.saved_model.save(module, str(path), signatures=signature)
    return path


def test_a_model_with_words_takes_values_as_long_as_the_words_stay(tmp_path: Path) -> None:
    first = words_model(tmp_path / "1", ("a", "b", "c"), 1.0)
    second = words_model(tmp_path / "2", ("a", "b", "c"), 2.0)
    other = words_model(tmp_path / "3", ("c", "b", "a"), 3.0)
    feeds = {"word": np.array([b"b", b"c", b"nowhere"], object)}
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)[[1, 2, 0]]
    with msplit.pool(str(first), batches=[4], groups=1, engine="cuda", device="cpu", streams=1) as pool:
        np.testing.assert_allclose(pool.step(feeds)["y"], rows @ np.full((4, 2), 1.0))
        pool.update(str(second))
        np.testing.assert_allclose(pool.step(feeds)["y"], rows @ np.full((4, 2), 2.0))
        pool.update(rows={"table": (np.array([2]), np.full((1, 4), 5, np.float32))})
        rows[1] = 5
        np.testing.assert_allclose(pool.step(feeds)["y"], rows @ np.full((4, 2), 2.0))
        with pytest.raises(msplit.EngineError, match="keeps its old values, and has other ones"):
            pool.update(str(other))
        np.testing.assert_allclose(pool.step(feeds)["y"], rows @ np.full((4, 2), 2.0))
