"""Kernels of optimizers (`kernels.optimizers`), by the formulas of `optimizer_formulas`: whole variables, and conversions of them; rows of
variables, and the distinct ids among those that a gradient names."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import triton
import triton.language as tl

from msplit.engines.cuda.kernels import optimizer_formulas as formulas


@triton.jit  # type: ignore[untyped-decorator]
def update(  # type: ignore[no-untyped-def]
    table, a, b, c, d, e, f, finite,
    OP: tl.constexpr, OPTION: tl.constexpr, SLOTS: tl.constexpr, RANKS: tl.constexpr, GUARDED: tl.constexpr, VECTOR: tl.constexpr,
    T: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """One program updates the elements that a row of the table tells: addresses of variable, slots and each rank's gradient, a count."""
    row = table + tl.program_id(0) * (SLOTS + RANKS + 1)
    count = tl.multiple_of(tl.load(row + SLOTS + RANKS).to(tl.int32), VECTOR)
    if GUARDED:
        count = tl.multiple_of(tl.where(tl.load(finite) != 0, count, 0), VECTOR)
    a, b, c, d, e, f = tl.load(a), tl.load(b), tl.load(c), tl.load(d), tl.load(e), tl.load(f)
    for step in range(STEPS):
        place = step * BLOCK + tl.arange(0, BLOCK)
        exists = place < count
        at_v = _at(row, T, VECTOR) + place
        at_p, at_q, at_r = at_v, at_v, at_v
        g = tl.load(_at(row + SLOTS, T, VECTOR) + place, mask=exists, other=0)
        for rank in tl.static_range(1, RANKS):
            g += tl.load(_at(row + SLOTS + rank, T, VECTOR) + place, mask=exists, other=0)
        g = g * (1 / RANKS) if RANKS > 1 else g
        v = tl.load(at_v, mask=exists, other=0)
        p, q, r = v, v, v
        if SLOTS > 1:
            at_p = _at(row + 1, T, VECTOR) + place
            p = tl.load(at_p, mask=exists, other=0)
        if SLOTS > 2:
            at_q = _at(row + 2, T, VECTOR) + place
            q = tl.load(at_q, mask=exists, other=0)
        if SLOTS > 3:
            at_r = _at(row + 3, T, VECTOR) + place
            r = tl.load(at_r, mask=exists, other=0)
        v, p, q, r = optimize(v, p, q, r, g, a, b, c, d, e, f, OP, OPTION, False)
        tl.store(at_v, v, mask=exists)
        if SLOTS > 1:
            tl.store(at_p, p, mask=exists)
        if SLOTS > 2:
            tl.store(at_q, q, mask=exists)
        if SLOTS > 3:
            tl.store(at_r, r, mask=exists)


@triton.jit  # type: ignore[untyped-decorator]
def convert(  # type: ignore[no-untyped-def]
    table, VECTOR: tl.constexpr, FROM: tl.constexpr, TO: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr
):
    """One program converts the elements that a row of the table tells: addresses of values and results, and a count."""
    row = table + tl.program_id(0) * 3
    count = tl.multiple_of(tl.load(row + 2).to(tl.int32), VECTOR)
    for step in range(STEPS):
        place = step * BLOCK + tl.arange(0, BLOCK)
        exists = place < count
        values = tl.load(_at(row, FROM, VECTOR) + place, mask=exists, other=0)
        tl.store(_at(row + 1, TO, VECTOR) + place, values.to(TO), mask=exists)


@triton.jit  # type: ignore[untyped-decorator]
def _at(place, T: tl.constexpr, VECTOR: tl.constexpr):  # type: ignore[no-untyped-def]
    """The address in a table as a pointer; a multiple of 16 bytes where elements come in vectors."""
    found = tl.load(place).to(tl.pointer_type(T))
    if VECTOR > 1:
        found = tl.multiple_of(found, 16)
    return found


@triton.jit
def root(x):  # type: ignore[no-untyped-def]
    """A square root, rounded as in IEEE's arithmetic. Triton's own is of float32 an approximation."""
    return tl.sqrt_rn(x) if x.dtype == tl.float32 else tl.sqrt(x)


@triton.jit
def quotient(x, y):  # type: ignore[no-untyped-def]
    """A quotient, rounded likewise."""
    return tl.div_rn(x, y) if y.dtype == tl.float32 else x / y


@triton.jit
def inverse_root(x):  # type: ignore[no-untyped-def]
    """One by the square root."""
    return quotient(1, root(x))


@triton.jit
def minus_power(x, power):  # type: ignore[no-untyped-def]
    """A number that is not negative to minus the power."""
    if power == -0.5:
        found = root(x)
    else:
        wide = tl.exp(-power.to(tl.float64) * tl.log(x.to(tl.float64)))
        found = tl.where(power == 0, 1.0, wide).to(x.dtype)
    return found


@triton.jit
def where(condition, x, y):  # type: ignore[no-untyped-def]
    """x where the condition holds, y elsewhere."""
    return tl.where(condition, x, y)


@triton.jit
def sign(x):  # type: ignore[no-untyped-def]
    """1, 0 or -1; what is no number for none."""
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, x)).to(x.dtype)


@triton.jit
def magnitude(x):  # type: ignore[no-untyped-def]
    """The absolute value."""
    return tl.abs(x)


def _compiled(formula: Callable[..., Any]) -> Any:
    """A formula as Triton compiles it: of what it calls, that of this module."""
    annotations = dict.fromkeys(("State", "Tensor", "constexpr"), tl.constexpr(0))  # which Triton evaluates
    return triton.jit(FunctionType(formula.__code__, {**globals(), **annotations}, formula.__name__))


moments, follow = _compiled(formulas.moments), _compiled(formulas.follow)
gradient_descent, momentum = _compiled(formulas.gradient_descent), _compiled(formulas.momentum)
keras_momentum, adam, amsgrad = (_compiled(one) for one in (formulas.keras_momentum, formulas.adam, formulas.amsgrad))
adagrad, adagrad_v2, adadelta = (_compiled(one) for one in (formulas.adagrad, formulas.adagrad_v2, formulas.adadelta))
rmsprop, centered_rmsprop = _compiled(formulas.rmsprop), _compiled(formulas.centered_rmsprop)
ftrl, ftrl_v2 = _compiled(formulas.ftrl), _compiled(formulas.ftrl_v2)


@triton.jit  # type: ignore[untyped-decorator]
def optimize(  # type: ignore[no-untyped-def]
    v, p, q, r, g, a, b, c, d, e, f, OP: tl.constexpr, OPTION: tl.constexpr, SPARSE: tl.constexpr
):  # fmt: skip
    """What an optimizer makes of a variable and its slots, of which it may have fewer, as it may of numbers."""
    if OP == "GradientDescent":
        (v,) = gradient_descent((v,), (a,), g, OPTION, SPARSE)
    elif OP == "Momentum":
        v, p = momentum((v, p), (a, b), g, OPTION, SPARSE)
    elif OP == "KerasMomentum":
        v, p = keras_momentum((v, p), (a, b), g, OPTION, SPARSE)
    elif OP == "Adam":
        v, p, q = adam((v, p, q), (a, b, c, d, e, f), g, OPTION, SPARSE)
    elif OP == "AdamWithAmsgrad":
        v, p, q, r = amsgrad((v, p, q, r), (a, b, c, d, e, f), g, OPTION, SPARSE)
    elif OP == "Adagrad":
        v, p = adagrad((v, p), (a,), g, OPTION, SPARSE)
    elif OP == "AdagradV2":
        v, p = adagrad_v2((v, p), (a, b), g, OPTION, SPARSE)
    elif OP == "Adadelta":
        v, p, q = adadelta((v, p, q), (a, b, c), g, OPTION, SPARSE)
    elif OP == "RMSProp":
        v, p, q = rmsprop((v, p, q), (a, b, c, d), g, OPTION, SPARSE)
    elif OP == "CenteredRMSProp":
        v, p, q, r = centered_rmsprop((v, p, q, r), (a, b, c, d), g, OPTION, SPARSE)
    elif OP == "Ftrl":
        v, p, q = ftrl((v, p, q), (a, b, c, d), g, OPTION, SPARSE)
    else:
        tl.static_assert(OP == "FtrlV2")
        v, p, q = ftrl_v2((v, p, q), (a, b, c, d, e), g, OPTION, SPARSE)
    return v, p, q, r


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
