"""Products of alike dense layers in one kernel, bias and activation included. Needs Triton and a GPU; import it only when both are there.

The library's batched product has no epilogue for a bias per member, and none for an activation. One kernel does them all, and the sum with
a second product, as recurrent cells have it: there the two products, their sum and the bias of all layers are one kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

ACTIVATIONS = {"": 0, "Relu": 1, "Relu6": 2, "Sigmoid": 3, "Tanh": 4}


@dataclass(frozen=True)
class Tile:
    """What one program of the kernel computes and how.

    Attributes:
        rows: Rows; 1 takes the kernel for one row, which multiplies without tensor cores.
        columns: Columns.
        inner: How much of the inner dimension at a time.
        warps: Warps that share the work.
        stages: Loads under way at once.
    """

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int = 3

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}x{self.inner}/{self.warps}"


def tiles(rows: int) -> tuple[Tile, ...]:
    """Tiles worth trying for a number of rows."""
    if rows == 1:
        # Loads of the next round do not start before this round's are there: few rounds, each of many loads.
        return Tile(1, 32, 64, 4), Tile(1, 32, 256, 8), Tile(1, 64, 128, 8), Tile(1, 16, 256, 4)
    if rows <= 16:
        return Tile(16, 32, 64, 2), Tile(16, 64, 64, 4), Tile(16, 32, 128, 4)
    if rows <= 32:
        return Tile(32, 32, 64, 4), Tile(32, 64, 64, 4)
    return Tile(64, 32, 64, 4), Tile(64, 64, 32, 4), Tile(128, 64, 32, 8), Tile(32, 64, 64, 4)


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


@triton.jit  # type: ignore[untyped-decorator]
def _activate(value, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    # A comparison with NaN is false: NaN stays.
    if ACTIVATION == 1:
        value = tl.where(value < 0, 0.0, value)
    if ACTIVATION == 2:
        value = tl.where(value < 0, 0.0, tl.where(value > 6, 6.0, value))
    if ACTIVATION == 3:
        value = 1.0 / (1.0 + tl.exp(-value))
    if ACTIVATION == 4:
        value = libdevice.tanh(value)
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
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    for start in range(0, K, BK):
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
    partial, x, weights, columns, D, K, x_inner, w_inner, w_column, BK: tl.constexpr
):
    for start in range(0, K, BK):
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
def _products(  # type: ignore[no-untyped-def]
    out, x, weights, bias, x2, weights2, bias2, addend,
    M, D, K, K2, first,
    x_member, x_row, x_inner, w_member, w_inner, w_column, b_member,
    x2_member, x2_row, x2_inner, w2_member, w2_inner, w2_column, b2_member,
    a_member, a_row, o_member, o_row,
    BM: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr,
    BIAS: tl.constexpr, SECOND: tl.constexpr, BIAS2: tl.constexpr, ADDEND: tl.constexpr,
    ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    member = tl.program_id(1).to(tl.int64)
    across = tl.cdiv(D, BD)
    rows = tl.program_id(0) // across * BM + tl.arange(0, BM)
    columns = tl.program_id(0) % across * BD + tl.arange(0, BD)
    inside = (rows < M)[:, None] & (columns < D)[None, :]
    x += member * x_member
    weights += member * w_member
    if BM == 1:
        partial = tl.zeros([BK, BD], tl.float32)
        partial = _row_sum(partial, x, weights, columns, D, K, x_inner, w_inner, w_column, BK)
        if SECOND:  # noqa: SIM102  (one is known when the kernel is compiled, the other is not)
            if member >= first:
                partial = _row_sum(
                    partial, x2 + (member - first) * x2_member, weights2 + (member - first) * w2_member, columns, D, K2,
                    x2_inner, w2_inner, w2_column, BK,
                )  # fmt: skip
        total = tl.sum(partial, 0)[None, :]
    else:
        total = tl.zeros([BM, BD], tl.float32)
        total = _tile_sum(total, x, weights, rows, columns, M, D, K, x_row, x_inner, w_inner, w_column, BK, PRECISION)
        if SECOND:  # noqa: SIM102
            if member >= first:
                total = _tile_sum(
                    total, x2 + (member - first) * x2_member, weights2 + (member - first) * w2_member, rows, columns, M, D, K2,
                    x2_row, x2_inner, w2_inner, w2_column, BK, PRECISION,
                )  # fmt: skip
    if BIAS:
        total += tl.load(bias + member * b_member + columns, mask=columns < D, other=0.0).to(tl.float32)[None, :]
    if SECOND:
        if member >= first:
            if BIAS2:
                shift = bias2 + (member - first) * b2_member + columns
                total += tl.load(shift, mask=columns < D, other=0.0).to(tl.float32)[None, :]
        else:
            if ADDEND:
                place = addend + member * a_member + rows[:, None] * a_row + columns[None, :]
                total += tl.load(place, mask=inside, other=0.0).to(tl.float32)
    total = _activate(total, ACTIVATION)
    target = out + member * o_member + rows[:, None].to(tl.int64) * o_row + columns[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=inside)


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
        tile: How to divide the work. Its `rows` is 1 only for products of one row.
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
    if rows_first:
        out = one.x.new_empty((rows, members, columns)).permute(1, 0, 2)
    else:
        out = one.x.new_empty((members, rows, columns))
    none = out
    other = second or one
    x_row, x2_row = one.x.stride(1), other.x.stride(1)
    grid = (triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns), members)
    _products[grid](
        out, one.x, one.weights, none if one.bias is None else one.bias,
        other.x, other.weights, none if other.bias is None else other.bias, none if addend is None else addend,
        rows, columns, inner, other.x.shape[2], first,
        one.x.stride(0), x_row, one.x.stride(2), *one.weights.stride(), _member_stride(one.bias),
        other.x.stride(0), x2_row, other.x.stride(2), *other.weights.stride(), _member_stride(other.bias),
        0 if addend is None else addend.stride(0), 0 if addend is None else addend.stride(1),
        out.stride(0), out.stride(1),
        BM=tile.rows, BD=tile.columns, BK=tile.inner,
        BIAS=one.bias is not None, SECOND=second is not None, BIAS2=second is not None and second.bias is not None,
        ADDEND=addend is not None, ACTIVATION=ACTIVATIONS[activation],
        PRECISION="tf32" if tf32 and out.dtype == torch.float32 else "ieee",
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def _member_stride(bias: Tensor | None) -> int:
    return 0 if bias is None or bias.shape[0] == 1 else bias.stride(0)
