"""Products of a tensor with one matrix are products of two matrices.

A batched product or an Einsum with a second operand that is the same for the whole batch is one large matrix product, with a
reshape (which moves nothing) before and after it. As such it can take its bias and its activation along. So is a convolution of images of
one pixel, such as the two of a squeeze-and-excite block; it has taken along what only convolutions do before it becomes one.
"""

from __future__ import annotations

import math

from msplit.engines.cuda.ir.graph import Key, Op, OpGraph
from msplit.engines.cuda.passes.pattern import FLOATS, become_reshape, offered
from msplit.opset.traits import BATCH_MATMULS, EPILOGUE_STEPS

_COMPLEX = ("complex64", "complex128")


def flatten_matmul(graph: OpGraph) -> bool:
    """Turns such products into Reshape, MatMul, Reshape."""
    return offered(graph, lambda op: _flatten(graph, op))


def _flatten(graph: OpGraph, op: Op) -> bool:
    if op.attrs.get("T") in _COMPLEX or len(op.inputs) != 2 or not {*op.inputs, op.out} <= graph.shapes.keys():
        return False
    left, right = op.inputs
    if op.op == "Einsum" and right in graph.constants:
        return _flatten_einsum(graph, op, left, right)
    shape = graph.shapes[left]
    of_one_matrix = len(shape) >= 3 and len(graph.shapes[right]) == 2 and not op.attrs.get("adj_x")
    if op.op not in BATCH_MATMULS or not of_one_matrix:
        return False
    return _as_matrices(graph, op, left, right, shape[-1], transpose=bool(op.attrs.get("adj_y")))


def _flatten_einsum(graph: OpGraph, op: Op, left: Key, right: Key) -> bool:
    """``LK,KN->LN``: the contracted labels last in the first operand and first in the second, all labels once."""
    operands, arrow, output = str(op.attrs.get("equation", "")).replace(" ", "").partition("->")
    first, comma, second = operands.partition(",")
    if not arrow or not comma or any(len(set(part)) != len(part) or "." in part for part in (first, second, output)):
        return False
    shared = [label for label in first if label in second]
    inner = "".join(shared)
    lead = first[: len(first) - len(inner)]
    tail = second[len(inner) :]
    if not inner or first != lead + inner or second != inner + tail or output != lead + tail or not lead or not tail:
        return False
    contracted = math.prod(graph.shapes[left][len(lead) :])
    value = graph.constants[right]
    return _as_matrices(graph, op, left, graph.constant(value.reshape(contracted, -1)), contracted, transpose=False)


def flatten_convolution(graph: OpGraph) -> bool:
    """Turns convolutions of images of one pixel, with a bias and an activation or without, into Reshape, product, Reshape."""

    def flatten(op: Op) -> bool:
        if op.op.removeprefix("_Fused") != "Conv2D" or not is_of_one_pixel(graph, op):
            return False
        filter = graph.constants[op.inputs[1]]
        matrix = graph.constant(filter.reshape(filter.shape[2:]))
        return _as_matrices(graph, op, op.inputs[0], matrix, filter.shape[2], transpose=False)

    return offered(graph, flatten)


def is_of_one_pixel(graph: OpGraph, op: Op) -> bool:
    """Checks if a convolution is a product of matrices: images of one pixel, seen through a window of one. Through explicit padding it may
    see nothing of them."""
    left, right = op.inputs[:2]
    if right not in graph.constants or left not in graph.shapes or op.attrs.get("T") not in FLOATS:
        return False
    data, filter = graph.shapes[left], graph.constants[right]
    alone = str(op.attrs.get("padding")) != "EXPLICIT" and op.attrs.get("filter_format", "HWIO") == "HWIO"
    first, *steps = op.attrs.get("fused_ops", ("BiasAdd",))
    alone = alone and first == "BiasAdd" and EPILOGUE_STEPS.isdisjoint(steps)
    return alone and filter.shape[:2] == (1, 1) and math.prod(data) == data[0] * filter.shape[2]


_FUSED = ("fused_ops", "num_args", "leakyrelu_alpha")
"""Attributes of what rides on a convolution or on a product."""


def _as_matrices(graph: OpGraph, op: Op, left: Key, right: Key, inner: int, *, transpose: bool) -> bool:
    """The product of two of an op's inputs, the second perhaps laid out anew, with its further inputs where something rides on it."""
    out = graph.shapes[op.node, 0]
    columns = graph.shapes[right][0 if transpose else 1]
    if not inner or not math.prod(out):
        return False
    rows = math.prod(out) // columns
    narrow = graph.add("Reshape", op, {}, [left, graph.sizes((rows, inner))], (rows, inner))
    attrs = {"T": op.attrs.get("T"), "transpose_a": False, "transpose_b": transpose}
    attrs |= {name: op.attrs[name] for name in _FUSED if name in op.attrs}
    name = "_FusedMatMul" if "fused_ops" in attrs else "MatMul"
    product = graph.add(name, op, attrs, [narrow.out, right, *op.inputs[2:]], (rows, columns))
    product.source_nodes = op.source_nodes
    become_reshape(graph, op, product.out)
    return True
