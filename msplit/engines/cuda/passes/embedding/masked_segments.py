"""Sums of rows that a mask keeps, by segment or by place, in which those that are not there are zeros."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from msplit.engines.cuda.ir.graph import Key, Op, known, mutated, require
from msplit.engines.cuda.kernels.optimizer_formulas import ROW_OPTIMIZERS
from msplit.engines.cuda.passes.embedding.padding import rows_and_ids
from msplit.engines.cuda.passes.embedding.proof import Kept, KnownValues, Mask, Positions, Proof, is_grid, run_length
from msplit.opset.traits import SPARSE_SEGMENTS, ops_with


def _segment_sum(facts: KnownValues, op: Op) -> Proof | None:
    """Kept rows by row, every one of which has some."""
    rows, segments = (known(facts.kept.get(key)) for key in op.inputs)
    shape, numbers = known(facts.shape(rows.dense)), known(facts.array(segments.dense))
    count, length = rows.mask.occupied, run_length(numbers)
    require(rows.mask is segments.mask and count and length and int(numbers[-1]) + 1 == count)
    groups = facts.reshape(op, facts.chosen(op, rows, 0), (count, length, *shape[1:]), closes=True)
    attrs = {"T": facts.dtype(rows.dense), "keep_dims": False}
    return Proof({0: facts.new("Sum", op, [groups, facts.integers([1])], attrs)})


def _sum_by_place(facts: KnownValues, op: Op) -> Proof | None:
    """A row that is not there adds zeros, wherever that is."""
    rows = known(facts.kept.get(op.inputs[0]))
    if op.inputs[1] in facts.positions:
        return _sum_at(facts, op, rows, facts.positions[op.inputs[1]])
    places = known(facts.kept.get(op.inputs[1]))
    require(rows.mask is places.mask and facts.array(op.inputs[2]) is not None)
    inputs = [facts.chosen(op, rows, 0), places.dense, op.inputs[2]]
    return Proof({0: facts.new(op.op, op, inputs, dict(op.attrs), closes=True)})


def _sum_at(facts: KnownValues, op: Op, rows: Kept, places: Positions) -> Proof | None:
    """Rows among others that they were kept of, or in the place of their ids; zeros in all other places."""
    require(rows.mask is places.mask and _counts(facts, op.inputs[2], places.into))
    anything = rows.absent == "any" and places.dense is not None  # it is added to rows without an id
    total = rows.dense if anything else facts.chosen(op, rows, 0)
    if places.dense is not None:
        count = facts.integers(facts.length(places.into))
        total = facts.new(op.op, op, [total, places.dense, count], dict(op.attrs))
    return facts.keep(op, total, places.into, absent=None if anything else 0)


def _counts(facts: KnownValues, key: Key, mask: Mask) -> bool:
    """Tell whether a value is the number of rows that a mask keeps."""
    sizes = facts.sizes.get(key)
    return sizes is not None and sizes.mask is mask and not sizes.inner


def _total(facts: KnownValues, op: Op) -> Proof | None:
    """The norm of all rows that are there, as gradients are clipped by."""
    rows = known(facts.kept.get(op.inputs[0]))
    return Proof({0: facts.new(op.op, op, [facts.chosen(op, rows, 0)], dict(op.attrs), closes=True)})


def _scatter_nd(facts: KnownValues, op: Op) -> Proof | None:
    """The rows that are there, and zeros elsewhere."""
    places, rows = (known(facts.kept.get(key)) for key in op.inputs[:2])
    indices = known(facts.array(places.dense))
    sizes = tuple(int(size) for size in known(facts.array(op.inputs[2])))
    require(places.mask is rows.mask and indices.ndim == 2 and is_grid(indices, sizes[: indices.shape[1]]))
    return Proof({0: facts.reshape(op, facts.chosen(op, rows, 0), sizes, closes=True)})


def _update(facts: KnownValues, op: Op) -> Proof | None:
    """Ids of -1, that no row has, are passed over."""
    grad, indices = rows_and_ids(op)
    given = {slot: found for slot, key in enumerate(op.inputs) if (found := facts.kept.get(key)) is not None}
    ids = known(given.get(indices))
    require(given.keys() <= {grad, indices} and all(one.mask is ids.mask for one in given.values()))
    require(grad in given or facts.shape(op.inputs[grad]) == ())
    inputs = [given[slot].dense if slot in given else key for slot, key in enumerate(op.inputs)]
    inputs[indices] = facts.chosen(op, ids, -1)
    number, _ = facts.new(op.op, op, inputs, dict(op.attrs), closes=True)
    return Proof({port: (number, port) for port in range(len(mutated(op)))})


def _unique_padded(facts: KnownValues, op: Op) -> Proof | None:
    """Distinct ids with as many places as there are rows in all: -1 stands where there is none, as where an id has come before."""
    kept = facts.rows(op.inputs[0])
    dense = facts.new("_UniquePadded", op, [facts.chosen(op, kept, -1)], dict(op.attrs))
    facts.point(op, Positions(kept.mask, kept.mask, (dense[0], 1)), port=1)
    if isinstance(kept, Positions):
        return facts.point(op, replace(kept, dense=dense, absent=-1))
    return facts.keep(op, dense, kept.mask, absent=-1)


def _sparse_segment_grad(facts: KnownValues, op: Op) -> Proof | None:
    """Rows that are not there belong to no segment."""
    positions, segments = facts.positions.get(op.inputs[1]), known(facts.kept.get(op.inputs[2]))
    places = facts.rows(op.inputs[1])
    require(places.mask is segments.mask)
    inputs = [op.inputs[0], facts.all_of(places), facts.chosen(op, segments, -1), op.inputs[3]]
    if positions is not None and _counts(facts, op.inputs[3], positions.into):
        inputs[3] = facts.integers(facts.length(positions.into))
        return facts.keep(op, facts.new(op.op, op, inputs, dict(op.attrs)), positions.into, absent=0)
    require(positions is None and facts.array(op.inputs[3]) is not None)
    return Proof({0: facts.new(op.op, op, inputs, dict(op.attrs), closes=True)})


RULES: dict[str, Callable[[KnownValues, Op], Proof | None]] = {
    "SegmentSum": _segment_sum,
    "UnsortedSegmentSum": _sum_by_place,
    "L2Loss": _total,
    "ScatterNd": _scatter_nd,
    **dict.fromkeys((f"{op}Grad" for op in SPARSE_SEGMENTS), _sparse_segment_grad),
    **dict.fromkeys(ROW_OPTIMIZERS.keys() | ops_with("changes rows"), _update),
    "_UniquePadded": _unique_padded,
}
