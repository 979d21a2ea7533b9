"""Detections: of boxes that overlap only the one with the best score stays (non-maximum suppression).

TensorFlow takes candidates from a heap and holds each against all that are selected. Here every round takes the best that is left, of all
classes of all images at once, and lowers the scores of what overlaps it. There are as many rounds as boxes may be selected at most, so that
the number of kernels does not depend on values; what is found is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node, Unsupported
from msplit.engines.cuda.ops.shape import integer

Similarity = Callable[[Tensor], Tensor]
"""From the places of boxes, one of each row, to how much each box of the row overlaps it."""

_PADS = "pad_to_max_output_size"

MOST_PAIRS = 1 << 25
"""Pairs of boxes whose overlaps are kept: 128 MB, and as much again several times while they are computed."""


@lowering("NonMaxSuppression", "NonMaxSuppressionV2", "NonMaxSuppressionV3", static=(2,), dynamic=True)
@lowering("NonMaxSuppressionV4", "NonMaxSuppressionV5", static=(2,), dynamic=True, unless=_PADS)
def non_max_suppression(node: Node, boxes: Tensor, scores: Tensor, size: np.ndarray, *given: Tensor) -> Any:
    """Indices of the boxes that are selected, the best score first; V5 also gives their scores, V4 and V5 how many there are.

    From V3 on a box needs a score above a threshold. With ``pad_to_max_output_size`` index 0 stands in the rest. Where V5's sigma is above
    0, a box that overlaps a selected one gets a lower score instead of being left out (soft).
    """
    most = integer(size)
    if most < 0:
        raise Unsupported(f"{node.name}: an output size of {most}")
    if not given:  # the first version has an attribute in place of an input
        given = (scores.new_full((), float(node.get("iou_threshold", 0.5))),)
    threshold, score_threshold, sigma = (*given, None, None)[:3]
    places, found, count = _select(scores[None], _overlap(boxes[None]), most, threshold, score_threshold, sigma)
    kept = most if node.get(_PADS, False) else int(count[0])
    indices = places[0, :kept].to(torch.int32)
    if node.op.endswith("V5"):
        return indices, found[0, :kept], count[0]
    return (indices, count[0]) if node.op.endswith("V4") else indices


@lowering("NonMaxSuppressionWithOverlaps", static=(2,), dynamic=True)
def non_max_suppression_with_overlaps(
    node: Node, overlaps: Tensor, scores: Tensor, size: np.ndarray, threshold: Tensor, score_threshold: Tensor
) -> Tensor:
    """Indices of what is selected, given how much each overlaps each other one."""

    def similarity(places: Tensor) -> Tensor:
        return overlaps.index_select(1, places.reshape(-1)).reshape(1, -1)

    places, _, count = _select(scores[None], similarity, integer(size), threshold, score_threshold)
    return places[0, : int(count[0])].to(torch.int32)


@lowering("CombinedNonMaxSuppression", static=(2, 3))
def combined_non_max_suppression(
    node: Node, boxes: Tensor, scores: Tensor, size_per_class: np.ndarray, total_size: np.ndarray, *thresholds: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The best boxes of all classes for every image, their scores and classes, zeros behind them, and how many there are.

    The thresholds are those of the overlap and of the score.
    TensorFlow leaves the order of equal scores open. Here the lower class comes first, and in it the lower index.
    """
    images, count, classes = scores.shape
    most, total = integer(size_per_class), integer(total_size)
    per_class = min(most, count)
    length = min(total, most * classes) if node.get("pad_per_class", False) else total
    corners = boxes.permute(0, 2, 1, 3).expand(images, classes, count, 4)
    by_class = scores.transpose(1, 2).reshape(images * classes, count)
    similarity = _overlap(corners.reshape(images * classes, count, 4))
    threshold, least = thresholds
    places, found, _ = _select(by_class, similarity, per_class, threshold, least, missing=-torch.inf)
    taken = min(length, classes * per_class)
    best, order = torch.sort(found.reshape(images, -1), dim=1, descending=True, stable=True)
    best, order = best[:, :taken], order[:, :taken]
    exists = best > -torch.inf
    kept_classes = order // max(per_class, 1)
    row = kept_classes * count + places.reshape(images, -1).gather(1, order)
    flat = corners.reshape(images, -1, 4)
    kept = flat.gather(1, row[..., None].expand(-1, -1, 4))
    if node.get("clip_boxes", True):
        kept = kept.clamp(0.0, 1.0)
    zero = scores.new_zeros(())
    behind = (0, length - taken)
    return (
        torch.nn.functional.pad(torch.where(exists[..., None], kept, zero), (0, 0, *behind)),
        torch.nn.functional.pad(torch.where(exists, best, zero), behind),
        torch.nn.functional.pad(torch.where(exists, kept_classes.to(scores.dtype), zero), behind),
        exists.sum(1, dtype=torch.int32),
    )


def _select(
    scores: Tensor,
    similarity: Similarity,
    size: int,
    threshold: Tensor,
    score_threshold: Tensor | None,
    sigma: Tensor | None = None,
    missing: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Selects in every row.

    Args:
        scores: A row for each class of each image.
        similarity: How much boxes overlap one that is selected.
        size: Most that are selected in a row.
        threshold: What overlaps more than that is left out.
        score_threshold: So is what has no better score. None: the least finite number.
        sigma: Where it is above 0, scores are lowered instead.
        missing: Score of what is not there.

    Returns:
        Places and scores, each a row of `size` for each row, place 0 where there are fewer; and how many there are, as int32.
    """
    rows, count = scores.shape
    dtype = scores.dtype
    threshold = threshold.to(dtype)
    nothing = scores.new_full((), -torch.inf)
    least = scores.new_full((), torch.finfo(dtype).min) if score_threshold is None else score_threshold.to(dtype)
    left = torch.where(scores > least, scores, nothing)
    if count == 0 or size == 0:
        none = torch.zeros(rows, size, dtype=torch.int64, device=scores.device)
        return none, scores.new_full((rows, size), missing), none.new_zeros(rows, dtype=torch.int32)
    index = torch.arange(count, device=scores.device)
    places, found = [], []
    for _ in range(size):
        best = left.amax(1, keepdim=True)
        # Of equal scores the first: `max` with indices leaves that open.
        place = torch.where(left == best, index, count).amin(1, keepdim=True)
        places.append(place)
        found.append(best)
        overlap = similarity(place).to(dtype)
        lowered = torch.where(overlap > threshold, nothing, left)
        if sigma is not None:
            # Infinite scores times a weight of 0 would be NaN: what is out stays out.
            softly = left * torch.exp(-0.5 / sigma.to(dtype) * overlap * overlap)
            softly = torch.where((softly > least) & (left > nothing), softly, nothing)
            lowered = torch.where(sigma > 0, softly, lowered)
        left = lowered.scatter(1, place, -torch.inf)
    where, score = torch.cat(places, 1), torch.cat(found, 1)
    exists = score > nothing
    return (
        torch.where(exists, where, 0),
        torch.where(exists, score, score.new_full((), missing)),
        exists.sum(1, dtype=torch.int32),
    )


def _overlap(boxes: Tensor) -> Similarity:
    """Intersection over union in float32, of boxes in rows; 0 for boxes without an area. Either corner may come first.

    That of all pairs is computed once where there is room for it, and a round looks its row up: a third of the kernels.
    """
    corners = boxes.to(torch.float32)
    low, high = torch.minimum(corners[..., :2], corners[..., 2:]), torch.maximum(corners[..., :2], corners[..., 2:])
    side = high - low
    area = side[..., 0] * side[..., 1]
    rows, count = area.shape
    if rows * count * count <= MOST_PAIRS:
        pairs = _ratio(low[:, :, None], high[:, :, None], area[:, :, None], low[:, None], high[:, None], area[:, None])
        return lambda places: pairs.gather(1, places[..., None].expand(-1, -1, count))[:, 0]

    def similarity(places: Tensor) -> Tensor:
        pair = places[..., None].expand(-1, -1, 2)
        return _ratio(low, high, area, low.gather(1, pair), high.gather(1, pair), area.gather(1, places))

    return similarity


def _ratio(
    low: Tensor, high: Tensor, area: Tensor, other_low: Tensor, other_high: Tensor, other_area: Tensor
) -> Tensor:
    side = (torch.minimum(high, other_high) - torch.maximum(low, other_low)).clamp(min=0)
    shared = side[..., 0] * side[..., 1]
    ratio = shared / (area + other_area - shared)
    return torch.where((area > 0) & (other_area > 0), ratio, ratio.new_zeros(()))
