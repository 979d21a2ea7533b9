"""Convolutions of NHWC data with few channels, such as images: the first layer of most models that see. On a GPU.

The kernel of `conv` sums over the channels of one element of the window at a time, 16 of them at the least, of which an image has three.
This one, in `code.few_channels`, sums over several elements at once. What it takes is mostly the way to and from the memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from msplit.engines.cuda.ir.windows import Window, pixel_step
from msplit.engines.cuda.kernels.activations import NUMBERS, Epilogue
from msplit.engines.cuda.kernels.launch import Code, input_precision, launch
from msplit.engines.cuda.kernels.tiles import (
    Tiles,
    common,
    constants_of_axes,
    of_axes,
    power_of_two,
    reciprocal,
    shares,
)

CONVERTED = (torch.float32, torch.uint8)
"""Types that data may have beside the filter's: they are converted as they are loaded."""

_CONVOLVE = Code("few_channels", "convolve_few_channels", specialized=False)

MANY = 16
"""Channels from which on `conv` has the better kernel."""

_SMALLEST = 16
"""Side of a product that tensor cores do."""

_UNROLLED = 8
"""Steps of summands that are written out one by one. It makes a step several times as fast, and takes long to compile."""

_LINE = 128
"""Bytes that an early kernel fetches at once (`code.early.LINE`)."""


def tiles_for(filter: Tensor, tiles: Sequence[Tiles]) -> list[Tiles]:
    """Ways to cut a convolution with this filter out of those given, no larger than it has results and summands."""
    *window, results = filter.shape
    most_results, most_summands = (max(power_of_two(size), _SMALLEST) for size in (results, math.prod(window)))
    return list(
        dict.fromkeys(
            one._replace(results=min(one.results, most_results), summands=min(one.summands, most_summands))
            for one in tiles
        )
    )


def convolve(
    data: Tensor, filter: Tensor, frames: Sequence[Window], tiles: Tiles, epilogue: Epilogue, room: Tensor | None = None
) -> Tensor:
    """A convolution with its epilogue in the filter's type, NHWC, in `room` or contiguous.

    Args:
        data: NHWC, of any strides but the last, which is 1, in the filter's type or in one that is `CONVERTED`.
        filter: HWIO.
        tiles: How the work is cut, in one part.
        frames, epilogue, room: See `conv.convolve`.
    """
    bias, side, activation, rounds = epilogue
    images, height, width, channels = data.shape
    vertical, horizontal = frames
    matrix = filter.reshape(-1, filter.shape[-1])
    summands, results = matrix.shape
    in_first = matrix.t().is_contiguous() and not matrix.is_contiguous()
    matrix = matrix if in_first else matrix.contiguous()
    shape = (images, vertical.outputs, horizontal.outputs, results)
    out = filter.new_empty(shape) if room is None else room
    step_out = results if room is None else pixel_step(room)
    assert step_out is not None
    step_n, step_h, step_w, _ = data.stride()
    of_in, of_out = common(channels, step_n, step_h, step_w), common(results, step_out)
    columns = _columns(tiles.pixels, vertical.outputs, horizontal.outputs)
    across, down = shares(horizontal.outputs, columns), shares(vertical.outputs, tiles.pixels // columns)
    # 1 where there is nothing to do
    by, shifts = zip(*(reciprocal(max(divisor, 1)) for divisor in (across, down)), strict=True)
    launch(_CONVOLVE, (images * down * across, shares(results, tiles.results)))(
        data,
        matrix,
        data if bias is None else bias,
        data if side is None else side.contiguous(),
        out,
        height,
        width,
        results // of_out,
        *of_axes(frames, "outputs", "stride"),
        vertical.dilation,
        *of_axes(frames, "before"),
        step_n // of_in,
        step_h // of_in,
        step_out // of_out,
        int(rounds),
        across,
        down,
        *by,
        *shifts,
        PIXELS=tiles.pixels,
        COLUMNS=columns,
        RESULTS=tiles.results,
        SUMMANDS=tiles.summands,
        UNROLLED=steps if (steps := shares(summands, tiles.summands)) <= _UNROLLED else 1,
        **constants_of_axes(frames, "kernel"),
        CHANNELS=channels,
        DILATION_W=horizontal.dilation,
        STEP_W=step_w,
        IN=of_in,
        OUT=of_out,
        IN_FIRST=in_first,
        PADDED=any(frame.before or frame.after for frame in frames),
        BIAS=bias is not None,
        SIDE=side is not None,
        ACTIVATION=NUMBERS[activation],
        PRECISION=input_precision(filter, tf32=torch.backends.cudnn.allow_tf32),
        EARLY=tiles.early,
        LINES=power_of_two(shares(matrix.nbytes, _LINE)),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **({"launch_pdl": True} if tiles.early else {}),
    )
    return out


def _columns(pixels: int, rows: int, columns: int) -> int:
    """Number of a tile's pixels that lie side by side, so that there are as few tiles as possible; not too few, as a warp reads along a
    row."""
    most = min(pixels, power_of_two(max(columns, 1)))
    widths = [most >> half for half in range(most.bit_length()) if most >> half >= min(most, 16)]
    return min(widths, key=lambda width: shares(columns, width) * shares(rows, pixels // width))
