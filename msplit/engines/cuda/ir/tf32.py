"""Rounding to TF32: of numbers, and what attributes of ops say of it. See `precision.round_results`."""

from __future__ import annotations

import torch

from msplit.engines.cuda.ir.node import Node

ROUNDED = "_rounded"
"""Attribute of a convolution or product in TF32 whose data are rounded to it already, so that our kernel need not."""

ROUNDS = "_rounds"
"""Attribute of an op that stores results for products in TF32, and for nothing else: the outputs that it rounds."""

ROUNDED_WEIGHTS = "_rounded_weights"
"""Attribute of a product whose weights are constants that are rounded to TF32 where our own kernel multiplies by them on tensor cores."""


def to_tf32(tensor: torch.Tensor) -> torch.Tensor:
    """Float32 numbers rounded to the 11 bits that TF32 keeps of them, halves away from zero, as GPUs do. They lie as before."""
    rounded = ((tensor.view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)
    return torch.where(tensor.isfinite(), rounded, tensor)


def constant_in_tf32(tensor: torch.Tensor) -> torch.Tensor:
    """A constant rounded so; the tensor itself where that changes nothing, for other programs may share it."""
    rounded = to_tf32(tensor)
    return tensor if torch.equal(rounded, tensor) else rounded


def for_products(node: Node, result: torch.Tensor) -> torch.Tensor:
    """A result of a node as it is stored: rounded where it `ROUNDS` its only one."""
    return to_tf32(result) if node.get(ROUNDS) else result
