"""Functions element by element: of one tensor, of two with NumPy's broadcasting, and choice between tensors.

TensorFlow gives both inputs of arithmetic the same dtype, so that PyTorch promotes nothing. Integer division by zero is an error in
both libraries on the CPU, and an arbitrary number in both on a GPU.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import MAY_NOT_RUN, Node

_OF_ONE_NAME = (
    "Abs Acos Acosh Angle Asin Asinh Atan Atanh Ceil Cos Cosh Erf Erfc Erfinv Exp Expm1 Floor IsFinite IsInf IsNan "
    "Lgamma Log Log1p Neg Reciprocal Round Rsqrt Sigmoid Sin Sinh Sqrt Square Tan Tanh"
)
"""Functions of one element that PyTorch has by the same name, in small letters."""

_UNARY: dict[str, Callable[[Tensor], Tensor]] = {op: getattr(torch, op.lower()) for op in _OF_ONE_NAME.split()} | {
    "BesselI0": torch.special.i0,
    "BesselI0e": torch.special.i0e,
    "BesselI1": torch.special.i1,
    "BesselI1e": torch.special.i1e,
    "BesselJ0": torch.special.bessel_j0,
    "BesselJ1": torch.special.bessel_j1,
    "ComplexAbs": torch.abs,
    "Conj": torch.conj_physical,
    "Inv": torch.reciprocal,
    "Invert": torch.bitwise_not,
    "LogicalNot": torch.logical_not,
    "Ndtri": torch.special.ndtri,
    "OnesLike": torch.ones_like,
    "Rint": torch.round,
    "ZerosLike": torch.zeros_like,
}


@lowering("Sign")
def sign(node: Node, x: Tensor) -> Tensor:
    """-1, 0 or 1; x / |x| of complex numbers; NaN stays NaN (`torch.sign` makes it 0)."""
    if x.is_complex():
        return torch.sgn(x)
    result = torch.sign(x)
    return torch.where(torch.isnan(x), x, result) if x.is_floating_point() else result


_SINGULAR: dict[str, Callable[[Tensor], Tensor]] = {
    "BesselK0": torch.special.modified_bessel_k0,
    "BesselK0e": torch.special.scaled_modified_bessel_k0,
    "BesselK1": torch.special.modified_bessel_k1,
    "BesselK1e": torch.special.scaled_modified_bessel_k1,
    "BesselY0": torch.special.bessel_y0,
    "BesselY1": torch.special.bessel_y1,
}


@lowering(*_SINGULAR)
def singular_bessel(node: Node, x: Tensor) -> Tensor:
    """Bessel functions with a pole at zero, whose value TensorFlow gives for negative numbers, too; PyTorch gives NaN there."""
    pole = -torch.inf if node.op.startswith("BesselY") else torch.inf
    result = torch.where(x < 0, pole, _SINGULAR[node.op](x))
    if node.op == "BesselY1" and x.dtype == torch.float32:
        return torch.where(x == 0, torch.nan, result)  # of TensorFlow's float32 alone: it has 0 × log(0) in it
    return result


@lowering("Digamma")
def digamma(node: Node, x: Tensor) -> Tensor:
    """Derivative of the logarithm of gamma; NaN at its poles, zero and minus infinity among them."""
    at_pole = (x == 0) | (x == -torch.inf)
    return torch.where(at_pole, torch.nan, torch.digamma(x))


_SPENCE = (
    (
        *(4.65128586073990045e-5, 7.31589045238094711e-3, 0.133847639578309019, 0.879691311754530315),
        *(2.71149851196553470, 4.25697156008121756, 3.29771340985225107, 1.0),
    ),
    (
        *(6.90990488912553277e-4, 2.54043763932544379e-2, 0.282974860602568090, 1.41172597751831070),
        *(3.63800533345137075, 5.03278880143316990, 3.54771340985225097, 1.0),
    ),
)
"""-Spence(1 + w) / w for w from -0.5 to 0.5: numerator and denominator, highest power first (Cephes)."""


@lowering("Spence")
def spence(node: Node, x: Tensor) -> Tensor:
    """The integral of log(t) / (1 - t) from 1 to x, which is a dilogarithm; NaN below zero, and at infinity."""
    inner = torch.where(x > 2, 1 / x, x)  # the integrals to x and to 1 / x are -log(x)² / 2 together
    small = inner < 0.5  # and those to x and to 1 - x are π² / 6 - log(x) log(1 - x)
    w = torch.where(inner > 1.5, 1 / inner - 1, torch.where(small, -inner, inner - 1))
    above, below = (functools.reduce(lambda sum_, factor: sum_ * w + factor, powers) for powers in _SPENCE)
    result = -w * above / below
    result = torch.where(small, math.pi**2 / 6 - torch.xlogy(torch.log1p(-inner), inner) - result, result)
    result = torch.where(x > 1.5, -0.5 * torch.log(x) ** 2 - result, result)
    return torch.where(x.isinf(), torch.nan, result)


@lowering("PopulationCount")
def population_count(node: Node, x: Tensor) -> Tensor:
    """Number of one bits of every integer, as uint8."""
    value = x.to(torch.int64)
    # The sign bit of narrow types is repeated in int64, so only the type's own bits are counted.
    bits = ((value >> bit) & 1 for bit in range(8 * x.element_size()))
    return sum(bits, start=torch.zeros_like(value)).to(torch.uint8)


_GRADIENTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "InvGrad": lambda y, dy: -dy * (y * y),
    "ReciprocalGrad": lambda y, dy: -dy * (y * y),
    "RsqrtGrad": lambda y, dy: dy * y * -0.5 * (y * y),  # three factors y at once leave the range of float16 too early
    "SqrtGrad": lambda y, dy: dy * 0.5 / y,
}


@lowering(*_GRADIENTS)
def gradient_of_root(node: Node, y: Tensor, dy: Tensor) -> Tensor:
    """Gradient of 1 / x, or of the square root of x or 1 / x, given the function's result y and that one's gradient.

    Where that is zero, so is this, even if y is infinite (at an x of zero) or NaN: sums of masked roots stay finite.
    """
    return torch.where(dy == 0, 0, _GRADIENTS[node.op](y.conj(), dy))


@lowering("SigmoidGrad")
def sigmoid_grad(node: Node, y: Tensor, dy: Tensor) -> Tensor:
    """Gradient of Sigmoid, given its result and that one's gradient."""
    return dy * y * (1 - y)


@lowering("TanhGrad")
def tanh_grad(node: Node, y: Tensor, dy: Tensor) -> Tensor:
    """Gradient of Tanh, given its result and that one's gradient."""
    return dy * (1 - y * y)


_PAIRS_OF_ONE_NAME = "Atan2 Maximum Minimum Mul NextAfter Pow Sub"
"""Functions of two elements that PyTorch has by the same name. Maximum and Minimum give NaN when either side is NaN, as TensorFlow's
kernels do."""

_BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    op: getattr(torch, op.lower()) for op in _PAIRS_OF_ONE_NAME.split()
} | {
    "Add": torch.add,
    "AddV2": torch.add,
    "BitwiseAnd": torch.bitwise_and,
    "BitwiseOr": torch.bitwise_or,
    "BitwiseXor": torch.bitwise_xor,
    "Greater": torch.gt,
    "GreaterEqual": torch.ge,
    "Less": torch.lt,
    "LessEqual": torch.le,
    "LogicalAnd": torch.logical_and,
    "LogicalOr": torch.logical_or,
    "RealDiv": torch.div,
}

# From this many addends on, one stack and one reduction take fewer kernels than a chain of additions.
_CHAIN_OF_ADDITIONS = 4


def _register(op: str, function: Callable[..., Tensor], of: str) -> None:
    def lower(node: Node, *inputs: Tensor) -> Tensor:
        return function(*inputs)

    lower.__doc__ = f"`torch.{function.__name__}` of every {of}."
    lowering(op)(lower)


for _op, _function in _UNARY.items():
    _register(_op, _function, "element")
for _op, _pairwise in _BINARY.items():
    _register(_op, _pairwise, "pair of elements")


@lowering("FloorMod", "Mod", "TruncateMod")
def modulo(node: Node, x: Tensor, y: Tensor) -> Tensor:
    """Remainder of a division that is rounded down (FloorMod) or towards zero."""
    function, dtype = torch.remainder if node.op == "FloorMod" else torch.fmod, x.dtype
    y = _divisor(node, y)
    if x.dtype == torch.float64 or (x.is_floating_point() and x.device.type == "cpu"):
        # PyTorch's kernels give NaN for quotients near the end of the range, on a GPU of float64 alone. In three steps, each exact, there
        # are none.
        x, y = x.double(), y.double()
        near = y * 2.0**900
        x = torch.fmod(torch.fmod(x, near * 2.0**900), near)
    return function(x, y).to(dtype)


@lowering("Igamma", "Igammac")
def incomplete_gamma(node: Node, a: Tensor, x: Tensor) -> Tensor:
    """Lower (upper) incomplete gamma function, regularized; NaN where a is not positive, but for the lower one at an x of zero."""
    lower = node.op == "Igamma"
    result = torch.special.gammainc(a, x) if lower else torch.special.gammaincc(a, x)
    far = (x > a if lower else x < a).to(a.dtype)  # what it comes to where PyTorch's series overflows
    result = torch.where(torch.isnan(result) & (x >= 0), far, result)
    result = torch.where((a > 0) & (x == x), result, torch.nan)
    return torch.where(x == 0, 0, result) if lower else result


@lowering("Zeta")
def zeta(node: Node, x: Tensor, q: Tensor) -> Tensor:
    """Hurwitz's zeta function; at its poles, where q is no positive integer, infinite for an even x, NaN for others."""
    result = torch.special.zeta(x, q)
    # PyTorch's series ends in infinity times zero.
    result = torch.where(torch.isnan(result) & (x > 1) & (q > 1), 0, result)
    pole = (q <= 0) & (q == torch.floor(q)) & (x != 1)
    return torch.where(pole & (x / 2 != torch.floor(x / 2)), torch.nan, result)


@lowering("Polygamma")
def polygamma(node: Node, order: Tensor, x: Tensor) -> Tensor:
    """Derivative of digamma of an order for every pair of elements; NaN where the order is no natural number."""
    following = order + 1
    higher = torch.pow(-1, following) * torch.exp(torch.lgamma(following)) * zeta(node, following, x)
    natural = (order >= 0) & (order == torch.floor(order))
    return torch.where(order == 0, digamma(node, x), torch.where(natural, higher, torch.nan))


@lowering("Div", "TruncateDiv")
def divide(node: Node, x: Tensor, y: Tensor) -> Tensor:
    """Quotient; of integers rounded towards zero."""
    if x.is_floating_point() or x.is_complex():
        return torch.trunc(x / y) if node.op == "TruncateDiv" else x / y
    return torch.div(x, _divisor(node, y), rounding_mode="trunc")


@lowering("FloorDiv")
def floor_divide(node: Node, x: Tensor, y: Tensor) -> Tensor:
    """Quotient rounded down.

    Of floats it is the floor of the rounded quotient: 1 // 0.1 is 10. `torch.floor_divide` follows Python, where it is 9.
    """
    if x.is_floating_point():
        return torch.floor(x / y)
    return torch.div(x, _divisor(node, y), rounding_mode="floor")


def _divisor(node: Node, y: Tensor) -> Tensor:
    """A divisor that the CPU does not stop at: an integer that is zero is 1 in a turn that a loop may not have. A GPU does not stop."""
    stops = node.get(MAY_NOT_RUN, False) and not (y.is_cuda or y.is_floating_point() or y.is_complex())
    return torch.where(y == 0, 1, y) if stops else y


@lowering("DivNoNan", "MulNoNan")
def no_nan(node: Node, x: Tensor, y: Tensor) -> Tensor:
    """Quotient (product); zero where y is zero, even if x is NaN or infinite."""
    return torch.where(y == 0, 0, x / y if node.op == "DivNoNan" else x * y)


_OF_X: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Xdivy": torch.div,
    "Xlog1py": lambda x, y: x * torch.log1p(y),
    "Xlogy": lambda x, y: x * torch.log(y),  # `torch.xlogy` gives NaN where y is NaN
}


@lowering(*_OF_X)
def zero_of_zero(node: Node, x: Tensor, y: Tensor) -> Tensor:
    """x / y (x log(y), x log(1 + y)); zero where x is zero, even if y is NaN."""
    return torch.where(x == 0, 0, _OF_X[node.op](x, y))


@lowering("SquaredDifference")
def squared_difference(node: Node, x: Tensor, y: Tensor) -> Tensor:
    """(x - y)², with |x - y|² for complex numbers."""
    difference = x - y
    return difference * difference.conj() if difference.is_complex() else torch.square(difference)


@lowering("LeftShift", "RightShift")
def shift(node: Node, x: Tensor, y: Tensor) -> Tensor:
    """Bits moved up (down, the sign repeated) by y, which is brought into [0, width - 1] first."""
    function = torch.bitwise_left_shift if node.op == "LeftShift" else torch.bitwise_right_shift
    return function(x, y.clamp(0, 8 * y.element_size() - 1))


@lowering("AddN", "AccumulateNV2")
def add_n(node: Node, *inputs: Tensor) -> Tensor:
    """Sum of tensors of one shape."""
    if len(inputs) > _CHAIN_OF_ADDITIONS:
        return torch.stack(inputs).sum(0, dtype=inputs[0].dtype)
    return sum(inputs[1:], start=inputs[0])


@lowering("Cross")
def cross(node: Node, a: Tensor, b: Tensor) -> Tensor:
    """Cross product of vectors of three along the last axis."""
    return torch.linalg.cross(a, b, dim=-1)


@lowering("Equal", "NotEqual")
def equality(node: Node, x: Tensor, y: Tensor) -> Tensor:
    """x == y (x != y); a single False (True) for shapes that do not broadcast, where `incompatible_shape_error` is false."""
    differ = node.op == "NotEqual"
    if _forgiven(node, x, y):
        return torch.full((), differ, dtype=torch.bool, device=x.device)
    return x != y if differ else x == y


@lowering("ApproximateEqual")
def approximate_equal(node: Node, x: Tensor, y: Tensor) -> Tensor:
    """|x - y| <= tolerance, computed in the inputs' dtype. NaN, and equal infinities, are not near anything."""
    tolerance = torch.tensor(node.get("tolerance", 1e-5), dtype=torch.float32).item()  # the attribute is a float32
    return torch.abs(x - y) <= tolerance


def _forgiven(node: Node, x: Tensor, y: Tensor) -> bool:
    """Returns whether the shapes do not broadcast and the node asks for an answer all the same."""
    if node.get("incompatible_shape_error", True):
        return False
    pairs = zip(reversed(x.shape), reversed(y.shape), strict=False)
    return any(a != b and 1 not in (a, b) for a, b in pairs)


@lowering("Select")
def select(node: Node, condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """x where the condition holds, else y. A condition of rank one chooses whole rows of x and y."""
    if condition.dim() == 1 and x.dim() > 1:
        condition = condition.reshape(-1, *(1 for _ in x.shape[1:]))
    return torch.where(condition, x, y)


@lowering("SelectV2")
def select_v2(node: Node, condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """x where the condition holds, else y, with NumPy's broadcasting of all three."""
    return torch.where(condition, x, y)


@lowering("Where", dynamic=True)
def where(node: Node, condition: Tensor) -> Tensor:
    """Indices of the elements that are not zero, in order, one row each, as int64."""
    return torch.nonzero(condition)


@lowering("ClipByValue")
def clip_by_value(node: Node, x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Elements brought into [low, high]. `low` wins where it is above `high`; in `torch.clamp` it is the other one."""
    return torch.maximum(torch.minimum(x, high), low)
