"""Attention in one kernel of our own. It runs on a GPU, in `code.attention`.

The library's kernel in float32 multiplies to nearly all bits. Where TF32 is allowed for products it takes a third of the work. A block has
some queries of one head, goes over all keys, a few at a time, and keeps of their scores the largest, the sum of the weights, and the
weighted sum of values so far (Dao et al., FlashAttention, NeurIPS 2022).
"""

from __future__ import annotations

from torch import Tensor

from msplit.engines.cuda.kernels.launch import Code, input_precision, launch
from msplit.engines.cuda.kernels.tiles import Tile, shares

_ATTENTION = Code("attention", "attention")

WIDEST = 128
"""Numbers of a query, and of a value, that fit the registers of a block."""

_LEAST = 16
"""Tensor cores multiply no fewer."""

TILES = {
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
        for name, tile in TILES.items()
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
        tile: Of `TILES`.
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
