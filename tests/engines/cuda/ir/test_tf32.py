"""Rounding to TF32: which number it is, how it lies, and who shares it."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from msplit.engines.cuda.ir.windows import constant_in_tf32, to_tf32


@given(st.floats(width=32))
def test_tf32_is_the_nearest_number_of_11_bits(value):
    found = float(to_tf32(torch.tensor([value], dtype=torch.float32))[0])
    if not np.isfinite(value):
        np.testing.assert_equal(found, value)
        return
    exponent = max(np.frexp(np.float64(value))[1], -125)  # below, numbers are as far apart as there
    step = np.ldexp(1.0, int(exponent) - 11)
    away = np.copysign(np.floor(abs(value) / step + 0.5) * step, value)
    assert found == (away if abs(away) < 2.0**128 else np.copysign(np.inf, value))


def test_tf32_numbers_lie_in_memory_as_before():
    filter = torch.randn(8, 3, 3, 16).permute(1, 2, 3, 0)
    found = to_tf32(filter)
    assert found.stride() == filter.stride()
    assert 0 < float(((found - filter) / filter).abs().max()) <= 2.0**-11
    assert torch.equal(to_tf32(found), found)


def test_constants_that_are_rounded_already_are_shared():
    """Programs of a model share weights on the device: what one has rounded, another one rounded again to a copy."""
    weights = torch.randn(8, 6, 4).permute(2, 0, 1)
    rounded = constant_in_tf32(weights)
    assert rounded is not weights
    assert torch.equal(rounded, to_tf32(weights))
    assert constant_in_tf32(rounded) is rounded
