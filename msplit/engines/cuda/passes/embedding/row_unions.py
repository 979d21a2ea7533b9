"""Rows of some ids above a row for every row of a table, added without looking at the ids of those below.

`frontend.row_union` puts them so. What is below is as large as the table: as it is, it is added to a variable at once, and sums by id have
nothing to find there. Until then both go side by side through ops on each element.
"""

from __future__ import annotations

import numpy as np

from msplit.engines.cuda.ir.graph import Key, Op, OpGraph
from msplit.opset.traits import SELECT, ops_with, traits

_UPDATES = ops_with("adds rows")
_SUM = "UnsortedSegmentSum"
_JOIN = "ConcatV2"

Parts = tuple[Key, Key]
"""The rows of some ids, and those below."""


def split_row_unions(graph: OpGraph) -> bool:
    """Lets updates and sums of such rows take those of the ids, and adds the others as a whole. Whether there was one."""
    unions = {op.out: found for op in graph.ops.values() if (found := _union(graph, op)) is not None}
    if not unions:
        return False
    parts: dict[Key, Parts] = {}
    names: dict[Key, Key] = {}
    changed = False
    for op in list(graph.ops.values()):
        slot = 2 if op.op in _UPDATES else 0
        if op.op in _UPDATES or op.op == _SUM:
            ids, rows = unions.get(op.inputs[1]), parts.get(op.inputs[slot])
            table = graph.shape(op.inputs[0] if op.op in _UPDATES else op.out)
            if ids is not None and rows is not None and table is not None and graph.shape(rows[1]) == table:
                op.inputs[1], op.inputs[slot] = ids, rows[0]
                names |= _add_whole(graph, op, rows[1], table)
                changed = True
        elif _joins_two(graph, op):
            parts[op.out] = op.inputs[0], op.inputs[1]
        elif ("per element" in traits(op.op).words or op.op in SELECT) and any(key in parts for key in op.inputs):
            changed |= _apply(graph, op, parts)
    own = {after[0]: before for before, after in names.items()}
    graph.rename(names)
    for number, before in own.items():  # all read the variable after this change, but for itself
        graph.ops[number].inputs[0] = before
    return changed


def _joins_two(graph: OpGraph, op: Op) -> bool:
    """Returns whether an op puts one value below another."""
    axis = graph.constants.get(op.inputs[-1]) if op.op == _JOIN and len(op.inputs) == 3 else None
    return axis is not None and int(axis) == 0


def _union(graph: OpGraph, op: Op) -> Key | None:
    """The ids above those of all rows of a table, in order, where an op puts them there."""
    own = graph.constants.get(op.inputs[1]) if _joins_two(graph, op) else None
    return op.inputs[0] if own is not None and own.ndim == 1 and np.array_equal(own, np.arange(own.size)) else None


def _apply(graph: OpGraph, op: Op, parts: dict[Key, Parts]) -> bool:
    """Does an op on each element with the rows of the ids and with those below, where what goes in beside them is numbers, or known."""
    shapes = {tuple(map(graph.shape, parts[key])) for key in op.inputs if key in parts}
    above, below = shapes.pop()
    if shapes or not above or not below:
        return False
    if not all(key in parts or _fits(graph, key, (above[0] + below[0], *above[1:])) for key in op.inputs):
        return False
    whole = [parts.get(key) or _rows_of(graph, key, above[0]) for key in op.inputs]
    dtype = graph.dtypes[op.out]
    sides = zip(zip(*whole, strict=True), (above, below), strict=True)
    rows, others = (graph.add(op.op, op, dict(op.attrs), [*inputs], shape, dtype).out for inputs, shape in sides)
    parts[op.out] = rows, others
    return True


def _fits(graph: OpGraph, key: Key, shape: tuple[int, ...]) -> bool:
    """Returns whether a value is a number, or a constant of this shape."""
    return graph.shape(key) == () or (key in graph.constants and graph.shape(key) == shape)


def _rows_of(graph: OpGraph, key: Key, count: int) -> Parts:
    """A number for all rows, or so many rows of a constant and its others."""
    value = graph.constants.get(key)
    if value is None or not value.ndim:
        return key, key
    return graph.constant(value[:count]), graph.constant(value[count:])


def _add_whole(graph: OpGraph, op: Op, rows: Key, table: tuple[int, ...]) -> dict[Key, Key]:
    """Adds a row for every row of the table to what an op gives. Gives what its result is called from now on."""
    dtype = graph.dtypes[op.out]
    if op.op == _SUM:
        some = graph.add(_SUM, op, op.attrs, op.inputs, table, dtype).out
        op.op, op.attrs, op.inputs = "AddV2", {"T": dtype}, [some, rows]
        return {}
    whole = graph.add(op.op.replace("Scatter", "Assign"), op, {"T": dtype}, [op.out, rows], table, dtype)
    return {op.out: whole.out}
