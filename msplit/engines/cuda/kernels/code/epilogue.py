"""Steps between a result and its place in memory, in our own kernels: an activation, and rounding for the products that read it.

Activations go by their numbers in `kernels.activations`. Kernels of products have all of them, kernels of convolutions only some, whose
number is known when they are compiled.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def activate(value, activation):  # type: ignore[no-untyped-def]
    """An activation by its number in `activations.NUMBERS`, which may be known only when the kernel is launched: one kernel for all.

    Args:
        value: Numbers in float32. A comparison with NaN is false, so that NaN stays NaN.
        activation: 0 gives the numbers as they are.
    """
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
    elif activation == 7:
        value = value / (1.0 + tl.exp(-value))
    return value


@triton.jit  # type: ignore[untyped-decorator]
def activate_known(total, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    """An activation by its number in `activations.IN_CONVOLUTIONS`, known when the kernel is compiled: what it does not need costs nothing.

    Args:
        total: Numbers in float32; NaN stays NaN.
        ACTIVATION: 0 gives the numbers as they are.
    """
    if ACTIVATION == 1 or ACTIVATION == 2:
        total = tl.maximum(total, 0.0, propagate_nan=tl.PropagateNan.ALL)
    if ACTIVATION == 2:
        total = tl.minimum(total, 6.0, propagate_nan=tl.PropagateNan.ALL)
    if ACTIVATION == 3:
        total = 1 / (1 + tl.exp(-total))
    if ACTIVATION == 7:
        total *= 1 / (1 + tl.exp(-total))
    return total


@triton.jit
def for_products(value, rounds):  # type: ignore[no-untyped-def]
    """Results as they are stored: float32 rounded to TF32 where a number says that only products read them, others as they are."""
    if value.dtype == tl.float32:
        finite = tl.abs(value) < float("inf")
        bits = (value.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
        value = tl.where(finite & (rounds != 0), bits.to(tl.float32, bitcast=True), value)
    return value
