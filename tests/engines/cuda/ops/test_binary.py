import numpy as np
import pytest

from .harness import BFLOAT16, FLOATS, check, values

pytestmark = pytest.mark.tf

PAIRS = [
    ((), ()),
    ((3, 4), ()),
    ((), (2,)),
    ((3, 4), (4,)),
    ((3, 1), (1, 4)),
    ((2, 1, 3), (5, 1)),
    ((0, 3), (1, 3)),
    ((1,), (0,)),
]
ARITHMETIC = ["Add", "AddV2", "Sub", "Mul", "Maximum", "Minimum", "SquaredDifference"]
DIVISIONS = ["Div", "RealDiv", "FloorDiv", "FloorMod", "Mod", "TruncateMod", "DivNoNan"]
WIDE_ONLY = ["Mod", "TruncateMod"]  # no CPU kernel for narrow floats
GUARDED = ["MulNoNan", "Xdivy", "Xlogy", "Xlog1py"]
SPECIAL = np.array([np.nan, np.inf, -np.inf, 0.0, 1.0, -1.0, 2.5, -2.5], np.float32)
INTEGERS = ["int8", "int16", "int32", "int64", "uint8"]


@pytest.mark.parametrize("op", ARITHMETIC)
@pytest.mark.parametrize("dtype", [*FLOATS, "float64"], ids=str)
def test_arithmetic(op, dtype):
    for left, right in PAIRS:
        check(op, [values(left, dtype, seed=1), values(right, dtype, seed=2)])


@pytest.mark.parametrize(
    ("op", "dtype"),
    [(op, dtype) for op in [*DIVISIONS, *GUARDED, "Pow", "Atan2"] for dtype in FLOATS if op not in WIDE_ONLY]
    + [(op, np.dtype(dtype)) for op in WIDE_ONLY for dtype in ("float32", "float64")],
    ids=str,
)
def test_divisions_and_powers(op, dtype):
    for left, right in PAIRS:
        check(op, [values(left, dtype, seed=1, low=0.5, high=4), values(right, dtype, seed=2, low=0.5, high=2)])


@pytest.mark.parametrize("op", ["FloorDiv", "FloorMod", "Mod", "TruncateMod", "Div", "RealDiv", "DivNoNan"])
def test_divisions_of_either_sign(op):
    left = np.array([-7.5, 7.5, -7.5, 7.5, 0, -8, 6, -6, -0.25], np.float32)
    right = np.array([2, 2, -2, -2, 3, 3, -3, 3, 5], np.float32)
    check(op, [left, right])


@pytest.mark.parametrize("op", [*ARITHMETIC, *DIVISIONS, *GUARDED, "Pow", "Atan2"])
def test_special_values(op):
    check(op, [SPECIAL[:, None], SPECIAL[None, :]], rtol=1e-4)


@pytest.mark.parametrize("op", ["Maximum", "Minimum"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_nan_wins_over_any_number(op, dtype):
    (result,) = check(op, [np.array([np.nan, 1, np.nan], dtype), np.array([1, np.nan, np.nan], dtype)])
    assert result.isnan().all()


def test_floor_division_is_the_floor_of_the_rounded_quotient():
    (result,) = check("FloorDiv", [np.float64(1.0), np.float64(0.1)])
    assert result.item() == 10.0


@pytest.mark.parametrize("op", ["AddV2", "Sub", "Mul", "Maximum", "Minimum", "BitwiseAnd", "BitwiseOr", "BitwiseXor"])
@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_wrap_around(op, dtype):
    for left, right in PAIRS:
        check(op, [values(left, dtype, seed=1, low=-128, high=127), values(right, dtype, seed=2, low=-128, high=127)])


@pytest.mark.parametrize("op", ["Div", "FloorDiv", "FloorMod", "TruncateDiv", "TruncateMod", "Mod"])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_integer_divisions(op, dtype):
    left = np.array([-7, 7, -7, 7, 0, -8, 2**31 - 1, -(2**31)], dtype)
    right = np.array([2, 2, -2, -2, 3, 3, 10, 10], dtype)
    check(op, [left, right])
    check(op, [left[:, None], right[None, :]])


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_integer_powers(dtype):
    check("Pow", [np.array([2, -2, 0, 3, 7], dtype), np.array([3, 3, 0, 0, 11], dtype)])


@pytest.mark.parametrize("op", ["LeftShift", "RightShift"])
@pytest.mark.parametrize("dtype", INTEGERS)
def test_shifts_stay_within_the_word(op, dtype):
    left = values((5, 6), dtype, low=-100, high=100)
    check(op, [left, np.broadcast_to(np.array([0, 1, 3, 7, 100, 12], dtype), (5, 6))])
    if np.dtype(dtype).kind == "i":
        check(op, [left, np.full((5, 6), -1, dtype)])


@pytest.mark.parametrize(
    "op", ["AddV2", "Sub", "Mul", "RealDiv", "Pow", "SquaredDifference", "DivNoNan", "MulNoNan", "Xdivy"]
)
def test_complex_numbers(op):
    check(op, [values((3, 4), np.complex64, seed=1), values((4,), np.complex64, seed=2)], rtol=1e-4)


@pytest.mark.parametrize("op", ["Igamma", "Igammac", "Zeta", "NextAfter"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_special_functions_of_two(op, dtype):
    check(op, [values((3, 4), dtype, low=1.2, high=5, seed=1), values((4,), dtype, low=0.3, high=5, seed=2)], rtol=1e-4)


@pytest.mark.parametrize("count", [1, 2, 4, 5, 9])
@pytest.mark.parametrize("dtype", [*FLOATS, np.dtype(np.int32), np.dtype(np.int8)], ids=str)
def test_sums_of_several(count, dtype):
    inputs = [values((3, 4), dtype, seed=seed, low=-60, high=60) for seed in range(count)]
    check("AddN", inputs, atol=1.0 if dtype == BFLOAT16 else 0.2 if dtype == np.float16 else 1e-4)


@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_accumulate(dtype):
    inputs = [values((2, 3), dtype, seed=seed) for seed in range(6)]
    # TensorFlow rewrites this op before it runs and has no kernel of its own.
    check("AccumulateNV2", inputs, {"shape": (2, 3)}, expected=[np.sum(inputs, axis=0, dtype=dtype)])


def test_cross():
    check("Cross", [values((4, 3), seed=1), values((4, 3), seed=2)])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_polygamma(dtype):
    orders = np.array([[0], [1], [2], [5], [1.5], [-1]], dtype)
    numbers = np.array([0.3, 1, 2.5, 9], dtype)
    check("Polygamma", [orders, numbers], rtol=1e-5)
