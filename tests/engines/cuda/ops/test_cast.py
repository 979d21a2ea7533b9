"""Changes of dtype, the parts of complex numbers, and simulated quantization."""

import numpy as np
import pytest

from msplit.engines.cuda.ir.node import Unsupported

from .harness import BFLOAT16, check, run_lowering, values

pytestmark = pytest.mark.tf

DTYPES = [
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
]
DTYPES += ["bfloat16", "complex64", "complex128"]


def _array(name, array):
    return np.asarray(array).astype(BFLOAT16 if name == "bfloat16" else name)


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
def test_every_pair(source, target):
    # Whole numbers and fractions that every target can hold.
    low = 0 if "uint" in source + target else -90
    array = _array(source, np.linspace(low, 100, 37))
    check("Cast", [array], {"SrcT": source, "DstT": target}, exact=True)


@pytest.mark.parametrize("source", ["int64", "int32", "uint8"])
@pytest.mark.parametrize("target", ["int8", "int16", "int32", "uint8"])
def test_integers_lose_their_high_bits(source, target):
    array = np.array([0, 1, 127, 128, 255, 256, 70000, -1, -129, 2**31 - 1], np.int64).astype(source)
    check("Cast", [array], {"DstT": target})


def test_floats_to_narrower_floats_round_to_even_and_overflow():
    array = np.array([1 + 2**-9, 1 + 3 * 2**-9, 65519, 65520, 1e-8, 1e39, np.inf, -np.inf, np.nan], np.float64)
    for target in ("float16", "bfloat16", "float32"):
        check("Cast", [array], {"DstT": target}, exact=True)


def test_anything_but_zero_is_true():
    check("Cast", [np.array([0.0, -0.0, 0.5, np.nan, np.inf], np.float32)], {"DstT": "bool"})


@pytest.mark.parametrize("source", ["float32", "float64"])
@pytest.mark.parametrize("target", ["float16", "bfloat16", "float32"])
def test_truncation_instead_of_rounding(source, target):
    array = np.concatenate([values((200,), source, low=-9, high=9), [1 + 3 * 2**-9, -1.999, 65519, np.inf, np.nan, 0]])
    array = array.astype(source)
    (cut,) = check("Cast", [array], {"DstT": target, "Truncate": True}, exact=True)
    if source != target and (source, target) != ("float64", "bfloat16"):
        (rounded,) = run_lowering("Cast", [array], {"DstT": target})
        assert (cut != rounded)[:200].any()


@pytest.mark.parametrize(
    ("source", "target", "shape"),
    [
        ("float32", "int32", (3, 4)),
        ("float32", "uint8", (3, 4)),
        ("uint8", "float32", (3, 4)),
        ("int64", "int32", ()),
        ("int32", "int64", (5, 2)),
        ("uint8", "int64", (8,)),
        ("float16", "bfloat16", (0,)),
        ("float64", "complex64", (2,)),
    ],
)
def test_bitcast(source, target, shape):
    check("Bitcast", [values(shape, source, low=-100, high=100)], {"type": target})


def test_bitcast_to_a_wider_type_needs_a_last_axis_that_fits():
    with pytest.raises(Unsupported, match="last axis of size 2"):
        run_lowering("Bitcast", [values((4, 3), "int32")], {"type": "int64"})


@pytest.mark.parametrize("op", ["Real", "Imag", "Angle", "Conj", "ComplexAbs"])
@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_parts_of_complex_numbers(op, dtype):
    real = {"Tout": "float32" if dtype == "complex64" else "float64"} if op != "Conj" else {}
    for shape in [(), (0,), (3, 4)]:
        check(op, [values(shape, dtype)], real)


def test_complex_numbers_from_their_parts():
    check("Complex", [values((3, 1), seed=1), values((4,), seed=2)])
    check("Complex", [values((), "float64"), values((), "float64", seed=1)], {"Tout": "complex128"})


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


@pytest.mark.parametrize("bits", [2, 4, 8, 12])
@pytest.mark.parametrize("end", [0.1, 0.75, 1.0, 2.3, 6.0, 7.7])
def test_zero_between_two_steps(bits, end):
    """The last bit of a quotient decides which one it is, and what is beyond the range shows it."""
    array, ends = values((3, 40), low=-2 * end, high=2 * end), (np.float32(-end), np.float32(end))
    check("FakeQuantWithMinMaxVars", [array, *ends], {"num_bits": bits})
    check("FakeQuantWithMinMaxArgs", [array], {"num_bits": bits, "min": -end, "max": end})


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


@pytest.mark.parametrize("span", [(-6, 6), (0, 2), (0, 6), (-1.3, 2.7), (1, 3)])
def test_halfway_between_two_steps(span):
    low, high = np.array(span, np.float32)
    halves = low + (np.arange(255) + 0.5) * (float(high) - float(low)) / 255
    array = np.concatenate([halves, np.linspace(low - 1, high + 1, 2001), [1.0, 2.0]]).astype(np.float32)
    check("FakeQuantWithMinMaxVars", [array, low, high], atol=1e-6)
    check("FakeQuantWithMinMaxArgs", [array], {"min": float(low), "max": float(high)}, atol=1e-6)
    check("FakeQuantWithMinMaxVarsPerChannel", [array[:, None], low[None], high[None]], atol=1e-6)
