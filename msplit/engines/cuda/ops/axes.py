"""Helpers of several lowerings: attributes, axes and sizes that arrive as NumPy arrays, values of a maximum. No lowerings here."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from msplit.engines.cuda.ir.node import Node, Unsupported


def integers(array: np.ndarray) -> tuple[int, ...]:
    """The array's elements as Python integers, in order; a scalar gives one."""
    return tuple(int(value) for value in np.asarray(array).reshape(-1))


def integer(array: np.ndarray | int) -> int:
    """The only element of the array."""
    return int(np.asarray(array).reshape(()))


def own_attribute(node: Node, *names: str) -> Any:
    """The first of these attributes that the node has. A graph can name the engine's own ops, but not give them what they need.

    Raises:
        Unsupported: It has none of them.
    """
    found = next((node.attrs[name] for name in names if node.get(name) is not None), None)
    if found is None:
        raise Unsupported("it is an op of the engine's own, which no graph can hold")
    return found


def axis_within(node: Node, axis: int, rank: int) -> int:
    """The axis in [0, rank), counted from the end if it is negative.

    Raises:
        Unsupported: There is no such axis.
    """
    if not -rank <= axis < rank:
        raise Unsupported(f"{node.name}: axis {axis} is outside of a tensor of rank {rank}")
    return axis % rank


def reduced_axes(node: Node, axes: np.ndarray, rank: int) -> tuple[int, ...]:
    """Axes of a reduction in [0, rank), in order.

    Raises:
        Unsupported: An axis does not exist or is named twice.
    """
    found = sorted(axis_within(node, axis, rank) for axis in integers(axes))
    if len(set(found)) != len(found):
        raise Unsupported(f"{node.name}: an axis is named twice in {integers(axes)}")
    return tuple(found)


def lies_nchw(tensor: Tensor) -> bool:
    """Returns whether a tensor of logical shape NHWC lies in memory as NCHW, and not as NHWC too."""
    return tensor.dim() == 4 and not tensor.is_contiguous() and tensor.permute(0, 3, 1, 2).is_contiguous()


def without_nan(values: Tensor, how: str) -> Tensor:
    """The values of a scattered maximum (`how` is ``"amax"``) or minimum, without NaN, which TensorFlow's kernels pass over."""
    if not values.is_floating_point():
        return values
    loses = -math.inf if how == "amax" else math.inf
    return torch.nan_to_num(values, nan=loses, posinf=math.inf, neginf=-math.inf)
