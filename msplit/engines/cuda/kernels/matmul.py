"""Products of alike dense layers in one kernel, bias and activation included. Needs Triton and a GPU; import it only when both are there.

The library's batched product has no epilogue for a bias per member, and none for an activation. One kernel does them all, and the sum with
a second product, as recurrent cells have it: there the two products, their sum and the bias of all layers are one kernel.

A product of one layer is the case of one member. Where a product makes too few tiles to fill a GPU, several blocks share the summands of
a tile (split-K); the one that is done last adds all parts up, always in the same order. Products with one row, or one column per block,
multiply without tensor cores, in float32: they are as exact as the library's in IEEE precision.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from msplit.engines.cuda.device import Device
from msplit.engines.cuda.kernels.tiles import Tile
from msplit.engines.cuda.kernels.toolchain import launch

ACTIVATIONS = {"": 0, "Relu": 1, "Relu6": 2, "Sigmoid": 3, "Tanh": 4, "GeluApproximate": 5, "GeluExact": 6}

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
    width = min(max(triton.next_power_of_2(inner), 32), 1024, 4096 // height)
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
class Part:
    """Products ``x[n] @ weights[n] + bias[n]``.

    Attributes:
        x: [members, rows, inner]; members may have stride zero.
        weights: [members, inner, columns].
        bias: [members, columns], or None.
    """

    x: Tensor
    weights: Tensor
    bias: Tensor | None = None


@triton.jit
def _activate(value, activation):  # type: ignore[no-untyped-def]
    # The number is not known when the kernel is compiled: one kernel for all. A comparison with NaN is false: NaN stays.
    if activation == 1:
        value = tl.where(value < 0, 0.0, value)
    elif activation == 2:
        value = tl.where(value < 0, 0.0, tl.where(value > 6, 6.0, value))
    elif activation == 3:
        value = 1.0 / (1.0 + tl.exp(-value))
    elif activation == 4:
        value = libdevice.tanh(value)
    elif activation == 5:  # x (1 + tanh u) / 2 = x / (1 + exp(-2u)) with u = sqrt(2/pi) (x + 0.044715 x^3)
        value = value / (1.0 + tl.exp(-1.5957691216057308 * (value + 0.044715 * value * value * value)))
    elif activation == 6:
        value = value * 0.5 * (1.0 + tl.erf(value * 0.7071067811865476))
    return value


@triton.jit  # type: ignore[untyped-decorator]
def _tile_sum(  # type: ignore[no-untyped-def]
    total,
    x,
    weights,
    rows,
    columns,
    M,
    D,
    K,
    x_row,
    x_inner,
    w_inner,
    w_column,
    begin,
    end,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    for start in range(begin, end, BK):
        inner = start + tl.arange(0, BK)
        a = tl.load(
            x + rows[:, None] * x_row + inner[None, :] * x_inner,
            mask=(rows < M)[:, None] & (inner < K)[None, :],
            other=0.0,
        )
        b = tl.load(
            weights + inner[:, None] * w_inner + columns[None, :] * w_column,
            mask=(inner < K)[:, None] & (columns < D)[None, :],
            other=0.0,
        )
        total = tl.dot(a, b, total, input_precision=PRECISION)
    return total


@triton.jit  # type: ignore[untyped-decorator]
def _row_sum(  # type: ignore[no-untyped-def]
    partial, x, weights, columns, D, K, x_inner, w_inner, w_column, begin, end, BK: tl.constexpr
):
    for start in range(begin, end, BK):
        inner = start + tl.arange(0, BK)
        a = tl.load(x + inner * x_inner, mask=inner < K, other=0.0).to(tl.float32)
        b = tl.load(
            weights + inner[:, None] * w_inner + columns[None, :] * w_column,
            mask=(inner < K)[:, None] & (columns < D)[None, :],
            other=0.0,
        ).to(tl.float32)
        partial += a[:, None] * b
    return partial


@triton.jit  # type: ignore[untyped-decorator]
def _column_sum(  # type: ignore[no-untyped-def]
    partial, x, weights, rows, column, M, K, x_row, x_inner, w_inner, w_column, begin, end, BK: tl.constexpr
):
    for start in range(begin, end, BK):
        inner = start + tl.arange(0, BK)
        a = tl.load(
            x + rows[:, None] * x_row + inner[None, :] * x_inner,
            mask=(rows < M)[:, None] & (inner < K)[None, :],
            other=0.0,
        ).to(tl.float32)
        b = tl.load(weights + column * w_column + inner * w_inner, mask=inner < K, other=0.0).to(tl.float32)
        partial += a * b[None, :]
    return partial


@triton.jit(do_not_specialize=["M", "first", "biased", "activation", "share", "parts"])  # type: ignore[untyped-decorator]
def _products(  # type: ignore[no-untyped-def]
    out, x, weights, bias, x2, weights2, bias2, addend, partial, counters,
    M, D, K, K2, first, biased, activation, share, parts,
    x_member, x_row, x_inner, w_member, w_inner, w_column, b_member,
    x2_member, x2_row, x2_inner, w2_member, w2_inner, w2_column, b2_member,
    a_member, a_row, o_member, o_row,
    BM: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr,
    SECOND: tl.constexpr, BIAS2: tl.constexpr, ADDEND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    member = tl.program_id(1).to(tl.int64)
    across = tl.cdiv(D, BD)
    rows = tl.program_id(0) // across * BM + tl.arange(0, BM)
    columns = tl.program_id(0) % across * BD + tl.arange(0, BD)
    inside = (rows < M)[:, None] & (columns < D)[None, :]
    x += member * x_member
    weights += member * w_member
    begin = tl.program_id(2) * share * BK
    end = tl.minimum(K, begin + share * BK)
    if BM == 1 and BD > 1:
        sums = tl.zeros([BK, BD], tl.float32)
        sums = _row_sum(sums, x, weights, columns, D, K, x_inner, w_inner, w_column, begin, end, BK)
        if SECOND:  # noqa: SIM102  (one is known when the kernel is compiled, the other is not)
            if member >= first:
                sums = _row_sum(
                    sums, x2 + (member - first) * x2_member, weights2 + (member - first) * w2_member, columns, D, K2,
                    x2_inner, w2_inner, w2_column, 0, K2, BK,
                )  # fmt: skip
        total = tl.sum(sums, 0)[None, :]
    elif BD == 1:
        column = tl.program_id(0) % across
        sums = tl.zeros([BM, BK], tl.float32)
        sums = _column_sum(sums, x, weights, rows, column, M, K, x_row, x_inner, w_inner, w_column, begin, end, BK)
        if SECOND:  # noqa: SIM102
            if member >= first:
                sums = _column_sum(
                    sums, x2 + (member - first) * x2_member, weights2 + (member - first) * w2_member, rows, column, M, K2,
                    x2_row, x2_inner, w2_inner, w2_column, 0, K2, BK,
                )  # fmt: skip
        total = tl.sum(sums, 1)[:, None]
    else:
        total = tl.zeros([BM, BD], tl.float32)
        total = _tile_sum(
            total, x, weights, rows, columns, M, D, K, x_row, x_inner, w_inner, w_column, begin, end, BK, PRECISION
        )
        if SECOND:  # noqa: SIM102
            if member >= first:
                total = _tile_sum(
                    total, x2 + (member - first) * x2_member, weights2 + (member - first) * w2_member, rows, columns, M, D, K2,
                    x2_row, x2_inner, w2_inner, w2_column, 0, K2, BK, PRECISION,
                )  # fmt: skip
    there = M  # rows that this block writes: none where another one is last
    if parts > 1:
        # What others added up must be there before this block counts itself, and be read only after the last one has.
        number = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        inner = tl.arange(0, BM)[:, None] * BD + tl.arange(0, BD)[None, :]
        start_of = partial + number * parts * (BM * BD)
        tl.store(start_of + tl.program_id(2) * (BM * BD) + inner, total)
        tl.debug_barrier()
        if tl.atomic_add(counters + number, 1, sem="acq_rel", scope="gpu") != parts - 1:
            there = 0
        else:
            tl.store(counters + number, 0)  # for the next run of the same graph
            total = tl.zeros([BM, BD], tl.float32)
            for one in tl.range(0, parts, loop_unroll_factor=4):
                total += tl.load(start_of + one * (BM * BD) + inner, cache_modifier=".cg")
    shifts = tl.load(bias + member * b_member + columns, mask=columns < D * biased, other=0.0)
    total += shifts.to(tl.float32)[None, :]
    if SECOND:
        if member >= first:
            if BIAS2:
                shift = bias2 + (member - first) * b2_member + columns
                total += tl.load(shift, mask=columns < D, other=0.0).to(tl.float32)[None, :]
        else:
            if ADDEND:
                place = addend + member * a_member + rows[:, None] * a_row + columns[None, :]
                total += tl.load(place, mask=inside, other=0.0).to(tl.float32)
    total = _activate(total, activation)
    target = out + member * o_member + rows[:, None].to(tl.int64) * o_row + columns[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=inside & (rows < there)[:, None])


def products(
    one: Part,
    tile: Tile,
    *,
    activation: str = "",
    tf32: bool = False,
    second: Part | None = None,
    first: int = 0,
    addend: Tensor | None = None,
    rows_first: bool = False,
) -> Tensor:
    """All products of alike layers.

    Args:
        one: Products of all members.
        tile: How to divide the work. Its `rows` is 1 only for products of one row, or with one column; summands are shared only where
            there is no second product.
        activation: Name in `ACTIVATIONS`.
        tf32: Whether float32 may be rounded to TF32 on its way into the tensor cores.
        second: Products that are added, of the members from `first` on.
        first: See `second`.
        addend: [first, rows, columns], contiguous in the last axis: added for the members before `first`.
        rows_first: Whether the result lies in memory as [rows, members, columns].

    Returns:
        [members, rows, columns].
    """
    members, rows, inner = one.x.shape
    columns = one.weights.shape[2]
    assert rows == 1 or tile.rows > 1 or tile.columns == 1, "internal error: a tile of one row for several"
    if rows_first:
        out = one.x.new_empty((rows, members, columns)).permute(1, 0, 2)
    else:
        out = one.x.new_empty((members, rows, columns))
    none = out
    other = second or one
    grid = (triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns), members)
    steps = max(triton.cdiv(inner, tile.inner), 1)
    share = steps if second is not None else triton.cdiv(steps, tile.parts)
    parts = triton.cdiv(steps, share)
    counters = Device.of(out.device).semaphores.take(grid[0] * grid[1]) if parts > 1 else None
    if counters is None:
        parts, share = 1, steps
        partial, counters = Device.of(out.device).owned(_nothing)
    else:
        partial = out.new_empty(parts * grid[0] * grid[1] * tile.rows * tile.columns, dtype=torch.float32)
    launch(_products, (*grid, parts))(
        out, one.x, one.weights, none if one.bias is None else one.bias,
        other.x, other.weights, none if other.bias is None else other.bias, none if addend is None else addend,
        partial, counters,
        rows, columns, inner, other.x.shape[2], first, int(one.bias is not None), ACTIVATIONS[activation], share, parts,
        *one.x.stride(), *one.weights.stride(), _member_stride(one.bias),
        *other.x.stride(), *other.weights.stride(), _member_stride(other.bias),
        0 if addend is None else addend.stride(0), 0 if addend is None else addend.stride(1),
        out.stride(0), out.stride(1),
        BM=tile.rows, BD=tile.columns, BK=tile.inner,
        SECOND=second is not None, BIAS2=second is not None and second.bias is not None,
        ADDEND=addend is not None,
        PRECISION="tf32" if tf32 and out.dtype == torch.float32 and not tile.exact else "ieee",
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def _member_stride(bias: Tensor | None) -> int:
    return 0 if bias is None or bias.shape[0] == 1 else bias.stride(0)


def _nothing(device: Device) -> tuple[Tensor, Tensor]:
    """In the place of parts and counters where nothing is shared: of the same types, so that the same kernel serves."""
    return torch.empty(4, device=device.place), torch.empty(4, dtype=torch.int32, device=device.place)
