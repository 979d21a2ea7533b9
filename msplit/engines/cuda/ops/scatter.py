"""Writing rows to given indices of a tensor.

An index out of range is passed over, as TensorFlow's GPU kernels do; its CPU kernels refuse it. Every kernel writes to a
buffer with one row to spare for such indices, because PyTorch would crash the CUDA context over them.
"""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node
from msplit.engines.cuda.ops.axes import integers
from msplit.engines.cuda.ops.gather import linear_index


@lowering("ScatterNd", static=(2,))
def scatter_nd(node: Node, indices: Tensor, updates: Tensor, shape: np.ndarray) -> Tensor:
    """Zeros of the given shape with the updates added at the coordinates of the last axis of the indices."""
    sizes = integers(shape)
    depth = indices.shape[-1]
    count = math.prod(sizes[:depth])
    buffer = updates.new_zeros((count + 1, math.prod(sizes[depth:])))
    return _added(buffer, linear_index(indices, sizes[:depth], outside=count), updates).reshape(sizes)


@lowering("TensorScatterUpdate")
def tensor_scatter_update(node: Node, x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """A copy of x with the updates written at the indices. Of several updates to one place any one may win."""
    buffer, linear = _buffer(x, indices)
    buffer.index_copy_(0, linear.reshape(-1), updates.reshape(-1, buffer.shape[1]))
    return buffer[:-1].reshape(x.shape)


@lowering("TensorScatterAdd", "ScatterNdNonAliasingAdd")
def tensor_scatter_add(node: Node, x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """A copy of x with the updates added at the indices."""
    buffer, linear = _buffer(x, indices)
    return _added(buffer, linear, updates).reshape(x.shape)


@lowering("TensorScatterSub")
def tensor_scatter_sub(node: Node, x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """A copy of x with the updates subtracted at the indices."""
    buffer, linear = _buffer(x, indices)
    return _added(buffer, linear, -updates).reshape(x.shape)


@lowering("TensorScatterMax", "TensorScatterMin")
def tensor_scatter_extreme(node: Node, x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """A copy of x with the larger (smaller) of element and updates at the indices."""
    buffer, linear = _buffer(x, indices)
    values = updates.reshape(-1, buffer.shape[1])
    index = linear.reshape(-1, 1).expand(values.shape)
    buffer.scatter_reduce_(0, index, values, "amax" if node.op == "TensorScatterMax" else "amin")
    return buffer[:-1].reshape(x.shape)


def _buffer(x: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """A copy of x as rows, with one more row at the end, and the row that every index means."""
    depth = indices.shape[-1]
    count = math.prod(x.shape[:depth])
    inner = math.prod(x.shape[depth:])
    buffer = x.new_empty((count + 1, inner))
    buffer[:count].copy_(x.reshape(count, inner))
    return buffer, linear_index(indices, tuple(x.shape[:depth]), outside=count)


def _added(buffer: Tensor, linear: Tensor, updates: Tensor) -> Tensor:
    """The buffer without its spare row, after adding the updates to its rows in place."""
    buffer.index_add_(0, linear.reshape(-1), updates.reshape(-1, buffer.shape[1]))
    return buffer[:-1]
