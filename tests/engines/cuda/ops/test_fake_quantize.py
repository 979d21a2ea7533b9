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


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("mode", ["HALF_TO_EVEN", "HALF_UP"])
@pytest.mark.parametrize(("low", "high"), [(-1.0, 1.0), (-0.3, 1.7), (-2.0, 0.5), (0.0, 3.0), (0.0, 0.0)])
def test_to_steps_and_back(signed, narrow, mode, low, high):
    x = values((3, 4), low=0 if not signed else -2, high=2)
    for given in (False, True):
        for bits in (8, 4):
            attrs = {"signed_input": signed, "narrow_range": narrow, "round_mode": mode, "range_given": given}
            ends = [np.float32(low if signed else 0), np.float32(high)]
            check("QuantizeAndDequantizeV2", [x, *ends], {**attrs, "num_bits": bits}, atol=1e-6)
            check("QuantizeAndDequantizeV4", [x, *ends], {**attrs, "num_bits": bits}, atol=1e-6)
            del attrs["round_mode"]
            check("QuantizeAndDequantizeV3", [x, *ends, np.int32(bits)], attrs, atol=1e-6)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_to_steps_by_axis(axis):
    x = values((3, 4, 2))
    ends = [values(x.shape[axis : axis + 1], seed=1, low=-2, high=0), values(x.shape[axis : axis + 1], seed=2, low=0.1)]
    # TensorFlow's kernel of the other versions takes no range by axis.
    check("QuantizeAndDequantizeV3", [x, *ends, np.int32(8)], {"axis": axis, "range_given": True}, atol=1e-6)
    for op in ("QuantizeAndDequantizeV2", "QuantizeAndDequantizeV4"):
        check(op, [x, *ends], {"axis": axis, "range_given": False}, atol=1e-6)
