"""Order: the largest elements, positions in sorted numbers."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from msplit.engines.cuda.ir.dtypes import torch_dtype
from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node, Unsupported
from msplit.engines.cuda.ops.axes import axis_within, integer


@lowering("TopK")
def top_k(node: Node, x: Tensor) -> tuple[Tensor, Tensor]:
    """The k largest elements along the last axis and their positions (the older form, with k as an attribute)."""
    return _top_k(node, x, int(node.attrs["k"]))


@lowering("TopKV2", static=(1,))
def top_k_v2(node: Node, x: Tensor, k: np.ndarray) -> tuple[Tensor, Tensor]:
    """The k largest elements along the last axis, falling, and their positions; of equal ones the earlier comes first.

    They are sorted even where `sorted` is false, which leaves the order open. NaN has no defined place in TensorFlow.
    """
    return _top_k(node, x, integer(k))


def _top_k(node: Node, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
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
def in_top_k(node: Node, predictions: Tensor, targets: Tensor) -> Tensor:
    """Whether the target's prediction is among the k largest of its row (k is an attribute)."""
    return _in_top_k(predictions, targets, int(node.attrs["k"]))


@lowering("InTopKV2", static=(2,))
def in_top_k_v2(node: Node, predictions: Tensor, targets: Tensor, k: np.ndarray) -> Tensor:
    """Whether the target's prediction is among the k largest of its row.

    It is if fewer than k are larger: all that are equal at the border are in. It is not if the target names no class, or if
    its prediction, or a prediction met on the way, is not finite.
    """
    return _in_top_k(predictions, targets, integer(k))


def _in_top_k(predictions: Tensor, targets: Tensor, k: int) -> Tensor:
    classes = predictions.shape[1]
    if classes == 0:
        return torch.zeros_like(targets, dtype=torch.bool)
    targets = targets.to(torch.int64).unsqueeze(1)
    exists = (targets >= 0) & (targets < classes)
    own = predictions.gather(1, targets.clamp(0, classes - 1))
    larger = (predictions > own).sum(1, keepdim=True)
    finite = torch.isfinite(predictions).all(1, keepdim=True)
    return (exists & finite & (larger < k)).squeeze(1)


@lowering("Bucketize")
def bucketize(node: Node, x: Tensor) -> Tensor:
    """The number of `boundaries` that are not above each element, as int32."""
    boundaries = [float(np.float32(boundary)) for boundary in node.get("boundaries", ())]
    return search_boundaries(node, x, vector(boundaries, _compared_in(x), x.device))


@lowering("_Bucketize", own=True)
def search_boundaries(node: Node, x: Tensor, boundaries: Tensor) -> Tensor:
    """Bucketize with its boundaries on the device already: `keep_boundaries` makes it."""
    return torch.bucketize(
        x.to(_compared_in(x)).contiguous(), boundaries.to(_compared_in(x)), right=True, out_int32=True
    )


def _compared_in(x: Tensor) -> torch.dtype:
    """TensorFlow compares with float32 boundaries in C++'s common type."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def vector(numbers: list[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The numbers as a vector, without a copy from the host, which could not be captured: they travel as arguments."""
    vector = torch.zeros(len(numbers), dtype=dtype, device=device)
    if numbers:
        torch._foreach_add_(list(vector.unbind(0)), numbers)
    return vector


@lowering("LowerBound")
def lower_bound(node: Node, sorted_inputs: Tensor, values: Tensor) -> Tensor:
    """For every value the first position in its sorted row where it could be put in."""
    return _bound(node, sorted_inputs, values, right=False)


@lowering("UpperBound")
def upper_bound(node: Node, sorted_inputs: Tensor, values: Tensor) -> Tensor:
    """For every value the last position in its sorted row where it could be put in."""
    return _bound(node, sorted_inputs, values, right=True)


def _bound(node: Node, sorted_inputs: Tensor, values: Tensor, right: bool) -> Tensor:
    out_type = torch_dtype(node.get("out_type", "int32"))
    found = torch.searchsorted(
        sorted_inputs.contiguous(), values.contiguous(), right=right, out_int32=out_type == torch.int32
    )
    return found.to(out_type)
