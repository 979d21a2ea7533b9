"""Padding with a constant, or with the tensor's own elements mirrored."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node, Unsupported
from msplit.engines.cuda.ops.axes import lies_nchw

_TO_NCHW, _TO_NHWC = (0, 3, 1, 2), (0, 2, 3, 1)


@lowering("Pad", static=(1,))
def pad(node: Node, x: Tensor, paddings: np.ndarray) -> Tensor:
    """The tensor with zeros put before and after it along every axis."""
    pairs = _pairs(node, x, paddings)
    if not any(map(any, pairs)):
        return x
    if lies_nchw(x):
        # Padding makes a fresh tensor whose last axis is the densest: in NCHW order it keeps the input's layout.
        return _zero_padded(x.permute(_TO_NCHW), [pairs[dim] for dim in _TO_NCHW]).permute(_TO_NHWC)
    return _zero_padded(x, pairs)


@lowering("PadV2", static=(1,))
def pad_v2(node: Node, x: Tensor, paddings: np.ndarray, constant: Tensor) -> Tensor:
    """The tensor with a constant put before and after it along every axis."""
    pairs = _pairs(node, x, paddings)
    if not any(map(any, pairs)):
        return x
    if lies_nchw(x):
        return _padded_with(x.permute(_TO_NCHW), [pairs[dim] for dim in _TO_NCHW], constant).permute(_TO_NHWC)
    return _padded_with(x, pairs, constant)


@lowering("MirrorPad", static=(1,))
def mirror_pad(node: Node, x: Tensor, paddings: np.ndarray) -> Tensor:
    """The tensor with its elements mirrored at its borders, the border repeated (SYMMETRIC) or not (REFLECT)."""
    pairs = _pairs(node, x, paddings)
    skipped = {"REFLECT": 1, "SYMMETRIC": 0}[node.attrs["mode"]]
    for dim, (low, high) in enumerate(pairs):
        if max(low, high) > x.shape[dim] - skipped:
            raise Unsupported(f"{node.name}: padding {low}, {high} is wider than axis {dim} of shape {tuple(x.shape)}")
    if skipped and _is_image(x) and pairs[0] == pairs[3] == (0, 0) and any(pairs[1] + pairs[2]):
        # One kernel for the usual case, images padded in height and width.
        images = torch.nn.functional.pad(x.permute(_TO_NCHW), (*pairs[2], *pairs[1]), mode="reflect")
        return images.permute(_TO_NHWC)
    for dim, (low, high) in enumerate(pairs):
        if low or high:
            size = x.shape[dim]
            before = x.narrow(dim, skipped, low).flip(dim)
            after = x.narrow(dim, size - skipped - high, high).flip(dim)
            x = torch.cat([before, x, after], dim)
    return x


def _is_image(x: Tensor) -> bool:
    return bool(x.dim() == 4 and x.is_floating_point() and x.numel() > 0)


def _pairs(node: Node, x: Tensor, paddings: np.ndarray) -> list[tuple[int, int]]:
    pairs = [(int(low), int(high)) for low, high in np.asarray(paddings).reshape(-1, 2)]
    if len(pairs) != x.dim() or any(low < 0 or high < 0 for low, high in pairs):
        raise Unsupported(f"{node.name}: paddings {pairs} do not fit a tensor of shape {tuple(x.shape)}")
    return pairs


def _zero_padded(x: Tensor, pairs: list[tuple[int, int]]) -> Tensor:
    # `pad` counts axes from the last one back.
    return torch.nn.functional.pad(x, [width for pair in reversed(pairs) for width in pair])


def _padded_with(x: Tensor, pairs: list[tuple[int, int]], constant: Tensor) -> Tensor:
    """Like `_zero_padded`, with a constant that only the device knows."""
    shape = [low + size + high for size, (low, high) in zip(x.shape, pairs, strict=True)]
    result = constant.reshape(()).expand(shape).clone(memory_format=torch.contiguous_format)
    inside = result
    for dim, (low, _) in enumerate(pairs):
        inside = inside.narrow(dim, low, x.shape[dim])
    inside.copy_(x)
    return result
