"""Gradients that models compute at inference: forces of an energy, saliency maps.

Those of activation functions are with them, in `nn`; of roots, reciprocals, Sigmoid and Tanh in `elementwise`; of convolutions with respect
to their data in `conv`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node, Unsupported
from msplit.engines.cuda.ir.windows import (
    Window,
    channels_first,
    empty_in_layout,
    from_channels_first,
    in_layout,
    keeps_channels_last,
    to_channels_first,
)
from msplit.engines.cuda.ops.axes import integers
from msplit.engines.cuda.ops.conv import convolution_windows, spatial_sizes
from msplit.engines.cuda.ops.image import cubic_weights, linear_weights, nearest_pixels
from msplit.engines.cuda.ops.nn import EPSILON
from msplit.engines.cuda.ops.pool import pool_windows


@lowering("BiasAddGrad")
def bias_add_grad(node: Node, gradients: Tensor) -> Tensor:
    """The sum over all axes but the channels'."""
    channel = 1 if channels_first(node) and gradients.dim() > 2 else gradients.dim() - 1
    axes = [axis for axis in range(gradients.dim()) if axis != channel]
    return gradients.sum(axes, dtype=gradients.dtype) if axes else gradients


@lowering("BroadcastGradientArgs", static=(0, 1))
def broadcast_gradient_args(node: Node, first: np.ndarray, second: np.ndarray) -> tuple[Tensor, Tensor]:
    """For two shapes that broadcast, the axes over which each one's gradient is to be summed, on the CPU."""
    shapes = (integers(first), integers(second))
    rank = max(map(len, shapes))
    full = [(1,) * (rank - len(shape)) + tuple(shape) for shape in shapes]
    if any(a not in (1, b) and b != 1 for a, b in zip(*full, strict=True)):
        raise Unsupported(f"{node.name}: shapes {shapes[0]} and {shapes[1]} do not broadcast")
    found = []
    for sizes in full:
        axes = [] if shapes[0] == shapes[1] else [axis for axis, size in enumerate(sizes) if size == 1]
        found.append(torch.from_numpy(np.asarray(axes, first.dtype)))
    return found[0], found[1]


_MAX_POOL = {2: F.max_pool2d, 3: F.max_pool3d}
_MAX_POOL_GRAD = {
    2: torch.ops.aten.max_pool2d_with_indices_backward,
    3: torch.ops.aten.max_pool3d_with_indices_backward,
}
_AVERAGE_POOL_GRAD = {2: torch.ops.aten.avg_pool2d_backward, 3: torch.ops.aten.avg_pool3d_backward}


@lowering("MaxPoolGrad", "MaxPool3DGrad")
def max_pool_grad(node: Node, data: Tensor, result: Tensor, gradients: Tensor) -> Tensor:
    """Each window's gradient at its first maximum."""
    frames = pool_windows(node, data.shape, node.get("ksize"), node.get("strides"))
    data, gradients = (to_channels_first(node, part) for part in (data, gradients))
    padding, pads = _padding(frames)
    data = F.pad(data, pads, value=-torch.inf) if pads else data
    kernel, strides = [frame.kernel for frame in frames], [frame.stride for frame in frames]
    _, places = _MAX_POOL[len(frames)](data, kernel, strides, padding, return_indices=True)
    ones = [1] * len(frames)
    found = _MAX_POOL_GRAD[len(frames)](gradients, data, kernel, strides, padding, ones, False, places)
    return from_channels_first(node, F.pad(found, [-pad for pad in pads]) if pads else found)


@lowering("AvgPoolGrad", "AvgPool3DGrad", static=(0,))
def average_pool_grad(node: Node, shape: np.ndarray, gradients: Tensor) -> Tensor:
    """Each window's gradient in equal shares to its elements, padding left out."""
    frames = pool_windows(node, integers(shape), node.get("ksize"), node.get("strides"))
    moved = to_channels_first(node, gradients)
    counts = [
        _elements(frame, moved).reshape(-1, *(1,) * behind)
        for behind, frame in enumerate(reversed(frames))
        if frame.before or frame.after
    ]
    if counts:
        moved = moved / math.prod(counts[1:], start=counts[0])
    # Of data as long as its windows reach: what PyTorch does with padding where channels lie last takes the wrong windows on a GPU
    # (github.com/pytorch/pytorch/issues/188344).
    kernel, strides = [frame.kernel for frame in frames], [frame.stride for frame in frames]
    reach = [(frame.outputs - 1) * frame.stride + frame.kernel for frame in frames]
    data = empty_in_layout(moved, (*moved.shape[:2], *reach), keeps_channels_last(node))  # whose numbers nobody reads
    none, whole = [0] * len(frames), math.prod(frame.kernel for frame in frames if not (frame.before or frame.after))
    found = _AVERAGE_POOL_GRAD[len(frames)](moved, data, kernel, strides, none, False, True, whole)
    pads = [-pad for pad in _pads(frames)]
    return from_channels_first(node, F.pad(found, pads) if any(pads) else found)


def _elements(frame: Window, like: Tensor) -> Tensor:
    """Number of elements in each window along an axis, padding left out."""
    begins = torch.arange(frame.outputs, device=like.device) * frame.stride - frame.before
    return ((begins + frame.kernel).clamp(max=frame.size) - begins.clamp(min=0)).to(like.dtype)


@lowering("DepthwiseConv2dNativeBackpropFilter", "Conv2DBackpropFilter", "Conv3DBackpropFilterV2", static=(1,))
def convolution_filter_grad(node: Node, data: Tensor, shape: np.ndarray, gradients: Tensor) -> Tensor:
    """The gradient of a convolution with respect to its filter."""
    sizes = integers(shape)
    rank = len(sizes) - 2
    frames = convolution_windows(node, spatial_sizes(node, data.shape), sizes[:rank])
    data, gradients = (to_channels_first(node, part) for part in (data, gradients))
    depthwise = node.op.startswith("Depthwise")
    groups = sizes[-2] if depthwise else data.shape[1] // sizes[-2]
    outer = (sizes[-2] * sizes[-1], 1) if depthwise else (sizes[-1], sizes[-2])
    weight = data.new_empty((*outer, *sizes[:rank]))
    padding, pads = _padding(frames)
    strides, dilations = [frame.stride for frame in frames], [frame.dilation for frame in frames]
    data = in_layout(F.pad(data, pads), keeps_channels_last(node)) if pads else data
    wanted = [False, True, False]  # of data, weight and bias
    _, found, _ = torch.ops.aten.convolution_backward(
        gradients, data, weight, None, strides, padding, dilations, False, [0] * rank, groups, wanted
    )
    space = range(2, rank + 2)
    if depthwise:
        return found.reshape(sizes[-2], sizes[-1], *sizes[:rank]).permute(*space, 0, 1)
    return found.permute(*space, 1, 0)


@lowering("FusedBatchNormGrad", "FusedBatchNormGradV2", "FusedBatchNormGradV3")
def batch_norm_grad(
    node: Node, gradients: Tensor, x: Tensor, scale: Tensor, mean: Tensor, variance: Tensor, *reserve: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of batch normalization: of its data, its scale and its offset, and two that are always empty."""
    factor = torch.rsqrt(variance + node.get("epsilon", EPSILON))
    if node.get("is_training", True) and x.numel() and x.dtype == scale.dtype:
        gradients, x = to_channels_first(node, gradients), to_channels_first(node, x)
        found, scale_grad, offset_grad = torch.ops.aten.native_batch_norm_backward(
            gradients, x, scale, None, None, mean, factor, True, 0.0, [True] * 3
        )
        return from_channels_first(node, found), scale_grad, offset_grad, scale.new_empty(0), scale.new_empty(0)
    channel = 1 if channels_first(node) else x.dim() - 1
    axes = [axis for axis in range(x.dim()) if axis != channel]

    def wide(number: Tensor) -> Tensor:
        return number.reshape(-1, *(1,) * (x.dim() - 1 - channel))

    dy = gradients.to(scale.dtype)
    normal = (x.to(scale.dtype) - wide(mean)) * wide(factor)
    offset_grad = dy.sum(axes)
    scale_grad = (dy * normal).sum(axes)
    if node.get("is_training", True):
        count = x.numel() // scale.numel()
        dy = dy - wide(offset_grad / count) - normal * wide(scale_grad / count)
        left = (scale.new_empty(0), scale.new_empty(0))
    else:
        left = (torch.zeros_like(scale), torch.zeros_like(scale)) if "V" not in node.op else (scale.new_empty(0),) * 2
    return (dy * wide(scale * factor)).to(x.dtype), scale_grad, offset_grad, *left


@lowering("MirrorPadGrad", static=(1,))
def mirror_pad_grad(node: Node, gradients: Tensor, paddings: np.ndarray) -> Tensor:
    """The gradient of MirrorPad: what was mirrored is added to where it came from."""
    skipped = {"REFLECT": 1, "SYMMETRIC": 0}[node.attrs["mode"]]
    for axis, (low, high) in enumerate(paddings.tolist()):
        size = gradients.shape[axis] - low - high
        if max(low, high) > size - skipped:
            raise Unsupported(f"{node.name}: padding {low}, {high} is wider than axis {axis} of length {size}")
        if low or high:
            inner = gradients.narrow(axis, low, size).clone()
            inner.narrow(axis, skipped, low).add_(gradients.narrow(axis, 0, low).flip(axis))
            inner.narrow(axis, size - skipped - high, high).add_(gradients.narrow(axis, low + size, high).flip(axis))
            gradients = inner
    return gradients


@lowering("ResizeBilinearGrad", "ResizeBicubicGrad")
def resize_grad(node: Node, gradients: Tensor, original: Tensor) -> Tensor:
    """The gradient of interpolating: each pixel's share of what was made of it."""
    weights = linear_weights if "Bilinear" in node.op else cubic_weights
    down = weights(node, original.shape[1], gradients.shape[1], gradients.device).to(original.dtype)
    across = weights(node, original.shape[2], gradients.shape[2], gradients.device).to(original.dtype)
    return torch.einsum("oh,bopc,pw->bhwc", down, gradients.to(original.dtype), across)


@lowering("ResizeNearestNeighborGrad", static=(1,))
def resize_nearest_grad(node: Node, gradients: Tensor, size: np.ndarray) -> Tensor:
    """The gradient of taking the nearest pixel: the sum of what took it."""
    for axis, length in enumerate(integers(size), 1):
        places = nearest_pixels(node, length, gradients.shape[axis], gradients.device)
        room = list(gradients.shape)
        room[axis] = length
        gradients = gradients.new_zeros(room).index_add_(axis, places, gradients)
    return gradients


@lowering("LRNGrad")
def local_response_normalization_grad(node: Node, gradients: Tensor, data: Tensor, result: Tensor) -> Tensor:
    """The gradient of LRN, whose sum of squares every neighboring channel is part of."""
    radius = int(node.get("depth_radius", 5))
    bias, alpha, beta = node.get("bias", 1.0), node.get("alpha", 1.0), node.get("beta", 0.5)

    def neighbors(x: Tensor) -> Tensor:
        return F.avg_pool2d(x, (1, 2 * radius + 1), 1, (0, radius), divisor_override=1)

    norm = bias + alpha * neighbors(data.square())
    return gradients * norm.pow(-beta) - 2 * alpha * beta * data * neighbors(gradients * result / norm)


def _padding(frames: Sequence[Window]) -> tuple[list[int], list[int]]:
    """Padding of data for its windows: so many elements at both ends of each axis, by the kernel, or else none and pads for `F.pad`."""
    both = [frame.before for frame in frames]
    alike = all((frame.size + 2 * frame.before - frame.reach) // frame.stride + 1 == frame.outputs for frame in frames)
    if alike and all(2 * frame.before <= frame.reach for frame in frames):
        return both, []
    return [0] * len(frames), _pads(frames)


def _pads(frames: Sequence[Window]) -> list[int]:
    """For `F.pad`: what makes an axis as long as its windows reach. Elements that no window has are cut off."""
    pads: list[int] = []
    for frame in reversed(frames):
        pads += [frame.before, (frame.outputs - 1) * frame.stride + frame.reach - frame.size - frame.before]
    return pads
