"""A TF1 model of many bucketized numeric columns, each with its own embedding, as recommender teams export them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msplit.samples.types import Input, Sample
from msplit.samples.weights import ATTRIBUTE, Recipe, fill, generate, kernel


def load_seeded_values(session: Any, variables: Sequence[Any], seed: int) -> None:
    """Initialize `variables` in `session` with values that depend on their names and the seed.

    The values are fed over what the initializers would compute, so they leave no constants in the graph.
    """
    values = {
        variable.initializer.inputs[1]: generate(
            _recipe(variable, seed), tuple(variable.shape), variable.dtype.base_dtype.as_numpy_dtype
        )
        for variable in variables
    }
    # In one run: the first run of every other choice of fetches goes over the whole graph.
    session.run([variable.initializer for variable in variables], values)


def _recipe(variable: Any, seed: int) -> Recipe:
    shape = tuple(variable.shape)
    if len(shape) < 2 or "embedding" in variable.op.name:
        return Recipe(variable.op.name, seed, -0.5, 0.5)
    return kernel(variable.op.name, seed, shape)


def dense(x: Any, units: int, scope: str, activation: str | None = "relu") -> Any:
    """A dense layer of TF1 variables `<scope>/kernel` and `<scope>/bias`."""
    from msplit.engines.tensorflow.runtime import tensorflow

    tf = tensorflow()

    v1 = tf.compat.v1
    with v1.variable_scope(scope):
        weights = v1.get_variable("kernel", (x.shape[-1], units), initializer=v1.glorot_uniform_initializer(seed=0))
        bias = v1.get_variable("bias", (units,), initializer=v1.zeros_initializer())
        y = tf.nn.bias_add(tf.matmul(x, weights), bias)
        return y if activation is None else getattr(tf.nn, activation)(y)


def write_feature_columns(
    path: Path | str,
    columns: int,
    *,
    buckets: int = 100,
    width: int = 8,
    units: Sequence[int] = (64, 32),
    seed: int = 0,
) -> None:
    """Write a TF1 SavedModel with `columns` bucketized numeric feature columns in front of an MLP.

    Each column is some 60 small nodes (Bucketize, Where, Unique, SparseReshape, SparseFillEmptyRows, ResourceGather,
    SparseSegmentMean, …): what `tf.feature_column` emits. The inputs are `feature_<i>`, float32 `[batch, 1]`; the
    signature `serving_default` gives `score`, `[batch, 1]`.

    Args:
        path: Folder to write; it must not exist.
        columns: Their number.
        buckets: Buckets of each column, which are the rows of its table.
        width: Width of each embedding.
        units: Widths of the MLP's hidden layers.

    Raises:
        ValueError: Fewer than 3 buckets.
    """
    from msplit.engines.tensorflow.runtime import tensorflow

    tf = tensorflow()

    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        features, score = _model(columns, buckets, width, units, batch=None)
        with v1.Session(graph=graph) as session:
            load_seeded_values(session, v1.global_variables(), seed)
            v1.saved_model.simple_save(session, str(path), features, {"score": score})


def build(
    seed: int,
    *,
    columns: int = 50,
    buckets: int = 100,
    width: int = 8,
    units: Sequence[int] = (64, 32),
    batch: int | None = None,
) -> Sample:
    """Build the same model as a frozen graph, as `saved_model_cli` and its kin freeze it.

    See `write_feature_columns`.
    """
    from msplit.engines.tensorflow.runtime import tensorflow

    tf = tensorflow()

    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        features, score = _model(columns, buckets, width, units, batch)
        recipes = {variable.op.name: _recipe(variable, seed) for variable in v1.global_variables()}
        with v1.Session(graph=graph) as session:
            load_seeded_values(session, v1.global_variables(), seed)
            frozen = v1.graph_util.convert_variables_to_constants(session, graph.as_graph_def(), [score.op.name])
    for node in frozen.node:
        if node.op == "Const" and node.name in recipes:
            node.attr[ATTRIBUTE].s = recipes[node.name].encode()
    frozen.ClearField("library")
    inputs = tuple(Input(name, "float32", (batch, 1)) for name in features)
    return Sample("feature_columns", fill(frozen), inputs, (score.op.name,))


def _model(
    columns: int, buckets: int, width: int, units: Sequence[int], batch: int | None
) -> tuple[dict[str, Any], Any]:
    """The model in the default graph: its placeholders by name, and its result."""
    if buckets < 3:
        raise ValueError(f"a bucketized column needs at least 3 buckets, not {buckets}")
    from msplit.engines.tensorflow.runtime import tensorflow

    tf = tensorflow()

    v1 = tf.compat.v1
    # Evenly over the bulk of a standard normal feature.
    boundaries = [-3.0 + 6.0 * index / (buckets - 2) for index in range(buckets - 1)]
    names = [f"feature_{index}" for index in range(columns)]
    features = {name: v1.placeholder(tf.float32, (batch, 1), name=name) for name in names}
    embedded = [
        tf.feature_column.embedding_column(
            tf.feature_column.bucketized_column(tf.feature_column.numeric_column(name), boundaries), width
        )
        for name in names
    ]
    x = v1.feature_column.input_layer(features, embedded)
    for index, size in enumerate(units):
        x = dense(x, size, f"dense_{index}")
    return features, dense(x, 1, "score", "sigmoid")
