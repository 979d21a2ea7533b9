"""What one op does for several: TensorFlow's Grappler makes some of them, the engine's passes the others.

Of a matrix product or a convolution with what follows it, `fused_ops` lists that, in order; each takes its inputs from the node's
`args`. On a GPU the library's epilogue is used where there is one: bias in cuBLAS, with ReLU or approximate GELU in cuBLASLt, bias and
ReLU and a side input in cuDNN.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from msplit.engines.cuda.autotune import batched_matmul
from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node, Unsupported
from msplit.engines.cuda.ir.windows import SIBLINGS, TILES, channels_first
from msplit.engines.cuda.kernels.activations import activate
from msplit.engines.cuda.kernels.toolchain import can_compile
from msplit.engines.cuda.ops.conv import convolve, frames_of
from msplit.engines.cuda.ops.matmul import product_in_tiles
from msplit.engines.cuda.ops.nn import normalize
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


@lowering("_GroupedMatMul", own=True)
def grouped_matmul(node: Node, x: Tensor, weights: Tensor, *args: Tensor) -> Tensor:
    """Products of alike dense layers, each with its bias and activation: what `--group` makes of MatMul and _FusedMatMul."""
    _own(node)
    result = batched_matmul.run(batched_matmul.grouped(node.attrs, x, weights, *args), node.attrs)
    return result[0] if node.get("single") else result


@lowering("_GroupedLookup", own=True)
def grouped_lookup(node: Node, table: Tensor, ids: Tensor, starts: Tensor, sizes: Tensor) -> Tensor:
    """Rows of several tables below each other: what `--group` makes of lookups. An id outside of its own table is out of range."""
    _own(node)
    count = int(node.attrs["count"])
    shape = (*(ids.shape if node.get("single") else (count, *ids.shape[1:])), *table.shape[1:])
    flat = ids.reshape(count, -1)
    kernel = _kernel() if table.is_cuda and table.element_size() <= 8 else None
    if kernel is not None:
        return kernel(table, flat.contiguous(), starts, sizes).reshape(shape)
    inside = (flat >= 0) & (flat < sizes.unsqueeze(1))
    if table.device.type == "cpu" and not bool(inside.all()):
        raise IndexError("index out of range in a lookup")
    rows = torch.where(inside, flat.to(torch.int64) + starts.unsqueeze(1), 0).reshape(-1)
    taken = table.index_select(0, rows)
    if table.device.type != "cpu":
        taken = torch.where(inside.reshape(-1, *[1] * (table.dim() - 1)), taken, 0)
    return taken.reshape(shape)


def _own(node: Node) -> None:
    if "count" not in node.attrs:
        raise Unsupported("it is an op of the engine's own, which no graph can hold")


@functools.cache
def _kernel() -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None:
    if not can_compile():
        return None
    from msplit.engines.cuda.kernels.grouped_gather import lookup

    return lookup


@lowering("_SiblingConv2D", own=True)
def sibling_convolutions(node: Node, data: Tensor, filter: Tensor, bias: Tensor | None = None) -> tuple[Tensor, ...]:
    """Convolutions of the same data with windows of one kind, bias and activation included: an output for each.

    Their filters and biases lie side by side along the output channels; the attribute `_siblings` says how many each has.
    """
    sizes = node.get(SIBLINGS)
    if sizes is None:
        raise Unsupported("it is an op of the engine's own, which no graph can hold")
    relu = "Relu" in node.get("fused_ops", ())
    tiles = node.get(TILES)
    if tiles is not None and data.is_cuda and can_compile():
        from msplit.engines.cuda.kernels import conv

        frames = frames_of(node, data, filter)
        if conv.fits(data, filter, frames):
            return tuple(conv.convolve_siblings(data, filter, frames, tiles, bias, sizes, relu=relu))
    results, start = [], 0
    for size in sizes:
        own = None if bias is None else bias.narrow(0, start, size)
        results.append(convolve(node, data, filter.narrow(3, start, size), own, relu=relu))
        start += size
    return tuple(results)


@lowering("_FusedPointwise", own=True)
def fused_pointwise(node: Node, *inputs: Tensor) -> tuple[Any, ...]:
    """What fusion makes of a group of pointwise ops: its compiled kernel, or its ops one by one where there is none."""
    run = node.get("kernel") or node.get("body")
    if run is None:
        raise Unsupported("it is an op of the engine's own, which no graph can hold")
    return tuple(run(*inputs))
