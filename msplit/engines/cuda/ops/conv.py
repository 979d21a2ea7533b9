"""Ops with windows: convolutions and pools.

A filter, always input 1, is a constant in nearly every model, and PyTorch wants its axes in another order. What `FILTERS` has for the op
lays it out in memory, once, so that the lowering's view of it needs no copy.

Pools and their gradients.

PyTorch's pools pad both ends of an axis alike, and may let the last window hang over the end (`ceil_mode`). That covers
TensorFlow's SAME padding without a kernel that pads: see `_fit`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from msplit.engines.cuda.ir.dtypes import dtype_name, torch_dtype
from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node, Unsupported
from msplit.engines.cuda.ir.windows import (
    NO_PROLOGUE,
    ROUNDED,
    ROUNDS,
    TILES,
    Prologue,
    Window,
    channels_first,
    for_products,
    from_channels_first,
    in_layout,
    keeps_channels_last,
    spatial,
    to_channels_first,
    to_tf32,
    windows,
)
from msplit.engines.cuda.kernels import channelwise as kernels
from msplit.engines.cuda.kernels import conv
from msplit.engines.cuda.kernels.activations import (
    IN_CONVOLUTIONS,
    LEAKY_ALPHA,
    NO_EPILOGUE,
    NUMBERS,
    Epilogue,
    activate,
)
from msplit.engines.cuda.kernels.launch import can_launch
from msplit.engines.cuda.ops.shape import integers

# Where padding differs between the ends of an axis: how much more work than needed is better than a kernel that pads.
# A 14 by 14 result made 15 by 15 passes, a 7 by 7 one does not.
_WORK_IN_VAIN = 1.15

_CONVOLVE = {2: F.conv2d, 3: F.conv3d}
_TRANSPOSED = {2: F.conv_transpose2d, 3: F.conv_transpose3d}


def prepare_filter(filter: Tensor, channels_last: bool) -> Tensor:
    """A convolution's filter (HWIO, or DHWIO) with the same shape and values, laid out for the kernel."""
    return _to_weight(in_layout(_from_filter(filter), channels_last))


def prepare_depthwise_filter(filter: Tensor, channels_last: bool) -> Tensor:
    """A depthwise filter (height, width, channels, multiplier) with the same shape and values, laid out for the kernel.

    Both memory layouts are one here, since each group has a single input channel.
    """
    return filter.permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1)


FILTERS: Mapping[str, Callable[[Tensor, bool], Tensor]] = {
    "Conv2D": prepare_filter,
    "Conv3D": prepare_filter,
    "Conv2DBackpropInput": prepare_filter,
    "Conv3DBackpropInputV2": prepare_filter,
    "_CastConv2D": prepare_filter,
    "_FusedConv2D": prepare_filter,
    "_PrologueConv2D": prepare_filter,
    "_SiblingConv2D": prepare_filter,
    "DepthwiseConv2dNative": prepare_depthwise_filter,
    "DepthwiseConv2dNativeBackpropInput": prepare_depthwise_filter,
    "_FusedDepthwiseConv2dNative": prepare_depthwise_filter,
    "_SqueezeDepthwiseConv2dNative": prepare_depthwise_filter,
}
"""Functions that prepare the constant filter (input 1) of each op, called with the filter and `keeps_channels_last(node)`."""


@lowering("Conv2D", "Conv3D", "DepthwiseConv2dNative")
def convolution(node: Node, data: Tensor, filter: Tensor) -> Tensor:
    """A convolution, grouped where the filter has fewer input channels than the data; a depthwise one of each channel by itself."""
    return convolve(node, data, filter, Epilogue(rounds=0 in node.get(ROUNDS, ())))


@lowering("Conv2DBackpropInput", "Conv3DBackpropInputV2", "DepthwiseConv2dNativeBackpropInput", static=(0,))
def transposed_convolution(node: Node, sizes: np.ndarray, filter: Tensor, data: Tensor) -> Tensor:
    """The gradient of a convolution with respect to its data: a transposed convolution."""
    _refuse_integers(node, data)
    shape: Sequence[int] = integers(sizes)
    groups = 1
    if len(shape) == filter.dim():  # The spatial sizes alone are allowed too.
        groups = shape[1 if channels_first(node) else -1] // filter.shape[-2]
        shape = spatial_sizes(node, shape)
    frames = convolution_windows(node, shape, filter.shape[:-2])

    # The result covers [0, full) before cropping. PyTorch crops as much from either end; a slice takes the rest.
    crops, extra = [], []
    for frame in frames:
        full = (frame.outputs - 1) * frame.stride + frame.reach
        crop = min(frame.before, frame.after)
        crops.append(crop)
        extra.append(max(0, frame.before + frame.size - full + crop))
    groups = filter.shape[-2] if _is_depthwise(node) else groups
    strides, dilations = tuple(frame.stride for frame in frames), tuple(frame.dilation for frame in frames)
    data, weight = to_channels_first(node, data), _weight(node, filter)
    result = _TRANSPOSED[len(frames)](data, weight, None, strides, tuple(crops), tuple(extra), groups, dilations)
    for axis, (frame, crop) in enumerate(zip(frames, crops, strict=True), 2):
        if result.shape[axis] != frame.size:
            result = result.narrow(axis, frame.before - crop, frame.size)
    return from_channels_first(node, result)


def convolve(
    node: Node, data: Tensor, filter: Tensor, epilogue: Epilogue = NO_EPILOGUE, prologue: Prologue = NO_PROLOGUE
) -> Tensor:
    """A convolution with what libraries fuse behind it: ``activation(convolution + bias + side)``, and in front of it.

    One kernel on a GPU where an engine chose one of ours, step by step elsewhere.

    Args:
        node: Holds strides, padding, dilations and data_format; its op says whether each channel is convolved by itself.
        data: The data in the logical shape of the node's data_format, in the filter's type or in one that is converted to it.
        filter: HWIO (DHWIO), or HWCM for a depthwise convolution.
        epilogue: Steps behind it. The side is of the result's logical shape; for LeakyRelu the node has the slope.
        prologue: What is done to the data first.
    """
    _refuse_integers(node, filter)
    frames = convolution_windows(node, spatial_sizes(node, data.shape), filter.shape[:-2])
    found = _own_kernel(node, data, filter, frames, epilogue, prologue)
    if found is not None:
        return found
    bias, side, activation, rounds = epilogue
    strides, dilations = tuple(frame.stride for frame in frames), tuple(frame.dilation for frame in frames)
    data = to_channels_first(node, prologue.of(data.to(filter.dtype)))
    groups, rest = (filter.shape[-2], 0) if _is_depthwise(node) else divmod(data.shape[1], filter.shape[-2])
    if rest:
        raise Unsupported(
            f"{node.op} {node.name}: {data.shape[1]} channels do not split in groups of the filter's {filter.shape[-2]}"
        )
    weight = _weight(node, filter)
    # Libraries pad both ends of an axis alike. A few results too many are cheaper than data that are padded here, but a side input would
    # have to be padded as well.
    padding, skips = _fit(frames)
    if (side is not None and any(frame.before != frame.after for frame in frames)) or padding is None:
        data, padding, skips = _pad(data, frames)

    data, weight = _of_one_channel(data, weight)
    # No library is right with more than the bias in the same kernel: see `activations.IN_LIBRARY`.
    result = _CONVOLVE[len(frames)](data, weight, bias, strides, padding, dilations, groups)
    if side is not None:
        result = result + to_channels_first(node, side)
    if activation == "Relu":
        result = result.relu_()
    elif activation:
        result = activate(activation, node.get("leakyrelu_alpha", LEAKY_ALPHA))(result)
    # What was made too many at the start and at the end of each axis is left out.
    for axis, (frame, skip) in enumerate(zip(frames, skips, strict=True), 2):
        if result.shape[axis] != frame.outputs:
            result = result.narrow(axis, skip, frame.outputs)
    return from_channels_first(node, to_tf32(result) if rounds else result)


def _of_one_channel(data: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Data of one channel and its filter without the strides of channels that come last, on a CPU.

    PyTorch 2.13 gives wrong numbers there where the filter has 4 rows or more and a row of results is one; its issue 82060 was another
    such case. Of one channel both layouts are the same memory.
    """
    if data.shape[1] > 1 or data.is_cuda:
        return data, weight
    return data.contiguous().view(-1).view(data.shape), weight.contiguous().view(-1).view(weight.shape)


def _own_kernel(
    node: Node, data: Tensor, filter: Tensor, frames: tuple[Window, ...], epilogue: Epilogue, prologue: Prologue
) -> Tensor | None:
    """The convolution by a kernel of ours, where an engine chose one (`TILES`) and it fits what is there; else None."""
    tiles = node.get(TILES)
    if tiles is None or channels_first(node) or not can_launch(data.device):
        return None
    if _is_depthwise(node):
        results = data.shape[0] * frames[0].outputs * frames[1].outputs * data.shape[-1]
        knows = epilogue.side is None and epilogue.activation in NUMBERS
        fits = knows and kernels.fits(data, filter, results)
        return kernels.convolve(data, filter, frames, tiles, epilogue) if fits else None
    if epilogue.activation not in IN_CONVOLUTIONS or not conv.fits(data, filter, frames):
        return None
    room = node.room.get(0)
    room = room if room is not None and conv.fits_in(room) else None
    rounded = bool(node.get(ROUNDED))
    return conv.convolve(data, filter, frames, tiles, epilogue, room=room, prologue=prologue, rounded=rounded)


def spatial_sizes(node: Node, shape: Sequence[int]) -> Sequence[int]:
    """The sizes of the spatial axes of data of a shape."""
    return shape[2:] if channels_first(node) else shape[1:-1]


def convolution_windows(node: Node, sizes: Sequence[int], kernel: Sequence[int]) -> tuple[Window, ...]:
    """The windows of a convolution along each spatial axis, by the sizes of the data and of the filter there."""
    ones = (1,) * (len(sizes) + 2)
    strides = spatial(node, node.get("strides", ones), "strides")
    return windows(node, sizes, kernel, strides, spatial(node, node.get("dilations", ones), "dilations"))


def _is_depthwise(node: Node) -> bool:
    return "Depthwise" in node.op


def _fit(frames: tuple[Window, ...]) -> tuple[tuple[int, ...] | None, tuple[int, ...]]:
    """Padding that is alike at both ends, and how many results at the start are then too many.

    The results that TensorFlow has are a slice of these, which costs no kernel, while padding by hand costs two. None where
    the work done in vain is more than that is worth.
    """
    paddings, skips = [], []
    work = 1.0
    for frame in frames:
        skip = max(0, -(-(frame.after - frame.before) // frame.stride))
        padding = frame.before + skip * frame.stride
        made = (frame.size + 2 * padding - frame.reach) // frame.stride + 1
        if skip and padding >= frame.reach:
            return None, ()
        work *= made / max(frame.outputs, 1)
        paddings.append(padding)
        skips.append(skip)
    return (tuple(paddings), tuple(skips)) if work <= _WORK_IN_VAIN else (None, ())


def _pad(data: Tensor, frames: tuple[Window, ...]) -> tuple[Tensor, tuple[int, ...], tuple[int, ...]]:
    """The data, padded with zeros where the two ends of an axis differ, the padding left to the kernel, nothing to skip."""
    inner = tuple(min(frame.before, frame.after) for frame in frames)
    outer: list[int] = []
    for frame, both in zip(reversed(frames), reversed(inner), strict=True):
        outer += [frame.before - both, frame.after - both]
    return (F.pad(data, outer) if any(outer) else data), inner, (0,) * len(frames)


def _weight(node: Node, filter: Tensor) -> Tensor:
    """The filter as the kernel takes it; a copy where it was not prepared."""
    if _is_depthwise(node):
        return filter.permute(2, 3, 0, 1).reshape(-1, 1, *filter.shape[:-2])
    return in_layout(_from_filter(filter), keeps_channels_last(node))


def _from_filter(filter: Tensor) -> Tensor:
    """HWIO (DHWIO) to the order of PyTorch: output channels, input channels, then space. A view."""
    return filter.permute(-1, -2, *range(filter.dim() - 2))


def _to_weight(weight: Tensor) -> Tensor:
    """The inverse of `_from_filter`."""
    return weight.permute(*range(2, weight.dim()), 1, 0)


def _refuse_integers(node: Node, data: Tensor) -> None:
    if not data.is_floating_point():
        raise Unsupported(f"{node.op} {node.name}: convolutions of {dtype_name(data.dtype)} are not supported")


_MAX: dict[int, Callable[..., Tensor]] = {2: F.max_pool2d, 3: F.max_pool3d}
_AVERAGE: dict[int, Callable[..., Tensor]] = {2: F.avg_pool2d, 3: F.avg_pool3d}

_Fit = tuple[tuple[int, ...], tuple[int, ...], bool]


@lowering("AvgPool", "AvgPool3D")
def average_pool(node: Node, data: Tensor) -> Tensor:
    """The average of each window, padding left out."""
    frames = pool_windows(node, data.shape, node.get("ksize"), node.get("strides"))
    result = _own_pool(node, data, frames, mean=True)
    if result is not None:
        return result
    fit = _fit_window(frames)
    if fit is None:
        kernel = tuple(frame.kernel for frame in frames)
        raise Unsupported(f"{node.op} {node.name}: no kernel for padding {node.get('padding')} of a window {kernel}")
    result = _pooled(node, data, frames, fit, _AVERAGE[len(frames)], count_include_pad=False)[0]
    return for_products(node, result)


@lowering("MaxPoolWithArgmax")
def max_pool_with_argmax(node: Node, data: Tensor) -> tuple[Tensor, Tensor]:
    """The largest element of each window and its place in the flattened NHWC data."""
    batch, height, width, channels = data.shape
    frames = pool_windows(node, data.shape, node.get("ksize"), node.get("strides"))
    fit = _fit_window(frames)
    if fit is None or not data.is_floating_point():
        raise Unsupported(f"{node.op} {node.name}: only floats, and padding SAME or VALID, are supported")
    values, places = _pooled(node, data, frames, fit, F.max_pool2d, return_indices=True)
    places = places * channels + torch.arange(channels, device=data.device)
    if node.get("include_batch_in_index"):
        images = torch.arange(batch, device=data.device) * (height * width * channels)
        places = places + images[:, None, None, None]
    return values, places.to(torch_dtype(node.get("Targmax", "int64")))


@lowering("MaxPoolV2", static=(1, 2))
@lowering("MaxPool", "MaxPool3D")
def max_pool(node: Node, data: Tensor, *given: np.ndarray) -> Tensor:
    """The largest element of each window, whose size and stride V2 has as inputs."""
    ksize, strides = map(integers, given) if given else (node.get("ksize"), node.get("strides"))
    frames = pool_windows(node, data.shape, ksize, strides)
    result = _own_pool(node, data, frames, mean=False)
    if result is not None:
        return result
    fit = _fit_window(frames) if data.is_floating_point() else None
    if fit is not None:
        return _pooled(node, data, frames, fit, _MAX[len(frames)])[0]
    if data.dtype in (torch.uint16, torch.uint32, torch.uint64):
        raise Unsupported(f"{node.op} {node.name}: there is no maximum of {dtype_name(data.dtype)}")
    # PyTorch pools few integers, and pads by no more than half a window: look at the data as windows and reduce those.
    data = to_channels_first(node, data)
    lowest = -torch.inf if data.is_floating_point() else torch.iinfo(data.dtype).min
    pads = [pad for frame in reversed(frames) for pad in (frame.before, frame.after)]
    if any(pads):
        data = F.pad(data, pads, value=lowest)
    for axis, frame in enumerate(frames, 2):
        data = data.unfold(axis, frame.kernel, frame.stride).narrow(axis, 0, frame.outputs)
    return from_channels_first(node, data.amax(tuple(range(-len(frames), 0))))


def _own_pool(node: Node, data: Tensor, frames: tuple[Window, ...], *, mean: bool) -> Tensor | None:
    """The pool by our kernel, or None where PyTorch's has to do it."""
    if node.nchw or channels_first(node) or not can_launch(data.device) or not kernels.pool_fits(data, frames):
        return None
    room = node.room.get(0)
    room = room if room is not None and kernels.fits_in(room) else None
    return kernels.pool(data, frames, room, mean=mean, rounds=bool(node.get(ROUNDS)))


def pool_windows(node: Node, shape: Sequence[int], ksize: Sequence[int], strides: Sequence[int]) -> tuple[Window, ...]:
    """The windows of a pool over data of a shape."""
    kernel = spatial(node, ksize, "ksize")
    return windows(node, spatial_sizes(node, shape), kernel, spatial(node, strides, "strides"))


def _pooled(
    node: Node, data: Tensor, frames: tuple[Window, ...], fit: _Fit, pool: Callable[..., Any], **options: bool
) -> list[Tensor]:
    """Result of one of PyTorch's pools, without the windows that TensorFlow does not have."""
    paddings, skips, ceil = fit
    kernel, strides = tuple(frame.kernel for frame in frames), tuple(frame.stride for frame in frames)
    found = pool(to_channels_first(node, data), kernel, strides, padding=paddings, ceil_mode=ceil, **options)
    results = []
    for result in found if isinstance(found, tuple) else (found,):
        for axis, (frame, skip) in enumerate(zip(frames, skips, strict=True), 2):
            if result.shape[axis] != frame.outputs:
                result = result.narrow(axis, skip, frame.outputs)
        results.append(from_channels_first(node, result))
    return results


def _fit_window(frames: tuple[Window, ...]) -> _Fit | None:
    """Arguments with which PyTorch's pools make TensorFlow's windows: padding of both ends, results to skip at the start, and `ceil_mode`.

    With a stride of two or more, SAME padding is longer at the end by one at most, which `ceil_mode` covers. With a stride
    of one, padding both ends by the longer one makes one window too many at the start, and it is cut off.
    """
    for ceil in (False, True):
        found = [_fit_axis(frame, ceil) for frame in frames]
        if None not in found:
            paddings, skips = zip(*(pair for pair in found if pair is not None), strict=True)
            return paddings, skips, ceil
    return None


def _fit_axis(frame: Window, ceil: bool) -> tuple[int, int] | None:
    for skip in (0, 1):
        padding = frame.before + skip * frame.stride
        if 2 * padding <= frame.kernel and _outputs(frame, padding, ceil) >= skip + frame.outputs:
            return padding, skip
    return None


def _outputs(frame: Window, padding: int, ceil: bool) -> int:
    """The number of windows that PyTorch's pools make along an axis."""
    room = frame.size + 2 * padding - frame.kernel
    outputs = (-(-room // frame.stride) if ceil else room // frame.stride) + 1
    # With ceil_mode, a window that would start behind the data is dropped.
    return outputs - 1 if ceil and (outputs - 1) * frame.stride >= frame.size + padding else outputs
