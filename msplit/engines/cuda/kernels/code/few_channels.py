"""The kernel of `kernels.few_channels`: a tile of a convolution of NHWC data with few channels.

The product is that of `code.convolutions`, but a tile's summands are the channels of several elements of the window, as they lie in
memory. So little is multiplied that nothing else may take long. The size of the window and the number of channels are constants, so that
nothing is divided to find a summand; a tile is a rectangle of one image's pixels, which only its first one has to be divided for. Where a
thread has a pixel to itself (32 for each warp), where its summands lie is known when the kernel is compiled, but for the first one of
each row.

The first block of an early kernel (see `code.early`) fetches the filter, which no kernel writes; then it waits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from msplit.engines.cuda.kernels.code.convolutions import _activated, _quotient
from msplit.engines.cuda.kernels.code.early import LINE, fetch, go_on
from msplit.engines.cuda.kernels.code.tensor_cores import for_products, rounded

_SIZES = (  # noqa: SIM905 (a line for each is too many to read)
    "height width results rows columns stride_h stride_w dilation_h before_h before_w step_n step_h step_out rounds "
    "across down by_across by_down shift_across shift_down"
).split()
"""Numbers that the compiler must not look at, as those of `code.convolutions`."""


@triton.jit
def _within(position, size):  # type: ignore[no-untyped-def]
    """Whether a position is from 0 to below a size: one comparison, as what is negative is large without its sign."""
    return position.to(tl.uint32, bitcast=True) < size.to(tl.uint32, bitcast=True)


@triton.jit(do_not_specialize=_SIZES)  # type: ignore[untyped-decorator]
def convolve_few_channels(  # type: ignore[no-untyped-def]
    data, filter, bias, side, out, height, width, results, rows, columns, stride_h, stride_w, dilation_h,
    before_h, before_w, step_n, step_h, step_out, rounds, across, down, by_across, by_down, shift_across, shift_down,
    PIXELS: tl.constexpr, COLUMNS: tl.constexpr, RESULTS: tl.constexpr, SUMMANDS: tl.constexpr, UNROLLED: tl.constexpr,
    KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr, CHANNELS: tl.constexpr, DILATION_W: tl.constexpr,
    STEP_W: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, IN_FIRST: tl.constexpr, PADDED: tl.constexpr,
    BIAS: tl.constexpr, SIDE: tl.constexpr, ACTIVATION: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
    LINES: tl.constexpr,
):  # fmt: skip
    """A block's tile: see `few_channels.convolve`, which cuts and launches."""
    # Sizes come divided by what they are multiples of, as in `code.convolutions`.
    step_n, step_h = step_n * IN, step_h * IN
    results, step_out = results * OUT, step_out * OUT
    summands: tl.constexpr = KERNEL_H * KERNEL_W * CHANNELS
    result = tl.program_id(1) * RESULTS + tl.arange(0, RESULTS)
    wanted = result < results
    tile = tl.program_id(0)
    line = _quotient(tile, by_across, shift_across)
    image = _quotient(line, by_down, shift_down)
    within = tl.arange(0, PIXELS)
    row = (line - image * down) * (PIXELS // COLUMNS) + within // COLUMNS
    column = (tile - line * across) * COLUMNS + within % COLUMNS
    there = (row < rows) & (column < columns)
    top = row * stride_h - before_h
    left = column * stride_w - before_w
    first = data + (image * step_n + top * step_h + left * STEP_W)[:, None]
    total = tl.zeros([PIXELS, RESULTS], tl.float32)
    if EARLY:
        if tile == 0:
            apart: tl.constexpr = LINE * 8 // filter.dtype.element_ty.primitive_bitwidth
            fetched = tl.arange(0, LINES) * apart
            fetch(filter + fetched, fetched < summands * results)
        go_on()
    for start in tl.range(0, summands, SUMMANDS, loop_unroll_factor=UNROLLED):
        place = start + tl.arange(0, SUMMANDS)
        exists = place < summands
        tap = place // CHANNELS
        below = tap // KERNEL_W * dilation_h
        right = tap % KERNEL_W * DILATION_W
        inside = there[:, None] & exists[None, :]
        if PADDED:
            inside &= _within(top[:, None] + below[None, :], height) & _within(left[:, None] + right[None, :], width)
        # Added one after the other, since the last offsets are constants, which the instruction itself adds.
        from_data = first + (below * step_h)[None, :] + (right * STEP_W + place % CHANNELS)[None, :]
        a = tl.load(from_data, mask=inside, other=0)
        if IN_FIRST:
            from_filter = filter + place[:, None] + (result * summands)[None, :]
        else:
            from_filter = filter + (place * results)[:, None] + result[None, :]
        b = tl.load(from_filter, mask=exists[:, None] & wanted[None, :], other=0)
        total = tl.dot(rounded(a.to(b.dtype), PRECISION), b, total, input_precision=PRECISION)
    if BIAS:
        total += tl.load(bias + result, mask=wanted, other=0)[None, :].to(tl.float32)
    pixel = (image * rows + row) * columns + column
    exists = there[:, None] & wanted[None, :]
    if SIDE:
        total += tl.load(side + pixel[:, None] * results + result[None, :], mask=exists, other=0).to(tl.float32)
    total = for_products(_activated(total, ACTIVATION).to(out.dtype.element_ty), rounds)
    tl.store(out + pixel[:, None] * step_out + result[None, :], total, mask=exists)
