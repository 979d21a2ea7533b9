import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from msplit.engines.cuda.ir.node import Unsupported
from tests.campaign import examples, sampled

from .harness import BOTH, FLOATS, check, check_both_formats, run_lowering, values

pytestmark = pytest.mark.tf


def attributes(ksize, stride, padding):
    return {"ksize": (1, *ksize, 1), "strides": (1, *stride, 1), "padding": padding}


@sampled(
    24,
    op=["MaxPool", "AvgPool"],
    padding=["SAME", "VALID"],
    ksize=[(1, 1), (2, 2), (3, 3), (4, 2), (5, 3)],
    stride=[(1, 1), (2, 2), (1, 2), (3, 3)],
)
def test_pools(op, padding, ksize, stride):
    for size in ((7, 8), (6, 9)):
        check_both_formats(op, [values((2, *size, 3))], attributes(ksize, stride, padding))


@settings(max_examples=examples(25, 60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    op=st.sampled_from(["MaxPool", "AvgPool"]),
    size=st.tuples(st.integers(1, 10), st.integers(1, 10)),
    ksize=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    stride=st.tuples(st.integers(1, 5), st.integers(1, 5)),
)
def test_pools_with_same_padding_of_any_size(op, size, ksize, stride):
    # Negative values, so that padding with zeros would show.
    check(op, [values((1, *size, 2), low=-2, high=-1)], attributes(ksize, stride, "SAME"), nchw=BOTH)


@pytest.mark.parametrize("dtype", [*FLOATS, "float64"], ids=str)
@pytest.mark.parametrize("padding", ["SAME", "VALID"])
def test_pool_floats(dtype, padding):
    for op in ("MaxPool", "AvgPool"):
        check(op, [values((2, 7, 8, 3), dtype)], attributes((2, 3), (2, 1), padding), exact=op == "MaxPool")


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "int64"])
@pytest.mark.parametrize("padding", ["SAME", "VALID"])
def test_max_pool_integers(dtype, padding):
    x = values((2, 7, 8, 3), dtype, low=-100, high=-1 if dtype[0] == "i" else 100)
    check("MaxPool", [x], attributes((2, 3), (2, 1), padding), nchw=BOTH)


def test_max_pool_of_unsigned_words_is_refused():
    with pytest.raises(Unsupported, match="uint16"):
        run_lowering("MaxPool", [values((1, 2, 2, 1), "uint16")], attributes((1, 1), (1, 1), "VALID"))


@pytest.mark.parametrize("explicit", [(1, 1, 1, 1), (0, 1, 1, 0), (2, 1, 0, 2), (0, 0, 0, 0)], ids=str)
@pytest.mark.parametrize("stride", [(1, 1), (2, 2)], ids=str)
def test_max_pool_explicit_paddings(explicit, stride):
    attrs = attributes((3, 3), stride, "EXPLICIT") | {"explicit_paddings": (0, 0, *explicit, 0, 0)}
    check("MaxPool", [values((2, 7, 8, 3), low=-2, high=-1)], attrs, nchw=BOTH)


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
def test_max_pool_v2(padding):
    sizes, strides = np.array([1, 3, 2, 1], np.int32), np.array([1, 2, 1, 1], np.int32)
    check("MaxPoolV2", [values((2, 7, 8, 3)), sizes, strides], {"padding": padding}, nchw=BOTH)


@pytest.mark.parametrize("op", ["MaxPool", "AvgPool"])
def test_pools_of_an_empty_batch(op):
    check(op, [values((0, 5, 5, 2))], attributes((2, 2), (2, 2), "SAME"), nchw=BOTH)


def test_pools_over_channels_are_refused():
    with pytest.raises(Unsupported, match="channels"):
        run_lowering("MaxPool", [values((1, 4, 4, 4))], {"ksize": (1, 1, 1, 2), "strides": (1, 1, 1, 2)})


@pytest.mark.parametrize("op", ["MaxPool3D", "AvgPool3D"])
@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.parametrize("stride", [1, 2])
def test_pools_3d(op, padding, stride):
    attrs = {"ksize": (1, 2, 3, 2, 1), "strides": (1, stride, stride, stride, 1), "padding": padding}
    check(op, [values((2, 5, 6, 7, 3))], attrs, nchw=BOTH)


@pytest.mark.parametrize("include_batch", [False, True])
@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.parametrize("stride", [(1, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("target", ["int64", "int32"])
def test_max_pool_with_argmax(include_batch, padding, stride, target):
    attrs = attributes((2, 3), stride, padding) | {"include_batch_in_index": include_batch, "Targmax": target}
    check("MaxPoolWithArgmax", [values((2, 7, 8, 3))], attrs, nchw=BOTH)


def test_argmax_of_equal_elements_is_the_first():
    check("MaxPoolWithArgmax", [np.ones((1, 4, 4, 2), np.float32)], attributes((2, 2), (2, 2), "SAME"))
