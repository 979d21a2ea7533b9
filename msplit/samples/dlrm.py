"""DLRM: embedding tables and a bottom MLP, whose vectors interact pairwise in front of a top MLP."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from msplit.samples.layers import Builder
from msplit.samples.types import Sample


def build(
    seed: int,
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
        seed: Seed of the weights.
        tables: Number of embedding tables, input `id_<i>` and scope `table_<i>` each.
        numeric: Width of the input `numeric`.
        rows: Rows of each table.
        width: Width of the embeddings and of the bottom MLP's result.
        bottom: Widths of the bottom MLP's hidden layers.
        top: Widths of the top MLP's hidden layers.
        batch: Size of the batch, None for unknown.
    """
    b = Builder(seed, batch)
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
