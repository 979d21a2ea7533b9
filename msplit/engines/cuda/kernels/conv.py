"""Convolutions of NHWC data as one tiled product with its epilogue. On a GPU.

Libraries are best where a convolution fills the GPU. At batch 1 most do not: then small tiles, padding that may differ between the
ends of an axis and a bias and an activation in the same kernel take down to half the time (see `autotune.conv`, which measures).
Convolutions of the same data with windows of the same kind (siblings) are one product with more columns. The kernel itself is in
`code.convolutions`; depthwise convolutions have kernels of their own, in `channelwise`.

That kernel sums over the channels of one element of the window at a time, 16 of them at the least, of which an image has three. Data with
few channels, as in the first layer of most models that see, have another one, which sums over several elements at once. What it
takes is mostly the way to and from the memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType

import torch
from torch import Tensor

from msplit.engines.cuda.device.device import Device
from msplit.engines.cuda.ir.windows import NO_PROLOGUE, Prologue, Window, extent, pixel_step
from msplit.engines.cuda.kernels.activations import IN_CONVOLUTIONS, NO_EPILOGUE, NUMBERS, Epilogue
from msplit.engines.cuda.kernels.launch import Code, input_precision, launch
from msplit.engines.cuda.kernels.tiles import (
    LARGEST,
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

_CONVOLVE_FEW = Code("convolutions", "convolve_few_channels", specialized=False)

MANY = 16
"""Channels from which on `conv` has the better kernel."""

_SMALLEST = 16
"""Side of a product that tensor cores do."""

_UNROLLED = 8
"""Steps of summands that are written out one by one. It makes a step several times as fast, and takes long to compile."""

_LINE = 128
"""Bytes that an early kernel fetches at once (`code.products.LINE`)."""


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


def convolve_few(
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
    launch(_CONVOLVE_FEW, (images * down * across, shares(results, tiles.results)))(
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


_CONVOLVE = Code("convolutions", "convolve_tile", specialized=False)

_MOST_PARTS = 8

MOST_SIBLINGS = 4
"""Convolutions that one kernel does."""

_ALIGNED = 64
"""The results of siblings lie in one block of memory, each at a multiple of this many elements."""


_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def summing_steps(data: Tensor, filter: Tensor, tiles: Tiles) -> int:
    """Number of tiles of summands that a convolution adds up: more blocks than these can not share them."""
    return int(filter.shape[0] * filter.shape[1]) * shares(int(data.shape[-1]), tiles[2])


def is_nhwc(data: Tensor, filter: Tensor, *, converts: bool = False) -> bool:
    """True if a kernel can read these: floats of one type on a GPU, NHWC with the channels side by side, and few enough to be counted. One
    that `converts` takes data of some other types, too."""
    return (
        data.is_cuda
        and data.dim() == filter.dim() == 4
        and filter.dtype in _DTYPES
        and (filter.dtype == data.dtype or (converts and data.dtype in CONVERTED))
        and data.stride(-1) == 1
        and data.shape[-1] == filter.shape[2]
        and 0 < extent(data) < LARGEST
    )


def fits(data: Tensor, filter: Tensor, frames: Sequence[Window]) -> bool:
    """True if the kernel can convolve this: what `is_nhwc`, in one group."""
    return (
        is_nhwc(data, filter, converts=data.shape[-1] < MANY)
        and data.shape[0] * frames[0].outputs * frames[1].outputs * filter.shape[-1] * _MOST_PARTS < LARGEST
    )


def convolve(
    data: Tensor,
    filter: Tensor,
    frames: Sequence[Window],
    tiles: Tiles,
    epilogue: Epilogue = NO_EPILOGUE,
    *,
    room: Tensor | None = None,
    prologue: Prologue = NO_PROLOGUE,
    rounded: bool = False,
) -> Tensor:
    """A convolution with its epilogue, NHWC, in `room` or contiguous. `convolve_siblings` says more.

    Products of float32 are in TF32 where that is allowed for convolutions. The data are rounded to it unless they are `rounded` already,
    the filter should be (`ir.windows.to_tf32`): tensor cores cut off the other bits.
    """
    tiles = Tiles(*tiles)
    if data.shape[-1] < MANY and tiles.parts == 1 and prologue is NO_PROLOGUE:
        return convolve_few(data, filter, frames, tiles, epilogue, room)
    rooms, rounds = {} if room is None else {0: room}, (0,) if epilogue.rounds else ()
    sizes = (int(filter.shape[3]),)
    return convolve_siblings(
        data, filter, frames, tiles, sizes, epilogue, rooms=rooms, prologue=prologue, rounded=rounded, rounds=rounds
    )[0]


def convolve_siblings(
    data: Tensor,
    filter: Tensor,
    frames: Sequence[Window],
    tiles: Tiles,
    sizes: Sequence[int],
    epilogue: Epilogue = NO_EPILOGUE,
    *,
    rooms: Mapping[int, Tensor] = MappingProxyType({}),
    prologue: Prologue = NO_PROLOGUE,
    rounded: bool = False,
    rounds: Sequence[int] = (),
) -> list[Tensor]:
    """Convolutions of the same data, as `convolve` does one.

    Args:
        data: NHWC, of any strides but the last, which is 1.
        filter: HWIO, of any strides that let height and width be seen as one axis: all filters, side by side along the output channels.
        frames: The windows along height and width.
        tiles: How the work is cut.
        sizes: Output channels of each, at most `MOST_SIBLINGS` of them.
        epilogue: Steps behind all of them, with one of `IN_CONVOLUTIONS`, and a side for one convolution only. Of rounding `rounds`
            says more.
        rooms: Where the result of one of them is to lie, by its number. It `fits_in` there.
        prologue: What is done to the data first.
        rounded: True if the data are rounded to TF32 already.
        rounds: The numbers of those whose results are rounded to it.

    Returns:
        A tensor per convolution: its room or, NHWC and contiguous, a part of one block of memory.
    """
    bias, side, activation, _ = epilogue
    images, height, width, channels = data.shape
    # The filter as [taps, channels, results]: its channels or its results have to lie side by side.
    taps = filter.shape[0] * filter.shape[1]
    flat = filter.reshape(taps, channels, filter.shape[3])
    vertical, horizontal = frames
    scale, shift = (None if one is None else one.contiguous() for one in prologue[:2])
    steps = data.stride()[:3]
    in_first = flat.stride(1) == 1
    filter_steps = flat.stride()
    if not in_first and filter_steps[2] != 1:
        flat = flat.contiguous()
        filter_steps = flat.stride()
    # Sizes and strides are given in units of what they all are multiples of, so that the kernel knows which loads may be wide.
    half = filter.element_size() == 2
    of_in = common(channels, *steps, *((filter_steps[0], filter_steps[2]) if in_first else ()), half=half)
    ((in_room, room),) = rooms.items() or ((0, None),)
    step_room = sizes[0] if room is None else _step(room)
    of_out = common(*sizes, step_room, *(() if in_first else filter_steps[:2]), half=half)
    of_filter = of_in if in_first else of_out
    point = taps == 1 and all(frame.before == frame.after == 0 for frame in frames)
    pixels = images * vertical.outputs * horizontal.outputs
    # Siblings lie in one block, each at a multiple of `_ALIGNED`; a single result in its room, if it has one.
    places = [0, *accumulate(shares(pixels * size, _ALIGNED) for size in sizes)]
    if len(sizes) > 1:
        out = data.new_empty(places[-1] * _ALIGNED)
    else:
        out = data.new_empty(pixels * sizes[0]) if room is None else room
    in_tile, in_columns, summands, warps, stages, parts, _, early, _ = Tiles(*tiles)
    grid = shares(pixels, in_tile), sum(shares(size, in_columns) for size in sizes)
    # Blocks that share the summands of a tile leave parts, which the last one of them adds up. Without counters nothing is shared.
    steps_in_all = summing_steps(data, filter, tiles)
    share = shares(steps_in_all, parts)
    parts = shares(steps_in_all, share)
    counters = Device.of(data.device).semaphores.take(grid[0] * grid[1]) if parts > 1 else None
    if counters is None:
        parts, share = 1, steps_in_all
        partial = counters = out
    else:
        partial = data.new_empty(parts * grid[0] * grid[1] * in_tile * in_columns, dtype=torch.float32)
    # The kernel divides by multiplying: positions by sizes of the result, steps by the channels and by a row of the window.
    divisors = vertical.outputs, horizontal.outputs, shares(channels, summands), horizontal.kernel
    # A divisor is 0 where there is nothing to do.
    by, shifts = zip(*(reciprocal(max(divisor, 1)) for divisor in divisors), strict=True)
    launch(_CONVOLVE, (*grid, parts))(
        data,
        flat,
        data if scale is None else scale,
        data if shift is None else shift,
        data if bias is None else bias,
        data if side is None else side.contiguous(),
        out,
        out if room is None else room,
        partial,
        counters,
        pixels,
        height,
        width,
        channels // of_in,
        *(size // of_out for size in sizes),
        *[0] * (MOST_SIBLINGS - len(sizes)),
        *of_axes(frames, "outputs"),
        horizontal.kernel,
        taps,
        *of_axes(frames, "stride", "dilation", "before"),
        *(step // of_in for step in steps),
        *(step // of_filter for step in filter_steps),
        share,
        parts,
        step_room // of_out,
        step_room // of_out,
        in_room,
        sum(1 << number for number in rounds),
        *by,
        *shifts,
        PIXELS=in_tile,
        RESULTS=in_columns,
        SUMMANDS=summands,
        ALIGNED=_ALIGNED,
        IN=of_in,
        OUT=of_out,
        IN_FIRST=in_first,
        POINT=point,
        BIAS=bias is not None,
        SIDE=side is not None,
        ACTIVATION=IN_CONVOLUTIONS[activation],
        PRECISION=input_precision(filter, tf32=torch.backends.cudnn.allow_tf32),
        ROUNDED=rounded and scale is None and shift is None,
        SPLIT=parts > 1,
        SIBLINGS=len(sizes) > 1,
        ROOM=len(sizes) > 1 and room is not None,
        PROLOGUE=prologue is not NO_PROLOGUE,
        SCALE=0 if scale is None else 1 if scale.numel() == channels else 2,
        SHIFT=shift is not None,
        CUT=prologue.relu,
        EARLY=early,
        num_warps=warps,
        num_stages=stages,
        **({"launch_pdl": True} if early else {}),
    )
    shape = (images, vertical.outputs, horizontal.outputs)
    if len(sizes) == 1:
        return [out.view(*shape, sizes[0]) if room is None else room]
    return [
        rooms.get(number, out[place * _ALIGNED :][: pixels * size].view(*shape, size))
        for number, (place, size) in enumerate(zip(places[:-1], sizes, strict=True))
    ]


def fits_in(room: Tensor) -> bool:
    """True if the kernel can write a result there: pixels that lie evenly, each aligned as the results of siblings are."""
    step, size = pixel_step(room), 16 // room.element_size()
    return (
        step is not None
        and step % size == 0
        and room.data_ptr() % 16 == 0
        and 0 < room.numel() // room.shape[-1] * step < LARGEST
    )


def _step(room: Tensor) -> int:
    step = pixel_step(room)
    assert step is not None
    return step
