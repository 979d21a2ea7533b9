"""The kernel of `kernels.classifier`: the mean of an image, if there is one, a dense layer of it, and a softmax, if there is one."""

from __future__ import annotations

import triton
import triton.language as tl

from msplit.engines.cuda.kernels.code.early import LINE, fetch, go_on
from msplit.engines.cuda.kernels.code.mlp import mean_of, wait_for
from msplit.engines.cuda.kernels.code.products import _activate

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
        found = _activate(sums + shift, activation)
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
