"""Kernels of products: alike dense layers in one launch, and attention.

Products of alike dense layers in one kernel, bias and activation included. They run on a GPU, in `code.products`.

The library's batched product has no epilogue for a bias per member, and none for an activation. One kernel does them all, and the sum with
a second product, as recurrent cells have it: there the two products, their sum and the bias of all layers are one kernel.

A product of one layer is the case of one member. Where a product makes too few tiles to fill a GPU, several blocks share the summands of
a tile (split-K); the one that is done last adds all parts up, always in the same order. Products with one row, or one column per block,
multiply without tensor cores, in float32: they are as exact as the library's in IEEE precision.

Attention in one kernel of our own. It runs on a GPU, in `code.products`.

The library's kernel in float32 multiplies to nearly all bits. Where TF32 is allowed for products it takes a third of the work. A block has
some queries of one head, goes over all keys, a few at a time, and keeps of their scores the largest, the sum of the weights, and the
weighted sum of values so far (Dao et al., FlashAttention, NeurIPS 2022).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from msplit.engines.cuda.device.device import Device
from msplit.engines.cuda.kernels.activations import LEAKY_ALPHA, NUMBERS
from msplit.engines.cuda.kernels.launch import Code, input_precision, launch
from msplit.engines.cuda.kernels.tiles import Tile, shares

_PRODUCTS = Code("products", "products")


FEW_COLUMNS = 8
"""Up to so many columns a block computes one of them: tensor cores would multiply mostly zeros."""

PARTS = (2, 4, 8, 16)
"""Blocks that may share a tile's summands, where that leaves at least `LEAST_BLOCKS` and at most `MOST_BLOCKS` blocks in all."""
LEAST_BLOCKS = 48
MOST_BLOCKS = 300

_MOST_PROGRAMS = 512
"""A block of the kernel for few columns takes more rows where there would be more blocks than this."""


def candidates(members: int, rows: int, inner: int, columns: int, *, split: bool = True) -> Iterator[Tile]:
    """Tiles worth trying for products of a size, with shared summands where whole tiles leave most of a GPU idle."""
    if columns <= FEW_COLUMNS:
        yield _tile_of_one_column(members, rows, inner, columns)
        return
    for tile in tiles(rows):
        blocks = members * -(-rows // tile.rows) * -(-columns // tile.columns)
        if 2 * tile.rows < min(rows, 64) and blocks > MOST_BLOCKS:
            continue  # larger tiles fill the GPU, and read less
        shared = [
            replace(tile, parts=parts)
            for parts in PARTS
            if split and LEAST_BLOCKS <= blocks * parts <= MOST_BLOCKS and inner >= parts * tile.inner
        ]
        if 2 * blocks >= LEAST_BLOCKS or not shared:
            yield tile
        yield from shared


def _tile_of_one_column(members: int, rows: int, inner: int, columns: int) -> Tile:
    """All of a row at once, as far as a block's registers go; of several rows where there are many."""
    height = 1
    while height < 16 and members * columns * rows > _MOST_PROGRAMS * height:
        height *= 2
    width = min(max(1 << max(inner - 1, 0).bit_length(), 32), 1024, 4096 // height)
    return Tile(height, 1, width, max(min(height * width // 256, 4), 1))


def tiles(rows: int) -> tuple[Tile, ...]:
    """Tiles for a number of rows. Every one more costs each new kind of product its compilation."""
    if rows == 1:
        # Loads of the next round do not start before this round's are there: few rounds, each of many loads.
        return Tile(1, 32, 64, 4), Tile(1, 32, 256, 8), Tile(1, 64, 128, 8), Tile(1, 16, 256, 4)
    if rows <= 16:
        return Tile(16, 32, 64, 2), Tile(16, 64, 64, 4), Tile(16, 32, 128, 4)
    if rows <= 32:
        return Tile(32, 32, 64, 4), Tile(32, 64, 64, 4)
    most = (Tile(128, 64, 32, 8),) if rows >= 256 else (Tile(32, 32, 64, 4), Tile(16, 32, 64, 2))
    return Tile(64, 32, 64, 4), *most, Tile(32, 64, 64, 4), Tile(64, 64, 32, 4)


@dataclass(frozen=True, eq=False)
class Layer:
    """Products ``x[n] @ weights[n] + bias[n]`` of some members.

    Attributes:
        x: [members, rows, inner], or [rows, inner] for all members.
        weights: [members, inner, columns].
        bias: [members or 1, columns], or None.
    """

    x: Tensor
    weights: Tensor
    bias: Tensor | None = None

    @property
    def rows(self) -> Tensor:
        """The rows of every member, repeated as a view where they are shared."""
        return self.x.expand(len(self.weights), -1, -1) if self.x.dim() == 2 else self.x


@dataclass(frozen=True, eq=False)
class Gemm:
    """Products of alike layers, to which those of another layer may be added for the members from `first` on, then an activation.

    Attributes:
        activation: A name in `NUMBERS`; libraries know more of them.
        alpha: LeakyRelu's slope.
        second: A layer of the members from `first` on, or None.
        first: See `second`.
        addend: [first, rows, columns]: is added for the members before `first`; None where there are none.
        rows_first: Set where the result lies in memory as [rows, members, columns], for what reads it that way. (Not with a second layer.)
        rounded_data: Set where the data are rounded to TF32 already.
        rounded_weights: Set where the weights are.
        rounds: Set where the result is to be rounded to it, for other products.
    """

    one: Layer
    activation: str = ""
    alpha: float = LEAKY_ALPHA
    second: Layer | None = None
    first: int = 0
    addend: Tensor | None = None
    rows_first: bool = False
    rounded_data: bool = False
    rounded_weights: bool = False
    rounds: bool = False

    def layers(self) -> tuple[Layer, ...]:
        """One or two."""
        return (self.one,) if self.second is None else (self.one, self.second)


def products(work: Gemm, tile: Tile, *, tf32: bool = False, result: torch.dtype | None = None) -> Tensor:
    """All products of alike layers.

    Args:
        work: The layers, and what follows them.
        tile: How to divide the work. Its `rows` is 1 only for products of one row, or with one column; summands are shared only where
            there is no second product.
        tf32: Set where float32 may be rounded to TF32 on its way into the tensor cores.
        result: Type of the result, where it is not that of the data.

    Returns:
        [members, rows, columns].
    """
    one, second, addend = work.one, work.second, work.addend
    other = second or one
    data, other_data = one.rows, other.rows
    members, rows, inner = data.shape
    columns = one.weights.shape[2]
    assert rows == 1 or tile.rows > 1 or tile.columns == 1, "internal error: a tile of one row for several"
    if addend is not None and addend.stride(-1) != 1:
        addend = addend.contiguous()
    if work.rows_first:
        out = data.new_empty((rows, members, columns), dtype=result).permute(1, 0, 2)
    else:
        out = data.new_empty((members, rows, columns), dtype=result)
    none = out
    grid = (shares(rows, tile.rows) * shares(columns, tile.columns), members)
    steps = max(shares(inner, tile.inner), 1)
    share = steps if second is not None else shares(steps, tile.parts)
    parts = shares(steps, share)
    counters = Device.of(out.device).semaphores.take(grid[0] * grid[1]) if parts > 1 else None
    if counters is None:
        parts, share = 1, steps
        partial, counters = Device.of(out.device).owned(_nothing)
    else:
        partial = out.new_empty(parts * grid[0] * grid[1] * tile.rows * tile.columns, dtype=torch.float32)
    launch(_PRODUCTS, (*grid, parts))(
        out, data, one.weights, none if one.bias is None else one.bias,
        other_data, other.weights, none if other.bias is None else other.bias, none if addend is None else addend,
        partial, counters,
        rows, columns, inner, other_data.shape[2], work.first, int(one.bias is not None), NUMBERS[work.activation], int(work.rounds),
        share, parts,
        *data.stride(), *one.weights.stride(), _member_stride(one.bias),
        *other_data.stride(), *other.weights.stride(), _member_stride(other.bias),
        0 if addend is None else addend.stride(0), 0 if addend is None else addend.stride(1),
        out.stride(0), out.stride(1),
        BM=tile.rows, BD=tile.columns, BK=tile.inner,
        SECOND=second is not None, BIAS2=second is not None and second.bias is not None,
        ADDEND=addend is not None,
        PRECISION=input_precision(data, tf32=tf32 and not tile.exact),
        ROUNDED_DATA=work.rounded_data and not tile.exact, ROUNDED_WEIGHTS=work.rounded_weights and not tile.exact,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def _member_stride(bias: Tensor | None) -> int:
    return 0 if bias is None or bias.shape[0] == 1 else bias.stride(0)


def _nothing(device: Device) -> tuple[Tensor, Tensor]:
    """In the place of parts and counters where nothing is shared: of the same types, so that the same kernel serves."""
    return torch.empty(4, device=device.place), torch.empty(4, dtype=torch.int32, device=device.place)


_ATTENTION = Code("products", "attention")

WIDEST = 128
"""Numbers of a query, and of a value, that fit the registers of a block."""

_LEAST = 16
"""Tensor cores multiply no fewer."""

ATTENTION_TILES = {
    f"{rows} queries, {keys} keys, {warps} warps": Tile(rows, keys, WIDEST, warps, stages)
    for rows, keys, warps, stages in (
        (16, 64, 4, 3),
        (32, 32, 4, 3),
        (64, 32, 4, 3),
        (64, 64, 4, 2),
        (128, 32, 8, 3),
        (128, 64, 8, 2),
    )
}
"""Ways to cut the work: queries of a block, keys at a time, and the warps that share them, by a name that says it."""


def names(rows: int) -> list[str]:
    """The tiles worth trying for a number of queries."""
    return [
        name
        for name, tile in ATTENTION_TILES.items()
        if tile.rows <= max(2 * rows, _LEAST) and (rows <= _LEAST or tile.rows > _LEAST)
    ]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    tile: Tile,
    *,
    scale: float,
    causal: bool = False,
    tf32: bool = False,
    rounded: bool = False,
    rounds: bool = False,
) -> Tensor:
    """``softmax(query @ key.T * scale + bias) @ value``, per batch and head.

    Args:
        query: [batch, heads, queries, inner], numbers side by side in the last axis; so `key` and `value`.
        key: [batch, heads, keys, inner].
        value: [batch, heads, keys, depth].
        bias: Broadcasts to [batch, heads, queries, keys].
        tile: Of `ATTENTION_TILES`.
        scale: Of scores.
        causal: True if a query counts only keys up to its own place.
        tf32: Whether float32 may be rounded to TF32 on its way into the tensor cores.
        rounded: True if queries, keys and values are rounded to it already.
        rounds: True if the result is to be rounded to it, for products.

    Returns:
        [batch, heads, queries, depth]; it lies in memory as [batch, queries, heads, depth], as what follows mostly wants it.
    """
    batch, heads, rows, inner = query.shape
    columns, depth = value.shape[-2:]
    assert max(inner, depth) <= WIDEST, "internal error: the kernel does not take so wide a head"
    out = query.new_empty((batch, rows, heads, depth)).transpose(1, 2)
    added = (
        query.new_empty(()).expand(batch, heads, rows, columns)
        if bias is None
        else bias.expand(batch, heads, rows, columns)
    )
    launch(_ATTENTION, (batch * heads * shares(rows, tile.rows),))(
        out, query, key, value, added, scale,
        rows, columns, inner, depth, heads, int(rounds),
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *added.stride(), *out.stride()[:3],
        BM=tile.rows, BN=tile.columns, BD=_width(inner), BE=_width(depth),
        CAUSAL=causal, BIAS=bias is not None,
        PRECISION=input_precision(query, tf32=tf32), ROUNDED=rounded,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def _width(size: int) -> int:
    """The power of two that a block takes for numbers side by side."""
    return max(1 << (size - 1).bit_length(), _LEAST)
