"""Comparisons and logic on two tensors with NumPy's broadcasting. The result is bool."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node

_SAME_AS_TORCH: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Greater": torch.gt,
    "GreaterEqual": torch.ge,
    "Less": torch.lt,
    "LessEqual": torch.le,
    "LogicalAnd": torch.logical_and,
    "LogicalOr": torch.logical_or,
}


def _register(op: str, function: Callable[[Tensor, Tensor], Tensor]) -> None:
    def lower(node: Node, x: Tensor, y: Tensor) -> Tensor:
        return function(x, y)

    lower.__doc__ = f"`torch.{function.__name__}` of every pair of elements."
    lowering(op)(lower)


for _op, _function in _SAME_AS_TORCH.items():
    _register(_op, _function)


@lowering("Equal")
def equal(node: Node, x: Tensor, y: Tensor) -> Tensor:
    """x == y; a single False for shapes that do not broadcast, where `incompatible_shape_error` is false."""
    return _one_answer(x, False) if _forgiven(node, x, y) else x == y


@lowering("NotEqual")
def not_equal(node: Node, x: Tensor, y: Tensor) -> Tensor:
    """x != y; a single True for shapes that do not broadcast, where `incompatible_shape_error` is false."""
    return _one_answer(x, True) if _forgiven(node, x, y) else x != y


@lowering("ApproximateEqual")
def approximate_equal(node: Node, x: Tensor, y: Tensor) -> Tensor:
    """|x - y| < tolerance, computed in the inputs' dtype. NaN, and equal infinities, are not near anything."""
    return torch.abs(x - y) < node.get("tolerance", 1e-5)


def _forgiven(node: Node, x: Tensor, y: Tensor) -> bool:
    """Whether the shapes do not broadcast and the node asks for an answer all the same."""
    if node.get("incompatible_shape_error", True):
        return False
    pairs = zip(reversed(x.shape), reversed(y.shape), strict=False)
    return any(a != b and 1 not in (a, b) for a, b in pairs)


def _one_answer(x: Tensor, answer: bool) -> Tensor:
    return torch.full((), answer, dtype=torch.bool, device=x.device)
