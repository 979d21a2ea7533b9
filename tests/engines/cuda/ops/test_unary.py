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
