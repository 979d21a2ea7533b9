"""The kernel of `kernels.mlp`: the mean of an image, if there is one, and two dense layers behind it."""

from __future__ import annotations

import triton
import triton.language as tl

from msplit.engines.cuda.kernels.code.early import go_on
from msplit.engines.cuda.kernels.code.products import _activate


@triton.jit  # type: ignore[untyped-decorator]
def mlp(  # type: ignore[no-untyped-def]
    out, data, first, bias1, second, bias2, partial, counters,
    rows, pixels, channels, hidden, results, share, parts,
    step_n, step_p, step_c, first_c, first_h, second_h, second_r, activation1, activation2,
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
        slices = tl.cdiv(results, RESULTS)
        row = (number - rows * parts) // slices
        _finish(
            (number - rows * parts) % slices, slices, out + row * results, bias1, second, bias2,
            partial + row * parts * HIDDEN, counters + row, hidden, results, parts, second_h, second_r,
            activation1, activation2, BIAS1, BIAS2, EARLY, HIDDEN, RESULTS, PARTS,
        )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _add_up(  # type: ignore[no-untyped-def]
    part, data, first, partial, counter,
    pixels, channels, hidden, share, step_p, step_c, first_c, first_h,
    EARLY: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr, HIDDEN: tl.constexpr,
):  # fmt: skip
    """Adds up some pixels of some channels, and multiplies these by their rows of the first matrix."""
    chunks = tl.cdiv(channels, CHANNELS)
    channel = part % chunks * CHANNELS + tl.arange(0, CHANNELS)
    begin = part // chunks * share
    end = tl.minimum(begin + share, pixels)
    unit = tl.arange(0, HIDDEN)
    factors = tl.load(
        first + channel[:, None] * first_c + unit[None, :] * first_h,
        mask=(channel < channels)[:, None] & (unit < hidden)[None, :],
        other=0,
    ).to(tl.float32)
    if EARLY:
        go_on()
    sums = tl.zeros([PIXELS, CHANNELS], tl.float32)
    while begin < end:
        pixel = begin + tl.arange(0, PIXELS)
        sums += tl.load(
            data + pixel[:, None] * step_p + channel[None, :] * step_c,
            mask=(pixel < end)[:, None] & (channel < channels)[None, :],
            other=0,
        ).to(tl.float32)
        begin += PIXELS
    mean = tl.sum(sums, 0) / pixels
    tl.store(partial + unit, tl.sum(mean[:, None] * factors, 0))
    tl.debug_barrier()  # all of it is there before the block counts itself
    tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")


@triton.jit  # type: ignore[untyped-decorator]
def _finish(  # type: ignore[no-untyped-def]
    slice, slices, out, bias1, second, bias2, partial, counter,
    hidden, results, parts, second_h, second_r, activation1, activation2,
    BIAS1: tl.constexpr, BIAS2: tl.constexpr, EARLY: tl.constexpr,
    HIDDEN: tl.constexpr, RESULTS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Waits for all parts of a row, adds them up, always in the same order, and multiplies by some columns of the second matrix."""
    result = slice * RESULTS + tl.arange(0, RESULTS)
    unit = tl.arange(0, HIDDEN)
    factors = tl.load(
        second + unit[:, None] * second_h + result[None, :] * second_r,
        mask=(unit < hidden)[:, None] & (result < results)[None, :],
        other=0,
    ).to(tl.float32)
    shift1 = tl.load(bias1 + unit, mask=(unit < hidden) & BIAS1, other=0).to(tl.float32)
    shift2 = tl.load(bias2 + result, mask=(result < results) & BIAS2, other=0).to(tl.float32)
    if EARLY:
        go_on()
    done = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
    while (done >= 0) & (done < parts):
        done = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
    # Once all have seen it, it is zero, for the next run of the same graph; until then below zero, or not less than `parts`.
    tl.atomic_add(counter, tl.where(slice == 0, 1 - parts - slices, 1), sem="relaxed", scope="gpu")
    sums = tl.zeros([PARTS, HIDDEN], tl.float32)
    start = parts * 0
    while start < parts:
        part = start + tl.arange(0, PARTS)
        place = partial + part[:, None] * HIDDEN + unit[None, :]
        sums += tl.load(place, mask=(part < parts)[:, None], other=0.0, cache_modifier=".cg")
        start += PARTS
    inner = _activate(tl.sum(sums, 0) + shift1, activation1)
    found = _activate(tl.sum(inner[:, None] * factors, 0) + shift2, activation2)
    tl.store(out + result, found.to(out.dtype.element_ty), mask=result < results)
