"""Value-dependent ops as the dense patterns that they encode, where the graph proves it.

What `tf.feature_column` and `safe_embedding_lookup_sparse` emit for a column is a sparse tensor's life: `Where`, `SparseReshape`,
`SparseFillEmptyRows`, `Unique`, `SparseSegmentMean`, and their shapes depend on values, so that such a graph can not be captured. For
many columns they do not: a bucketized column has an id in every row, whatever is fed. The densifier goes over the ops in
topological order, beside `specialize`, which knows every shape and constant by then. It keeps an interval for integers and truth
values (`intervals`), makes a constant of what can have one value only, and has a rule for each op whose result is known from constant
structure. Nothing is assumed of the values that are fed, so that what is not proved stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.engines.cuda.ir.graph import Key, Op, Shape, Unproved, known, require
from msplit.engines.cuda.passes.embedding import masked_rows
from msplit.engines.cuda.passes.embedding.proof import KnownValues, Mixed, Proof, is_grid, run_length
from msplit.opset.traits import GATHERS, SELECT, SPARSE_SEGMENTS, ops_with


def prove(facts: KnownValues, op: Op) -> Proof | None:
    """Finds the simpler form of an op that is about to run, if it has one: by its dense pattern, or as rows that a condition keeps."""
    found = None
    for rule in (_RULES.get(op.op), masked_rows.prove):
        if found is None and rule is not None:
            facts.ops = []
            try:
                found = rule(facts, op)
            except Unproved:
                pass
            except Mixed:
                return None
    if found is None:
        return None
    if any(isinstance(value, tuple) and facts.has_gaps(value) for value in found.outputs.values()):
        found = Proof()  # a value with gaps never takes the place of TensorFlow's
    found.ops = facts.ops
    return found


def _gather(facts: KnownValues, op: Op) -> Proof | None:
    """All rows in order are the rows themselves."""
    indices, shape = known(facts.array(op.inputs[1])), known(facts.shape(op.inputs[0]))
    axis = int(known(facts.array(op.inputs[2]))) if op.op == "GatherV2" else 0
    require(indices.ndim == 1 and not op.attrs.get("batch_dims", 0) and -len(shape) <= axis < len(shape))
    require(np.array_equal(indices, np.arange(shape[axis])))
    return Proof({0: op.inputs[0]})


def _gather_nd(facts: KnownValues, op: Op) -> Proof | None:
    """All elements in order."""
    indices, shape = known(facts.array(op.inputs[1])), known(facts.shape(op.inputs[0]))
    require(indices.ndim == 2 and 0 < indices.shape[1] <= len(shape))
    depth = indices.shape[1]
    require(is_grid(indices, shape[:depth]))
    return Proof({0: facts.reshape(op, op.inputs[0], (indices.shape[0], *shape[depth:]))})


def _fill_empty_rows(facts: KnownValues, op: Op) -> Proof | None:
    """Constant indices tell which rows are empty, whatever the values are."""
    indices, shape = known(facts.array(op.inputs[0])), known(facts.array(op.inputs[2]))
    require(indices.ndim == 2 and shape.size)
    rows, row_of = int(shape[0]), indices[:, 0]
    if rows < 0 or (row_of.size and not 0 <= row_of.min() <= row_of.max() < rows):
        return None  # TensorFlow refuses it, and so does the lowering
    empty = np.ones(rows, bool)
    empty[row_of] = False
    missing = np.flatnonzero(empty)
    fillers = np.zeros((missing.size, indices.shape[1]), indices.dtype)
    fillers[:, 0] = missing
    order = np.argsort(np.concatenate([row_of, missing]), kind="stable")
    position = np.empty_like(order)
    position[order] = np.arange(order.size)
    values: Key = op.inputs[1]
    if missing.size:
        count = facts.constant(np.array([missing.size], np.int64))
        filled = facts.new("Fill", op, [count, op.inputs[3]])
        values = facts.new("ConcatV2", op, [values, filled, facts.integers(0)])
    if not np.array_equal(order, np.arange(order.size)):
        values = facts.gather(op, values, order)
    where = np.concatenate([indices, fillers])[order]
    return Proof({0: where, 1: values, 2: empty, 3: position[: row_of.size]})


def _segments(ids: NDArray[Any]) -> tuple[int, int]:
    """Number of segments that ids name in order, and how many rows each has, 0 where not all have as many."""
    require(ids.ndim == 1 and ids.size and ids[0] >= 0 and not np.any(ids[1:] < ids[:-1]))
    return int(ids[-1]) + 1, run_length(ids)


def _sparse_segment(facts: KnownValues, op: Op) -> Proof | None:
    """Rows by constant segments: as many segments as those say; k rows each are one axis more."""
    (count, length), shape = _segments(known(facts.array(op.inputs[2]))), facts.shape(op.inputs[0])
    if not length or shape is None:
        inputs = [*op.inputs, facts.integers(count)]
        return Proof({0: facts.new(f"{op.op}WithNumSegments", op, inputs, dict(op.attrs))})
    rows = facts.gather(op, op.inputs[0], op.inputs[1])
    return _grouped(facts, op, rows, (count, length, *shape[1:]), op.op.removeprefix("SparseSegment"))


def _grouped(facts: KnownValues, op: Op, rows: Key, shape: Shape, how: str) -> Proof:
    """Groups of rows, of shape [groups, rows, …], reduced to one row each."""
    if shape[1] > 1:
        groups, reduction = facts.reshape(op, rows, shape), "Sum" if how == "SqrtN" else how
        rows = facts.new(reduction, op, [groups, facts.integers([1])], {"keep_dims": False})
        if how == "SqrtN":
            dtype = np.dtype(str(op.attrs.get("T", "float32")))
            divisor = facts.constant(np.array(math.sqrt(shape[1]), dtype))
            rows = facts.new("RealDiv", op, [rows, divisor], {"T": dtype.name})
    return Proof({0: rows})


def _segment(facts: KnownValues, op: Op) -> Proof | None:
    ids, shape = known(facts.array(op.inputs[1])), known(facts.shape(op.inputs[0]))
    require(ids.shape == shape[:1])
    count, length = _segments(ids)
    if length:
        return _grouped(facts, op, op.inputs[0], (count, length, *shape[1:]), op.op.removeprefix("Segment"))
    require(op.op != "SegmentMean")  # has no unsorted kind
    return Proof({0: facts.new(f"Unsorted{op.op}", op, [*op.inputs, facts.integers(count)], dict(op.attrs))})


def _select(facts: KnownValues, op: Op) -> Proof | None:
    """A condition that is the same everywhere chooses one side, if that needs no broadcasting."""
    low, high = known(facts.range(op.inputs[0]))
    require(low == high)
    chosen = op.inputs[1 if low else 2]
    return Proof({0: chosen}) if op.op == "Select" or _is_largest(facts, chosen, op.inputs) else None


def _is_largest(facts: KnownValues, chosen: Key, keys: list[Key]) -> bool:
    """Returns whether values broadcast to the shape of one of them."""
    shapes = [shape for key in keys if (shape := facts.shape(key)) is not None]
    try:
        return len(shapes) == len(keys) and np.broadcast_shapes(*shapes) == facts.shape(chosen)
    except ValueError:
        return False


def _sparse_to_dense(facts: KnownValues, op: Op) -> Proof | None:
    """Every position has its value."""
    indices, shape = known(facts.array(op.inputs[0])), known(facts.array(op.inputs[1]))
    sizes = tuple(int(size) for size in shape.reshape(-1))
    require(is_grid(indices.reshape(-1, 1) if indices.ndim < 2 else indices, sizes))
    require(facts.shape(op.inputs[2]) == (math.prod(sizes),))
    return Proof({0: facts.reshape(op, op.inputs[2], sizes)})


def _partition(facts: KnownValues, op: Op) -> Proof | None:
    """Rows that go to parts, where it is known which go to which."""
    parts = known(facts.array(op.inputs[1]))
    require(parts.ndim == 1)
    rows_of = (np.flatnonzero(parts == number) for number in range(int(op.attrs["num_partitions"])))
    return Proof({port: facts.gather(op, op.inputs[0], rows) for port, rows in enumerate(rows_of)})


def _stitch(facts: KnownValues, op: Op) -> Proof | None:
    """A stitch for which it is known where each row comes from."""
    half = len(op.inputs) // 2
    places = [known(facts.array(key)) for key in op.inputs[:half]]
    require(all(array.ndim == 1 for array in places))
    place = np.concatenate(places)
    require(place.size and place.min() >= 0)
    source = np.full(int(place.max()) + 1, -1, np.int64)
    source[place] = np.arange(place.size)  # of several rows with one place the last stays
    require((source >= 0).all())
    joined = facts.new("ConcatV2", op, [*op.inputs[half:], facts.integers(0)])
    in_order = np.array_equal(source, np.arange(place.size))
    return Proof({0: joined if in_order else facts.gather(op, joined, source)})


_RULES: dict[str, Callable[[KnownValues, Op], Proof | None]] = {
    **dict.fromkeys(GATHERS, _gather),
    "GatherNd": _gather_nd,
    "SparseFillEmptyRows": _fill_empty_rows,
    **dict.fromkeys(SPARSE_SEGMENTS, _sparse_segment),
    **dict.fromkeys(ops_with("dense segment"), _segment),
    **dict.fromkeys(SELECT, _select),
    "SparseToDense": _sparse_to_dense,
    "DynamicPartition": _partition,
    **dict.fromkeys(ops_with("stitch"), _stitch),
}
