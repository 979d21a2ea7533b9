"""Convolutions of NHWC data as one tiled product with its epilogue. Needs Triton and a GPU; import it only when both are there.

Libraries are best where a convolution fills the GPU. At batch 1 most do not: then small tiles, padding that may differ between the
ends of an axis and a bias and an activation in the same kernel take down to half the time (see `convolutions.py`, which
measures). The rows of the product are the result's pixels, its columns the output channels, and it sums over the window's elements and
the input channels (an implicit GEMM; Chetlur et al., cuDNN, 2014). Where that makes too few tiles to fill the GPU, several blocks share the
summands of a tile (split-K); the one that is done last adds all parts up, always in the same order.

Convolutions of the same data with windows of the same kind (siblings) are one product with more columns: their filters side by side. Every
tile of columns belongs to one of them and is written to that one's own result.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from msplit.engines.cuda import tickets
from msplit.engines.cuda.windows import Window


class Tiles(NamedTuple):
    """How the work is cut.

    Attributes:
        pixels: Of a tile.
        results: Output channels of a tile.
        summands: Added up at a time.
        warps: Of a block.
        stages: Of the pipeline of loads.
        parts: Blocks that share a tile's summands.
    """

    pixels: int
    results: int
    summands: int
    warps: int
    stages: int
    parts: int = 1


_LARGEST = 2**31 - 1
"""Positions are counted with 32 bits."""

_NARROW = 16
"""With fewer input channels than this, a tile sums over several of the window's elements at once."""

_MOST_PARTS = 8

MOST_SIBLINGS = 4
"""Convolutions that one kernel does."""

_ALIGNED = 64
"""The results of siblings lie in one block of memory, each at a multiple of this many elements."""

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


_SIZES = (  # noqa: SIM905 (a line for each is too many to read)
    "pixels height width channels results results_1 results_2 results_3 rows columns kernel_w taps stride_h stride_w "
    "dilation_h dilation_w before_h before_w step_n step_h step_w filter_tap filter_c filter_o share parts"
).split()
"""Numbers that the compiler must not look at: it would compile anew for nearly every convolution. What matters is constant."""


@triton.jit(do_not_specialize=_SIZES)  # type: ignore[untyped-decorator]
def _convolve(  # type: ignore[no-untyped-def]
    data,
    filter,
    bias,
    side,
    out,
    partial,
    counters,
    pixels,
    height,
    width,
    channels,
    results,
    results_1,
    results_2,
    results_3,
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
    share,
    parts,
    PIXELS: tl.constexpr,
    RESULTS: tl.constexpr,
    SUMMANDS: tl.constexpr,
    ALIGNED: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    IN_FIRST: tl.constexpr,
    POINT: tl.constexpr,
    NARROW: tl.constexpr,
    BIAS: tl.constexpr,
    SIDE: tl.constexpr,
    RELU: tl.constexpr,
    PRECISION: tl.constexpr,
    SPLIT: tl.constexpr,
    SIBLINGS: tl.constexpr,
):
    # Sizes come divided by what they are multiples of, so that the compiler knows and loads several elements at once.
    channels, step_n, step_h, step_w = channels * IN, step_n * IN, step_h * IN, step_w * IN
    results *= OUT
    if IN_FIRST:  # input channels lie side by side in the filter
        filter_c = 1
        filter_tap, filter_o = filter_tap * IN, filter_o * IN
    else:
        filter_o = 1
        filter_tap, filter_c = filter_tap * OUT, filter_c * OUT
    # The tile's own convolution: its number of output channels, its first tile and column, and where its result begins.
    tile = tl.program_id(1)
    first_tile = 0
    first_column = 0
    first_place = 0
    if SIBLINGS:  # a sibling that is not there has no output channels, and begins behind the last tile
        next_tile = tl.cdiv(results, RESULTS)
        next_column = results
        next_place = tl.cdiv(pixels * results, ALIGNED)
        for sibling in tl.static_range(3):
            size = (results_1 if sibling == 0 else (results_2 if sibling == 1 else results_3)) * OUT
            own = tile >= next_tile
            results = tl.where(own, size, results)
            first_tile = tl.where(own, next_tile, first_tile)
            first_column = tl.where(own, next_column, first_column)
            first_place = tl.where(own, next_place, first_place)
            next_tile += tl.cdiv(size, RESULTS)
            next_column += size
            next_place += tl.cdiv(pixels * size, ALIGNED)
        out += first_place * ALIGNED
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    result = (tile - first_tile) * RESULTS + tl.arange(0, RESULTS)
    column_of_filter = first_column + result
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
        start_at = 0
        if SPLIT:
            start_at = tl.program_id(2) * share * SUMMANDS
            count = tl.minimum(count, start_at + share * SUMMANDS)
        for first in range(start_at, count, SUMMANDS):
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
            at = (tap * filter_tap + channel * filter_c)[:, None] + (column_of_filter * filter_o)[None, :]
            b = tl.load(filter + at, mask=exists[:, None] & wanted[None, :], other=0)
            total = tl.dot(a, b, total, input_precision=PRECISION)
    else:
        blocks = tl.cdiv(channels, SUMMANDS)
        start_at = 0
        end = taps * blocks
        if SPLIT:
            start_at = tl.program_id(2) * share
            end = tl.minimum(end, start_at + share)
        for number in range(start_at, end):
            if POINT:
                tap = 0
                channel = number * SUMMANDS + summand
                inside = there
                offset = start
            else:
                tap = number // blocks
                channel = (number - tap * blocks) * SUMMANDS + summand
                down = tap // kernel_w * dilation_h
                right = tap % kernel_w * dilation_w
                y = top + down
                x = left + right
                inside = (y >= 0) & (y < height) & (x >= 0) & (x < width) & there
                offset = start + down * step_h + right * step_w
            exists = channel < channels
            a = tl.load(data + offset[:, None] + channel[None, :], mask=inside[:, None] & exists[None, :], other=0)
            at = (tap * filter_tap + channel * filter_c)[:, None] + (column_of_filter * filter_o)[None, :]
            b = tl.load(filter + at, mask=exists[:, None] & wanted[None, :], other=0)
            total = tl.dot(a, b, total, input_precision=PRECISION)
    if SPLIT:
        # What others added up must be there before this block counts itself, and be read only after the last one has.
        number = tile * tl.num_programs(0) + tl.program_id(0)
        inner = tl.arange(0, PIXELS)[:, None] * RESULTS + tl.arange(0, RESULTS)[None, :]
        start_of = partial + number * parts * (PIXELS * RESULTS)
        tl.store(start_of + tl.program_id(2) * (PIXELS * RESULTS) + inner, total)
        tl.debug_barrier()
        if tl.atomic_add(counters + number, 1, sem="acq_rel", scope="gpu") != parts - 1:
            return
        tl.store(counters + number, 0)  # for the next run of the same graph
        total = tl.zeros([PIXELS, RESULTS], tl.float32)
        for one in tl.range(0, parts, loop_unroll_factor=4):
            total += tl.load(start_of + one * (PIXELS * RESULTS) + inner, cache_modifier=".cg")
    if BIAS:
        total += tl.load(bias + column_of_filter, mask=wanted, other=0)[None, :].to(tl.float32)
    place = pixel[:, None] * results + result[None, :]
    exists = there[:, None] & wanted[None, :]
    if SIDE:
        total += tl.load(side + place, mask=exists, other=0).to(tl.float32)
    if RELU:
        total = tl.maximum(total, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=exists)


def summing_steps(data: Tensor, filter: Tensor, tiles: Tiles) -> int:
    """How many tiles of summands a convolution adds up: more blocks than these can not share them."""
    taps, channels, summands = int(filter.shape[0] * filter.shape[1]), int(data.shape[-1]), tiles[2]
    return -(-taps * channels // summands) if channels < _NARROW else taps * -(-channels // summands)


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
        and data.shape[0] * frames[0].outputs * frames[1].outputs * filter.shape[-1] * _MOST_PARTS < _LARGEST
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
    return convolve_siblings(data, filter, frames, tiles, bias, (int(filter.shape[3]),), side=side, relu=relu)[0]


def convolve_siblings(
    data: Tensor,
    filter: Tensor,
    frames: Sequence[Window],
    tiles: Tiles,
    bias: Tensor | None,
    sizes: Sequence[int],
    *,
    side: Tensor | None = None,
    relu: bool = False,
) -> list[Tensor]:
    """Convolutions of the same data, as `convolve` does one.

    Args:
        data: NHWC, of any strides but the last, which is 1.
        filter: All filters, side by side along the output channels.
        frames: The windows along height and width.
        tiles: How the work is cut.
        bias: One number per output channel of all.
        sizes: Output channels of each, at most `MOST_SIBLINGS` of them.
        side: Of the result's shape; for one convolution only.
        relu: Cut the results off below zero.

    Returns:
        A tensor per convolution: NHWC, contiguous, parts of one block of memory.
    """
    images, height, width, channels = data.shape
    taps = filter.shape[0] * filter.shape[1]
    flat = filter.reshape(taps, channels, filter.shape[3])
    vertical, horizontal = frames
    steps = data.stride()[:3]
    in_first = flat.stride(1) == 1
    filter_steps = flat.stride()
    if not in_first and filter_steps[2] != 1:
        flat = flat.contiguous()
        filter_steps = flat.stride()
    of_in = _common(channels, *steps, *((filter_steps[0], filter_steps[2]) if in_first else ()))
    of_out = _common(*sizes, *(() if in_first else filter_steps[:2]))
    of_filter = of_in if in_first else of_out
    point = taps == 1 and all(frame.before == frame.after == 0 for frame in frames)
    pixels = images * vertical.outputs * horizontal.outputs
    places = [0, *accumulate(triton.cdiv(pixels * size, _ALIGNED) for size in sizes)]
    out = data.new_empty(places[-1] * _ALIGNED if len(sizes) > 1 else pixels * sizes[0])
    in_tile, in_columns, summands, warps, stages, parts = Tiles(*tiles)
    grid = triton.cdiv(pixels, in_tile), sum(triton.cdiv(size, in_columns) for size in sizes)
    steps_in_all = summing_steps(data, filter, tiles)
    share = triton.cdiv(steps_in_all, parts)
    parts = triton.cdiv(steps_in_all, share)
    counters = tickets.take(data.device, grid[0] * grid[1]) if parts > 1 else None
    if counters is None:
        parts, share = 1, steps_in_all
        partial = counters = out
    else:
        partial = data.new_empty(parts * grid[0] * grid[1] * in_tile * in_columns, dtype=torch.float32)
    _convolve[(*grid, parts)](
        data,
        flat,
        data if bias is None else bias,
        data if side is None else side.contiguous(),
        out,
        partial,
        counters,
        pixels,
        height,
        width,
        channels // of_in,
        *(size // of_out for size in sizes),
        *[0] * (MOST_SIBLINGS - len(sizes)),
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
        *(step // of_in for step in steps),
        *(step // of_filter for step in filter_steps),
        share,
        parts,
        PIXELS=in_tile,
        RESULTS=in_columns,
        SUMMANDS=summands,
        ALIGNED=_ALIGNED,
        IN=of_in,
        OUT=of_out,
        IN_FIRST=in_first,
        POINT=point,
        NARROW=channels < _NARROW,
        BIAS=bias is not None,
        SIDE=side is not None,
        RELU=relu,
        PRECISION="tf32" if torch.backends.cudnn.allow_tf32 else "ieee",
        SPLIT=parts > 1,
        SIBLINGS=len(sizes) > 1,
        num_warps=warps,
        num_stages=stages,
    )
    shape = (images, vertical.outputs, horizontal.outputs)
    if len(sizes) == 1:
        return [out.view(*shape, sizes[0])]
    return [
        out[place * _ALIGNED :][: pixels * size].view(*shape, size)
        for place, size in zip(places[:-1], sizes, strict=True)
    ]


def _common(*sizes: int) -> int:
    """What all sizes are multiples of, as far as it matters: four elements fill a load of 16 bytes."""
    return next(number for number in (16, 4, 1) if all(size % number == 0 for size in sizes))
