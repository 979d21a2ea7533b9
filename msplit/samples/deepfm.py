"""DeepFM: a factorization machine and a deep network over the same embeddings."""

from __future__ import annotations

from collections.abc import Sequence

from msplit.samples.layers import Builder
from msplit.samples.types import Sample


def build(
    seed: int,
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
        seed: Seed of the weights.
        categorical: Number of categorical fields, input `id_<i>` and scope `field_<i>` each.
        numeric: Number of numeric fields, all in the input `numeric`.
        rows: Rows of each field's tables.
        width: Width of the embeddings.
        units: Widths of the deep part's layers.
        batch: Size of the batch, None for unknown.
    """
    b = Builder(seed, batch)
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
