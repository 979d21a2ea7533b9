"""A lookup in a table that is kept in parts becomes a lookup in the whole table.

TensorFlow 1 looks ids up in a partitioned variable by sending each id to its part (DynamicPartition), one gather per part, and putting
the rows back in order (DynamicStitch). How many ids a part gets depends on their values, so such a graph can not be captured. With the
parts one below the other, row ``new_id`` of part p is row ``start[p] + new_id`` of the whole: one gather, whose shape is known.
"""

from __future__ import annotations

import numpy as np

from msplit.engines.cuda.ir.graph import Key, Op, OpGraph
from msplit.opset.traits import GATHERS, ops_with

_STITCHES = ops_with("stitch")
_VECTOR = 1


def fold_partition(graph: OpGraph) -> bool:
    """Joins every such lookup. Whether there was one: shapes behind it are then to be inferred again."""
    found = False
    for op in list(graph.ops.values()):
        if op.op in _STITCHES:
            found = _join(graph, op) or found
    return found


def _join(graph: OpGraph, stitch: Op) -> bool:
    count = len(stitch.inputs) // 2
    order = _parts_of(graph, stitch.inputs[:count])
    gathers = [graph.ops.get(key[0]) for key in stitch.inputs[count:]]
    lookups = [op for op in gathers if op is not None and _is_lookup(graph, op)]
    if order is None or len(lookups) != count:
        return False
    ids = _parts_of(graph, [op.inputs[1] for op in lookups])
    shape = graph.shapes.get(ids.inputs[0]) if ids is not None else None
    if ids is None or shape is None or len(shape) != _VECTOR or ids.inputs[1] != order.inputs[1]:
        return False
    places = graph.constants.get(order.inputs[0])
    if places is None or places.tolist() != list(range(shape[0])):
        return False
    tables = [graph.constants[op.inputs[0]] for op in lookups]
    if len({(table.dtype.name, table.shape[1:]) for table in tables}) != 1:
        return False
    dtype = np.dtype(str(ids.attrs.get("T", "int64")))
    starts = np.cumsum([0, *(len(table) for table in tables[:-1])]).astype(dtype)
    whole = np.concatenate(tables)
    start = _gather(graph, stitch, graph.constant(starts), ids.inputs[1], shape)
    row = graph.add("AddV2", stitch, {"T": dtype.name}, [ids.inputs[0], (start.node, 0)], shape)
    source_nodes = [node for op in (stitch, *lookups, ids, order) for node in op.source_nodes]
    result = _gather(graph, stitch, graph.constant(whole), (row.node, 0), (*shape, *whole.shape[1:]))
    stitch.op, stitch.attrs, stitch.inputs, stitch.source_nodes = result.op, result.attrs, result.inputs, source_nodes
    graph.shapes[stitch.node, 0] = graph.shapes[result.node, 0]
    del graph.ops[result.node]
    return True


def _parts_of(graph: OpGraph, keys: list[Key]) -> Op | None:
    """The DynamicPartition that gives all of these values, in its order."""
    op = graph.ops.get(keys[0][0]) if keys else None
    if op is None or op.op != "DynamicPartition" or int(op.attrs.get("num_partitions", 0)) != len(keys):
        return None
    return op if keys == [(op.node, port) for port in range(len(keys))] else None


def _is_lookup(graph: OpGraph, op: Op) -> bool:
    """Whether an op takes rows of a constant table."""
    if op.op not in GATHERS or op.inputs[0] not in graph.constants or op.attrs.get("batch_dims", 0):
        return False
    axis = graph.constants.get(op.inputs[2]) if op.op == "GatherV2" else np.int32(0)
    return axis is not None and int(axis) == 0 and graph.constants[op.inputs[0]].ndim > 0


def _gather(graph: OpGraph, like: Op, table: Key, rows: Key, shape: tuple[int, ...]) -> Op:
    return graph.add("GatherV2", like, {"batch_dims": 0}, [table, rows, graph.constant(np.array(0, np.int32))], shape)
