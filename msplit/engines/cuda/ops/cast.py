"""Ops that change types: casts, complex numbers, quantization.

Changes of dtype, complex numbers and their parts, and simulated quantization.

Floats as integers of few bits, and back: see TensorFlow's documents of QuantizeV2 for its three modes.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from msplit.engines.cuda.ir.dtypes import dtype_name, torch_dtype
from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node, Unsupported
from msplit.engines.cuda.kernels.launch import can_launch
from msplit.engines.cuda.kernels.optimizers import convert
from msplit.engines.cuda.ops.shape import integer

# Integer that holds the bits of a float, and how many of its bits are mantissa.
_CARRIER = {torch.float64: torch.int64, torch.float32: torch.int32, torch.float16: torch.int16}
_MANTISSA = {torch.float64: 52, torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}


@lowering("Cast")
def cast(node: Node, x: Tensor) -> Tensor:
    """Values converted to `DstT`: floats to integers towards zero, integers to narrower ones modulo their range.

    A float outside of the range of the integer, NaN included, has no defined result in TensorFlow either: the CPU gives
    what its instruction gives (for int32 the smallest integer), CUDA the nearest integer of the range and 0 for NaN.
    `Truncate` drops mantissa bits instead of rounding to nearest. `saturate`, of the engine's own casts alone, gives the largest
    number of the narrower type for a finite one beyond it.
    """
    target = torch_dtype(node.attrs["DstT"])
    if x.dtype == target:
        return x
    if x.is_complex() and not target.is_complex:
        # Casting a complex number to a real one keeps the real part; of a bool, asks whether it is zero.
        return x != 0 if target == torch.bool else torch.real(x).to(target)
    if node.get("Truncate", False):
        x = _without_low_bits(x, target)
    if node.get("saturate", False):
        largest = torch.finfo(target).max
        x = torch.where(torch.isinf(x), x, x.clamp(-largest, largest))
    return x.to(target)


@lowering("_CastAll", own=True)
def cast_all(node: Node, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Many values of one type converted to `DstT`, by one kernel on a GPU, as far as they have no gaps."""
    target = torch_dtype(node.attrs["DstT"])
    if not can_launch(inputs[0].device):
        return tuple(one.to(target) for one in inputs)
    dense = [one for one in inputs if one.is_contiguous()]
    made = [torch.empty(one.shape, dtype=target, device=one.device) for one in dense]
    convert(dense, made)
    rest = iter(made)
    return tuple(next(rest) if one.is_contiguous() else one.to(target) for one in inputs)


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
    """Reads the same bytes as `type`. A wider type takes the last axis away, a narrower one adds an axis."""
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


def divided(x: Tensor, by: Tensor | float) -> Tensor:
    """The quotient of float32 to the last bit, for what is rounded or compared afterwards: by way of float64.

    PyTorch multiplies by the inverse of a number on a GPU, and a compiled kernel divides roughly.
    """
    return (x.double() / by).float()


@lowering("FakeQuantWithMinMaxArgs")
def with_attributes(node: Node, x: Tensor) -> Tensor:
    """Quantized to `num_bits` over the range of the attributes `min` and `max`."""
    low = torch.full((), node.get("min", -6.0), dtype=torch.float32, device=x.device)
    high = torch.full((), node.get("max", 6.0), dtype=torch.float32, device=x.device)
    return with_tensors(node, x, low, high)


@lowering("FakeQuantWithMinMaxVars", "FakeQuantWithMinMaxVarsPerChannel")
def with_tensors(node: Node, x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Quantized to `num_bits` over a range for all, or one for each position on the last axis; zeros if both ends are zero.

    The range is moved a little first, so that zero is one of the steps (the rule of the op's documentation).
    """
    first = 1.0 if node.get("narrow_range", False) else 0.0
    last = float(2 ** int(node.get("num_bits", 8)) - 1)
    # A range from -6 to 6 puts zero between two steps, and the last bit decides which it is.
    scale = divided(high - low, last - first)
    zero = first - divided(low, scale)
    zero = torch.where(zero < first, first, torch.where(zero > last, last, torch.floor(zero + 0.5)))
    bottom, top = (first - zero) * scale, (last - zero) * scale
    above = torch.clamp(x, bottom, top) - bottom
    # Where a value is halfway between two steps, the last bit decides. TensorFlow divides in one kernel, and multiplies in the others.
    inverse = (last - first) / (high - low).double()
    above = above / scale if node.op == "FakeQuantWithMinMaxVars" else above * inverse.float()
    steps = torch.floor(above + 0.5)
    return torch.where((low == 0) & (high == 0), 0, steps * scale + bottom)


@lowering("QuantizeAndDequantizeV3", static=(3,))
@lowering("QuantizeAndDequantizeV2", "QuantizeAndDequantizeV4")
def quantize_and_dequantize(node: Node, x: Tensor, low: Tensor, high: Tensor, *num_bits: np.ndarray) -> Tensor:
    """Brought to the steps of an integer type and back, over a given range or that of the values, by axis or for all.

    One scale for both sides of zero: the finer of those that bring each end of the range to the end of the type.
    """
    bits = integer(num_bits[0]) if num_bits else int(node.get("num_bits", 8))
    axis, given = int(node.get("axis", -1)), bool(node.get("range_given", node.op == "QuantizeAndDequantizeV3"))
    signed, narrow = bool(node.get("signed_input", True)), bool(node.get("narrow_range", False))
    first = -(1 << (bits - 1)) + narrow if signed else 0
    last = (1 << (bits - 1 if signed else bits)) - 1
    shape = [x.shape[axis] if dim == axis else 1 for dim in range(x.dim())]
    if given:
        low, high = low.reshape(shape), high.reshape(shape)
    else:
        others = [dim for dim in range(x.dim()) if dim != axis]
        low, high = (x.amin(others, keepdim=True), x.amax(others, keepdim=True)) if others else (x, x)
    none = torch.finfo(x.dtype).max
    from_low = torch.where(first * low > 0, first / low, none)
    from_high = torch.where(last * high > 0, last / high, none)
    by_low = from_low < from_high
    scale = torch.where(by_low, from_low, from_high)
    step = torch.where(by_low, low / first if first else torch.zeros_like(low), high / last)
    if given:
        x = torch.minimum(
            torch.maximum(x, torch.where(by_low, low, first * step)), torch.where(by_low, last * step, high)
        )
    scaled = x * scale
    halves_up = node.get("round_mode", "HALF_TO_EVEN") == "HALF_UP"
    return ((scaled + 0.5).floor() if halves_up else scaled.round()) * step


_LEAST_RANGE = 0.009999999776482582
"""Default of `ensure_minimum_range`, as the float32 that it is."""

_LARGEST = torch.finfo(torch.float32).max


@lowering("QuantizeV2")
def quantize(node: Node, x: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Floats as integers (quint8 as uint8, and so on), with the range that these stand for."""
    dtype = stored_as(str(node.get("T", "quint8")))
    limits, narrow = torch.iinfo(dtype), bool(node.get("narrow_range", False))
    low = low.clamp(max=0)
    least = torch.maximum(low.abs(), high.abs()).clamp(min=1) * node.get("ensure_minimum_range", _LEAST_RANGE)
    high = torch.maximum(high, low + least).clamp(min=0)
    scaled, below, above = _range(node, x, low, high)
    if scaled:
        smallest = limits.min + narrow
        sides = [
            torch.where(end * side > 0, end / side, _LARGEST) for end, side in ((smallest, below), (limits.max, above))
        ]
        scale = torch.minimum(*sides)  # so that both ends are reached
        below, above = smallest / scale, limits.max / scale
        rounds = torch.round if node.get("round_mode", "") == "HALF_TO_EVEN" else _away
        places = rounds(torch.maximum(torch.minimum(x, above), below) * scale)
        return places.to(dtype), below.reshape(low.shape), above.reshape(high.shape)
    steps = (limits.max - limits.min) / (above - below)
    places = (torch.minimum(torch.maximum(x, below), above) - below) * steps
    return _away(places - _half(limits)).to(dtype), low, high


@lowering("Dequantize")
def dequantize(node: Node, x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """The floats that integers stand for."""
    limits, result = torch.iinfo(x.dtype), torch_dtype(str(node.get("dtype", "float32")))
    scaled, below, above = _range(node, x, low, high)
    places = x.to(torch.float32)
    if scaled:
        smallest, step = limits.min + bool(node.get("narrow_range", False)), above / limits.max
        return (places * (torch.maximum(below / smallest, step) if smallest else step)).to(result)
    return ((places + _half(limits)) * ((above - below) / (limits.max - limits.min)) + below).to(result)


def _range(node: Node, x: Tensor, low: Tensor, high: Tensor) -> tuple[bool, Tensor, Tensor]:
    """True for the mode SCALED, false for MIN_COMBINED; and both ends of the range, laid along the axis that has one for each place.

    Raises:
        Unsupported: The mode is another one.
    """
    mode, axis = str(node.get("mode", "MIN_COMBINED")), int(node.get("axis", -1))
    if mode not in ("MIN_COMBINED", "SCALED"):
        raise Unsupported(f"{node.op} {node.name}: mode {mode} is not supported, only MIN_COMBINED and SCALED")
    shape = [-1 if place == axis else 1 for place in range(x.dim())] if axis >= 0 else ()
    return mode == "SCALED", low.reshape(shape), high.reshape(shape)


def _half(limits: torch.iinfo) -> float:
    """Half of the numbers of a signed type, by which they are moved; an unsigned one is not."""
    return (limits.max - limits.min + 1) / 2 if limits.min < 0 else 0.0


def stored_as(name: str) -> torch.dtype:
    """The integer type that a quantized one is kept in."""
    return torch_dtype(name.replace("qint", "int").replace("quint", "uint"))


def _away(x: Tensor) -> Tensor:
    """Rounded, halves away from zero."""
    return torch.trunc(x + torch.copysign(torch.full_like(x, 0.5), x))
