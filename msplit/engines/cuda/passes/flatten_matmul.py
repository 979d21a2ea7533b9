"""Products of a tensor with one matrix are products of two matrices.

A batched product or an Einsum with a second operand that is the same for the whole batch is one large matrix product, with a
reshape (which moves nothing) before and after it. As such it can take its bias and its activation along.
"""

from __future__ import annotations

import math

from msplit.engines.cuda.ir.graph import Key, Op, OpGraph
from msplit.engines.cuda.passes.pattern import become_reshape
from msplit.opset.traits import BATCH_MATMULS

_COMPLEX = ("complex64", "complex128")


def flatten_matmul(graph: OpGraph) -> bool:
    """Turns such products into Reshape, MatMul, Reshape."""
    changed = False
    for op in list(graph.ops.values()):
        if op.attrs.get("T") in _COMPLEX or len(op.inputs) != 2:
            continue
        left, right = op.inputs
        if left not in graph.shapes or right not in graph.shapes or (op.node, 0) not in graph.shapes:
            continue
        if op.op in BATCH_MATMULS:
            changed |= _flatten_batched(graph, op, left, right)
        elif op.op == "Einsum" and right in graph.constants:
            changed |= _flatten_einsum(graph, op, left, right)
    return changed


def _flatten_batched(graph: OpGraph, op: Op, left: Key, right: Key) -> bool:
    shape = graph.shapes[left]
    if len(shape) < 3 or len(graph.shapes[right]) != 2 or op.attrs.get("adj_x"):
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


def _as_matrices(graph: OpGraph, op: Op, left: Key, right: Key, inner: int, *, transpose: bool) -> bool:
    out = graph.shapes[op.node, 0]
    columns = graph.shapes[right][0 if transpose else 1]
    if not inner or not math.prod(out):
        return False
    rows = math.prod(out) // columns
    narrow = graph.add("Reshape", op, {}, [left, graph.sizes((rows, inner))], (rows, inner))
    attrs = {"T": op.attrs.get("T"), "transpose_a": False, "transpose_b": transpose}
    product = graph.add("MatMul", op, attrs, [(narrow.node, 0), right], (rows, columns))
    product.source_nodes = op.source_nodes
    become_reshape(graph, op, (product.node, 0))
    return True
