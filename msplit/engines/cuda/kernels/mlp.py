"""Kernels of small dense layers: a perceptron with one hidden layer, and the end of a classifier.

A perceptron with one hidden layer of a few rows in one kernel of our own: two products with bias and activation, and in front of them
the mean over the pixels of an image, as squeeze-and-excitation has it. On a GPU.

One behind the other, each of the three waits for the one in front to be over and for its numbers to come back from memory. Here the first
blocks add up some pixels of some channels and multiply these by their rows of the first matrix, so that few numbers are left; the others
have fetched what they need of the second matrix by then, wait until all parts are there, and add them up, always in the same order. The
kernel itself is in `code.mlp`.

The end of a classifier of images in one kernel of our own: the mean over the pixels, a dense layer, and the softmax of what it gives.
On a GPU, for a few images.

Apart, each of the three waits for the one in front to be over, and the product then fetches all of its weights. Here the first blocks take
the mean of some channels each. The others have loaded their columns of the matrix by then; they wait until all means are there, multiply,
and the one that is done last takes the softmax. The kernel itself is in `code.mlp`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from msplit.engines.cuda.device.device import Device
from msplit.engines.cuda.ir.windows import NO_PROLOGUE, Prologue
from msplit.engines.cuda.kernels.activations import NUMBERS, activate
from msplit.engines.cuda.kernels.launch import Code, launch
from msplit.engines.cuda.kernels.tiles import LARGEST, Tiles, power_of_two, shares

_MLP = Code("mlp", "mlp")

MOST_HIDDEN = 128
"""Numbers between the two products: a block has a row of each of its channels."""

MOST_ROWS = 16
"""With more, products are worth tensor cores."""

_MOST_PARTS = 256
"""Into which the work in front of the second product is cut, where its channels leave the choice: each block behind adds them all up."""

_AT_A_TIME = 4096
"""Numbers of all parts that a block adds up at a time."""

_OF_IMAGES = (Tiles(64, 32, 32, 4, 1), Tiles(128, 32, 32, 8, 1))
_OF_ROWS = (Tiles(1, 32, 64, 4, 1), Tiles(1, 16, 128, 8, 1), Tiles(1, 64, 32, 4, 1))


def candidates(pixels: int, *, early: bool = False) -> Iterator[Tiles]:
    """Ways to cut it: pixels and channels (`summands`) of a block in front, results of one behind."""
    for tiles in _OF_IMAGES if pixels > 1 else _OF_ROWS:
        yield tiles._replace(early=early)


def fits(data: Sequence[int], hidden: int, results: int) -> bool:
    """True if the kernel is for data of a shape, NHWC or of rows."""
    rows, channels = data[0], data[-1]
    elements = max(torch.Size(data).numel(), max(channels, results) * hidden)
    return 0 < rows <= MOST_ROWS and 0 < hidden <= MOST_HIDDEN and results > 0 and 0 < elements <= LARGEST


class Layers(NamedTuple):
    """Two dense layers.

    Attributes:
        matrices: [channels, hidden] and [hidden, results], constant where the kernel starts early.
        biases: [hidden] and [results].
        activations: What follows each, of `activations.NUMBERS`.
    """

    matrices: tuple[Tensor, Tensor]
    biases: tuple[Tensor | None, Tensor | None]
    activations: tuple[str, str]

    def of(self, rows: Tensor) -> Tensor:
        """Result step by step, of rows of [rows, channels]."""
        for matrix, bias, activation in zip(*self, strict=True):
            rows = torch.mm(rows, matrix) if bias is None else torch.addmm(bias, rows, matrix)
            rows = activate(activation)(rows) if activation else rows
        return rows


class SharedArguments(NamedTuple):
    """Arguments of a kernel that ends in two dense layers, in the order in which it takes it.

    Attributes:
        out: [rows, results].
        arguments: `out`, and what else the layers need.
        constants: Likewise.
    """

    out: Tensor
    arguments: tuple[Any, ...]
    constants: dict[str, Any]


def shared(
    layers: Layers, data: Tensor, rows: int, parts: int, results_of_block: int, result: torch.dtype | None = None
) -> SharedArguments | None:
    """Memory and arguments for two dense layers of rows that come in parts; None where the device has no more counters.

    Args:
        layers: On the device of `data`.
        data: Anything there.
        rows: Counters are one for each.
        parts: Of a row.
        results_of_block: Of one of the blocks that wait.
        result: Its type; that of the data by default.
    """
    first, second = layers.matrices
    hidden, results = second.shape
    counters = Device.of(data.device).semaphores.take(rows)
    if counters is None:
        return None
    wide = max(power_of_two(hidden), 8)
    out = data.new_empty((rows, results), dtype=result)
    partial = data.new_empty(rows * parts * wide, dtype=torch.float32)
    one, two = layers.biases
    numbers = (NUMBERS[name] for name in layers.activations)
    return SharedArguments(
        out,
        (
            *(out, first, out if one is None else one, second, out if two is None else two, partial, counters),
            *(hidden, results, parts, *first.stride(), *second.stride(), *numbers),
        ),
        {
            "BIAS1": one is not None,
            "BIAS2": two is not None,
            "HIDDEN": wide,
            "RESULTS": results_of_block,
            "PARTS": max(min(power_of_two(parts), _AT_A_TIME // wide), 1),
        },
    )


def mlp(data: Tensor, layers: Layers, tiles: Tiles, result: torch.dtype | None = None) -> Tensor | None:
    """``g(f(mean(data) @ matrices[0] + biases[0]) @ matrices[1] + biases[1])``, computed in float32.

    Args:
        data: [rows, pixels, channels], of any strides.
        layers: With f and g.
        tiles: One of `candidates`.
        result: Its type; that of the data by default.

    Returns:
        [rows, results]; None where the device has no more counters.
    """
    rows, pixels, channels = data.shape
    chunks = shares(channels, tiles.summands)
    # A block takes as many pixels as keep the parts few, in whole tiles.
    share = shares(shares(pixels, tiles.pixels), max(_MOST_PARTS // chunks, 1)) * tiles.pixels
    parts = shares(pixels, share) * chunks
    work = shared(layers, data, rows, parts, tiles.results, result)
    if work is None:
        return None
    launch(_MLP, (rows * (parts + shares(work.out.shape[1], tiles.results)),))(
        data, rows, pixels, channels, share, *data.stride(), *work.arguments,
        EARLY=tiles.early, PIXELS=tiles.pixels, CHANNELS=tiles.summands, **work.constants,
        num_warps=tiles.warps, **({"launch_pdl": True} if tiles.early else {}),
    )  # fmt: skip
    return work.out


_CODE = Code("mlp", "classify")

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


def classifier_candidates(channels: int, *, early: bool = False) -> Iterator[Tiles]:
    """Ways to cut it: pixels that a block in front loads at a time, results of one behind, channels (`summands`) whose weights it holds."""
    held = (tiles._replace(summands=min(tiles.summands, power_of_two(channels)), early=early) for tiles in _TILES)
    yield from dict.fromkeys(held)


def classifier_fits(data: Sequence[int], results: int, *, softmax: bool) -> bool:
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
