"""Rows that are the same in a whole step, such as those of one user beside many items: what is made of them alone is computed once.

The graph is specialized twice: to all rows, and to one row of each input. What depends on shared inputs and on constants alone is taken
from the second one. Where other ops read it, it is broadcast, which is a view; ops on single elements read it as it is, and a product of
values side by side becomes a sum of products: ``[u, i] · W = u · W_u + i · W_i``, of which the first has one row and is a bias.

That is right where rows are independent, which the caller has proved: then each row of a value is the same function of its own row. A value
that is not the one row of the small graph, repeated along one axis, is computed for all rows as before.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.engines.cuda.ir.graph import Key, Op, OpGraph, Shape, known, mutated, require
from msplit.engines.cuda.ir.lowering import table
from msplit.engines.cuda.passes import pattern
from msplit.opset.traits import BATCH_MATMULS, BIASES, ops_with

_BROADCASTS = ops_with("broadcasts") | {"SelectV2"}
_PLACED = re.compile("_|Where|Sparse|Ragged|Unique|Dynamic|(Tensor)?Scatter|(Unsorted)?Segment|Cum")
"""Beginnings of the names of ops that are not shared, whatever they read: those that draw numbers, and those of which rows may get their
own number."""
_MATRICES = 2
_REPEATS = "_repeats"
"""Attribute of what broadcasts one row."""


def share_rows(graph: OpGraph, small: OpGraph, shared: Collection[str]) -> bool:
    """Computes what depends on some inputs alone for one row. True if there is anything.

    Args:
        graph: Specialized to all rows.
        small: The same graph, specialized to one row of every input that has rows.
        shared: Names of the inputs.
    """
    fed = {graph.feeds[name] for name in shared if name in graph.feeds and name in small.feeds}
    banned = set[int]()
    while True:
        once = _once(graph, small, fed, banned)
        read = dict(_read_outside(graph, once, fed))
        wrong = {key for key in read if not _repeats(small.shape(key), graph.shape(key))}
        wrong |= fed.intersection(graph.fetches.values())
        if not wrong:
            break
        fed -= wrong
        banned |= {key[0] for key in wrong}
    if not fed:
        return False
    wide = {key: known(graph.shape(key)) for key in read}
    for number in once:
        _shrink(graph, small, number)
    for key in fed:
        graph.shapes[key] = known(small.shape(key))
    spread = {key: _spread(graph, key, like, wide[key]) for key, like in read.items()}
    for number, op in graph.ops.items():
        if number not in once and not op.attrs.get(_REPEATS):
            op.inputs = [spread.get(key, key) for key in op.inputs]
    graph.fetches = {name: spread.get(key, key) for name, key in graph.fetches.items()}
    graph.sort()
    pattern.offered(graph, lambda op: _reads_narrow(graph, op))
    return True


def split_products(graph: OpGraph) -> bool:
    """Makes sums of products where some of what is multiplied is the same in all rows. True if there is anything."""
    if not any(op.attrs.get(_REPEATS) for op in graph.ops.values()):
        return False
    readers = pattern.Readers(graph)
    return pattern.offered(graph, lambda op: _split_product(graph, readers, op))


def _once(graph: OpGraph, small: OpGraph, fed: Collection[Key], banned: Collection[int]) -> set[int]:
    """Ops that read shared values and constants alone, and are the same ops in the small graph."""
    found = set[int]()
    for number, op in graph.ops.items():
        read = [key for key in op.inputs if key not in graph.constants]
        if not read or number in banned or _PLACED.match(op.op) or mutated(op):
            continue
        if all(key in fed or key[0] in found for key in read) and _alike(graph, small, op):
            found.add(number)
    return found


def _alike(graph: OpGraph, small: OpGraph, op: Op) -> bool:
    other = small.ops.get(op.node)
    if other is None or other.op != op.op or len(other.inputs) != len(op.inputs):
        return False
    if any(one != two and one not in graph.constants for one, two in zip(op.inputs, other.inputs, strict=True)):
        return False
    # A constant that goes with the number of rows may hold the rows' numbers, unless it is read as a shape.
    static = table()[op.op].static
    for slot, (key, taken) in enumerate(zip(op.inputs, other.inputs, strict=True)):
        if key in graph.constants and (
            taken not in small.constants
            or (slot not in static and not _equal(graph.constants[key], small.constants[taken]))
        ):
            return False
    outputs = [(op.node, port) for port in range(graph.ports(op.node))]
    return bool(outputs) and all(key in graph.shapes and key in small.shapes for key in outputs)


def _equal(one: NDArray[Any], other: NDArray[Any]) -> bool:
    return one is other or np.array_equal(one, other)


def _read_outside(graph: OpGraph, once: Collection[int], fed: Collection[Key]) -> Iterator[tuple[Key, Op]]:
    """Shared values that other ops read, or that are wanted in the end, each with an op near it."""
    for number, op in graph.ops.items():
        if number not in once:
            yield from ((key, op) for key in op.inputs if key in fed or key[0] in once)
    for key in graph.fetches.values():
        if key[0] in once:
            yield key, graph.ops[key[0]]


def _repeats(one: Shape | None, every: Shape | None) -> bool:
    """Whether a shape is another one in which an axis of one row has all of them."""
    if one is None or every is None or len(one) != len(every):
        return False
    differ = [axis for axis, (few, many) in enumerate(zip(one, every, strict=True)) if few != many]
    return len(differ) == 1 and one[differ[0]] == 1


def _shrink(graph: OpGraph, small: OpGraph, number: int) -> None:
    """Takes an op as the small graph has it."""
    op, other = graph.ops[number], small.ops[number]
    op.attrs = dict(other.attrs)
    for slot, (key, taken) in enumerate(zip(op.inputs, other.inputs, strict=True)):
        if key in graph.constants:
            value = small.constants[taken]
            if not _equal(value, graph.constants[key]):
                op.inputs[slot] = graph.constant(value)
    for port in range(graph.ports(number)):
        graph.shapes[number, port] = small.shapes[number, port]


def _spread(graph: OpGraph, key: Key, like: Op, shape: Shape) -> Key:
    """The value for all rows."""
    attrs = {"T": graph.dtype(key), "Tidx": "int64", _REPEATS: True}
    return graph.add("BroadcastTo", like, attrs, [key, graph.sizes(shape)], shape, graph.dtype(key)).out


def _narrow(graph: OpGraph, key: Key) -> Key | None:
    """What a value repeats for all rows; None where it does not."""
    op = graph.ops.get(key[0])
    return op.inputs[0] if op is not None and op.attrs.get(_REPEATS) else None


def _reads_narrow(graph: OpGraph, op: Op) -> bool:
    """Has an op on single elements, or on pairs of matrices, read one row, where the others make the shape."""
    require(op.op in _BROADCASTS or op.op in BATCH_MATMULS)
    inputs = [_narrow(graph, key) or key for key in op.inputs]
    require(inputs != op.inputs)
    end = -_MATRICES if op.op in BATCH_MATMULS else None
    shapes = [known(graph.shape(key))[:end] for key in inputs]
    require(np.broadcast_shapes(*shapes) == known(graph.shape(op.out))[:end])
    op.inputs = inputs
    return True


def _split_product(graph: OpGraph, readers: pattern.Readers, op: Op) -> bool:
    """Multiplies what is the same in all rows by itself, and adds it to the rest: as a bias, together with the bias that is there, where it
    is one vector."""
    require(op.op == "MatMul" and not op.attrs.get("transpose_a") and not op.attrs.get("transpose_b"))
    left, right = op.inputs
    weights, parts = known(graph.constants.get(right)), graph.ops.get(left[0])
    if parts is not None and parts.op == "Reshape":  # matrices that lie one behind the other
        left = parts.inputs[0]
        parts = graph.ops.get(left[0])
    require(parts is not None and parts.op == "ConcatV2" and weights.ndim == _MATRICES)
    assert parts is not None
    shape, axis, values = known(graph.shape(left)), graph.constants.get(parts.inputs[-1]), parts.inputs[:-1]
    require(axis is not None and int(axis) % len(shape) == len(shape) - 1 and weights.shape[0] == shape[-1])
    narrow = [_narrow(graph, key) for key in values]
    require(any(narrow) and not all(narrow))
    fewer = {known(graph.shape(key))[:-1] for key in narrow if key is not None}
    require(len(fewer) == 1)
    widths = [known(graph.shape(key))[-1] for key in values]
    rows = np.split(weights, list(accumulate(widths))[:-1])
    dtype, width, attrs = graph.dtype(op.out), weights.shape[1], {"T": op.attrs.get("T")}

    def product(shared: bool, before: Shape) -> Key:
        """Of the parts that are shared, or of the others: a matrix."""
        taken = [place for place, one in enumerate(narrow) if bool(one) == shared]
        made, size = narrow[taken[0]] or values[taken[0]], sum(widths[place] for place in taken)
        if len(taken) > 1:
            last = graph.constant(np.asarray(len(shape) - 1, np.int32))
            keys = [*(narrow[place] or values[place] for place in taken), last]
            made = graph.add("ConcatV2", op, dict(parts.attrs), keys, (*before, size), dtype).out
        made = reshaped(made, (math.prod(before), size))
        part = graph.constant(np.concatenate([rows[place] for place in taken]))
        return graph.add("MatMul", op, dict(op.attrs), [made, part], (math.prod(before), width), dtype).out

    def reshaped(key: Key, wanted: Shape) -> Key:
        if graph.shape(key) == wanted:
            return key
        return graph.add("Reshape", op, dict(attrs), [key, graph.sizes(wanted)], wanted, dtype).out

    few = fewer.pop()
    one, rest = product(True, few), product(False, shape[:-1])
    if math.prod(few) > 1:
        terms = [reshaped(rest, (*shape[:-1], width)), reshaped(one, (*few, width))]
        total = graph.add("AddV2", op, dict(attrs), terms, (*shape[:-1], width), dtype).out
        op.op, op.attrs, op.inputs = "Reshape", attrs, [total, graph.sizes(graph.shapes[op.out])]
        return True
    vector, last = reshaped(one, (width,)), readers.only(op.out)
    if last is not None and last.op in BIASES and last.inputs[0] == op.out and last.inputs[1] in graph.constants:
        vector = graph.add("AddV2", last, dict(attrs), [vector, last.inputs[1]], (width,), dtype).out
        graph.drop([op])
        op = last
    op.op, op.attrs, op.inputs = "BiasAdd", {**attrs, "data_format": "NHWC"}, [rest, vector]
    return True
