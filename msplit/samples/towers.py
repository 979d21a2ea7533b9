"""Embedding towers: one lookup and one small MLP per categorical feature."""

from __future__ import annotations

from collections.abc import Sequence

from msplit.samples.layers import Builder
from msplit.samples.types import Sample


def build(
    seed: int,
    *,
    towers: int = 40,
    rows: int = 20_000,
    width: int = 32,
    units: Sequence[int] = (64, 16),
    batch: int | None = None,
) -> Sample:
    """Build independent embedding towers whose results are concatenated.

    Args:
        seed: Seed of the weights.
        towers: Number of towers, each in the scope `tower_<i>` with its own input `id_<i>`.
        rows: Rows of each table.
        width: Columns of each table.
        units: Widths of a tower's MLP.
        batch: Size of the batch, None for unknown.
    """
    b = Builder(seed, batch)
    ids = [b.input(f"id_{tower}", (), "int32", rows) for tower in range(towers)]
    parts = []
    for tower, column in enumerate(ids):
        with b.scope(f"tower_{tower}"):
            parts.append(b.mlp(b.embedding(column, rows, width, "embedding"), units))
    with b.scope("head"):
        joined = b.tf.concat(parts, axis=1, name="concat")
        output = b.dense(joined, 1, "out", activation="sigmoid")
    return b.finish("towers", [output])
