"""A model of `tf.Example`s as an Estimator exports it: one graph, with signatures for `Classify`, `Regress` and `Predict`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

CLASSIFY, REGRESS, PREDICT = (f"tensorflow/serving/{name}" for name in ("classify", "regress", "predict"))
LABELS = [b"none", "grün".encode(), b"x"]


def export(path: Path) -> None:
    """Writes it: a price (which an example must have), a number of clicks (0) and a word ("") become three classes and a sum."""
    import tensorflow as tf

    v1, random = tf.compat.v1, np.random.default_rng(0)
    with tf.Graph().as_default():
        serialized = v1.placeholder(tf.string, [None], name="input_examples")
        found = tf.raw_ops.ParseExample(
            serialized=serialized, names=[], sparse_keys=[], dense_keys=["price", "clicks", "word"],
            dense_defaults=[tf.constant([], tf.float32), tf.constant(0, tf.int64), tf.constant("")],
            sparse_types=[], dense_shapes=[[], [], []],
        )  # fmt: skip
        price, clicks, word = found.dense_values
        table = v1.get_variable("table", initializer=random.standard_normal((50, 4)).astype(np.float32))
        embedded = tf.gather(table, tf.strings.to_hash_bucket_fast(word, 50))
        x = tf.concat([price[:, None], tf.cast(clicks, tf.float32)[:, None], embedded], 1)
        w = v1.get_variable("w", initializer=random.standard_normal((6, 3)).astype(np.float32))
        scores = tf.nn.softmax(tf.tanh(x @ w))
        classes = tf.tile(tf.constant([LABELS]), [tf.shape(scores)[0], 1])
        total = tf.reduce_sum(x, 1, keepdims=True)

        def info(**tensors: Any) -> Any:
            return {name: v1.saved_model.build_tensor_info(tensor) for name, tensor in tensors.items()}

        def signature(method: str, **outputs: Any) -> Any:
            inputs = info(**{"examples" if method == PREDICT else "inputs": serialized})
            return v1.saved_model.build_signature_def(inputs, info(**outputs), method)

        signatures = {
            "serving_default": signature(CLASSIFY, classes=classes, scores=scores),
            "regression": signature(REGRESS, outputs=total),
            "flat": signature(REGRESS, outputs=total[:, 0]),
            "labels": signature(CLASSIFY, classes=classes),
            "scores": signature(CLASSIFY, scores=scores),
            "wide": signature(REGRESS, outputs=scores),
            "predict": signature(PREDICT, classes=classes, scores=scores),
        }
        builder = v1.saved_model.Builder(str(path))
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            builder.add_meta_graph_and_variables(session, ["serve"], signatures)
        builder.save()
