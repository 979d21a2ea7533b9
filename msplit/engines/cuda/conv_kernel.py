"""Convolutions of NHWC data as one tiled product with its epilogue. Needs Triton and a GPU; import it only when both are there.

Libraries are best where a convolution fills the GPU. At batch 1 most do not: then small tiles, padding that may differ between the
ends of an axis and a bias and an activation in the same kernel take down to half the time (see `convolutions.py`, which
measures). The rows of the product are the result's pixels, its columns the output channels, and it sums over the window's elements and
the input channels (an implicit GEMM; Chetlur et al., cuDNN, 2014).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from msplit.engines.cuda.windows import Window

Tiles = tuple[int, int, int, int, int]
"""Pixels, output channels and summands of a tile; warps; stages of the pipeline."""

_LARGEST = 2**31 - 1
"""Positions are counted with 32 bits."""

_NARROW = 16
"""With fewer input channels than this, a tile sums over several of the window's elements at once."""

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@triton.jit  # type: ignore[untyped-decorator]
def _convolve(  # type: ignore[no-untyped-def]
    data,
    filter,
    bias,
    side,
    out,
    pixels,
    height,
    width,
    channels,
    results,
    rows,
    columns,
    kernel_w,
    taps,
    stride_h,
    stride_w,
    dilation_h,
    dilation_w,
    before_h,
    before_w,
    step_n,
    step_h,
    step_w,
    filter_tap,
    filter_c,
    filter_o,
    PIXELS: tl.constexpr,
    RESULTS: tl.constexpr,
    SUMMANDS: tl.constexpr,
    NARROW: tl.constexpr,
    BIAS: tl.constexpr,
    SIDE: tl.constexpr,
    RELU: tl.constexpr,
    PRECISION: tl.constexpr,
):
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    result = tl.program_id(1) * RESULTS + tl.arange(0, RESULTS)
    summand = tl.arange(0, SUMMANDS)
    column = pixel % columns
    rest = pixel // columns
    top = rest % rows * stride_h - before_h
    left = column * stride_w - before_w
    start = rest // rows * step_n + top * step_h + left * step_w
    there = pixel < pixels
    wanted = result < results
    total = tl.zeros([PIXELS, RESULTS], tl.float32)
    if NARROW:
        count = taps * channels
        for first in range(0, count, SUMMANDS):
            place = first + summand
            exists = place < count
            tap = place // channels
            channel = place - tap * channels
            down = tap // kernel_w * dilation_h
            right = tap % kernel_w * dilation_w
            y = top[:, None] + down[None, :]
            x = left[:, None] + right[None, :]
            inside = (y >= 0) & (y < height) & (x >= 0) & (x < width) & there[:, None] & exists[None, :]
            offset = down * step_h + right * step_w + channel
            a = tl.load(data + start[:, None] + offset[None, :], mask=inside, other=0)
            at = (tap * filter_tap + channel * filter_c)[:, None] + (result * filter_o)[None, :]
            b = tl.load(filter + at, mask=exists[:, None] & wanted[None, :], other=0)
            total = tl.dot(a, b, total, input_precision=PRECISION)
    else:
        blocks = tl.cdiv(channels, SUMMANDS)
        for number in range(taps * blocks):
            tap = number // blocks
            channel = (number - tap * blocks) * SUMMANDS + summand
            down = tap // kernel_w * dilation_h
            right = tap % kernel_w * dilation_w
            y = top + down
            x = left + right
            inside = (y >= 0) & (y < height) & (x >= 0) & (x < width) & there
            exists = channel < channels
            offset = start + down * step_h + right * step_w
            a = tl.load(data + offset[:, None] + channel[None, :], mask=inside[:, None] & exists[None, :], other=0)
            at = (tap * filter_tap + channel * filter_c)[:, None] + (result * filter_o)[None, :]
            b = tl.load(filter + at, mask=exists[:, None] & wanted[None, :], other=0)
            total = tl.dot(a, b, total, input_precision=PRECISION)
    if BIAS:
        total += tl.load(bias + result, mask=wanted, other=0)[None, :].to(tl.float32)
    place = pixel[:, None] * results + result[None, :]
    exists = there[:, None] & wanted[None, :]
    if SIDE:
        total += tl.load(side + place, mask=exists, other=0).to(tl.float32)
    if RELU:
        total = tl.maximum(total, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=exists)


def fits(data: Tensor, filter: Tensor, frames: Sequence[Window]) -> bool:
    """Whether the kernel can convolve this: NHWC floats on a GPU, channels side by side, one group."""
    return (
        data.is_cuda
        and data.dim() == 4
        and data.dtype in _DTYPES
        and filter.dtype == data.dtype
        and filter.dim() == 4
        and data.stride(-1) == 1
        and data.shape[-1] == filter.shape[-2]
        and data.shape[0] * frames[0].outputs * frames[1].outputs * filter.shape[-1] < _LARGEST
        and 0 < sum((size - 1) * step for size, step in zip(data.shape, data.stride(), strict=True)) < _LARGEST
    )


def convolve(
    data: Tensor,
    filter: Tensor,
    frames: Sequence[Window],
    tiles: Tiles,
    bias: Tensor | None = None,
    side: Tensor | None = None,
    *,
    relu: bool = False,
) -> Tensor:
    """``relu(convolution + bias + side)``. Products of float32 are in TF32 where that is allowed for convolutions.

    Args:
        data: NHWC, of any strides but the last, which is 1.
        filter: HWIO, of any strides that let height and width be seen as one axis.
        frames: The windows along height and width.
        tiles: How the work is cut.
        bias: One number per output channel.
        side: Of the result's shape.
        relu: Cut the result off below zero.

    Returns:
        NHWC, contiguous.
    """
    images, height, width, channels = data.shape
    taps = filter.shape[0] * filter.shape[1]
    flat = filter.reshape(taps, channels, filter.shape[3])
    vertical, horizontal = frames
    out = data.new_empty((images, vertical.outputs, horizontal.outputs, filter.shape[3]))
    pixels = images * vertical.outputs * horizontal.outputs
    in_tile, in_columns, summands, warps, stages = tiles
    _convolve[(triton.cdiv(pixels, in_tile), triton.cdiv(filter.shape[3], in_columns))](
        data,
        flat,
        data if bias is None else bias,
        data if side is None else side.contiguous(),
        out,
        pixels,
        height,
        width,
        channels,
        filter.shape[3],
        vertical.outputs,
        horizontal.outputs,
        horizontal.kernel,
        taps,
        vertical.stride,
        horizontal.stride,
        vertical.dilation,
        horizontal.dilation,
        vertical.before,
        horizontal.before,
        data.stride(0),
        data.stride(1),
        data.stride(2),
        flat.stride(0),
        flat.stride(1),
        flat.stride(2),
        PIXELS=in_tile,
        RESULTS=in_columns,
        SUMMANDS=summands,
        NARROW=channels < _NARROW,
        BIAS=bias is not None,
        SIDE=side is not None,
        RELU=relu,
        PRECISION="tf32" if torch.backends.cudnn.allow_tf32 else "ieee",
        num_warps=warps,
        num_stages=stages,
    )
    return out
