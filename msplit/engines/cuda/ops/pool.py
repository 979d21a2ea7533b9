"""Pooling.

PyTorch's pools pad both ends of an axis alike, and may let the last window hang over the end (`ceil_mode`). That covers
TensorFlow's SAME padding without a kernel that pads: see `_fit`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from msplit.engines.cuda.ir.dtypes import torch_dtype
from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node, Unsupported
from msplit.engines.cuda.ir.windows import (
    Window,
    channels_first,
    from_channels_first,
    spatial,
    to_channels_first,
    windows,
)
from msplit.engines.cuda.kernels.toolchain import can_compile

_MAX: dict[int, Callable[..., Tensor]] = {2: F.max_pool2d, 3: F.max_pool3d}
_AVERAGE: dict[int, Callable[..., Tensor]] = {2: F.avg_pool2d, 3: F.avg_pool3d}


@lowering("MaxPool", "MaxPool3D")
def max_pool(node: Node, data: Tensor) -> Tensor:
    """The largest element of each window."""
    return _max_pool(node, data, node.get("ksize"), node.get("strides"))


@lowering("MaxPoolV2", static=(1, 2))
def max_pool_v2(node: Node, data: Tensor, ksize: np.ndarray, strides: np.ndarray) -> Tensor:
    """The largest element of each window, whose size is an input."""
    return _max_pool(node, data, ksize.tolist(), strides.tolist())


@lowering("AvgPool", "AvgPool3D")
def average_pool(node: Node, data: Tensor) -> Tensor:
    """The average of each window, padding left out."""
    kernel, frames, moved = _frames(node, data, node.get("ksize"), node.get("strides"))
    result = _own_kernel(node, data, frames, mean=True)
    if result is not None:
        return result
    data = moved
    fit = _fit(frames)
    if fit is None:
        raise Unsupported(f"{node.op} {node.name}: no kernel for padding {node.get('padding')} of a window {kernel}")
    padding, skip, ceil = fit
    result = _AVERAGE[len(kernel)](data, kernel, _strides(frames), padding, ceil, count_include_pad=False)
    return from_channels_first(node, _cut(result, frames, skip))


@lowering("MaxPoolWithArgmax")
def max_pool_with_argmax(node: Node, data: Tensor) -> tuple[Tensor, Tensor]:
    """The largest element of each window and its place in the flattened NHWC data."""
    batch, height, width, channels = data.shape
    kernel, frames, moved = _frames(node, data, node.get("ksize"), node.get("strides"))
    fit = _fit(frames)
    if fit is None or not data.is_floating_point():
        raise Unsupported(f"{node.op} {node.name}: only floats, and padding SAME or VALID, are supported")
    padding, skip, ceil = fit
    values, places = F.max_pool2d(moved, kernel, _strides(frames), padding, 1, ceil, return_indices=True)
    values, places = (from_channels_first(node, _cut(part, frames, skip)) for part in (values, places))
    places = places * channels + torch.arange(channels, device=data.device)
    if node.get("include_batch_in_index"):
        images = torch.arange(batch, device=data.device) * (height * width * channels)
        places = places + images[:, None, None, None]
    return values, places.to(torch_dtype(node.get("Targmax", "int64")))


def _max_pool(node: Node, data: Tensor, ksize: Sequence[int], strides: Sequence[int]) -> Tensor:
    kernel, frames, moved = _frames(node, data, ksize, strides)
    result = _own_kernel(node, data, frames, mean=False)
    if result is not None:
        return result
    data = moved
    fit = _fit(frames) if data.is_floating_point() else None
    if fit is not None:
        padding, skip, ceil = fit
        result = _MAX[len(kernel)](data, kernel, _strides(frames), padding, 1, ceil)
        return from_channels_first(node, _cut(result, frames, skip))
    if data.dtype in (torch.uint16, torch.uint32, torch.uint64):
        raise Unsupported(f"{node.op} {node.name}: there is no maximum of {str(data.dtype).removeprefix('torch.')}")
    # PyTorch pools few integers, and pads by no more than half a window: look at the data as windows and reduce those.
    lowest = -torch.inf if data.is_floating_point() else torch.iinfo(data.dtype).min
    pads = [pad for frame in reversed(frames) for pad in (frame.before, frame.after)]
    if any(pads):
        data = F.pad(data, pads, value=lowest)
    for axis, frame in enumerate(frames):
        data = data.unfold(2 + axis, frame.kernel, frame.stride).narrow(2 + axis, 0, frame.outputs)
    return from_channels_first(node, data.amax(tuple(range(-len(frames), 0))))


def _own_kernel(node: Node, data: Tensor, frames: tuple[Window, ...], *, mean: bool) -> Tensor | None:
    """The pool by our kernel, or None where PyTorch's has to do it."""
    if data.is_cuda and not node.nchw and not channels_first(node) and can_compile():
        from msplit.engines.cuda.kernels import pool

        if pool.fits(data, frames):
            return pool.pool(data, frames, mean=mean)
    return None


def _frames(
    node: Node, data: Tensor, ksize: Sequence[int], strides: Sequence[int]
) -> tuple[tuple[int, ...], tuple[Window, ...], Tensor]:
    """The window's size, the windows, and the data with its channels in axis 1."""
    kernel = spatial(node, ksize, "ksize")
    sizes = data.shape[2:] if channels_first(node) else data.shape[1:-1]
    frames = windows(node, sizes, kernel, spatial(node, strides, "strides"))
    return kernel, frames, to_channels_first(node, data)


def _fit(frames: tuple[Window, ...]) -> tuple[tuple[int, ...], tuple[int, ...], bool] | None:
    """How PyTorch's pools make TensorFlow's windows: padding of both ends, results to skip at the start, and `ceil_mode`.

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


def _cut(result: Tensor, frames: tuple[Window, ...], skips: tuple[int, ...]) -> Tensor:
    """The windows that TensorFlow has, out of those that PyTorch made."""
    for axis, (frame, skip) in enumerate(zip(frames, skips, strict=True), 2):
        if result.shape[axis] != frame.outputs:
            result = result.narrow(axis, skip, frame.outputs)
    return result


def _strides(frames: tuple[Window, ...]) -> tuple[int, ...]:
    return tuple(frame.stride for frame in frames)
