"""Shapes as values, and changes of shape that move nothing.

What is `shape_only` depends on no values, so its result is made on the CPU, whatever the input's device: it is known before
anything runs.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from msplit.engines.cuda.ir.dtypes import torch_dtype
from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node, Unsupported
from msplit.engines.cuda.ops.axes import axis_within, integer, integers


@lowering("Shape", "VariableShape", shape_only=True)
def shape(node: Node, x: Tensor) -> Tensor:
    """The input's (for VariableShape: the variable's value's) shape as a vector of `out_type`, on the CPU."""
    return _shape_vector(node, x)


@lowering("ShapeN", shape_only=True)
def shape_n(node: Node, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Every input's shape as a vector of `out_type`, on the CPU."""
    return tuple(_shape_vector(node, x) for x in inputs)


@lowering("Size", shape_only=True)
def size(node: Node, x: Tensor) -> Tensor:
    """Number of elements as a scalar of `out_type`, on the CPU."""
    return torch.tensor(x.numel(), dtype=torch_dtype(node.get("out_type", "int32")), device="cpu")


@lowering("Rank", shape_only=True)
def rank(node: Node, x: Tensor) -> Tensor:
    """Number of axes as an int32 scalar, on the CPU."""
    return torch.tensor(x.dim(), dtype=torch.int32, device="cpu")


def _shape_vector(node: Node, x: Tensor) -> Tensor:
    return torch.tensor(list(x.shape), dtype=torch_dtype(node.get("out_type", "int32")), device="cpu")


@lowering("Reshape", static=(1,))
def reshape(node: Node, x: Tensor, shape: np.ndarray) -> Tensor:
    """The elements in the same order, in another shape; one size may be -1 for what is left."""
    sizes = integers(shape)
    count = math.prod(size for size in sizes if size != -1)
    if sizes.count(-1) > 1 or (count != x.numel() if -1 not in sizes else count == 0 or x.numel() % count):
        raise Unsupported(f"{node.name}: {tuple(x.shape)} can not be reshaped to {sizes}")
    return x.reshape(sizes)


@lowering("ExpandDims", static=(1,))
def expand_dims(node: Node, x: Tensor, axis: np.ndarray) -> Tensor:
    """A view with an axis of size one put in."""
    return x.unsqueeze(axis_within(node, integer(axis), x.dim() + 1))


@lowering("Squeeze")
def squeeze(node: Node, x: Tensor) -> Tensor:
    """A view without the axes of size one, or without those of `squeeze_dims`."""
    axes = sorted({axis_within(node, axis, x.dim()) for axis in node.get("squeeze_dims", ())})
    if not axes:
        return x.squeeze()
    for axis in axes:
        if x.shape[axis] != 1:
            raise Unsupported(f"{node.name}: axis {axis} of shape {tuple(x.shape)} can not be squeezed away")
    return x.squeeze(axes)


@lowering("EnsureShape")
def ensure_shape(node: Node, x: Tensor) -> Tensor:
    """The input itself, if it has the shape of the attribute."""
    wanted = node.attrs["shape"]
    if wanted is not None and (
        len(wanted) != x.dim() or any(w not in (None, -1, s) for w, s in zip(wanted, x.shape, strict=True))
    ):
        raise Unsupported(f"{node.name}: the input has shape {tuple(x.shape)}, the graph asks for {wanted}")
    return x


@lowering("BroadcastTo", static=(1,))
def broadcast_to(node: Node, x: Tensor, shape: np.ndarray) -> Tensor:
    """A view in which axes of size one are repeated."""
    sizes = integers(shape)
    added = len(sizes) - x.dim()
    if added < 0 or any(old not in (1, new) for old, new in zip(x.shape, sizes[added:], strict=True)):
        raise Unsupported(f"{node.name}: shape {tuple(x.shape)} can not be broadcast to {sizes}")
    return x.expand(sizes)


@lowering("BroadcastArgs", static=(0, 1))
def broadcast_args(node: Node, first: np.ndarray, second: np.ndarray) -> Tensor:
    """The shape that two shapes broadcast to, on the CPU."""
    sizes = (integers(first), integers(second))
    try:
        result = np.broadcast_shapes(*sizes)
    except ValueError:
        raise Unsupported(f"{node.name}: shapes {sizes[0]} and {sizes[1]} do not broadcast") from None
    return torch.tensor(result, dtype=torch_dtype(first.dtype.name), device="cpu")


@lowering("InvertPermutation")
def invert_permutation(node: Node, x: Tensor) -> Tensor:
    """The permutation that undoes the input, a permutation of 0..n-1."""
    return torch.argsort(x).to(x.dtype)


@lowering("ConcatOffset", static=(0,))
def concat_offset(node: Node, axis: np.ndarray, *shapes: Tensor) -> tuple[Tensor, ...]:
    """For tensors of these shapes, where each one begins in their concatenation along the axis."""
    rank = shapes[0].shape[0]
    position = axis_within(node, integer(axis), rank)
    on_axis = torch.arange(rank, device=shapes[0].device) == position
    offsets = [torch.zeros_like(shapes[0])]
    for previous in shapes[:-1]:
        offsets.append(offsets[-1] + torch.where(on_axis, previous, 0))
    return tuple(offsets)


@lowering("UnravelIndex", static=(1,))
def unravel_index(node: Node, indices: Tensor, dims: np.ndarray) -> Tensor:
    """Positions in a flat tensor as one row of coordinates per axis of `dims`."""
    rows = []
    rest = indices
    for size in reversed(integers(dims)):
        rows.append(rest % size)
        rest = torch.div(rest, size, rounding_mode="floor")
    return torch.stack(rows[::-1])
