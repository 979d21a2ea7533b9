import numpy as np
import pytest

from msplit.engines.cuda.ir.node import Unsupported

from .harness import check, run_lowering, values

pytestmark = pytest.mark.tf


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
