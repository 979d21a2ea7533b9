"""Floats as integers of few bits, and back: see TensorFlow's documents of QuantizeV2 for its three modes."""

from __future__ import annotations

import torch
from torch import Tensor

from msplit.engines.cuda.ir.dtypes import torch_dtype
from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node, Unsupported

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
