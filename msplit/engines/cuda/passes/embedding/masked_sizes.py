"""Numbers of rows that a mask keeps, and shapes put together of them: what is made of those is as long as such rows.

Gradients are full of such shapes: those of two operands tell along which axes to sum up (`BroadcastGradientArgs`), and give the sum the
shape of its operand again.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from msplit.engines.cuda.ir.graph import Op, known, require
from msplit.engines.cuda.passes.embedding.proof import Kept, KnownValues, Mask, Positions, Proof, Sizes


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


RULES: dict[str, Callable[[KnownValues, Op], Proof | None]] = {
    "Shape": _shape,
    "Size": _shape,
    "ConcatV2": _join,
    "Range": _range,
    "Fill": _fill,
    "BroadcastGradientArgs": _broadcast_axes,
    "Sum": _sum,
}
