"""Simulated quantization: numbers brought to the steps of a quantized range, and back to floats."""

from __future__ import annotations

import torch
from torch import Tensor

from msplit.engines.cuda.registry import Node, lowering


@lowering("FakeQuantWithMinMaxArgs")
def with_attributes(node: Node, x: Tensor) -> Tensor:
    """Quantized to `num_bits` over the range of the attributes `min` and `max`."""
    low = torch.full((), node.get("min", -6.0), dtype=torch.float32, device=x.device)
    high = torch.full((), node.get("max", 6.0), dtype=torch.float32, device=x.device)
    return _quantized(node, x, low, high)


@lowering("FakeQuantWithMinMaxVars")
def with_tensors(node: Node, x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Quantized to `num_bits` over a range that two scalars give; zeros if both are zero."""
    return _quantized(node, x, low, high)


@lowering("FakeQuantWithMinMaxVarsPerChannel")
def per_channel(node: Node, x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Quantized to `num_bits` over one range for each position on the last axis."""
    return _quantized(node, x, low, high)


def _quantized(node: Node, x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """The range is moved a little first, so that zero is one of the steps (the rule of the op's documentation)."""
    first = 1.0 if node.get("narrow_range", False) else 0.0
    last = float(2 ** int(node.get("num_bits", 8)) - 1)
    scale = (high - low) / (last - first)
    zero = first - low / scale
    zero = torch.where(zero < first, first, torch.where(zero > last, last, torch.floor(zero + 0.5)))
    bottom, top = (first - zero) * scale, (last - zero) * scale
    steps = torch.floor((torch.clamp(x, bottom, top) - bottom) / scale + 0.5)
    return torch.where((low == 0) & (high == 0), 0, steps * scale + bottom)
