"""Sums, numbers and shapes of rows that a mask keeps.

Sums and numbers of rows that a mask keeps, over all rows and the mask.

Sums of rows that a mask keeps, by segment or by place, in which those that are not there are zeros.

Numbers of rows that a mask keeps, and shapes put together of them: what is made of those is as long as such rows.

Gradients are full of such shapes: those of two operands tell along which axes to sum up (`BroadcastGradientArgs`), and give the sum the
shape of its operand again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from msplit.engines.cuda.ir.graph import Key, Op, known, mutated, require
from msplit.engines.cuda.kernels.optimizer_formulas import ROW_OPTIMIZERS
from msplit.engines.cuda.passes.embedding.padding import rows_and_ids
from msplit.engines.cuda.passes.embedding.proof import (
    Kept,
    KnownValues,
    Mask,
    Positions,
    Proof,
    Sizes,
    is_grid,
    run_length,
)
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


SEGMENT_RULES: dict[str, Callable[[KnownValues, Op], Proof | None]] = {
    "SegmentSum": _segment_sum,
    "UnsortedSegmentSum": _sum_by_place,
    "L2Loss": _total,
    "ScatterNd": _scatter_nd,
    **dict.fromkeys((f"{op}Grad" for op in SPARSE_SEGMENTS), _sparse_segment_grad),
    **dict.fromkeys(ROW_OPTIMIZERS.keys() | ops_with("changes rows"), _update),
    "_UniquePadded": _unique_padded,
}


def _shape(facts: KnownValues, op: Op) -> Proof | None:
    """Notes the shape of kept rows: as many as there are, and their own."""
    kept = facts.kept.get(op.inputs[0])
    shape = None if kept is None else facts.shape(kept.dense)
    if kept is not None and shape and (op.op == "Shape" or len(shape) == 1):
        facts.sizes[op.node, 0] = Sizes(kept.mask, shape[1:])
    if op.inputs[0] in facts.positions:
        facts.sizes[op.node, 0] = Sizes(facts.positions[op.inputs[0]].mask)
    return None


def part(facts: KnownValues, op: Op) -> Proof | None:
    """The number of rows alone, or the sizes behind it, which are known."""
    sizes = facts.sizes[op.inputs[0]]
    begin, end, strides = (known(facts.array(key)) for key in op.inputs[1:])
    names = ("begin", "end", "shrink_axis", "ellipsis", "new_axis")
    masks = {name: mask for name in names if (mask := int(op.attrs.get(f"{name}_mask", 0)))}
    require(strides.tolist() == [1])
    if begin.tolist() == [1] and masks == {"end": 1}:
        return Proof({0: np.array(sizes.inner, str(op.attrs.get("T", "int32")))})
    masks.pop("begin", None)
    if begin.tolist() == [0] and (masks == {"shrink_axis": 1} or (end.tolist() == [1] and not masks)):
        facts.sizes[op.node, 0] = Sizes(sizes.mask)
    return None


def reshape(facts: KnownValues, op: Op) -> Proof | None:
    """A number of rows as a vector of one, or rows in a shape that begins with their number."""
    if op.inputs[0] in facts.sizes:
        sizes = facts.sizes[op.inputs[0]]
        if not sizes.inner:
            facts.sizes[op.node, 0] = sizes
        return None
    sizes = facts.sizes[op.inputs[1]]
    positions = facts.positions.get(op.inputs[0])
    if positions is not None and positions.mask is sizes.mask and not sizes.inner:
        return facts.point(op, positions)
    kept = known(facts.kept.get(op.inputs[0]) or facts.elements.get(op.inputs[0]))
    shape = known(facts.shape(kept.dense))
    require(kept.mask is sizes.mask and math.prod(shape[1:]) == math.prod(sizes.inner))
    view = facts.reshape(op, kept.dense, (shape[0], *sizes.inner))
    return facts.keep(op, view, kept.mask, absent=kept.absent)


def _range(facts: KnownValues, op: Op) -> Proof | None:
    """The place of each row that is there."""
    start, step = (known(facts.array(op.inputs[slot])) for slot in (0, 2))
    sizes = known(facts.sizes.get(op.inputs[1]))
    require(not sizes.inner and (int(start), int(step)) == (0, 1))
    return facts.point(op, Positions(sizes.mask, sizes.mask))


def _join(facts: KnownValues, op: Op) -> Proof | None:
    """A number of rows, and known sizes behind it; or kept rows one below the other."""
    kept = [found for key in op.inputs[:-1] if (found := facts.kept.get(key)) is not None]
    if kept:
        return _below(facts, op, kept) if len(kept) == len(op.inputs) - 1 else None
    first = known(facts.sizes.get(op.inputs[0]))
    inner = tuple(int(size) for key in op.inputs[1:-1] for size in known(facts.array(key)))
    facts.sizes[op.out] = Sizes(first.mask, (*first.inner, *inner))
    return None


def _below(facts: KnownValues, op: Op, kept: list[Kept]) -> Proof | None:
    masks = tuple(one.mask for one in kept)
    require(int(known(facts.array(op.inputs[-1]))) == 0)
    if masks not in facts.joined:
        facts.joined[masks] = Mask(facts.new("ConcatV2", op, [*(mask.key for mask in masks), op.inputs[-1]]))
    dense = facts.new("ConcatV2", op, [*(one.dense for one in kept), op.inputs[-1]], dict(op.attrs))
    (absent, *others) = {one.absent for one in kept}
    return facts.keep(op, dense, facts.joined[masks], absent=None if others else absent)


def _fill(facts: KnownValues, op: Op) -> Proof | None:
    sizes = known(facts.sizes.get(op.inputs[0]))
    whole = facts.integers((*known(facts.shape(sizes.mask.key)), *sizes.inner))
    return facts.keep(op, facts.new("Fill", op, [whole, op.inputs[1]], dict(op.attrs)), sizes.mask)


def _broadcast_axes(facts: KnownValues, op: Op) -> Proof | None:
    """Axes of size 1, of operands that have equally many rows."""
    first, second = (known(facts.sizes.get(key)) for key in op.inputs)
    require(first.mask is second.mask and len(first.inner) == len(second.inner))
    for port, one in enumerate((first, second)):
        facts.axes[op.node, port] = tuple(axis for axis, size in enumerate(one.inner, 1) if size == 1)
    return None


def _sum(facts: KnownValues, op: Op) -> Proof | None:
    """Each row's own, along axes that a gradient is summed up over, or along given ones; or that of all rows that are there."""
    kept, given = known(facts.kept.get(op.inputs[0])), facts.array(op.inputs[1])
    if given is not None and given.size and given.min() >= 0:
        rows = kept.dense if given.min() else facts.chosen(op, kept, 0)
        total = facts.new("Sum", op, [rows, op.inputs[1]], dict(op.attrs), closes=not given.min())
        return facts.keep(op, total, kept.mask) if given.min() else Proof({0: total})
    axes, shape = known(facts.axes.get(op.inputs[1])), known(facts.shape(kept.dense))
    require(all(axis < len(shape) for axis in axes))
    dense = facts.new("Sum", op, [kept.dense, facts.integers(axes)], dict(op.attrs))
    facts.elements[op.out] = Kept(dense, kept.mask)
    return Proof()


SIZE_RULES: dict[str, Callable[[KnownValues, Op], Proof | None]] = {
    "Shape": _shape,
    "Size": _shape,
    "ConcatV2": _join,
    "Range": _range,
    "Fill": _fill,
    "BroadcastGradientArgs": _broadcast_axes,
    "Sum": _sum,
}
