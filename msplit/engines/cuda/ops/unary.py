"""Functions of one tensor, element by element."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node

_SAME_AS_TORCH: dict[str, Callable[[Tensor], Tensor]] = {
    "Abs": torch.abs,
    "Acos": torch.acos,
    "Acosh": torch.acosh,
    "Asin": torch.asin,
    "Asinh": torch.asinh,
    "Atan": torch.atan,
    "Atanh": torch.atanh,
    "BesselI0": torch.special.i0,
    "BesselI0e": torch.special.i0e,
    "BesselI1": torch.special.i1,
    "BesselI1e": torch.special.i1e,
    "BesselJ0": torch.special.bessel_j0,
    "BesselJ1": torch.special.bessel_j1,
    "BesselK0": torch.special.modified_bessel_k0,
    "BesselK0e": torch.special.scaled_modified_bessel_k0,
    "BesselK1": torch.special.modified_bessel_k1,
    "BesselK1e": torch.special.scaled_modified_bessel_k1,
    "BesselY0": torch.special.bessel_y0,
    "BesselY1": torch.special.bessel_y1,
    "Ceil": torch.ceil,
    "Cos": torch.cos,
    "Cosh": torch.cosh,
    "Erf": torch.erf,
    "Erfc": torch.erfc,
    "Erfinv": torch.erfinv,
    "Exp": torch.exp,
    "Expm1": torch.expm1,
    "Floor": torch.floor,
    "Inv": torch.reciprocal,
    "Invert": torch.bitwise_not,
    "IsFinite": torch.isfinite,
    "IsInf": torch.isinf,
    "IsNan": torch.isnan,
    "Lgamma": torch.lgamma,
    "Log": torch.log,
    "Log1p": torch.log1p,
    "LogicalNot": torch.logical_not,
    "Ndtri": torch.special.ndtri,
    "Neg": torch.neg,
    "OnesLike": torch.ones_like,
    "Reciprocal": torch.reciprocal,
    "Rint": torch.round,
    "Round": torch.round,
    "Rsqrt": torch.rsqrt,
    "Sigmoid": torch.sigmoid,
    "Sin": torch.sin,
    "Sinh": torch.sinh,
    "Sqrt": torch.sqrt,
    "Square": torch.square,
    "Tan": torch.tan,
    "Tanh": torch.tanh,
    "ZerosLike": torch.zeros_like,
}


def _register(op: str, function: Callable[[Tensor], Tensor]) -> None:
    def lower(node: Node, x: Tensor) -> Tensor:
        return function(x)

    lower.__doc__ = f"`torch.{function.__name__}` of every element."
    lowering(op)(lower)


for _op, _function in _SAME_AS_TORCH.items():
    _register(_op, _function)


@lowering("Sign")
def sign(node: Node, x: Tensor) -> Tensor:
    """-1, 0 or 1; x / |x| of complex numbers; NaN stays NaN (`torch.sign` makes it 0)."""
    if x.is_complex():
        return torch.sgn(x)
    result = torch.sign(x)
    return torch.where(torch.isnan(x), x, result) if x.is_floating_point() else result


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
    bits = 8 * x.element_size()
    value = x.to(torch.int64)
    count = torch.zeros_like(value)
    # The sign bit of narrow types is repeated in int64, so only the type's own bits are counted.
    for bit in range(bits):
        count = count + ((value >> bit) & 1)
    return count.to(torch.uint8)


@lowering("SqrtGrad")
def sqrt_grad(node: Node, y: Tensor, dy: Tensor) -> Tensor:
    """Gradient of y = Sqrt(x): dy / 2y."""
    return dy * 0.5 / y


@lowering("RsqrtGrad")
def rsqrt_grad(node: Node, y: Tensor, dy: Tensor) -> Tensor:
    """Gradient of y = Rsqrt(x): -dy y³ / 2."""
    return dy * -0.5 * (y * y * y)


@lowering("InvGrad", "ReciprocalGrad")
def reciprocal_grad(node: Node, y: Tensor, dy: Tensor) -> Tensor:
    """Gradient of y = 1 / x: -dy y²."""
    return -dy * (y * y)
