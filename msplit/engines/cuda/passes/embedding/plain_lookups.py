"""Lookups that take a detour, whose shapes depend on the ids so that they can not be captured, as plain ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from msplit.engines.cuda.ir.graph import Key, Op, OpGraph, Shape, StandIn
from msplit.engines.cuda.passes.pattern import Readers, offered, takes_rows
from msplit.opset.traits import GATHERS, SPARSE_SEGMENTS, ops_with

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
    known = {} if stand_ins is None else stand_ins
    return offered(graph, lambda op: op.op in _STITCHES and _join(graph, op, known))


def _join(graph: OpGraph, stitch: Op, stand_ins: dict[Key, StandIn]) -> bool:
    """Makes one lookup of those in the parts of a table; returns whether it could."""
    # Places and ids are sent to the parts alike, each part looks its ids up, and the places, in order, bring the rows together.
    count = len(stitch.inputs) // 2
    order = _parts_of(graph, stitch.inputs[:count])
    gathers = [graph.ops.get(key[0]) for key in stitch.inputs[count:]]
    lookups = [op for op in gathers if op is not None and _is_lookup(graph, op, stand_ins)]
    if order is None or len(lookups) != count:
        return False
    ids = _parts_of(graph, [op.inputs[1] for op in lookups])
    shape = graph.shapes.get(ids.inputs[0]) if ids is not None else None
    if ids is None or shape is None or len(shape) != 1 or ids.inputs[1] != order.inputs[1]:
        return False
    places = graph.constants.get(order.inputs[0])
    if places is None or places.tolist() != list(range(shape[0])):
        return False
    parts = [op.inputs[0] for op in lookups]
    known = [_known(graph, key, stand_ins) or StandIn((), "") for key in parts]
    shapes = [one.shape or () for one in known]
    if len({shape[1:] for shape in shapes}) != 1 or len({one.dtype for one in known}) != 1:
        return False
    # Row `new_id` of a part is that many rows behind the part's first one in the whole table.
    dtype = np.dtype(str(ids.attrs.get("T", "int64")))
    starts = np.cumsum([0, *(shape[0] for shape in shapes[:-1])]).astype(dtype)
    if stand_ins.keys().isdisjoint(parts):
        whole = graph.constant(np.concatenate([graph.constants[key] for key in parts]))
    else:
        whole = graph.fresh(), 0
        stand_ins[whole] = StandIn((sum(shape[0] for shape in shapes), *shapes[0][1:]), known[0].dtype)
    start = _gather(graph, stitch, graph.constant(starts), ids.inputs[1], shape).out
    row = graph.add("AddV2", stitch, {"T": dtype.name}, [ids.inputs[0], start], shape).out
    result = _gather(graph, stitch, whole, row, (*shape, *shapes[0][1:]))
    result.source_nodes = [node for op in (stitch, *lookups, ids, order) for node in op.source_nodes]
    graph.ops[stitch.node] = replace(result, node=stitch.node)
    graph.shapes[stitch.out] = graph.shapes[result.out]
    graph.drop([result])
    return True


def _parts_of(graph: OpGraph, keys: list[Key]) -> Op | None:
    """The DynamicPartition that gives all of these values, in its order."""
    op = graph.ops.get(keys[0][0]) if keys else None
    if op is None or op.op != "DynamicPartition" or int(op.attrs.get("num_partitions", 0)) != len(keys):
        return None
    return op if keys == [(op.node, port) for port in range(len(keys))] else None


def _is_lookup(graph: OpGraph, op: Op, stand_ins: Mapping[Key, StandIn]) -> bool:
    """Returns whether an op takes rows of a constant table."""
    table = _known(graph, op.inputs[0], stand_ins) if op.op in GATHERS else None
    return table is not None and bool(table.shape) and takes_rows(op, graph.constants.get)


def _gather(graph: OpGraph, like: Op, table: Key, rows: Key, shape: Shape) -> Op:
    return graph.add("GatherV2", like, {"batch_dims": 0}, [table, rows, graph.constant(np.array(0, np.int32))], shape)


def _known(graph: OpGraph, key: Key, stand_ins: Mapping[Key, StandIn]) -> StandIn | None:
    """Shape and type of a constant, or of what stands for one; None for all else."""
    value = graph.constants.get(key)
    return stand_ins.get(key) if value is None else StandIn(value.shape, value.dtype.name)
