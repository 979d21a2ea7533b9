"""Kernels of products: alike dense layers, and attention.

Those of `kernels.matmul` are products of alike dense layers, bias and activation included.

Also operands of all our kernels' products on tensor cores.

Of float32 the tensor cores take the first 19 bits and cut off the others, which makes every product a little too small, layer after layer.
Rounded first, as libraries do it, errors cancel out: NASNet's outputs are 0.002 away from IEEE precision and not 0.02. A kernel rounds what
it reads, on the way from shared memory to the product, or finds it rounded by the kernel that wrote it, which costs nothing: a product of
64 rows reads shared memory by itself, and has to wait for registers otherwise (Inception-v3 at batch 1: 467 and 376 µs on an H200).

Also for kernels that are started while the one in front of them still runs (programmatic dependent launch, from compute capability 9.0 on).

Before `go_on` such a kernel may read what no kernel writes, and write nothing. Every block calls it, so that what comes behind the kernel
comes behind all that is in front of it, too.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from msplit.engines.cuda.kernels.code.epilogue import activate, for_products


@triton.jit  # type: ignore[untyped-decorator]
def rounded(value, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Numbers on their way into a product: float32 rounded to TF32 where that is the precision."""
    if PRECISION == "tf32" and value.dtype == tl.float32:
        value = tl.inline_asm_elementwise(
            "cvt.rna.tf32.f32 $0, $1;", "=r,r", [value], dtype=tl.float32, is_pure=True, pack=1
        )
    return value


_LIFT = tl.constexpr(1 + 1.3862943611198906 * 2.0**-12)
"""1 + 2 ln 2 / 4096. The last bit that TF32 keeps of a number from m to 2 m, m a power of two, is m / 1024, and half of it is cut off on
average. By as much are numbers raised whose logarithms are spread evenly in there, as those of most data nearly are."""


@triton.jit  # type: ignore[untyped-decorator]
def lifted(value, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """The same by one instruction instead of two, for innermost loops: raised so that what is left when tensor cores cut it off is right
    on average, at most 0.7 of the last bit away, where rounded numbers are 0.5. What TF32 can hold stays as it is."""
    if PRECISION == "tf32" and value.dtype == tl.float32:
        value *= _LIFT
    return value


LINE = tl.constexpr(128)
"""Bytes that are fetched at once."""


@triton.jit
def go_on():  # type: ignore[no-untyped-def]
    """Waits for all that is in front, and lets the next kernel start: any sooner, several would hold the GPU and wait in a row."""
    gdc_wait()
    gdc_launch_dependents()


@triton.jit
def fetch(places, exist):  # type: ignore[no-untyped-def]
    """Has lines of memory brought into the L2 cache, those that exist. One block does that for all that read the same lines: 1,568 blocks
    that each ask for nine lines take longer than what they then compute."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r",
        [places.to(tl.uint64), exist.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


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
    ROUNDED_DATA: tl.constexpr,
    ROUNDED_WEIGHTS: tl.constexpr,
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
        if not ROUNDED_DATA:
            a = lifted(a, PRECISION)
        if not ROUNDED_WEIGHTS:
            b = rounded(b, PRECISION)
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


@triton.jit(do_not_specialize=["M", "first", "biased", "activation", "rounds", "share", "parts"])  # type: ignore[untyped-decorator]
def products(  # type: ignore[no-untyped-def]
    out, x, weights, bias, x2, weights2, bias2, addend, partial, counters,
    M, D, K, K2, first, biased, activation, rounds, share, parts,
    x_member, x_row, x_inner, w_member, w_inner, w_column, b_member,
    x2_member, x2_row, x2_inner, w2_member, w2_inner, w2_column, b2_member,
    a_member, a_row, o_member, o_row,
    BM: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr,
    SECOND: tl.constexpr, BIAS2: tl.constexpr, ADDEND: tl.constexpr, PRECISION: tl.constexpr,
    ROUNDED_DATA: tl.constexpr, ROUNDED_WEIGHTS: tl.constexpr,
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
            total, x, weights, rows, columns, M, D, K, x_row, x_inner, w_inner, w_column, begin, end, BK,
            PRECISION, ROUNDED_DATA, ROUNDED_WEIGHTS,
        )  # fmt: skip
        if SECOND:  # noqa: SIM102
            if member >= first:
                total = _tile_sum(
                    total, x2 + (member - first) * x2_member, weights2 + (member - first) * w2_member, rows, columns, M, D, K2,
                    x2_row, x2_inner, w2_inner, w2_column, 0, K2, BK, PRECISION, ROUNDED_DATA, ROUNDED_WEIGHTS,
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
    total = for_products(activate(total, activation), rounds)
    target = out + member * o_member + rows[:, None].to(tl.int64) * o_row + columns[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=inside & (rows < there)[:, None])


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
