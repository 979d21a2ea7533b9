"""Pooling of NHWC data in one kernel. Needs Triton and a GPU; import it only when both are there.

PyTorch's max pool of channels-last data takes about 20 µs on an H200 whatever the size, five times what its NCHW kernel takes, because
few of its blocks work when the batch is small; its average pool takes 3.4. Here every block makes the outputs that lie next to each
other in memory. Padding may differ between the two ends of an axis, as TensorFlow's does, and is no part of an average.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from msplit.engines.cuda.ir.windows import Window

_BLOCK = 256
_LARGEST = 2**31 - _BLOCK
"""Positions are counted with 32 bits."""

_WIDEST = 64
"""Elements of a window: one thread reads them one after the other."""


@triton.jit  # type: ignore[untyped-decorator]
def _pool(  # type: ignore[no-untyped-def]
    data,
    out,
    total,
    height,
    width,
    channels,
    rows,
    columns,
    before_h,
    before_w,
    KERNEL_H: tl.constexpr,
    KERNEL_W: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    MEAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = place < total
    channel = place % channels
    rest = place // channels
    column = rest % columns
    rest = rest // columns
    row = rest % rows
    image = rest // rows
    top = row * STRIDE_H - before_h
    left = column * STRIDE_W - before_w
    if MEAN:
        found = tl.zeros([BLOCK], tl.float32)
        count = tl.zeros([BLOCK], tl.float32)
    else:
        found = tl.full([BLOCK], float("-inf"), data.dtype.element_ty)
    for y in tl.static_range(KERNEL_H):
        for x in tl.static_range(KERNEL_W):
            inside = (top + y >= 0) & (top + y < height) & (left + x >= 0) & (left + x < width) & exists
            at = ((image * height + top + y) * width + left + x) * channels + channel
            if MEAN:
                found += tl.load(data + at, mask=inside, other=0).to(tl.float32)
                count += inside.to(tl.float32)
            else:
                value = tl.load(data + at, mask=inside, other=float("-inf"))
                found = tl.maximum(found, value, propagate_nan=tl.PropagateNan.ALL)
    if MEAN:
        found = (found / count).to(data.dtype.element_ty)
    tl.store(out + place, found, mask=exists)


def fits(data: Tensor, frames: tuple[Window, ...]) -> bool:
    """Whether the kernel can pool this: floats on a GPU, NHWC and dense, a small window."""
    return (
        data.is_cuda
        and data.dim() == 4
        and data.dtype in (torch.float32, torch.float16, torch.bfloat16)
        and data.is_contiguous()
        and 0 < data.numel() < _LARGEST
        and len(frames) == 2
        and frames[0].kernel * frames[1].kernel <= _WIDEST
    )


def pool(data: Tensor, frames: tuple[Window, ...], *, mean: bool = False) -> Tensor:
    """The largest element of each window, NaN where there is one; or the mean of its elements.

    Args:
        data: NHWC, contiguous, on a GPU.
        frames: The windows along height and width.
        mean: The mean instead of the largest.

    Returns:
        NHWC, contiguous.
    """
    images, height, width, channels = data.shape
    vertical, horizontal = frames
    out = data.new_empty((images, vertical.outputs, horizontal.outputs, channels))
    total = out.numel()
    if total:
        _pool[(triton.cdiv(total, _BLOCK),)](
            data,
            out,
            total,
            height,
            width,
            channels,
            vertical.outputs,
            horizontal.outputs,
            vertical.before,
            horizontal.before,
            KERNEL_H=vertical.kernel,
            KERNEL_W=horizontal.kernel,
            STRIDE_H=vertical.stride,
            STRIDE_W=horizontal.stride,
            MEAN=mean,
            BLOCK=_BLOCK,
        )
    return out
