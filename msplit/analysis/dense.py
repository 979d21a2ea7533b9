"""Which values of unknown shape are dense all the same: the cuda engine proves it before it runs, and nothing of them is a guess to it.

What `tf.feature_column` makes of a bucketized column is a sparse tensor's life (`Where`, `SparseFillEmptyRows`, `Unique`,
`SparseSegmentMean`), whose shapes depend on values as far as shape inference can see. But every row has its ids: buckets are never
negative, and the coordinates are made of constants and shapes. This finds that pattern in one pass over the graph, without the arrays
that the engine's own proof works on (`engines.cuda.passes.embedding`, which knows more); tests hold the two together.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.core.graph import CONTROL, Graph, TensorValue
from msplit.errors import LoadError
from msplit.opset.traits import ops_with
from msplit.shapes import Shapes
from msplit.shapes.registry import known

Mask = NDArray[np.bool_]

_SHAPE_OF = ops_with("shape of")
_PASS = ops_with("keeps coordinates")
_GATHERS = (ops_with("gather") | ops_with("gather nd")) - ops_with("reads by handle")
_NOT_NEGATIVE = ops_with("not negative")
_BY_VALUE, _FOLLOWING = ops_with("dynamic"), ops_with("dense if its input is")
_LOWER_BOUNDS = ops_with("lower bound")


def proved(graph: Graph, shapes: Shapes) -> Mask:
    """Per node, whether its shapes are known or proved dense. Linear."""
    fixed, positive = _fixed(graph), _not_negative(graph)
    ops, outputs = graph.ops, shapes.outputs
    result = [False] * len(graph)
    grid = fixed.tolist()  # coordinates that no value decides: fixed, or all of the fixed ones taken in order
    for node in graph.topological.tolist():
        if all(known(shape) for shape in outputs[node]):
            result[node] = True
            continue
        sources = [source for source, _ in graph.inputs(node)]
        op = ops[node]
        if not sources or not all(result[source] for source in sources):
            continue
        if op == "Where":
            result[node] = grid[node] = _always(graph, sources[0], positive)
        elif op in _GATHERS:
            result[node] = True
            grid[node] = all(grid[source] for source in sources)
        elif op in _PASS:
            result[node] = True
            grid[node] = grid[sources[0]]
        elif op == "SparseFillEmptyRows":
            result[node] = grid[node] = grid[sources[0]]
        elif op not in _BY_VALUE or op in _FOLLOWING:
            # It hands on what it is given, unless it makes a shape up by itself.
            result[node] = any(not known(shapes.shape(source, port)) for source, port in graph.inputs(node))
    return np.asarray(result, np.bool_)


def _fixed(graph: Graph) -> Mask:
    """Nodes that are made of constants and of shapes only."""
    edges = graph.edges
    result = np.zeros(len(graph), np.bool_)
    for node in graph.topological.tolist():
        op = graph.ops[node]
        if op in _SHAPE_OF:
            result[node] = True
            continue
        first, last = int(graph.in_start[node]), int(graph.in_start[node + 1])
        data = [int(edges.src[edge]) for edge in range(first, last) if edges.port[edge] != CONTROL]
        result[node] = op == "Const" or (bool(data) and all(result[source] for source in data))
    return result


def _not_negative(graph: Graph) -> Mask:
    """Nodes whose elements are integers of at least 0, whatever is fed."""
    result = np.zeros(len(graph), np.bool_)
    for node in graph.topological.tolist():
        op = graph.ops[node]
        sources = [source for source, _ in graph.inputs(node)]
        if op == "Const":
            constant = _constant(graph, node)
            result[node] = constant is not None and bool((constant >= 0).all())
        elif op in _PASS or op in _GATHERS:
            result[node] = bool(sources) and result[sources[0]]
        elif op in _NOT_NEGATIVE:
            result[node] = bool(sources) and all(result[source] for source in sources)
        else:
            result[node] = op == "Bucketize" or op in _SHAPE_OF
    return result


def _constant(graph: Graph, node: int) -> NDArray[Any] | None:
    """The elements of a small constant of integers; weights are not decoded."""
    value = graph.attrs[node].get("value")
    if graph.ops[node] != "Const" or not isinstance(value, TensorValue) or "int" not in value.dtype:
        return None
    if not 0 < math.prod(value.shape) <= _SMALL:
        return None
    try:
        return value.load()
    except LoadError:  # a damaged file may have anything in its place
        return None


_SMALL = 4096
"""Elements of a constant that is looked at."""


def _always(graph: Graph, node: int, positive: Mask) -> bool:
    """Whether a condition is true for every element, whatever is fed."""
    waiting = [node]
    while waiting:
        at = waiting.pop()
        op, sources = graph.ops[at], [source for source, _ in graph.inputs(at)]
        if op == "LogicalAnd" or op in _PASS:
            waiting += sources if op == "LogicalAnd" else sources[:1]
        elif op in _LOWER_BOUNDS and len(sources) == 2 and positive[sources[0]]:
            limit = _constant(graph, sources[1])
            if limit is None or not bool((limit <= 0 if op == "GreaterEqual" else limit < 0).all()):
                return False
        else:
            return False
    return True
