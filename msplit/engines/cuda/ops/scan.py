"""Running sums, products and log-sum-exps along one axis."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node
from msplit.engines.cuda.ops.axes import axis_within, integer


@lowering("Cumsum", static=(1,))
def cumulative_sum(node: Node, x: Tensor, axis: np.ndarray) -> Tensor:
    """Sum of all elements up to each one; `exclusive` leaves the element itself out, `reverse` starts at the end."""
    return _scan(node, x, axis, lambda y, dim: y.cumsum(dim, dtype=y.dtype), 0)


@lowering("Cumprod", static=(1,))
def cumulative_product(node: Node, x: Tensor, axis: np.ndarray) -> Tensor:
    """Product of all elements up to each one; `exclusive` and `reverse` as for Cumsum."""
    return _scan(node, x, axis, lambda y, dim: y.cumprod(dim, dtype=y.dtype), 1)


@lowering("CumulativeLogsumexp", static=(1,))
def cumulative_logsumexp(node: Node, x: Tensor, axis: np.ndarray) -> Tensor:
    """log of the running sum of exp; `exclusive` and `reverse` as for Cumsum."""
    return _scan(node, x, axis, torch.logcumsumexp, -math.inf)


def _scan(node: Node, x: Tensor, axis: np.ndarray, scan: Callable[[Tensor, int], Tensor], neutral: float) -> Tensor:
    """The running result, with the neutral element put before the first one if it is exclusive."""
    dim = axis_within(node, integer(axis), x.dim())
    size = x.shape[dim]
    if x.numel() == 0:
        return x
    reverse = bool(node.get("reverse", False))
    if reverse:
        x = x.flip(dim)
    if node.get("exclusive", False):
        # Shifting first keeps sums exact: subtracting the element afterwards would not, and gives NaN at an infinity.
        first = torch.full_like(x.narrow(dim, 0, 1), neutral)
        x = torch.cat([first, x.narrow(dim, 0, size - 1)], dim)
    result = scan(x, dim)
    return result.flip(dim) if reverse else result
