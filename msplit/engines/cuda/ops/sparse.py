"""Sparse tensors, which TensorFlow keeps as three dense ones: indices (one row per element), values and a shape."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node
from msplit.engines.cuda.ops.axes import integers
from msplit.engines.cuda.ops.gather import linear_index, take


@lowering("SparseToDense", static=(1,))
def sparse_to_dense(node: Node, indices: Tensor, shape: np.ndarray, values: Tensor, default: Tensor) -> Tensor:
    """A dense tensor of the shape: the values at their indices, the default elsewhere. Wrong indices are passed over."""
    sizes = integers(shape)
    if indices.dim() < 2:
        indices = indices.reshape(-1, 1)
    count = math.prod(sizes)
    buffer = default.reshape(()).expand(count + 1).clone(memory_format=torch.contiguous_format)
    places = linear_index(indices, sizes, outside=count)
    buffer.index_copy_(0, places, values.reshape(-1).expand(places.shape[0]))
    return buffer[:count].reshape(sizes)


@lowering("SparseReshape")
def sparse_reshape(node: Node, indices: Tensor, shape: Tensor, new_shape: Tensor) -> tuple[Tensor, Tensor]:
    """The indices of the same elements in another dense shape, of which one size may be -1, and that shape."""
    known = torch.where(new_shape < 0, 1, new_shape).prod()
    left = torch.div(shape.prod(), known.clamp(min=1), rounding_mode="floor")
    result_shape = torch.where(new_shape < 0, left, new_shape)
    linear = (indices * _steps(shape)).sum(-1)
    places = torch.div(linear.unsqueeze(-1), _steps(result_shape).clamp(min=1), rounding_mode="floor")
    return places % result_shape.clamp(min=1), result_shape


def _steps(shape: Tensor) -> Tensor:
    """Distance in a flat row-major tensor between neighbours on every axis."""
    after = torch.cat([shape[1:], torch.ones_like(shape[:1])])
    return after.flip(0).cumprod(0, dtype=shape.dtype).flip(0)


@lowering("SparseFillEmptyRows", dynamic=True)
def sparse_fill_empty_rows(
    node: Node, indices: Tensor, values: Tensor, shape: Tensor, default: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Puts one element, the default in column 0, in every row that has none.

    Returns:
        Indices and values in order of rows, which rows were empty, and where each given element went.
    """
    rows = int(shape[0])
    row_of = indices[:, 0]
    if row_of.numel() and not 0 <= int(row_of.min()) <= int(row_of.max()) < rows:
        raise IndexError(f"{node.name}: an element lies outside of the {rows} rows")
    occupied = torch.zeros(rows, dtype=torch.bool, device=indices.device)
    occupied[row_of] = True
    missing = torch.nonzero(~occupied).reshape(-1)
    new_indices = torch.zeros((missing.shape[0], indices.shape[1]), dtype=indices.dtype, device=indices.device)
    new_indices[:, 0] = missing
    # Elements keep their order within a row. A row has given elements or a new one, never both.
    order = torch.argsort(torch.cat([row_of, missing]), stable=True)
    position = torch.empty_like(order)
    position[order] = torch.arange(order.shape[0], device=order.device)
    all_indices = torch.cat([indices, new_indices])[order]
    all_values = torch.cat([values, default.reshape(1).expand(missing.shape[0])])[order]
    return all_indices, all_values, ~occupied, position[: row_of.shape[0]]


@lowering("SparseTensorDenseMatMul", static=(2,))
def sparse_dense_matmul(node: Node, indices: Tensor, values: Tensor, shape: np.ndarray, dense: Tensor) -> Tensor:
    """The product of a sparse and a dense matrix, either one transposed and conjugated first where the node says so."""
    row_of, column_of = indices[:, 0], indices[:, 1]
    rows = integers(shape)[0]
    if node.get("adjoint_a", False):
        row_of, column_of, values = column_of, row_of, values.conj()
        rows = integers(shape)[1]
    if node.get("adjoint_b", False):
        dense = dense.t().conj().resolve_conj()
    terms = take(dense, column_of) * values.unsqueeze(1)
    # One row to spare, for elements outside of the matrix.
    places = linear_index(row_of.unsqueeze(1), (rows,), outside=rows)
    return terms.new_zeros((rows + 1, dense.shape[1])).index_add_(0, places, terms)[:rows]
