"""The kernel of `kernels.attention`."""

from __future__ import annotations

import triton
import triton.language as tl

from msplit.engines.cuda.kernels.code.tensor_cores import for_products, rounded


@triton.jit(do_not_specialize=["M", "N", "heads", "rounds"])  # type: ignore[untyped-decorator]
def attention(  # type: ignore[no-untyped-def]
    out, query, key, value, bias, scale,
    M, N, D, E, heads, rounds,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    b_batch, b_head, b_row, b_column, o_batch, o_head, o_row,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    CAUSAL: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(M, BM)
    member = tl.program_id(0) // across
    batch, head = (member // heads).to(tl.int64), (member % heads).to(tl.int64)
    first = tl.program_id(0) % across * BM
    rows, inner, depth = first + tl.arange(0, BM), tl.arange(0, BD), tl.arange(0, BE)
    asked = tl.load(
        query + batch * q_batch + head * q_head + rows[:, None] * q_row + inner[None, :],
        mask=(rows < M)[:, None] & (inner < D)[None, :],
        other=0.0,
    )
    if not ROUNDED:
        asked = rounded(asked, PRECISION)
    key += batch * k_batch + head * k_head
    value += batch * v_batch + head * v_head
    bias += batch * b_batch + head * b_head
    most = tl.full([BM], float("-inf"), tl.float32)
    weight = tl.zeros([BM], tl.float32)
    total = tl.zeros([BM, BE], tl.float32)
    end = tl.minimum(N, first + BM) if CAUSAL else N
    for start in range(0, end, BN):
        columns = start + tl.arange(0, BN)
        there = columns < N
        keys = tl.load(
            key + columns[None, :] * k_row + inner[:, None], mask=there[None, :] & (inner < D)[:, None], other=0.0
        )
        if not ROUNDED:
            keys = rounded(keys, PRECISION)
        scores = tl.dot(asked, keys, input_precision=PRECISION) * scale
        if BIAS:
            place = bias + rows[:, None] * b_row + columns[None, :] * b_column
            scores += tl.load(place, mask=(rows < M)[:, None] & there[None, :], other=0.0).to(tl.float32)
        counts = there[None, :] & (columns[None, :] <= rows[:, None]) if CAUSAL else there[None, :]
        scores = tl.where(counts, scores, float("-inf"))
        larger = tl.maximum(most, tl.max(scores, 1))
        # Of a row in which nothing counted so far, minus infinity less minus infinity would be no number.
        base = tl.where(larger == float("-inf"), 0.0, larger)
        weights = tl.exp(scores - base[:, None])
        before = tl.exp(most - base)
        weight = weight * before + tl.sum(weights, 1)
        values = tl.load(
            value + columns[:, None] * v_row + depth[None, :], mask=there[:, None] & (depth < E)[None, :], other=0.0
        )
        if not ROUNDED:
            values = rounded(values, PRECISION)
        weights = rounded(weights.to(values.dtype), PRECISION)
        total = tl.dot(weights, values, total * before[:, None], input_precision=PRECISION)
        most = larger
    total = for_products(total / weight[:, None], rounds)
    target = out + batch * o_batch + head * o_head + rows[:, None] * o_row + depth[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=(rows < M)[:, None] & (depth < E)[None, :])
