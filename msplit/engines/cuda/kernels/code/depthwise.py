"""The kernel of `kernels.depthwise`: some pixels of some channels, each convolved by itself."""

from __future__ import annotations

import triton
import triton.language as tl

from msplit.engines.cuda.kernels.code.early import go_on
from msplit.engines.cuda.kernels.code.products import _activate


@triton.jit  # type: ignore[untyped-decorator]
def convolve_channels(  # type: ignore[no-untyped-def]
    data,
    filter,
    bias,
    out,
    pixels,
    height,
    width,
    channels,
    rows,
    columns,
    before_h,
    before_w,
    dilation_h,
    dilation_w,
    step_n,
    step_h,
    step_w,
    filter_tap,
    filter_c,
    KERNEL_H: tl.constexpr,
    KERNEL_W: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EARLY: tl.constexpr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """A block's pixels and channels: see `depthwise.convolve`, which cuts and launches."""
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    there = pixel < pixels
    wanted = channel < channels
    rest = pixel // columns
    image = rest // rows
    top = (rest - image * rows) * STRIDE_H - before_h
    left = (pixel - rest * columns) * STRIDE_W - before_w
    start = image * step_n + top * step_h + left * step_w
    total = tl.zeros([PIXELS, CHANNELS], tl.float32)
    if EARLY:
        go_on()
    for down in tl.static_range(KERNEL_H):
        for right in tl.static_range(KERNEL_W):
            y = top + down * dilation_h
            x = left + right * dilation_w
            inside = (y >= 0) & (y < height) & (x >= 0) & (x < width) & there
            at = start + down * dilation_h * step_h + right * dilation_w * step_w
            seen = tl.load(data + at[:, None] + channel[None, :], mask=inside[:, None] & wanted[None, :], other=0)
            factor = tl.load(filter + (down * KERNEL_W + right) * filter_tap + channel * filter_c, mask=wanted, other=0)
            total += seen.to(tl.float32) * factor.to(tl.float32)[None, :]
    if BIAS:
        total += tl.load(bias + channel, mask=wanted, other=0).to(tl.float32)[None, :]
    total = _activate(total, ACTIVATION)
    place = pixel[:, None] * channels + channel[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=there[:, None] & wanted[None, :])
