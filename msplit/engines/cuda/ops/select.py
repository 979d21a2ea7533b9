"""Choice between tensors by a condition."""

from __future__ import annotations

import torch
from torch import Tensor

from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node


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
