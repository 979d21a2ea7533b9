"""Products of a tensor with one matrix are products of two matrices.

A batched product or an Einsum with a second operand that is the same for the whole batch is one large matrix product, with a
reshape (which moves nothing) before and after it. As such it can take its bias and its activation along.
"""

from __future__ import annotations

import math

from msplit.engines.cuda.ir.program import Key, Op, Source

_BATCHED = ("BatchMatMul", "BatchMatMulV2")
_COMPLEX = ("complex64", "complex128")


def flatten_products(source: Source) -> None:
    """Turns such products into Reshape, MatMul, Reshape."""
    for op in list(source.ops.values()):
        if op.attrs.get("T") in _COMPLEX or len(op.inputs) != 2:
            continue
        left, right = op.inputs
        if left not in source.shapes or right not in source.shapes or (op.node, 0) not in source.shapes:
            continue
        if op.op in _BATCHED:
            _flatten_batched(source, op, left, right)
        elif op.op == "Einsum" and right in source.constants:
            _flatten_einsum(source, op, left, right)


def _flatten_batched(source: Source, op: Op, left: Key, right: Key) -> None:
    shape = source.shapes[left]
    if len(shape) < 3 or len(source.shapes[right]) != 2 or op.attrs.get("adj_x"):
        return
    _as_matrices(source, op, left, right, shape[-1], transpose=bool(op.attrs.get("adj_y")))


def _flatten_einsum(source: Source, op: Op, left: Key, right: Key) -> None:
    """``LK,KN->LN``: the contracted labels last in the first operand and first in the second, all labels once."""
    operands, arrow, output = str(op.attrs.get("equation", "")).replace(" ", "").partition("->")
    first, comma, second = operands.partition(",")
    if not arrow or not comma or any(len(set(part)) != len(part) or "." in part for part in (first, second, output)):
        return
    shared = [label for label in first if label in second]
    inner = "".join(shared)
    lead = first[: len(first) - len(inner)]
    tail = second[len(inner) :]
    if not inner or first != lead + inner or second != inner + tail or output != lead + tail or not lead or not tail:
        return
    contracted = math.prod(source.shapes[left][len(lead) :])
    value = source.constants[right]
    _as_matrices(source, op, left, source.constant(value.reshape(contracted, -1)), contracted, transpose=False)


def _as_matrices(source: Source, op: Op, left: Key, right: Key, inner: int, *, transpose: bool) -> None:
    out = source.shapes[op.node, 0]
    columns = source.shapes[right][0 if transpose else 1]
    if not inner or not math.prod(out):
        return
    rows = math.prod(out) // columns
    narrow = source.add("Reshape", op, {}, [left, source.sizes((rows, inner))], (rows, inner))
    attrs = {"T": op.attrs.get("T"), "transpose_a": False, "transpose_b": transpose}
    product = source.add("MatMul", op, attrs, [(narrow.node, 0), right], (rows, columns))
    product.covers = op.covers
    op.op, op.attrs, op.inputs, op.covers = "Reshape", {}, [(product.node, 0), source.sizes(out)], [op.covers[0]]
