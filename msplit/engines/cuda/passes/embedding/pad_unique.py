"""Distinct ids in sparse gradients, with as many places as there are ids.

Optimizers sum up the rows of an id before they use them: ``y, places = Unique(ids)``, ``sums = UnsortedSegmentSum(rows, places, size)``
with the size of ``y``, and then a row of the variable changes for each of ``y``. How long ``y`` is depends on the ids, so that such a step
could not be captured. `_UniquePadded` gives ``y`` as long as ``ids``, with -1 where an id has come before. That is as good wherever
everything behind it either passes ids of -1 over (`ops.scatter_state`) or does not look at the rows that belong to them. `padding` follows
ids, rows, places and their number from reader to reader; a Unique is left alone if anything else reads them.

In a training graph that looks ids up in a table of several parts, DynamicPartition sends each id to its part. Likewise every part gets as
many as there are ids, -1 in place of those of other parts.

Gradients of sums of rows by segment, which TensorFlow gives for distinct indices (`SparseSegmentSumGradV2`), are the same in one op.

Where all that sums are for is to be added to a variable, the sums themselves are dropped: rows are added one by one.
"""

from __future__ import annotations

import numpy as np

from msplit.engines.cuda.ir.graph import Key, Op, OpGraph
from msplit.engines.cuda.passes.embedding.padding import DISTINCT_GRADS, PARTITION, Walk


def pad_unique(graph: OpGraph) -> bool:
    """Gives each Unique a fixed number of places where that changes no result. Whether there was one."""
    candidates = {number for number, op in graph.ops.items() if _is_candidate(graph, op)}
    while candidates:
        walk = Walk(graph, candidates)
        walk.go()
        if not walk.stuck:
            _change(graph, walk, candidates)
            return True
        candidates -= walk.stuck
    return False


def _is_candidate(graph: OpGraph, op: Op) -> bool:
    if op.op in DISTINCT_GRADS:
        return True
    if op.op == PARTITION:
        return op.attrs.get("T") in ("int32", "int64")
    if op.op.removesuffix("V2") != "Unique" or op.attrs.get("T") not in ("int32", "int64"):
        return False
    axis = graph.constants.get(op.inputs[1]) if op.op == "UniqueV2" else np.zeros(0)
    return axis is not None and axis.reshape(-1).tolist() in ([], [0])


def _change(graph: OpGraph, walk: Walk, candidates: set[int]) -> None:
    names: dict[Key, Key] = {}
    for number in candidates:
        op = graph.ops[number]
        if op.op == PARTITION:
            group = walk.divided[number]
            op.op = "_PartitionPadded"
            op.inputs = [*op.inputs, *([] if group is None else [(int(group[0]), 0)])]
            continue
        if op.op in DISTINCT_GRADS:
            names[number, 1] = _split(graph, op)
            continue
        if number in walk.nonlinear or not walk.summed.get(number):
            op.op, op.inputs = "_UniquePadded", op.inputs[:1]
            continue
        names[number, 0] = op.inputs[0]
        names |= {(total, 0): graph.ops[total].inputs[0] for total in walk.summed[number]}
    for number in walk.lookups:
        op = graph.ops[number]
        dtype = np.dtype(str(op.attrs.get("Tindices", "int64")))
        zero = graph.constant(np.zeros((), dtype))
        op.inputs[1] = graph.add("Maximum", op, {"T": dtype.name}, [op.inputs[1], zero]).out
    for number in walk.reshaped:
        _keep_rows(graph, graph.ops[number])
    for number in walk.stitched:
        graph.ops[number].op = "_StitchPadded"
    graph.rename(names)


def _split(graph: OpGraph, op: Op) -> Key:
    """Lets a gradient for distinct indices be one for their places. Gives the indices, padded."""
    dtype = op.attrs.get("Tidx", "int32")
    distinct = graph.add("_UniquePadded", op, {"T": dtype, "out_idx": "int32"}, [op.inputs[1]])
    count = graph.add("Size", op, {"T": dtype, "out_type": "int32"}, [distinct.out])
    op.op = op.op.removesuffix("V2")
    op.inputs = [op.inputs[0], (distinct.node, 1), op.inputs[2], count.out]
    return distinct.out


def _keep_rows(graph: OpGraph, op: Op) -> None:
    """Tells a Reshape how many rows there are: should it make more or less of them, it is refused."""
    inner = graph.constants[op.inputs[1]][1:].astype(np.int32)
    bounds = [graph.constant(np.array([one], np.int32)) for one in (0, 1, 1)]
    shape = graph.add("Shape", op, {"T": str(op.attrs.get("T", "float32")), "out_type": "int32"}, op.inputs[:1])
    count = graph.add("StridedSlice", op, {"T": "int32", "Index": "int32"}, [shape.out, *bounds])
    axis, attrs = graph.constant(np.array(0, np.int32)), {"T": "int32", "Tidx": "int32", "N": 2}
    op.inputs[1] = graph.add("ConcatV2", op, attrs, [count.out, graph.constant(inner), axis]).out
