"""Kernels that update variables by an optimizer and convert them (`kernels.optimizers`), by the formulas of `optimizer_formulas`."""

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
    OP: tl.constexpr, OPTION: tl.constexpr, SLOTS: tl.constexpr, GUARDED: tl.constexpr, VECTOR: tl.constexpr, T: tl.constexpr,
    BLOCK: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """One program updates the elements that a row of the table tells: addresses of variable, slots and gradient, and a count."""
    row = table + tl.program_id(0) * (SLOTS + 2)
    count = tl.multiple_of(tl.load(row + SLOTS + 1).to(tl.int32), VECTOR)
    if GUARDED:
        count = tl.multiple_of(tl.where(tl.load(finite) != 0, count, 0), VECTOR)
    a, b, c, d, e, f = tl.load(a), tl.load(b), tl.load(c), tl.load(d), tl.load(e), tl.load(f)
    for step in range(STEPS):
        place = step * BLOCK + tl.arange(0, BLOCK)
        exists = place < count
        at_v = _at(row, T, VECTOR) + place
        at_p, at_q, at_r = at_v, at_v, at_v
        g = tl.load(_at(row + SLOTS, T, VECTOR) + place, mask=exists, other=0)
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
