"""Rewrites that need no measurement: batch norm into the convolution before it, bias and activation into the product.

They make the fused ops that TensorFlow's own optimizer makes (`_FusedConv2D`, `_FusedMatMul`), so their lowerings serve for both.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.engines.cuda.program import Key, Op, Source

CONVOLUTIONS = ("Conv2D", "DepthwiseConv2dNative")
BATCH_NORMS = ("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3")
ACTIVATIONS = {
    "_FusedConv2D": ("Relu", "Relu6", "Elu", "LeakyRelu"),
    "_FusedMatMul": ("Relu", "Relu6", "Elu", "LeakyRelu"),
}
FUSED = {"Conv2D": "_FusedConv2D", "MatMul": "_FusedMatMul"}


def rewrite(source: Source) -> None:
    """Applies every rewrite. The order matters: what batch norm leaves is a bias, which the epilogue then takes."""
    fold_batch_norms(source)
    fuse_epilogues(source)
    source.prune()


def fold_batch_norms(source: Source) -> None:
    """Convolution, then inference batch norm with constant parameters: scales the filter and leaves a bias.

    With s = gamma / sqrt(variance + epsilon): conv(x, w) s + (beta - mean s) = conv(x, w s) + (beta - mean s).
    """
    readers = source.consumers()
    fetched = set(source.fetches.values())
    for op in list(source.ops.values()):
        if op.op not in BATCH_NORMS or op.attrs.get("is_training", True):
            continue
        convolution = source.ops.get(op.inputs[0][0])
        if convolution is None or convolution.op not in CONVOLUTIONS or convolution.inputs[1] not in source.constants:
            continue
        if convolution.attrs.get("data_format", "NHWC") != op.attrs.get("data_format", "NHWC"):
            continue
        if len(readers[convolution.node, 0]) != 1 or (convolution.node, 0) in fetched:
            continue
        if any((op.node, port) in readers or (op.node, port) in fetched for port in range(1, 6)):
            continue  # somebody reads the statistics
        if not all(key in source.constants for key in op.inputs[1:5]):
            continue
        gamma, beta, mean, variance = (source.constants[key].astype(np.float64) for key in op.inputs[1:5])
        scale = gamma / np.sqrt(variance + float(op.attrs.get("epsilon", 1e-4)))
        filters = source.constants[convolution.inputs[1]]
        if convolution.op == "DepthwiseConv2dNative":
            factor = scale.reshape(filters.shape[2:])  # output channel = input channel × multiplier
        else:
            factor = scale
        scaled = (filters.astype(np.float64) * factor).astype(filters.dtype)
        bias = (beta - mean * scale).astype(filters.dtype)
        # The batch norm's node becomes the bias, so that its consumers need no change; its spare ports hold what it absorbed.
        source.constants[op.node, 1], source.constants[op.node, 2] = scaled, bias
        convolution.inputs[1] = (op.node, 1)
        op.op = "BiasAdd"
        op.attrs = {"T": op.attrs.get("T"), "data_format": op.attrs.get("data_format", "NHWC")}
        op.inputs = [op.inputs[0], (op.node, 2)]


def fuse_epilogues(source: Source) -> None:
    """Product or convolution, then bias, then activation: one fused op, at the place of the last of them."""
    readers = source.consumers()
    fetched = set(source.fetches.values())

    def only_reader(key: Key) -> Op | None:
        users = readers.get(key, [])
        return source.ops.get(users[0]) if len(users) == 1 and key not in fetched else None

    for op in list(source.ops.values()):
        if op.op not in FUSED:
            continue
        bias_op = only_reader((op.node, 0))
        bias = _bias_of(source, op, bias_op)
        if bias_op is None or bias is None:
            continue
        fused_ops, last = ["BiasAdd"], bias_op
        fused = FUSED[op.op]
        activation = only_reader((bias_op.node, 0))
        if activation is not None and activation.op in ACTIVATIONS[fused]:
            fused_ops.append(activation.op)
            last = activation
        attrs: dict[str, Any] = {**op.attrs, "fused_ops": tuple(fused_ops), "num_args": 1}
        if fused_ops[-1] == "LeakyRelu":
            attrs["leakyrelu_alpha"] = last.attrs.get("alpha", 0.2)
        covers = [*op.covers, *bias_op.covers] + (last.covers if last is not bias_op else [])
        inputs = [op.inputs[0], op.inputs[1], bias]
        for absorbed in (op, bias_op):
            if absorbed is not last:
                del source.ops[absorbed.node]
        last.op, last.attrs, last.inputs, last.covers = fused, attrs, inputs, covers


def _bias_of(source: Source, op: Op, bias_op: Op | None) -> Key | None:
    """The bias that the only reader of a product adds: BiasAdd, or an addition of a constant vector along the last dimension."""
    if bias_op is None:
        return None
    if bias_op.op == "BiasAdd":
        if bias_op.attrs.get("data_format", "NHWC") != op.attrs.get("data_format", "NHWC") or (
            op.op == "MatMul" and (bias_op.attrs.get("data_format", "NHWC") != "NHWC")
        ):
            return None
        return bias_op.inputs[1] if bias_op.inputs[0] == (op.node, 0) else None
    if bias_op.op in ("Add", "AddV2") and op.attrs.get("data_format", "NHWC") == "NHWC":
        other = bias_op.inputs[1] if bias_op.inputs[0] == (op.node, 0) else bias_op.inputs[0]
        value = source.constants.get(other)
        if value is not None and value.ndim == 1 and value.shape[0] == _channels(source, op):
            return other
    return None


def _channels(source: Source, op: Op) -> int:
    weights: NDArray[Any] | None = source.constants.get(op.inputs[1])
    if weights is None:
        return -1
    return int(weights.shape[0 if op.attrs.get("transpose_b") else -1])
