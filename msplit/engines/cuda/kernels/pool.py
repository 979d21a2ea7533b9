"""Pooling of NHWC data in one kernel, which reads and writes parts of larger tensors, too. On a GPU.

PyTorch's max pool of channels-last data takes about 20 µs on an H200 whatever the size, five times what its NCHW kernel takes, because
few of its blocks work when the batch is small; its average pool takes 3.4. Here every block makes the outputs that lie next to each
other in memory. Padding may differ between the two ends of an axis, as TensorFlow's does, and is no part of an average.
"""

from __future__ import annotations

import torch
from torch import Tensor

from msplit.engines.cuda.ir.windows import Window, pixel_step
from msplit.engines.cuda.kernels.launch import Code, launch
from msplit.engines.cuda.kernels.tiles import shares

_POOL = Code("memory", "pool")

_BLOCK = 256
_LARGEST = 2**31 - _BLOCK
"""Positions are counted with 32 bits."""

WIDEST = 64
"""Elements of a window, at most: one thread reads them one after the other."""


def fits(data: Tensor, frames: tuple[Window, ...]) -> bool:
    """Whether the kernel can pool this: floats on a GPU, NHWC and dense, a small window."""
    return (
        data.is_cuda
        and data.dim() == 4
        and data.dtype in (torch.float32, torch.float16, torch.bfloat16)
        and (step := pixel_step(data)) is not None
        and 0 < data.numel() // max(data.shape[-1], 1) * step < _LARGEST
        and len(frames) == 2
        and frames[0].kernel * frames[1].kernel <= WIDEST
    )


def fits_in(room: Tensor) -> bool:
    """Whether it can write its result there."""
    step = pixel_step(room)
    return step is not None and room.numel() // max(room.shape[-1], 1) * step < _LARGEST


def pool(
    data: Tensor, frames: tuple[Window, ...], room: Tensor | None = None, *, mean: bool = False, rounds: bool = False
) -> Tensor:
    """The largest element of each window, NaN where there is one; or the mean of its elements.

    Args:
        data: NHWC on a GPU, with pixels that lie evenly.
        frames: The windows along height and width.
        room: Where the result is to lie, as evenly; in memory of its own where that is None.
        mean: The mean instead of the largest.
        rounds: Whether the mean is rounded to TF32.

    Returns:
        NHWC: `room`, or contiguous.
    """
    images, height, width, channels = data.shape
    vertical, horizontal = frames
    out = data.new_empty((images, vertical.outputs, horizontal.outputs, channels)) if room is None else room
    total = out.numel()
    if total:
        launch(_POOL, (shares(total, _BLOCK),))(
            data,
            out,
            total,
            height,
            width,
            channels,
            pixel_step(data),
            pixel_step(out),
            vertical.outputs,
            horizontal.outputs,
            vertical.before,
            horizontal.before,
            KERNEL_H=vertical.kernel,
            KERNEL_W=horizontal.kernel,
            STRIDE_H=vertical.stride,
            STRIDE_W=horizontal.stride,
            MEAN=mean,
            ROUNDS=int(rounds),
            BLOCK=_BLOCK,
        )
    return out
