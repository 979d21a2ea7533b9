"""True classes among those that were drawn, with as many places as there are true classes.

Sampled softmax takes those out of the classes that were drawn: ``rows, places, weights = ComputeAccidentalHits(true, drawn)``, and adds the
dense matrix of the weights. How many there are depends on values. Padded, there is one for every true class, at place -1 where it was not
drawn; such a matrix passes that over.
"""

from __future__ import annotations

from msplit.engines.cuda.ir.graph import Key, Op, OpGraph, reached
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
