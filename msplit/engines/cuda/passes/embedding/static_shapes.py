"""Value-dependent ops as the dense patterns that they encode, where the graph proves it.

What `tf.feature_column` and `safe_embedding_lookup_sparse` emit for a column is a sparse tensor's life: `Where`, `SparseReshape`,
`SparseFillEmptyRows`, `Unique`, `SparseSegmentMean`, and their shapes depend on values, so that such a graph can not be captured. For
many columns they do not: a bucketized column has an id in every row, whatever is fed. The densifier goes over the ops in
topological order, beside `specialize`, which knows every shape and constant by then. It keeps an interval for integers and truth
values (`intervals`), makes a constant of what can have one value only, and has a rule for each op whose result is known from constant
structure. Nothing is assumed of the values that are fed, so that what is not proved stays as it is.

Lookups that take a detour, whose shapes depend on the ids so that they can not be captured, as plain ones.

Rows of some ids above a row for every row of a table, added without looking at the ids of those below.

`frontend.row_union` puts them so. What is below is as large as the table: as it is, it is added to a variable at once, and sums by id have
nothing to find there. Until then both go side by side through ops on each element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.engines.cuda.ir.graph import Key, Op, OpGraph, Shape, StandIn, known, proved, require
from msplit.engines.cuda.ir.interpret import evaluate
from msplit.engines.cuda.passes.embedding import masked_rows
from msplit.engines.cuda.passes.embedding.proof import KnownValues, Mixed, Proof, is_grid, run_length
from msplit.engines.cuda.passes.pattern import Readers, offered, takes_rows
from msplit.errors import EngineError
from msplit.formats.tensors import stacked
from msplit.opset.traits import DRAWS, GATHERS, SELECT, SPARSE_SEGMENTS, ops_with, traits


def prove(facts: KnownValues, op: Op) -> Proof | None:
    """Finds the simpler form of an op that is about to run, if it has one: by its dense pattern, or as rows that a condition keeps."""
    found = None
    for rule in (_RULES.get(op.op), masked_rows.prove):
        if found is None and rule is not None:
            facts.ops = []
            try:
                found = proved(rule, facts, op)
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


_LONGEST, _MOST_BY_SHAPE = 8, 1 << 22
"""Ops from a condition back to what is made like a value, of which a triangle without its diagonal has four; and elements of that."""


def _where(facts: KnownValues, op: Op) -> Proof | None:
    """Places where a condition holds that goes by shapes alone, such as a triangle of ones made like a value."""
    return Proof({0: np.argwhere(_by_shape(facts, op.inputs[0], _LONGEST)).astype(np.int64)})


def _by_shape(facts: KnownValues, key: Key, most: int) -> NDArray[Any]:
    """A value that is made of constants, and of ones or zeros like others, by so many ops at most."""
    value = facts.array(key)
    if value is not None:
        return value
    op, shape = known(facts.graph.ops.get(key[0])), known(facts.shape(key))
    require(most > 0 and op.inputs and op.op not in DRAWS and math.prod(shape) <= _MOST_BY_SHAPE)
    if op.op in _FILLED:
        return np.full(shape, op.op == "OnesLike", np.dtype(known(facts.dtype(key))))
    try:
        made = evaluate(op, [_by_shape(facts, one, most - 1) for one in op.inputs])
    except EngineError:  # it runs on the device, or says there what is wrong
        made = None
    return known(made)[key[1]]


_FILLED = ops_with("filled")
_RULES: dict[str, Callable[[KnownValues, Op], Proof | None]] = {
    **dict.fromkeys(GATHERS, _gather),
    "GatherNd": _gather_nd,
    "Where": _where,
    "SparseFillEmptyRows": _fill_empty_rows,
    **dict.fromkeys(SPARSE_SEGMENTS, _sparse_segment),
    **dict.fromkeys(ops_with("dense segment"), _segment),
    **dict.fromkeys(SELECT, _select),
    "SparseToDense": _sparse_to_dense,
    "DynamicPartition": _partition,
    **dict.fromkeys(ops_with("stitch"), _stitch),
}


_STITCHES = ops_with("stitch")
_UNIQUES = ops_with("unique")
_BY_PLACES = GATHERS | SPARSE_SEGMENTS | {f"{op}WithNumSegments" for op in SPARSE_SEGMENTS}


def eliminate_unique(graph: OpGraph) -> bool:
    """Makes a lookup of distinct ids, whose rows are then put where the ids were, a lookup of the ids. Whether there was one.

    `embedding_lookup_sparse` looks each distinct id up once: ``ids, places = Unique(x)``, and reads ``Gather(table, ids)`` only at
    ``places``. Row ``places[i]`` of that is row ``x[i]`` of the table, whatever x is.
    """
    readers = Readers(graph)
    found = False
    for lookup in list(graph.ops.values()):
        if lookup.op not in GATHERS or not takes_rows(lookup, graph.constants.get):
            continue
        unique = graph.ops.get(lookup.inputs[1][0])
        if unique is None or unique.op not in _UNIQUES or lookup.inputs[1][1] != 0:
            continue
        for number in readers.of.get((lookup.node, 0), []):
            user = graph.ops[number]
            # A sparse segment op always takes rows.
            rows = user.op in _BY_PLACES and (user.op not in GATHERS or takes_rows(user, graph.constants.get))
            if rows and user.inputs[:2] == [(lookup.node, 0), (unique.node, 1)]:
                user.inputs[:2] = [lookup.inputs[0], unique.inputs[0]]
                nodes = [*lookup.source_nodes, *user.source_nodes, *unique.source_nodes]
                user.source_nodes = list(dict.fromkeys(nodes))
                found = True
    return found


def fold_partition(graph: OpGraph, stand_ins: dict[Key, StandIn] | None = None) -> bool:
    """Joins lookups in the parts of a table. Whether there was one: shapes behind it are then to be inferred again. Of tables that are
    `stand_ins`, so is the whole.

    TensorFlow 1 looks ids up in a partitioned variable by sending each id to its part (DynamicPartition), one gather per part, and
    putting the rows back in order (DynamicStitch). With the parts one below the other, row ``new_id`` of part p is row
    ``start[p] + new_id`` of the whole: one gather.
    """
    told, made = {} if stand_ins is None else stand_ins, dict[tuple[Key, ...], Key]()
    return offered(graph, lambda op: _join(graph, op, told, made))


def _join(graph: OpGraph, stitch: Op, stand_ins: dict[Key, StandIn], made: dict[tuple[Key, ...], Key]) -> bool:
    """Makes one lookup of those in the parts of a table; returns whether it could."""
    # Places and ids are sent to the parts alike, each part looks its ids up, and the places, in order, bring the rows together.
    require(stitch.op in _STITCHES)
    count = len(stitch.inputs) // 2
    order = _parts_of(graph, stitch.inputs[:count])
    lookups = [known(graph.ops.get(key[0])) for key in stitch.inputs[count:]]
    require(all(op.op in GATHERS and takes_rows(op, graph.constants.get) for op in lookups))
    ids = _parts_of(graph, [op.inputs[1] for op in lookups])
    shape = known(graph.shapes.get(ids.inputs[0]))
    require(len(shape) == 1 and ids.inputs[1] == order.inputs[1])
    require(known(graph.constants.get(order.inputs[0])).tolist() == list(range(shape[0])))
    parts = tuple(op.inputs[0] for op in lookups)
    tables = [known(_known(graph, key, stand_ins)) for key in parts]
    shapes = [known(one.shape) for one in tables]
    require(all(shapes) and len({shape[1:] for shape in shapes}) == len({one.dtype for one in tables}) == 1)
    # Row `new_id` of a part is that many rows behind the part's first one in the whole table, which has them as a saver writes them: by
    # names such as part_10:0. So it can be a view of the file.
    dtype, places = np.dtype(str(ids.attrs.get("T", "int64"))), sorted(range(count), key="{}:".format)
    starts = np.empty(count, dtype)
    starts[places] = np.cumsum([0, *(shapes[at][0] for at in places[:-1])])
    if stand_ins.keys().isdisjoint(parts):
        if parts not in made:
            made[parts] = graph.constant(known(stacked([graph.constants[parts[at]] for at in places])))
        whole = made[parts]
    else:
        whole = graph.fresh(), 0
        stand_ins[whole] = StandIn((sum(shape[0] for shape in shapes), *shapes[0][1:]), tables[0].dtype)
    start = _plain_gather(graph, stitch, graph.constant(starts), ids.inputs[1], shape).out
    row = graph.add("AddV2", stitch, {"T": dtype.name}, [ids.inputs[0], start], shape).out
    result = _plain_gather(graph, stitch, whole, row, (*shape, *shapes[0][1:]))
    result.source_nodes = [node for op in (stitch, *lookups, ids, order) for node in op.source_nodes]
    graph.ops[stitch.node] = replace(result, node=stitch.node)
    graph.shapes[stitch.out] = graph.shapes[result.out]
    graph.drop([result])
    return True


def _parts_of(graph: OpGraph, keys: list[Key]) -> Op:
    """The DynamicPartition that gives all of these values, in its order."""
    require(keys)
    op = known(graph.ops.get(keys[0][0]))
    require(op.op == "DynamicPartition" and int(op.attrs.get("num_partitions", 0)) == len(keys))
    require(keys == [(op.node, port) for port in range(len(keys))])
    return op


def _plain_gather(graph: OpGraph, like: Op, table: Key, rows: Key, shape: Shape) -> Op:
    return graph.add("GatherV2", like, {"batch_dims": 0}, [table, rows, graph.constant(np.array(0, np.int32))], shape)


def _known(graph: OpGraph, key: Key, stand_ins: Mapping[Key, StandIn]) -> StandIn | None:
    """Shape and type of a constant, or of what stands for one; None for all else."""
    value = graph.constants.get(key)
    return stand_ins.get(key) if value is None else StandIn(value.shape, value.dtype.name)


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
