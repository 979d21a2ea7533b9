"""Rows that a mask keeps, and one default in each row that would be empty without it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from msplit.engines.cuda.ir.graph import Op
from msplit.engines.cuda.passes.embedding.proof import Filled, Kept, KnownValues, Mask, Proof, run_length


def _fill_empty_rows(facts: KnownValues, op: Op) -> Proof | None:
    """Every row gets one place more, for the default, which is there where none of the others is."""
    places, values = facts.kept.get(op.inputs[0]), facts.kept.get(op.inputs[1])
    shape = facts.array(op.inputs[2])
    if places is None or values is None or places.mask is not values.mask or shape is None:
        return None
    filled = facts.completed.get((places.mask, places.dense)) or _completed(facts, op, places, int(shape[0]))
    if filled is None or filled.rows != int(shape[0]):
        return None
    sizes = [facts.integers(size) for size in ([filled.rows, filled.length], [filled.rows, 1])]
    square = facts.new("Reshape", op, [values.dense, sizes[0]])
    default = facts.new("Fill", op, [sizes[1], op.inputs[3]])
    view = facts.reshape(op, facts.new("ConcatV2", op, [square, default, facts.integers(1)]), (-1,))
    facts.keep(op, filled.grid, filled.mask)
    facts.returned[op.node, 3] = places.mask, filled
    facts.keep(op, view, filled.mask, port=1)
    facts.filled[view] = values, filled
    return Proof({2: filled.empty}, stays=True)


def _completed(facts: KnownValues, op: Op, places: Kept, rows: int) -> Filled | None:
    """Kept places with one more for each row."""
    indices = facts.array(places.dense)
    length = run_length(indices[:, 0]) if indices is not None and indices.ndim == 2 else 0
    if indices is None or not length or rows * length != len(indices):
        return None
    there = facts.new("Reshape", op, [places.mask.key, facts.integers([rows, length])])
    some = facts.new("Any", op, [there, facts.integers([1])], {"keep_dims": False})
    empty = facts.new("LogicalNot", op, [some])
    column = facts.new("Reshape", op, [empty, facts.integers([rows, 1])])
    longer = facts.new("ConcatV2", op, [there, column, facts.integers(1)])
    fillers = np.zeros((rows, 1, indices.shape[1]), indices.dtype)
    fillers[:, 0, 0] = np.arange(rows)
    grid = np.concatenate([indices.reshape(rows, length, -1), fillers], 1).reshape(-1, indices.shape[1])
    mask = Mask(facts.new("Reshape", op, [longer, facts.integers([-1])]), occupied=rows)
    facts.flags[empty] = empty
    filled = Filled(mask, facts.constant(grid), rows, length, empty)
    facts.completed[places.mask, places.dense] = filled
    return filled


def _fill_grad(facts: KnownValues, op: Op) -> Proof | None:
    """Gradients of what was there before, where it is now."""
    before, filled = facts.returned.get(op.inputs[0], (None, None))
    grad = facts.kept.get(op.inputs[1])
    if before is None or filled is None or grad is None or grad.mask is not filled.mask:
        return None
    square = facts.reshape(op, grad.dense, (filled.rows, filled.length + 1))
    corners = [facts.integers(corner) for corner in ([0, 0], [filled.rows, filled.length])]
    view = facts.reshape(op, facts.new("Slice", op, [square, *corners]), (-1,))
    return facts.keep(op, view, before)


RULES: dict[str, Callable[[KnownValues, Op], Proof | None]] = {
    "SparseFillEmptyRows": _fill_empty_rows,
    "SparseFillEmptyRowsGrad": _fill_grad,
}
