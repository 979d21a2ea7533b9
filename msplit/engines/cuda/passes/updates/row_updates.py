"""Updates of rows of many tables as one op, which finds distinct ids and sums their rows up itself: one kernel on a GPU.

A model with fifty embedding columns has fifty tables, each with a Unique, a sum by segment and an update of a few rows, which take longer
to be launched than to run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from msplit.engines.cuda.ir.graph import Key, Op, OpGraph
from msplit.engines.cuda.ops.optimizers import ROW_OPTIMIZERS
from msplit.engines.cuda.passes.updates.merge_updates import LARGEST, Update, merge
from msplit.opset.traits import SPARSE_SEGMENTS

ROWS, DISTINCT = "_ApplyRows", "_UniquePadded"

_COMBINERS = {f"{op}Grad": op.removeprefix("SparseSegment").lower() for op in SPARSE_SEGMENTS}
"""Gradients of rows put together by segment, and how these were put together."""


def sum_in_updates(graph: OpGraph) -> bool:
    """Lets updates by the sums of rows of distinct ids take the rows and the ids as they are. Whether there was one."""
    changed = _sum_single_rows(graph)
    changed |= _keep_distinct(graph)
    for op in graph.ops.values():
        if op.op not in ROW_OPTIMIZERS:
            continue
        variables, numbers, rows, ids = ROW_OPTIMIZERS[op.op].parts(op.inputs)
        made, unique = graph.ops.get(rows[0]), graph.ops.get(ids[0])
        if made is None or unique is None or unique.op != DISTINCT or ids[1]:
            continue
        if _sums(graph, made, (unique.node, 1), graph.shape(ids)):
            rows, ids = made.inputs[0], unique.inputs[0]
        elif made.op not in _COMBINERS or made.inputs[1] != (unique.node, 1):
            continue
        op.source_nodes = list(dict.fromkeys([*op.source_nodes, *made.source_nodes, *unique.source_nodes]))
        _become_rows(op, [*variables, *numbers, rows, ids])
        _take_segments(graph, op)
        changed = True
    return changed


def _sum_single_rows(graph: OpGraph) -> bool:
    """Gradients of segments of one row each are sums of the segments' own, however the rows were put together."""
    changed = False
    for op in graph.ops.values():
        segments = graph.constants.get(op.inputs[2]) if op.op in _COMBINERS else None
        given = graph.shape(op.inputs[0])
        if segments is None or given is None or not np.array_equal(segments, np.arange(given[0])):
            continue
        grad, places, _, count = op.inputs
        attrs = {"T": op.attrs["T"], "Tindices": op.attrs.get("Tidx", "int32"), "Tnumsegments": "int32"}
        op.op, op.inputs, op.attrs = "UnsortedSegmentSum", [grad, places, count], attrs
        changed = True
    return changed


def _keep_distinct(graph: OpGraph) -> bool:
    """Takes ids that are distinct already for what they are, and their rows for their sums."""
    names: dict[Key, Key] = {}
    readers = graph.consumers()
    for number, op in graph.ops.items():
        before = graph.ops.get(op.inputs[0][0]) if op.op == DISTINCT else None
        if before is None or before.op != DISTINCT or op.inputs[0][1] or (number, 1) in graph.kept():
            continue
        users = [graph.ops[reader] for reader in readers.get((number, 1), ())]
        count = graph.shape(op.inputs[0])
        if all(_sums(graph, user, (number, 1), count) for user in users):
            names[number, 0] = op.inputs[0]
            names |= {(user.node, 0): user.inputs[0] for user in users}
    graph.rename(names)
    return bool(names)


def _sums(graph: OpGraph, op: Op, places: Key, count: tuple[int, ...] | None) -> bool:
    """Whether an op sums up rows by places, of which there are so many."""
    given = graph.constants.get(op.inputs[-1])
    return op.op == "UnsortedSegmentSum" and op.inputs[1] == places and given is not None and (int(given),) == count


def _take_segments(graph: OpGraph, op: Op) -> None:
    """Where the rows are a gradient of segments, for the distinct ids, lets an update take that gradient, all ids and their segments."""
    *before, rows, ids = op.inputs
    grad, unique = graph.ops.get(rows[0]), graph.ops.get(ids[0])
    if grad is None or grad.op not in _COMBINERS or unique is None or unique.op != DISTINCT:
        return
    given, places, segments, _ = grad.inputs
    types = {_type(graph, key) for key in (unique.inputs[0], segments)}
    if ids[1] or places != (unique.node, 1) or len(types) != 1 or graph.shape(segments) != graph.shape(ids):
        return
    op.inputs = [*before, given, unique.inputs[0], segments]
    op.attrs["combiner"] = _COMBINERS[grad.op]
    op.source_nodes = list(dict.fromkeys([*op.source_nodes, *grad.source_nodes, *unique.source_nodes]))


def _become_rows(op: Op, inputs: list[Key]) -> None:
    variables = ROW_OPTIMIZERS[op.op].variables
    op.attrs = {**op.attrs, "op": op.op, "count": 1, "summed": True, "_mutates": tuple(range(variables))}
    op.op, op.inputs = ROWS, inputs


def merge_row_updates(graph: OpGraph) -> bool:
    """Joins updates of rows of one kind: see `merge_updates.merge`."""
    return merge(graph, ROWS, _of_rows, read=True)


def _of_rows(graph: OpGraph, op: Op) -> Update | None:
    if op.op == ROWS and op.attrs["count"] == 1:
        name, own = op.attrs["op"], 3 if op.attrs.get("combiner") else 2
        count = ROW_OPTIMIZERS[name].variables
        given = op.inputs[-own:]
        variables: Sequence[Key] = op.inputs[:count]
        numbers = op.inputs[count:-own]
    elif op.op in ROW_OPTIMIZERS:
        name = op.op
        variables, numbers, *given = ROW_OPTIMIZERS[name].parts(op.inputs)
    else:
        return None
    rows, table, ids = (graph.shape(key) for key in (given[0], variables[0], given[1]))
    if rows is None or table is None or ids is None or len(ids) != 1 or rows[1:] != table[1:]:
        return None
    if (len(given) == 2 and rows[:1] != ids) or math.prod((*ids, *table[1:])) > LARGEST:
        return None
    types = tuple(_type(graph, key) for key in (variables[0], *given))
    return Update(op, name, variables, numbers, given, {"summed": False, **op.attrs}, types)


def _type(graph: OpGraph, key: Key) -> str | None:
    return graph.constants[key].dtype.name if key in graph.constants else graph.dtypes.get(key)
