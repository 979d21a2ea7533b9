"""Functions element by element, of one tensor, of two with NumPy's broadcasting, and choice between tensors."""

import numpy as np
import pytest

from .harness import BFLOAT16, FLOATS, check, values

pytestmark = pytest.mark.tf

SHAPES = [(), (0,), (1,), (3, 4), (2, 3, 4)]
SPECIAL = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.5, -2.5, 3.5, 80.0, -80.0, 1e-6, -1e-6])
INTEGERS = ["int8", "int16", "int32", "int64", "uint8"]

# Where each function is tried: all of them get the special values in float32 on top.
REAL_LINE = ["Abs", "Asinh", "Atan", "Ceil", "Cos", "Erf", "Erfc", "Exp", "Expm1", "Floor", "Neg", "Round", "Sigmoid"]
REAL_LINE += [
    "Sign",
    "Sin",
    "Square",
    "Tanh",
    "Cosh",
    "Sinh",
    "Tan",
    "IsNan",
    "IsInf",
    "IsFinite",
    "OnesLike",
    "ZerosLike",
]
POSITIVE = ["Log", "Log1p", "Lgamma", "Reciprocal", "Inv", "Rsqrt", "Sqrt", "Digamma"]
NO_BFLOAT16 = ["Lgamma", "Digamma"]
WITHIN_ONE = ["Acos", "Asin", "Atanh"]
SINGLE = ["Erfinv", "Ndtri"]  # float32 and float64 only
BESSEL = ["BesselI0", "BesselI1", "BesselI0e", "BesselI1e", "BesselK0", "BesselK1", "BesselK0e", "BesselK1e"]
BESSEL += ["BesselJ0", "BesselJ1", "BesselY0", "BesselY1"]


@pytest.mark.parametrize("op", REAL_LINE)
@pytest.mark.parametrize("dtype", [*FLOATS, "float64"], ids=str)
def test_functions_of_any_number(op, dtype):
    for shape in SHAPES:
        check(op, [values(shape, dtype, low=-3, high=3)])


@pytest.mark.parametrize(
    ("op", "dtype"),
    [(op, dtype) for op in POSITIVE for dtype in FLOATS if not (op in NO_BFLOAT16 and dtype == BFLOAT16)],
    ids=str,
)
def test_functions_of_positive_numbers(op, dtype):
    for shape in SHAPES:
        check(op, [values(shape, dtype, low=0.2, high=5)], atol=2e-2 if np.dtype(dtype).itemsize == 2 else 1e-5)


@pytest.mark.parametrize("op", WITHIN_ONE)
@pytest.mark.parametrize("dtype", [*FLOATS, "float64"], ids=str)
def test_functions_of_numbers_below_one(op, dtype):
    for shape in SHAPES:
        check(op, [values(shape, dtype, low=-0.95, high=0.95)])


@pytest.mark.parametrize("dtype", [*FLOATS, "float64"], ids=str)
def test_acosh(dtype):
    check("Acosh", [values((3, 4), dtype, low=1.1, high=9)])


@pytest.mark.parametrize("op", SINGLE)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_inverses_of_distributions(op, dtype):
    check(op, [values((3, 40), dtype, low=0.01, high=0.99)], rtol=1e-4)


@pytest.mark.parametrize("op", BESSEL)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_bessel_functions(op, dtype):
    check(op, [values((3, 40), dtype, low=0.1, high=20)], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_dilogarithm(dtype):
    check("Spence", [values((3, 40), dtype, low=0, high=9)], rtol=1e-5)
    check("Spence", [np.array([-1, 0, 0.5, 1, 1.5, 2, 2.5, np.inf, np.nan], dtype)], rtol=1e-5)


@pytest.mark.parametrize("op", [*REAL_LINE, *POSITIVE, *WITHIN_ONE, "Acosh", "Ndtri", "Rint"])
def test_special_values(op):
    special = SPECIAL.astype(np.float32)
    if op in ("Rsqrt", "Inv", "Reciprocal"):  # the sign of a zero decides the sign of infinity
        special = np.append(special, np.float32(1e30))
    check(op, [special], rtol=1e-4)


def test_erfinv_of_special_values():
    # TensorFlow's sign of erfinv(-0) is lost; the rest agrees.
    check("Erfinv", [SPECIAL[np.abs(SPECIAL) < 1e-9].astype(np.float32)])
    check("Erfinv", [np.array([1, -1, 0.5, np.nan], np.float32)])


@pytest.mark.parametrize("op", ["Sign", "Ceil", "Round", "IsNan", "Abs", "Neg"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_special_values_of_narrow_floats(op, dtype):
    with np.errstate(over="ignore"):
        check(op, [SPECIAL.astype(dtype)])


def test_rounding_goes_to_the_even_number():
    halves = np.array([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 1e9 + 0.5], np.float64)
    (result,) = check("Round", [halves], exact=True)
    assert result.tolist() == [-2.0, -2.0, 0.0, 0.0, 2.0, 2.0, 1e9]


@pytest.mark.parametrize(
    ("op", "dtype"),
    [(op, dtype) for op in ("Abs", "Neg", "Sign") for dtype in INTEGERS if dtype != "uint8"]
    + [(op, dtype) for op in ("Square", "OnesLike", "ZerosLike", "Invert", "PopulationCount") for dtype in INTEGERS],
)
def test_integers(op, dtype):
    for shape in SHAPES:
        check(op, [values(shape, dtype, low=-9, high=9)])


@pytest.mark.parametrize("op", ["Abs", "Neg"])
def test_the_smallest_integer_has_no_opposite(op):
    (result,) = check(op, [np.array([-(2**31), 5], np.int32)])
    assert result.tolist() == [-(2**31), {"Abs": 5, "Neg": -5}[op]]


def test_rounding_an_integer_changes_nothing():
    # TensorFlow's CPU kernel makes every integer zero; its documentation says otherwise.
    array = values((3, 4), "int32", low=-9, high=9)
    check("Round", [array], expected=[array])


def test_logical_not():
    for shape in SHAPES:
        check("LogicalNot", [values(shape, bool)])


@pytest.mark.parametrize("op", ["OnesLike", "ZerosLike"])
@pytest.mark.parametrize("dtype", ["bool", "uint16", "complex64", BFLOAT16], ids=str)
def test_likes_of_other_dtypes(op, dtype):
    check(op, [values((2, 3), dtype)])


@pytest.mark.parametrize(
    "op", ["Neg", "Exp", "Sin", "Tanh", "Sqrt", "Square", "Sign", "Log", "Reciprocal", "Sigmoid", "Rsqrt"]
)
def test_complex_numbers(op):
    check(op, [values((3, 4), np.complex64)], rtol=1e-4)


@pytest.mark.parametrize("op", ["SqrtGrad", "RsqrtGrad", "InvGrad", "ReciprocalGrad"])
@pytest.mark.parametrize("dtype", [*FLOATS, "float64"], ids=str)
def test_gradients(op, dtype):
    check(op, [values((3, 4), dtype, low=0.5, high=2), values((3, 4), dtype, seed=1)])


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
SPECIAL_BINARY = np.array([np.nan, np.inf, -np.inf, 0.0, 1.0, -1.0, 2.5, -2.5], np.float32)


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
def test_binary_special_values(op):
    check(op, [SPECIAL_BINARY[:, None], SPECIAL_BINARY[None, :]], rtol=1e-4)


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
def test_binary_complex_numbers(op):
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


PAIRS_COMPARE = [((), ()), ((3, 4), ()), ((3, 1), (1, 4)), ((2, 1, 3), (5, 1)), ((0, 3), (1, 3))]
ORDER = ["Less", "LessEqual", "Greater", "GreaterEqual"]
SPECIAL_COMPARE = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0], np.float32)


@pytest.mark.parametrize("op", [*ORDER, "Equal", "NotEqual"])
@pytest.mark.parametrize("dtype", [*FLOATS, "float64", "int8", "int32", "int64", "uint8"], ids=str)
def test_comparisons(op, dtype):
    for left, right in PAIRS_COMPARE:
        check(op, [values(left, dtype, seed=1).round(), values(right, dtype, seed=2).round()])


@pytest.mark.parametrize("op", [*ORDER, "Equal", "NotEqual", "ApproximateEqual"])
def test_compare_special_values(op):
    left, right = np.meshgrid(SPECIAL_COMPARE, SPECIAL_COMPARE)
    check(op, [left, right])


@pytest.mark.parametrize("op", ["Equal", "NotEqual"])
@pytest.mark.parametrize("dtype", ["bool", "complex64"])
def test_equality_of_other_dtypes(op, dtype):
    check(op, [values((3, 4), dtype, seed=1), values((4,), dtype, seed=2)])


@pytest.mark.parametrize("op", ["Equal", "NotEqual"])
def test_shapes_that_do_not_broadcast_give_one_answer_where_the_node_asks_for_it(op):
    inputs = [values((3, 4), "int32"), values((3,), "int32")]
    (result,) = check(op, inputs, {"incompatible_shape_error": False})
    assert result.shape == ()
    assert result.item() is (op == "NotEqual")
    check(op, [values((3, 4), "int32"), values((4,), "int32")], {"incompatible_shape_error": False})


@pytest.mark.parametrize("op", ["LogicalAnd", "LogicalOr"])
def test_logic(op):
    for left, right in PAIRS_COMPARE:
        check(op, [values(left, bool, seed=1), values(right, bool, seed=2)])


@pytest.mark.parametrize("tolerance", [None, 0.25, 1.0])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_approximately_equal(tolerance, dtype):
    attrs = {} if tolerance is None else {"tolerance": tolerance}
    inputs = [values((40,), dtype, seed=1), values((40,), dtype, seed=2)]
    check("ApproximateEqual", inputs, attrs)
    check("ApproximateEqual", [inputs[0], inputs[0]], attrs)
    edge = np.array(tolerance or 1e-5, np.float32).astype(dtype)
    at = np.array([np.nextafter(edge, edge * 0), edge, np.nextafter(edge, edge * 2)])
    check("ApproximateEqual", [np.append(at, -at), np.zeros(6, dtype)], attrs)


DTYPES = [*FLOATS, "int8", "int32", "int64", "uint8", "bool", "complex64"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_select(dtype):
    for condition, shape in [
        ((), ()),
        ((3, 4), (3, 4)),
        ((3,), (3, 4)),
        ((2,), (2, 3, 4)),
        ((), (3, 4)),
        ((4,), (4,)),
        ((0,), (0, 2)),
    ]:
        check("Select", [values(condition, bool), values(shape, dtype, seed=1), values(shape, dtype, seed=2)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_select_with_broadcasting(dtype):
    for condition, left, right in [
        ((), (), ()),
        ((3, 1), (1, 4), (3, 4)),
        ((4,), (), (3, 4)),
        ((2, 1, 3), (5, 1), ()),
        ((0, 1), (1,), (3,)),
    ]:
        check("SelectV2", [values(condition, bool), values(left, dtype, seed=1), values(right, dtype, seed=2)])


def test_select_passes_over_nan():
    nan = np.full((3,), np.nan, np.float32)
    check("SelectV2", [np.array([True, False, True]), nan, np.ones(3, np.float32)])


@pytest.mark.parametrize("dtype", ["bool", "float32", "int32", "int64", "uint8", "complex64"])
def test_where(dtype):
    for shape in [(5,), (3, 4), (2, 3, 4), (0,), (2, 0)]:
        check("Where", [values(shape, dtype, low=-1, high=2)])


def test_where_finds_nan():
    check("Where", [np.array([0, np.nan, -0.0, 1], np.float32)])


@pytest.mark.parametrize("dtype", [*FLOATS, "int32", "int64", "uint8"], ids=str)
def test_clip(dtype):
    for shape in [(), (0,), (3, 4)]:
        array = values(shape, dtype, low=-9, high=9)
        check("ClipByValue", [array, np.array(1, array.dtype), np.array(3, array.dtype)])
        check(
            "ClipByValue",
            [array, values(shape, dtype, low=-3, high=0, seed=1), values(shape, dtype, low=1, high=3, seed=2)],
        )


def test_the_lower_bound_wins_when_clipping():
    array = np.array([np.nan, 0, 1.5, 5, np.inf, -np.inf], np.float32)
    (result,) = check("ClipByValue", [array, np.float32(2), np.float32(1)])
    assert result[1:].tolist() == [2.0] * 5


@pytest.mark.parametrize("op", ["InvGrad", "ReciprocalGrad", "RsqrtGrad", "SqrtGrad"])
@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_gradients_of_roots_of_complex_numbers(op, dtype):
    result = values((3, 40), dtype, seed=1)
    result[0, :3] = 0, 1j, -1
    gradients = values((3, 40), dtype, seed=2)
    gradients[0, 0] = 0
    check(op, [result, gradients], rtol=1e-4)
