"""Product or convolution, then bias, then a sum, then an activation: one fused op, as TensorFlow's own optimizer makes it."""

from __future__ import annotations

from typing import Any

import numpy as np

from msplit.engines.cuda.ir.dtypes import numpy_dtype
from msplit.engines.cuda.ir.graph import Key, Op, OpGraph
from msplit.engines.cuda.kernels.activations import LEAKY_ALPHA
from msplit.engines.cuda.passes.canonical.match_rows import match_gelu
from msplit.engines.cuda.passes.pattern import (
    FLOATS,
    Dominators,
    Readers,
    become_reshape,
    channel_axis,
    offered,
    other_input,
)
from msplit.opset.traits import ADD, BIASES, IMAGE_CONVOLUTIONS, RESHAPES, ops_with

_HEADS = IMAGE_CONVOLUTIONS | {"MatMul"}
_ACTIVATIONS = ops_with("activation")
_RANK = 4
_LIBRARY = ("Relu", "GeluApproximate")  # what a product's library has as an epilogue


def fuse_epilogue(graph: OpGraph) -> bool:
    """Fuses every product or convolution with what follows it."""
    readers, dominators = Readers(graph), Dominators(graph)

    def fuse(head: Op) -> bool:
        if head.op not in _HEADS or head.attrs.get("T") not in FLOATS:
            return False  # libraries have no fused kernels of integers
        bias_op = readers.only(head.out)
        if bias_op is not None and not _takes_bias(head, bias_op):
            bias_op = None
        return (bias_op is not None or head.out in graph.shapes) and _fuse(graph, readers, dominators, head, bias_op)

    return offered(graph, fuse)


def _takes_bias(head: Op, op: Op) -> bool:
    if op.op not in BIASES or op.inputs[0] != (head.node, 0):
        return False
    return head.op == "MatMul" or channel_axis(op, _RANK) == channel_axis(head, _RANK)


def _fuse(graph: OpGraph, readers: Readers, dominators: Dominators, head: Op, bias_op: Op | None) -> bool:
    """Fuses one, with its bias or, where it has none and the library's activation needs one, with zeros."""
    fused_ops = ["BiasAdd"]
    absorbed = [] if bias_op is None else [bias_op]  # in order
    key = head.out if bias_op is None else bias_op.out
    side = _side_input(graph, readers, dominators, head, key)
    if side is not None:
        sum_op, _ = side
        fused_ops.append("Add")
        absorbed.append(sum_op)
        key = sum_op.out
    before_reshape = len(absorbed)
    reshapes, key = reshapes_behind(readers, key)
    activation, ops = activation_behind(graph, readers, key)
    if activation is not None:
        fused_ops.append(activation)
        absorbed += [*reshapes, *ops]
    if bias_op is None and activation not in (_LIBRARY if head.op == "MatMul" else ("Relu",)):
        return False
    bias = bias_op.inputs[1] if bias_op is not None else _zeros(graph, head)
    inputs = [*head.inputs, bias, *([side[1]] if side is not None else [])]
    attrs: dict[str, Any] = {**head.attrs, "fused_ops": tuple(fused_ops), "num_args": len(inputs) - 2}
    if activation == "LeakyRelu":
        attrs["leakyrelu_alpha"] = float(ops[0].attrs.get("alpha", LEAKY_ALPHA))
    last = absorbed[-1]
    source_nodes = [*head.source_nodes, *(node for op in absorbed for node in op.source_nodes)]
    fused = f"_Fused{head.op}"
    graph.drop([head, *absorbed[:-1]])
    if activation is not None and reshapes:
        made = absorbed[before_reshape - 1] if before_reshape else head
        product = graph.add(fused, head, attrs, inputs, graph.shapes[made.out])
        product.source_nodes = source_nodes
        become_reshape(graph, last, product.out)
    else:
        last.op, last.attrs, last.inputs, last.source_nodes, last.name = fused, attrs, inputs, source_nodes, head.name
    return True


def _zeros(graph: OpGraph, head: Op) -> Key:
    shape = graph.shapes[head.out]
    return graph.constant(np.zeros(shape[channel_axis(head, len(shape))], numpy_dtype(str(head.attrs["T"]))))


def _side_input(graph: OpGraph, readers: Readers, dominators: Dominators, head: Op, key: Key) -> tuple[Op, Key] | None:
    """The sum of a convolution with something of its own shape.

    Libraries have that as one kernel where a ReLU follows, our own has it anyway. But a convolution must not wait for what a branch beside
    it makes: without a ReLU it takes what it is made of itself (a residual), which is there before.
    """
    op = readers.only(key)
    if head.op != "Conv2D" or op is None or op.op not in ADD:
        return None
    other = other_input(op, key)
    after = readers.only((op.node, 0))
    shape = graph.shapes.get(key)
    if other is None or shape is None or graph.shapes.get(other) != shape:
        return None
    cut_off = after is not None and after.op == "Relu"
    return (op, other) if cut_off or dominators.dominates(other[0], head.node) else None


def reshapes_behind(readers: Readers, key: Key) -> tuple[list[Op], Key]:
    """Ops that only reshape a value, one behind the other, each the only reader, and the value behind the last."""
    found: list[Op] = []
    while (op := readers.only(key)) is not None and op.op in RESHAPES and op.inputs[0] == key:
        found.append(op)
        key = op.out
    return found, key


def activation_behind(graph: OpGraph, readers: Readers, key: Key) -> tuple[str | None, list[Op]]:
    """The activation that alone reads a value: its name as a fused op, and its ops, the last of which gives the result."""
    op = readers.only(key)
    if op is not None and op.op in _ACTIVATIONS and op.inputs == [key]:
        return op.op, [op]
    return match_gelu(graph, readers, key) or (None, [])
