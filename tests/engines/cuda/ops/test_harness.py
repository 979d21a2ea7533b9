"""The harness must catch what it is there to catch."""

import numpy as np
import pytest
import torch

from msplit.engines.cuda.ir import lowering
from msplit.engines.cuda.ir.lowering import Lowering

from .harness import BFLOAT16, check, compare, run_tensorflow, values

pytestmark = pytest.mark.tf


@pytest.fixture
def lower(monkeypatch):
    """Replaces the lowering of an op for one test."""
    lowering.table()

    def replace(op, function, **options):
        monkeypatch.setitem(lowering._TABLE, op, Lowering(op, function, **options))

    return replace


def test_right_lowering_passes(lower):
    lower("Square", lambda node, x: x * x)
    check("Square", [values((2, 3))])


WRONG = {
    "value, with the tolerance that would have passed": (
        lambda node, x: x * x * 1.01,
        r"rtol=0\.01\d* with atol=0.*would have passed",
    ),
    "dtype": (lambda node, x: (x * x).double(), "dtype float64"),
    "shape": (lambda node, x: (x * x)[None], "shape"),
    "writing to an input": (lambda node, x: x.mul_(x), "wrote to its input 0"),
    "dependence on memory layout": (lambda node, x: (x * x).as_strided(x.shape, (3, 1)), "with transposed inputs"),
    "shape on meta": (lambda node, x: x[None] if x.is_meta else x * x, "on meta"),
}


@pytest.mark.parametrize(("function", "message"), WRONG.values(), ids=list(WRONG))
def test_what_is_wrong_is_caught(lower, function, message):
    lower("Square", function)
    with pytest.raises(AssertionError, match=message):
        check("Square", [values((2, 3))])


def test_wrong_default_is_caught(lower):
    lower("LeakyRelu", lambda node, x: torch.nn.functional.leaky_relu(x, node.get("alpha", 0.5)))
    with pytest.raises(AssertionError, match="output 0"):
        check("LeakyRelu", [values((2, 3))])


def test_lists_of_inputs_and_static_inputs_are_sorted_out(lower):
    def concat(node, *inputs):
        assert node.get("N") == 3
        assert isinstance(inputs[-1], np.ndarray)
        return torch.cat(inputs[:-1], int(inputs[-1]))

    lower("ConcatV2", concat, static=(-1,))
    check("ConcatV2", [values((2, 3), np.int64, seed=i) for i in range(3)] + [np.int32(1)])


def test_every_kind_of_attribute_reaches_tensorflow():
    (result,) = run_tensorflow("Pad", [values((2,)), np.array([[1, 0]], np.int32)], {"T": "float32"})
    assert result.shape == (3,)
    (result,) = run_tensorflow("Squeeze", [values((1, 2, 1))], {"squeeze_dims": (0,)})
    assert result.shape == (2, 1)
    (result,) = run_tensorflow("PlaceholderWithDefault", [values((1, 2))], {"shape": (None, 2)})
    assert result.shape == (1, 2)


@pytest.mark.parametrize("dtype", ["float32", "float16", BFLOAT16, "complex64"], ids=str)
def test_nan_equals_nan_and_inf_equals_inf_only(dtype):
    special = np.array([np.nan, np.inf, 1.0]).astype(dtype)
    compare(special, special.copy())
    with pytest.raises(AssertionError):
        compare(special, np.array([np.nan, 1.0, 1.0]).astype(dtype))
    with pytest.raises(AssertionError):
        compare(special, np.array([1.0, np.inf, 1.0]).astype(dtype))
