"""Reductions over axes, arg-reductions, and running sums, products and log-sum-exps."""

import numpy as np
import pytest

from msplit.engines.cuda.ir.node import Unsupported
from tests.campaign import sampled

from .harness import BFLOAT16, FLOATS, check, run_lowering, run_tensorflow, values

pytestmark = pytest.mark.tf

REDUCTIONS = ["Sum", "Mean", "Max", "Min", "Prod", "EuclideanNorm"]
CASES = [((3, 4), [0]), ((3, 4), [-1]), ((3, 4), [0, 1]), ((2, 3, 4), [0, 2]), ((2, 3, 4), [1]), ((2, 3, 4), [-1, 0])]
CASES += [((3, 4), []), ((), []), ((1, 1), [1]), ((2, 3, 4, 2), [1, 2])]


def _axes(axes, dtype="int32"):
    return np.array(axes, dtype)


@pytest.mark.parametrize("op", REDUCTIONS)
@pytest.mark.parametrize("keep_dims", [False, True])
@pytest.mark.parametrize("dtype", [*FLOATS, "float64"], ids=str)
def test_reductions_of_floats(op, keep_dims, dtype):
    for shape, axes in CASES:
        check(op, [values(shape, dtype), _axes(axes)], {"keep_dims": keep_dims})


@pytest.mark.parametrize("op", REDUCTIONS)
@pytest.mark.parametrize("dtype", ["int8", "int32", "int64", "uint8"])
def test_reductions_of_integers_keep_their_dtype(op, dtype):
    low, high = (-3, 3) if op == "EuclideanNorm" else (-100, 100)
    for shape, axes in CASES:
        check(op, [values(shape, dtype, low=low, high=high), _axes(axes)])


@pytest.mark.parametrize("op", ["Sum", "Mean", "Prod"])
def test_reductions_of_complex_numbers(op):
    check(op, [values((3, 4), "complex64"), _axes([0])], {"keep_dims": True})


@pytest.mark.parametrize("op", ["All", "Any"])
@pytest.mark.parametrize("keep_dims", [False, True])
def test_logical_reductions(op, keep_dims):
    for shape, axes in [*CASES, ((0, 3), [0]), ((2, 0), [1])]:
        check(op, [values(shape, bool), _axes(axes)], {"keep_dims": keep_dims})


@pytest.mark.parametrize("op", REDUCTIONS)
def test_axes_may_be_int64_or_a_scalar(op):
    check(op, [values((3, 4)), _axes([1, 0], "int64")])
    check(op, [values((3, 4)), np.int32(1)])


@pytest.mark.parametrize("op", REDUCTIONS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "int32"])
@pytest.mark.parametrize("keep_dims", [False, True])
def test_reductions_of_nothing(op, dtype, keep_dims):
    for shape, axes in [((0, 3), [0]), ((0,), [0]), ((2, 0, 3), [1, 2]), ((0, 3), [1]), ((0, 3), [])]:
        check(op, [values(shape, dtype), _axes(axes)], {"keep_dims": keep_dims})


@pytest.mark.parametrize("op", REDUCTIONS)
def test_nan_and_infinity(op):
    array = np.array([[1, np.nan, 2], [np.inf, 1, -np.inf], [np.inf, 2, 3], [-np.inf, np.nan, 1]], np.float32)
    for axes in ([0], [1], [0, 1]):
        check(op, [array, _axes(axes)])


def test_narrow_floats_are_summed_in_a_wider_one():
    for dtype in (np.float16, BFLOAT16):
        (result,) = check("Sum", [np.ones(5000, dtype), _axes([0])])
        assert abs(result.item() - 5000) <= 16


def test_the_mean_of_integers_does_not_wrap_around():
    (result,) = check("Mean", [np.full(4, 2**30, np.int32), _axes([0])])
    assert result.item() == 2**30


def test_the_mean_of_integers_is_rounded_towards_zero():
    (result,) = check("Mean", [np.array([[-3, -4], [3, 4]], np.int32), _axes([1])])
    assert result.tolist() == [-3, 3]


@pytest.mark.parametrize("axes", [[2], [-3], [0, 0], [1, -1]])
def test_wrong_axes_are_refused(axes):
    with pytest.raises(Unsupported, match="axis"):
        run_lowering("Sum", [values((3, 4)), _axes(axes)])


@pytest.mark.parametrize("op", ["ArgMax", "ArgMin"])
@pytest.mark.parametrize("dtype", [*FLOATS, "float64", "int8", "int32", "int64", "uint8", "bool"], ids=str)
def test_positions_of_extremes(op, dtype):
    for shape, axis in [((5,), 0), ((3, 4), 0), ((3, 4), -1), ((2, 3, 4), 1), ((0, 3), 1), ((1, 1), 0)]:
        array = values(shape, dtype, low=-3, high=3)
        check(op, [array, np.int32(axis)])
        check(op, [array, np.int64(axis)], {"output_type": "int32"})


@pytest.mark.parametrize("op", ["ArgMax", "ArgMin"])
def test_the_first_of_equal_extremes_wins(op):
    array = values((4, 300), "int32", low=0, high=3)
    check(op, [array, np.int32(1)])
    check(op, [array.astype(np.float32), np.int32(1)])


@pytest.mark.parametrize("op", ["ArgMax", "ArgMin"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_nan_never_wins(op, dtype):
    nan, inf = np.nan, np.inf
    rows = [
        [nan, 1, 3],
        [1, nan, 3],
        [nan, nan, nan],
        [inf, nan, 1],
        [-inf, -inf, nan],
        [nan, -inf, inf],
        [-inf, 0, inf],
    ]
    limits = [[-inf, float(np.finfo(np.float16).min), nan], [nan, inf, inf], [inf, inf, inf]]
    check(op, [np.array(rows + limits, dtype), np.int32(1)])


def test_no_extreme_of_nothing():
    array = values((2, 0))
    with pytest.raises(Exception, match="empty"):
        run_tensorflow("ArgMax", [array, np.int32(1)])
    with pytest.raises(Unsupported, match="empty"):
        run_lowering("ArgMax", [array, np.int32(1)])


CASES_SCAN = [((5,), 0), ((3, 4), 0), ((3, 4), -1), ((2, 3, 4), 1), ((1,), 0), ((0, 3), 0), ((2, 0), 1)]
DIRECTIONS = [{"exclusive": exclusive, "reverse": reverse} for exclusive in (False, True) for reverse in (False, True)]


@sampled(
    24, op=["Cumsum", "Cumprod"], dtype=[*FLOATS, "float64", "int8", "int32", "int64", "complex64"], attrs=DIRECTIONS
)
def test_running_sums_and_products(op, dtype, attrs):
    for shape, axis in CASES_SCAN:
        check(
            op, [values(shape, dtype, low=-9, high=9), np.int32(axis)], attrs, rtol=3e-2 if dtype == "float16" else None
        )


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("attrs", DIRECTIONS, ids=str)
def test_running_logsumexp(dtype, attrs):
    for shape, axis in CASES_SCAN:
        check("CumulativeLogsumexp", [values(shape, dtype, low=-9, high=9), np.int64(axis)], attrs, rtol=1e-2)


@pytest.mark.parametrize("op", ["Cumsum", "Cumprod"])
def test_an_exclusive_sum_survives_infinity(op):
    array = np.array([1, np.inf, 2, 3], np.float32)
    (result,) = check(op, [array, np.int32(0)], {"exclusive": True})
    assert result[:2].isfinite().all()


@pytest.mark.parametrize("op", ["Cumsum", "Cumprod"])
def test_a_scalar_has_no_axis(op):
    with pytest.raises(Unsupported, match="rank 0"):
        run_lowering(op, [np.float32(3), np.int32(0)])


@pytest.mark.parametrize("dtype", [*FLOATS, "float64"], ids=str)
@pytest.mark.parametrize("attrs", [{}, {"exclusive": True}, {"reverse": True}], ids=str)
def test_nan_in_a_running_logarithm_counts_as_the_sum_so_far(dtype, attrs):
    array = values((4, 9), dtype)
    array[0, [0, 3, 4, 8]], array[1], array[2, 5:] = np.nan, np.nan, -np.inf
    array[3, 2] = np.inf
    check("CumulativeLogsumexp", [array, np.int32(1)], attrs)
