"""Rules of independent rows for products and reductions, lookups, and selections such as segments and sparse tensors.

Products, reductions and lookups.

Entries that are chosen by what is in the rows: sparse lookups, partitions and segments.

Where, a partition or a sparse tensor give each row a number of entries of its own, in the order of the rows. They are a `PerRow` with a
`group`: what is done to them element by element stays in the row. Only ops that give every row its own again lead back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from msplit.analysis.rows.counts import Linear, asked_sizes, product
from msplit.analysis.rows.elements import broadcast
from msplit.analysis.rows.node import (
    ANY,
    COORDINATES,
    EACH,
    FIXED,
    INDICES,
    NUMBERS,
    PADDED,
    PLACE,
    POSITIONS,
    LinearSizes,
    Mixes,
    PerRow,
    RowLimits,
    RowState,
    UniqueValues,
    View,
    agreed,
    not_along,
    rule,
    rules,
    sizes_state,
)
from msplit.opset.traits import ops_with
from msplit.shapes.registry import UNKNOWN, axis_of
from msplit.shapes.registry import Sizes as Shape
from msplit.shapes.values import missing

_SUMMED = "sums over the rows"


@rule("MatMul", "_FusedMatMul", "SparseMatMul")
def matmul(view: View) -> RowState:
    """A product of two matrices; what else a fused one takes is fixed."""
    view.only(0, 1)
    return _product(view, (), ("transpose_a", "transpose_b"))


@rules(ops_with("batch matmul") | {"BatchMatMulV3"})
def batch_matmul(view: View) -> RowState:
    """A product of matrices for each place of the axes before."""
    return _product(view, ("adj_x", "adj_y"), ())


def _product(view: View, adjoint: Sequence[str], transposed: Sequence[str]) -> RowState:
    """Rows lie along the axis of the result that comes from one operand alone, or along one that is shared."""
    turned = [bool(view.attr(name, False)) for name in (*adjoint, *transposed)]
    shapes = [view.ranked(0), view.ranked(1)]
    rank = max(len(shape) for shape in shapes)
    free, batch = [], []
    for slot, state in enumerate(view.states[:2]):
        if state is FIXED:
            continue
        rows = view.rows(slot)
        place = rows.axis - len(shapes[slot])
        if place < -2:
            batch.append(slot)
            continue
        # Of [m, k] times [k, n] the axes m and n stay.
        kept = (-2 if slot == 0 else -1) if not turned[slot] else (-1 if slot == 0 else -2)
        if place != kept:
            raise Mixes(_SUMMED)
        free.append(replace(rows, axis=rank - 2 + slot))
    if (free and batch) or len(free) > 1:
        raise Mixes("multiplies rows with rows")
    if free:
        return free[0]
    states = [state if slot in batch else FIXED for slot, state in enumerate(view.states[:2])]
    return broadcast(states, [(*shape[:-2], 1, 1) for shape in shapes])


@rule("Einsum", "XlaEinsum")
def einsum(view: View) -> RowState:
    """The rows have one name in all operands that have them, and in the result."""
    equation = str(view.attr("equation", "")).replace(" ", "")
    given, _, result = equation.partition("->")
    found, names = [], set()
    operands = [
        named_axes(term, shape)
        for term, shape in zip(given.split(","), map(view.ranked, range(len(view.states))), strict=True)
    ]
    for slot, (state, operand) in enumerate(zip(view.states, operands, strict=True)):
        if state is FIXED:
            continue
        rows = view.rows(slot)
        name = operand[rows.axis]
        if operand.count(name) > 1:
            raise Mixes("takes the diagonal of the rows")
        names.add(name)
        found.append(replace(rows, axis=0))
    state = agreed(found)
    if len(names) > 1:
        raise Mixes("multiplies rows with rows")
    (name,) = names
    for slot, (other, operand) in enumerate(zip(view.states, operands, strict=True)):
        if other is FIXED and name in operand and (name.isalpha() or view.ranked(slot)[operand.index(name)] != 1):
            raise Mixes("multiplies rows with what is fixed and has an entry for each")
    longest = max((sum(not item.isalpha() for item in operand) for operand in operands), default=0)
    kept = named_axes(result, (None,) * (len(result.replace("...", "")) + ("..." in result) * longest))
    if name not in kept:
        raise Mixes(_SUMMED)
    return replace(state, axis=kept.index(name))


def named_axes(term: str, shape: Shape) -> list[str]:
    """A name for each axis: a letter, or of an ellipsis the number from its last."""
    before, dots, behind = term.partition("...")
    spread = len(shape) - len(before) - len(behind)
    if spread < 0 or (not dots and spread):
        raise Mixes("has an equation that does not go with its operands")
    return [*before, *(str(place) for place in reversed(range(spread))), *behind]


@rule("Sum", "Mean", "Prod", "Max", "Min", "All", "Any", "EuclideanNorm", "ReduceJoin", places=True)
def reduction(view: View) -> RowState:
    """Over other axes than that of the rows. Zeros beyond the end of a row add nothing."""
    state = view.alone()
    gone = {view.place(0, axis) for axis in view.whole(1)}
    if state.axis in gone or (view.op == "ReduceJoin" and not gone):
        raise Mixes("reduces over the rows")
    if state.tells:
        if (view.op, state.tells, state.origin) != ("Sum", PADDED, 0.0) or state.column not in gone:
            raise Mixes(PLACE)
        state = _bare(state)
    if view.attr("keep_dims", False):
        return state
    return replace(state, axis=state.axis - sum(axis < state.axis for axis in gone))


@rule("ArgMax", "ArgMin")
def arg_max(view: View) -> RowState:
    """Along another axis than the rows."""
    state = view.alone()
    (axis,) = view.whole(1)
    place = view.place(0, axis)
    not_along(state, place, "looks for one among the rows")
    return replace(state, axis=state.axis - (place < state.axis))


@rule("GatherV2", "Gather", "ResourceGather", "KvResourceGather", "KvResourceGatherV1", places=True, each=True)
def gather(view: View) -> RowState:
    """Entries of a table that all rows share, or of each row; along other axes than the rows, or by shared leading axes."""
    axis, batch = 0, int(view.attr("batch_dims", 0))
    table, ids = view.states[0], view.states[1]
    indices = view.ranked(1)
    view.only(0, 1)
    batch = batch + len(indices) if batch < 0 else batch
    if view.op == "GatherV2":
        (axis,) = view.whole(2)
        axis = axis_of(axis, len(view.ranked(0))) if table is not FIXED or axis < 0 else axis
    elif view.op == "Gather" or table is FIXED:
        axis = batch
    # A table that all rows share: the entries belong to the rows of the ids.
    if table is FIXED and isinstance(ids, UniqueValues):
        if axis != 0 or batch:
            raise Mixes("looks up along another axis")
        return ids
    if table is FIXED:
        rows = view.rows(1)
        if rows.tells:
            raise Mixes("looks up the place of a row in the batch")
        not_before(rows, batch)
        return replace(rows, axis=rows.axis - batch + axis)
    # A list of unique values, looked up by the indices that were made with it: each row gets its own back.
    if isinstance(table, UniqueValues):
        rows = view.rows(1)
        if rows.tells != INDICES or rows.origin != table.origin or axis != 0 or batch:
            raise Mixes("looks up in a list that all rows have made")
        return replace(rows, tells="", origin=None)
    # Fixed ids: the same entries of every row.
    held = view.rows(0)
    if ids is FIXED:
        _no_coordinates(held)
        not_along(held, axis, "picks some of the rows")
        not_before(held, batch)
        return replace(held, axis=held.axis + (held.axis > axis) * (len(indices) - batch - 1))
    rows = view.rows(1)
    if rows.tells == NUMBERS and held == PerRow(0) and axis == batch == 0:
        return _bare(rows)
    # Rows picked by positions that were found in them: a choice of rows, with the origin kept.
    bare = _bare(held)
    if (
        rows.tells in (POSITIONS, EACH)
        and bare == rows.origin
        and len(indices) == 1
        and axis == 0
        and held.tells != EACH
    ):
        return replace(held, outer=rows.outer, inner=rows.inner, group=rows.group)
    if rows.tells:
        raise Mixes("looks up the place of a row in the batch")
    # Otherwise each row may only pick from itself, by a shared batch axis.
    if held.axis != rows.axis or rows.axis >= batch:
        raise Mixes("picks rows by what differs from row to row")
    return agreed([held, rows])


def _no_coordinates(held: PerRow) -> None:
    if held.column is not None or held.tells == EACH:
        raise Mixes(PLACE)


def not_before(rows: PerRow, batch: int) -> None:
    """Makes sure that the rows do not lie along leading axes which a fixed operand has, too.

    Raises:
        Mixes: They do.
    """
    if rows.axis < batch:
        raise Mixes("takes fixed entries for each row")


@rule("GatherNd", "ResourceGatherNd", places=True)
def gather_nd(view: View) -> RowState:
    """Elements by coordinates, the first of which may be the number of the row."""
    indices = view.ranked(1)
    depth, rank = indices[-1], len(indices)
    if view.states[0] is FIXED:
        rows = view.rows(1)
        if rows.tells:
            raise Mixes("looks up the place of a row in the batch")
        not_along(rows, rank - 1, "takes rows for coordinates")
        return rows
    held = view.rows(0)
    if depth is None:
        raise Mixes("takes coordinates of an unknown length")
    if view.states[1] is FIXED:
        _no_coordinates(held)
        if held.axis < depth:
            raise Mixes("picks some of the rows")
        return replace(held, axis=held.axis - depth + rank - 1)
    rows = view.rows(1)
    if not (rows.tells == COORDINATES and rows.column == rank - 1) and not (rows.tells == NUMBERS and depth == 1):
        raise Mixes("picks rows by what differs from row to row")
    if held != PerRow(0) or rows.axis == rank - 1:
        raise Mixes("picks rows that lie along different axes")
    return replace(rows, tells="", column=None)


@rule("DenseBincount", sizes=(1,), places=True)
def dense_bincount(view: View) -> RowState:
    """The counts of each vector of a matrix; or of the numbers of rows, which is how many entries each row has."""
    state, shape = view.rows(0), view.ranked(0)
    view.counted.pop(f"{view.key}:0", None)
    if state.tells:
        ids = _row_numbers(view, 0, 1)
        if not ids.group or view.shape(2) != (0,) or view.attr("binary_output", False):
            raise Mixes(PLACE)
        view.counted[f"{view.key}:0"] = ids.group
        return PerRow(0)
    view.fixed(1)
    if len(shape) != 2 or state.axis != 0:
        raise Mixes("counts over the rows")
    view.only(0, 2)
    return agreed([state, *([view.rows(2)] if view.states[2] is not FIXED else [])])


_FILLED = "filled "
"""Begins the name of a group in which every row has an entry."""

_ONE_EACH: Linear = (0, 1)


def _bare(state: PerRow) -> PerRow:
    """The layout of elements alone, without what is known of their values."""
    return replace(state, tells="", column=None, origin=None)


@rule("Where")
def where(view: View) -> RowState:
    """The places of what is true."""
    state = view.rows(0)
    if (state.axis, state.outer) != (0, 1) or (state.inner is None and not state.group):
        raise Mixes("lists what is true in another order than by rows")
    listed = PerRow(0, 1, None, group=f"where {view.sources[0]}")  # two of the same tensor choose the same
    value = view.batched(0)
    if (
        value is not None and value.size and state.inner and not missing(value).any()
    ):  # whatever rows are, such as a triangle of ones made like each
        counts = {int(np.count_nonzero(row)) for row in value.reshape(-1, state.inner)}
        listed = PerRow(0, 1, counts.pop()) if len(counts) == 1 else listed
    if len(view.ranked(0)) == 1:
        return replace(listed, tells=POSITIONS, origin=state)
    if state.inner != 1:
        raise Mixes(PLACE)
    return replace(listed, tells=COORDINATES, column=1)


def _coordinates(view: View, slot: int) -> PerRow:
    """The state of the indices of a sparse tensor, of which the first is that of the row."""
    state = view.rows(slot)
    if (state.tells, state.column, state.axis, state.outer) != (COORDINATES, 1, 0, 1):
        raise Mixes("takes the indices of a sparse tensor, which may name any row")
    return state


@rule("SparseReshape", sizes=(1, 2), places=True)
def sparse_reshape(view: View) -> list[RowState]:
    """Coordinates of which the first stays that of the row."""
    state = _coordinates(view, 0)
    if isinstance(same := view.states[1], LinearSizes) and same.varying is not None and same == view.states[2]:
        return [state, same]
    old, new = asked_sizes(view, 1), asked_sizes(view, 2)
    rest, known = product(old[1:]), product([item for item in new[1:] if item != (-1, 0)])
    if old[0] != _ONE_EACH or rest[1] or known[1] or rest[0] <= 0 or known[0] <= 0 or rest[0] % known[0]:
        raise Mixes("reshapes rows into each other")
    if new[0] == (-1, 0) and known == rest:
        new[0] = _ONE_EACH
    if new[0] != _ONE_EACH:
        raise Mixes("reshapes rows into each other")
    base = [rest[0] // known[0] if item == (-1, 0) else item[0] for item in new]
    return [state, sizes_state(np.array(base, np.int64), np.array([slope for _, slope in new], np.int64))]


def _all_rows(view: View, slot: int) -> LinearSizes:
    """The shape of a sparse tensor that has a row for each row."""
    sizes = view.counts(slot, varying=True)
    if sizes is None or sizes.base.ndim != 1 or (sizes.base[0], sizes.slope[0]) != _ONE_EACH:
        raise Mixes("makes another number of rows")
    if sizes.varying is not None and sizes.varying[0]:
        raise Mixes("makes as many rows as the longest row has entries")
    return sizes


@rule("SparseFillEmptyRows", sizes=(2,), places=True)
def fill_empty_rows(view: View) -> list[RowState]:
    """Rows without an entry get one."""
    view.fixed(3)
    state = _coordinates(view, 0)
    agreed([_bare(state), view.rows(1)])
    _all_rows(view, 2)
    # Where two have equally many entries in each row before, as ids and their weights, they have so after it.
    listed = PerRow(0, 1, None, group=_FILLED + (state.group or view.key))
    return [replace(listed, tells=COORDINATES, column=1), listed, PerRow(0), UniqueValues(view.key)]


@rule("Unique")
def unique(view: View) -> list[RowState]:
    """The different values, of use together with the index of each entry alone."""
    state = view.rows(0)
    if state.tells:
        raise Mixes(PLACE)
    return [UniqueValues(view.key), replace(state, tells=INDICES, origin=view.key)]


def _row_numbers(view: View, slot: int, count: int | None) -> PerRow:
    """The state of ids of segments that are the numbers of the rows.

    Args:
        view: The node.
        slot: Input slot of the ids.
        count: Input slot of the number of segments; None where that of the largest id says it.
    """
    ids = view.rows(slot)
    if ids.tells != NUMBERS or ids.outer != 1 or len(view.ranked(slot)) != 1 or not (ids.inner or ids.group):
        raise Mixes("joins what ids say, and ids may join several rows")
    if count is not None and asked_sizes(view, count) != [_ONE_EACH]:
        raise Mixes("makes another number of rows")
    if count is None and ids.group and not ids.group.startswith(_FILLED):
        raise Mixes("makes fewer rows where the last ones have no entry")
    return _bare(ids)


@rules(ops_with("sparse segment"), places=True)
@rule(*(f"{op}WithNumSegments" for op in sorted(ops_with("sparse segment"))), sizes=(3,), places=True)
def sparse_segments(view: View) -> RowState:
    """Rows of a table for each entry, combined per row."""
    table, ids = view.states[0], view.rows(1)
    if isinstance(table, UniqueValues):
        found = ids.tells == INDICES and ids.origin == table.origin
    else:
        found = table is FIXED and not ids.tells
    if not found:
        raise Mixes("combines what is looked up among other rows")
    agreed([_bare(ids), _row_numbers(view, 2, 3 if "WithNum" in view.op else None)])
    return PerRow(0)


@rule("SegmentSum", "SegmentMean", "SegmentMax", "SegmentMin", "SegmentProd", places=True)
@rule("UnsortedSegmentSum", "UnsortedSegmentMax", "UnsortedSegmentMin", "UnsortedSegmentProd", sizes=(2,), places=True)
def segments(view: View) -> RowState:
    """By the numbers of rows, or by fixed ids along leading axes that are not that of the rows."""
    if view.states[1] is not FIXED:
        data = view.rows(0)
        if data.tells:
            raise Mixes(PLACE)
        agreed([data, _row_numbers(view, 1, 2 if view.op.startswith("Unsorted") else None)])
        return PerRow(0)
    state, ids = view.alone(), len(view.ranked(1))
    if state.axis < ids:
        raise Mixes("joins rows")
    return replace(state, axis=state.axis - ids + 1)


@rule("DynamicPartition", places=True, each=True)
def partition(view: View) -> list[RowState]:
    """Each entry goes into the part that the same row names."""
    data, parts = view.rows(0), view.rows(1)
    if len(view.ranked(1)) != 1 or parts.inner is None or agreed([_bare(data), parts]) != PerRow(0, 1, parts.inner):
        raise Mixes("cuts rows apart")
    count = view.count("num_partitions", 1)
    return [replace(data, inner=None, group=f"{part}/{count} {view.sources[1]}") for part in range(count)]


@rule("DynamicStitch", "ParallelDynamicStitch", places=True, each=True)
def stitch(view: View) -> RowState:
    """All parts of a partition, each entry at the place where it was."""
    count = len(view.states) // 2
    source = view.rows(0).group.partition(" ")[2]
    places = []
    for part in range(count):
        places_of, data = view.rows(part), view.rows(count + part)
        if places_of.group != f"{part}/{count} {source}" or len(view.ranked(part)) != 1 or data.tells:
            raise Mixes("puts together what ids say, and ids may name any row")
        agreed([_bare(places_of), data])
        place = PerRow(0) if places_of.tells == NUMBERS else places_of.origin
        if places_of.tells not in (NUMBERS, EACH) or not isinstance(place, PerRow):
            raise Mixes("puts together what ids say, and ids may name any row")
        places.append(place)
    return agreed(places)


@rule("SparseToDense", sizes=(1,), places=True)
def to_dense(view: View) -> RowState:
    """The entries of each row, in the row."""
    view.fixed(3)
    state, sizes = _coordinates(view, 0), _all_rows(view, 1)
    if sizes.slope[1:].any():
        raise Mixes("makes another number of rows")
    if view.states[2] is not FIXED or view.ranked(2):
        agreed([_bare(state), view.rows(2)])
    if sizes.varying is None:
        return PerRow(0)
    fill = view.value(3)
    if sizes.base.size != 2 or fill is None or int(fill) == UNKNOWN:
        raise Mixes("makes as many columns as the longest row has")
    return PerRow(0, tells=PADDED, column=1, origin=float(fill))


@rule("StringSplit", "StringSplitV2")
def split(view: View) -> list[RowState]:
    """The parts of each string, as a sparse tensor."""
    if view.alone() != PerRow(0) or len(view.ranked(0)) != 1:
        raise Mixes("takes rows for what lies inside of them")
    listed = PerRow(0, 1, None, group=view.key)
    return [replace(listed, tells=COORDINATES, column=1), listed, view.sparse_shape()]


@rule("UnicodeDecode", "UnicodeDecodeWithOffsets")
def decode(view: View) -> list[RowState]:
    """The characters of each string, and their places in it, as a ragged tensor."""
    if view.alone() != PerRow(0) or len(view.ranked(0)) != 1:
        raise Mixes("takes rows for what lies inside of them")
    return [RowLimits(view.key), *[PerRow(0, 1, None, group=view.key)] * (len(view.made) - 1)]


def _chosen(view: View, slot: int, limits: int) -> PerRow:
    """The state of the values of a ragged tensor, whose places of rows are another input."""
    state, places = view.rows(slot), view.states[limits]
    if not isinstance(places, RowLimits) or state != PerRow(0, 1, None, group=places.choice) or places.what != "splits":
        raise Mixes("puts values and rows together that do not belong to each other")
    return state


@rule("StringNGrams")
def ngrams(view: View) -> list[RowState]:
    """What stands side by side in each row."""
    _chosen(view, 0, 1)
    if view.attr("pad_width", 0):
        raise Mixes("pads empty rows, but not where all are")
    return [PerRow(0, 1, None, group=view.key), RowLimits(view.key)]


@rule("RaggedRange")
def ragged_range(view: View) -> list[RowState]:
    """Places of entries, from one place of each row to another one."""
    first, last = view.states[:2]
    if not isinstance(first, RowLimits) or not isinstance(last, RowLimits) or first.choice != last.choice:
        raise Mixes("lists places of other rows")
    if not {first.what, last.what} <= {"starts", "ends", "within"} or view.whole(2)[0] < 1:
        raise Mixes("lists places beyond a row")
    entries = PerRow(0, 1, None, group=first.choice)
    return [RowLimits(view.key), PerRow(0, 1, None, POSITIONS, group=view.key, origin=entries)]


@rule("RaggedTensorToSparse")
def ragged_to_sparse(view: View) -> list[RowState]:
    """The values of each row."""
    if len(view.states) != 2:
        raise Mixes("takes rows of rows")
    state = _chosen(view, 1, 0)
    return [replace(state, tells=COORDINATES, column=1), state, view.sparse_shape()]


@rule("RaggedTensorToTensor", sizes=(0, 3), places=True)
def ragged_to_dense(view: View) -> RowState:
    """The values of each row, cut off or filled up to a fixed number."""
    view.fixed(2)
    kinds = [kind if isinstance(kind, str) else kind.decode() for kind in view.attr("row_partition_types", ())]
    rows, *columns = asked_sizes(view, 0) or [(-1, 0)]
    if not columns or columns[0][0] < 0 or columns[0][1] or rows not in ((-1, 0), _ONE_EACH):
        raise Mixes("makes as many columns as the longest row has")
    if kinds == ["ROW_SPLITS"]:
        _chosen(view, 1, 3)
    elif kinds == ["FIRST_DIM_SIZE", "VALUE_ROWIDS"]:
        if asked_sizes(view, 3) != [_ONE_EACH] or _row_numbers(view, 4, 3) != view.rows(1):
            raise Mixes("puts values and rows together that do not belong to each other")
    else:
        raise Mixes("takes rows of rows")
    return PerRow(0)


@rule("SparseCross", sizes=ANY, places=True)
def sparse_cross(view: View) -> list[RowState]:
    """The combinations of the values of each row: as many for each where all columns are dense."""
    count, total = view.count("N"), 1
    for slot in range(count):
        _all_rows(view, 2 * count + slot)
        agreed([_bare(_coordinates(view, slot)), view.rows(count + slot)])
    for slot in range(3 * count, len(view.states)):
        if view.rows(slot) != PerRow(0) or len(view.ranked(slot)) != 2:
            raise Mixes("takes rows for what lies inside of them")
        if (width := view.ranked(slot)[1]) is None:
            raise Mixes("makes a number of columns that is not known beforehand")
        total *= width
    listed = PerRow(0, 1, None, group=view.key) if count else PerRow(0, 1, total)
    shape = view.sparse_shape() if count else sizes_state(np.array([0, total]), np.array([1, 0]))
    return [replace(listed, tells=COORDINATES, column=1), listed, shape]


@rule("ParseExample", "ParseExampleV2")
def parse(view: View) -> list[RowState]:
    """A record is a row. Of sparse features the longest of all rows gives the width, of dense ones of any length, too."""
    if view.alone() != PerRow(0) or len(view.ranked(0)) != 1:
        raise Mixes("takes rows for what lies inside of a record")
    count = view.count("num_sparse") or view.count("Nsparse")
    listed = [PerRow(0, 1, None, group=f"{view.key}/{feature}") for feature in range(count)]
    lost = UniqueValues(view.key)
    dense = [lost if shape is None or None in shape else PerRow(0) for shape in view.attr("dense_shapes", ())]
    indices = [replace(state, tells=COORDINATES, column=1) for state in listed]
    shapes = [view.sparse_shape(feature) for feature in range(count)]
    ragged = [f"{view.key}/ragged/{feature}" for feature in range((len(view.made) - 3 * count - len(dense)) // 2)]
    values = [PerRow(0, 1, None, group=choice) for choice in ragged]
    return [*indices, *listed, *shapes, *dense, *values, *map(RowLimits, ragged)]
