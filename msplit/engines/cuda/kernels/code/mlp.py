"""The kernel of `kernels.mlp`: the mean of an image, if there is one, and two dense layers behind it."""

from __future__ import annotations

import triton
import triton.language as tl

from msplit.engines.cuda.kernels.code.early import go_on
from msplit.engines.cuda.kernels.code.products import _activate

COUNTS = ["pixels", "share", "hidden", "results", "parts", "activation1", "activation2"]
"""Arguments that are numbers in every kernel, even where they are one: no kernel is compiled anew for it, and loops begin with one."""


@triton.jit(do_not_specialize=[*COUNTS, "rows"])  # type: ignore[untyped-decorator]
def mlp(  # type: ignore[no-untyped-def]
    data, rows, pixels, channels, share, step_n, step_p, step_c,
    out, first, bias1, second, bias2, partial, counters,
    hidden, results, parts, first_c, first_h, second_h, second_r, activation1, activation2,
    BIAS1: tl.constexpr, BIAS2: tl.constexpr, EARLY: tl.constexpr,
    PIXELS: tl.constexpr, CHANNELS: tl.constexpr, HIDDEN: tl.constexpr, RESULTS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Blocks start in the order of their numbers. The first `rows * parts` wait for none, so that all others may wait for them."""
    number = tl.program_id(0)
    if number < rows * parts:
        row = number // parts
        _add_up(
            number % parts, data + row.to(tl.int64) * step_n, first, partial + number * HIDDEN, counters + row,
            pixels, channels, hidden, share, step_p, step_c, first_c, first_h, EARLY, PIXELS, CHANNELS, HIDDEN,
        )  # fmt: skip
    else:
        finish(
            number - rows * parts, out, bias1, second, bias2, partial, counters, hidden, results, parts,
            second_h, second_r, activation1, activation2, BIAS1, BIAS2, EARLY, HIDDEN, RESULTS, PARTS,
        )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _add_up(  # type: ignore[no-untyped-def]
    part, data, first, partial, counter,
    pixels, channels, hidden, share, step_p, step_c, first_c, first_h,
    EARLY: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr, HIDDEN: tl.constexpr,
):  # fmt: skip
    """Adds up some pixels of some channels, and multiplies these by their rows of the first matrix."""
    channel = part % tl.cdiv(channels, CHANNELS) * CHANNELS + tl.arange(0, CHANNELS)
    factors = matrix(first, channel, channels, tl.arange(0, HIDDEN), hidden, first_c, first_h)
    if EARLY:
        go_on()
    mean = mean_of(part, data, 1.0, 0.0, pixels, channels, share, step_p, step_c, False, False, False, PIXELS, CHANNELS)
    hand_in(mean, factors, partial, counter, HIDDEN)


@triton.jit  # type: ignore[untyped-decorator]
def mean_of(  # type: ignore[no-untyped-def]
    part, data, scale, shift, pixels, channels, share, step_p, step_c,
    SCALE: tl.constexpr, SHIFT: tl.constexpr, CUT: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Some pixels of some channels, scaled, shifted and cut off below zero, added up, and divided by how many pixels there are in all."""
    chunks = tl.cdiv(channels, CHANNELS)
    channel = part % chunks * CHANNELS + tl.arange(0, CHANNELS)
    begin = part // chunks * share
    end = tl.minimum(begin + share, pixels)
    sums = tl.zeros([PIXELS, CHANNELS], tl.float32)
    while begin < end:
        pixel = begin + tl.arange(0, PIXELS)
        inside = (pixel < end)[:, None] & (channel < channels)[None, :]
        value = tl.load(data + pixel[:, None] * step_p + channel[None, :] * step_c, mask=inside, other=0).to(tl.float32)
        if SCALE:
            value *= scale[None, :]
        if SHIFT:
            value = tl.where(inside, value + shift[None, :], 0.0)
        if CUT:
            value = tl.where(value < 0, 0.0, value)
        sums += value
        begin += PIXELS
    return tl.sum(sums, 0) / pixels


@triton.jit
def matrix(start, row, rows, column, columns, step_r, step_c):  # type: ignore[no-untyped-def]
    """A part of a matrix, in float32, zero where there is none."""
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    return tl.load(start + row[:, None] * step_r + column[None, :] * step_c, mask=inside, other=0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def hand_in(mean, factors, partial, counter, HIDDEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Leaves the product of some channels with their rows of the first matrix to the blocks that wait for all of them."""
    tl.store(partial + tl.arange(0, HIDDEN), tl.sum(mean[:, None] * factors, 0))
    tl.debug_barrier()  # all of it is there before the block counts itself
    tl.atomic_add(counter, 1, sem="release", scope="gpu")


@triton.jit
def wait_for(counter, parts):  # type: ignore[no-untyped-def]
    """Waits until a counter says that all parts are there, and what is in them can be read."""
    done = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
    while (done >= 0) & (done < parts):
        done = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")


@triton.jit  # type: ignore[untyped-decorator]
def finish(  # type: ignore[no-untyped-def]
    number, out, bias1, second, bias2, partial, counters,
    hidden, results, parts, second_h, second_r, activation1, activation2,
    BIAS1: tl.constexpr, BIAS2: tl.constexpr, EARLY: tl.constexpr,
    HIDDEN: tl.constexpr, RESULTS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Waits for all parts of a row, adds them up, always in the same order, and multiplies by some columns of the second matrix."""
    slices = tl.cdiv(results, RESULTS)
    row = number // slices
    slice = number % slices
    counter = counters + row
    result = slice * RESULTS + tl.arange(0, RESULTS)
    unit = tl.arange(0, HIDDEN)
    factors = matrix(second, unit, hidden, result, results, second_h, second_r)
    shift1 = tl.load(bias1 + unit, mask=(unit < hidden) & BIAS1, other=0).to(tl.float32)
    shift2 = tl.load(bias2 + result, mask=(result < results) & BIAS2, other=0).to(tl.float32)
    if EARLY:
        go_on()
    wait_for(counter, parts)
    # Once all have seen it, it is zero, for the next run of the same graph; until then below zero, or not less than `parts`.
    tl.atomic_add(counter, tl.where(slice == 0, 1 - parts - slices, 1), sem="relaxed", scope="gpu")
    sums = tl.zeros([PARTS, HIDDEN], tl.float32)
    start = parts * 0  # no constant, which a loop could not change
    while start < parts:
        part = start + tl.arange(0, PARTS)
        place = partial + (row * parts + part)[:, None] * HIDDEN + unit[None, :]
        sums += tl.load(place, mask=(part < parts)[:, None], other=0.0, cache_modifier=".cg")
        start += PARTS
    inner = _activate(tl.sum(sums, 0) + shift1, activation1)
    found = _activate(tl.sum(inner[:, None] * factors, 0) + shift2, activation2)
    tl.store(out + row * results + result, found.to(out.dtype.element_ty), mask=result < results)
