"""Rows that a mask keeps, and one default in each row that would be empty without it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from msplit.engines.cuda.ir.graph import Op, known, require
from msplit.engines.cuda.passes.embedding.proof import (
    Filled,
    Kept,
    KnownValues,
    Mask,
    Proof,
    run_length,
)


def _fill_empty_rows(facts: KnownValues, op: Op) -> Proof | None:
    """Every row gets one place more, for the default, which is there where none of the others is."""
    places, values = (known(facts.kept.get(key)) for key in op.inputs[:2])
    require(places.mask is values.mask)
    rows = int(known(facts.array(op.inputs[2]))[0])
    filled = facts.completed.get((places.mask, places.dense)) or _completed(facts, op, places, rows)
    require(filled.rows == rows)
    sizes = [facts.integers(size) for size in ([filled.rows, filled.length], [filled.rows, 1])]
    square = facts.new("Reshape", op, [values.dense, sizes[0]])
    default = facts.new("Fill", op, [sizes[1], op.inputs[3]])
    view = facts.reshape(op, facts.new("ConcatV2", op, [square, default, facts.integers(1)]), (-1,))
    facts.keep(op, filled.grid, filled.mask)
    facts.returned[op.node, 3] = places.mask, filled
    facts.keep(op, view, filled.mask, port=1)
    facts.filled[view] = values, filled
    return Proof({2: filled.empty}, stays=True)


def _completed(facts: KnownValues, op: Op, places: Kept, rows: int) -> Filled:
    """Kept places with one more for each row."""
    indices = known(facts.array(places.dense))
    length = run_length(indices[:, 0]) if indices.ndim == 2 else 0
    require(length and rows * length == len(indices))
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
    before, filled = known(facts.returned.get(op.inputs[0]))
    grad = known(facts.kept.get(op.inputs[1]))
    require(grad.mask is filled.mask)
    square = facts.reshape(op, grad.dense, (filled.rows, filled.length + 1))
    corners = [facts.integers(corner) for corner in ([0, 0], [filled.rows, filled.length])]
    view = facts.reshape(op, facts.new("Slice", op, [square, *corners]), (-1,))
    return facts.keep(op, view, before)


RULES: dict[str, Callable[[KnownValues, Op], Proof | None]] = {
    "SparseFillEmptyRows": _fill_empty_rows,
    "SparseFillEmptyRowsGrad": _fill_grad,
}
