"""Rows that a mask keeps in place of rows that are cut out: filters, and defaults of empty rows.

Rows that a condition keeps, as all rows and the condition.

`Where(x != -1)` gives as many rows as there are ids, and so do the ops behind it. Their shapes depend on values, but what they hold
is known all the same: some dense tensor's rows, of which a mask says which are there, in order. This module follows such values from
op to op and puts a dense op beside each (which is dropped if nobody needs it). Where they end in something of fixed shape, the sum
of each row's embeddings, the dense form takes its place: it is equal for all values, so that nothing about them needs a proof.

Until then TensorFlow's value is what the model's ops read: positions in such rows are others in the two forms (`Positions`), and no op is
built that reads one form beside the other (`KnownValues.new`).

Rows that a mask keeps, and one default in each row that would be empty without it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from msplit.engines.cuda.ir.graph import Key, Op, known, require
from msplit.engines.cuda.kernels.embedding import Columns, Segment, Term
from msplit.engines.cuda.passes.embedding import masked_sums
from msplit.engines.cuda.passes.embedding.proof import (
    Absent,
    Filled,
    Kept,
    KnownValues,
    Mask,
    Positions,
    Proof,
    is_grid,
    run_length,
)
from msplit.engines.cuda.passes.pattern import FLOATS, takes_rows
from msplit.opset.traits import GATHERS, RESHAPES, SELECT, SPARSE_SEGMENTS, ops_with


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


_ABSENT = -(2**62)
"""The id of what is not there. No id that a model has can be below it."""

_ELEMENTWISE = ops_with("masks elementwise") | ops_with("per element")
_TESTS = ops_with("mask test")
_LONGEST = 16


def prove(facts: KnownValues, op: Op) -> Proof | None:
    """Proves the form of an op that reads, or makes, rows that a condition keeps."""
    if op.op == "Where":
        return _where(facts, op)
    if not any(facts.is_followed(key) for key in op.inputs):
        return None
    if op.op in _ELEMENTWISE and (op.op not in SELECT or op.inputs[0] in facts.kept):
        return _elementwise(facts, op)
    rule = _RULES.get(op.op)
    return rule(facts, op) if rule is not None else None


def _where(facts: KnownValues, op: Op) -> Proof | None:
    condition = op.inputs[0]
    inner = facts.kept.get(condition)
    if inner is not None:
        require(facts.dtype(inner.dense) == "bool" and len(facts.shape(inner.dense) or ()) == 1)
        narrowed = facts.masks.get((inner.mask, inner.dense))
        if narrowed is None:
            both = facts.new("LogicalAnd", op, [inner.mask.key, inner.dense], closes=True)
            narrowed = facts.masks[inner.mask, inner.dense] = _narrowed(facts, inner.mask, inner.dense, both)
        return facts.point(op, Positions(narrowed, inner.mask))
    shape = known(facts.shape(condition))
    require(shape and 0 not in shape and facts.dtype(condition) == "bool" and facts.array(condition) is None)
    grid = facts.constant(np.indices(shape).reshape(len(shape), -1).T.astype(np.int64))
    mask = facts.masks.get((None, condition))
    if mask is None:
        flat = facts.reshape(op, condition, (-1,))
        mask = facts.masks[None, condition] = _narrowed(facts, Mask(flat), condition, flat)
    return facts.keep(op, grid, mask)


def _narrowed(facts: KnownValues, mask: Mask, condition: Key, key: Key) -> Mask:
    """A mask that holds where another and a condition do."""
    op = facts.made.get(root(facts, condition)[0])
    if op is None or op.op not in _TESTS or len(op.inputs) != 2:
        return Mask(key)
    bound = facts.range(op.inputs[1])
    base = root(facts, op.inputs[0])
    first = mask.base is None and not mask.apart and mask.floor is None and mask.key == key
    if bound is None or bound[0] != bound[1] or not (first or mask.base == base):
        return Mask(key)
    if op.op == "NotEqual":
        return Mask(key, base, mask.apart | {bound[0]}, mask.floor)
    return Mask(key, base, mask.apart, bound[0] if mask.floor is None else max(bound[0], mask.floor))


def root(facts: KnownValues, key: Key) -> Key:
    """The value that another holds in another shape or a wider type."""
    for _ in range(_LONGEST):
        op = facts.made.get(key[0])
        if op is None:
            return key
        widens = op.op == "Cast" and (op.attrs.get("SrcT"), op.attrs.get("DstT")) == ("int32", "int64")
        if op.op not in RESHAPES and not widens:
            return key
        key = op.inputs[0]
    return key


def _elementwise(facts: KnownValues, op: Op) -> Proof | None:
    kept = [facts.kept[key] for key in op.inputs if key in facts.kept]
    ranks = {len(facts.shape(item.dense) or ()) for item in kept}
    if not kept:
        return _of_positions(facts, op)
    require(len({item.mask for item in kept}) == 1 and len(ranks) == 1)
    rank = ranks.pop()
    # What has no more than one row is the same for all of them.
    shapes = [known(facts.shape(key)) for key in op.inputs if key not in facts.kept]
    require(all(len(shape) < rank or (len(shape) == rank and shape[:1] == (1,)) for shape in shapes))
    inputs = [facts.kept[key].dense if key in facts.kept else key for key in op.inputs]
    dense = facts.new(op.op, op, inputs, dict(op.attrs))
    absent = "any" if any(one.absent == "any" for one in kept) else _absent(facts, op, kept[0].absent)
    return facts.keep(op, dense, kept[0].mask, absent=absent)


def _of_positions(facts: KnownValues, op: Op) -> Proof | None:
    """Positions in another type, or with some position for none: of all else than positions nothing is known."""
    found, zero = known(facts.positions.get(op.inputs[0])), op.op == "Maximum" and facts.is_zero(op.inputs[1])
    require(zero or (op.op == "Cast" and op.attrs.get("DstT") in ("int32", "int64")))
    if found.dense is None:
        return facts.point(op, found)
    dense = facts.new(op.op, op, [found.dense, *op.inputs[1:]], dict(op.attrs))
    return facts.point(op, replace(found, dense=dense, absent=_absent(facts, op, found.absent)))


def _absent(facts: KnownValues, op: Op, number: Absent) -> Absent:
    """Number that a missing entry has become, where that is known."""
    bound = facts.array(op.inputs[1]) if op.op == "Maximum" else None
    if isinstance(number, int) and bound is not None and bound.dtype.kind in "iu" and not bound.ndim:
        return max(number, int(bound))
    return number if op.op == "Cast" and op.attrs.get("DstT") in ("int32", "int64") else None


def _row_by_row(facts: KnownValues, op: Op) -> Proof | None:
    """Ids that are sent to the parts of a table, or what was found there put together again."""
    found = [facts.rows(key) for key in op.inputs]
    require(len({one.mask for one in found}) == 1)
    dense = facts.new(op.op, op, [facts.all_of(one) for one in found], dict(op.attrs))
    if op.op == "_StitchPadded":
        return facts.keep(op, dense, found[0].mask)
    absent = -1 if len(found) > 2 and found[2].absent == -1 else None
    for port in range(int(op.attrs["num_partitions"])):
        key = dense[0], port
        if isinstance(found[0], Positions):
            facts.point(op, replace(found[0], dense=key, absent=absent), port=port)
        else:
            facts.keep(op, key, found[0].mask, port=port, absent=absent)
    return Proof()


def _reshape(facts: KnownValues, op: Op) -> Proof | None:
    key = op.inputs[0]
    if key in facts.sizes or op.inputs[-1] in facts.sizes:
        return masked_sums.reshape(facts, op)
    if key in facts.flags:
        facts.flags[op.node, 0] = facts.flags[key]
        return None
    sizes = known(facts.array(op.inputs[1]) if op.op == "Reshape" else None)
    require(sizes.size and sizes.reshape(-1)[0] == -1)
    rest = tuple(int(size) for size in sizes.reshape(-1)[1:])
    if key in facts.positions and not rest:
        return facts.point(op, facts.positions[key])
    kept = known(facts.kept.get(key))
    shape = known(facts.shape(kept.dense))
    require(int(np.prod(shape[1:])) == int(np.prod(rest)) and -1 not in rest)
    view = facts.reshape(op, kept.dense, (shape[0], *rest))
    return facts.keep(op, view, kept.mask, absent=kept.absent)


def _tile(facts: KnownValues, op: Op) -> Proof | None:
    """A truth value per row, repeated along the row."""
    flag = known(facts.flags.get(op.inputs[0]))
    before, times = known(facts.shape(op.inputs[0])), known(facts.array(op.inputs[1]))
    require(times.size == len(before) > 1 and times.reshape(-1)[0] == 1)
    if before[1:] == (1,) * (len(before) - 1):
        facts.flags[op.node, 0] = flag
    return None


def _gather(facts: KnownValues, op: Op) -> Proof | None:
    """Kept rows of which some are kept, or rows at kept ids."""
    require(takes_rows(op, facts.array))
    kept, positions = facts.kept.get(op.inputs[0]), facts.positions.get(op.inputs[1])
    if kept is not None and positions is not None and positions.into is kept.mask:
        if positions.dense is None:
            return facts.keep(op, kept.dense, positions.mask)
        moved = facts.new(op.op, op, [kept.dense, positions.dense, *op.inputs[2:]], dict(op.attrs))
        # Where there was no position, some row of the list is taken.
        return facts.keep(op, moved, positions.mask, absent="any" if positions.absent == 0 else None)
    ids, table = known(facts.kept.get(op.inputs[1])), known(facts.shape(op.inputs[0]))
    require(table and table[0])
    bounds = facts.range(ids.dense)
    inside = bounds is not None and 0 <= bounds[0] <= bounds[1] < table[0]
    rows = ids.dense if inside else facts.chosen(op, ids, 0)
    return facts.keep(op, facts.new(op.op, op, [op.inputs[0], rows, *op.inputs[2:]], dict(op.attrs)), ids.mask)


def _gather_nd(facts: KnownValues, op: Op) -> Proof | None:
    kept = known(facts.kept.get(op.inputs[1]))
    require(is_grid(known(facts.array(kept.dense)), known(facts.shape(op.inputs[0]))))
    return facts.keep(op, facts.reshape(op, op.inputs[0], (-1,)), kept.mask)


def _sparse_reshape(facts: KnownValues, op: Op) -> Proof | None:
    kept = known(facts.kept.get(op.inputs[0]))
    require(all(facts.array(key) is not None for key in [kept.dense, *op.inputs[1:]]))
    dense = facts.new("SparseReshape", op, [kept.dense, *op.inputs[1:]], dict(op.attrs), closes=True)
    facts.keep(op, dense, kept.mask)
    return Proof({1: (dense[0], 1)}, stays=True)


def _strided_slice(facts: KnownValues, op: Op) -> Proof | None:
    if op.inputs[0] in facts.sizes:
        return masked_sums.part(facts, op)
    kept, strides = known(facts.kept.get(op.inputs[0])), known(facts.array(op.inputs[3]))
    all_rows = int(op.attrs.get("begin_mask", 0)) & int(op.attrs.get("end_mask", 0)) & 1
    other = int(op.attrs.get("ellipsis_mask", 0)) | int(op.attrs.get("new_axis_mask", 0))
    shrinks = int(op.attrs.get("shrink_axis_mask", 0)) & 1
    require(strides.size and strides[0] == 1 and all_rows and not other and not shrinks)
    return facts.keep(op, facts.new("StridedSlice", op, [kept.dense, *op.inputs[1:]], dict(op.attrs)), kept.mask)


def _sparse_segment(facts: KnownValues, op: Op) -> Proof | None:
    """Kept rows by row, every one of which has some."""
    ids, segments = facts.kept.get(op.inputs[1]), facts.kept.get(op.inputs[2])
    rows, positions = facts.kept.get(op.inputs[0]), facts.positions.get(op.inputs[1])
    table = op.inputs[0]
    if rows is not None and positions is not None and positions.into is rows.mask:
        ids, table = Kept(facts.all_of(positions), positions.mask), rows.dense
    ids, segments = known(ids), known(segments)
    require(ids.mask is segments.mask and ids.mask.occupied)
    numbers = known(facts.array(segments.dense))
    require(run_length(numbers) and int(numbers[-1]) + 1 == ids.mask.occupied)
    found = _looked_up(facts, op, ids.mask, ids.dense, ids.mask.occupied, table)
    before = facts.filled.get(ids.dense)
    # Nothing happened to the ids since the empty rows were filled: without those it is a lookup of the ids before.
    if before is not None:
        facts.lookups[facts.ops[-1].out] = *before, op
        found.later = (op.inputs[0],)
    return found


def _looked_up(facts: KnownValues, op: Op, mask: Mask, ids: Key, rows: int, source: Key) -> Proof:
    """Rows of a table, the source, at the ids that are there, combined by row."""
    table, count, dtype = known(facts.shape(source)), known(facts.shape(ids)), known(facts.dtype(source))
    require(table[0] and dtype in FLOATS)
    width, per_row = int(np.prod(table[1:])), count[0] // rows
    base = root(facts, ids)
    all_told = mask.base == base and mask.floor is not None and all(number < mask.floor for number in mask.apart)
    if all_told and mask.floor is not None and facts.dtype(base) in ("int32", "int64"):
        ids, valid_from = base, mask.floor
    else:
        if facts.dtype(ids) != "int64":
            ids = facts.new("Cast", op, [ids], {"SrcT": facts.dtype(ids), "DstT": "int64"})
        absent = facts.constant(np.array(_ABSENT, np.int64))
        ids, valid_from = facts.new("SelectV2", op, [mask.key, ids, absent], {"T": "int64"}), _ABSENT + 1
    term = Term(0, 1, step=per_row, count=per_row, valid_from=valid_from)
    combiner = op.op.removeprefix("SparseSegment").lower()
    segment = Segment(0, 0, width, rows, width, (term,), combiner)
    spec = Columns((segment,), ((rows, *table[1:]),), dtype)
    return Proof({0: facts.new("_Columns", op, [ids, source], {"T": dtype, "columns": spec}, closes=True)})


def _select(facts: KnownValues, op: Op) -> Proof | None:
    """Zeros in the rows that had no ids: then what the default stands for plays no part."""
    ids, filled, segment = known(facts.lookups.get(op.inputs[2]))
    require(facts.flags.get(op.inputs[0]) == filled.empty and facts.is_zero(op.inputs[1]))
    require(facts.shape(op.inputs[0]) == facts.shape(op.inputs[1]) == facts.shape(op.inputs[2]))
    return _looked_up(facts, segment, ids.mask, ids.dense, filled.rows, segment.inputs[0])


def _sparse_to_dense(facts: KnownValues, op: Op) -> Proof | None:
    """The rows that are there, and the default elsewhere."""
    places, values = (known(facts.kept.get(op.inputs[slot])) for slot in (0, 2))
    require(places.mask is values.mask)
    sizes = tuple(int(size) for size in known(facts.array(op.inputs[1])).reshape(-1))
    require(is_grid(known(facts.array(places.dense)), sizes) and facts.shape(op.inputs[3]) == ())
    return Proof({0: facts.reshape(op, facts.chosen(op, values, op.inputs[3]), sizes, closes=True)})


_RULES: dict[str, Callable[[KnownValues, Op], Proof | None]] = {
    **RULES,
    **masked_sums.SIZE_RULES,
    **masked_sums.SEGMENT_RULES,
    **dict.fromkeys(RESHAPES, _reshape),
    "Tile": _tile,
    **dict.fromkeys(GATHERS, _gather),
    "GatherNd": _gather_nd,
    "SparseReshape": _sparse_reshape,
    "StridedSlice": _strided_slice,
    **dict.fromkeys(SPARSE_SEGMENTS, _sparse_segment),
    **dict.fromkeys(SELECT, _select),
    "SparseToDense": _sparse_to_dense,
    "_PartitionPadded": _row_by_row,
    "_StitchPadded": _row_by_row,
}
