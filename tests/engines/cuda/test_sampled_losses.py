"""Losses over classes that are drawn in every step, as in TensorFlow: noise contrastive estimation and sampled softmax, trained."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from msplit.core.arguments import Precision
from msplit.engines.base import Job
from msplit.engines.cuda.engine import ENGINE, CudaEngine
from msplit.engines.tensorflow.engine import REFERENCE as TENSORFLOW
from tests.campaign import sampled
from tests.engines.cuda.cases import flat_of, graph_of, initial_values, job, options_of, scattered

pytestmark = pytest.mark.tf

BATCH, WIDTH, CLASSES, DRAWN, STEPS = 6, 4, 20, 8, 3

LOSSES = {
    "nce": lambda nn, *given, **how: nn.nce_loss(*given, **how),
    "nce, others alone": lambda nn, *given, **how: nn.nce_loss(*given, **how, remove_accidental_hits=True),
    "softmax": lambda nn, *given, **how: nn.sampled_softmax_loss(*given, **how, seed=4),
}
OPTIMIZERS = {
    "sgd": lambda train: train.GradientDescentOptimizer(0.1),
    "adagrad": lambda train: train.AdagradOptimizer(0.1),
    "adam": lambda train: train.AdamOptimizer(0.1),
}


def graph(loss: str, optimizer: str, true: int, uniform: bool) -> tuple[Any, Any]:
    """The flat graph of a train step, and values of its variables before the first one."""
    import tensorflow as tf

    v1 = tf.compat.v1
    with tf.Graph().as_default() as made:
        v1.set_random_seed(1)
        ids = v1.placeholder(tf.int64, [BATCH], "ids")
        labels = v1.placeholder(tf.int64, [BATCH, true], "labels")
        sizes = {"table": (CLASSES, WIDTH), "weights": (CLASSES, WIDTH), "biases": (CLASSES,)}
        table, weights, biases = (v1.get_variable(name, shape, use_resource=True) for name, shape in sizes.items())
        rows = tf.nn.embedding_lookup(table, ids)
        drawn = tf.random.uniform_candidate_sampler(labels, true, DRAWN, True, CLASSES) if uniform else None
        found = LOSSES[loss](tf.nn, weights, biases, labels, rows, DRAWN, CLASSES, num_true=true, sampled_values=drawn)
        step = OPTIMIZERS[optimizer](v1.train).minimize(tf.reduce_mean(found, name="loss"))
        state = initial_values(v1)
    return flat_of(made.as_graph_def(), outputs=["loss", step.name]), state


def feeds_of(seed: int, true: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {"ids": rng.integers(0, CLASSES, BATCH), "labels": rng.integers(0, CLASSES, (BATCH, true))}


@sampled(3, loss=LOSSES, optimizer=OPTIMIZERS, true=[1, 2], uniform=[False, True])
def test_losses_over_drawn_classes_train_as_in_tensorflow(loss: str, optimizer: str, true: int, uniform: bool) -> None:
    flat, state = graph(loss, optimizer, true, uniform)
    feeds, ids = feeds_of(0, true), scattered(flat, 3)
    ours = Job(flat, ids, 3, feeds, precision=Precision.IEEE, options=options_of(), state=state)
    theirs = Job(flat, np.zeros_like(ids), 1, feeds, precision=Precision.IEEE, state=state)
    assert not CudaEngine().compile(ours).program.dynamic
    found: list[Any] = []
    for engine, one in ((ENGINE, ours), (TENSORFLOW, theirs)):
        executable = engine.build(one)
        executable.load_state(state)
        losses = [executable.step(feeds_of(seed, true))["loss"] for seed in range(STEPS)]
        found.append((losses, executable.save_state()))
        executable.close()
    (losses, after), (expected_losses, expected) = found
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    for name, value in expected.items():
        scale = np.sqrt(np.mean(np.square(value.astype(float))))
        np.testing.assert_allclose(after[name], value, rtol=0, atol=1e-5 * scale + 1e-12, err_msg=name)


def _fetched(tf: Any, rows: Any, places: Any, weights: Any) -> None:
    tf.identity(places, "fetched")


def _counted(tf: Any, rows: Any, places: Any, weights: Any) -> None:
    tf.shape(weights, name="fetched")


def _turned(tf: Any, rows: Any, places: Any, weights: Any) -> None:
    """A place that is no row, where rows belong."""
    columns = [tf.reshape(tf.cast(one, tf.int32), [-1, 1]) for one in (places, rows)]
    tf.raw_ops.SparseToDense(
        sparse_indices=tf.concat(columns, 1),
        output_shape=[5, 4],
        sparse_values=weights,
        default_value=0.0,
        validate_indices=False,
        name="fetched",
    )


def _of_rows(tf: Any, rows: Any, places: Any, weights: Any) -> None:
    """Places that are looked at no more: a weight for each row that has a hit."""
    tf.raw_ops.SparseToDense(
        sparse_indices=rows,
        output_shape=[4],
        sparse_values=weights,
        default_value=0.0,
        validate_indices=False,
        name="fetched",
    )


@pytest.mark.parametrize("use", [_fetched, _counted, _turned, _of_rows])
def test_hits_of_which_more_is_made_are_as_many_as_tensorflow_has(use: Any) -> None:
    def build(tf: Any, v1: Any) -> None:
        true = v1.placeholder(tf.int64, [4, 1], "true")
        drawn = tf.reshape(tf.cast(v1.placeholder(tf.float32, [5], "drawn"), tf.int64), [5])
        use(tf, *tf.nn.compute_accidental_hits(true, drawn, 1))

    flat = graph_of(build, outputs=["fetched"])
    feeds = {"true": np.array([[3], [7], [1], [9]]), "drawn": np.array([9, 2, 4, 7, 5], np.float32)}
    expected = TENSORFLOW.build(Job(flat, np.zeros(len(flat), np.int32), 1, feeds, precision=Precision.IEEE)).step(
        feeds
    )["fetched"]
    assert CudaEngine().compile(job(flat, feeds)).program.dynamic
    found = ENGINE.build(job(flat, feeds, capture=False)).step(feeds)["fetched"]
    np.testing.assert_array_equal(found, expected)
