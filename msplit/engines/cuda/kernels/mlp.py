"""A perceptron with one hidden layer of a few rows in one kernel of our own: two products with bias and activation, and in front of them
the mean over the pixels of an image, as squeeze-and-excitation has it. On a GPU.

One behind the other, each of the three waits for the one in front to be over and for its numbers to come back from memory. Here the first
blocks add up some pixels of some channels and multiply these by their rows of the first matrix, so that few numbers are left; the others
have fetched what they need of the second matrix by then, wait until all parts are there, and add them up, always in the same order. The
kernel itself is in `code.mlp`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from msplit.engines.cuda.device import Device
from msplit.engines.cuda.kernels.activations import NUMBERS
from msplit.engines.cuda.kernels.conv import LARGEST
from msplit.engines.cuda.kernels.launch import Code, launch
from msplit.engines.cuda.kernels.tiles import Tiles, shares

_MLP = Code("mlp", "mlp")

MOST_HIDDEN = 128
"""Numbers between the two products: a block has a row of each of its channels."""

MOST_ROWS = 16
"""With more, products are worth tensor cores."""

_MOST_PARTS = 256
"""Into which the work in front of the second product is cut, where its channels leave the choice: each block behind adds them all up."""

_AT_A_TIME = 4096
"""Numbers of all parts that a block adds up at a time."""

_OF_IMAGES = (
    Tiles(64, 32, 32, 4, 1),
    Tiles(64, 32, 32, 8, 1),
    Tiles(128, 32, 32, 8, 1),
    Tiles(32, 32, 64, 4, 1),
    Tiles(64, 64, 64, 8, 1),
)
_OF_ROWS = (Tiles(1, 32, 64, 4, 1), Tiles(1, 16, 128, 8, 1), Tiles(1, 64, 32, 4, 1))


def candidates(pixels: int, *, early: bool = False) -> Iterator[Tiles]:
    """Ways to cut it: pixels and channels (`summands`) of a block in front, results of one behind."""
    for tiles in _OF_IMAGES if pixels > 1 else _OF_ROWS:
        yield tiles._replace(early=early)


def fits(data: Sequence[int], hidden: int, results: int) -> bool:
    """Whether the kernel is for data of a shape, NHWC or of rows."""
    rows, channels = data[0], data[-1]
    elements = max(torch.Size(data).numel(), max(channels, results) * hidden)
    return 0 < rows <= MOST_ROWS and 0 < hidden <= MOST_HIDDEN and results > 0 and 0 < elements <= LARGEST


def mlp(
    data: Tensor,
    matrices: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    activations: Sequence[str],
    tiles: Tiles,
) -> Tensor | None:
    """``g(f(mean(data) @ matrices[0] + biases[0]) @ matrices[1] + biases[1])``, computed in float32.

    Args:
        data: [rows, pixels, channels], of any strides.
        matrices: [channels, hidden] and [hidden, results], constant where the kernel starts early.
        biases: [hidden] and [results].
        activations: f and g, each one of `activations.NUMBERS`.
        tiles: One of `candidates`.

    Returns:
        [rows, results]; None where the device has no more counters.
    """
    rows, pixels, channels = data.shape
    hidden, results = matrices[1].shape
    counters = Device.of(data.device).semaphores.take(rows)
    if counters is None:
        return None
    chunks = shares(channels, tiles.summands)
    # A block takes as many pixels as keep the parts few, in whole tiles.
    share = shares(shares(pixels, tiles.pixels), max(_MOST_PARTS // chunks, 1)) * tiles.pixels
    parts = shares(pixels, share) * chunks
    wide = max(_power(hidden), 8)
    out = data.new_empty((rows, results))
    partial = out.new_empty(rows * parts * wide, dtype=torch.float32)
    one, two = (out if bias is None else bias for bias in biases)
    first, second = (NUMBERS[name] for name in activations)
    launch(_MLP, (rows * (parts + shares(results, tiles.results)),))(
        out, data, matrices[0], one, matrices[1], two, partial, counters,
        rows, pixels, channels, hidden, results, share, parts,
        *data.stride(), *matrices[0].stride(), *matrices[1].stride(), first, second,
        BIAS1=biases[0] is not None, BIAS2=biases[1] is not None, EARLY=tiles.early,
        PIXELS=tiles.pixels, CHANNELS=tiles.summands, HIDDEN=wide, RESULTS=tiles.results,
        PARTS=max(min(_power(parts), _AT_A_TIME // wide), 1),
        num_warps=tiles.warps, **({"launch_pdl": True} if tiles.early else {}),
    )  # fmt: skip
    return out


def _power(size: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << (size - 1).bit_length()
