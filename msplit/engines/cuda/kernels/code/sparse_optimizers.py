"""The kernels that update rows of variables and find distinct ids (`kernels.sparse_optimizers`)."""

from __future__ import annotations

import triton
import triton.language as tl

from msplit.engines.cuda.kernels.code.optimizers import optimize, quotient, root


@triton.jit  # type: ignore[untyped-decorator]
def update_rows(  # type: ignore[no-untyped-def]
    table, a, b, c, d, e,
    OP: tl.constexpr, OPTION: tl.constexpr, SLOTS: tl.constexpr, SUM: tl.constexpr, SORTED: tl.constexpr,
    COMBINER: tl.constexpr, T: tl.constexpr, INDEX: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One program per id and table does what is to be done for the id, if it is the first of its kind there.

    A row of the table tells: addresses of variable, slots, gradient, ids, and where sorted ids stood or the segment of each; then the
    number of ids, of rows and columns of the variable, and of rows of the gradient.
    """
    place = tl.program_id(0)
    told = table + tl.program_id(1) * (SLOTS + 7)
    count = tl.load(told + SLOTS + 3).to(tl.int32)
    a, b, c, d, e = tl.load(a), tl.load(b), tl.load(c), tl.load(d), tl.load(e)
    if place < count:
        ids = tl.load(told + SLOTS + 1).to(tl.pointer_type(INDEX))
        own = tl.load(ids + place)
        exists = (own >= 0) & (own < tl.load(told + SLOTS + 4))
        if exists & _is_first(ids, own, place, SORTED, CHUNK):
            gradient = tl.load(told + SLOTS).to(tl.pointer_type(T))
            order = tl.load(told + SLOTS + 2).to(tl.pointer_type(tl.int64))
            width = tl.load(told + SLOTS + 5).to(tl.int32)
            start = place * 0
            while start < width:
                column = start + tl.arange(0, BLOCK)
                inside = column < width
                at = own.to(tl.int64) * width + column
                at_v = tl.load(told).to(tl.pointer_type(T)) + at
                at_p, at_q, at_r = at_v, at_v, at_v
                v = tl.load(at_v, mask=inside, other=0)
                p, q, r = v, v, v
                if SLOTS > 1:
                    at_p = tl.load(told + 1).to(tl.pointer_type(T)) + at
                    p = tl.load(at_p, mask=inside, other=0)
                if SLOTS > 2:
                    at_q = tl.load(told + 2).to(tl.pointer_type(T)) + at
                    q = tl.load(at_q, mask=inside, other=0)
                if SLOTS > 3:
                    at_r = tl.load(told + 3).to(tl.pointer_type(T)) + at
                    r = tl.load(at_r, mask=inside, other=0)
                total = tl.zeros((BLOCK,), T)
                following = place
                while following < count:
                    row = following.to(tl.int64)
                    if SORTED:
                        row = tl.load(order + following)
                    if COMBINER > 0:
                        segments = tl.load(told + SLOTS + 2).to(tl.pointer_type(INDEX))
                        rows = tl.load(told + SLOTS + 6)
                        g = _of_segment(gradient, segments, following, count, rows, width, column, COMBINER, CHUNK)
                    else:
                        g = tl.load(gradient + row * width + column, mask=inside, other=0)
                    if SUM:
                        total += g
                    else:
                        v, p, q, r = _step(v, p, q, r, g, a, b, c, d, e, OP, OPTION)
                    following = _next(ids, own, following, count, SORTED, CHUNK)
                if SUM:
                    v, p, q, r = _step(v, p, q, r, total, a, b, c, d, e, OP, OPTION)
                tl.store(at_v, v, mask=inside)
                if SLOTS > 1:
                    tl.store(at_p, p, mask=inside)
                if SLOTS > 2:
                    tl.store(at_q, q, mask=inside)
                if SLOTS > 3:
                    tl.store(at_r, r, mask=inside)
                start += BLOCK


@triton.jit  # type: ignore[untyped-decorator]
def _is_first(ids, own, place, SORTED: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Whether an id does not stand in front of its place."""
    if SORTED:
        before = tl.load(ids + place - 1, mask=place > 0, other=-1)
        return before != own
    found = place < 0
    start = place * 0
    while (start < place) & (found == 0):
        at = start + tl.arange(0, CHUNK)
        others = tl.load(ids + at, mask=at < place, other=-1)
        found = tl.max((others == own).to(tl.int32), 0) > 0
        start += CHUNK
    return found == 0


@triton.jit  # type: ignore[untyped-decorator]
def _next(ids, own, place, count, SORTED: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The next place of an id, or `count` where there is none."""
    if SORTED:
        after = tl.load(ids + place + 1, mask=place + 1 < count, other=-1)
        return tl.where(after == own, place + 1, count)
    start = place + 1
    found = count
    while (start < count) & (found == count):
        at = start + tl.arange(0, CHUNK)
        others = tl.load(ids + at, mask=at < count, other=-1)
        found = tl.min(tl.where(others == own, at, count), 0)
        start += CHUNK
    return found


@triton.jit  # type: ignore[untyped-decorator]
def _of_segment(  # type: ignore[no-untyped-def]
    gradient, segments, place, count, rows, width, column, COMBINER: tl.constexpr, CHUNK: tl.constexpr
):
    """The gradient's row of the segment of an id: as it is, or divided by how many ids the segment has, or by the root of that."""
    own = tl.load(segments + place)
    exists = (own >= 0) & (own < rows)
    g = tl.load(gradient + own.to(tl.int64) * width + column, mask=exists & (column < width), other=0)
    if COMBINER > 1:
        size = place * 0
        start = place * 0
        while start < count:
            at = start + tl.arange(0, CHUNK)
            others = tl.load(segments + at, mask=at < count, other=-1)
            size += tl.sum((others == own).to(tl.int32), 0)
            start += CHUNK
        divisor = tl.maximum(size, 1).to(g.dtype)
        g = quotient(g, divisor if COMBINER == 2 else root(divisor))
    return g


@triton.jit  # type: ignore[untyped-decorator]
def _step(v, p, q, r, g, a, b, c, d, e, OP: tl.constexpr, OPTION: tl.constexpr):  # type: ignore[no-untyped-def]
    if OP == "ScatterAdd":
        v += g
    elif OP == "ScatterSub":
        v -= g
    else:
        v, p, q, r = optimize(v, p, q, r, g, a, b, c, d, e, e, OP, OPTION, True)
    return v, p, q, r


@triton.jit  # type: ignore[untyped-decorator]
def distinct(ids, found, places, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program per id tells where it stands first, and gives it there and -1 elsewhere."""
    place = tl.program_id(0)
    own = tl.load(ids + place)
    first = place
    start = place * 0
    while (start < place) & (first == place):
        at = start + tl.arange(0, CHUNK)
        others = tl.load(ids + at, mask=at < place, other=-1)
        first = tl.min(tl.where(others == own, tl.minimum(at, place), place), 0)
        start += CHUNK
    tl.store(places + place, first)
    tl.store(found + place, tl.where(first == place, own, -1))


@triton.jit  # type: ignore[untyped-decorator]
def segment_gradient(  # type: ignore[no-untyped-def]
    gradient,
    places,
    segments,
    out,
    count,
    rows,
    width,
    COMBINER: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program per row of the result sums up what the gradient's rows of segments bring for its place."""
    own = tl.program_id(0)
    start = own * 0
    count += start  # no constant, which Triton makes of 1
    while start < width:
        column = start + tl.arange(0, BLOCK)
        total = tl.zeros((BLOCK,), out.dtype.element_ty)
        following = _next(places, own, start * 0 - 1, count, False, CHUNK)
        while following < count:
            total += _of_segment(gradient, segments, following, count, rows, width, column, COMBINER, CHUNK)
            following = _next(places, own, following, count, False, CHUNK)
        tl.store(out + own.to(tl.int64) * width + column, total, mask=column < width)
        start += BLOCK
