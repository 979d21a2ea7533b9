"""Convolutions of each channel by itself, of NHWC data, with a bias and an activation in the same kernel. On a GPU.

The library's kernels for such data are slow at small batches, and a bias is a further kernel. Here a block has some pixels of some
channels that lie side by side, and adds up one element of the window after the other in float32. The kernel itself is in `code.depthwise`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from msplit.engines.cuda.ir.windows import Window
from msplit.engines.cuda.kernels.activations import NUMBERS
from msplit.engines.cuda.kernels.conv import LARGEST, is_nhwc
from msplit.engines.cuda.kernels.launch import Code, launch
from msplit.engines.cuda.kernels.tiles import Tiles, shares

_CONVOLVE = Code("depthwise", "convolve_channels")

_WIDEST = 64
"""Elements of a window: they are written out one by one."""


def fits(data: Tensor, filter: Tensor, results: int) -> bool:
    """Whether the kernel can convolve this, to so many results: NHWC floats on a GPU, channels side by side, one result of each."""
    window = filter.shape[0] * filter.shape[1] <= _WIDEST
    return is_nhwc(data, filter) and filter.shape[3] == 1 and window and 0 < results < LARGEST


def convolve(
    data: Tensor,
    filter: Tensor,
    frames: Sequence[Window],
    tiles: Tiles,
    bias: Tensor | None = None,
    *,
    activation: str = "",
) -> Tensor:
    """``activation(convolution + bias)``, NHWC, contiguous.

    Args:
        data: NHWC, of any strides but the last, which is 1.
        filter: HWC1, of any strides that let height and width be seen as one axis.
        frames: The windows along height and width.
        tiles: How the work is cut: pixels, channels (`results`) and warps.
        bias: One number per channel.
        activation: What is done to the result, one of `activations.NUMBERS`.
    """
    images, height, width, channels = data.shape
    vertical, horizontal = frames
    flat = filter.reshape(vertical.kernel * horizontal.kernel, channels)
    out = data.new_empty((images, vertical.outputs, horizontal.outputs, channels))
    pixels = images * vertical.outputs * horizontal.outputs
    launch(_CONVOLVE, (shares(pixels, tiles.pixels), shares(channels, tiles.results)))(
        data,
        flat,
        data if bias is None else bias,
        out,
        pixels,
        height,
        width,
        channels,
        vertical.outputs,
        horizontal.outputs,
        vertical.before,
        horizontal.before,
        vertical.dilation,
        horizontal.dilation,
        *data.stride()[:3],
        *flat.stride(),
        KERNEL_H=vertical.kernel,
        KERNEL_W=horizontal.kernel,
        STRIDE_H=vertical.stride,
        STRIDE_W=horizontal.stride,
        BIAS=bias is not None,
        ACTIVATION=NUMBERS[activation],
        EARLY=tiles.early,
        PIXELS=tiles.pixels,
        CHANNELS=tiles.results,
        num_warps=tiles.warps,
        **({"launch_pdl": True} if tiles.early else {}),
    )
    return out
