"""The kernels of `kernels.channelwise`: some pixels of some channels, each convolved by itself, and what follows their mean."""

from __future__ import annotations

import triton
import triton.language as tl

from msplit.engines.cuda.kernels.code.epilogue import activate, for_products
from msplit.engines.cuda.kernels.code.mlp import COUNTS, finish, hand_in, matrix
from msplit.engines.cuda.kernels.code.products import LINE, fetch, go_on

_SIZES = (  # noqa: SIM905 (a line for each is too many to read)
    "height width channels rows columns before_h before_w dilation_h dilation_w step_n step_h step_w filter_tap filter_c rounds"
).split()
"""Numbers that the compiler must not look at: it would compile anew for nearly every convolution. What matters is constant."""


@triton.jit(do_not_specialize=["pixels", *_SIZES])  # type: ignore[untyped-decorator]
def convolve_channels(  # type: ignore[no-untyped-def]
    data, filter, bias, out, pixels, height, width, channels, rows, columns,
    before_h, before_w, dilation_h, dilation_w, step_n, step_h, step_w, filter_tap, filter_c, rounds,
    KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    BIAS: tl.constexpr, ACTIVATION: tl.constexpr, EARLY: tl.constexpr, ROWS: tl.constexpr, TAPS: tl.constexpr,
    VECTOR: tl.constexpr, BESIDE: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """A block's pixels and channels: see `channelwise.convolve`, which cuts and launches. Channels and steps are counted in vectors. The
    channels of a tap of the filter may lie BESIDE each other."""
    from_pixel = tl.program_id(0) * PIXELS
    pixel = from_pixel + tl.arange(0, PIXELS)
    from_channel = tl.program_id(1) * CHANNELS
    channel = from_channel + tl.arange(0, CHANNELS)
    there = pixel < pixels
    total = _convolved(
        data, filter, bias, from_pixel, pixel, from_channel, there, height, width, channels, rows, columns,
        before_h, before_w, dilation_h, dilation_w, step_n, step_h, step_w, filter_tap, filter_c,
        KERNEL_H, KERNEL_W, STRIDE_H, STRIDE_W, BIAS, ACTIVATION, EARLY, ROWS, TAPS, VECTOR, BESIDE, PIXELS, CHANNELS,
    )  # fmt: skip
    place = (pixel * channels * VECTOR)[:, None] + channel[None, :]
    stored = for_products(total.to(out.dtype.element_ty), rounds)
    tl.store(out + place, stored, mask=there[:, None] & (channel < channels * VECTOR)[None, :])


@triton.jit(do_not_specialize=["strips", *_SIZES])  # type: ignore[untyped-decorator]
def convolve_strips(  # type: ignore[no-untyped-def]
    data, filter, bias, out, strips, height, width, channels, rows, columns,
    before_h, before_w, dilation_h, dilation_w, step_n, step_h, step_w, filter_tap, filter_c, rounds,
    KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    BIAS: tl.constexpr, ACTIVATION: tl.constexpr, EARLY: tl.constexpr,
    VECTOR: tl.constexpr, BESIDE: tl.constexpr, STRIPS: tl.constexpr, ACROSS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """The same of strips of some pixels of a row, whose windows share what they read. Windows have no gaps along a row."""
    strip = tl.program_id(0) * STRIPS + tl.arange(0, STRIPS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    there = strip < strips
    wanted = channel < channels * VECTOR
    of_filter = channel if BESIDE else channel * filter_c
    across = tl.cdiv(columns, ACROSS)
    line = strip // across
    column = (strip - line * across) * ACROSS
    image = line // rows
    top = (line - image * rows) * STRIDE_H - before_h
    left = column * STRIDE_W - before_w
    start = image * step_n + top * step_h + left * step_w
    if EARLY:
        go_on()
    totals = ()
    for _ in tl.static_range(ACROSS):
        totals += (tl.zeros([STRIPS, CHANNELS], tl.float32),)  # type: ignore[assignment]
    # While one row of the windows is multiplied, the next is loaded. The loop is not written out: 7 rows took 19 s to compile.
    exists = there & (top >= 0) & (top < height)
    seen = _row(data, start, left, channel, exists, wanted, width, step_w, STRIDE_W, KERNEL_W, ACROSS, VECTOR)
    for down in range(KERNEL_H):
        y = top + (down + 1) * dilation_h
        exists = there & (y >= 0) & (y < height) & (down + 1 < KERNEL_H)
        at = start + (down + 1) * dilation_h * step_h
        following = _row(data, at, left, channel, exists, wanted, width, step_w, STRIDE_W, KERNEL_W, ACROSS, VECTOR)
        factors = ()
        for right in tl.static_range(KERNEL_W):
            place = filter + (down * KERNEL_W + right) * filter_tap * VECTOR + of_filter
            factors += (tl.load(place, mask=wanted, other=0).to(tl.float32),)  # type: ignore[assignment]
        sums = ()
        for number in tl.static_range(ACROSS):
            total = totals[number]  # type: ignore[var-annotated]
            for right in tl.static_range(KERNEL_W):
                total += seen[number * STRIDE_W + right].to(tl.float32) * factors[right][None, :]
            sums += (total,)  # type: ignore[assignment]
        totals = sums
        seen = following
    for number in tl.static_range(ACROSS):
        total = totals[number]
        if BIAS:
            total += tl.load(bias + channel, mask=wanted, other=0).to(tl.float32)[None, :]
        stored = for_products(activate(total, ACTIVATION).to(out.dtype.element_ty), rounds)
        place = ((line * columns + column + number) * channels * VECTOR)[:, None] + channel[None, :]
        tl.store(out + place, stored, mask=(there & (column + number < columns))[:, None] & wanted[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _row(  # type: ignore[no-untyped-def]
    data, start, left, channel, exists, wanted, width, step_w,
    STRIDE_W: tl.constexpr, KERNEL_W: tl.constexpr, ACROSS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """A row of the windows of strips, element by element: as many as the windows of a strip have together."""
    found = ()
    for right in tl.static_range((ACROSS - 1) * STRIDE_W + KERNEL_W):
        inside = exists & (left + right >= 0) & (left + right < width)
        at = (start + right * step_w) * VECTOR
        found += (tl.load(data + at[:, None] + channel[None, :], mask=inside[:, None] & wanted[None, :], other=0),)  # type: ignore[assignment]
    return found


@triton.jit(do_not_specialize=[*COUNTS, "images"])  # type: ignore[untyped-decorator]
def convolve_and_squeeze(  # type: ignore[no-untyped-def]
    data, filter, bias, out, pixels, height, width, channels, rows, columns,
    before_h, before_w, dilation_h, dilation_w, step_n, step_h, step_w, filter_tap, filter_c,
    images, factors, first, bias1, second, bias2, partial, counters,
    hidden, results, parts, first_c, first_h, second_h, second_r, activation1, activation2,
    KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    BIAS: tl.constexpr, ACTIVATION: tl.constexpr, EARLY: tl.constexpr, ROWS: tl.constexpr, TAPS: tl.constexpr,
    VECTOR: tl.constexpr, BESIDE: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
    BIAS1: tl.constexpr, BIAS2: tl.constexpr, HIDDEN: tl.constexpr, RESULTS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The same with `pixels` of one image, and what `code.mlp` does with their mean. The first `images * parts` blocks wait for none."""
    number = tl.program_id(0)
    if number < images * parts:
        image = number // parts
        part = number % parts
        chunks = tl.cdiv(channels * VECTOR, CHANNELS)
        from_channel = part % chunks * CHANNELS
        channel = from_channel + tl.arange(0, CHANNELS)
        from_pixel = part // chunks * PIXELS
        inner = from_pixel + tl.arange(0, PIXELS)
        there = inner < pixels
        weights = matrix(first, channel, channels * VECTOR, tl.arange(0, HIDDEN), hidden, first_c, first_h)
        total = _convolved(
            data, filter, bias, from_pixel, image * pixels + inner, from_channel, there, height, width, channels, rows, columns,
            before_h, before_w, dilation_h, dilation_w, step_n, step_h, step_w, filter_tap, filter_c,
            KERNEL_H, KERNEL_W, STRIDE_H, STRIDE_W, BIAS, ACTIVATION, EARLY, ROWS, TAPS, VECTOR, BESIDE, PIXELS, CHANNELS,
        )  # fmt: skip
        mean = tl.sum(tl.where(there[:, None], total, 0.0), 0) / pixels
        hand_in(mean, weights, partial + number * HIDDEN, counters + image, HIDDEN)
        place = ((image * pixels + inner) * channels * VECTOR)[:, None] + channel[None, :]
        wanted = channel < channels * VECTOR
        tl.store(out + place, total.to(out.dtype.element_ty), mask=there[:, None] & wanted[None, :])
    else:
        finish(
            number - images * parts, factors, bias1, second, bias2, partial, counters, hidden, results, parts,
            second_h, second_r, activation1, activation2, BIAS1, BIAS2, EARLY, HIDDEN, RESULTS, PARTS,
        )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _convolved(  # type: ignore[no-untyped-def]
    data, filter, bias, from_pixel, pixel, from_channel, there, height, width, channels, rows, columns,
    before_h, before_w, dilation_h, dilation_w, step_n, step_h, step_w, filter_tap, filter_c,
    KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    BIAS: tl.constexpr, ACTIVATION: tl.constexpr, EARLY: tl.constexpr, ROWS: tl.constexpr, TAPS: tl.constexpr,
    VECTOR: tl.constexpr, BESIDE: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """What the windows of some pixels, counted over all images, give, with bias and activation, in float32.

    Their elements are loaded some rows at once. Left alone, the compiler loads two, waits for them, and loads the next two.
    """
    channel = from_channel + tl.arange(0, CHANNELS)
    wanted = channel < channels * VECTOR
    of_filter = channel if BESIDE else channel * filter_c
    rest = pixel // columns
    image = rest // rows
    top = (rest - image * rows) * STRIDE_H - before_h
    left = (pixel - rest * columns) * STRIDE_W - before_w
    start = image * step_n + top * step_h + left * step_w
    if EARLY:
        if from_pixel == 0:
            apart: tl.constexpr = min(LINE * 8 // filter.dtype.element_ty.primitive_bitwidth, CHANNELS)
            tap = tl.arange(0, TAPS)
            of_channel = from_channel + tl.arange(0, CHANNELS // apart) * apart
            needed = (tap < KERNEL_H * KERNEL_W)[:, None] & (of_channel < channels * VECTOR)[None, :]
            fetch(filter + tap[:, None] * filter_tap * VECTOR + of_channel[None, :] * filter_c, needed)
        go_on()
    total = tl.zeros([PIXELS, CHANNELS], tl.float32)
    for first in tl.static_range(0, KERNEL_H, ROWS):
        seen = ()
        factors = ()
        for down in tl.static_range(first, min(first + ROWS, KERNEL_H)):
            for right in tl.static_range(KERNEL_W):
                y = top + down * dilation_h
                x = left + right * dilation_w
                inside = (y >= 0) & (y < height) & (x >= 0) & (x < width) & there
                at = (start + down * dilation_h * step_h + right * dilation_w * step_w) * VECTOR
                exists = inside[:, None] & wanted[None, :]
                seen += (tl.load(data + at[:, None] + channel[None, :], mask=exists, other=0),)  # type: ignore[assignment]
                place = filter + (down * KERNEL_W + right) * filter_tap * VECTOR + of_filter
                factors += (tl.load(place, mask=wanted, other=0),)  # type: ignore[assignment]
        tl.debug_barrier()  # no load is put off behind it: all are under way before the first is waited for
        for number in tl.static_range(len(seen)):
            total += seen[number].to(tl.float32) * factors[number].to(tl.float32)[None, :]
    if BIAS:
        total += tl.load(bias + channel, mask=wanted, other=0).to(tl.float32)[None, :]
    return activate(total, ACTIVATION)
