import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from msplit.engines.cuda.ir.dtypes import to_numpy
from msplit.engines.cuda.ir.lowering import table
from msplit.engines.cuda.ir.node import Node, Unsupported
from msplit.engines.cuda.ops.embedding import IN_ORDER, segment_sum, stacked_segment_sum
from tests.campaign import sampled

from .harness import FLOATS, check, run_lowering, values

pytestmark = pytest.mark.tf

SORTED = ["SegmentSum", "SegmentMean", "SegmentProd", "SegmentMax", "SegmentMin"]
UNSORTED = ["UnsortedSegmentSum", "UnsortedSegmentProd", "UnsortedSegmentMax", "UnsortedSegmentMin"]
SPARSE = ["SparseSegmentSum", "SparseSegmentMean", "SparseSegmentSqrtN"]
DTYPES = [*FLOATS, "float64", "int32", "int64"]


@sampled(20, op=SORTED, dtype=DTYPES, index=["int32", "int64"])
def test_rising_ids(op, dtype, index):
    for ids in ([0, 0, 1, 1, 1], [0, 2, 2, 3, 7], [1, 1, 1, 1, 1], [0, 1, 2, 3, 4]):
        for inner in [(), (3,), (2, 3)]:
            check(op, [values((5, *inner), dtype, low=-5, high=5), np.array(ids, index)])
    check(op, [values((0, 3), dtype), np.array([], index)])


@sampled(24, op=UNSORTED, dtype=DTYPES, index=["int32", "int64"])
def test_ids_in_any_order(op, dtype, index):
    for ids in ([3, 0, 3, 1, 0], [0, 0, 0, 0, 0], [-1, 2, -5, 2, 1]):
        for inner in [(), (3,), (2, 3)]:
            data = values((5, *inner), dtype, low=-5, high=5)
            check(op, [data, np.array(ids, index), np.int32(4)])
    check(op, [values((2, 3, 4), dtype), np.array([[0, 1, 1], [2, 0, -1]], index), np.int64(3)])
    check(op, [values((0, 3), dtype), np.array([], index), np.int32(2)])
    check(op, [values((0, 3), dtype), np.array([], index), np.int32(0)])


@sampled(8, op=SPARSE, dtype=["float32", "float64"], index=["int32", "int64"])
@pytest.mark.parametrize("ids", [[0, 0, 1, 1, 1], [0, 2, 2, 3, 3], [1, 1, 1, 1, 1]], ids=str)
def test_gradients_of_rows_by_segment(op, dtype, index, ids):
    for inner in [(4,), (2, 3)]:
        indices, grad = np.array([3, 0, 3, 5, 1], index), values((4, *inner), dtype)
        check(f"{op}Grad", [grad, indices, np.array(ids, "int32"), np.int32(7)])
        check(f"{op}GradV2", [grad, indices, np.array(ids, "int32"), np.int32(7)])


@pytest.mark.parametrize("op", SPARSE)
def test_gradients_of_rows_of_no_segment_are_passed_over(op):
    grad, indices, ids = values((2, 3)), np.array([3, 0, -1, 2]), np.array([0, -1, 0, 1])
    (found,) = run_lowering(f"{op}Grad", [grad, indices, ids, np.int32(4)])
    (expected,) = run_lowering(f"{op}Grad", [grad, np.array([3, 4, 2]), np.array([0, 0, 1]), np.int32(4)])
    np.testing.assert_array_equal(to_numpy(found), to_numpy(expected))


def test_ids_behind_the_last_segment_are_passed_over():
    data, ids = values((4, 3)), np.array([0, 2, 1, 7], np.int32)
    (result,) = run_lowering("UnsortedSegmentSum", [data, ids, np.int32(2)])
    np.testing.assert_array_equal(to_numpy(result), data[[0, 2]])


def test_ids_must_fit_the_data():
    with pytest.raises(Unsupported, match="segment ids"):
        run_lowering("UnsortedSegmentSum", [values((4, 3)), np.array([0, 1, 2]), np.int32(3)])


@pytest.mark.parametrize("op", SPARSE)
@pytest.mark.parametrize("dtype", [*FLOATS, "float64"], ids=str)
@pytest.mark.parametrize("index", ["int32", "int64"])
def test_rows_by_segment(op, dtype, index):
    indices = np.array([3, 0, 3, 5, 1], index)
    for inner in [(4,), (2, 3)]:
        data = values((6, *inner), dtype)
        for ids in ([0, 0, 1, 1, 1], [0, 2, 2, 3, 6], [1, 1, 1, 1, 1]):
            check(op, [data, indices, np.array(ids, "int32")])
            check(f"{op}WithNumSegments", [data, indices, np.array(ids, index), np.int32(9)])
    none = [data, np.array([], index), np.array([], "int32")]
    check(op, none)
    check(f"{op}WithNumSegments", [*none, np.int64(3)])


@given(st.data())
def test_segments_of_several_members_are_each_members_own(data):
    members, count, rows = (data.draw(st.integers(1, 4)) for _ in range(3))
    width = data.draw(st.sampled_from([(), (2,), (2, 3)]))
    ids = data.draw(arrays(np.int32, (members, rows), elements=st.integers(-2, count + 1)))
    values = data.draw(arrays(np.float32, (members, rows, *width), elements=st.integers(-9, 9)))
    values[ids < 0] = np.nan  # what is passed over leaves nothing
    one, all_of = (Node("x", op, {"T": "float32"}) for op in ("UnsortedSegmentSum", "_StackedSegmentSum"))
    got = stacked_segment_sum(all_of, torch.from_numpy(values), torch.from_numpy(ids), np.int32(count))
    for member in range(members):
        wanted = segment_sum(one, torch.from_numpy(values[member]), torch.from_numpy(ids[member]), np.int32(count))
        np.testing.assert_array_equal(got[member], wanted)


def test_rows_that_are_added_in_order():
    data, ids = values((6, 3)), np.array([3, -1, 3, 1, 9, 3], np.int32)
    for op, inputs in (("UnsortedSegmentSum", [data, ids]), ("_StackedSegmentSum", [data[None], ids[None]])):
        lowering, tensors = table()[op].function, [torch.from_numpy(one) for one in inputs]
        plain = lowering(Node("node", op, {}, False), *tensors, np.int32(4))
        ordered = lowering(Node("node", op, {IN_ORDER: True}, False), *tensors, np.int32(4))
        assert torch.equal(plain, ordered)
