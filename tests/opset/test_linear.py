"""The table of ops that are linear: gradients are made of them."""

from __future__ import annotations

import numpy as np
import pytest

from msplit.opset import schema
from msplit.opset.linear import PRODUCTS, SUMS

BROADCAST = {
    "Add": lambda a, b: a + b, "AddV2": lambda a, b: a + b, "Sub": lambda a, b: a - b, "Mul": lambda a, b: a * b,
    "RealDiv": lambda a, b: a / b, "MatMul": lambda a, b: a @ b, "TanhGrad": lambda y, dy: dy * (1 - y * y),
    "SigmoidGrad": lambda y, dy: dy * y * (1 - y), "RsqrtGrad": lambda y, dy: -0.5 * dy * y**3, "SqrtGrad": lambda y, dy: dy * 0.5 / y,
    "ReluGrad": lambda dy, x: dy * (x > 0), "EluGrad": lambda dy, y: np.where(y < 0, dy * (y + 1), dy),
    "SoftplusGrad": lambda dy, x: dy / (np.exp(-x) + 1), "InvGrad": lambda y, dy: -dy * y * y,
}  # fmt: skip
"""What some of them compute, of float64."""


def test_ops_are_those_of_tensorflow_in_one_of_the_two_lists():
    assert not PRODUCTS.keys() & SUMS.keys()
    for op, slots in (PRODUCTS | SUMS).items():
        count = len(schema.input_dtypes(op, {"N": 4}) or ())
        assert not count or max(slots, default=0) < count, op


@pytest.mark.parametrize("op", BROADCAST)
def test_what_is_scaled_in_the_inputs_that_are_told_scales_the_result(op):
    inputs = np.random.default_rng(0).uniform(0.5, 2, (2, 4, 4))
    for slots in [(slot,) for slot in PRODUCTS[op]] if op in PRODUCTS else [SUMS[op]]:
        scaled = [value * 2.0**15 if slot in slots else value for slot, value in enumerate(inputs)]
        np.testing.assert_array_equal(BROADCAST[op](*scaled), BROADCAST[op](*inputs) * 2.0**15)
    others = {0, 1} - set(PRODUCTS.get(op, (0, 1)))
    for slot in others:  # and in the others it does not
        scaled = [value * 4.0 if slot == number else value for number, value in enumerate(inputs)]
        assert not np.allclose(BROADCAST[op](*scaled), BROADCAST[op](*inputs) * 4.0)
