"""Sample models that recommend: networks over tables of embeddings.

Recommender models: tables of embeddings, small networks, and what mixes them.

A TF1 model of many bucketized numeric columns, each with its own embedding, as recommender teams export them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from msplit.engines.tensorflow.runtime import tensorflow
from msplit.samples.layers import ATTRIBUTE, ModelBuilder, Sample, SampleInput, WeightRecipe, fill, generate, kernel


def _ids(b: ModelBuilder, count: int, rows: int) -> list[Any]:
    return [b.input(f"id_{number}", (), "int32", rows) for number in range(count)]


def deepfm(
    seed: int | ModelBuilder,
    *,
    categorical: int = 32,
    numeric: int = 16,
    rows: int = 10_000,
    width: int = 16,
    units: Sequence[int] = (256, 128, 64),
    batch: int | None = None,
) -> Sample:
    """Build the DeepFM of Guo et al. (IJCAI 2017).

    Args:
        categorical: Number of categorical fields, input `id_<i>` and scope `field_<i>` each.
        numeric: Number of numeric fields, all in the input `numeric`.
        units: Widths of the deep part's layers.
    """
    b = ModelBuilder.of(seed, batch)
    tf, values, ids = b.tf, b.input("numeric", (numeric,)), _ids(b, categorical, rows)
    linear, vectors = [], []
    for field, column in enumerate(ids):
        with b.scope(f"field_{field}"):
            linear.append(b.embedding(column, rows, 1, "linear"))
            vectors.append(b.embedding(column, rows, width, "embedding"))
    with b.scope("numeric_fields"):
        # A numeric field's embedding is one learned vector times the field's value.
        table = b.weight("table", (numeric, width), -1.0, 1.0)
        scaled = tf.multiply(tf.expand_dims(values, 2, name="ExpandDims"), table, name="Mul")
        linear.append(b.dense(values, 1, "linear", activation=None))
    with b.scope("fields"):
        fields = tf.concat([tf.stack(vectors, axis=1, name="stack"), scaled], axis=1, name="concat")
    with b.scope("first_order"):
        first = tf.add_n(linear, name="AddN")
    with b.scope("second_order"):
        square_of_sum = tf.square(tf.reduce_sum(fields, axis=1, name="Sum"), name="Square")
        sum_of_squares = tf.reduce_sum(tf.square(fields, name="Square_1"), axis=1, name="Sum_1")
        pairs = tf.reduce_sum(
            tf.subtract(square_of_sum, sum_of_squares, name="Sub"), axis=1, keepdims=True, name="Sum_2"
        )
        # Besides the machine's own half, a scale that keeps the logit's size independent of the number of fields.
        second = tf.multiply(pairs, 0.5 / (categorical + numeric), name="Mul")
    with b.scope("deep"):
        flat = tf.reshape(fields, (-1, (categorical + numeric) * width), name="flatten")
        deep = b.dense(b.mlp(flat, units), 1, "out", activation=None)
    with b.scope("head"):
        scaled_first = tf.multiply(first, 1.0 / (categorical + 1) ** 0.5, name="Mul")
        logit = tf.add_n([scaled_first, second, deep], name="AddN")
        output = tf.sigmoid(logit, name="Sigmoid")
    return b.finish("deepfm", [output])


def dlrm(
    seed: int | ModelBuilder,
    *,
    tables: int = 26,
    numeric: int = 13,
    rows: int = 10_000,
    width: int = 64,
    bottom: Sequence[int] = (512, 256),
    top: Sequence[int] = (512, 256),
    batch: int | None = None,
) -> Sample:
    """Build the recommendation model of Naumov et al. (arXiv 1906.00091).

    Args:
        tables: Number of embedding tables, input `id_<i>` and scope `table_<i>` each.
        numeric: Width of the input `numeric`.
        width: Width of the embeddings and of the bottom MLP's result.
        bottom: Widths of the bottom MLP's hidden layers.
        top: Widths of the top MLP's hidden layers.
    """
    b = ModelBuilder.of(seed, batch)
    tf, values, ids = b.tf, b.input("numeric", (numeric,)), _ids(b, tables, rows)
    with b.scope("bottom"):
        vectors = [b.mlp(values, (*bottom, width))]
    for table, column in enumerate(ids):
        with b.scope(f"table_{table}"):
            vectors.append(b.embedding(column, rows, width, "embedding"))
    count = len(vectors)
    with b.scope("interaction"):
        stacked = tf.stack(vectors, axis=1, name="stack")
        scaled = tf.multiply(stacked, width**-0.25, name="scale")
        dots = tf.matmul(scaled, scaled, transpose_b=True, name="MatMul")
        row, column = np.tril_indices(count, -1)
        flat = tf.reshape(dots, (-1, count * count), name="flatten")
        below_diagonal = tf.constant((row * count + column).astype(np.int32), name="pairs")
        pairs = tf.gather(flat, below_diagonal, axis=1, name="lower_triangle")
        joined = tf.concat([vectors[0], pairs], axis=1, name="concat")
    with b.scope("top"):
        output = b.dense(b.mlp(joined, top), 1, "out", activation="sigmoid")
    return b.finish("dlrm", [output])


def mmoe(
    seed: int | ModelBuilder,
    *,
    experts: int = 16,
    tasks: int = 2,
    batch: int | None = None,
    features: int = 512,
    units: Sequence[int] = (256, 256, 128),
    tower_units: Sequence[int] = (64,),
) -> Sample:
    """Build the multi-gate mixture of experts of Ma et al. (KDD 2018).

    Args:
        experts: Number of experts, each an MLP of `units` in the scope `expert_<i>`.
        tasks: Number of tasks, each with a softmax gate (`gate_<t>`) and a tower (`tower_<t>`).
        features: Width of the input.
        units: Widths of an expert's layers.
        tower_units: Widths of a tower's hidden layers.
    """
    b = ModelBuilder.of(seed, batch)
    x = b.input("x", (features,))
    mixed = []
    for expert in range(experts):
        with b.scope(f"expert_{expert}"):
            mixed.append(b.mlp(x, units))
    with b.scope("experts"):
        stacked = b.tf.stack(mixed, axis=1, name="stack")
    outputs = []
    for task in range(tasks):
        with b.scope(f"gate_{task}"):
            logits = b.dense(x, experts, "dense", activation=None)
            shares = b.tf.expand_dims(b.tf.nn.softmax(logits, name="Softmax"), 2, name="ExpandDims")
            mixture = b.tf.reduce_sum(b.tf.multiply(stacked, shares, name="Mul"), axis=1, name="Sum")
        with b.scope(f"tower_{task}"):
            hidden = b.mlp(mixture, tower_units)
            outputs.append(b.dense(hidden, 1, "out", activation="sigmoid"))
    return b.finish("mmoe", outputs)


def towers(
    seed: int | ModelBuilder,
    *,
    towers: int = 40,
    rows: int = 20_000,
    width: int = 32,
    units: Sequence[int] = (64, 16),
    batch: int | None = None,
) -> Sample:
    """Build independent embedding towers whose results are concatenated.

    Args:
        towers: Number of towers, each in the scope `tower_<i>` with its own input `id_<i>`.
        units: Widths of a tower's MLP.
    """
    b = ModelBuilder.of(seed, batch)
    parts = []
    for tower, column in enumerate(_ids(b, towers, rows)):
        with b.scope(f"tower_{tower}"):
            parts.append(b.mlp(b.embedding(column, rows, width, "embedding"), units))
    with b.scope("head"):
        joined = b.tf.concat(parts, axis=1, name="concat")
        output = b.dense(joined, 1, "out", activation="sigmoid")
    return b.finish("towers", [output])


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


def _recipe(variable: Any, seed: int) -> WeightRecipe:
    shape = tuple(variable.shape)
    if len(shape) < 2 or "embedding" in variable.op.name:
        return WeightRecipe(variable.op.name, seed, -0.5, 0.5)
    return kernel(variable.op.name, seed, shape)


def dense(x: Any, units: int, scope: str, activation: str | None = "relu") -> Any:
    """A dense layer of TF1 variables `<scope>/kernel` and `<scope>/bias`."""
    tf = tensorflow()
    v1 = tf.compat.v1
    with v1.variable_scope(scope):
        weights = v1.get_variable("kernel", (x.shape[-1], units), initializer=v1.glorot_uniform_initializer(seed=0))
        bias = v1.get_variable("bias", (units,), initializer=v1.zeros_initializer())
        y = tf.nn.bias_add(tf.matmul(x, weights), bias)
        return y if activation is None else getattr(tf.nn, activation)(y)


def build(
    seed: int,
    *,
    columns: int = 50,
    buckets: int = 100,
    width: int = 8,
    units: Sequence[int] = (64, 32),
    batch: int | None = None,
) -> Sample:
    """Build a TF1 model of bucketized numeric feature columns in front of an MLP, frozen as `saved_model_cli` and its kin freeze it.

    Each column is some 60 small nodes (Bucketize, Where, Unique, SparseReshape, SparseFillEmptyRows, ResourceGather,
    SparseSegmentMean, …): what `tf.feature_column` emits. The inputs are `feature_<i>`, float32 `[batch, 1]`; the
    output is `score`, `[batch, 1]`.

    Args:
        columns: Their number.
        buckets: Buckets of each column, which are the rows of its table.
        width: Width of each embedding.
        units: Widths of the MLP's hidden layers.

    Raises:
        ValueError: Fewer than 3 buckets.
    """
    tf = tensorflow()
    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        features, score = feature_columns(columns, buckets, width, units, batch)
        recipes = {variable.op.name: _recipe(variable, seed) for variable in v1.global_variables()}
        with v1.Session(graph=graph) as session:
            load_seeded_values(session, v1.global_variables(), seed)
            frozen = v1.graph_util.convert_variables_to_constants(session, graph.as_graph_def(), [score.op.name])
    for node in frozen.node:
        if node.op == "Const" and node.name in recipes:
            node.attr[ATTRIBUTE].s = recipes[node.name].encode()
    frozen.ClearField("library")
    inputs = tuple(SampleInput(name, "float32", (batch, 1)) for name in features)
    return Sample("feature_columns", fill(frozen), inputs, (score.op.name,))


def feature_columns(
    columns: int, buckets: int, width: int, units: Sequence[int], batch: int | None
) -> tuple[dict[str, Any], Any]:
    """The model in the default graph: its placeholders by name, and its result."""
    if buckets < 3:
        raise ValueError(f"a bucketized column needs at least 3 buckets, not {buckets}")
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
