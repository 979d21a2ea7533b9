"""Chooses the kernel that runs a convolution, by measurement: the library's, or our own with tiles of one of a few sizes.

cuDNN's kernels are best where a convolution fills the GPU. At batch 1 on an H200 the tiled kernel is faster for nearly all: 26 convolutions
of Inception-v3, one after the other, take 173 µs instead of 193 (`benchmarks/notes`). There is no rule that a page could hold, so each
shape is timed once per device, and the tiled kernel is taken where it is faster both alone and eight side by side (see `tuner`), and
gives the same numbers. So is our kernel for convolutions of each channel by itself.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch

from msplit.engines.cuda.autotune.matmul import Lowered
from msplit.engines.cuda.autotune.tuner import Call, Family, RotatingWeights, Tuner, copies, estimated
from msplit.engines.cuda.ir.graph import Op, attrs_key
from msplit.engines.cuda.ir.windows import ROUNDED, TILES
from msplit.engines.cuda.kernels import channelwise, conv
from msplit.engines.cuda.kernels.tiles import Tiles
from msplit.engines.cuda.kernels.toolchain import can_compile
from msplit.formats.files import JsonValue

_ANY = (1, 2, 4, 8)

SINGLE = (
    (Tiles(16, 32, 64, 4, 5, turned=True), _ANY),
    (Tiles(32, 32, 64, 4, 3), _ANY),
    (Tiles(32, 32, 64, 4, 5), _ANY),
    (Tiles(64, 32, 64, 4, 3), _ANY),
    (Tiles(64, 32, 64, 4, 5), _ANY),
    (Tiles(64, 64, 32, 4, 5), _ANY),
)
SIBLINGS = (
    (Tiles(32, 32, 64, 4, 3), (1, 2, 4)),
    (Tiles(32, 32, 64, 4, 5), (1, 2, 4)),
    (Tiles(64, 32, 64, 4, 5), (1, 2, 4)),
    (Tiles(64, 64, 64, 4, 4), (1, 2, 4)),
)
"""Tiles that won for some shape, with the numbers of parts that won. Every tile more costs a user's first run a few kernels of half a
second to compile (windows of one pixel and of more, whole and with shared sums), and each new shape its measurement.

Several parts are for where they leave at least `LEAST_BLOCKS` and at most `MOST_BLOCKS` blocks in all."""

FEW_CHANNELS = tuple(
    Tiles(pixels, 64, summands, warps, 1, turned=True)
    for pixels, summands, warps in ((32, 16, 1), (64, 32, 2), (64, 32, 4), (128, 32, 4), (128, 64, 4), (256, 32, 8))
)
"""Tiles for data with few channels, no larger than the filter (`tiles_for`): 32 pixels of a warp, but for one. Steps are
written out one by one, so that there is nothing to pipeline."""

DEPTHWISE = tuple(
    Tiles(pixels, channels, 1, 4, 1, turned=True)
    for pixels, channels in ((4, 64), (8, 32), (8, 64), (16, 32), (16, 64))
)
"""Tiles for convolutions of each channel by itself: 2 to 8 results of a thread."""

STRIPS = tuple(
    Tiles(pixels, channels, 1, warps, 1, turned=True, across=across)
    for pixels, channels, warps, across in ((64, 32, 4, 4), (128, 32, 4, 8), (64, 16, 2, 4))
)
"""Tiles for these where there are many results: 16 or 32 of a thread, some in a row. On an H200, NASNet's at batch 128 in float16 take 4 to
20 µs by them, 6 to 24 by the library, 5 to 50 by those above."""

MANY_RESULTS = 1 << 20
"""Number of results that fill a GPU with threads that make so many each."""

SQUEEZES = tuple(
    Tiles(pixels, channels, 32, warps, 1, turned=True)
    for pixels, channels, warps in ((4, 64, 4), (16, 32, 8), (32, 32, 4))
)
"""Tiles for these with two dense layers of the mean behind, of which a block makes so many results (`summands`). Each is compiled for every
size of window and of layer. Of eight that were tried on EfficientNet-B0's, these three are 0.6 of 76 µs behind the best of all."""

LEAST_BLOCKS = 24
MOST_BLOCKS = 300

EARLY = True
"""True where kernels of ours start before the kernel in front of them is done, if the GPU can do that. `benchmarks/convolutions.py`
switches it off: DenseNet121 at batch 1 takes 8 % longer then, Inception-v3 on eight streams too, EfficientNet-B0 1 %."""

_EARLY_FROM = (9, 0)
"""The first compute capability that can."""


def tiles_of(value: JsonValue) -> Tiles:
    """Tiles as they are kept, a list of their fields."""
    *sizes, turned, early, across = value.items(len(Tiles._fields))
    pixels, results, summands, warps, stages, parts = (size.whole(1, 1 << 16) for size in sizes)
    return Tiles(pixels, results, summands, warps, stages, parts, turned.flag(), early.flag(), across.whole(1, 1 << 16))


def tiles_family(name: str) -> Family[Tiles | None]:
    """A family of choices between kernels of ours by their `Tiles`, and None where what they would replace is better."""
    return Family(name, lambda tiles: tiles, lambda value: value.or_none(tiles_of), None)


FAMILY = tiles_family("convolutions")
"""The choices that are made here: `Tiles`, or None where the library runs it."""


def choose(
    op: Op, arguments: list[torch.Tensor], lowered: Lowered, *, keep_filter: bool = False
) -> tuple[Op, torch.Tensor]:
    """The op as it runs fastest, itself or with `TILES`, and its filter as that kernel wants it to lie in memory.

    Args:
        op: A convolution with a constant filter.
        arguments: Its inputs, on a CUDA device; the filter, the second, lies as the library wants it.
        keep_filter: The filter must stay as it lies, because others read it.
    """
    if not (can_compile() if is_depthwise(op) else worth_a_kernel(arguments[0].dtype)):
        return op, arguments[1]
    how = op.op, attrs_key(op.attrs), bool(op.attrs.get(ROUNDED)), keep_filter
    key = (*how, *((tuple(one.shape), one.stride(), one.dtype) for one in arguments))
    turned = arguments[1] if keep_filter else arguments[1].contiguous()
    tuner = Tuner.of(arguments[0].device)
    tiles = tuner.choose(
        FAMILY,
        key,
        lambda: _winner(tuner, op, arguments, turned, lowered),
        lambda: _calls(op, arguments, turned, lowered),
        _weight(*arguments[:2]),
    )
    if tiles is None:
        return op, arguments[1]
    return _tiled(op, tiles), turned if tiles.turned else arguments[1]


def is_depthwise(op: Op) -> bool:
    """True if an op convolves each channel by itself."""
    return op.op.removeprefix("_Fused") == "DepthwiseConv2dNative"


def worth_a_kernel(dtype: torch.dtype) -> bool:
    """True if our own kernel may win: in IEEE precision a product has no tensor cores, and the libraries' kernels are best."""
    half = dtype in (torch.float16, torch.bfloat16)
    return can_compile() and (half or (dtype == torch.float32 and torch.backends.cudnn.allow_tf32))


def _tiled(op: Op, tiles: Tiles) -> Op:
    return Op(op.node, op.name, op.op, {**op.attrs, TILES: tiles}, op.inputs, op.source_nodes)


def candidates(data: torch.Tensor, filter: torch.Tensor, pixels: int, results: Sequence[int]) -> Iterator[Tiles]:
    """Ways to cut a convolution, or several side by side, given the output channels of each."""
    early = starts_early(data)
    if len(results) == 1 and data.shape[-1] < conv.MANY:
        yield from (tiles._replace(early=early) for tiles in conv.tiles_for(filter, FEW_CHANNELS))
        return
    for whole, shares in SIBLINGS if len(results) > 1 else SINGLE:
        blocks = -(-pixels // whole.pixels) * sum(-(-one // whole.results) for one in results)
        steps = conv.summing_steps(data, filter, whole)
        for parts in shares:
            if parts == 1 or (LEAST_BLOCKS <= blocks * parts <= MOST_BLOCKS and steps >= 2 * parts):
                yield whole._replace(parts=parts, early=early)


def squeezes(data: torch.Tensor) -> Iterator[Tiles]:
    """Ways to cut a convolution of each channel by itself that takes two dense layers along."""
    yield from (tiles._replace(early=starts_early(data)) for tiles in SQUEEZES)


def starts_early(data: torch.Tensor) -> bool:
    """True if kernels of ours that read this start before the one in front of them is done."""
    return EARLY and data.is_cuda and torch.cuda.get_device_capability(data.device) >= _EARLY_FROM


def _weight(data: torch.Tensor, filter: torch.Tensor) -> float:
    return estimated(data, filter, 2 * data.numel() * filter.numel() // max(filter.shape[2], 1))


def _calls(op: Op, arguments: list[torch.Tensor], turned: torch.Tensor, lowered: Lowered) -> Iterator[Call]:
    """Calls of all kernels of ours that `_winner` times."""
    data, filter, *rest = arguments
    for tiles in cuts(op, data, filter, lowered(op)(*arguments)):
        yield functools.partial(lowered(_tiled(op, tiles)), data, turned if tiles.turned else filter, *rest)


def cuts(op: Op, data: torch.Tensor, filter: torch.Tensor, expected: Sequence[torch.Tensor]) -> Iterator[Tiles]:
    """Ways to cut a convolution with this result that fit how the filter lies."""
    if is_depthwise(op):
        results = expected[0].numel()
        if channelwise.fits(data, filter, results):
            many = results >= MANY_RESULTS and max(op.attrs.get("dilations", (1,)), default=1) == 1
            yield from (tiles._replace(early=starts_early(data)) for tiles in (STRIPS if many else DEPTHWISE))
        return
    results = int(filter.shape[3])
    for tiles in candidates(data, filter, expected[0].numel() // max(results, 1), [results]):
        if tiles.turned or filter.stride(2) == 1:  # elsewhere the library wants it to lie in yet another way
            yield tiles


def _winner(
    tuner: Tuner, op: Op, arguments: list[torch.Tensor], turned: torch.Tensor, lowered: Lowered
) -> Tiles | None:
    data, filter, *rest = arguments
    weights = {False: copies(filter)}  # by whether they are turned
    weights[True] = weights[False] if turned is filter else copies(turned)
    library = RotatingWeights(lowered(op), data, weights[False], rest)
    expected = library()
    calls = (
        (tiles, RotatingWeights(lowered(_tiled(op, tiles)), data, weights[tiles.turned], rest))
        for tiles in cuts(op, data, filter, expected)
    )
    return tuner.first_to_beat(tuner.ranked(calls, expected, cold=True), library)
