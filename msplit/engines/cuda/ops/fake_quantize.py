"""Simulated quantization: numbers brought to the steps of a quantized range, and back to floats."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node


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


@lowering("QuantizeAndDequantizeV2", "QuantizeAndDequantizeV4")
def quantize_and_dequantize(node: Node, x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Brought to the steps of an integer type and back, over a given range or that of the values, by axis or for all."""
    return _to_steps(node, x, low, high, int(node.get("num_bits", 8)))


@lowering("QuantizeAndDequantizeV3", static=(3,))
def quantize_and_dequantize_bits(node: Node, x: Tensor, low: Tensor, high: Tensor, bits: np.ndarray) -> Tensor:
    """As QuantizeAndDequantizeV2, with the number of bits as an input."""
    return _to_steps(node, x, low, high, int(bits))


def _to_steps(node: Node, x: Tensor, low: Tensor, high: Tensor, bits: int) -> Tensor:
    """One scale for both sides of zero: the finer of those that bring each end of the range to the end of the type."""
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
