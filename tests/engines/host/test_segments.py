"""Host ops on segments, counts, ranges and ragged rows beside TensorFlow's kernels."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.campaign import examples
from tests.engines.host.kernels import REFUSED, agree, refuses, texts

pytestmark = pytest.mark.tf

SPECIAL = [0.0, -0.0, 1.5, -2.25, 3e38, -3e38, np.inf, -np.inf, np.nan]
TYPES = pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.int64])


def numbers(rng, shape, dtype):
    """Some numbers of a type; one in four of floats is special."""
    if np.dtype(dtype).kind == "i":
        return rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, shape, dtype)
    made = rng.standard_normal(shape).astype(dtype)
    return np.where(rng.random(shape) < 0.25, rng.choice(np.array(SPECIAL, dtype), shape), made)


@TYPES
@pytest.mark.parametrize("inner", [(), (1,), (3,), (2, 5), (17,), (0,)])
def test_segments_in_any_order(dtype, inner):
    rng = np.random.default_rng(len(inner))
    for op in ("Sum", "Prod", "Max", "Min"):
        for size in (0, 1, 40):
            data, ids = numbers(rng, (size, *inner), dtype), rng.integers(-1, 5, size, np.int32)
            agree(f"UnsortedSegment{op}", data=data, segment_ids=ids, num_segments=np.array(6))
        data, ids = numbers(rng, (4, 3, *inner), dtype), rng.integers(-1, 5, (4, 3))
        agree(f"UnsortedSegment{op}", data=data, segment_ids=ids, num_segments=np.array(5, np.int32))


@TYPES
@pytest.mark.parametrize("inner", [(), (1,), (3,), (2, 5), (19,), (0,)])
def test_segments_that_rise(dtype, inner):
    """Segments of one to forty rows, some without: from sixteen on TensorFlow adds in another order."""
    rng = np.random.default_rng(len(inner))
    ids = np.repeat(np.arange(10), [1, 0, 2, 15, 16, 17, 0, 18, 19, 40])
    for op in ("Sum", "Mean", "Prod", "Max", "Min"):
        if op == "Mean" and np.dtype(dtype).kind == "i":
            continue
        for special in (False, True):
            data = numbers(rng, (len(ids), *inner), dtype)
            if not special and np.dtype(dtype).kind == "f":
                data = rng.standard_normal(data.shape).astype(dtype)
            agree(f"Segment{op}", data=data, segment_ids=ids)
        agree(f"Segment{op}", data=data[:0], segment_ids=ids[:0])


def test_segments_that_are_none_are_refused():
    rows = np.ones((2, 3), np.float32)
    for ids in ([1, 0], [-1, 0], [0]):
        assert agree("SegmentSum", data=rows, segment_ids=np.array(ids)) == REFUSED
    for ids, count in (([0, 2], 2), ([0, 2**62], 2)):
        given = {"data": rows, "segment_ids": np.array(ids)}
        assert agree("UnsortedSegmentSum", **given, num_segments=np.array(count)) == REFUSED
    assert refuses("UnsortedSegmentSum", rows, np.array([0, 1, 1]), np.array(2), T="float32")


@settings(max_examples=examples(30, 120), deadline=None)
@given(st.lists(st.lists(st.integers(0, 6), max_size=4), max_size=4), st.integers(0, 5), st.data())
def test_counts(rows, size, data):
    flat = np.array([number for row in rows for number in row], data.draw(st.sampled_from([np.int32, np.int64])))
    dtype = data.draw(st.sampled_from([np.int32, np.int64, np.float32, np.float64]))
    binary = data.draw(st.booleans())
    weighted = not binary and data.draw(st.booleans())
    weights = (np.arange(len(flat)) - 2).astype(dtype) if weighted and len(flat) else np.zeros(0, dtype)
    most = np.array(size, flat.dtype)
    agree("DenseBincount", input=flat, size=most, weights=weights, binary_output=binary)
    splits = np.cumsum([0, *map(len, rows)])
    agree("RaggedBincount", splits=splits, values=flat, size=most, weights=weights, binary_output=binary)
    if len(flat) % 2 == 0:
        pairs = {"input": flat.reshape(-1, 2), "weights": weights.reshape(-1, 2) if weights.size else weights}
        agree("DenseBincount", **pairs, size=most, binary_output=binary)
    narrow = {"arr": flat.astype(np.int32), "size": most.astype(np.int32)}
    agree("Bincount", **narrow, weights=weights)


def test_a_single_number_is_counted():
    for number in (1, 5):
        agree("DenseBincount", input=np.array(number), size=np.array(3), weights=np.zeros(0, np.float32))


def test_numbers_that_can_not_be_counted():
    some = {"size": np.array(3), "weights": np.zeros(0, np.float32)}
    for op, more in (("DenseBincount", {}), ("RaggedBincount", {"splits": np.array([0, 1, 2])})):
        name = "values" if more else "input"
        assert agree(op, **more, **{name: np.array([1, -1])}, **some) == REFUSED
    for splits in ([0, 3], [0, 1], [1, 2], [0, 2, 1, 2]):
        given = {"splits": np.array(splits), "values": np.array([1, 2])}
        assert agree("RaggedBincount", **given, **some, stricter=True) == REFUSED


BOUNDS = st.integers(-6, 6)


@settings(max_examples=examples(40, 160), deadline=None)
@given(st.lists(st.tuples(BOUNDS, BOUNDS, st.integers(-3, 3)), max_size=4), st.data())
def test_ranges(rows, data):
    dtype = data.draw(st.sampled_from([np.int32, np.int64]))
    for start, limit, delta in rows:
        if not delta or (start != limit and (limit > start) != (delta > 0)):
            assert refuses("Range", *(np.array(one, dtype) for one in (start, limit, delta)), Tidx=np.dtype(dtype).name)
            continue
        agree("Range", start=np.array(start, dtype), limit=np.array(limit, dtype), delta=np.array(delta, dtype))
    columns = np.array(rows, dtype).reshape(-1, 3).T
    given = dict(zip(("starts", "limits", "deltas"), columns, strict=True))
    for name in data.draw(st.sets(st.sampled_from([*given]))):
        given[name] = np.array(data.draw(st.integers(1, 3)), dtype)
    agree("RaggedRange", **given, Tsplits=data.draw(st.sampled_from([np.int32, np.int64])))


@settings(max_examples=examples(40, 160), deadline=None)
@given(st.integers(1, 3), st.sampled_from([(3,), (), (2, 2), (0,), (1, 2, 2)]), st.booleans(), st.data())
def test_rows_of_ragged_tensors(nested, shape, strings, data):
    dtype, splits = data.draw(st.sampled_from([np.int32, np.int64])), []
    size = data.draw(st.integers(1, 4))
    for _ in range(nested):
        counts = data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
        splits.append(np.cumsum([0, *counts], dtype=dtype))
        size = sum(counts)
    values = texts(*(b"w%d" % number for number in range(size))) if strings else np.arange(2.0 * size).reshape(size, 2)
    indices = np.array(
        data.draw(st.lists(st.integers(0, len(splits[0]) - 1 - (shape != (3,))), min_size=9, max_size=9))
    )
    indices = np.resize(np.minimum(indices, len(splits[0]) - 1 if shape == (3,) else len(splits[0]) - 2), shape)
    agree(
        "RaggedGather",
        params_nested_splits=splits,
        params_dense_values=values,
        indices=indices,
        OUTPUT_RAGGED_RANK=nested + len(shape) - 1,
    )


def test_splits_that_are_none_can_not_be_gathered():
    for splits in ([0, 3], [0, 1], [1, 2], [0, 2, 1, 2], [0, -1, 2]):
        given = {"params_nested_splits": [np.array(splits)], "params_dense_values": np.array([1, 2])}
        assert agree("RaggedGather", **given, indices=np.array([0]), OUTPUT_RAGGED_RANK=1, stricter=True) == REFUSED


@TYPES
def test_sums_up_to_each_element(dtype):
    rng = np.random.default_rng(0)
    for shape, axis in (((7,), 0), ((3, 4), 1), ((3, 4), -2), ((2, 3, 2), 1), ((0, 3), 0), ((3, 0), 1)):
        for exclusive in (False, True):
            for reverse in (False, True):
                x = numbers(rng, shape, dtype)
                agree("Cumsum", x=x, axis=np.array(axis), exclusive=exclusive, reverse=reverse)


@TYPES
def test_largest_and_smallest(dtype):
    rng = np.random.default_rng(0)
    for op in ("Max", "Min"):
        for shape, axes in (((7,), [0]), ((3, 40), [1]), ((3, 4), [0]), ((2, 3, 4), [0, 2]), ((0, 3), [0]), ((), [])):
            for keep in (False, True):
                agree(op, input=numbers(rng, shape, dtype), axis=np.array(axes, np.int32), keep_dims=keep)


@TYPES
def test_arithmetic_of_numbers_of_all_kinds(dtype):
    rng = np.random.default_rng(0)
    x, y = numbers(rng, (5, 9), dtype), numbers(rng, (9,), dtype)
    y[:2] = 0, -1
    for op in ("Maximum", "Minimum"):
        agree(op, x=x, y=y)
        agree(op, x=y, y=x[0, 0])
    agree("Neg", x=x)
    agree("Square", x=x)
    if np.dtype(dtype).kind == "f":
        agree("Sqrt", x=x)
        for op in ("RealDiv", "DivNoNan"):
            agree(op, x=x, y=np.where(np.abs(y) > 1e38, 2, y))  # TensorFlow has no numbers as small as 1e-39
            agree(op, x=y, y=np.where(np.abs(x) > 1e38, 0, x))
        return
    for op in ("FloorDiv", "FloorMod"):
        assert agree(op, x=x, y=y) == REFUSED
        agree(op, x=x, y=y[1:2])
        agree(op, x=x[:0], y=y)
        some = rng.integers(-5, 6, 40).astype(dtype)
        agree(op, x=some, y=np.where(some[::-1] == 0, 1, some[::-1]))


@pytest.mark.parametrize("x", [texts(b"a", b"b", b""), np.arange(3)], ids=["strings", "numbers"])
def test_copies_along_axes(x):
    for shape in ([3], [2, 3], [0, 3], [2, 2, 3]):
        agree("BroadcastTo", input=x, shape=np.array(shape))
    agree("BroadcastTo", input=x.reshape(3, 1), shape=np.array([3, 2]))
    agree("BroadcastTo", input=x[:1], shape=np.array([2, 4]))
    agree("BroadcastTo", input=x[:1], shape=np.array([0]))
    for shape in ([2], [-1, 3], [3, 1], []):
        assert refuses("BroadcastTo", x, np.array(shape, np.int64))
