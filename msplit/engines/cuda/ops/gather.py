"""Reading and writing rows at given indices, and sparse tensors, which are three dense ones.

An index out of range, where rows are read: on the CPU an `IndexError`, as TensorFlow's CPU kernel refuses it; on CUDA zeros in place of
the row, as TensorFlow's GPU kernel writes them, and on the CPU, too, in a turn or a branch that may not count. It never crashes the CUDA
context. On CUDA with Triton a gather is one kernel; without Triton it is several, because PyTorch's own gathers must not see a wrong index.

Where rows are written, it is passed over, as TensorFlow's GPU kernels do; its CPU kernels refuse it. Every kernel writes to a buffer
with one row to spare for such indices, because PyTorch would crash the CUDA context over them.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from msplit.engines.cuda.ir.dtypes import in_signed
from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import MAY_NOT_RUN, Node, Unsupported
from msplit.engines.cuda.kernels import memory as kernel
from msplit.engines.cuda.kernels.launch import can_launch
from msplit.engines.cuda.ops.shape import axis_within, integer, integers, without_nan


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
    return take(params, indices, dim, batch_dims, zeros=node.get(MAY_NOT_RUN, False))


@lowering("Gather", "ResourceGather")
def gather(node: Node, table: Tensor, indices: Tensor) -> Tensor:
    """Rows of a table, or of a variable, whose value comes as the first input, at the indices."""
    batch_dims = _batch_dims(node, indices)
    return take(table, indices, batch_dims, batch_dims, zeros=node.get(MAY_NOT_RUN, False))


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
    return take(rows, linear, zeros=node.get(MAY_NOT_RUN, False) or node.get("bad_indices_policy", "") == "IGNORE")


def take(params: Tensor, indices: Tensor, axis: int = 0, batch_dims: int = 0, *, zeros: bool = False) -> Tensor:
    """GatherV2 with axis and batch_dims in range. See the module for indices that are not; with `zeros` they give zeros on the CPU, too."""
    zeros = zeros or params.is_cuda
    shape = (*params.shape[:axis], *indices.shape[batch_dims:], *params.shape[axis + 1 :])
    # A table that does not lie row by row would have to be copied first, which can cost far more than the gather.
    if params.is_contiguous() and params.element_size() <= 8 and can_launch(params.device):
        return kernel.gather(*_as_matrices(params, indices.contiguous(), axis, batch_dims)).reshape(shape)
    if indices.dtype not in (torch.int32, torch.int64):
        indices = indices.to(torch.int64)
    if batch_dims == 0:
        flat = indices.reshape(-1)
        rows = _masked(params, flat, axis) if zeros else params.index_select(axis, flat)
        return rows.reshape(shape)
    table, places = _as_matrices(params, indices.to(torch.int64), axis, batch_dims)
    size = table.shape[2]
    inside = (places >= 0) & (places < size)
    if zeros:
        places = places.clamp(0, max(size - 1, 0))
    index = places[:, None, :, None].expand(-1, table.shape[1], -1, table.shape[3])
    result = table.gather(2, index) if size else table.new_zeros(index.shape)
    if zeros:
        result = or_zeros(inside[:, None, :, None], result)
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
    outer, inner = math.prod(params.shape[batch_dims:axis]), math.prod(params.shape[axis + 1 :])
    table = params.reshape(batch, outer, params.shape[axis], inner)
    return table, indices.reshape(batch, math.prod(indices.shape[batch_dims:]))


def _masked(params: Tensor, indices: Tensor, axis: int) -> Tensor:
    """`index_select` that gives zeros where an index is out of range."""
    size = params.shape[axis]
    shape = (*params.shape[:axis], indices.shape[0], *params.shape[axis + 1 :])
    if size == 0:
        return params.new_zeros(shape)
    inside = (indices >= 0) & (indices < size)
    rows = params.index_select(axis, indices.clamp(0, size - 1))
    return or_zeros(inside.reshape([-1 if dim == axis else 1 for dim in range(len(shape))]), rows)


def or_zeros(inside: Tensor, rows: Tensor) -> Tensor:
    """Rows that are inside, and zeros elsewhere, in the type of the rows: 0 would make integers of what is true or false."""
    return torch.where(inside, in_signed(rows), False).view(rows.dtype)


@lowering("ScatterNd", static=(2,))
def scatter_nd(node: Node, indices: Tensor, updates: Tensor, shape: np.ndarray) -> Tensor:
    """Zeros of the given shape with the updates added at the coordinates of the last axis of the indices."""
    sizes = integers(shape)
    depth = indices.shape[-1]
    count = math.prod(sizes[:depth])
    buffer = updates.new_zeros((count + 1, math.prod(sizes[depth:])))
    places = linear_index(indices, sizes[:depth], outside=count).reshape(-1)
    return buffer.index_add_(0, places, updates.reshape(-1, buffer.shape[1]))[:-1].reshape(sizes)


@lowering("TensorScatterUpdate")
def tensor_scatter_update(node: Node, x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """A copy of x with the updates written at the indices. Of several updates to one place any one may win."""
    buffer, places = _buffer(x, indices)
    return buffer.index_copy_(0, places, updates.reshape(-1, buffer.shape[1]))[:-1].reshape(x.shape)


@lowering("TensorScatterAdd", "TensorScatterSub", "ScatterNdNonAliasingAdd")
def tensor_scatter_add(node: Node, x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """A copy of x with the updates added (subtracted) at the indices."""
    buffer, places = _buffer(x, indices)
    addends = (-updates if node.op == "TensorScatterSub" else updates).reshape(-1, buffer.shape[1])
    return buffer.index_add_(0, places, addends)[:-1].reshape(x.shape)


@lowering("TensorScatterMax", "TensorScatterMin")
def tensor_scatter_extreme(node: Node, x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """A copy of x with the larger (smaller) of element and updates at the indices."""
    buffer, places = _buffer(x, indices)
    how = "amax" if node.op == "TensorScatterMax" else "amin"
    values = without_nan(updates.reshape(-1, buffer.shape[1]), how)
    return buffer.scatter_reduce_(0, places[:, None].expand(values.shape), values, how)[:-1].reshape(x.shape)


def _buffer(x: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """A copy of x as rows, with one more row at the end, and the row that every index means, as a vector."""
    depth = indices.shape[-1]
    count = math.prod(x.shape[:depth])
    inner = math.prod(x.shape[depth:])
    buffer = x.new_empty((count + 1, inner))
    buffer[:count].copy_(x.reshape(count, inner))
    return buffer, linear_index(indices, tuple(x.shape[:depth]), outside=count).reshape(-1)


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


@lowering("SparseFillEmptyRowsGrad")
def sparse_fill_empty_rows_grad(node: Node, places: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of the elements that were given, from where they went, and the sum of all others: that of the default."""
    size = grad.shape[0]
    inside = (places >= 0) & (places < size)
    added = torch.ones(size + 1, dtype=torch.bool, device=grad.device).index_fill_(0, places.where(inside, size), False)
    return take(grad, places), grad.where(added[:size], 0).sum(dtype=grad.dtype)


@lowering("SparseTensorDenseMatMul", static=(2,))
def sparse_dense_matmul(node: Node, indices: Tensor, values: Tensor, shape: np.ndarray, dense: Tensor) -> Tensor:
    """The product of a sparse and a dense matrix, either one transposed and conjugated first where the node says so."""
    (row_of, column_of), (rows, columns) = indices.unbind(1), integers(shape)
    if node.get("adjoint_a", False):
        row_of, column_of, values, rows = column_of, row_of, values.conj(), columns
    if node.get("adjoint_b", False):
        dense = dense.t().conj().resolve_conj()
    terms = take(dense, column_of) * values.unsqueeze(1)
    # One row to spare, for elements outside of the matrix.
    places = linear_index(row_of.unsqueeze(1), (rows,), outside=rows)
    return terms.new_zeros((rows + 1, dense.shape[1])).index_add_(0, places, terms)[:rows]


# One operation of XLA each: what models write that come from JAX, or that Keras compiles.


@lowering("XlaDynamicSlice", static=(2,))
def dynamic_slice(node: Node, x: Tensor, start: Tensor, sizes: np.ndarray) -> Tensor:
    """The elements from a place on that only the run knows. A place too far out is moved until the slice is inside."""
    wanted = integers(sizes)
    _check_slice(node, x, start, wanted)
    for dim, size in enumerate(wanted):
        if size != x.shape[dim]:
            x = x.index_select(dim, _sliced_places(start, dim, size, x.shape[dim]))
    return x


@lowering("XlaDynamicUpdateSlice")
def dynamic_update_slice(node: Node, x: Tensor, update: Tensor, start: Tensor) -> Tensor:
    """A copy of x with the update from a place on that only the run knows: how caches of decoders are written.

    A place too far out is moved until the update is inside.
    """
    sizes = tuple(update.shape)
    _check_slice(node, x, start, sizes)
    partial = [dim for dim, size in enumerate(sizes) if size != x.shape[dim]]
    if not partial:
        return update
    result = x.clone(memory_format=torch.contiguous_format)
    if update.numel() == 0:
        return result
    if len(partial) == 1:
        return result.index_copy_(
            partial[0], _sliced_places(start, partial[0], sizes[partial[0]], x.shape[partial[0]]), update
        )
    mesh = []
    for dim, size in enumerate(sizes):
        places = _sliced_places(start, dim, size, x.shape[dim])
        mesh.append(places.reshape([-1 if other == dim else 1 for other in range(x.dim())]))
    return result.index_put_(tuple(mesh), update)


def _check_slice(node: Node, x: Tensor, start: Tensor, sizes: tuple[int, ...]) -> None:
    fits = len(sizes) == x.dim() and all(0 <= size <= whole for size, whole in zip(sizes, x.shape, strict=True))
    if not fits or tuple(start.shape) != (x.dim(),):
        raise Unsupported(f"{node.name}: {sizes} elements from {start.numel()} indices on, of shape {tuple(x.shape)}")


def _sliced_places(start: Tensor, dim: int, size: int, whole: int) -> Tensor:
    """Places of `size` elements on an axis, as int64."""
    # A slice of the index, not an element of it: an element would be read by the host.
    first = start.narrow(0, dim, 1).to(torch.int64).clamp(0, whole - size)
    return first + torch.arange(size, device=start.device)


@lowering("XlaPad", static=(2, 3, 4))
def xla_pad(node: Node, x: Tensor, value: Tensor, low: np.ndarray, high: np.ndarray, interior: np.ndarray) -> Tensor:
    """A value put before, behind and between the elements along every axis; a negative number takes elements away."""
    edges = list(zip(integers(low), integers(high), integers(interior), strict=True))
    if len(edges) != x.dim() or any(between < 0 for _, _, between in edges):
        raise Unsupported(f"{node.name}: paddings {edges} do not fit a tensor of shape {tuple(x.shape)}")
    spread = [max(0, size + (size - 1) * between) for size, (_, _, between) in zip(x.shape, edges, strict=True)]
    shape = [size + before + behind for size, (before, behind, _) in zip(spread, edges, strict=True)]
    if min(shape, default=0) < 0:
        raise Unsupported(f"{node.name}: paddings {edges} take away more than shape {tuple(x.shape)} has")
    result = value.reshape(()).expand(shape).clone(memory_format=torch.contiguous_format)
    inside = result
    for dim, (before, _, between) in enumerate(edges):
        step = between + 1
        # Element k goes to before + k * step: the first and the last that are inside.
        first = max(0, -(before // step))
        last = min(x.shape[dim] - 1, (shape[dim] - 1 - before) // step)
        count = max(0, last - first + 1)
        x = x.narrow(dim, first if count else 0, count)
        place = before + first * step if count else 0
        inside = inside[
            (slice(None),) * dim + (slice(place, place + max(0, (count - 1) * step + 1) if count else place, step),)
        ]
    inside.copy_(x)
    return result


@lowering("XlaSort")
def xla_sort(node: Node, x: Tensor) -> Tensor:
    """The elements along the last axis, rising."""
    return torch.sort(x, dim=-1).values


@lowering("XlaKeyValueSort")
def xla_key_value_sort(node: Node, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The keys along the last axis, rising, and the values in the keys' order."""
    ordered, positions = torch.sort(keys, dim=-1, stable=True)
    return ordered, values.gather(-1, positions)
