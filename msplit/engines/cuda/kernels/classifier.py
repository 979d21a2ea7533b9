"""The end of a classifier of images in one kernel of our own: the mean over the pixels, a dense layer, and the softmax of what it gives.
On a GPU, for a few images.

Apart, each of the three waits for the one in front to be over, and the product then fetches all of its weights. Here the first blocks take
the mean of some channels each. The others have loaded their columns of the matrix by then; they wait until all means are there, multiply,
and the one that is done last takes the softmax. The kernel itself is in `code.classifier`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from msplit.engines.cuda.device.device import Device
from msplit.engines.cuda.ir.windows import NO_PROLOGUE, Prologue
from msplit.engines.cuda.kernels.activations import NUMBERS, activate
from msplit.engines.cuda.kernels.conv import LARGEST
from msplit.engines.cuda.kernels.launch import Code, launch
from msplit.engines.cuda.kernels.mlp import MOST_ROWS
from msplit.engines.cuda.kernels.tiles import Tiles, power_of_two, shares

_CODE = Code("classifier", "classify")

MOST_CLASSES = 1 << 15
"""Results of a softmax: one block has all of a row."""

_MOST_PIECES = 16
"""Into which the pixels are cut: each block behind adds them up for all channels."""

_OF_A_THREAD = 8
"""Numbers of an image that a thread of a block in front loads at a time."""

_REGISTERS = 128
"""Registers of a thread at most, in a block of 8 warps or more: two of 8 warps share an SM then, such that wait with such that they wait
for, or with the end of the kernel in front."""

_TILES = (Tiles(64, 16, 2048, 16, 1), Tiles(64, 8, 1024, 8, 1), Tiles(32, 8, 512, 4, 1))


def candidates(channels: int, *, early: bool = False) -> Iterator[Tiles]:
    """Ways to cut it: pixels that a block in front loads at a time, results of one behind, channels (`summands`) whose weights it holds."""
    held = (tiles._replace(summands=min(tiles.summands, power_of_two(channels)), early=early) for tiles in _TILES)
    yield from dict.fromkeys(held)


def fits(data: Sequence[int], results: int, *, softmax: bool) -> bool:
    """True if the kernel is for data of a shape, NHWC or of rows."""
    rows, channels = data[0], data[-1]
    elements = max(torch.Size(data).numel(), channels * results)
    return 0 < rows <= MOST_ROWS and 0 < elements <= LARGEST and 0 < results <= (MOST_CLASSES if softmax else LARGEST)


class Dense(NamedTuple):
    """A dense layer, and what follows it.

    Attributes:
        weights: [channels, results], constant where the kernel starts early.
        bias: [results].
        activation: Of `activations.NUMBERS`.
        softmax: True if it is the softmax of the results that is wanted.
        result: Its type.
        prologue: What is done to the data first, with a factor per channel.
    """

    weights: Tensor
    bias: Tensor | None
    activation: str
    softmax: bool
    result: torch.dtype
    prologue: Prologue = NO_PROLOGUE

    def of(self, data: Tensor) -> Tensor:
        """Result step by step, of data of [rows, pixels, channels]."""
        weights, bias = self.weights, self.bias
        rows = self.prologue.of(data).mean(1)
        rows = torch.mm(rows, weights) if bias is None else torch.addmm(bias, rows, weights)
        rows = activate(self.activation)(rows) if self.activation else rows
        dtype = torch.promote_types(rows.dtype, self.result)
        return (torch.softmax(rows, -1, dtype=dtype) if self.softmax else rows).to(self.result)


def classify(data: Tensor, dense: Dense, tiles: Tiles) -> Tensor | None:
    """``softmax(f(mean(prologue(data)) @ weights + bias))``, computed in float32.

    Args:
        data: [rows, pixels, channels], of any strides.
        dense: With f, and with a softmax or without.
        tiles: One of `candidates`.

    Returns:
        [rows, results]; None where the device has no more counters.
    """
    rows, pixels, channels = data.shape
    weights, bias, softmax = dense.weights, dense.bias, dense.softmax
    results = weights.shape[1]
    width = max(_OF_A_THREAD * 32 * tiles.warps // tiles.pixels, 1)
    # At most so many pieces of the pixels, in whole tiles.
    share = shares(shares(pixels, tiles.pixels), _MOST_PIECES) * tiles.pixels
    scale, shift = (None if one is None else one.contiguous() for one in dense.prologue[:2])
    prepares = scale is not None or shift is not None or dense.prologue.relu
    pieces = shares(pixels, share) if pixels > 1 or prepares else 0
    counters = Device.of(data.device).semaphores.take(rows)
    if counters is None:
        return None
    out = data.new_empty((rows, results), dtype=dense.result)
    means = data.new_empty(rows * pieces * channels, dtype=torch.float32)
    logits = data.new_empty(rows * results if softmax else 0, dtype=torch.float32)
    summands = min(tiles.summands, power_of_two(channels))
    early = {"launch_pdl": True} | ({"maxnreg": _REGISTERS} if tiles.warps >= 8 else {})
    launch(_CODE, (rows * pieces * shares(channels, width) + shares(results, tiles.results),))(
        data, data if scale is None else scale, data if shift is None else shift,
        rows, pixels, channels, share, pieces, *data.stride(),
        out, weights, out if bias is None else bias, means if pieces else counters, logits if softmax else counters, counters,
        results, *weights.stride(), NUMBERS[dense.activation],
        SCALE=scale is not None, SHIFT=shift is not None, CUT=dense.prologue.relu, BIAS=bias is not None,
        MEAN=pieces > 0, SOFTMAX=power_of_two(results) if softmax else 0, EARLY=tiles.early,
        TURNED=weights.stride(0) < weights.stride(1), WHOLE=summands >= channels,
        PIXELS=tiles.pixels, CHANNELS=width, SUMMANDS=summands, RESULTS=tiles.results,
        num_warps=tiles.warps, **(early if tiles.early else {}),
    )  # fmt: skip
    return out
