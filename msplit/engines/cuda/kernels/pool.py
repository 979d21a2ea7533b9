"""Pooling of NHWC data in one kernel, which reads and writes parts of larger tensors, too. On a GPU.

PyTorch's max pool of channels-last data takes about 20 µs on an H200 whatever the size, five times what its NCHW kernel takes, because
few of its blocks work when the batch is small; its average pool takes 3.4. Here every block makes the outputs that lie next to each
other in memory. Padding may differ between the two ends of an axis, as TensorFlow's does, and is no part of an average.
"""

from __future__ import annotations

import torch
from torch import Tensor

from msplit.engines.cuda.ir.windows import Window, extent
from msplit.engines.cuda.kernels.launch import Code, launch
from msplit.engines.cuda.kernels.tiles import constants_of_axes, of_axes, shares, vector

_POOL = Code("memory", "pool", specialized=False)

_THREADS = 128

_LARGEST = 2**31 - 2 * _THREADS
"""Positions are counted with 32 bits."""

WIDEST = 64
"""Elements of a window, at most: one thread reads them."""

_IN_FLIGHT = 256
"""Bytes that a thread loads at once."""


def fits(data: Tensor, frames: tuple[Window, ...]) -> bool:
    """True if the kernel can pool this: floats on a GPU, NHWC with the channels side by side, a small window."""
    return (
        data.is_cuda
        and data.dim() == 4
        and data.dtype in (torch.float32, torch.float16, torch.bfloat16)
        and 0 < data.numel() <= _LARGEST
        and fits_in(data)
        and len(frames) == 2
        and frames[0].kernel * frames[1].kernel <= WIDEST
    )


def fits_in(room: Tensor) -> bool:
    """True if it can write its result there."""
    return (room.stride(-1) == 1 or room.shape[-1] == 1) and extent(room) < _LARGEST


def pool(
    data: Tensor, frames: tuple[Window, ...], room: Tensor | None = None, *, mean: bool = False, rounds: bool = False
) -> Tensor:
    """The largest element of each window, NaN where there is one; or the mean of its elements.

    Args:
        data: NHWC on a GPU, of any strides but the last, which is 1.
        frames: The windows along height and width.
        room: Where the result is to lie, likewise; in memory of its own where that is None.
        mean: The mean instead of the largest.
        rounds: True if the mean is rounded to TF32.

    Returns:
        NHWC: `room`, or contiguous.
    """
    images, height, width, channels = data.shape
    vertical, horizontal = frames
    out = data.new_empty((images, vertical.outputs, horizontal.outputs, channels)) if room is None else room
    size = data.element_size()
    wide = vector(size, channels, *data.stride()[:3], *out.stride()[:3])
    total, block = out.numel() // wide, _THREADS * (2 if wide == 1 else 1)
    if total:
        launch(_POOL, (shares(total, block),))(
            data,
            out,
            total,
            height,
            width,
            channels // wide,
            *(step // wide for step in data.stride()[:3]),
            *(step // wide for step in out.stride()[:3]),
            *of_axes(frames, "outputs", "before"),
            **constants_of_axes(frames, "kernel", "stride"),
            MEAN=mean,
            ROUNDS=int(rounds),
            VECTOR=wide,
            LINES=max(_IN_FLIGHT // (block // _THREADS * wide * size * horizontal.kernel), 1),
            BLOCK=block,
        )
    return out
