"""The ops that TensorFlow's Grappler fuses: a matrix product or a convolution and what follows it.

`fused_ops` lists what follows, in order; each takes its inputs from the node's `args`. On a GPU the library's epilogue is
used where there is one: bias in cuBLAS, with ReLU or approximate GELU in cuBLASLt, bias and ReLU and a side input in cuDNN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from msplit.engines.cuda.autotune import batched_matmul
from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node, Unsupported
from msplit.engines.cuda.ir.windows import channels_first
from msplit.engines.cuda.kernels.activations import activate
from msplit.engines.cuda.ops.conv import convolve
from msplit.engines.cuda.ops.matmul import product_in_tiles
from msplit.engines.cuda.ops.norm import normalize
from msplit.opset.traits import EPILOGUE_STEPS

# Defaults of attributes, as the float32 numbers that they are.
_EPSILON = 9.999999747378752e-05
_ALPHA = 0.20000000298023224

_BATCH_NORM_INPUTS = 4
_LT_ACTIVATIONS = {"Relu": False, "GeluApproximate": True}


@lowering("_FusedMatMul")
def fused_matmul(node: Node, a: Tensor, b: Tensor, *args: Tensor) -> Tensor:
    """A matrix product, then a bias, a sum and an activation as `fused_ops` says."""
    steps = _steps(node)
    a = a.t() if node.get("transpose_a") else a
    b = b.t() if node.get("transpose_b") else b
    if batched_matmul.TILE in node.attrs:
        return product_in_tiles(node, a, b, steps, args)
    if not steps or steps[0] != "BiasAdd":
        return _follow(node, torch.mm(a, b), list(args), steps, first=False)
    bias, *rest = args
    if len(steps) == 2 and steps[1] in _LT_ACTIVATIONS and a.device.type == "cuda" and torch.version.hip is None:
        return torch._addmm_activation(bias, a, b, use_gelu=_LT_ACTIVATIONS[steps[1]])
    return _follow(node, torch.addmm(bias, a, b), rest, steps[1:], first=False)


@lowering("_FusedConv2D")
def fused_conv2d(node: Node, data: Tensor, filter: Tensor, *args: Tensor) -> Tensor:
    """A convolution, then a bias or a batch normalization, a sum and an activation as `fused_ops` says."""
    if node.get("filter_format", "HWIO") != "HWIO":
        raise Unsupported(
            f"{node.op} {node.name}: filter_format {node.get('filter_format')} is not supported, only HWIO"
        )
    count = int(node.get("num_args", len(args)))
    if len(args) > count:
        raise Unsupported(f"{node.op} {node.name}: host_args belong to a quantized convolution, which is not supported")
    return _fused_convolution(node, data, filter, args, depthwise=False)


@lowering("_FusedDepthwiseConv2dNative")
def fused_depthwise_conv2d(node: Node, data: Tensor, filter: Tensor, *args: Tensor) -> Tensor:
    """A depthwise convolution, then a bias or a batch normalization and an activation as `fused_ops` says."""
    return _fused_convolution(node, data, filter, args, depthwise=True)


def _fused_convolution(
    node: Node, data: Tensor, filter: Tensor, args: tuple[Tensor, ...], *, depthwise: bool
) -> Tensor:
    steps = _steps(node)
    first = channels_first(node)
    if not steps or steps[0] != "BiasAdd":
        return _follow(node, convolve(node, data, filter, depthwise=depthwise), list(args), steps, first=first)
    bias, *rest = args
    steps = steps[1:]
    side = None
    if steps[:1] == ("Add",):
        side, *rest = rest
        steps = steps[1:]
    relu = steps[:1] == ("Relu",)
    steps = steps[1:] if relu else steps
    result = convolve(node, data, filter, bias, depthwise=depthwise, side=side, relu=relu)
    return _follow(node, result, rest, steps, first=first)


def _follow(node: Node, result: Tensor, args: list[Tensor], steps: tuple[str, ...], *, first: bool) -> Tensor:
    """Runs the fused ops one by one on the product; `args` holds their inputs, `first` says that channels are in axis 1."""
    for step in steps:
        if step == "BiasAdd":
            bias = args.pop(0)
            result = result + (bias.reshape(-1, 1, 1) if first else bias)
        elif step == "Add":
            result = result + args.pop(0)
        elif step == "FusedBatchNorm":
            scale, offset, mean, variance = args[:_BATCH_NORM_INPUTS]
            del args[:_BATCH_NORM_INPUTS]
            result = normalize(result, scale, offset, mean, variance, node.get("epsilon", _EPSILON), first)
        else:
            result = activate(step, node.get("leakyrelu_alpha", _ALPHA))(result)
    return result


def _steps(node: Node) -> tuple[str, ...]:
    """The node's fused ops.

    Raises:
        Unsupported: One of them is not known.
    """
    steps = tuple(str(step) for step in node.get("fused_ops", ()))
    for step in steps:
        if step in EPILOGUE_STEPS:
            continue
        try:
            activate(step)
        except KeyError:
            raise Unsupported(f"{node.op} {node.name}: fused op {step} is not supported") from None
    return steps
