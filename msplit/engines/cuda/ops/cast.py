"""Changes of dtype: Cast, Bitcast, and the parts of complex numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from msplit.engines.cuda.ir.dtypes import dtype_name, torch_dtype
from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node, Unsupported

# Integer that holds the bits of a float, and how many of its bits are mantissa.
_CARRIER = {torch.float64: torch.int64, torch.float32: torch.int32, torch.float16: torch.int16}
_MANTISSA = {torch.float64: 52, torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}


@lowering("Cast")
def cast(node: Node, x: Tensor) -> Tensor:
    """Values converted to `DstT`: floats to integers towards zero, integers to narrower ones modulo their range.

    A float outside of the range of the integer, NaN included, has no defined result in TensorFlow either: the CPU gives
    what its instruction gives (for int32 the smallest integer), CUDA the nearest integer of the range and 0 for NaN.
    `Truncate` drops mantissa bits instead of rounding to nearest.
    """
    target = torch_dtype(node.attrs["DstT"])
    if x.dtype == target:
        return x
    if x.is_complex() and not target.is_complex:
        # Casting a complex number to a real one keeps the real part; of a bool, asks whether it is zero.
        return x != 0 if target == torch.bool else torch.real(x).to(target)
    if node.get("Truncate", False):
        x = _without_low_bits(x, target)
    return x.to(target)


def _without_low_bits(x: Tensor, target: torch.dtype) -> Tensor:
    """x with the mantissa bits zeroed that the narrower float has no room for, so that the conversion does not round."""
    if x.dtype not in _CARRIER or target not in _MANTISSA:
        return x
    dropped = _MANTISSA[x.dtype] - _MANTISSA[target]
    # TensorFlow's kernel rounds from float64 to bfloat16 whatever the attribute says.
    if dropped <= 0 or (x.dtype, target) == (torch.float64, torch.bfloat16):
        return x
    bits = x.contiguous().view(_CARRIER[x.dtype])
    truncated = (bits & ~((1 << dropped) - 1)).view(x.dtype)
    # A NaN whose set bits all are dropped would turn into an infinity.
    return torch.where(torch.isnan(x), x, truncated)


@lowering("Bitcast")
def bitcast(node: Node, x: Tensor) -> Tensor:
    """The same bytes read as `type`. A wider type takes the last axis away, a narrower one adds an axis."""
    target = torch_dtype(node.attrs["type"])
    old, new = x.element_size(), target.itemsize
    if old == new:
        return x.view(target)
    if new < old:
        return x.contiguous().unsqueeze(-1).view(target)
    if x.dim() == 0 or x.shape[-1] != new // old:
        raise Unsupported(
            f"{node.name}: Bitcast from {dtype_name(x.dtype)} to {node.attrs['type']} needs a last axis of size "
            f"{new // old}, the input has shape {tuple(x.shape)}"
        )
    return x.contiguous().view(target).squeeze(-1)


@lowering("Complex")
def complex_number(node: Node, real: Tensor, imaginary: Tensor) -> Tensor:
    """real + i imaginary, with broadcasting."""
    return torch.complex(*torch.broadcast_tensors(real, imaginary))


@lowering("Real")
def real_part(node: Node, x: Tensor) -> Tensor:
    """Real part, a view."""
    return torch.real(x) if x.is_complex() else x


@lowering("Imag")
def imaginary_part(node: Node, x: Tensor) -> Tensor:
    """Imaginary part, a view."""
    return torch.imag(x) if x.is_complex() else torch.zeros_like(x)


@lowering("ComplexAbs")
def complex_magnitude(node: Node, x: Tensor) -> Tensor:
    """Magnitude of complex numbers."""
    return torch.abs(x)


@lowering("Angle")
def complex_angle(node: Node, x: Tensor) -> Tensor:
    """Argument of complex numbers, in (-pi, pi]."""
    return torch.angle(x)


@lowering("Conj")
def conjugate(node: Node, x: Tensor) -> Tensor:
    """Complex conjugate."""
    return torch.conj_physical(x)
