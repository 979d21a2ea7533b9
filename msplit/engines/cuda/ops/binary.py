"""Arithmetic on two tensors with NumPy's broadcasting, and sums of several.

TensorFlow gives both inputs the same dtype, so that PyTorch promotes nothing. Integer division by zero is an error in
both libraries on the CPU, and an arbitrary number in both on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node

_SAME_AS_TORCH: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Add": torch.add,
    "AddV2": torch.add,
    "Atan2": torch.atan2,
    "BitwiseAnd": torch.bitwise_and,
    "BitwiseOr": torch.bitwise_or,
    "BitwiseXor": torch.bitwise_xor,
    "FloorMod": torch.remainder,
    "Igamma": torch.special.gammainc,
    "Igammac": torch.special.gammaincc,
    # These two give NaN when either side is NaN, as TensorFlow's kernels do.
    "Maximum": torch.maximum,
    "Minimum": torch.minimum,
    "Mod": torch.fmod,
    "Mul": torch.mul,
    "NextAfter": torch.nextafter,
    "Pow": torch.pow,
    "RealDiv": torch.div,
    "Sub": torch.sub,
    "TruncateMod": torch.fmod,
    "Zeta": torch.special.zeta,
}

# From this many addends on, one stack and one reduction take fewer kernels than a chain of additions.
_CHAIN_OF_ADDITIONS = 4


def _register(op: str, function: Callable[[Tensor, Tensor], Tensor]) -> None:
    def lower(node: Node, x: Tensor, y: Tensor) -> Tensor:
        return function(x, y)

    lower.__doc__ = f"`torch.{function.__name__}` of every pair of elements."
    lowering(op)(lower)


for _op, _function in _SAME_AS_TORCH.items():
    _register(_op, _function)


@lowering("Polygamma")
def polygamma(node: Node, order: Tensor, x: Tensor) -> Tensor:
    """Derivative of digamma of an order for every pair of elements; NaN where the order is no natural number."""
    following = order + 1
    sign = 1 - 2 * torch.remainder(following, 2)
    higher = sign * torch.exp(torch.lgamma(following)) * torch.special.zeta(following, x)
    natural = (order >= 0) & (order == torch.floor(order))
    return torch.where(order == 0, torch.digamma(x), torch.where(natural, higher, torch.nan))


@lowering("Div", "TruncateDiv")
def divide(node: Node, x: Tensor, y: Tensor) -> Tensor:
    """Quotient; of integers rounded towards zero."""
    if x.is_floating_point() or x.is_complex():
        return torch.trunc(x / y) if node.op == "TruncateDiv" else x / y
    return torch.div(x, y, rounding_mode="trunc")


@lowering("FloorDiv")
def floor_divide(node: Node, x: Tensor, y: Tensor) -> Tensor:
    """Quotient rounded down.

    Of floats it is the floor of the rounded quotient: 1 // 0.1 is 10. `torch.floor_divide` follows Python, where it is 9.
    """
    if x.is_floating_point():
        return torch.floor(x / y)
    return torch.div(x, y, rounding_mode="floor")


@lowering("DivNoNan")
def divide_no_nan(node: Node, x: Tensor, y: Tensor) -> Tensor:
    """Quotient; zero where the divisor is zero."""
    return torch.where(y == 0, 0, x / y)


@lowering("MulNoNan")
def multiply_no_nan(node: Node, x: Tensor, y: Tensor) -> Tensor:
    """Product; zero where y is zero, even if x is NaN or infinite."""
    return torch.where(y == 0, 0, x * y)


@lowering("Xdivy")
def x_divided_by_y(node: Node, x: Tensor, y: Tensor) -> Tensor:
    """Quotient; zero where x is zero, whatever y is."""
    return torch.where(x == 0, 0, x / y)


@lowering("Xlogy")
def x_log_y(node: Node, x: Tensor, y: Tensor) -> Tensor:
    """x log(y); zero where x is zero, even if y is NaN (`torch.xlogy` gives NaN there)."""
    return torch.where(x == 0, 0, x * torch.log(y))


@lowering("Xlog1py")
def x_log1p_y(node: Node, x: Tensor, y: Tensor) -> Tensor:
    """x log(1 + y); zero where x is zero, even if y is NaN."""
    return torch.where(x == 0, 0, x * torch.log1p(y))


@lowering("SquaredDifference")
def squared_difference(node: Node, x: Tensor, y: Tensor) -> Tensor:
    """(x - y)², with |x - y|² for complex numbers."""
    difference = x - y
    return difference * difference.conj() if difference.is_complex() else torch.square(difference)


@lowering("LeftShift")
def left_shift(node: Node, x: Tensor, y: Tensor) -> Tensor:
    """Bits moved up by y, which is brought into [0, width - 1] first."""
    return torch.bitwise_left_shift(x, _shift_within(y))


@lowering("RightShift")
def right_shift(node: Node, x: Tensor, y: Tensor) -> Tensor:
    """Bits moved down by y, the sign repeated; y is brought into [0, width - 1] first."""
    return torch.bitwise_right_shift(x, _shift_within(y))


def _shift_within(y: Tensor) -> Tensor:
    return y.clamp(0, 8 * y.element_size() - 1)


@lowering("AddN", "AccumulateNV2")
def add_n(node: Node, *inputs: Tensor) -> Tensor:
    """Sum of tensors of one shape."""
    if len(inputs) > _CHAIN_OF_ADDITIONS:
        return torch.stack(inputs).sum(0, dtype=inputs[0].dtype)
    total = inputs[0]
    for addend in inputs[1:]:
        total = total + addend
    return total


@lowering("Cross")
def cross(node: Node, a: Tensor, b: Tensor) -> Tensor:
    """Cross product of vectors of three along the last axis."""
    return torch.linalg.cross(a, b, dim=-1)
