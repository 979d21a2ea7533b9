"""Training with tables in the host's memory, as users do it: whole checkpoints, equal to the bit to those of tables on the device."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import msplit
from msplit.engines.base import Feeds
from msplit.errors import EngineError, MsplitError
from msplit.report import benchmark
from msplit.report.document import size
from msplit.training import checkpoint
from msplit.training.rendezvous import World
from msplit.training.trainer import to_train
from tests.campaign import CAMPAIGN
from tests.cli.runner import fine
from tests.cli.runner import msplit as run
from tests.report.test_schemas import validate
from tests.training import commands
from tests.training.test_train_command import _last, tensors
from tests.training.test_trainer import losses, same

pytestmark = pytest.mark.tf

ROWS, WIDTH = 3000, 4
SIMULATED: dict[str, Any] = {"engine": "cuda", "device": "cpu", "streams": 2, "precision": "ieee", "effort": "fast"}
MEMORY = 1e-5
"""GB: the small table and its slots."""
SIZE = 2 * (ROWS + 2 * ROWS) * WIDTH * 4
"""Bytes of the large tables and their slots."""
KILLS = 10 if CAMPAIGN else 2


def ranker(path: Path, optimizer: str = "Adagrad") -> Path:
    """A .meta of TensorFlow 1 with two large tables and a small one."""
    import tensorflow as tf

    v1 = tf.compat.v1
    with tf.Graph().as_default():
        v1.set_random_seed(3)
        ids = v1.placeholder(tf.int64, (None, 3), name="ids")
        label = v1.placeholder(tf.float32, (None,), name="label")
        sizes = {"small": 50, "table": ROWS, "other": 2 * ROWS}
        tables = [
            v1.get_variable(
                name, (size, WIDTH), initializer=v1.random_normal_initializer(seed=size), use_resource=name != "other"
            )
            for name, size in sizes.items()
        ]
        columns = [tf.nn.embedding_lookup(table, ids[:, number]) for number, table in enumerate(tables)]
        weights = v1.get_variable("weights", (3 * WIDTH, 1), initializer=v1.random_normal_initializer(seed=1))
        found = tf.squeeze(tf.matmul(tf.concat(columns, 1), weights), 1)
        loss = tf.reduce_mean(tf.math.squared_difference(found, label), name="loss")
        step = v1.train.get_or_create_global_step()
        getattr(v1.train, f"{optimizer}Optimizer")(0.1).minimize(loss, global_step=step, name="train_op")
        v1.global_variables_initializer()
        v1.train.export_meta_graph(str(path), saver_def=v1.train.Saver().as_saver_def(), clear_devices=True)
    return path


def arrays(rows: int) -> dict[str, np.ndarray]:
    """Ids of which few come again and again."""
    chance = np.random.default_rng(0)
    ids = np.minimum(chance.zipf(1.3, (rows, 3)) - 1, [49, ROWS - 1, 2 * ROWS - 1])
    return {"ids": ids, "label": chance.standard_normal(rows).astype(np.float32)}


def batches(count: int, rows: int = 8) -> list[Feeds]:
    data = arrays(count * rows)
    return [{name: value[at * rows : (at + 1) * rows] for name, value in data.items()} for at in range(count)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and data for it."""
    folder = tmp_path_factory.mktemp("ranker")
    ranker(folder / "model.meta")
    np.savez(folder / "data.npz", **arrays(96))
    return folder


@pytest.mark.parametrize("how", [{}, {"effort": "full"}, {"capture": False, "group": False}])
def test_a_training_is_to_the_bit_that_of_tables_on_the_device(
    how: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    import tensorflow as tf

    v1 = tf.compat.v1
    model, options = folder / "model.meta", {**SIMULATED, **how}
    with (
        msplit.Trainer(model, "train_op", ["loss"], table_memory=MEMORY, **options) as small,
        msplit.Trainer(model, "train_op", ["loss"], **options) as whole,
    ):
        assert losses(small.run(batches(5), fetch_every=1)) == losses(whole.run(batches(5), fetch_every=1))
        assert same(small.variables, whole.variables)
        assert small.runner is not None
        assert small.runner.facts["host_state_bytes"] == SIZE
        assert any("tables that are trained" in note for note in small.runner.notes)
        assert whole.runner is not None
        assert "host_state_bytes" not in whole.runner.facts
        ours = small.save(tmp_path / "ours")
        assert tensors(ours) == tensors(whole.save(tmp_path / "whole"))
        after, at_ten = losses(small.run(batches(5), fetch_every=1)), small.variables
        small.restore(ours)
        assert losses(small.run(batches(5), fetch_every=1)) == after
        assert same(small.variables, at_ten)
        whole.restore(ours)
        assert losses(whole.run(batches(5), fetch_every=1)) == after
        # Rows that somebody else writes are those that the next step reads.
        for one in (small, whole):
            one.load({"table": np.full((ROWS, WIDTH), 0.5, np.float32)})
        assert losses(small.run(batches(2), fetch_every=1)) == losses(whole.run(batches(2), fetch_every=1))
        assert same(small.variables, whole.variables)
    with msplit.Trainer(model, "train_op", ["loss"], table_memory=MEMORY, **options) as another:
        another.restore(ours)
        assert losses(another.run(batches(5), fetch_every=1)) == after
    with tf.Graph().as_default(), v1.Session() as session:
        saver = v1.train.import_meta_graph(str(model))
        saver.restore(session, str(ours))
        step = session.make_callable(["loss:0", "train_op"], ["ids:0", "label:0"])
        np.testing.assert_allclose([step(one["ids"], one["label"])[0] for one in batches(5)], after, rtol=1e-5)
        theirs = tf.train.load_checkpoint(saver.save(session, str(tmp_path / "theirs")))
        for name, value in at_ten.items():
            np.testing.assert_allclose(theirs.get_tensor(name), value, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("optimizer", ["Momentum", "RMSProp", "Ftrl", "GradientDescent", "Adadelta"])
def test_other_optimizers(optimizer: str, tmp_path: Path) -> None:
    extra = ", 0.9" if optimizer == "Momentum" else ""
    model = _with_arguments(tmp_path / "model.meta", optimizer, extra)
    with (
        msplit.Trainer(model, "train_op", ["loss"], table_memory=MEMORY, **SIMULATED) as small,
        msplit.Trainer(model, "train_op", ["loss"], **SIMULATED) as whole,
    ):
        small.run(batches(4))
        whole.run(batches(4))
        assert same(small.variables, whole.variables)
        assert small.runner is not None
        assert small.runner.facts["host_state_bytes"] >= SIZE // 2


def _with_arguments(path: Path, optimizer: str, extra: str) -> Path:
    import functools

    import tensorflow as tf

    train = tf.compat.v1.train
    if not extra:
        return ranker(path, optimizer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            train, f"{optimizer}Optimizer", functools.partial(getattr(train, f"{optimizer}Optimizer"), momentum=0.9)
        )
        return ranker(path, optimizer)


def test_what_can_not_be_is_refused(folder: Path, tmp_path: Path) -> None:
    model = folder / "model.meta"
    with pytest.raises(MsplitError, match="excludes"):
        msplit.Trainer(model, "train_op", ["loss"], table_memory=MEMORY, engine="tensorflow")
    with pytest.raises(MsplitError, match="excludes"):
        msplit.Trainer(model, "train_op", ["loss"], table_memory=MEMORY, world=World(0, 2), **SIMULATED)
    adam = ranker(tmp_path / "adam.meta", "Adam")
    with (
        pytest.raises(EngineError, match=r"the table table .*AssignSub.* takes all of it in each step"),
        msplit.Trainer(adam, "train_op", ["loss"], table_memory=MEMORY, **SIMULATED) as trainer,
    ):
        trainer.run(batches(1))
    with (
        pytest.raises(EngineError, match="rows of the table other are trained, and can not be bf16"),
        msplit.Trainer(model, "train_op", ["loss"], table_memory=f"{MEMORY},rows=bf16", **SIMULATED) as trainer,
    ):
        trainer.run(batches(1))
    done = run("train", model, "--fetch", "loss", "--data", folder / "data.npz", "--table-memory", MEMORY, "--gpus", 2)
    assert done.code == 2
    assert "--table-memory excludes --gpus" in done.err.replace("\n", " ")
    done = run(*command(adam, folder))
    assert done.code == 2
    assert "takes all of it in each step" in done.err.replace("\n", " ")
    assert "Traceback" not in done.err


# --- The command


def command(model: Path, folder: Path, *further: object, memory: bool = True) -> tuple[object, ...]:
    engine = ("--engine", "cuda", "--device", "cpu", "--streams", 2, "--cuda", "effort=fast", "--precision", "ieee")
    tables = ("--table-memory", MEMORY) if memory else ()
    data = folder / "data.npz"
    return ("train", model, "--fetch", "loss", "--data", data, "--batch", 8, *engine, *tables, *further)


def test_the_command_tells_of_them_and_resumes(folder: Path, tmp_path: Path) -> None:
    model, how = folder / "model.meta", ("--shuffle", "--input", "seed=4")
    told = fine(*command(model, folder, *how, "--steps", 9, "--save", tmp_path / "whole", "--format", "json")).json
    validate("train", told)
    assert any("tables that are trained" in note for note in told["notes"])
    parts = tmp_path / "parts"
    fine(*command(model, folder, *how, "--steps", 4, "--save", parts))
    fine(*command(model, folder, *how, "--steps", 9, "--save", parts, "--resume"))
    fine(*command(model, folder, *how, "--steps", 9, "--save", tmp_path / "device", memory=False))
    assert (
        tensors(parts / "model-9")
        == tensors(tmp_path / "whole" / "model-9")
        == tensors(tmp_path / "device" / "model-9")
    )


@pytest.mark.timeout(1200 if CAMPAIGN else 240)
def test_killed_at_any_time_it_goes_on_bit_equal(folder: Path, tmp_path: Path) -> None:
    """SIGKILL at random times in a training that does little but write checkpoints of tables in the host's memory."""
    lot, kept, model = random.Random(20), tmp_path / "kept", folder / "model.meta"
    how = ("--shuffle", "--save", kept, "--resume", "--save", "keep=2")
    steps = 0
    for _ in range(KILLS):
        child = commands.start(command(model, folder, *how, "--save", "every=1", "--steps", 10**6))
        deadline = time.monotonic() + 100
        while _last(kept) in (None, steps) and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(lot.random() * 0.2)
        child.kill()
        assert child.wait() == -signal.SIGKILL
        found = _last(kept)
        assert found is not None
        assert found > steps  # it went on
        for one in checkpoint.listed(kept).all:
            tensors(one)  # whole
        steps = found
    assert commands.run(command(model, folder, *how, "--save", f"every={10**6}", "--steps", steps + 3)) == 0
    straight = ("--shuffle", "--save", tmp_path / "whole", "--steps", steps + 3)
    assert commands.run(command(model, folder, *straight, memory=False)) == 0
    assert tensors(kept / f"model-{steps + 3}") == tensors(tmp_path / "whole" / f"model-{steps + 3}")


def test_a_bench_of_the_step_says_what_stays_with_the_host(folder: Path) -> None:
    flat = to_train(folder / "model.meta", "train_op", ["loss"])
    found = msplit.bench(flat, batch=8, table_memory=MEMORY, engine="cuda", device="cpu", streams=2, effort="fast")
    (table,) = [one for one in benchmark.document(flat, found).tables if one.title == "What ran"]
    assert f"tables that are trained, and slots, of {size(SIZE)} stay in the host's memory" in table.note


def test_a_keras_model_that_fits_keeps_its_table_with_the_host() -> None:
    from msplit.engines.tensorflow.runtime import tensorflow

    tensorflow()
    import keras

    def model() -> Any:
        keras.utils.set_random_seed(3)
        ids = keras.Input((3,), dtype="int32")
        hidden = keras.layers.Flatten()(keras.layers.Embedding(ROWS, WIDTH)(ids))
        made = keras.Model(ids, keras.layers.Dense(1)(hidden))
        made.compile(keras.optimizers.SGD(0.1), "mse")
        return made

    chance = np.random.default_rng(0)
    ids, wanted = chance.integers(0, ROWS, (24, 3)).astype(np.int32), chance.standard_normal((24, 1)).astype(np.float32)
    found = []
    for memory in (None, MEMORY):
        one = model()
        step = msplit.compile(one.train_step, **SIMULATED, table_memory=memory)
        one.fit(ids, wanted, batch_size=8, epochs=2, verbose=0, callbacks=[step.callback()])
        found.append([np.asarray(variable) for variable in one.variables])
        assert step.runners[0].facts.get("host_state_bytes") == (None if memory is None else ROWS * WIDTH * 4)
        step.close()
    assert all(one.tobytes() == other.tobytes() for one, other in zip(*found, strict=True))
