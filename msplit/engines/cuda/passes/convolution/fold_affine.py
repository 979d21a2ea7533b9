"""Scales and offsets per channel, behind a convolution or product with constant weights, become part of weights and bias.

Batch normalization at inference is one, as one op or taken apart; so is a division by a constant. Convolutions and products are
linear, hence ``(x * w) s + t = x * (w s) + t`` for every channel. So does a scale in front, such as that of images to numbers up to one:
``(s x) * w = x * (s w)``. An offset in front stays where it is: padding has none, and large numbers would have to cancel.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.engines.cuda.ir.graph import Key, Op, OpGraph, Shape
from msplit.engines.cuda.ops.nn import EPSILON
from msplit.engines.cuda.passes.pattern import (
    FLOATS,
    Readers,
    become_reshape,
    channel_axis,
    channels_last,
    other_input,
    per_channel,
    trailing,
)
from msplit.opset.traits import ADD, BATCH_NORMS, BIASES, CONVOLUTIONS, RESHAPES, ops_with

_HEADS = CONVOLUTIONS | {"MatMul"}
_DIVISIONS = ops_with("divide")
Doubles = NDArray[np.float64]

Step = tuple[Doubles | float, Doubles | float]
"""A scale and an offset that an op applies, per channel or for all."""


@dataclass
class _Chain:
    """``scale * head + offset`` per channel, and the ops that compute it.

    Attributes:
        scale: Per channel.
        offset: Per channel.
        ops: Everything behind the head so far, reshapes included.
        absorbed: How many of `ops` the chain takes along: up to the last one that computes something.
        reshaped: Whether there is a reshape among them.
    """

    scale: Doubles
    offset: Doubles
    ops: list[Op] = field(default_factory=list)
    absorbed: int = 0
    reshaped: bool = False


def fold_affine(graph: OpGraph) -> bool:
    """Folds every such chain. What is left of it is at most one BiasAdd."""
    changed = False
    readers = Readers(graph)
    for head in list(graph.ops.values()):
        weights = graph.constants.get(head.inputs[1]) if head.op in _HEADS else None
        shape = graph.shapes.get(head.out)
        if weights is None or shape is None or weights.dtype.name not in FLOATS or not weights.size:
            continue
        given, weights = weights, _take_scale(graph, readers, head, weights)
        changed |= weights is not given
        chain = _follow(graph, readers, head, shape[channel_axis(head, len(shape))])
        changed |= chain.absorbed > 0 and _commit(graph, head, weights, chain)
    return changed


def _take_scale(graph: OpGraph, readers: Readers, head: Op, weights: NDArray[Any]) -> NDArray[Any]:
    """Takes what only scales a head's data, and is read by nothing else, into its weights: the new ones, or those given."""
    key, axis = head.inputs[0], -1 if head.attrs.get("transpose_b") else -2
    shape = graph.shapes.get(key, ())
    along = channel_axis(head, len(shape))
    if head.attrs.get("transpose_a") or weights.dtype.itemsize < 4 or shape[along:][:1] != weights.shape[axis:][:1]:
        return weights
    scale, offset = np.ones(shape[along]), np.zeros(shape[along])
    ops: list[Op] = []
    taken, data, factors = 0, key, scale
    while (op := readers.maker(key)) is not None:
        found = step_in_front(graph, readers, head, op, shape, along)
        if found is None:
            break
        key, (by, more) = found
        with np.errstate(all="ignore"):
            offset, scale = offset + scale * more, scale * by
        ops.append(op)
        if not offset.any():
            taken, data, factors = len(ops), key, scale
    with np.errstate(all="ignore"):
        wide = weights.astype(np.float64) * factors.reshape(-1, *[1] * (-1 - axis))
        scaled = wide.astype(weights.dtype)
    if not taken or not np.isfinite(scaled).all():
        return weights
    head.inputs = [data, graph.constant(scaled), *head.inputs[2:]]
    head.source_nodes = [*head.source_nodes, *(node for op in ops[:taken] for node in op.source_nodes)]
    graph.drop(ops[:taken])
    return scaled


def step_in_front(
    graph: OpGraph, readers: Readers, head: Op, op: Op, shape: Shape, along: int
) -> tuple[Key, Step] | None:
    """The value that an op in front of a head reads, and the scale and offset that it applies to it; None if it does anything else."""
    for data in op.inputs[:2]:
        alone = data not in graph.constants and graph.shapes.get(data) == shape and op.inputs.count(data) == 1
        step = _affine(graph, readers, head, op, data, shape, (along,)) if alone else None
        if step is not None:
            return data, step
    return None


def _follow(graph: OpGraph, readers: Readers, head: Op, channels: int) -> _Chain:
    """The longest chain of ops behind a head that only scale and shift its channels."""
    chain = _Chain(np.ones(channels), np.zeros(channels))
    key, shape = head.out, graph.shapes[head.out]
    axes: tuple[int, ...] = (channel_axis(head, len(shape)),)
    last, reshaped = axes[0] == len(shape) - 1, False
    while True:
        op = readers.only(key)
        if op is None or op.out not in graph.shapes or (op.inputs[0] != key and other_input(op, key) is None):
            return chain
        result = graph.shapes[op.out]
        if op.op in RESHAPES and op.inputs[0] == key and last:
            suffix = trailing(result, channels)
            if suffix is None:
                return chain
            axes = tuple(range(len(result) - len(suffix), len(result)))
            reshaped = True
        else:
            step = _affine(graph, readers, head, op, key, shape, axes) if result == shape else None
            if step is None:
                return chain
            with np.errstate(all="ignore"):
                scale, offset = chain.scale * step[0], chain.offset * step[0] + step[1]
            if not (np.isfinite(scale).all() and np.isfinite(offset).all()):
                return chain
            chain.scale, chain.offset = scale, offset
            chain.absorbed, chain.reshaped = len(chain.ops) + 1, reshaped
        chain.ops.append(op)
        key, shape = op.out, result


def _affine(
    graph: OpGraph, readers: Readers, head: Op, op: Op, key: Key, shape: Shape, axes: tuple[int, ...]
) -> Step | None:
    """Scale and offset that an op applies to its input `key`, or None if it does anything else."""
    if op.op in BATCH_NORMS:
        return _batch_norm(graph, readers, head, op, key)
    if op.op in BIASES:
        if op.inputs[0] != key or (len(shape) > 2 and channels_last(op) != (axes[-1] == len(shape) - 1)):
            return None
        value = graph.constants.get(op.inputs[1])
        if value is None:
            return None
        along = value if axes[-1] == len(shape) - 1 else value.reshape(-1, *(1,) * (len(shape) - 2))
        offset = per_channel(along, shape, axes)
        return None if offset is None else (1.0, offset)
    other = other_input(op, key)
    constant = graph.constants.get(other) if other is not None else None
    if constant is None or constant.dtype.name not in FLOATS:
        return None
    value = per_channel(constant, shape, axes)
    if value is None:
        return None
    first = op.inputs[0] == key
    if op.op == "Mul":
        return value, 0.0
    if op.op in ADD:
        return 1.0, value
    if op.op == "Sub":
        return (1.0, -value) if first else (-1.0, value)
    if op.op in _DIVISIONS and first and (value != 0).all():
        return 1.0 / value, 0.0
    return None


def _batch_norm(graph: OpGraph, readers: Readers, head: Op, op: Op, key: Key) -> tuple[Doubles, Doubles] | None:
    """Scale and offset of a normalization. With s = gamma / sqrt(variance + epsilon): (y - mean) s + beta = y s + (beta - mean s)."""
    if op.attrs.get("is_training", True) or op.inputs[0] != key or channels_last(op) != channels_last(head):
        return None
    if head.op == "MatMul" or not all(parameter in graph.constants for parameter in op.inputs[1:5]):
        return None
    if not all(readers.unread((op.node, port)) for port in range(1, 6)):
        return None  # somebody wants the statistics
    gamma, beta, mean, variance = (graph.constants[parameter].astype(np.float64) for parameter in op.inputs[1:5])
    with np.errstate(all="ignore"):
        scale = gamma / np.sqrt(variance + float(op.attrs.get("epsilon", EPSILON)))
        return scale, beta - mean * scale


def _commit(graph: OpGraph, head: Op, weights: NDArray[Any], chain: _Chain) -> bool:
    """Puts scale and offset into weights and bias, unless the weights' dtype can not hold them."""
    with np.errstate(all="ignore"):
        scaled = (weights.astype(np.float64) * _along(head, weights, chain.scale)).astype(weights.dtype)
        offset = chain.offset.astype(weights.dtype)
    lost = ~np.isfinite(scaled.astype(np.float64)) & np.isfinite(weights.astype(np.float64))
    if lost.any() or not np.isfinite(offset.astype(np.float64)).all():
        return False
    absorbed = chain.ops[: chain.absorbed]
    last = absorbed[-1]
    if (chain.scale != 1).any():
        head.inputs[1] = graph.constant(scaled)
    source_nodes = [node for op in absorbed for node in op.source_nodes]
    graph.drop(absorbed[:-1])
    adds = bool((chain.offset != 0).any())
    if not adds:
        head.source_nodes = [*head.source_nodes, *source_nodes]
    if adds and not chain.reshaped:
        _bias(last, head, graph.constant(offset))
        last.source_nodes = source_nodes
        return True
    key = head.out
    if adds:
        bias = graph.add("BiasAdd", last, {}, [], graph.shapes[key])
        _bias(bias, head, graph.constant(offset))
        bias.source_nodes = source_nodes
        key = bias.out
    become_reshape(graph, last, key)
    return True


def _bias(op: Op, head: Op, bias: Key) -> None:
    op.op, op.inputs = "BiasAdd", [head.out, bias]
    last = head.op == "MatMul" or channels_last(head)
    op.attrs = {"T": head.attrs.get("T"), "data_format": "NHWC" if last else "NCHW"}


def _along(head: Op, weights: NDArray[Any], scale: Doubles) -> Doubles:
    """The scale in a shape that broadcasts against the weights, along their output channels."""
    if head.op == "DepthwiseConv2dNative":
        return scale.reshape(weights.shape[2:])  # output channel = input channel × multiplier
    if head.op == "MatMul" and head.attrs.get("transpose_b"):
        return scale.reshape(-1, 1)
    return scale
