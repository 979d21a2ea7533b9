"""Pooling.

PyTorch's pools pad both ends of an axis alike, and may let the last window hang over the end (`ceil_mode`). That covers
TensorFlow's SAME padding without a kernel that pads: see `_fit`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from msplit.engines.cuda.ir.dtypes import dtype_name, torch_dtype
from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node, Unsupported
from msplit.engines.cuda.ir.tf32 import ROUNDS, for_products
from msplit.engines.cuda.ir.windows import (
    Window,
    channels_first,
    from_channels_first,
    spatial,
    to_channels_first,
    windows,
)
from msplit.engines.cuda.kernels import pool as kernels
from msplit.engines.cuda.kernels.launch import can_launch
from msplit.engines.cuda.ops.axes import integers
from msplit.engines.cuda.ops.conv import spatial_sizes

_MAX: dict[int, Callable[..., Tensor]] = {2: F.max_pool2d, 3: F.max_pool3d}
_AVERAGE: dict[int, Callable[..., Tensor]] = {2: F.avg_pool2d, 3: F.avg_pool3d}

_Fit = tuple[tuple[int, ...], tuple[int, ...], bool]


@lowering("AvgPool", "AvgPool3D")
def average_pool(node: Node, data: Tensor) -> Tensor:
    """The average of each window, padding left out."""
    frames = pool_windows(node, data.shape, node.get("ksize"), node.get("strides"))
    result = _own_kernel(node, data, frames, mean=True)
    if result is not None:
        return result
    fit = _fit(frames)
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
    fit = _fit(frames)
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
    result = _own_kernel(node, data, frames, mean=False)
    if result is not None:
        return result
    fit = _fit(frames) if data.is_floating_point() else None
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


def _own_kernel(node: Node, data: Tensor, frames: tuple[Window, ...], *, mean: bool) -> Tensor | None:
    """The pool by our kernel, or None where PyTorch's has to do it."""
    if node.nchw or channels_first(node) or not can_launch(data.device) or not kernels.fits(data, frames):
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


def _fit(frames: tuple[Window, ...]) -> _Fit | None:
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
