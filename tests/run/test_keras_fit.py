"""Keras models trained by a compiled `train_step`: what `fit` tells and leaves is what it tells and leaves without."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import msplit
from msplit.errors import MsplitError
from tests.campaign import CAMPAIGN

pytestmark = pytest.mark.tf

STOCK = {"engine": "tensorflow"}
SIMULATED = {"engine": "cuda", "device": "cpu", "fuse": False, "group": False}
ROWS = 19 if CAMPAIGN else 16
"""Of which eight are a batch: a smaller last one is prepared as one more shape."""


@pytest.fixture(scope="module")
def keras() -> Any:
    from msplit.engines.tensorflow.runtime import tensorflow

    tensorflow()
    import keras

    return keras


def recommender(keras: Any, optimizer: Any) -> Any:
    """An embedding with sparse gradients, a layer with moving averages, and one that draws."""
    keras.utils.set_random_seed(3)
    ids = keras.Input((3,), dtype="int32")
    hidden = keras.layers.Flatten()(keras.layers.Embedding(20, 4)(ids))
    hidden = keras.layers.Dropout(0.3)(keras.layers.BatchNormalization()(hidden))
    model = keras.Model(ids, keras.layers.Dense(1, "sigmoid")(hidden))
    model.compile(optimizer, "binary_crossentropy", metrics=[keras.metrics.AUC(33, name="auc")] if CAMPAIGN else [])
    return model


def line(keras: Any, optimizer: Any) -> Any:
    """One layer, which is ready soon."""
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4)])
    model.compile(optimizer, "mse")
    return model


def rows(seed: int, count: int) -> tuple[Any, Any]:
    chance = np.random.default_rng(seed)
    return chance.integers(0, 20, (count, 3)).astype(np.int32), chance.integers(0, 2, (count, 1)).astype(np.float32)


def variables(model: Any) -> list[Any]:
    return [*model.variables, *model.optimizer.variables, *model.metrics_variables]


def alike(found: list[Any], wanted: list[Any], part: float = 1e-4, name: str = "") -> None:
    """Every variable within a part of its root mean square."""
    for one, other in zip(found, wanted, strict=True):
        got, expected = (np.asarray(value.numpy(), np.float64) for value in (one, other))
        size = np.sqrt(np.mean(expected**2)) if expected.size else 0.0
        np.testing.assert_allclose(got, expected, rtol=0, atol=part * size + 1e-12, err_msg=f"{name}: {one.path}")


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adam": lambda o: o.Adam(0.01),
    "adamw, clipped by norm": lambda o: o.AdamW(0.01, weight_decay=0.1, clipnorm=0.2),
    "amsgrad": lambda o: o.Adam(0.01, amsgrad=True),
    "sgd, nesterov, schedule": lambda o: o.SGD(
        o.schedules.ExponentialDecay(0.1, 2, 0.5), momentum=0.9, nesterov=True, global_clipnorm=0.3
    ),
    "adagrad, clipped by value": lambda o: o.Adagrad(0.1, clipvalue=0.05),
    "rmsprop, centered": lambda o: o.RMSprop(0.01, momentum=0.5, centered=True),
    "adadelta": lambda o: o.Adadelta(1.0),
    "adamax, averages": lambda o: o.Adamax(0.01, use_ema=True),
    "nadam": lambda o: o.Nadam(0.01),
    "ftrl": lambda o: o.Ftrl(0.1, l1_regularization_strength=0.01),
    "adam, accumulated": lambda o: o.Adam(0.01, gradient_accumulation_steps=2),
    "sgd, averages taken over": lambda o: o.SGD(0.1, use_ema=True, ema_overwrite_frequency=3),
    "scaled loss": lambda o: o.LossScaleOptimizer(o.Adagrad(0.1), initial_scale=4.0, dynamic_growth_steps=2),
    "lion, decay": lambda o: o.Lion(0.01, weight_decay=0.1),
}


NAMES = (
    list(OPTIMIZERS)
    if CAMPAIGN
    else ["adam, accumulated", "adamw, clipped by norm", "sgd, nesterov, schedule", "scaled loss"]
)


class Side:
    """Alike layers side by side, each with a table whose gradient is sparse and an optimizer of its own, trained by one step."""

    def __init__(self, keras: Any) -> None:
        chance = np.random.default_rng(5)
        self.optimizers = [OPTIMIZERS[name](keras.optimizers) for name in NAMES]
        self.weights = [
            [keras.Variable(chance.standard_normal(shape).astype(np.float32)) for shape in ((6, 4), (4,), (5, 4))]
            for _ in self.optimizers
        ]
        for optimizer, weights in zip(self.optimizers, self.weights, strict=True):
            optimizer.build(weights)

    def step(self, x: Any, y: Any) -> Any:
        import tensorflow as tf

        losses, ids = [], tf.cast(tf.abs(x[:, 0]) * 2.0, tf.int32) % 5
        for optimizer, weights in zip(self.optimizers, self.weights, strict=True):
            kernel, bias, table = (weight.value for weight in weights)
            with tf.GradientTape() as tape:
                losses.append(tf.reduce_mean(tf.square(tf.tanh(x @ kernel + bias + tf.gather(table, ids)) - y)))
            gradients = tape.gradient(losses[-1], [kernel, bias, table])
            optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return losses

    @property
    def variables(self) -> dict[str, list[Any]]:
        both = zip(NAMES, self.optimizers, self.weights, strict=True)
        return {name: [*weights, *optimizer.variables] for name, optimizer, weights in both}


def test_optimizers_of_keras_train_as_they_do(keras: Any) -> None:
    import tensorflow as tf

    ours, theirs = Side(keras), Side(keras)
    stock = tf.function(theirs.step)
    with msplit.compile(ours.step, **SIMULATED, streams=1) as fast:
        for number in range(20):
            data = np.random.default_rng(number).standard_normal((8, 10)).astype(np.float32)
            found, wanted = fast(data[:, :6], data[:, 6:]), stock(data[:, :6], data[:, 6:])
            np.testing.assert_allclose(found, wanted, rtol=1e-4)
            if number == 0:
                fast.sync()
                for name, expected in theirs.variables.items():
                    alike(ours.variables[name], expected, 1e-4, name)
    for name, expected in theirs.variables.items():
        alike(ours.variables[name], expected, 1e-3, name)


def test_fit_trains_by_the_step(keras: Any) -> None:
    """With validation after each epoch, a callback that stops in the middle of one, and others that assign to what is small and what is
    large, then and at the end."""

    class Stop(keras.callbacks.Callback):
        seen = 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.seen += 1
            self.model.stop_training = self.seen == 2 * -(-ROWS // 8) + 1

    ours, theirs = (recommender(keras, keras.optimizers.Adam(0.01, use_ema=True)) for _ in range(2))
    x, y = rows(0, ROWS)

    def trained(model: Any, *callbacks: Any) -> dict[str, list[float]]:
        more = [
            keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1)),
            Stop(),
            keras.callbacks.EarlyStopping(patience=4, restore_best_weights=True),
        ]
        told = model.fit(
            x,
            y,
            batch_size=8,
            epochs=4,
            shuffle=False,
            verbose=0,
            validation_data=rows(1, 8),
            callbacks=[*callbacks, *more],
        )
        history: dict[str, list[float]] = told.history
        return history

    wanted = trained(theirs)
    with msplit.compile(ours.train_step, **SIMULATED, streams=1) as fast:
        found = trained(ours, fast.callback())
        assert len(fast.runners) == len({8, ROWS % 8} - {0})
        alike(variables(ours), variables(theirs))
    assert list(found) == list(wanted)
    assert len(wanted["loss"]) == 3
    for name in wanted:
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-4, err_msg=name)
    assert ours.evaluate(x, y, verbose=0) == pytest.approx(theirs.evaluate(x, y, verbose=0), rel=1e-4)


def test_a_fit_that_breaks_leaves_the_model_as_it_is_without(keras: Any) -> None:
    class Break(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 1:
                raise KeyboardInterrupt

    ours, theirs = (line(keras, keras.optimizers.SGD(0.1)) for _ in range(2))
    data = np.random.default_rng(0).standard_normal((12, 10)).astype(np.float32)
    x, y = data[:, :6], data[:, 6:]
    with (
        pytest.raises(KeyboardInterrupt),
        msplit.compile(ours.train_step, **STOCK, streams=1) as fast,
    ):
        ours.fit(x, y, batch_size=4, shuffle=False, verbose=0, callbacks=[fast.callback(), Break()])
    theirs.fit(x[:8], y[:8], batch_size=4, shuffle=False, verbose=0)
    alike(variables(ours), variables(theirs))
    for model in (ours, theirs):
        model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    alike(variables(ours), variables(theirs))


def test_a_callback_reads_what_was_trained_after_so_many_batches(keras: Any) -> None:
    seen = []

    class Read(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append(self.model.get_weights()[0])

    model = line(keras, keras.optimizers.SGD(0.1))
    data = np.random.default_rng(0).standard_normal((16, 10)).astype(np.float32)
    with msplit.compile(model.train_step, **STOCK, streams=1) as fast:
        model.fit(data[:, :6], data[:, 6:], batch_size=4, verbose=0, callbacks=[Read(), fast.callback(every=2)])
    first, second, third, fourth = seen
    assert not np.array_equal(first, second), "after two batches"
    np.testing.assert_array_equal(second, third)
    assert not np.array_equal(third, fourth)


def test_a_callback_is_for_the_model_whose_step_it_is(keras: Any) -> None:
    model, other = (line(keras, "sgd") for _ in range(2))
    with msplit.compile(model, **STOCK) as fast, pytest.raises(MsplitError, match=r"fix: compile model\.train_step"):
        fast.callback()
    with msplit.compile(model.train_step, **STOCK) as fast:
        with pytest.raises(MsplitError, match="give every=1 or more"):
            fast.callback(every=0)
        with pytest.raises(MsplitError, match="this is the callback of another model"):
            other.fit(np.ones((4, 6)), np.ones((4, 4)), verbose=0, callbacks=[fast.callback()])


def test_fit_without_the_callback_says_that_tensorflow_trains(keras: Any) -> None:
    model = line(keras, "sgd")
    x, y = np.ones((8, 6), np.float32), np.ones((8, 4), np.float32)
    with msplit.compile(model.train_step, **STOCK) as step:
        with pytest.warns(RuntimeWarning, match=r"fit trains in TensorFlow.*callbacks=\[step.callback\(\)\]"):
            model.fit(x, y, verbose=0, callbacks=[keras.callbacks.History()])
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            model.fit(x, y, verbose=0, callbacks=[step.callback()])
        with msplit.compile(model.train_step, **STOCK), pytest.warns(RuntimeWarning, match="fit trains"):
            model.fit(x, y, verbose=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        model.fit(x, y, verbose=0)  # nothing is compiled any more
    assert "fit" not in vars(model)


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("predict", "as in fast(x)"),
        ("fit", "step.callback()"),
        ("evaluate", "the model itself"),
        ("summary", "ask the original"),
    ],
)
def test_what_a_model_has_and_a_compiled_one_has_not_says_what_to_do(keras: Any, name: str, way: str) -> None:
    fast = msplit.compile(line(keras, "sgd"), **STOCK)
    assert not hasattr(fast, name)
    with pytest.raises(AttributeError, match="is a function and has no") as told:
        getattr(fast, name)
    assert way in str(told.value)


QUIET = """
from msplit.engines.tensorflow.runtime import tensorflow
print(tensorflow().constant(3).numpy())
import numpy as np
import msplit
from msplit import api
from msplit.samples.layers import ModelBuilder

ModelBuilder(0, 4)
import keras

model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(4)])
with msplit.compile(model, engine="tensorflow") as fast:
    fast(np.ones((2, 6), np.float32))
"""


def test_a_notebook_is_not_filled_with_what_tensorflow_says() -> None:
    env = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    done = subprocess.run([sys.executable, "-c", QUIET], capture_output=True, text=True, env=env, timeout=200)
    assert (done.returncode, done.stdout, done.stderr) == (0, "3\n", "")


def test_advice_on_what_msplit_calls_is_not_for_users(keras: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a user imports TensorFlow, its log level is theirs."""
    from tensorflow.python.util import deprecation

    said: list[Any] = []
    monkeypatch.setattr(deprecation, "_PRINTED_WARNING", {})  # each is printed once
    monkeypatch.setattr(deprecation.logging, "warning", lambda *words: said.append(words))
    with msplit.compile(line(keras, "sgd"), **STOCK) as fast:
        fast(np.ones((2, 6), np.float32))
    assert said == []
