"""Reading rows of a tensor at given indices.

An index out of range: on the CPU an `IndexError`, as TensorFlow's CPU kernel refuses it; on CUDA zeros in place of the row, as
TensorFlow's GPU kernel writes them. It never crashes the CUDA context. On CUDA with Triton a gather is one kernel; without
Triton it is several, because PyTorch's own gathers must not see a wrong index.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node, Unsupported
from msplit.engines.cuda.kernels.toolchain import can_compile
from msplit.engines.cuda.ops.axes import axis_within, integer


@lowering("Gather")
def gather(node: Node, params: Tensor, indices: Tensor) -> Tensor:
    """Rows of `params` (positions on its first axis) at the indices."""
    return take(params, indices)


@lowering("GatherV2", static=(2,))
def gather_v2(node: Node, params: Tensor, indices: Tensor, axis: np.ndarray) -> Tensor:
    """Positions on one axis of `params` at the indices; the first `batch_dims` axes of both go together."""
    batch_dims = _batch_dims(node, indices)
    dim = axis_within(node, integer(axis), params.dim())
    if batch_dims > dim or params.shape[:batch_dims] != indices.shape[:batch_dims]:
        raise Unsupported(
            f"{node.name}: batch_dims {batch_dims} with axis {dim}, params of shape {tuple(params.shape)} and indices of "
            f"shape {tuple(indices.shape)}"
        )
    return take(params, indices, dim, batch_dims)


@lowering("ResourceGather")
def resource_gather(node: Node, table: Tensor, indices: Tensor) -> Tensor:
    """Rows of a variable, whose value comes as the first input, at the indices."""
    batch_dims = _batch_dims(node, indices)
    return take(table, indices, batch_dims, batch_dims)


@lowering("GatherNd", "ResourceGatherNd")
def gather_nd(node: Node, params: Tensor, indices: Tensor) -> Tensor:
    """Elements or slices of `params`; the last axis of the indices holds coordinates on its first axes.

    With `bad_indices_policy` IGNORE, wrong coordinates give zeros on the CPU too.
    """
    depth = indices.shape[-1]
    kept, inner = indices.shape[:-1], params.shape[depth:]
    if depth == 0:
        return params.expand(*kept, *params.shape)
    rows = params.reshape(math.prod(params.shape[:depth]), *inner)
    # Reading rows checks one coordinate itself.
    linear = indices.squeeze(-1) if depth == 1 else linear_index(indices, tuple(params.shape[:depth]), outside=-1)
    if node.get("bad_indices_policy", "") == "IGNORE" and not params.is_cuda:
        return _masked(rows, linear.reshape(-1), 0).reshape(*kept, *inner)
    return take(rows, linear)


def take(params: Tensor, indices: Tensor, axis: int = 0, batch_dims: int = 0) -> Tensor:
    """GatherV2 with axis and batch_dims in range. See the module for indices that are not."""
    shape = (*params.shape[:axis], *indices.shape[batch_dims:], *params.shape[axis + 1 :])
    if params.is_cuda:
        kernel = _kernel()
        # A table that does not lie row by row would have to be copied first, which can cost far more than the gather.
        if kernel is not None and params.is_contiguous() and params.element_size() <= 8:
            table, places = _as_matrices(params, indices.contiguous(), axis, batch_dims)
            return kernel(table, places).reshape(shape)
    if indices.dtype not in (torch.int32, torch.int64):
        indices = indices.to(torch.int64)
    if batch_dims == 0:
        flat = indices.reshape(-1)
        rows = _masked(params, flat, axis) if params.is_cuda else params.index_select(axis, flat)
        return rows.reshape(shape)
    table, places = _as_matrices(params, indices.to(torch.int64), axis, batch_dims)
    size = table.shape[2]
    inside = (places >= 0) & (places < size)
    if params.is_cuda:
        places = places.clamp(0, max(size - 1, 0))
    index = places[:, None, :, None].expand(-1, table.shape[1], -1, table.shape[3])
    result = table.gather(2, index) if size else table.new_zeros(index.shape)
    if params.is_cuda:
        result = torch.where(inside[:, None, :, None], result, 0)
    return result.reshape(shape)


def linear_index(indices: Tensor, sizes: tuple[int, ...], outside: int) -> Tensor:
    """Row-major positions of coordinates (the last axis) in a tensor of the sizes, and `outside` where there is none."""
    if not sizes:
        return torch.zeros(indices.shape[:-1], dtype=torch.int64, device=indices.device)
    linear, inside = _coordinate(indices, 0, sizes)
    for axis in range(1, len(sizes)):
        coordinate, within = _coordinate(indices, axis, sizes)
        linear, inside = linear * sizes[axis] + coordinate, inside & within
    return torch.where(inside, linear, outside)


def _coordinate(indices: Tensor, axis: int, sizes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """One coordinate as int64, and whether it is in range."""
    coordinate = indices.select(-1, axis).to(torch.int64)
    return coordinate, (coordinate >= 0) & (coordinate < sizes[axis])


def _batch_dims(node: Node, indices: Tensor) -> int:
    batch_dims = int(node.get("batch_dims", 0))
    return batch_dims + indices.dim() if batch_dims < 0 else batch_dims


def _as_matrices(params: Tensor, indices: Tensor, axis: int, batch_dims: int) -> tuple[Tensor, Tensor]:
    """params as [batch, outer, n, inner] and indices as [batch, m]."""
    batch = math.prod(params.shape[:batch_dims])
    table = params.reshape(
        batch,
        math.prod(params.shape[batch_dims:axis]),
        params.shape[axis],
        math.prod(params.shape[axis + 1 :]),
    )
    return table, indices.reshape(batch, math.prod(indices.shape[batch_dims:]))


def _masked(params: Tensor, indices: Tensor, axis: int) -> Tensor:
    """`index_select` that gives zeros where an index is out of range."""
    size = params.shape[axis]
    shape = (*params.shape[:axis], indices.shape[0], *params.shape[axis + 1 :])
    if size == 0:
        return params.new_zeros(shape)
    inside = (indices >= 0) & (indices < size)
    rows = params.index_select(axis, indices.clamp(0, size - 1))
    return torch.where(inside.reshape([-1 if dim == axis else 1 for dim in range(len(shape))]), rows, 0)


@functools.cache
def _kernel() -> Callable[[Tensor, Tensor], Tensor] | None:
    """The gather in one kernel, if Triton is there and can compile it: it builds its launchers with a C compiler."""
    if not can_compile():
        return None
    from msplit.engines.cuda.kernels.gather import gather as kernel

    return kernel
