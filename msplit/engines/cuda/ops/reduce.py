"""Ops that reduce, scan, sort and group.

Reductions over axes, arg-reductions, and running sums, products and log-sum-exps.

Order and groups: the largest elements, sorted positions, partitions, stitches, distinct elements, counts.
"""

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
from msplit.engines.cuda.kernels.optimizers import distinct, finds
from msplit.engines.cuda.ops.shape import axis_within, integer, integers, reduced_axes


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


@lowering("TopK")
@lowering("TopKV2", static=(1,))
def top_k(node: Node, x: Tensor, *given: np.ndarray) -> tuple[Tensor, Tensor]:
    """The k largest elements along the last axis, falling, and their positions; of equal ones the earlier comes first.

    They are sorted even where `sorted` is false, which leaves the order open. NaN has no defined place in TensorFlow.
    """
    k = _k(node, given)
    if x.dim() == 0 or not 0 <= k <= x.shape[-1]:
        raise Unsupported(f"{node.name}: the {k} largest along the last axis of shape {tuple(x.shape)}")
    # `torch.topk` leaves the order of equal elements open; a stable sort does not.
    ordered, positions = torch.sort(x, dim=-1, descending=True, stable=True)
    index_type = torch_dtype(node.get("index_type", "int32"))
    return ordered.narrow(-1, 0, k), positions.narrow(-1, 0, k).to(index_type)


@lowering("ApproxTopK")
def approx_top_k(node: Node, x: Tensor) -> tuple[Tensor, Tensor]:
    """The k largest or smallest elements along an axis and their positions: all of them, as everywhere but on a TPU."""
    if not node.get("aggregate_to_topk", True):
        raise Unsupported(f"{node.name}: aggregate_to_topk is false")
    dim = axis_within(node, int(node.get("reduction_dimension", -1)), x.dim())
    k = int(node.attrs["k"])
    if not 0 <= k <= x.shape[dim]:
        raise Unsupported(f"{node.name}: {k} elements along axis {dim} of shape {tuple(x.shape)}")
    ordered, positions = torch.sort(x, dim=dim, descending=bool(node.get("is_max_k", True)), stable=True)
    return ordered.narrow(dim, 0, k), positions.narrow(dim, 0, k).to(torch.int32)


@lowering("NthElement", static=(1,))
def nth_element(node: Node, x: Tensor, n: np.ndarray) -> Tensor:
    """The element at position n of the last axis if it were sorted, rising or with `reverse` falling."""
    return torch.sort(x, dim=-1, descending=bool(node.get("reverse", False))).values.select(-1, integer(n))


@lowering("InTopK")
@lowering("InTopKV2", static=(2,))
def in_top_k(node: Node, predictions: Tensor, targets: Tensor, *given: np.ndarray) -> Tensor:
    """Returns whether the target's prediction is among the k largest of its row.

    It is if fewer than k are larger: all that are equal at the border are in. It is not if the target names no class, or if
    its prediction, or a prediction met on the way, is not finite.
    """
    k = _k(node, given)
    classes = predictions.shape[1]
    if classes == 0:
        return torch.zeros_like(targets, dtype=torch.bool)
    targets = targets.to(torch.int64).unsqueeze(1)
    exists = (targets >= 0) & (targets < classes)
    own = predictions.gather(1, targets.clamp(0, classes - 1))
    larger = (predictions > own).sum(1, keepdim=True)
    finite = torch.isfinite(predictions).all(1, keepdim=True)
    return (exists & finite & (larger < k)).squeeze(1)


def _k(node: Node, given: tuple[np.ndarray, ...]) -> int:
    """The input k; in the older form of an op it is an attribute."""
    return integer(given[0]) if given else int(node.attrs["k"])


@lowering("Bucketize")
def bucketize(node: Node, x: Tensor) -> Tensor:
    """The number of `boundaries` that are not above each element, as int32."""
    boundaries = [float(np.float32(boundary)) for boundary in node.get("boundaries", ())]
    return search_boundaries(node, x, vector(boundaries, _compared_in(x), x.device))


@lowering("_Bucketize", own=True)
def search_boundaries(node: Node, x: Tensor, boundaries: Tensor) -> Tensor:
    """Bucketize with its boundaries on the device already: the pass `keep_boundaries` makes it.

    Boundaries with more than one axis are rows for the first axes of `x`.
    """
    dtype, rows = _compared_in(x), boundaries.shape[:-1]
    found = torch.searchsorted(
        boundaries.to(dtype), x.to(dtype).reshape(*rows, -1).contiguous(), right=True, out_int32=True
    )
    return found.reshape(x.shape)


def _compared_in(x: Tensor) -> torch.dtype:
    """TensorFlow compares with float32 boundaries in C++'s common type."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def vector(numbers: list[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The numbers as a vector, without a copy from the host, which could not be captured: they travel as arguments."""
    vector = torch.zeros(len(numbers), dtype=dtype, device=device)
    if numbers:
        torch._foreach_add_(list(vector.unbind(0)), numbers)
    return vector


@lowering("LowerBound", "UpperBound")
def bound(node: Node, sorted_inputs: Tensor, values: Tensor) -> Tensor:
    """For every value the first (last) position in its sorted row where it could be put in."""
    right, out_type = node.op == "UpperBound", torch_dtype(node.get("out_type", "int32"))
    found = torch.searchsorted(
        sorted_inputs.contiguous(), values.contiguous(), right=right, out_int32=out_type == torch.int32
    )
    if not right and values.is_floating_point():
        found = torch.where(values.isnan(), 0, found)  # nothing is below NaN, which PyTorch has behind all numbers
    return found.to(out_type)


@lowering("DynamicPartition", dynamic=True)
def dynamic_partition(node: Node, data: Tensor, partitions: Tensor) -> tuple[Tensor, ...]:
    """The rows of `data`, in order, by the number of their partition."""
    count = int(node.attrs["num_partitions"])
    return tuple(data[partitions == number] for number in range(count))


@lowering("DynamicStitch", "ParallelDynamicStitch", dynamic=True)
def dynamic_stitch(node: Node, *inputs: Tensor) -> Tensor:
    """Puts rows of several tensors at their indices of one: first all tensors of indices, then all of data.

    Of rows with one index the last one stays. Where no row has an index, TensorFlow leaves what was in memory; here it is zeros.
    """
    half = len(inputs) // 2
    inner = inputs[half].shape[inputs[0].dim() :]
    indices = torch.cat([index.reshape(-1) for index in inputs[:half]]).to(torch.int64)
    values = torch.cat([rows.reshape(-1, *inner) for rows in inputs[half:]])
    if not indices.numel():
        return values
    if int(indices.min()) < 0:
        raise IndexError(f"{node.name}: a negative index")
    # Written in any order on a GPU: which row is the last one is found before.
    last = indices.new_full((int(indices.max()) + 1,), -1)
    last.scatter_reduce_(0, indices, torch.arange(len(indices), device=indices.device), "amax")
    result = values.new_zeros((len(last), *inner))
    result[last >= 0] = values[last[last >= 0]]
    return result


@lowering("Unique", "UniqueWithCounts", dynamic=True)
@lowering("UniqueV2", "UniqueWithCountsV2", static=(1,), dynamic=True)
def unique(node: Node, x: Tensor, *axes: np.ndarray) -> tuple[Tensor, ...]:
    """The distinct elements (V2: slices along an axis), as they come first; where each went; how often it comes (WithCounts)."""
    found = integers(axes[0]) if axes else (0,)
    if not found and x.dim() != 1:
        raise Unsupported(
            f"{node.name}: {node.op} without an axis needs a vector, the input has shape {tuple(x.shape)}"
        )
    axis = axis_within(node, found[0] if found else 0, x.dim())
    outputs = 3 if "WithCounts" in node.op else 2
    index_type = torch_dtype(node.get("out_idx", "int32"))
    size = x.shape[axis]
    if size == 0:
        nothing = torch.zeros(0, dtype=index_type, device=x.device)
        return (x, nothing, nothing)[:outputs]
    ordered, group, counts = torch.unique(
        x, return_inverse=True, return_counts=True, dim=None if x.dim() == 1 else axis
    )
    # PyTorch sorts; TensorFlow keeps the order of first appearance.
    places = torch.arange(size, device=x.device)
    first = torch.full_like(counts, size).scatter_reduce(0, group, places, "amin")
    order = torch.argsort(first)
    new_group = torch.argsort(order)[group]
    return (ordered.index_select(axis, order), new_group.to(index_type), counts[order].to(index_type))[:outputs]


@lowering("_UniquePadded", own=True)
def unique_padded(node: Node, x: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct elements, each where it comes first, and -1 in all other places; for each element the place where it comes first.

    What the pass `pad_unique` makes of Unique: as many places as elements, whatever these are.
    """
    index_type = torch_dtype(node.get("out_idx", "int32"))
    if finds(x):
        return distinct(x, index_type)
    ordered, order = torch.sort(x, stable=True)
    places = torch.arange(x.shape[0], device=x.device)
    begins = torch.ones_like(ordered, dtype=torch.bool)
    begins[1:] = ordered[1:] != ordered[:-1]
    heads = torch.cummax(torch.where(begins, places, 0), 0).values
    first = torch.empty_like(order).index_copy_(0, order, order.index_select(0, heads))
    return torch.where(first == places, x, -1), first.to(index_type)


@lowering("_PartitionPadded", own=True)
def partition_padded(node: Node, data: Tensor, partitions: Tensor, *ids: Tensor) -> tuple[Tensor, ...]:
    """Numbers by the number of their partition, where they were, with -1 in the place of all others, and where there is no id.

    What the pass `pad_unique` makes of DynamicPartition.
    """
    if ids:
        partitions = torch.where(ids[0] < 0, -1, partitions)
    return tuple(torch.where(partitions == number, data, -1) for number in range(int(node.attrs["num_partitions"])))


@lowering("_StitchPadded", own=True)
def stitch_padded(node: Node, *inputs: Tensor) -> Tensor:
    """Rows of several tensors, each where it was in front of `_PartitionPadded`: first the positions of all of them, then the rows."""
    half = len(inputs) // 2
    result = inputs[half]
    for places, rows in zip(inputs[1:half], inputs[half + 1 :], strict=True):
        result = torch.where((places >= 0).reshape(-1, *(1 for _ in rows.shape[1:])), rows, result)
    return result


@lowering("ListDiff", dynamic=True)
def list_diff(node: Node, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The elements of x that are not in y, in order, and their positions."""
    places = torch.nonzero(~torch.isin(x, y)).reshape(-1)
    return x[places], places.to(torch_dtype(node.get("out_idx", "int32")))


@lowering("Bincount", "DenseBincount", static=(1,))
def bincount(node: Node, values: Tensor, size: np.ndarray, weights: Tensor) -> Tensor:
    """Counts of each number below `size` (DenseBincount: in each row), or with weights the sum of their weights.

    Other numbers are passed over. With `binary_output` it says only whether a number comes at all.
    """
    by_row = node.op == "DenseBincount" and values.dim() == 2
    if not by_row:
        values, weights = values.reshape(1, -1), weights.reshape(1, -1)
    # Column 0 takes the negative numbers, the last one those from `size` on.
    end = integer(size) + 1
    places = values.to(torch.int64).add(1).clamp(0, end)
    buffer = weights.new_zeros((values.shape[0], end + 1))
    if node.get("binary_output", False):
        buffer.scatter_(1, places, 1)
    else:
        addends = weights if weights.numel() else torch.ones_like(places, dtype=weights.dtype)
        buffer.scatter_add_(1, places, addends)
    return buffer[:, 1:end] if by_row else buffer[0, 1:end]


@lowering("HistogramFixedWidth", static=(2,))
def histogram(node: Node, values: Tensor, limits: Tensor, bins: np.ndarray) -> Tensor:
    """Counts of the values in each of the bins, equally wide, between two limits. The outer ones take what lies outside."""
    count, out_type = integer(bins), torch_dtype(node.get("dtype", "int32"))
    low, high = limits[0], limits[1]
    width = (high - low).to(torch.float64) / count
    # As TensorFlow's kernel: the difference in the values' own type, the quotient in float64.
    places = ((values.maximum(low) - low).to(torch.float64) / width).clamp(0, count - 1).to(torch.int64).reshape(-1)
    buffer = torch.zeros(count, dtype=out_type, device=values.device)
    return buffer.scatter_add_(0, places, torch.ones_like(places, dtype=out_type))
