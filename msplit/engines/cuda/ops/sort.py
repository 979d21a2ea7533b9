"""Order and groups: the largest elements, sorted positions, partitions, stitches, distinct elements, counts."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from msplit.engines.cuda.ir.dtypes import torch_dtype
from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node, Unsupported
from msplit.engines.cuda.kernels.sparse_optimizers import distinct, finds
from msplit.engines.cuda.ops.axes import axis_within, integer, integers


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
