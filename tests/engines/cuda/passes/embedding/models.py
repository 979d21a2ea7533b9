"""Feature columns as TensorFlow exports them, frozen, with inputs that have everything that can happen in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tests.engines.cuda.cases import flat_of

EDGES = [-1.0, 0.0, 1.0, 2.0]
STRANGE = np.array([np.nan, np.inf, -np.inf, -0.0, 0.0, -1.0, 0.5, 1.0, 2.0, 3.0], np.float32)


def flat_columns(make: Callable[[Any], tuple[list[Any], Mapping[str, tuple[str, int]]]]) -> Any:
    """The flat graph of an input layer.

    Args:
        make: Gets `tf.feature_column`, gives the columns, and per feature its type and how many values an example has.
    """
    import tensorflow as tf

    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        v1.set_random_seed(3)
        columns, features = make(tf.feature_column)
        placeholders = {
            name: v1.placeholder(tf.as_dtype(dtype), (None, count), name=name)
            for name, (dtype, count) in features.items()
        }
        tf.identity(v1.feature_column.input_layer(placeholders, columns), name="out")
        with v1.Session(graph=graph) as session:
            session.run([v1.global_variables_initializer(), v1.tables_initializer()])
            frozen = v1.graph_util.convert_variables_to_constants(session, graph.as_graph_def(), ["out"])
    return flat_of(frozen, outputs=["out"])


def feeds_of(
    flat: Any, features: Mapping[str, tuple[str, int]], batch: int, seed: int, high: int
) -> dict[str, np.ndarray]:
    """Floats with NaN and infinity; ids below `high`, some negative (-1 says that there is none)."""
    chance = np.random.default_rng(seed)
    feeds = {}
    for tensor in flat.inputs:
        dtype, count = features[tensor.name.split(":")[0]]
        if dtype == "string":
            feeds[tensor.name] = chance.choice(np.array([b"", b"a", b"b", b"c"], object), (batch, count))
        elif dtype.startswith("float"):
            feeds[tensor.name] = chance.choice(STRANGE, (batch, count)).astype(dtype)
        else:
            feeds[tensor.name] = chance.integers(-3, high, (batch, count)).astype(dtype)
    return feeds
