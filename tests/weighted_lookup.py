"""A step that trains a table and the weights of lookups in it, with every combiner.

python -m tests.weighted_lookup      writes `FILE`, for tests on machines without TensorFlow
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.flatten.build import flatten
from msplit.flatten.flat import FlatGraph
from msplit.formats import read

ROWS, WIDTH, BATCH, COUNT = 37, 5, 16, 4
"""Of the table; examples of a batch, and ids of an example at most."""

FILE = Path(__file__).parent / "gpu" / "weighted_lookup.pb"

Arrays = dict[str, NDArray[Any]]


def made() -> Any:
    """The step's GraphDef, made by TensorFlow."""
    import tensorflow as tf

    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        table = v1.get_variable("table", [ROWS, WIDTH], use_resource=True)
        importance = v1.get_variable("importance", [ROWS], use_resource=True)
        x = v1.placeholder(tf.int64, [BATCH, COUNT], name="ids")
        places, shape = tf.where(tf.not_equal(x, -1)), tf.shape(x, out_type=tf.int64)
        ids = tf.SparseTensor(places, tf.gather_nd(x, places), shape)
        found = []
        for combiner in ("sum", "mean", "sqrtn"):
            weights = tf.SparseTensor(places, tf.gather(importance, ids.values), shape)
            found.append(v1.nn.safe_embedding_lookup_sparse(table, ids, weights, combiner=combiner))
        loss = tf.reduce_mean(tf.square(tf.concat(found, 1) - 1.0), name="loss")
        v1.train.AdagradOptimizer(0.1).minimize(loss, name="train")
    return graph.as_graph_def()


def flat_of(data: bytes) -> FlatGraph:
    """The flat graph of a GraphDef."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pb"
        path.write_bytes(data)
        return flatten(read(path, outputs=["loss", "train"]))


def feeds_of(seed: int) -> Arrays:
    """Ids, -1 where there is none: half of them, and all of the first example."""
    rng = np.random.default_rng(seed)
    ids = np.where(rng.random((BATCH, COUNT)) < 0.5, -1, rng.integers(0, ROWS, (BATCH, COUNT)))
    ids[0] = -1
    return {"ids": ids}


def state_of() -> Arrays:
    """Variables before the first step: some weights are negative, one is zero."""
    rng = np.random.default_rng(0)
    importance = rng.uniform(-0.5, 1.0, ROWS).astype(np.float32)
    importance[3] = 0
    return {
        "table": rng.standard_normal((ROWS, WIDTH)).astype(np.float32),
        "importance": importance,
        "table/Adagrad": np.full((ROWS, WIDTH), 0.1, np.float32),
        "importance/Adagrad": np.full(ROWS, 0.1, np.float32),
    }


if __name__ == "__main__":
    FILE.write_bytes(made().SerializeToString(deterministic=True))
