"""A step in which Keras divides rows of a sparse gradient by rows of a dense tensor, and adds what comes of it as its optimizers do.

python -m tests.row_division      writes `FILE`, for tests on machines without TensorFlow
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

ROWS, WIDTH, COUNT = 11, 3, 5
"""Of the table; and how many of its rows have a gradient."""

VARIABLES = ("accumulator", "table", "momentum", "squares")
RATE = 0.1
FILE = Path(__file__).parent / "gpu" / "row_division.pb"

Arrays = dict[str, NDArray[Any]]


def made() -> Any:
    """The step's GraphDef, made by TensorFlow and Keras."""
    import tensorflow as tf
    from keras import ops

    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        ids = v1.placeholder(tf.int32, [COUNT], "ids")
        rows = v1.placeholder(tf.float32, [COUNT, WIDTH], "rows")
        epsilon = v1.placeholder(tf.float32, [], "epsilon")
        accumulator, table, momentum, squares = (
            v1.get_variable(name, [ROWS, WIDTH], use_resource=True, initializer=v1.zeros_initializer())
            for name in VARIABLES
        )
        gradient = tf.IndexedSlices(rows, ids, tf.constant([ROWS, WIDTH], tf.int32))
        found = ops.square(gradient)
        with tf.control_dependencies([accumulator.scatter_add(found)]):
            root = ops.sqrt(ops.add(accumulator.read_value(), epsilon))
        quotient = ops.divide(ops.multiply(RATE, gradient), root)
        opposite = ops.square(ops.negative(quotient))
        done = [
            table.scatter_sub(quotient),
            momentum.assign(ops.add(ops.multiply(0.5, momentum.read_value()), quotient)),
            squares.scatter_add(opposite),
        ]
        with tf.control_dependencies(done):
            tf.reduce_sum(tf.square(rows), name="loss")
    return graph.as_graph_def()


def flat_of(data: bytes) -> FlatGraph:
    """The flat graph of a GraphDef."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pb"
        path.write_bytes(data)
        return flatten(read(path, outputs=["loss"]))


def feeds_of(ids: Any, seed: int = 0, epsilon: float = 1e-3) -> Arrays:
    """A gradient for these rows."""
    rows = np.random.default_rng(seed).standard_normal((COUNT, WIDTH)).astype(np.float32)
    return {"ids": np.asarray(ids, np.int32), "rows": rows, "epsilon": np.asarray(epsilon, np.float32)}


def state_of(seed: int = 0) -> Arrays:
    """Variables before the step."""
    rng = np.random.default_rng(seed)
    return {name: rng.uniform(0.1, 1.0, (ROWS, WIDTH)).astype(np.float32) for name in VARIABLES}


def expected(state: Arrays, feeds: Arrays) -> Arrays:
    """Variables after it, were ids in any order."""
    ids, rows, epsilon = feeds["ids"], feeds["rows"], feeds["epsilon"]
    after = {name: value.copy() for name, value in state.items()}
    with np.errstate(all="ignore"):
        np.add.at(after["accumulator"], ids, rows**2)
        root = np.sqrt(after["accumulator"] + epsilon)
        whole = np.zeros_like(root)
        others = np.setdiff1d(np.arange(ROWS), ids)
        whole[others] = whole[others] / root[others]
        quotient = np.float32(RATE) * rows / root[ids]
        after["momentum"] *= np.float32(0.5)
        for name, all_rows, some in (
            ("table", -whole, -quotient),
            ("momentum", whole, quotient),
            ("squares", whole**2, quotient**2),
        ):
            after[name] += all_rows
            np.add.at(after[name], ids, some)
    return after


if __name__ == "__main__":
    FILE.write_bytes(made().SerializeToString(deterministic=True))
