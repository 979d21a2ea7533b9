"""Colors of images whose last axis is red, green and blue."""

from __future__ import annotations

import torch
from torch import Tensor

from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node


@lowering("RGBToHSV")
def rgb_to_hsv(node: Node, images: Tensor) -> Tensor:
    """Hue, saturation and value, each in [0, 1] for colors in [0, 1]."""
    hue, low, high = _hue(images)
    return torch.stack((hue, _saturation(low, high), high), -1)


@lowering("HSVToRGB")
def hsv_to_rgb(node: Node, images: Tensor) -> Tensor:
    """Red, green and blue of hue, saturation and value."""
    return _colors(*images.unbind(-1))


@lowering("AdjustHue")
def adjust_hue(node: Node, images: Tensor, delta: Tensor) -> Tensor:
    """The hue turned by `delta` of the wheel; the largest and the smallest of the three colors stay."""
    colors = images.to(torch.float32)
    hue, low, high = _hue(colors)
    hue = torch.remainder(hue + delta, 1)
    return (low[..., None] + (high - low)[..., None] * _wheel(hue)).to(images.dtype)


@lowering("AdjustSaturation")
def adjust_saturation(node: Node, images: Tensor, scale: Tensor) -> Tensor:
    """The saturation times `scale`, within [0, 1]."""
    colors = images.to(torch.float32)
    hue, low, high = _hue(colors)
    saturation = torch.clamp(_saturation(low, high) * scale, 0, 1)
    return _colors(hue, saturation, high).to(images.dtype)


@lowering("AdjustContrastv2")
def adjust_contrast(node: Node, images: Tensor, factor: Tensor) -> Tensor:
    """The distance to each channel's mean over height and width, times `factor`."""
    colors = images.to(torch.float32)
    mean = colors.mean((-3, -2), keepdim=True)
    return ((colors - mean) * factor + mean).to(images.dtype)


def _hue(colors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Hue in [0, 1), 0 for gray, and the smallest and the largest color."""
    red, green, blue = colors.unbind(-1)
    low, high = colors.amin(-1), colors.amax(-1)
    span = 6 * (high - low)
    hue = torch.where(
        red == high,
        (green - blue) / span,
        torch.where(green == high, (blue - red) / span + 2 / 6, (red - green) / span + 4 / 6),
    )
    hue = torch.where(high > low, hue, 0)
    return torch.where(hue < 0, hue + 1, hue), low, high


def _saturation(low: Tensor, high: Tensor) -> Tensor:
    """Of the smallest and the largest color; 0 for black."""
    return torch.where(high > 0, (high - low) / high, 0)


def _colors(hue: Tensor, saturation: Tensor, value: Tensor) -> Tensor:
    """Red, green and blue, on a new last axis."""
    return (1 - saturation[..., None] * (1 - _wheel(hue))) * value[..., None]


def _wheel(hue: Tensor) -> Tensor:
    """How much of its three colors a hue has, each in [0, 1]."""
    turn = 6 * hue
    parts = ((turn - 3).abs() - 1, 2 - (turn - 2).abs(), 2 - (turn - 4).abs())
    return torch.stack(parts, -1).clamp(0, 1)
