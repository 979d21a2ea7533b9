"""Kernels of small dense layers behind the mean of an image.

The kernel of `kernels.mlp`: the mean of an image, if there is one, and two dense layers behind it.

The kernel of `kernels.mlp`: the mean of an image, if there is one, a dense layer of it, and a softmax, if there is one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from msplit.engines.cuda.kernels.code.epilogue import activate
from msplit.engines.cuda.kernels.code.products import LINE, fetch, go_on

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
    inner = activate(tl.sum(sums, 0) + shift1, activation1)
    found = activate(tl.sum(inner[:, None] * factors, 0) + shift2, activation2)
    tl.store(out + row * results + result, found.to(out.dtype.element_ty), mask=result < results)


_COUNTS = ["rows", "pixels", "share", "pieces", "results", "activation"]
"""Arguments that are numbers in every kernel, even where they are one: no kernel is compiled anew for it."""


@triton.jit(do_not_specialize=_COUNTS)  # type: ignore[untyped-decorator]
def classify(  # type: ignore[no-untyped-def]
    data, scale, shift, rows, pixels, channels, share, pieces, step_n, step_p, step_c,
    out, weights, bias, means, logits, counters, results, weights_c, weights_r, activation,
    SCALE: tl.constexpr, SHIFT: tl.constexpr, CUT: tl.constexpr, BIAS: tl.constexpr, MEAN: tl.constexpr, SOFTMAX: tl.constexpr,
    EARLY: tl.constexpr, TURNED: tl.constexpr, WHOLE: tl.constexpr,
    PIXELS: tl.constexpr, CHANNELS: tl.constexpr, SUMMANDS: tl.constexpr, RESULTS: tl.constexpr,
):  # fmt: skip
    """Blocks start in the order of their numbers. The first `rows * parts` wait for none, so that all others may wait for them."""
    number = tl.program_id(0)
    parts = pieces * tl.cdiv(channels, CHANNELS)
    if number < rows * parts:
        row = number // parts
        _average(
            number % parts, data + row.to(tl.int64) * step_n, scale, shift, means + row * pieces * channels, counters + row,
            pixels, channels, share, step_p, step_c, SCALE, SHIFT, CUT, EARLY, PIXELS, CHANNELS,
        )  # fmt: skip
    else:
        _layer(
            number - rows * parts, data, rows, channels, pieces, parts, step_n, step_c,
            out, weights, bias, means, logits, counters, results, weights_c, weights_r, activation,
            BIAS, MEAN, SOFTMAX, EARLY, TURNED, WHOLE, SUMMANDS, RESULTS,
        )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _average(  # type: ignore[no-untyped-def]
    part, data, scale, shift, means, counter, pixels, channels, share, step_p, step_c,
    SCALE: tl.constexpr, SHIFT: tl.constexpr, CUT: tl.constexpr, EARLY: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Leaves what some pixels add to the mean of some channels to the blocks that wait for all of them."""
    chunks = tl.cdiv(channels, CHANNELS)
    channel = part % chunks * CHANNELS + tl.arange(0, CHANNELS)
    there = channel < channels
    factor = tl.load(scale + channel, mask=there & SCALE, other=1).to(tl.float32)
    addend = tl.load(shift + channel, mask=there & SHIFT, other=0).to(tl.float32)
    if EARLY:
        go_on()
    mean = mean_of(
        part, data, factor, addend, pixels, channels, share, step_p, step_c, SCALE, SHIFT, CUT, PIXELS, CHANNELS
    )
    tl.store(means + part // chunks * channels + channel, mean, mask=there)
    tl.debug_barrier()  # all of it is there before the block counts itself
    tl.atomic_add(counter, 1, sem="release", scope="gpu")


@triton.jit  # type: ignore[untyped-decorator]
def _layer(  # type: ignore[no-untyped-def]
    slice, data, rows, channels, pieces, parts, step_n, step_c,
    out, weights, bias, means, logits, counters, results, weights_c, weights_r, activation,
    BIAS: tl.constexpr, MEAN: tl.constexpr, SOFTMAX: tl.constexpr, EARLY: tl.constexpr, TURNED: tl.constexpr, WHOLE: tl.constexpr,
    SUMMANDS: tl.constexpr, RESULTS: tl.constexpr,
):  # fmt: skip
    """Some results of every row, one row after the other. It holds the weights of the first channels, the rest are in the L2 cache."""
    result = slice * RESULTS + tl.arange(0, RESULTS)
    wanted = result < results
    channel = tl.arange(0, SUMMANDS)
    place = weights + channel[:, None] * weights_c + result[None, :] * weights_r
    factors = tl.load(place, mask=(channel < channels)[:, None] & wanted[None, :], other=0)
    shift = tl.load(bias + result, mask=wanted & BIAS, other=0).to(tl.float32)
    if EARLY:
        if not WHOLE:
            _fetch(weights, slice * RESULTS, channels, results, weights_c, weights_r, TURNED, SUMMANDS, RESULTS)
        go_on()
    for row in range(rows):
        if MEAN:
            wait_for(counters + row, parts)
        of_row = means + row * pieces * channels
        mean = _numbers(data, of_row, 0, channels, pieces, step_c, MEAN, SUMMANDS)
        sums = tl.sum(mean[:, None] * factors.to(tl.float32), 0)
        if not WHOLE:
            start = rows * 0 + SUMMANDS  # no constant, which a loop could not change
            while start < channels:
                exist = (start + channel < channels)[:, None] & wanted[None, :]
                more = tl.load(place + start * weights_c, mask=exist, other=0).to(tl.float32)
                mean = _numbers(data, of_row, start, channels, pieces, step_c, MEAN, SUMMANDS)
                sums += tl.sum(mean[:, None] * more, 0)
                start += SUMMANDS
        found = activate(sums + shift, activation)
        if SOFTMAX:
            tl.store(logits + row * results + result, found, mask=wanted)
        else:
            tl.store(out + row * results + result, found.to(out.dtype.element_ty), mask=wanted)
        if MEAN or SOFTMAX:
            tl.debug_barrier()  # see above
            last = parts + tl.cdiv(results, RESULTS) - 1
            if tl.atomic_add(counters + row, 1, sem="acq_rel", scope="gpu") == last:
                tl.store(counters + row, 0)  # for the next run of the same graph
                if SOFTMAX:
                    _softmax(logits + row * results, out + row * results, results, SOFTMAX)
        data += step_n


@triton.jit  # type: ignore[untyped-decorator]
def _numbers(  # type: ignore[no-untyped-def]
    data, means, start, channels, pieces, step_c, MEAN: tl.constexpr, SUMMANDS: tl.constexpr
):
    """What the layer reads of a row, from a channel on: its means, the parts of each always in the same order, or the row itself."""
    channel = start + tl.arange(0, SUMMANDS)
    there = channel < channels
    if MEAN:
        numbers = tl.load(means + channel, mask=there, other=0, cache_modifier=".cg")
        for piece in tl.range(1, pieces, loop_unroll_factor=4):
            numbers += tl.load(means + piece * channels + channel, mask=there, other=0, cache_modifier=".cg")
    else:
        numbers = tl.load(data + channel * step_c, mask=there, other=0).to(tl.float32)
    return numbers


@triton.jit  # type: ignore[untyped-decorator]
def _fetch(  # type: ignore[no-untyped-def]
    weights, first, channels, results, weights_c, weights_r,
    TURNED: tl.constexpr, SUMMANDS: tl.constexpr, RESULTS: tl.constexpr,
):  # fmt: skip
    """Has the weights brought into the L2 cache that the block does not hold itself."""
    in_line: tl.constexpr = LINE * 8 // weights.dtype.element_ty.primitive_bitwidth
    channels_apart: tl.constexpr = min(in_line, SUMMANDS) if TURNED else 1
    results_apart: tl.constexpr = 1 if TURNED else min(in_line, RESULTS)
    channel = tl.arange(0, SUMMANDS // channels_apart) * channels_apart
    result = first + tl.arange(0, RESULTS // results_apart) * results_apart
    place = weights + channel[:, None] * weights_c + result[None, :] * weights_r
    for start in range(SUMMANDS, channels, SUMMANDS):
        exist = (start + channel < channels)[:, None] & (result < results)[None, :]
        fetch(place + start * weights_c, exist)


@triton.jit  # type: ignore[untyped-decorator]
def _softmax(logits, out, results, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of all results of a row, which other blocks have left there."""
    result = tl.arange(0, WIDTH)
    there = result < results
    value = tl.load(logits + result, mask=there, other=float("-inf"), cache_modifier=".cg")
    power = tl.exp(value - tl.max(value, 0))
    tl.store(out + result, (power / tl.sum(power, 0)).to(out.dtype.element_ty), mask=there)
