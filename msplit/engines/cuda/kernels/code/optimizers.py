"""Kernels that update variables by an optimizer and convert them (`kernels.optimizers`). Formulas, in their order, are TensorFlow's."""

from __future__ import annotations

import triton
import triton.language as tl


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
        if OP == "ApplyGradientDescent":
            v -= g * a
        elif OP == "ApplyMomentum":
            v, p = _momentum(v, p, g, a, b, OPTION)
        elif OP == "ApplyKerasMomentum":
            v, p = _keras_momentum(v, p, g, a, b, OPTION)
        elif OP == "ApplyAdam":
            v, p, q = _adam(v, p, q, g, a, b, c, d, e, f, OPTION)
        elif OP == "ApplyAdamWithAmsgrad":
            v, p, q, r = _amsgrad(v, p, q, r, g, a, b, c, d, e, f)
        elif OP == "ApplyAdagrad":
            p = p + g * g if OPTION else p
            v -= g * a * _quotient(1, _root(p))
        elif OP == "ApplyAdagradV2":
            p = p + g * g if OPTION else p
            v -= _quotient(g * a, _root(p) + b)
        elif OP == "ApplyAdadelta":
            v, p, q = _adadelta(v, p, q, g, a, b, c)
        elif OP == "ApplyRMSProp":
            p += (g * g - p) * (1 - b)
            q = q * c + _quotient(g * a, _root(p + d))
            v -= q
        elif OP == "ApplyCenteredRMSProp":
            q += (g * g - q) * (1 - b)
            p += (g - p) * (1 - b)
            r = r * c + _quotient(g * a, _root(q - p * p + d))
            v -= r
        elif OP == "ApplyFtrl":
            v, p, q = _ftrl(v, p, q, g, g, a, b, c, d, OPTION)
        else:
            tl.static_assert(OP == "ApplyFtrlV2")
            v, p, q = _ftrl(v, p, q, g, g + 2 * d * v, a, b, c, e, OPTION)
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


@triton.jit  # type: ignore[untyped-decorator]
def _momentum(v, p, g, rate, momentum, NESTEROV: tl.constexpr):  # type: ignore[no-untyped-def]
    p = p * momentum + g
    step = g * rate + p * momentum * rate if NESTEROV else p * rate
    return v - step, p


@triton.jit  # type: ignore[untyped-decorator]
def _keras_momentum(v, p, g, rate, momentum, NESTEROV: tl.constexpr):  # type: ignore[no-untyped-def]
    p = p * momentum - g * rate
    step = p * momentum - g * rate if NESTEROV else p
    return v + step, p


@triton.jit
def _moments(m, s, g, beta1_power, beta2_power, rate, beta1, beta2):  # type: ignore[no-untyped-def]
    m += (g - m) * (1 - beta1)
    s += (g * g - s) * (1 - beta2)
    return m, s, _quotient(rate * _root(1 - beta2_power), 1 - beta1_power)


@triton.jit  # type: ignore[untyped-decorator]
def _adam(  # type: ignore[no-untyped-def]
    v, m, s, g, beta1_power, beta2_power, rate, beta1, beta2, epsilon, NESTEROV: tl.constexpr
):
    m, s, alpha = _moments(m, s, g, beta1_power, beta2_power, rate, beta1, beta2)
    step = g * (1 - beta1) + beta1 * m if NESTEROV else m
    return v - _quotient(step * alpha, _root(s) + epsilon), m, s


@triton.jit
def _amsgrad(  # type: ignore[no-untyped-def]
    v, m, s, largest, g, beta1_power, beta2_power, rate, beta1, beta2, epsilon
):
    m, s, alpha = _moments(m, s, g, beta1_power, beta2_power, rate, beta1, beta2)
    largest = tl.where(s > largest, s, largest)
    return v - _quotient(m * alpha, _root(largest) + epsilon), m, s, largest


@triton.jit
def _adadelta(v, squares, updates, g, rate, rho, epsilon):  # type: ignore[no-untyped-def]
    squares = squares * rho + g * g * (1 - rho)
    step = _root(updates + epsilon) * _quotient(1, _root(squares + epsilon)) * g
    return v - step * rate, squares, updates * rho + step * step * (1 - rho)


@triton.jit  # type: ignore[untyped-decorator]
def _ftrl(v, squares, linear, g, penalized, rate, l1, l2, power, BY_RATE: tl.constexpr):  # type: ignore[no-untyped-def]
    after = squares + g * g
    if power == -0.5:
        before_root, root = _root(squares), _root(after)
    else:
        before_root, root = _power(squares, -power), _power(after, -power)
    if BY_RATE:
        linear += penalized * rate - (root - before_root) * v
        l1, l2 = l1 * rate, l2 * rate
        divisor = root
    else:
        linear += penalized - _quotient(root - before_root, rate) * v
        divisor = _quotient(root, rate)
    sign = tl.where(linear > 0, l1, tl.where(linear < 0, -l1, linear))
    found = _quotient(sign - linear, divisor + 2 * l2)
    return tl.where(tl.abs(linear) > l1, found, 0.0), after, linear


@triton.jit
def _root(x):  # type: ignore[no-untyped-def]
    """A square root, rounded as in IEEE's arithmetic. Triton's own is of float32 an approximation."""
    return tl.sqrt_rn(x) if x.dtype == tl.float32 else tl.sqrt(x)


@triton.jit
def _quotient(x, y):  # type: ignore[no-untyped-def]
    """A quotient, rounded likewise."""
    return tl.div_rn(x, y) if y.dtype == tl.float32 else x / y


@triton.jit
def _power(x, y):  # type: ignore[no-untyped-def]
    """A power of a number that is not negative."""
    found = tl.exp(y.to(tl.float64) * tl.log(x.to(tl.float64)))
    return tl.where(y == 0, 1.0, found).to(x.dtype)
