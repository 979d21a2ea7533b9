"""Order and groups: the largest elements, sorted positions, partitions, stitches, distinct elements, counts."""

import functools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from msplit.engines.cuda.ir.dtypes import to_numpy
from msplit.engines.cuda.ir.node import Unsupported
from msplit.engines.cuda.ops.reduce import search_boundaries
from tests.kept import kept

from .harness import FLOATS, check, run_lowering, run_tensorflow, values

pytestmark = pytest.mark.tf


@pytest.mark.parametrize("dtype", [*FLOATS, "float64", "int8", "int32", "int64", "uint8"], ids=str)
def test_the_largest(dtype):
    for shape in [(9,), (3, 9), (2, 3, 9), (0, 9)]:
        for k in (0, 1, 4, 9):
            array = values(shape, dtype, low=-9, high=9)
            check("TopKV2", [array, np.int32(k)])
            # TensorFlow's own kernel of the older form can not be found by the runtime.
            check("TopK", [array], {"k": k}, expected=run_tensorflow("TopKV2", [array, np.int32(k)]))


def test_of_equal_elements_the_first_comes_first():
    array = values((5, 1000), "int32", low=0, high=4)
    check("TopKV2", [array, np.int32(300)])
    check("TopKV2", [array.astype(np.float32), np.int32(300)])
    check("TopKV2", [np.array([np.inf, 1, np.inf, -np.inf, -np.inf], np.float32), np.int32(5)])


def test_unsorted_means_any_order():
    array = values((3, 9))
    largest, positions = run_lowering("TopKV2", [array, np.int32(4)], {"sorted": False})
    largest, positions = to_numpy(largest), to_numpy(positions)
    np.testing.assert_array_equal(np.take_along_axis(array, positions, -1), largest)
    np.testing.assert_array_equal(np.sort(largest)[:, ::-1], -np.sort(-array)[:, :4])


@pytest.mark.parametrize("index_type", ["int32", "int64"])
def test_dtype_of_positions(index_type):
    check("TopKV2", [values((3, 9)), np.int32(2)], {"index_type": index_type})


def test_more_than_there_are():
    with pytest.raises(Unsupported, match="the 4 largest"):
        run_lowering("TopKV2", [values((3,)), np.int32(4)])


def test_nothing_is_among_no_classes():
    (result,) = run_lowering("InTopKV2", [values((3, 0)), np.zeros(3, np.int32), np.int32(1)])
    assert result.tolist() == [False] * 3


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_nth_element(reverse, dtype):
    for n in (0, 3, 8):
        check("NthElement", [values((3, 9), dtype, low=-50, high=50), np.int32(n)], {"reverse": reverse})


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_in_the_largest(dtype):
    predictions = values((40, 6), seed=1).round(1)
    targets = np.random.default_rng(2).integers(0, 6, 40).astype(dtype)
    for k in (1, 2, 5, 6, 9):
        check("InTopK", [predictions, targets], {"k": k})
        check("InTopKV2", [predictions, targets, np.array(k, dtype)])


def test_in_the_largest_at_the_edges():
    nan, inf = np.nan, np.inf
    rows = [
        [1, 2, 2, 3],
        [1, 2, nan, 3],
        [1, 2, inf, 3],
        [1, 2, 3, 4],
        [1, 2, 3, 4],
        [nan, 1, 2, 3],
        [1, 5, inf, 2],
        [9, nan, 1, 2],
    ]
    targets = [2, 1, 2, -1, 4, 0, 1, 0]
    for k in (1, 2, 3):
        check("InTopKV2", [np.array(rows, np.float32), np.array(targets, np.int32), np.int32(k)])


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64"])
def test_buckets(dtype):
    boundaries = (-1.5, 0.0, 0.25, 2.0, 2.0, 7.5)
    for shape in [(), (0,), (3, 40)]:
        check("Bucketize", [values(shape, dtype, low=-9, high=9)], {"boundaries": boundaries})
    check("Bucketize", [np.array([-1.5, 0, 0.25, 2, 7.5, 8]).astype(dtype)], {"boundaries": boundaries})
    check("Bucketize", [values((4,), dtype)], {"boundaries": ()})


@pytest.mark.parametrize("op", ["LowerBound", "UpperBound"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64"])
@pytest.mark.parametrize("out_type", ["int32", "int64"])
def test_bounds(op, dtype, out_type):
    ordered = np.sort(values((3, 20), dtype, low=-5, high=5).round(), axis=-1)
    wanted = values((3, 7), dtype, low=-7, high=7, seed=1).round()
    check(op, [ordered, wanted], {"out_type": out_type})
    check(op, [ordered[:, :1], wanted], {"out_type": out_type})


@kept
def by_xla(op, inputs, attrs):
    """TensorFlow itself has the last axis and maxima only; XLA has them all."""
    import tensorflow as tf

    compiled = tf.function(
        functools.partial(getattr(tf.raw_ops, op.removesuffix(" by XLA")), input=inputs[0], **attrs), jit_compile=True
    )
    return tuple(output.numpy() for output in compiled())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("largest", [True, False])
def test_the_approximately_largest(dtype, largest):
    distinct = (
        np.stack([np.random.default_rng(row).permutation(20) for row in range(6)]).reshape(2, 3, 20).astype(dtype)
    )
    for axis, k in [(-1, 4), (2, 20), (1, 2), (0, 1)]:
        attrs = {"k": k, "reduction_dimension": axis, "is_max_k": largest, "recall_target": 0.9}
        wanted = by_xla("ApproxTopK by XLA", [distinct], attrs)
        # Along the other axes numbers are equal, and TensorFlow takes any of them.
        check("ApproxTopK", [distinct], attrs, expected=wanted, outputs=(0, 1) if axis in (-1, 2) else (0,))


def test_what_a_tpu_would_aggregate_later_is_refused():
    with pytest.raises(Unsupported, match="aggregate_to_topk"):
        run_lowering("ApproxTopK", [values((20,))], {"k": 3, "aggregate_to_topk": False})


def _i(numbers, dtype="int32"):
    return np.array(numbers, dtype)


@pytest.mark.parametrize("dtype", ["float32", "int64", "bool"])
def test_partitions(dtype):
    attrs = {"num_partitions": 3}
    check("DynamicPartition", [values((5, 2), dtype), _i([2, 0, 0, 2, 0])], attrs)
    check("DynamicPartition", [values((2, 3), dtype), _i([[0, 1, 2], [2, 2, 0]])], attrs)
    check("DynamicPartition", [values((2, 3, 4), dtype), _i([1, 1])], attrs)
    check("DynamicPartition", [values((0, 4), dtype), _i([])], attrs)


@pytest.mark.parametrize("op", ["DynamicStitch", "ParallelDynamicStitch"])
@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_stitches(op, dtype):
    indices = [_i([0, 3]), _i([1, 2, 4])]
    data = [values((2, 3), dtype), values((3, 3), dtype, seed=1)]
    check(op, [*indices, *data], {"N": 2, "T": data[0].dtype.name})
    check(op, [_i(2), _i([[0], [1]]), values((), dtype), values((2, 1), dtype)], {"N": 2, "T": data[0].dtype.name})
    check(op, [_i([1, 0]), values((2,), dtype)], {"N": 1, "T": data[0].dtype.name})
    check(op, [_i([]), values((0, 3), dtype)], {"N": 1, "T": data[0].dtype.name})


def test_the_later_tensor_stays():
    inputs = [_i([0, 1]), _i([1, 2]), values((2,)), values((2,), seed=1)]
    check("DynamicStitch", inputs, {"N": 2, "T": "float32"})
    often = np.random.default_rng(3).integers(0, 5, 1000, np.int32)
    check("DynamicStitch", [often, often[:9], values((1000, 3)), values((9, 3), seed=1)], {"N": 2, "T": "float32"})


def test_a_negative_index_is_refused():
    with pytest.raises(IndexError, match="negative"):
        run_lowering("DynamicStitch", [_i([0, -1]), values((2,))], {"N": 1, "T": "float32"})


def test_rows_without_an_index_are_zeros():
    (result,) = run_lowering("DynamicStitch", [_i([0, 3]), values((2,))], {"N": 1, "T": "float32"})
    assert result[1:3].tolist() == [0, 0]


@pytest.mark.parametrize("dtype", ["int32", "int64", "float32", "uint8"])
@pytest.mark.parametrize("out_idx", ["int32", "int64"])
def test_distinct_elements(dtype, out_idx):
    for array in (values((50,), dtype, low=-4, high=9).round(), values((0,), dtype), values((1,), dtype)):
        attrs = {"out_idx": out_idx}
        check("Unique", [array], attrs)
        check("UniqueWithCounts", [array], attrs)
        check("UniqueV2", [array, _i([0], "int64")], attrs)
        check("UniqueWithCountsV2", [array, _i([])], attrs)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_distinct_slices(axis):
    array = values((30, 2), "int32", low=0, high=3)
    array = array if axis == 0 else array.T.copy()
    check("UniqueV2", [array, _i([axis])])
    check("UniqueWithCountsV2", [array, _i([axis])])
    with pytest.raises(Unsupported, match="needs a vector"):
        run_lowering("UniqueV2", [array, _i([])])


@pytest.mark.parametrize("dtype", ["int32", "int64", "float32"])
def test_difference_of_lists(dtype):
    left, right = values((20,), dtype, low=0, high=9).round(), values((5,), dtype, low=0, high=9, seed=1).round()
    check("ListDiff", [left, right])
    check("ListDiff", [left, right[:0]], {"out_idx": "int64"})
    check("ListDiff", [left[:0], right])


@pytest.mark.parametrize("dtype", ["int32", "int64", "float32", "float64"])
def test_counts(dtype):
    numbers = values((30,), "int32", low=0, high=9)
    check("Bincount", [numbers, _i(6), values((30,), dtype)])
    check("Bincount", [numbers, _i(12), values((0,), dtype)])
    check("Bincount", [numbers[:0], _i(3), values((0,), dtype)])


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("index", ["int32", "int64"])
def test_counts_by_row(binary, index):
    attrs = {"binary_output": binary}
    for shape in [(30,), (4, 8)]:
        numbers = values(shape, index, low=0, high=9)
        size = np.array(6, index)
        check("DenseBincount", [numbers, size, np.zeros((0,) if len(shape) == 1 else (0, 0), np.float32)], attrs)
        check("DenseBincount", [numbers, size, values(shape)], attrs)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64"])
@pytest.mark.parametrize("out_type", ["int32", "int64"])
def test_a_histogram_counts_what_lies_outside_in_its_outer_bins(dtype, out_type):
    numbers = values((40, 3), dtype, low=-9, high=9)
    for limits, bins in [((-5, 5), 4), ((0, 1), 1), ((-9, 20), 7)]:
        check("HistogramFixedWidth", [numbers, np.array(limits, dtype), _i(bins)], {"dtype": out_type})
    edges = np.array([0, 1, 2, 3, 4, 5], dtype)
    check("HistogramFixedWidth", [edges, np.array([0, 5], dtype), _i(5)], {"dtype": out_type})
    check("HistogramFixedWidth", [edges[:0], np.array([0, 5], dtype), _i(5)], {"dtype": out_type})


@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 6), st.sampled_from(["int32", "float32", "float64"]))
def test_rows_of_boundaries_are_each_for_their_own_values(rows, count, boundaries, dtype):
    generator = np.random.default_rng(rows * 100 + count * 10 + boundaries)
    edges = np.sort(generator.integers(-5, 5, (rows, boundaries)), axis=1).astype(np.float32)
    x = generator.integers(-6, 6, (rows, count, 2)).astype(dtype)
    found = search_boundaries(None, torch.from_numpy(x), torch.from_numpy(edges)).numpy()
    expected = [np.searchsorted(row, one, side="right") for row, one in zip(edges, x, strict=True)]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("op", ["LowerBound", "UpperBound"])
def test_nothing_is_below_nan(op):
    check(op, [np.arange(6, dtype=np.float32)[None], np.array([[np.nan, 2, np.inf, -np.inf]], np.float32)])
