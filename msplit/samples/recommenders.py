"""Recommender models: tables of embeddings, small networks, and what mixes them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from msplit.samples.layers import Builder
from msplit.samples.types import Sample


def deepfm(
    seed: int | Builder,
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
    b = Builder.of(seed, batch)
    tf = b.tf
    values = b.input("numeric", (numeric,))
    ids = [b.input(f"id_{field}", (), "int32", rows) for field in range(categorical)]
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
    seed: int | Builder,
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
    b = Builder.of(seed, batch)
    tf = b.tf
    values = b.input("numeric", (numeric,))
    ids = [b.input(f"id_{table}", (), "int32", rows) for table in range(tables)]
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
    seed: int | Builder,
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
    b = Builder.of(seed, batch)
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
    seed: int | Builder,
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
    b = Builder.of(seed, batch)
    ids = [b.input(f"id_{tower}", (), "int32", rows) for tower in range(towers)]
    parts = []
    for tower, column in enumerate(ids):
        with b.scope(f"tower_{tower}"):
            parts.append(b.mlp(b.embedding(column, rows, width, "embedding"), units))
    with b.scope("head"):
        joined = b.tf.concat(parts, axis=1, name="concat")
        output = b.dense(joined, 1, "out", activation="sigmoid")
    return b.finish("towers", [output])
