"""Sparse and ragged inputs: several tensors that only make sense together.

A signature flattens them. A sparse tensor is indices, values and a dense shape; a ragged one is values and row splits. They are
recognized by their names (``x``, ``x_1``, ``x_2`` as tf.function names them, ``x/indices`` … or ``x/0`` … as signatures do), by
their types and shapes, and, where that could also be something else, by what the graph does with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from msplit.flatten.flat import FlatGraph
from msplit.measure.ids import use_of

_PER_ROW = 2
_INTEGERS = ("int64", "int32")
_RAGGED = frozenset({"Sub", "RowPartitionFromSplits", "Bincount", "RaggedRange"})


@dataclass(frozen=True)
class Spec:
    """What is known of an input.

    Attributes:
        name: Its name.
        dtype: Its type.
        shape: Its shape, None for what is open; None for unknown rank.
        node: Node that gives it.
        port: Output port of that node.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...] | None
    node: int
    port: int


@dataclass(frozen=True, eq=False)
class Structure:
    """What composite inputs fix.

    Attributes:
        fixed: Whole values: indices, dense shapes, row splits.
        lengths: First dimension of the values that belong to them.
    """

    fixed: Mapping[str, NDArray[np.int64]]
    lengths: Mapping[str, int]


def structure(flat: FlatGraph, specs: Sequence[Spec], batch: int, given: frozenset[str]) -> Structure:
    """Finds composite inputs and gives them `batch` rows of two entries each.

    Args:
        flat: The graph.
        specs: Its inputs.
        batch: Rows.
        given: Inputs whose values come from elsewhere; a composite input with one of them is left alone.
    """
    by_name = {spec.name: spec for spec in specs}
    fixed: dict[str, NDArray[np.int64]] = {}
    lengths: dict[str, int] = {}
    for spec in specs:
        if spec.name in fixed or spec.name in lengths:
            continue
        for names in _sparse_names(spec.name):
            parts = [by_name.get(name) for name in names]
            if all(parts) and not given.intersection(names) and _is_sparse(*[p for p in parts if p]):
                indices, dense = _sparse_of(parts[0], parts[2], batch)
                fixed[names[0]], fixed[names[2]] = indices, dense
                lengths[names[1]] = len(indices)
                break
        else:
            for values, splits in _ragged_names(spec.name):
                there = values in by_name and splits in by_name and not given.intersection((values, splits))
                if there and _is_ragged(flat, by_name[values], by_name[splits]):
                    kind = np.int64 if by_name[splits].dtype == "int64" else np.int32
                    fixed[splits] = (np.arange(batch + 1) * _PER_ROW).astype(kind)
                    lengths[values] = batch * _PER_ROW
                    break
    return Structure(fixed, lengths)


def _sparse_names(name: str) -> list[tuple[str, str, str]]:
    found = [(name, f"{name}_1", f"{name}_2")]
    if name.endswith("/indices"):
        stem = name.removesuffix("/indices")
        found.append((name, f"{stem}/values", f"{stem}/dense_shape"))
    if name.endswith("/0"):
        stem = name.removesuffix("/0")
        found.append((name, f"{stem}/1", f"{stem}/2"))
    return found


def _ragged_names(name: str) -> list[tuple[str, str]]:
    found = [(name, f"{name}_1")]
    if name.endswith("/0"):
        found.append((name, f"{name.removesuffix('/0')}/1"))
    if name.endswith("/flat_values"):
        found.append((name, f"{name.removesuffix('/flat_values')}/row_splits"))
    return found


def _is_sparse(indices: Spec, values: Spec, dense: Spec) -> bool:
    if indices.dtype != "int64" or dense.dtype != "int64":
        return False
    if indices.shape is None or dense.shape is None or values.shape is None:
        return False
    if len(indices.shape) != 2 or len(dense.shape) != 1 or len(values.shape) != 1:
        return False
    rank = indices.shape[1] if indices.shape[1] is not None else dense.shape[0]
    return rank is not None and indices.shape[1] in (None, rank) and dense.shape[0] in (None, rank)


def _sparse_of(indices: Spec | None, dense: Spec | None, batch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    ranks = [spec.shape[-1] for spec in (indices, dense) if spec is not None and spec.shape]
    rank = next((size for size in ranks if size is not None), 2)
    columns = 1 if rank == 1 else _PER_ROW
    made = np.zeros((batch * columns, rank), dtype=np.int64)
    made[:, 0] = np.repeat(np.arange(batch), columns)
    if rank > 1:
        made[:, 1] = np.tile(np.arange(columns), batch)
    shape = np.ones(rank, dtype=np.int64)
    shape[0] = batch
    if rank > 1:
        shape[1] = columns
    return made, shape


def _is_ragged(flat: FlatGraph, values: Spec, splits: Spec) -> bool:
    if splits.dtype not in _INTEGERS or splits.shape is None or len(splits.shape) != 1:
        return False
    if not values.shape or values.shape[0] is not None or splits.shape[0] is not None:
        return False
    use = use_of(flat, splits.node, splits.port)
    if use.rows is not None or use.unknown:
        return False
    # Row lengths and row numbers are made of neighbouring splits; nothing is looked up by a split.
    return any(op.startswith("Ragged") for op in use.ops) or bool(use.ops & _RAGGED and "StridedSlice" in use.ops)
