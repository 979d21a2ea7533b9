"""Results with a fixed number of places, where TensorFlow's have as many as are found: distinct ids, and true classes among drawn ones.

True classes among those that were drawn, with as many places as there are true classes.

Sampled softmax takes those out of the classes that were drawn: ``rows, places, weights = ComputeAccidentalHits(true, drawn)``, and adds the
dense matrix of the weights. How many there are depends on values. Padded, there is one for every true class, at place -1 where it was not
drawn; such a matrix passes that over.

Distinct ids in sparse gradients, with as many places as there are ids.

Optimizers sum up the rows of an id before they use them: ``y, places = Unique(ids)``, ``sums = UnsortedSegmentSum(rows, places, size)``
with the size of ``y``, and then a row of the variable changes for each of ``y``. How long ``y`` is depends on the ids, so that such a step
could not be captured. `_UniquePadded` gives ``y`` as long as ``ids``, with -1 where an id has come before. That is as good wherever
everything behind it either passes ids of -1 over (`ops.variables`) or does not look at the rows that belong to them. `padding` follows
ids, rows, places and their number from reader to reader; a Unique is left alone if anything else reads them.

In a training graph that looks ids up in a table of several parts, DynamicPartition sends each id to its part. Likewise every part gets as
many as there are ids, -1 in place of those of other parts.

Gradients of sums of rows by segment, which TensorFlow gives for distinct indices (`SparseSegmentSumGradV2`), are the same in one op.

Where all that sums are for is to be added to a variable, the sums themselves are dropped: rows are added one by one.
"""

from __future__ import annotations

import numpy as np

from msplit.core.dag import reached
from msplit.engines.cuda.ir.graph import Key, Op, OpGraph
from msplit.engines.cuda.passes.embedding.padding import DISTINCT_GRADS, PARTITION, Walk
from msplit.opset.traits import ops_with

_HITS = "ComputeAccidentalHits"
_DENSE = "SparseToDense"
_JOIN = "ConcatV2"
_SHAPED = ops_with("reshape")
_COLUMNS = ops_with("identity") | _SHAPED | {"Cast"}
"""Ops that a vector goes through to be a column of indices."""


def pad_hits(graph: OpGraph) -> bool:
    """Gives each a fixed number of places where nothing but dense matrices is made of them. Whether there was one."""
    readers, kept = graph.consumers(), graph.kept()
    changed = False
    for number, op in graph.ops.items():
        if op.op == _HITS and not op.attrs.get("padded"):
            matrices = {user for user in readers.get((number, 2), ()) if _is_matrix(graph, graph.ops[user], number)}
            if matrices and _only_read_by(graph, number, matrices, readers, kept):
                op.attrs["padded"] = changed = True
    return changed


def _is_matrix(graph: OpGraph, op: Op, hits: int) -> bool:
    """Returns whether an op puts the weights at their rows and places into a matrix."""
    join = graph.ops.get(op.inputs[0][0])
    if op.op != _DENSE or op.inputs[2] != (hits, 2) or join is None or join.op != _JOIN or len(join.inputs) != 3:
        return False
    axis = graph.constants.get(join.inputs[2])
    columns = [_column_of(graph, key) for key in join.inputs[:2]]
    return axis is not None and int(axis) == 1 and columns == [(hits, 0), (hits, 1)]


def _column_of(graph: OpGraph, key: Key) -> Key | None:
    """The vector that a column is."""
    shaped = 0
    while (op := graph.ops.get(key[0])) is not None and op.op in _COLUMNS:
        if op.op in _SHAPED:
            to = graph.constants.get(op.inputs[-1])
            if len(op.inputs) != 2 or to is None or to.reshape(-1).tolist() not in ([-1, 1], [1]):
                return None
            shaped += 1
        key = op.inputs[0]
    return key if shaped == 1 else None


def _only_read_by(graph: OpGraph, hits: int, matrices: set[int], readers: dict[Key, list[int]], kept: set[Key]) -> bool:
    """Returns whether nothing else reads hits, or what is made of them on the way."""

    def others(key: Key) -> list[Op]:
        return [graph.ops[user] for user in readers.get(key, ()) if user not in matrices]

    keys = reached([(hits, port) for port in range(3)], lambda key: [op.out for op in others(key)])
    pairs = ((key, op) for key in keys for op in others(key))
    passes = all(op.op == _JOIN or (op.op in _COLUMNS and key == op.inputs[0]) for key, op in pairs)
    return passes and kept.isdisjoint(keys)


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
