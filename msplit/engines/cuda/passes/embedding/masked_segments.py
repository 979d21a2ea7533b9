"""Sums of rows that a mask keeps, by segment or by place, in which those that are not there are zeros."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from msplit.engines.cuda.ir.graph import Op
from msplit.engines.cuda.passes.embedding.proof import Kept, KnownValues, Proof, is_grid, run_length
from msplit.opset.traits import SPARSE_SEGMENTS, ops_with


def _segment_sum(facts: KnownValues, op: Op) -> Proof | None:
    """Kept rows by row, every one of which has some."""
    rows, segments = (facts.kept.get(key) for key in op.inputs)
    shape = None if rows is None else facts.shape(rows.dense)
    numbers = None if segments is None else facts.array(segments.dense)
    if rows is None or segments is None or rows.mask is not segments.mask or shape is None or numbers is None:
        return None
    count, length = rows.mask.occupied, run_length(numbers)
    if not count or not length or int(numbers[-1]) + 1 != count:
        return None
    ops = facts.chosen(op, rows, 0)
    ops.append(facts.reshape(op, (ops[-1].node, 0), (count, length, *shape[1:])))
    axis = facts.constant(np.array([1], np.int32))
    ops.append(facts.new("Sum", op, [(ops[-1].node, 0), axis], {"T": facts.dtype(rows.dense), "keep_dims": False}))
    return Proof({0: (ops[-1].node, 0)}, ops)


def _sum_by_place(facts: KnownValues, op: Op) -> Proof | None:
    """What is not there adds zeros, wherever that is."""
    rows, places = (facts.kept.get(key) for key in op.inputs[:2])
    if rows is not None and op.inputs[1] in facts.places:
        return _put_back(facts, op, rows)
    if rows is None or places is None or rows.mask is not places.mask or facts.array(op.inputs[2]) is None:
        return None
    ops = facts.chosen(op, rows, 0)
    ops.append(facts.new(op.op, op, [(ops[-1].node, 0), places.dense, op.inputs[2]], dict(op.attrs)))
    return Proof({0: (ops[-1].node, 0)}, ops)


def _put_back(facts: KnownValues, op: Op, rows: Kept) -> Proof | None:
    """Rows that were kept of others, among these, and zeros in the place of those that were not."""
    (before, after), sizes = facts.places[op.inputs[1]], facts.sizes.get(op.inputs[2])
    if rows.mask is not after or sizes is None or sizes.mask is not before or sizes.inner:
        return None
    ops = facts.chosen(op, rows, 0)
    facts.kept[op.node, 0] = Kept((ops[-1].node, 0), before)
    return Proof(ops=ops)


def _total(facts: KnownValues, op: Op) -> Proof | None:
    """The norm of all rows that are there, as gradients are clipped by."""
    rows = facts.kept.get(op.inputs[0])
    if rows is None:
        return None
    ops = facts.chosen(op, rows, 0)
    ops.append(facts.new(op.op, op, [(ops[-1].node, 0)], dict(op.attrs)))
    return Proof({0: (ops[-1].node, 0)}, ops)


def _scatter_nd(facts: KnownValues, op: Op) -> Proof | None:
    """What is there, and zeros elsewhere."""
    places, rows = (facts.kept.get(key) for key in op.inputs[:2])
    shape = facts.array(op.inputs[2])
    indices = None if places is None else facts.array(places.dense)
    if places is None or rows is None or places.mask is not rows.mask or shape is None or indices is None:
        return None
    sizes = tuple(int(size) for size in shape)
    if indices.ndim != 2 or not is_grid(indices, sizes[: indices.shape[1]]):
        return None
    ops = facts.chosen(op, rows, 0)
    ops.append(facts.reshape(op, (ops[-1].node, 0), sizes))
    return Proof({0: (ops[-1].node, 0)}, ops)


def _add_rows(facts: KnownValues, op: Op) -> Proof | None:
    """Ids of -1, that no row has, are passed over."""
    ids, rows = (facts.kept.get(key) for key in op.inputs[1:3])
    if ids is None or rows is None or ids.mask is not rows.mask:
        return None
    ops = facts.chosen(op, ids, -1)
    ops.append(facts.new(op.op, op, [op.inputs[0], (ops[-1].node, 0), rows.dense], dict(op.attrs)))
    return Proof({0: (ops[-1].node, 0)}, ops)


def _unique_padded(facts: KnownValues, op: Op) -> Proof | None:
    """As many places as there are rows in all: -1 stands where there is none, as where an id has come before."""
    kept = facts.kept.get(op.inputs[0])
    if kept is None:
        return None
    ids = facts.chosen(op, kept, -1)
    dense = facts.new("_UniquePadded", op, [(ids[-1].node, 0)], dict(op.attrs))
    facts.kept[op.node, 1] = Kept((dense.node, 1), kept.mask)
    return Proof({0: (dense.node, 0)}, [*ids, dense], stays=True)


def _sparse_segment_grad(facts: KnownValues, op: Op) -> Proof | None:
    """Rows that are not there belong to no segment."""
    places, segments = (facts.kept.get(key) for key in op.inputs[1:3])
    if places is None or segments is None or places.mask is not segments.mask or facts.array(op.inputs[3]) is None:
        return None
    ids = facts.chosen(op, segments, -1)
    inputs = [op.inputs[0], places.dense, (ids[-1].node, 0), op.inputs[3]]
    dense = facts.new(op.op, op, inputs, dict(op.attrs))
    return Proof({0: (dense.node, 0)}, [*ids, dense])


RULES: dict[str, Callable[[KnownValues, Op], Proof | None]] = {
    "SegmentSum": _segment_sum,
    "UnsortedSegmentSum": _sum_by_place,
    "L2Loss": _total,
    "ScatterNd": _scatter_nd,
    **dict.fromkeys((f"{op}Grad" for op in SPARSE_SEGMENTS), _sparse_segment_grad),
    **dict.fromkeys(ops_with("adds rows"), _add_rows),
    "_UniquePadded": _unique_padded,
}
