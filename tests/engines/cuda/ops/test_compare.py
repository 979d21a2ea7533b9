import numpy as np
import pytest

from .harness import FLOATS, check, values

pytestmark = pytest.mark.tf

PAIRS = [((), ()), ((3, 4), ()), ((3, 1), (1, 4)), ((2, 1, 3), (5, 1)), ((0, 3), (1, 3))]
ORDER = ["Less", "LessEqual", "Greater", "GreaterEqual"]
SPECIAL = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0], np.float32)


@pytest.mark.parametrize("op", [*ORDER, "Equal", "NotEqual"])
@pytest.mark.parametrize("dtype", [*FLOATS, "float64", "int8", "int32", "int64", "uint8"], ids=str)
def test_comparisons(op, dtype):
    for left, right in PAIRS:
        check(op, [values(left, dtype, seed=1).round(), values(right, dtype, seed=2).round()])


@pytest.mark.parametrize("op", [*ORDER, "Equal", "NotEqual", "ApproximateEqual"])
def test_special_values(op):
    left, right = np.meshgrid(SPECIAL, SPECIAL)
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
    for left, right in PAIRS:
        check(op, [values(left, bool, seed=1), values(right, bool, seed=2)])


@pytest.mark.parametrize("tolerance", [None, 0.25, 1.0])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_approximately_equal(tolerance, dtype):
    attrs = {} if tolerance is None else {"tolerance": tolerance}
    inputs = [values((40,), dtype, seed=1), values((40,), dtype, seed=2)]
    check("ApproximateEqual", inputs, attrs)
    check("ApproximateEqual", [inputs[0], inputs[0]], attrs)
