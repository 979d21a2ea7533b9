"""Non-maximum suppression selects what TensorFlow selects."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msplit.engines.cuda.ir.dtypes import to_numpy
from msplit.engines.cuda.ir.lowering import table
from msplit.engines.cuda.ir.node import Unsupported
from msplit.engines.cuda.ops import boxes as boxes_module
from tests.campaign import examples, sampled

from .harness import check, run_lowering

pytestmark = pytest.mark.tf

OLD = ["NonMaxSuppression", "NonMaxSuppressionV2", "NonMaxSuppressionV3"]
PADDED = {"pad_to_max_output_size": True}


def crowd(count, seed=0, dtype="float32", spread=0.3):
    """Boxes around a few centres, corners in any order, some without an area, and scores that are all different."""
    rng = np.random.default_rng(seed)
    centre = rng.uniform(0, 1, (4, 2))[rng.integers(0, 4, count)] + rng.normal(0, spread / 4, (count, 2))
    half = rng.uniform(0.02, 0.3, (count, 2))
    boxes = np.concatenate([centre - half, centre + half], 1)
    flipped = rng.random(count) < 0.3
    boxes[flipped] = boxes[flipped][:, [2, 3, 0, 1]]
    flat = rng.random(count) < 0.1
    boxes[flat, 2:] = boxes[flat, :2]
    scores = rng.permutation(count) / max(count, 1) - 0.2
    return boxes.astype(dtype), scores.astype(dtype)


def arguments(op, boxes, scores, size, iou, least, sigma=0.0):
    kind = boxes.dtype
    given = [boxes, scores, np.int32(size)]
    if op == "NonMaxSuppression":
        return given, {"iou_threshold": float(iou)}
    given += [np.array(iou, kind)]
    if op != "NonMaxSuppressionV2":
        given += [np.array(least, kind)]
    if op == "NonMaxSuppressionV5":
        given += [np.array(sigma, kind)]
    return given, {}


@sampled(10, op=[*OLD, "NonMaxSuppressionV4", "NonMaxSuppressionV5"], size=[0, 1, 7, 40, 200])
def test_what_is_selected(op, size):
    for seed, (iou, least) in enumerate([(0.5, 0.0), (0.0, -1.0), (0.3, 0.4), (1.0, -np.inf), (0.7, 2.0)]):
        boxes, scores = crowd(60, seed)
        given, attrs = arguments(op, boxes, scores, size, iou, least)
        check(op, given, attrs)
        if op in ("NonMaxSuppressionV4", "NonMaxSuppressionV5"):
            check(op, given, {**attrs, **PADDED})


@pytest.mark.parametrize("op", ["NonMaxSuppressionV3", "NonMaxSuppressionV4", "NonMaxSuppressionV5"])
def test_in_half_precision_overlaps_are_rounded_before_they_are_compared(op):
    for seed in range(20):
        boxes, scores = crowd(40, seed, "float16")
        check(op, *arguments(op, boxes, scores, 25, 0.4, 0.1))


def test_of_equal_scores_the_first_box_is_selected():
    boxes, _ = crowd(80, 3)
    scores = np.random.default_rng(3).integers(0, 4, 80).astype(np.float32)
    for op in ("NonMaxSuppressionV3", "NonMaxSuppressionV4", "NonMaxSuppressionV5"):
        check(op, *arguments(op, boxes, scores, 50, 0.5, -1.0))
    check("NonMaxSuppressionV3", *arguments("NonMaxSuppressionV3", boxes, np.zeros_like(scores), 50, 0.2, -1.0))


def test_scores_that_are_no_numbers_are_never_selected_and_infinite_ones_are():
    boxes, scores = crowd(30, 4)
    scores[::7], scores[3], scores[4] = np.nan, np.inf, -np.inf
    for op in OLD:
        check(op, *arguments(op, boxes, scores, 30, 0.5, -9.0))


def test_without_boxes_nothing_is_selected():
    for op in (*OLD, "NonMaxSuppressionV4"):
        check(op, *arguments(op, np.zeros((0, 4), np.float32), np.zeros(0, np.float32), 5, 0.5, 0.0))
    given, attrs = arguments("NonMaxSuppressionV4", np.zeros((0, 4), np.float32), np.zeros(0, np.float32), 5, 0.5, 0.0)
    check("NonMaxSuppressionV4", given, {**attrs, **PADDED})


@pytest.mark.parametrize("sigma", [0.1, 0.5, 2.0])
@pytest.mark.parametrize("pad", [False, True])
def test_soft_suppression_lowers_scores(sigma, pad):
    for seed, least in enumerate([0.0, 0.3, -1.0]):
        boxes, scores = crowd(50, seed)
        scores = np.abs(scores)
        given, _ = arguments("NonMaxSuppressionV5", boxes, scores, 30, 0.5, least, sigma)
        found = check("NonMaxSuppressionV5", given, {"pad_to_max_output_size": pad})
        assert (np.diff(to_numpy(found[1])) <= 1e-6).all()


def test_overlaps_can_be_given():
    rng = np.random.default_rng(5)
    overlaps = rng.uniform(0, 1, (40, 40)).astype(np.float32)  # not even symmetric
    scores = rng.permutation(40).astype(np.float32)
    for size in (0, 3, 40):
        given = [overlaps, scores, np.int32(size), np.float32(0.6), np.float32(4)]
        check("NonMaxSuppressionWithOverlaps", given)


def several(images, count, classes, own, seed):
    """Boxes of several images, for each class its own or one for all."""
    rng = np.random.default_rng(seed)
    boxes = np.stack([crowd(count, seed + number)[0] for number in range(images * own)])
    boxes = boxes.reshape(images, own, count, 4).transpose(0, 2, 1, 3)
    scores = rng.permutation(images * count * classes).reshape(images, count, classes) / (images * count * classes)
    return np.ascontiguousarray(boxes * 1.5 - 0.2).astype(np.float32), scores.astype(np.float32)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("attrs", [{}, {"clip_boxes": False}, {"pad_per_class": True}])
@pytest.mark.parametrize(("per_class", "total"), [(1, 5), (5, 8), (10, 100), (100, 20), (3, 9)])
def test_of_all_classes_of_all_images(own, attrs, per_class, total):
    boxes, scores = several(2, 25, 3, 3 if own else 1, per_class)
    for iou, least in ((0.5, 0.0), (0.2, 0.5), (0.9, 0.99)):
        given = [boxes, scores, np.int32(per_class), np.int32(total), np.float32(iou), np.float32(least)]
        check("CombinedNonMaxSuppression", given, attrs)


def test_of_images_without_boxes():
    given = [np.zeros((2, 0, 1, 4)), np.zeros((2, 0, 3))]
    given = [array.astype(np.float32) for array in given]
    found = run_lowering(
        "CombinedNonMaxSuppression", [*given, np.int32(5), np.int32(4), np.float32(0.5), np.float32(0)]
    )
    assert [tuple(one.shape) for one in found] == [(2, 4, 4), (2, 4), (2, 4), (2,)]
    assert not any(one.any() for one in found)


def test_only_what_is_padded_can_be_captured():
    entry = table()["NonMaxSuppressionV5"]
    assert entry.dynamic_with({})
    assert not entry.dynamic_with(PADDED)
    assert not table()["CombinedNonMaxSuppression"].dynamic_with({})


def test_a_negative_size_is_refused():
    boxes, scores = crowd(3)
    with pytest.raises(Unsupported, match="an output size of -1"):
        run_lowering("NonMaxSuppressionV3", arguments("NonMaxSuppressionV3", boxes, scores, -1, 0.5, 0.0)[0])


@pytest.mark.parametrize("most", [0, 1 << 25])
def test_overlaps_of_all_pairs_at_once_and_row_by_row_select_the_same(monkeypatch, most):
    monkeypatch.setattr(boxes_module, "MOST_PAIRS", most)
    boxes, scores = crowd(90, 8)
    check("NonMaxSuppressionV4", arguments("NonMaxSuppressionV4", boxes, scores, 60, 0.4, 0.0)[0], PADDED)
    boxes, scores = several(2, 30, 3, 3, 9)
    given = [boxes, scores, np.int32(7), np.int32(20), np.float32(0.4), np.float32(0.1)]
    check("CombinedNonMaxSuppression", given)


@settings(deadline=None, max_examples=examples(30, 60))
@given(st.integers(1, 30), st.integers(0, 12), st.integers(0, 10), st.integers(0, 10), st.integers(0, 2**31))
def test_any_crowd(count, size, iou, least, seed):
    boxes, scores = crowd(count, seed)
    boxes = np.round(boxes * 8) / 8  # overlaps that are equal, and thresholds that are met exactly
    given, attrs = arguments("NonMaxSuppressionV4", boxes, scores, size, iou / 10, least / 10 - 0.2)
    check("NonMaxSuppressionV4", given, {**attrs, **PADDED})
