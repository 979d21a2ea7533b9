import numpy as np
import pytest

from .harness import check, values

pytestmark = pytest.mark.tf

RANGES = [(-6.0, 6.0), (-1.0, 3.0), (0.0, 2.5), (-2.5, 0.0), (0.5, 3.0), (-3.0, -0.25)]


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize(("low", "high"), RANGES)
def test_one_range(bits, narrow, low, high):
    array = values((3, 40), low=-4, high=4)
    attrs = {"num_bits": bits, "narrow_range": narrow}
    check("FakeQuantWithMinMaxVars", [array, np.float32(low), np.float32(high)], attrs)
    if low < high:
        check("FakeQuantWithMinMaxArgs", [array], {**attrs, "min": low, "max": high})


def test_defaults():
    check("FakeQuantWithMinMaxArgs", [values((3, 40), low=-8, high=8)])


@pytest.mark.parametrize("shape", [(6,), (2, 6), (2, 3, 3, 6)])
def test_a_range_for_each_channel(shape):
    low, high = (np.array(column, np.float32) for column in zip(*RANGES, strict=True))
    for narrow in (False, True):
        inputs = [values(shape, low=-4, high=4), low, high]
        check("FakeQuantWithMinMaxVarsPerChannel", inputs, {"narrow_range": narrow})


def test_an_empty_range_gives_zeros():
    (result,) = check("FakeQuantWithMinMaxVars", [values((5,)), np.float32(0), np.float32(0)])
    assert result.count_nonzero() == 0
