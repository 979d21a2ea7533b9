"""Reductions over axes, arg-reductions, and running sums, products and log-sum-exps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from msplit.engines.cuda.ir.dtypes import torch_dtype, wider_type
from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node, Unsupported
from msplit.engines.cuda.ops.axes import axis_within, integer, reduced_axes


@lowering("Sum", static=(1,))
def reduce_sum(node: Node, x: Tensor, axis: np.ndarray) -> Tensor:
    """Sum. Integers wrap around in their own dtype."""
    axes = reduced_axes(node, axis, x.dim())
    dtype, result = wider_type(node, x)
    return (x.sum(axes, _keep(node), dtype=dtype) if axes else x).to(result)


@lowering("Mean", static=(1,))
def reduce_mean(node: Node, x: Tensor, axis: np.ndarray) -> Tensor:
    """Mean. Of integers: rounded towards zero, and 0 of none; floats give NaN of none."""
    axes = reduced_axes(node, axis, x.dim())
    dtype, result = wider_type(node, x)
    if not axes:
        return x.to(result)
    if x.is_floating_point() or x.is_complex():
        return x.mean(axes, _keep(node), dtype=dtype).to(result)
    count = math.prod(x.shape[dim] for dim in axes)
    if x.dtype == torch.uint64:
        return _unsigned_quotient(x.view(torch.int64).sum(axes, _keep(node)), max(count, 1))
    total = x.sum(axes, _keep(node), dtype=torch.int64)
    return torch.div(total, max(count, 1), rounding_mode="trunc").to(x.dtype)


@lowering("Max", "Min", static=(1,))
def reduce_extreme(node: Node, x: Tensor, axis: np.ndarray) -> Tensor:
    """Maximum (minimum); NaN if one is NaN. Of nothing: minus infinity (infinity), or the smallest (largest) integer."""
    axes = reduced_axes(node, axis, x.dim())
    if not axes:
        return x
    largest = node.op == "Max"
    if any(x.shape[dim] == 0 for dim in axes):
        limits = (
            (-math.inf, math.inf) if x.is_floating_point() else (torch.iinfo(x.dtype).min, torch.iinfo(x.dtype).max)
        )
        return torch.full(_result_shape(node, x, axes), limits[not largest], dtype=x.dtype, device=x.device)
    return x.amax(axes, _keep(node)) if largest else x.amin(axes, _keep(node))


@lowering("Prod", static=(1,))
def reduce_product(node: Node, x: Tensor, axis: np.ndarray) -> Tensor:
    """Product. Integers wrap around in their own dtype."""
    axes = reduced_axes(node, axis, x.dim())
    if not axes:
        return x
    shape = _result_shape(node, x, axes)
    # `torch.prod` takes one axis: bring the reduced ones together at the end.
    kept = [dim for dim in range(x.dim()) if dim not in axes]
    joined = x.permute(*kept, *axes).reshape([x.shape[dim] for dim in kept] + [math.prod(x.shape[dim] for dim in axes)])
    return joined.prod(-1, dtype=x.dtype).reshape(shape)


@lowering("All", "Any", static=(1,))
def reduce_logical(node: Node, x: Tensor, axis: np.ndarray) -> Tensor:
    """Logical and (or); True (False) of nothing."""
    axes = reduced_axes(node, axis, x.dim())
    return (torch.all if node.op == "All" else torch.any)(x, axes, _keep(node)) if axes else x


@lowering("EuclideanNorm", static=(1,))
def euclidean_norm(node: Node, x: Tensor, axis: np.ndarray) -> Tensor:
    """Square root of the sum of squares. Of integers: rounded down, and only as exact as the wrapping sum is."""
    axes = reduced_axes(node, axis, x.dim())
    if x.is_floating_point():
        return torch.linalg.vector_norm(x, 2, axes, _keep(node)) if axes else x.abs()
    if x.is_complex():
        raise Unsupported(f"{node.name}: EuclideanNorm of complex numbers")
    squares = torch.square(x)
    total = squares.sum(axes, _keep(node), dtype=x.dtype) if axes else squares
    return total.to(torch.float64).sqrt().to(x.dtype)


@lowering("ArgMax", "ArgMin", static=(1,))
def position_of_extreme(node: Node, x: Tensor, dimension: np.ndarray) -> Tensor:
    """Position of the first maximum (minimum) along the axis. NaN never wins, nor minus infinity (infinity).

    TensorFlow starts from the lowest finite number at position 0 and moves only to what compares greater: NaN and minus
    infinity never win. `torch.argmax` lets NaN win, so both are replaced first.
    """
    axis = axis_within(node, integer(dimension), x.dim())
    if x.shape[axis] == 0:
        raise Unsupported(f"{node.name}: {node.op} over axis {axis} of shape {tuple(x.shape)}, which is empty")
    if x.is_complex():
        raise Unsupported(f"{node.name}: {node.op} of complex numbers")
    if x.dtype == torch.bool:
        x = x.to(torch.uint8)
    if x.is_floating_point():
        limits = torch.finfo(x.dtype)
        if node.op == "ArgMax":
            x = torch.nan_to_num(x, nan=limits.min, posinf=math.inf, neginf=limits.min)
        else:
            x = torch.nan_to_num(x, nan=limits.max, posinf=limits.max, neginf=-math.inf)
    result = x.argmax(axis) if node.op == "ArgMax" else x.argmin(axis)
    return result.to(torch_dtype(node.get("output_type", "int64")))


def _unsigned_quotient(bits: Tensor, divisor: int) -> Tensor:
    """Quotients, rounded down, of unsigned words of 64 bits. Half of a number fits a signed word. Warren, "Hacker's Delight", 9-3."""
    half = (bits >> 1) & torch.iinfo(torch.int64).max
    quotient = torch.div(half, divisor, rounding_mode="floor") << 1
    rest = bits - quotient * divisor  # 0 to 2 * divisor - 1
    return (quotient + (rest >= divisor)).view(torch.uint64)


def _keep(node: Node) -> bool:
    return bool(node.get("keep_dims", False))


def _result_shape(node: Node, x: Tensor, axes: tuple[int, ...]) -> list[int]:
    if _keep(node):
        return [1 if dim in axes else size for dim, size in enumerate(x.shape)]
    return [size for dim, size in enumerate(x.shape) if dim not in axes]


def _running_logsumexp(x: Tensor, dim: int) -> Tensor:
    """Log of the sum of exp up to each element. A NaN counts as another copy of the sum so far, as in TensorFlow's kernel."""
    unknown = x.isnan()
    doubled = unknown.cumsum(dim, dtype=x.dtype) * math.log(2)
    return torch.logcumsumexp(torch.where(unknown, -math.inf, x - doubled), dim) + doubled


class _Scan(NamedTuple):
    """A running result with its neutral element, which stands before the first one where it is exclusive."""

    running: Callable[[Tensor, int], Tensor]
    neutral: float


_SCANS = {
    "Cumsum": _Scan(lambda y, dim: y.cumsum(dim, dtype=y.dtype), 0),
    "Cumprod": _Scan(lambda y, dim: y.cumprod(dim, dtype=y.dtype), 1),
    "CumulativeLogsumexp": _Scan(_running_logsumexp, -math.inf),
}


@lowering(*_SCANS, static=(1,))
def scan(node: Node, x: Tensor, axis: np.ndarray) -> Tensor:
    """Sum (product, log of the sum of exp) up to each element; `exclusive` leaves itself out, `reverse` starts at the end."""
    running, neutral = _SCANS[node.op]
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
    result = running(x, dim)
    return result.flip(dim) if reverse else result
