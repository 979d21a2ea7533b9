"""Convolutions of each channel by itself, of NHWC data, with a bias and an activation in the same kernel. On a GPU.

The library's kernels for such data are slow, and a bias is a further kernel. Here a block has some pixels of some channels that lie side by
side, and adds up one element of the window after the other in float32. Where there are many pixels, a thread makes some in a row, whose
windows share most of what they read. The kernel itself is in `code.depthwise`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from msplit.engines.cuda.ir.windows import Window
from msplit.engines.cuda.kernels.activations import NO_EPILOGUE, NUMBERS, Epilogue
from msplit.engines.cuda.kernels.conv import LARGEST, is_nhwc
from msplit.engines.cuda.kernels.launch import Code, launch
from msplit.engines.cuda.kernels.mlp import Layers, shared
from msplit.engines.cuda.kernels.tiles import Tiles, constants_of_axes, of_axes, power_of_two, shares, vector

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
