"""A trainer runs steps and holds variables; its checkpoints are TensorFlow's, and appear whole or not at all."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import msplit
from msplit.engines.base import GOOD_STEPS, LOSS_SCALE
from msplit.errors import EngineError, LoadError, MsplitError, WriteError
from msplit.formats import atomic
from msplit.formats.atomic import hold
from msplit.formats.bundle import Checkpoint
from msplit.run.request import RunRequest
from msplit.serving.pool.settings import PoolSettings
from msplit.training import checkpoint
from msplit.training.trainer import Trainer, to_train
from tests import forked
from tests.cli.runner import ROOT, SAMPLES
from tests.training.models import ON_TENSORFLOW, batches, guarded, regression
from tests.training_graphs import stored

pytestmark = pytest.mark.tf


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return regression(tmp_path_factory.mktemp("model") / "model.meta")


@pytest.fixture
def fresh(model: Path) -> Iterator[Trainer]:
    """One that has not run a step."""
    with msplit.Trainer(model, "train_op", ["loss"], **ON_TENSORFLOW) as found:
        yield found


@pytest.fixture(scope="module")
def trainer(model: Path) -> Iterator[Trainer]:
    """One for all tests that only need some state; each begins where the one before ended."""
    with msplit.Trainer(model, "train_op", ["loss"], **ON_TENSORFLOW) as found:
        yield found


def losses(fetched: list[Any]) -> list[float]:
    return [float(one.values["loss"]) for one in fetched]


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(one[name].tobytes() == other[name].tobytes() for name in one)


def test_tensorflow_goes_on_from_a_checkpoint_of_ours_and_we_from_one_of_its(
    fresh: Trainer, model: Path, tmp_path: Path
) -> None:
    import tensorflow as tf

    v1 = tf.compat.v1
    start = fresh.variables
    fresh.run(batches(4))
    fresh.save(tmp_path / "ours")
    after = losses(fresh.run(batches(4)))
    assert fresh.variables["global_step"] == fresh.steps == 8
    with tf.Graph().as_default(), v1.Session() as session:
        saver = v1.train.import_meta_graph(str(model))
        last = tf.train.latest_checkpoint(str(tmp_path))
        assert last == str(tmp_path / "ours-4")
        saver.restore(session, last)
        step = session.make_callable(["loss:0", "train_op"], ["x:0", "label:0"])
        assert [step(one["x"], one["label"])[0] for one in batches(4)] == after
        saver.save(session, str(tmp_path / "theirs"), global_step=8)
    at_eight = fresh.variables
    fresh.load(start)
    assert same(fresh.variables, start)
    fresh.restore(tmp_path)  # the last one that TensorFlow's list names
    assert fresh.steps == 8
    assert same(fresh.variables, at_eight)
    with pytest.raises(LoadError, match="there is no checkpoint in this folder"):
        fresh.restore(tmp_path.parent)


def test_resuming_is_bit_equal_to_not_stopping(trainer: Trainer, tmp_path: Path) -> None:
    trainer.save(tmp_path / "model", note="where the data are")
    after, state, steps = losses(trainer.run(batches(3))), trainer.variables, trainer.steps
    assert trainer.restore(tmp_path) == "where the data are"
    assert losses(trainer.run(batches(3))) == after
    assert (trainer.steps, same(trainer.variables, state)) == (steps, True)


def test_two_optimizers_of_the_samples_keep_their_slots(tmp_path: Path) -> None:
    import tensorflow as tf

    random = np.random.default_rng(0)
    feeds = {f"id_{tower}": random.integers(0, 100, 6).astype(np.int32) for tower in range(2)}
    feeds["label"] = np.ones((6, 1), np.float32)
    with msplit.Trainer(SAMPLES / "training_resource.meta", None, ["loss/value"], **ON_TENSORFLOW) as trainer:
        assert float(trainer.step(feeds)["loss/value"]) > float(trainer.step(feeds)["loss/value"])
        path = trainer.save(tmp_path / "model")
    kept = dict(tf.train.list_variables(str(path)))
    assert kept["tower_0/embedding/Adam_1"] == [100, 8]
    assert kept["beta1_power"] == kept["global_step"] == []


def test_keep_removes_the_oldest_and_a_killed_process_leaves_nothing_for_long(trainer: Trainer, tmp_path: Path) -> None:
    left = tmp_path / ".model-7.0123456789ab.tmp.data-00000-of-00001.tempstate1"
    other = tmp_path / ".mine.0123456789ab.tmp"
    left.touch()
    other.touch()
    for _ in range(3):
        trainer.step(batches(1)[0])
        trainer.save(tmp_path / "model", keep=2)
    steps = trainer.steps
    assert sorted(os.listdir(tmp_path)) == sorted(
        [
            other.name,
            atomic.NAME,
            "checkpoint",
            *(f"model-{at}{end}" for at in (steps - 1, steps) for end in (".data-00000-of-00001", ".index")),
        ]
    )
    with pytest.raises(WriteError, match="is there already"):
        trainer.save(tmp_path / "model")
    trainer.save(tmp_path / "model", force=True)
    assert checkpoint.listed(tmp_path).all == (tmp_path / f"model-{steps - 1}", tmp_path / f"model-{steps}")


OTHER = """
import sys, time
from pathlib import Path
from msplit.formats.atomic import hold

held = hold(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def test_a_folder_that_another_process_writes_to_is_refused_by_its_name_and_free_when_it_is_killed(
    fresh: Trainer, tmp_path: Path
) -> None:
    with forked.Popen([sys.executable, "-c", OTHER, tmp_path], stdout=subprocess.PIPE, cwd=ROOT) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(WriteError, match="another training writes its checkpoints here") as refused:
            fresh.save(tmp_path / "model")
        assert f"process {other.pid} on {socket.gethostname()}" in refused.value.what
        assert "a folder of its own" in str(refused.value)
        assert os.listdir(tmp_path) == [atomic.NAME]
        other.kill()
    fresh.save(tmp_path / "model")
    assert atomic.NAME in os.listdir(tmp_path)
    fresh.close()
    assert atomic.NAME not in os.listdir(tmp_path)


@pytest.mark.parametrize("kind", ["of another user", "link", "folder"])
def test_a_lock_that_can_not_be_opened_is_refused(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To go on without it would let two trainings write into one folder."""
    place = tmp_path / atomic.NAME
    if kind == "link":
        place.symlink_to(tmp_path / "elsewhere")
    elif kind == "folder":
        place.mkdir()
    else:
        place.touch()
        monkeypatch.setattr(atomic, "lock", failing(PermissionError(errno.EACCES, "Permission denied")))
    with pytest.raises(WriteError, match="its lock can not be opened") as refused:
        hold(tmp_path)
    assert str(place) in str(refused.value)


def test_a_file_system_without_locks_is_written_to_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic.fcntl, "flock", failing(OSError(errno.ENOLCK, "No locks available")))
    assert hold(tmp_path) is None


def failing(error: OSError) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise error

    return fail


def test_a_full_disk_leaves_no_lock_that_nobody_gives_back(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        held = hold(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert hold(tmp_path) is held is not None  # though it does not say by whom
    del held
    assert not os.listdir(tmp_path)


def test_what_is_written_in_a_cond_alone_trains_in_tensorflow_and_is_refused_by_name_elsewhere(tmp_path: Path) -> None:
    path, x = guarded(tmp_path / "model.meta"), np.ones((2, 4), np.float32)
    with msplit.Trainer(path, "train_op", ["loss"], **ON_TENSORFLOW) as trainer:
        assert [float(trainer.step({"x": value})["loss"]) for value in (x, -x, x)] == pytest.approx([4.0, -3.6, 3.6])
        assert trainer.variables["weights/Momentum"] == pytest.approx(np.full((4, 1), 1.5))
    simulated = {"engine": "cuda", "device": "cpu", "streams": (1,), "effort": "fast"}
    with (
        msplit.Trainer(path, "train_op", ["loss"], **simulated) as trainer,
        pytest.raises(EngineError, match=r"an effect that the cuda engine does not have \(cond\)"),
    ):
        trainer.step({"x": x})


def test_half_precision_in_tensorflow_is_verified_with_the_variables_that_it_begins_with(model: Path) -> None:
    request = dict(ON_TENSORFLOW, precision="bf16")
    with msplit.Trainer(model, "train_op", ["loss"], **request, state={"bias": np.float32(7)}) as trainer:
        trainer.step(batches(1)[0])
        assert trainer.variables["bias"] == pytest.approx(7, abs=0.1)


def test_a_list_that_names_what_is_gone_means_the_one_before_and_never_none(trainer: Trainer, tmp_path: Path) -> None:
    paths = []
    for _ in range(2):
        trainer.step(batches(1)[0])
        paths.append(trainer.save(tmp_path / "model"))
    Path(f"{paths[1]}.index").unlink()
    assert checkpoint.last_of(tmp_path) == paths[0]
    Path(f"{paths[0]}.index").unlink()
    with pytest.raises(LoadError, match=rf"checkpoint: names {paths[1].name}, which is not there"):
        checkpoint.last_of(tmp_path)
    trainer.save(tmp_path / "model", force=True)
    assert checkpoint.last_of(tmp_path) == paths[1]


class Killed(BaseException):
    """Nothing is done after it, as after SIGKILL."""


def test_a_kill_between_any_two_operations_leaves_a_whole_checkpoint(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call that changes the folder is the last one once."""
    trainer.save(tmp_path / "model", keep=2)
    calls = [(atomic.os, "replace"), (atomic.os, "fsync"), (checkpoint, "save_bundle"), (Path, "unlink")]
    for fatal in range(200):
        whole = {trainer.steps: trainer.variables}
        trainer.step(batches(1)[0])
        whole[trainer.steps] = trainer.variables
        count = 0

        def dying(real: Any, fatal: int = fatal) -> Any:
            def call(*arguments: Any, **named: Any) -> Any:
                nonlocal count
                count += 1
                if count > fatal:
                    raise Killed
                return real(*arguments, **named)

            return call

        with monkeypatch.context() as patched:
            for where, name in calls:
                patched.setattr(where, name, dying(getattr(where, name)))
            try:
                trainer.save(tmp_path / "model", keep=2, force=True)
            except Killed:
                ended = False
            else:
                ended = True
        trainer.restore(tmp_path)
        assert trainer.steps in whole
        assert same(trainer.variables, whole[trainer.steps])
        if ended:
            break
        trainer.step(batches(1)[0])
        trainer.save(tmp_path / "model", keep=2, force=True)
        assert len(os.listdir(tmp_path)) == 6  # with the lock; what was left behind is gone
    assert 6 < fatal < 100
    assert trainer.steps == max(whole)


@pytest.mark.parametrize("said", ["No space left on device", "File too large"])
def test_a_full_disk_leaves_the_checkpoint_before(
    said: str, trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.save(tmp_path / "model")
    before = sorted(os.listdir(tmp_path))
    trainer.step(batches(1)[0])

    def full(prefix: Path, tensors: object) -> None:
        Path(f"{prefix}.data-00000-of-00001.tempstate7").write_bytes(b"some of it")
        raise OSError(errno.ENOSPC if "space" in said else errno.EFBIG, said)

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "save_bundle", full)
        with pytest.raises(
            WriteError, match="the disk is full" if "space" in said else "larger than the system allows"
        ):
            trainer.save(tmp_path / "model")
    assert sorted(os.listdir(tmp_path)) == before
    trainer.restore(tmp_path)


def test_what_tensorflow_says_of_a_full_disk_is_understood(trainer: Trainer, tmp_path: Path) -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
    try:
        with pytest.raises(WriteError, match="larger than the system allows"):
            trainer.save(tmp_path / "model")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.listdir(tmp_path) == [atomic.NAME]


def test_a_checkpoint_of_another_model_is_refused(trainer: Trainer, tmp_path: Path) -> None:
    import tensorflow as tf

    v1 = tf.compat.v1
    state = trainer.variables
    with tf.Graph().as_default(), v1.Session() as session:
        v1.get_variable("bias", (2,))
        session.run(v1.global_variables_initializer())
        path = v1.train.Saver().save(session, str(tmp_path / "other"))
    with pytest.raises(LoadError) as refused:
        trainer.restore(path)
    said = str(refused.value)
    assert "is a checkpoint of another model" in said
    assert "no 'model/weights' for variable 'model/weights/part_0'" in said
    assert "variable 'bias' is [], there [2]" in said
    assert "… and " in said
    assert same(trainer.variables, state)


def test_a_flipped_bit_is_refused_by_the_names_of_its_file_and_tensor(trainer: Trainer, tmp_path: Path) -> None:
    import tensorflow as tf

    path = trainer.save(tmp_path / "model")
    state = trainer.variables
    place = Path(f"{path}.data-00000-of-00001")
    data, rng = place.read_bytes(), np.random.default_rng(0)
    keys = sorted(tf.train.load_checkpoint(str(path)).get_variable_to_dtype_map())
    for at in rng.choice(len(data), 60, replace=False):
        changed = bytearray(data)
        changed[at] ^= 1 << rng.integers(8)
        place.write_bytes(changed)
        with pytest.raises(tf.errors.OpError, match="Checksum does not match"):
            [*map(tf.train.load_checkpoint(str(path)).get_tensor, keys)]
        with pytest.raises(LoadError, match="does not fit its checksum") as refused:
            trainer.restore(path)
        assert refused.value.where == str(place)
        assert any(repr(key) in refused.value.what for key in keys)
    assert same(trainer.variables, state)
    place.write_bytes(data)
    trainer.restore(path)


def test_values_that_do_not_fit_are_refused(trainer: Trainer) -> None:
    for values, said in (
        ({"nothing": np.ones(())}, "there is no variable 'nothing'"),
        ({"bias": np.ones(2, np.float32)}, r"variable 'bias' is \[\], there \[2\]"),
        ({"bias": np.ones(())}, "variable 'bias' is float32, there float64"),
    ):
        with pytest.raises(MsplitError, match=said):
            trainer.load(values)
    trainer.load({"bias": np.array(7, np.float32)})
    assert trainer.variables["bias"] == 7


def test_variables_that_are_not_named_keep_what_training_made_of_them(trainer: Trainer) -> None:
    trainer.run(batches(3))
    before = trainer.variables
    trainer.load({"bias": np.array(7, np.float32)})
    after = trainer.variables
    assert after.pop("bias") == 7
    assert same(after, {name: value for name, value in before.items() if name != "bias"})


def test_a_graph_without_initializers_begins_with_values_that_are_given() -> None:
    """As the message says that it does where there are none."""
    flat, training = stored("deepfm", "GradientDescent", "resource")
    with pytest.raises(EngineError, match=r"has no initial value[^\n]*\n.*Trainer\(…, state="):
        _ = msplit.Trainer(flat, "train_op", ["loss"]).variables
    state = training.state()
    trainer = msplit.Trainer(flat, "train_op", ["loss"], state=state)
    assert same(trainer.variables, state)


def test_inputs_that_do_not_fit_are_named(model: Path) -> None:
    (good,) = batches(1)
    with msplit.Trainer(model, "train_op", ["loss"], **ON_TENSORFLOW) as trainer:
        for feeds, said in (
            ({"x": good["x"]}, "no value for input 'label'"),
            ({**good, "z": good["x"]}, "the model has no input 'z'"),
            ({**good, "x": good["x"].astype(np.float64)}, "input 'x' is float32, and is given float64"),
            ({**good, "x": good["x"][:, :3]}, r"input 'x' has shape .*4\], and is given .*3\]"),
        ):
            with pytest.raises(EngineError, match=said):
                trainer.step(feeds)
        assert trainer.runner is None
        with pytest.raises(LoadError, match="a batch is a list"):
            trainer.run([[1, 2]])
        with pytest.raises(LoadError, match="gives no batches but a dict"):
            trainer.run(good)
    with pytest.raises(EngineError, match="the trainer is closed"):
        trainer.step(good)


def test_names_that_are_not_there(model: Path) -> None:
    with pytest.raises(LoadError, match=r"--fetch names 'los', .*\n.*did you mean loss"):
        msplit.Trainer(model, "train_op", ["los"])
    with pytest.raises(LoadError, match="--target names 'train'"):
        msplit.Trainer(model, "train", ["loss"])
    with pytest.raises(LoadError, match="--fetch names 'train_op/update', which gives no tensor"):
        msplit.Trainer(model, "train_op", ["train_op/update"])
    with pytest.raises(EngineError, match="nothing that loss runs changes a variable"):
        msplit.Trainer(model, "loss", ["loss"])


def test_a_tf_data_dataset_and_every_other_step(trainer: Trainer) -> None:
    import tensorflow as tf

    (batch,) = batches(1)
    before = trainer.steps
    data = tf.data.Dataset.from_tensors(dict(batch)).repeat()
    fetched = trainer.run(data, 5, fetch_every=2)
    assert [one.step for one in fetched] == sorted(
        {*(at for at in range(before + 1, before + 6) if at % 2 == 0), before + 5}
    )
    assert trainer.steps == before + 5
    assert next(trainer.each(data)).step == before + 6


def test_a_saved_model_of_tensorflow_2_trains_and_its_objects_are_restored(tmp_path: Path) -> None:
    import tensorflow as tf

    class Model(tf.Module):
        def __init__(self) -> None:
            self.weight = tf.Variable(2.0)
            self.speed = tf.Variable(0.0)

        @tf.function(input_signature=[tf.TensorSpec((None,), tf.float32, "x")])
        def train(self, x: tf.Tensor) -> dict[str, tf.Tensor]:
            loss = tf.reduce_mean((self.weight * x - 3.0 * x) ** 2)
            gradient = tf.reduce_mean(2.0 * (self.weight * x - 3.0 * x) * x)
            self.speed.assign(0.5 * self.speed + gradient)
            self.weight.assign_sub(0.1 * self.speed)
            return {"loss": loss}

        @tf.function(input_signature=[tf.TensorSpec((None,), tf.float32, "x")])
        def score(self, x: tf.Tensor) -> dict[str, tf.Tensor]:
            return {"y": self.weight * x}

    one = Model()
    saved = tmp_path / "served" / "1"
    tf.saved_model.save(one, str(saved), signatures={"train": one.train, "serving_default": one.score})
    x = np.ones(4, np.float32)
    flat = msplit.load(saved, signature="train")
    with msplit.Trainer(flat, fetches=["loss"], **ON_TENSORFLOW) as trainer:
        got = losses(trainer.run([{"x": x}] * 3))
        path = trainer.save(tmp_path / "model")
    assert got == [float(one.train(x)["loss"]) for _ in range(3)]
    again = Model()
    tf.train.Checkpoint(weight=again.weight, speed=again.speed).restore(str(path)).expect_partial()
    assert (float(again.weight), float(again.speed)) == (float(one.weight), float(one.speed))
    with msplit.Trainer(flat, fetches=["loss"], **ON_TENSORFLOW) as trainer:
        trainer.restore(path)
        assert losses(trainer.run([{"x": x}])) == [float(one.train(x)["loss"])]
    is_served_as_a_new_version(saved, path, x, x * float(again.weight))


def is_served_as_a_new_version(saved: Path, checkpoint: Path, x: Any, expected: Any) -> None:
    """A checkpoint of one process feeds the server of another: beside the graph in a folder of a higher number, or given to a pool."""
    pytest.importorskip("grpc")
    from msplit.serving.server import making
    from msplit.serving.server.config import ModelConfig
    from msplit.serving.server.versions import Polling

    request = RunRequest.of(engine="cuda", device="cpu", effort="fast")
    settings, polling = PoolSettings(groups=1, batches=(4,)), Polling(0.01)
    with making.ready([ModelConfig("m", saved.parent)], request, settings, polling=polling) as models:
        pool = models.find("m", 1).signature("").pool
        assert pool.step({"x": x})["y"].tolist() == [2, 2, 2, 2]
        (written := saved.parent.with_name("written")).mkdir()
        shutil.copy(saved / "saved_model.pb", written)
        (written / "variables").mkdir()
        for ending in (".index", ".data-00000-of-00001"):
            shutil.copy(f"{checkpoint}{ending}", written / "variables" / f"variables{ending}")
        written.rename(saved.with_name("2"))
        end = time.monotonic() + 60
        while 2 not in models.versions["m"]:
            assert time.monotonic() < end
            time.sleep(0.01)
        np.testing.assert_allclose(models.find("m").signature("").pool.step({"x": x})["y"], expected, rtol=1e-6)


def test_the_cuda_engine_trains_as_tensorflow_does_and_resumes_bit_equal(model: Path, tmp_path: Path) -> None:
    request = {"engine": "cuda", "device": "cpu", "streams": (2,), "precision": "ieee", "effort": "fast"}
    with (
        msplit.Trainer(model, "train_op", ["loss"], **request) as trainer,
        msplit.Trainer(model, "train_op", ["loss"], **ON_TENSORFLOW) as other,
    ):
        got, expected = losses(trainer.run(batches(6))), losses(other.run(batches(6)))
        np.testing.assert_allclose(got, expected, rtol=1e-5)
        path = trainer.save(tmp_path / "model")
        after, state = losses(trainer.run(batches(3))), trainer.variables
        trainer.restore(path)
        assert losses(trainer.run(batches(3))) == after
        assert same(trainer.variables, state)
        other.restore(path)
        np.testing.assert_allclose(losses(other.run(batches(3))), after, rtol=1e-5)


def test_bfloat16_trains_variables_of_float32(model: Path) -> None:
    def trained(precision: str) -> tuple[list[float], Any]:
        request = {"engine": "cuda", "device": "cpu", "streams": (2,), "precision": precision, "effort": "fast"}
        with msplit.Trainer(model, "train_op", ["loss"], **request) as trainer:
            return losses(trainer.run(batches(6))), trainer.variables

    (got, state), (expected, exact) = trained("bf16"), trained("ieee")
    np.testing.assert_allclose(got, expected, rtol=3e-2)
    assert got != expected
    assert {name: value.dtype for name, value in state.items()} == {name: value.dtype for name, value in exact.items()}


def test_float16_trains_with_a_scaled_loss_and_resumes_bit_equal(model: Path, tmp_path: Path) -> None:
    request = {"engine": "cuda", "device": "cpu", "streams": (2,), "precision": "fp16", "effort": "fast"}
    exact = dict(request, precision="ieee")
    small = [
        {name: value / 8 for name, value in one.items()} for one in batches(6)
    ]  # their gradients can be scaled by 2**15
    with msplit.Trainer(model, "train_op", ["loss"], **exact) as trainer:
        expected = losses(trainer.run(small))
    with msplit.Trainer(model, "train_op", ["loss"], **request) as trainer:
        assert np.allclose(losses(trainer.run(small)), expected, rtol=3e-3)
        assert not any("scale" in name for name in trainer.variables)
        # Labels that gradients of float16 can not hold: the step changes nothing, and the next one has half the scale.
        kept = trainer.variables
        overflowing = [{**one, "label": one["label"] * 1e6} for one in batches(1)]
        trainer.run(overflowing)
        assert same(trainer.variables, kept)
        path = trainer.save(tmp_path / "model")
        after, state = losses(trainer.run(small[:3])), trainer.variables
        again = trainer.save(tmp_path / "after")
        trainer.restore(path)
        assert losses(trainer.run(small[:3])) == after
    with msplit.Trainer(model, "train_op", ["loss"], **request) as trainer:
        trainer.restore(path)
        assert losses(trainer.run(small[:3])) == after
        assert same(trainer.variables, state)
        scales = [
            {name: float(Checkpoint(one).tensor(key)) for name, key in checkpoint.SCALE.items()}
            for one in (path, again, trainer.save(tmp_path / "new"))
        ]
    assert list(scales[0].values()) == [2.0**14, 0]
    assert list(scales[1].values()) == list(scales[2].values()) == [2.0**14, 3]
    with msplit.Trainer(model, "train_op", ["loss"], **exact) as trainer:  # what scales no loss passes it over
        trainer.restore(path)
        trainer.run(batches(1))


def test_a_step_in_float16_is_verified_and_measured_with_a_scale_that_does_not_overflow(model: Path) -> None:
    """The first steps of this model overflow at the scale that they begin with: they are left out, in this precision alone."""
    request = {"engine": "cuda", "device": "cpu", "streams": (2,), "precision": "fp16"}
    settings = msplit.Settings(duration=0.05, warmup=0.0, min_rounds=2, builds=1)
    found = msplit.bench(to_train(model, "train_op", ["loss"]), **request, batch=8, settings=settings, fuse=False)
    assert not found.result.failed, found.result.describe_failures()
    with msplit.Trainer(
        model, "train_op", ["loss"], **request
    ) as trainer:  # what verifies does not train, nor change the scale
        trainer.run(batches(1))
        assert trainer.runner is not None
        assert trainer.runner.executable.keeps_state
        state = trainer.runner.executable.save_state()
    assert (float(state[LOSS_SCALE]), int(state[GOOD_STEPS])) == (2.0**14, 0)


def test_dropout_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """What random ops count is no variable of the graph. It goes on in a new process, too, and in one that is at another step."""
    model = regression(tmp_path / "model.meta", dropout=0.5)
    request = {"engine": "cuda", "device": "cpu", "streams": (2,), "precision": "ieee", "effort": "fast"}
    with msplit.Trainer(model, "train_op", ["loss"], **request) as trainer:
        trainer.run(batches(2))
        path = trainer.save(tmp_path / "model")
        after, state = losses(trainer.run(batches(3))), trainer.variables
        trainer.restore(path)
        assert losses(trainer.run(batches(3))) == after
    with msplit.Trainer(model, "train_op", ["loss"], **request) as trainer:
        trainer.restore(path)
        assert losses(trainer.run(batches(3))) == after
        assert same(trainer.variables, state)
        trainer.load(state)
        assert losses(trainer.run(batches(3))) != after


def test_the_example_of_deeprec_trains_on_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    monkeypatch.syspath_prepend(str(SAMPLES.parent / "docs" / "examples"))
    found = importlib.import_module("deeprec_training").run(150, "cpu")
    for name, wanted in (("weight_0", 3.0), ("weight_1", -2.0), ("bias", 0.5)):
        assert abs(float(found[name]) - wanted) < 0.2


def test_values_that_are_given_are_what_the_first_step_is_verified_with(model: Path, tmp_path: Path) -> None:
    """With full effort, as on a GPU, a step is held against TensorFlow's before the first one: from those values, not from initial ones."""
    request = {"engine": "cuda", "device": "cpu", "streams": (2,), "precision": "ieee"}
    with msplit.Trainer(model, "train_op", ["loss"], **ON_TENSORFLOW) as other:
        other.run(batches(3))
        path, state, expected = other.save(tmp_path / "model"), other.variables, losses(other.run(batches(2)))
    for given in (None, state):
        with msplit.Trainer(model, "train_op", ["loss"], **request, state=given) as trainer:
            if given is None:
                trainer.restore(path)
            np.testing.assert_allclose(losses(trainer.run(batches(2))), expected, rtol=1e-5)


@pytest.mark.parametrize("engine", ["tensorflow", "cuda"])
def test_a_variable_that_is_fetched_has_the_value_that_the_step_leaves(model: Path, engine: str) -> None:
    request = {"engine": engine, "device": "cpu", "streams": (2,)} if engine == "cuda" else ON_TENSORFLOW
    with msplit.Trainer(model, "train_op", ["global_step", "loss", "bias"], **request) as trainer:
        for number, feeds in enumerate(batches(2), 1):
            found, left = trainer.step(feeds), trainer.variables
            assert found["global_step"] == number
            np.testing.assert_array_equal(found["bias"], left["bias"])
