"""Matrix products."""

from __future__ import annotations

import torch
from torch import Tensor

from msplit.engines.cuda.registry import Node, lowering


@lowering("MatMul")
def matmul(node: Node, a: Tensor, b: Tensor) -> Tensor:
    """The product of two matrices, each transposed first where the node says so."""
    return torch.mm(a.t() if node.get("transpose_a") else a, b.t() if node.get("transpose_b") else b)
