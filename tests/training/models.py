"""Small models that train, and data for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from msplit.engines.base import Feeds

ON_TENSORFLOW = {"engine": "tensorflow", "streams": (1,)}
ROWS = 96


def regression(path: Path, rate: float = 0.05, dropout: float = 0.0) -> Path:
    """A .meta of TensorFlow 1: a linear model of four inputs, its weights in two partitions, with Adam and a global step."""
    import tensorflow as tf

    v1 = tf.compat.v1
    with tf.Graph().as_default():
        v1.set_random_seed(3)
        x = v1.placeholder(tf.float32, (None, 4), name="x")
        label = v1.placeholder(tf.float32, (None,), name="label")
        with v1.variable_scope("model", partitioner=v1.fixed_size_partitioner(2), use_resource=True):
            weights = v1.get_variable("weights", (4, 1), initializer=v1.random_normal_initializer(seed=1))
        bias = v1.get_variable("bias", (), initializer=v1.zeros_initializer(), use_resource=False)
        v1.get_variable("unused", (3,), initializer=v1.ones_initializer())
        v1.get_variable("counts", (), tf.int64, v1.zeros_initializer(), collections=[v1.GraphKeys.LOCAL_VARIABLES])
        kept = tf.nn.dropout(x, rate=dropout, seed=5) if dropout else x
        found = tf.squeeze(tf.matmul(kept, tf.convert_to_tensor(weights)), 1) + bias
        loss = tf.reduce_mean(tf.math.squared_difference(found, label), name="loss")
        step = v1.train.get_or_create_global_step()
        v1.train.AdamOptimizer(rate).minimize(loss, global_step=step, name="train_op")
        v1.global_variables_initializer()
        v1.train.export_meta_graph(str(path), saver_def=v1.train.Saver().as_saver_def(), clear_devices=True)
    return path


def guarded(path: Path) -> Path:
    """A .meta whose variables are written in a cond alone: a step is left out where the sum of its inputs is negative."""
    import tensorflow as tf

    v1 = tf.compat.v1
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, (None, 4), name="x")
        weights = v1.get_variable("weights", (4, 1), initializer=v1.ones_initializer(), use_resource=True)
        loss = tf.reduce_mean(tf.matmul(x, weights), name="loss")
        (gradient,) = tf.gradients(loss, [weights])

        def apply() -> Any:
            optimizer = v1.train.MomentumOptimizer(0.1, 0.5)
            with tf.control_dependencies([optimizer.apply_gradients([(gradient, weights)])]):
                return tf.constant(True)

        tf.group(tf.cond(tf.reduce_sum(x) > 0, apply, lambda: tf.constant(False)), name="train_op")
        v1.global_variables_initializer()
        v1.train.export_meta_graph(str(path), saver_def=v1.train.Saver().as_saver_def())
    return path


def arrays(rows: int = ROWS) -> dict[str, np.ndarray]:
    """Data for it."""
    random = np.random.default_rng(0)
    x = random.normal(size=(rows, 4)).astype(np.float32)
    return {"x": x, "label": (x @ np.array([1, -2, 3, 0.5]) + 1).astype(np.float32)}


def batches(count: int, rows: int = 8) -> list[Feeds]:
    """Batches of it."""
    data = arrays(count * rows)
    return [{name: value[at * rows : (at + 1) * rows] for name, value in data.items()} for at in range(count)]
