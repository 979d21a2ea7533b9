"""Windows of images as values of their own, NHWC."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node, Unsupported
from msplit.engines.cuda.ir.windows import spatial, windows


@lowering("ExtractImagePatches")
def extract_patches(node: Node, images: Tensor) -> Tensor:
    """Every window's pixels side by side in the channels; zeros where a window hangs over the image."""
    kernel = spatial(node, node.attrs["ksizes"], "ksizes")
    found = _patches(node, images, kernel, node.attrs["strides"], node.attrs["rates"], 0)
    return found.permute(0, 1, 2, 4, 5, 3).reshape(*found.shape[:3], -1)


@lowering("Dilation2D")
def dilation(node: Node, images: Tensor, filter: Tensor) -> Tensor:
    """The largest sum of a pixel and the filter's number for it in each window, by channel."""
    if not images.is_floating_point():
        raise Unsupported(f"Dilation2D {node.name}: only of floats")
    lowest = torch.finfo(images.dtype).min
    found = _patches(node, images, filter.shape[:2], node.attrs["strides"], node.attrs["rates"], lowest)
    return (found + filter.permute(2, 0, 1)).amax((-2, -1))


def _patches(
    node: Node, images: Tensor, kernel: tuple[int, ...], strides: tuple[int, ...], rates: tuple[int, ...], fill: float
) -> Tensor:
    """Windows as (batch, height, width, channels, window's height, window's width): a view, of the padded images where there is padding."""
    steps, gaps = spatial(node, strides, "strides"), spatial(node, rates, "rates")
    down, across = windows(node, images.shape[1:3], kernel, steps, gaps)
    pads = (0, 0, max(across.before, 0), max(across.after, 0), max(down.before, 0), max(down.after, 0))
    padded = F.pad(images, pads, value=fill) if any(pads) else images
    found = padded.unfold(1, down.reach, down.stride).unfold(2, across.reach, across.stride)
    return found[..., :: down.dilation, :: across.dilation]
