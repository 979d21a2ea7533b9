"""Small rewrites: equal ops once, ops that do nothing, biases behind sums, products with one matrix, and epilogues.

Ops that compute the same from the same values: one of them does it for all.

Branches often begin with an activation of their common input each, and attention with a mask per layer. TensorFlow's optimizer merges
these too. Ops that draw random numbers are left alone.

Ops that give their first input back: they vanish, and whatever reads them reads that input.

A bias behind a sum of products moves into one of them: ``(p + q) + b = (p + b) + q``.

A product takes its bias along for nothing; behind the sum it is a kernel of its own, in every step of a recurrent layer. Of two
products the one that is ready first takes it, so that the other one's path becomes shorter.

Products of a tensor with one matrix are products of two matrices.

A batched product or an Einsum with a second operand that is the same for the whole batch is one large matrix product, with a
reshape (which moves nothing) before and after it. As such it can take its bias and its activation along. So is a convolution of images of
one pixel, such as the two of a squeeze-and-excite block; it has taken along what only convolutions do before it becomes one.

Product or convolution, then bias, then a sum, then an activation: one fused op, as TensorFlow's own optimizer makes it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from msplit.engines.cuda.ir.dtypes import numpy_dtype
from msplit.engines.cuda.ir.graph import Key, Op, OpGraph, attrs_key, known, proved, require
from msplit.engines.cuda.ir.lowering import table
from msplit.engines.cuda.kernels.activations import IN_LIBRARY, LEAKY_ALPHA
from msplit.engines.cuda.passes import pattern
from msplit.engines.cuda.passes.canonical.composed_functions import match_gelu
from msplit.opset.traits import (
    ADD,
    BATCH_MATMULS,
    BIASES,
    EPILOGUE_STEPS,
    IMAGE_CONVOLUTIONS,
    RESHAPES,
    ops_with,
    traits,
)

_RANDOM = "msplit.engines.cuda.ops.random"
_LARGEST = 1024
"""Bytes of a constant that is compared by value: shapes, axes, scalars."""


def eliminate_common_subexpressions(graph: OpGraph) -> bool:
    """Keeps the first of ops with equal attributes and inputs; it does the others' work."""
    before = len(graph.ops)
    names: dict[Key, Key] = {}
    first: dict[tuple[Any, ...], Op] = {}
    values: dict[Key, Key] = {}
    ports = pattern.Readers(graph).ports
    same: dict[tuple[Any, ...], Key] = {}

    def canonical(key: Key) -> Key:
        """The one name of a value: of ops that are merged, and of small constants that are equal."""
        key = names.get(key, key)
        constant = graph.constants.get(key)
        if constant is None or constant.nbytes > _LARGEST:
            return key
        if key not in values:
            values[key] = same.setdefault(pattern.value_key(constant), key)
        return values[key]

    for number, op in list(graph.ops.items()):
        if table()[op.op].file == _RANDOM:
            continue
        kept = first.setdefault((op.op, attrs_key(op.attrs), tuple(map(canonical, op.inputs))), op)
        if kept is not op:
            kept.source_nodes = [*kept.source_nodes, *op.source_nodes]
            names |= {(number, port): (kept.node, port) for port in ports.get(number, ())}
            del graph.ops[number]
    graph.rename(names)
    return len(graph.ops) < before


_BY_SHAPE = ops_with("unchanged by shape")
_COMMUTATIVE = ops_with("commutative")


def eliminate_identity(graph: OpGraph) -> bool:
    """Removes identities, reshapes to the same shape, and arithmetic that changes nothing."""
    names: dict[Key, Key] = {}
    for number, op in list(graph.ops.items()):
        key = _hands_on(graph, op)
        if key is not None:
            names[number, 0] = key
            del graph.ops[number]
    graph.rename(names)
    return bool(names)


def _hands_on(graph: OpGraph, op: Op) -> Key | None:
    """The input that an op gives back; None for one that gives anything else."""
    if op.op == "Identity":
        return op.inputs[0]
    shape = graph.shapes.get(op.out)
    for slot, key in enumerate(op.inputs[: 2 if op.op in _COMMUTATIVE else 1]):
        other = op.inputs[1 - slot] if len(op.inputs) > 1 else None
        if shape is not None and graph.shapes.get(key) == shape and _changes_nothing(graph, op, other):
            return key
    return None


def _changes_nothing(graph: OpGraph, op: Op, other: Key | None) -> bool:
    """Checks if an op, whose result has the shape of one input, gives that one back, whatever it is. `other` is its second operand."""
    if op.op in _BY_SHAPE or (op.op == "ConcatV2" and len(op.inputs) == 2):
        return True
    value = None if other is None else graph.constants.get(other)
    if op.op == "Transpose":
        return value is not None and value.tolist() == list(range(value.size))
    neutral = traits(op.op).neutral
    return neutral is not None and value is not None and value.size > 0 and bool(np.all(value == neutral))


def reassociate_bias(graph: OpGraph) -> bool:
    """Moves every constant bias that it can."""
    readers = pattern.Readers(graph)
    place = {number: position for position, number in enumerate(graph.ops)}

    def move(sum_op: Op) -> bool:
        require(sum_op.op in ADD and sum_op.attrs.get("T") in pattern.FLOATS)
        shape, bias_op = known(graph.shapes.get(sum_op.out)), known(readers.only(sum_op.out))
        products = [key for key in sum_op.inputs if _is_product(graph, readers, key, shape)]
        require(products and sum_op.inputs[0] != sum_op.inputs[1])
        bias = _bias(graph, bias_op, sum_op.out, shape)
        first = min(products, key=lambda key: place[key[0]])
        attrs = {"T": sum_op.attrs.get("T"), "data_format": "NHWC"}
        moved = graph.add("BiasAdd", bias_op, attrs, [first, bias], shape)
        moved.source_nodes = list(bias_op.source_nodes)
        rest = next(key for key in sum_op.inputs if key != first)
        bias_op.op, bias_op.attrs = sum_op.op, sum_op.attrs
        bias_op.inputs, bias_op.source_nodes = [moved.out, rest], list(sum_op.source_nodes)
        del graph.ops[sum_op.node]
        return True

    return pattern.offered(graph, move)


def _is_product(graph: OpGraph, readers: pattern.Readers, key: Key, shape: tuple[int, ...]) -> bool:
    op = readers.maker(key)
    return op is not None and op.op == "MatMul" and graph.shapes.get(key) == shape


def _bias(graph: OpGraph, op: Op, key: Key, shape: tuple[int, ...]) -> Key:
    """The vector along the last axis that an op adds to a matrix, if that is all it does."""
    other = known(pattern.other_input(op, key))
    value = known(graph.constants.get(other))
    require(graph.shapes.get((op.node, 0)) == shape)
    if op.op in BIASES and op.inputs[0] == key:
        return other
    require(op.op in ADD and value.size == shape[-1])
    return graph.constant(known(pattern.per_channel(value, shape, (len(shape) - 1,))).astype(value.dtype))


_COMPLEX = ("complex64", "complex128")


def flatten_matmul(graph: OpGraph) -> bool:
    """Turns such products into Reshape, MatMul, Reshape."""
    return pattern.offered(graph, lambda op: _flatten(graph, op))


def _flatten(graph: OpGraph, op: Op) -> bool:
    require(op.attrs.get("T") not in _COMPLEX and len(op.inputs) == 2 and {*op.inputs, op.out} <= graph.shapes.keys())
    left, right = op.inputs
    if op.op == "Einsum" and right in graph.constants:
        return _flatten_einsum(graph, op, left, right)
    shape = graph.shapes[left]
    require(op.op in BATCH_MATMULS and len(shape) >= 3 and len(graph.shapes[right]) == 2 and not op.attrs.get("adj_x"))
    return _as_matrices(graph, op, left, right, shape[-1], transpose=bool(op.attrs.get("adj_y")))


def _flatten_einsum(graph: OpGraph, op: Op, left: Key, right: Key) -> bool:
    """``LK,KN->LN``: the contracted labels last in the first operand and first in the second, all labels once."""
    operands, arrow, output = str(op.attrs.get("equation", "")).replace(" ", "").partition("->")
    first, comma, second = operands.partition(",")
    require(
        arrow and comma and all(len(set(part)) == len(part) and "." not in part for part in (first, second, output))
    )
    inner = "".join(label for label in first if label in second)
    lead, tail = first.removesuffix(inner), second.removeprefix(inner)
    require(inner and lead and tail and (first, second, output) == (lead + inner, inner + tail, lead + tail))
    contracted = math.prod(graph.shapes[left][len(lead) :])
    value = graph.constants[right]
    return _as_matrices(graph, op, left, graph.constant(value.reshape(contracted, -1)), contracted, transpose=False)


def flatten_convolution(graph: OpGraph) -> bool:
    """Turns convolutions of images of one pixel, with a bias and an activation or without, into Reshape, product, Reshape."""

    def flatten(op: Op) -> bool:
        require(op.op.removeprefix("_Fused") == "Conv2D" and is_of_one_pixel(graph, op))
        filter = graph.constants[op.inputs[1]]
        matrix = graph.constant(filter.reshape(filter.shape[2:]))
        return _as_matrices(graph, op, op.inputs[0], matrix, filter.shape[2], transpose=False)

    return pattern.offered(graph, flatten)


def is_of_one_pixel(graph: OpGraph, op: Op) -> bool:
    """Checks if a convolution is a product of matrices: images of one pixel, seen through a window of one. Through explicit padding it may
    see nothing of them."""
    left, right = op.inputs[:2]
    if right not in graph.constants or left not in graph.shapes or op.attrs.get("T") not in pattern.FLOATS:
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
    require(inner and math.prod(out))
    rows = math.prod(out) // columns
    narrow = graph.add("Reshape", op, {}, [left, graph.sizes((rows, inner))], (rows, inner))
    attrs = {"T": op.attrs.get("T"), "transpose_a": False, "transpose_b": transpose}
    attrs |= {name: op.attrs[name] for name in _FUSED if name in op.attrs}
    name = "_FusedMatMul" if "fused_ops" in attrs else "MatMul"
    product = graph.add(name, op, attrs, [narrow.out, right, *op.inputs[2:]], (rows, columns))
    product.source_nodes = op.source_nodes
    pattern.become_reshape(graph, op, product.out)
    return True


_HEADS = IMAGE_CONVOLUTIONS | {"MatMul"}
_ACTIVATIONS = ops_with("activation")
_RANK = 4


def fuse_epilogue(graph: OpGraph) -> bool:
    """Fuses every product or convolution with what follows it."""
    readers, dominators = pattern.Readers(graph), pattern.Dominators(graph)

    def fuse(head: Op) -> bool:
        require(head.op in _HEADS and head.attrs.get("T") in pattern.FLOATS)  # libraries fuse no integers
        bias_op = readers.only(head.out)
        if bias_op is not None and not _takes_bias(head, bias_op):
            bias_op = None
        return (bias_op is not None or head.out in graph.shapes) and _fuse(graph, readers, dominators, head, bias_op)

    return pattern.offered(graph, fuse)


def _takes_bias(head: Op, op: Op) -> bool:
    if op.op not in BIASES or op.inputs[0] != (head.node, 0):
        return False
    return head.op == "MatMul" or pattern.channel_axis(op, _RANK) == pattern.channel_axis(head, _RANK)


def _fuse(
    graph: OpGraph, readers: pattern.Readers, dominators: pattern.Dominators, head: Op, bias_op: Op | None
) -> bool:
    """Fuses one, with its bias or, where it has none and the library's activation needs one, with zeros."""
    fused_ops = ["BiasAdd"]
    absorbed = [] if bias_op is None else [bias_op]  # in order
    key = head.out if bias_op is None else bias_op.out
    side = proved(_side_input, graph, readers, dominators, head, key)
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
    if bias_op is None and activation not in ({"Relu", *IN_LIBRARY} if head.op == "MatMul" else {"Relu"}):
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
        pattern.become_reshape(graph, last, product.out)
    else:
        last.op, last.attrs, last.inputs, last.source_nodes, last.name = fused, attrs, inputs, source_nodes, head.name
    return True


def _zeros(graph: OpGraph, head: Op) -> Key:
    shape = graph.shapes[head.out]
    return graph.constant(np.zeros(shape[pattern.channel_axis(head, len(shape))], numpy_dtype(str(head.attrs["T"]))))


def _side_input(
    graph: OpGraph, readers: pattern.Readers, dominators: pattern.Dominators, head: Op, key: Key
) -> tuple[Op, Key]:
    """The sum of a convolution with something of its own shape.

    Libraries have that as one kernel where a ReLU follows, our own has it anyway. But a convolution must not wait for what a branch beside
    it makes: without a ReLU it takes what it is made of itself (a residual), which is there before.
    """
    op = known(readers.only(key))
    require(head.op == "Conv2D" and op.op in ADD)
    other = known(pattern.other_input(op, key))
    after = readers.only((op.node, 0))
    require(graph.shapes.get(other) == known(graph.shapes.get(key)))
    cut_off = after is not None and after.op == "Relu"
    require(cut_off or dominators.dominates(other[0], head.node))
    return op, other


def reshapes_behind(readers: pattern.Readers, key: Key) -> tuple[list[Op], Key]:
    """Ops that only reshape a value, one behind the other, each the only reader, and the value behind the last."""
    found: list[Op] = []
    while (op := readers.only(key)) is not None and op.op in RESHAPES and op.inputs[0] == key:
        found.append(op)
        key = op.out
    return found, key


def activation_behind(graph: OpGraph, readers: pattern.Readers, key: Key) -> tuple[str | None, list[Op]]:
    """The activation that alone reads a value: its name as a fused op, and its ops, the last of which gives the result."""
    op = readers.only(key)
    if op is not None and op.op in _ACTIVATIONS and op.inputs == [key]:
        return op.op, [op]
    return match_gelu(graph, readers, key) or (None, [])
