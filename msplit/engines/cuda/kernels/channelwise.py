"""Kernels that compute each channel of NHWC data by itself: depthwise convolutions and pooling.

Convolutions of each channel by itself, of NHWC data, with a bias and an activation in the same kernel. On a GPU.

The library's kernels for such data are slow, and a bias is a further kernel. Here a block has some pixels of some channels that lie side by
side, and adds up one element of the window after the other in float32. Where there are many pixels, a thread makes some in a row, whose
windows share most of what they read. The kernel itself is in `code.depthwise`.

Pooling of NHWC data in one kernel, which reads and writes parts of larger tensors, too. On a GPU.

PyTorch's max pool of channels-last data takes about 20 µs on an H200 whatever the size, five times what its NCHW kernel takes, because
few of its blocks work when the batch is small; its average pool takes 3.4. Here every block makes the outputs that lie next to each
other in memory. Padding may differ between the two ends of an axis, as TensorFlow's does, and is no part of an average.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from msplit.engines.cuda.ir.windows import Window, extent
from msplit.engines.cuda.kernels.activations import NO_EPILOGUE, NUMBERS, Epilogue
from msplit.engines.cuda.kernels.conv import is_nhwc
from msplit.engines.cuda.kernels.launch import Code, launch
from msplit.engines.cuda.kernels.mlp import Layers, shared
from msplit.engines.cuda.kernels.tiles import LARGEST, Tiles, constants_of_axes, of_axes, power_of_two, shares, vector

_CONVOLVE = Code("depthwise", "convolve_channels", specialized=False)
_STRIPS = Code("depthwise", "convolve_strips", specialized=False)
_SQUEEZE = Code("depthwise", "convolve_and_squeeze")

_IN_FLIGHT = 64
"""Numbers that a thread loads at once: one after the other, 25 elements of a window took 7.7 µs on an H100 where 9 took 2.6."""

_WIDEST = 64
"""Elements of a window: they are written out one by one."""


def fits(data: Tensor, filter: Tensor, results: int) -> bool:
    """True if the kernel can convolve this, to so many results: NHWC floats on a GPU, channels side by side, one result of each."""
    window = filter.shape[0] * filter.shape[1] <= _WIDEST
    return is_nhwc(data, filter) and filter.shape[3] == 1 and window and 0 < results < LARGEST


def convolve(
    data: Tensor, filter: Tensor, frames: Sequence[Window], tiles: Tiles, epilogue: Epilogue = NO_EPILOGUE
) -> Tensor:
    """A convolution of each channel by itself with its epilogue, NHWC, contiguous.

    Args:
        data: NHWC, of any strides but the last, which is 1.
        filter: HWC1, of any strides that let height and width be seen as one axis.
        frames: The windows along height and width.
        tiles: How the work is cut: pixels, channels (`results`) and warps; pixels `across` only where windows have no gaps along a row.
        epilogue: Steps behind it, without a side.
    """
    out, arguments, constants = _work(data, filter, frames, tiles, epilogue)
    images, rows, columns, channels = out.shape
    if tiles.across == 1:
        code, count, size = _CONVOLVE, images * rows * columns, tiles.pixels
        constants |= _rows(frames, tiles)
    else:
        assert frames[1].dilation == 1, "internal error: windows with gaps share nothing"
        code, count, size = _STRIPS, images * rows * shares(columns, tiles.across), tiles.pixels // tiles.across
        constants |= {"STRIPS": size, "ACROSS": tiles.across}
    launch(code, (shares(count, size), shares(channels, tiles.results)))(
        *arguments[:4], count, *arguments[4:], int(epilogue.rounds), **constants
    )
    return out


def convolve_and_squeeze(
    data: Tensor, filter: Tensor, frames: Sequence[Window], tiles: Tiles, epilogue: Epilogue, layers: Layers
) -> tuple[Tensor, Tensor] | None:
    """A convolution of each channel by itself, and two dense layers of its mean over height and width, as squeeze-and-excitation has them.

    A block adds up its own results, and multiplies them by their rows of the first matrix. So nothing reads the result again for its mean.

    Args:
        data, filter, frames, epilogue: See `convolve`. Nothing is rounded.
        tiles: How the work is cut: also results of a block behind (`summands`).
        layers: Of as many channels.

    Returns:
        The result, and [images, results] of the layers; None where the device has no more counters.
    """
    images, channels = data.shape[0], data.shape[-1]
    pixels = frames[0].outputs * frames[1].outputs
    parts = shares(pixels, tiles.pixels) * shares(channels, tiles.results)
    work = shared(layers, data, images, parts, tiles.summands)
    if work is None:
        return None
    out, arguments, constants = _work(data, filter, frames, tiles, epilogue)
    launch(_SQUEEZE, (images * (parts + shares(work.out.shape[1], tiles.summands)),))(
        *arguments[:4],
        pixels,
        *arguments[4:],
        images,
        *work.arguments,
        **constants,
        **_rows(frames, tiles),
        **work.constants,
    )
    return out, work.out


def _work(
    data: Tensor, filter: Tensor, frames: Sequence[Window], tiles: Tiles, epilogue: Epilogue
) -> tuple[Tensor, tuple[Any, ...], dict[str, Any]]:
    """Memory for the result, and the arguments of all kernels, but for the number of pixels, which comes fifth."""
    bias, activation = epilogue.bias, epilogue.activation
    images, height, width, channels = data.shape
    vertical, horizontal = frames
    flat = filter.reshape(vertical.kernel * horizontal.kernel, channels)
    out = data.new_empty((images, vertical.outputs, horizontal.outputs, channels))
    tap, of_channel = flat.stride()
    size, steps = data.element_size(), data.stride()[:3]
    wide = vector(size, channels, *steps, tap)
    arguments = (
        *(data, flat, data if bias is None else bias, out, height, width, channels // wide, *out.shape[1:3]),
        *of_axes(frames, "before", "dilation"),
        *(*(step // wide for step in (*steps, tap)), of_channel),
    )
    constants = {
        **constants_of_axes(frames, "kernel", "stride"),
        "BIAS": bias is not None,
        "ACTIVATION": NUMBERS[activation],
        "EARLY": tiles.early,
        "VECTOR": wide,
        "BESIDE": of_channel == 1,
        "CHANNELS": tiles.results,
        "num_warps": tiles.warps,
    }
    return out, arguments, constants | ({"launch_pdl": True} if tiles.early else {})


def _rows(frames: Sequence[Window], tiles: Tiles) -> dict[str, Any]:
    """Constants of the kernels in which rows of a window are loaded at once."""
    vertical, horizontal = frames
    elements = shares(tiles.pixels * tiles.results, 32 * tiles.warps)
    return {
        "TAPS": power_of_two(vertical.kernel * horizontal.kernel),
        "ROWS": max(_IN_FLIGHT // (elements * horizontal.kernel), 1),
        "PIXELS": tiles.pixels,
    }


_POOL = Code("memory", "pool", specialized=False)

_THREADS = 128

_LARGEST = 2**31 - 2 * _THREADS
"""Positions are counted with 32 bits."""

WIDEST = 64
"""Elements of a window, at most: one thread reads them."""

_POOLS_IN_FLIGHT = 256
"""Bytes that a thread loads at once."""


def pool_fits(data: Tensor, frames: tuple[Window, ...]) -> bool:
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
            LINES=max(_POOLS_IN_FLIGHT // (block // _THREADS * wide * size * horizontal.kernel), 1),
            BLOCK=block,
        )
    return out
