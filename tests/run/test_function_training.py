"""A compiled train step leaves variables as the step itself leaves them, whatever it is called with and whoever assigns to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import msplit
from msplit.errors import MsplitError
from msplit.run.keras_fit import SMALL

pytestmark = pytest.mark.tf

STOCK = {"engine": "tensorflow"}


@pytest.fixture(scope="module")
def tf() -> Any:
    from msplit.engines.tensorflow.runtime import tensorflow

    return tensorflow()


class Descent:
    """Momentum by hand: a rate that can be assigned, a counter, a matrix with its velocity, and an effect that nothing waits for."""

    def __init__(self, tf: Any, *, traced: bool = True) -> None:
        self.tf = tf
        start = np.random.default_rng(4).standard_normal((6, 4)).astype(np.float32)
        self.weight, self.velocity = tf.Variable(start, name="w"), tf.Variable(np.zeros_like(start), name="w")
        self.rate, self.count = tf.Variable(0.1), tf.Variable(0, dtype=tf.int64)
        self.frozen = tf.Variable(np.ones(20, np.float32), trainable=False)
        self.step: Callable[..., Any] = tf.function(self.train) if traced else self.train

    def train(self, x: Any, y: Any) -> Any:
        tf = self.tf
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ self.weight - y)) * tf.reduce_mean(self.frozen)
        gradient = tape.gradient(loss, self.weight)
        self.velocity.assign(0.5 * self.velocity + gradient)
        self.weight.assign_sub(self.rate * self.velocity)
        self.count.assign_add(1)
        return {"loss": loss, "nothing": None}

    @property
    def variables(self) -> list[Any]:
        return [self.weight, self.velocity, self.rate, self.count, self.frozen]


def batch(seed: int, rows: int = 5) -> tuple[Any, Any]:
    chance = np.random.default_rng(seed)
    return chance.standard_normal((rows, 6), np.float32), chance.standard_normal((rows, 4), np.float32)


def alike(found: Any, wanted: Any) -> None:
    for one, other in zip(found.variables, wanted.variables, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-4, atol=1e-6, err_msg=one.name)


@pytest.fixture
def pair(tf: Any) -> tuple[Descent, Descent]:
    return Descent(tf), Descent(tf)


@pytest.mark.parametrize("traced", [True, False])
def test_steps_train_and_the_end_of_the_block_brings_it_back(tf: Any, traced: bool) -> None:
    ours, theirs = Descent(tf, traced=traced), Descent(tf)
    before = ours.weight.numpy()
    with msplit.compile(ours.step, **STOCK, streams=1) as fast:
        for seed in range(3):
            found, wanted = fast(*batch(seed)), theirs.step(*batch(seed))
            assert found["nothing"] is None
            np.testing.assert_allclose(found["loss"], wanted["loss"], rtol=1e-5)
        np.testing.assert_array_equal(ours.weight.numpy(), before, "TensorFlow's variable is behind until a sync")
    alike(ours, theirs)


def test_all_shapes_train_the_same_variables(pair: Any) -> None:
    ours, theirs = pair
    with msplit.compile(ours.step, **STOCK, streams=1, most=2) as fast:
        for seed, rows in enumerate((5, 3, 5, 2, 3)):  # the last takes the place of the one before the last but one
            fast(*batch(seed, rows))
            theirs.step(*batch(seed, rows))
    alike(ours, theirs)


def test_the_set_of_shapes_that_goes_leaves_what_it_trained(pair: Any) -> None:
    ours, theirs = pair
    with msplit.compile(ours.step, **STOCK, streams=1, most=1) as fast:
        for seed, rows in enumerate((5, 3)):
            fast(*batch(seed, rows))
            theirs.step(*batch(seed, rows))
        assert len(fast.runners) == 1
    alike(ours, theirs)


def test_what_is_assigned_to_small_variables_counts_at_once_and_to_others_after_a_sync(tf: Any, pair: Any) -> None:
    ours, theirs = pair
    with msplit.compile(ours.step, **STOCK, streams=1) as fast:
        for seed in range(4):
            fast(*batch(seed))
            theirs.step(*batch(seed))
            for one in pair:
                one.rate.assign(0.1 / (seed + 2))
        fast.sync()
        alike(ours, theirs)
        for one in pair:
            one.frozen.assign(one.frozen / 2)
            one.weight.assign_add(tf.ones_like(one.weight))
        for seed in range(2):
            fast(*batch(seed))
            theirs.step(*batch(seed))
            for one in pair:
                one.count.assign(7)
        fast.sync()
        alike(ours, theirs)
        fast.refresh()
        fast(*batch(9))
        theirs.step(*batch(9))
    alike(ours, theirs)


def test_what_is_assigned_to_a_large_variable_between_steps_is_lost_with_a_warning(pair: Any) -> None:
    ours, theirs = pair
    assert ours.weight.shape.num_elements() > SMALL
    with msplit.compile(ours.step, **STOCK, streams=1) as fast:
        fast(*batch(0))
        ours.weight.assign(ours.weight * 0.0)
        fast(*batch(1))
        with pytest.warns(RuntimeWarning, match="^w:0: what was assigned since the last sync is lost"):
            fast.sync()
    for seed in range(2):
        theirs.step(*batch(seed))
    alike(ours, theirs)


def test_the_original_goes_on_where_the_engine_has_got_to(pair: Any) -> None:
    ours, theirs = pair
    with msplit.compile(ours.step, **STOCK, streams=1) as fast:
        fast(*batch(0))
        fast._original(batch(1), (batch(1), {}))  # as a call does with a fallback while other shapes are prepared
        fast(*batch(2))
    for seed in range(3):
        theirs.step(*batch(seed))
    alike(ours, theirs)


def test_a_step_that_gives_nothing_trains(tf: Any) -> None:
    total = tf.Variable(np.zeros(30, np.float32))

    @tf.function
    def add(x: Any) -> None:
        total.assign_add(x)

    with msplit.compile(add, **STOCK, streams=1) as fast:
        assert fast(np.ones(30, np.float32)) is None
        assert fast(np.ones(30, np.float32)) is None
    np.testing.assert_array_equal(total.numpy(), np.full(30, 2.0))


def test_results_that_are_variables_or_numbers_are_what_the_original_gives(tf: Any) -> None:
    def made() -> Any:
        best, count = tf.Variable(np.full(3, 9.0, np.float32)), keras_variable(0.0)

        @tf.function
        def step(x: Any) -> Any:
            best.assign(tf.minimum(best, x))
            count.assign(count + 1.0)
            return {"best": best, "count": count, "weight": 0.5, "none": None}

        return step

    import keras

    keras_variable = keras.Variable
    x = np.array([1, 20, 3], np.float32)
    with msplit.compile(made(), **STOCK, streams=1) as fast:
        found, wanted = fast(x), made()(x)
    assert found.keys() == wanted.keys()
    for name in ("best", "count", "weight"):
        np.testing.assert_array_equal(found[name], wanted[name])
    assert found["none"] is None


def test_steps_that_compute_a_part_again_for_its_gradient_train(tf: Any) -> None:
    def made() -> Any:
        weight = tf.Variable(np.eye(3, dtype=np.float32))
        layer = tf.recompute_grad(lambda x: tf.nn.gelu(x @ weight))

        @tf.function
        def step(x: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(layer(layer(x))))
            weight.assign_sub(0.1 * tape.gradient(loss, weight))
            return loss

        return step, weight

    (ours, mine), (theirs, wanted) = made(), made()
    x = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    with msplit.compile(ours, **STOCK, streams=1) as fast:
        for _ in range(2):
            np.testing.assert_allclose(fast(x), theirs(x), rtol=1e-5)
    np.testing.assert_allclose(mine, wanted, rtol=1e-5)


def test_numbers_that_a_generator_draws_go_on_where_it_was(tf: Any) -> None:
    ours, theirs = tf.random.Generator.from_seed(3), tf.random.Generator.from_seed(3)
    with msplit.compile(lambda x: x + ours.uniform([4]), **STOCK, streams=1) as fast:
        for _ in range(3):
            np.testing.assert_array_equal(fast(np.zeros(4, np.float32)), theirs.uniform([4]))
    np.testing.assert_array_equal(ours.state.numpy(), theirs.state.numpy())


def test_what_trains_is_not_improved_beside(tf: Any) -> None:
    one = Descent(tf)
    with (
        msplit.compile(one.step, **STOCK, streams=1, improve=True) as fast,
        pytest.raises(MsplitError, match="improve=True is for functions that change no variables"),
    ):
        fast(*batch(0))
