"""Keras models train on the GPU as they do in TensorFlow, in IEEE precision, with tensors of TensorFlow's wherever it keeps them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import msplit

pytestmark = [pytest.mark.gpu, pytest.mark.tf]


@pytest.fixture(scope="module")
def keras() -> Any:
    pytest.importorskip("tensorflow.python")  # there may be its protos alone
    tf = pytest.importorskip("tensorflow")
    for gpu in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, True)
    tf.config.experimental.enable_tensor_float_32_execution(False)  # which it is by default on a GPU
    return pytest.importorskip("keras")


def towers(keras: Any) -> Any:
    keras.utils.set_random_seed(3)
    ids = keras.Input((3,), dtype="int32")
    both = keras.layers.Flatten()(keras.layers.Embedding(20, 4)(ids))
    parts = [keras.layers.Dense(8, "relu")(both) for _ in range(4)]
    hidden = keras.layers.Dropout(0.3)(keras.layers.BatchNormalization()(keras.layers.Concatenate()(parts)))
    model = keras.Model(ids, keras.layers.Dense(1, "sigmoid")(hidden))
    model.compile(
        keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
        "binary_crossentropy",
        metrics=["mae"],
        jit_compile=False,
    )
    return model


def test_fit_trains_on_the_gpu(keras: Any) -> None:
    chance = np.random.default_rng(0)
    x, y = chance.integers(0, 20, (40, 3)).astype(np.int32), chance.integers(0, 2, (40, 1)).astype(np.float32)
    ours, theirs = towers(keras), towers(keras)
    told: dict[str, Any] = {"batch_size": 16, "epochs": 3, "shuffle": False, "verbose": 0}
    rates = [keras.callbacks.LearningRateScheduler(lambda epoch: 0.01 / (epoch + 1))]
    wanted = theirs.fit(x, y, callbacks=rates, **told).history
    with msplit.compile(ours.train_step, engine="cuda", precision="ieee", streams=4) as fast:
        found = ours.fit(x, y, callbacks=[*rates, fast.callback()], **told).history
        assert {runner.engine for runner in fast.runners} == {"cuda"}
    for name in wanted:
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-3, err_msg=name)
    for one, other in zip(
        ours.variables + ours.optimizer.variables, theirs.variables + theirs.optimizer.variables, strict=True
    ):
        got, expected = np.asarray(one.numpy(), np.float64), np.asarray(other.numpy(), np.float64)
        part = 1e-3 * np.sqrt(np.mean(expected**2)) + 1e-7
        np.testing.assert_allclose(got, expected, rtol=0, atol=part, err_msg=one.path)
