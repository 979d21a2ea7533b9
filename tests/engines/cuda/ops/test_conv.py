import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from msplit.engines.cuda.ir.dtypes import to_numpy
from msplit.engines.cuda.ir.lowering import table
from msplit.engines.cuda.ir.node import Node, Unsupported
from msplit.engines.cuda.ir.windows import keeps_channels_last
from msplit.engines.cuda.ops.conv import FILTERS, prepare_depthwise_filter, prepare_filter
from tests.campaign import examples, sampled

from .harness import BOTH, FLOATS, check, check_both_formats, run_lowering, values

pytestmark = pytest.mark.tf


def attributes(stride=(1, 1), dilation=(1, 1), padding="SAME", explicit=None):
    attrs = {"strides": (1, *stride, 1), "padding": padding}
    if dilation != (1, 1):
        attrs["dilations"] = (1, *dilation, 1)
    if explicit is not None:
        attrs["explicit_paddings"] = (0, 0, *explicit, 0, 0)
    return attrs


def check_windows(op, x, filter, **window):
    check_both_formats(op, [x, filter], attributes(**window))


@pytest.mark.parametrize("dtype", [*FLOATS, "float64"], ids=str)
@pytest.mark.parametrize("padding", ["SAME", "VALID"])
def test_conv2d_dtypes(dtype, padding):
    x, filter = values((2, 7, 8, 3), dtype), values((3, 3, 3, 5), dtype, seed=1, low=-0.5, high=0.5)
    check_windows("Conv2D", x, filter, padding=padding)


@sampled(
    20,
    kernel=[(1, 1), (2, 2), (3, 3), (5, 4), (1, 7)],
    stride=[(1, 1), (2, 2), (3, 2)],
    padding=["SAME", "VALID"],
    size=[(7, 8), (10, 9)],
)
def test_conv2d_windows(kernel, stride, padding, size):
    x, filter = values((2, *size, 3)), values((*kernel, 3, 4), seed=1)
    check("Conv2D", [x, filter], attributes(stride, padding=padding), nchw=BOTH)


@settings(max_examples=examples(20, 40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    batch=st.integers(1, 2),
    size=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    kernel=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    stride=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    channels=st.tuples(st.integers(1, 4), st.integers(1, 4)),
)
@example(batch=1, size=(3, 1), kernel=(4, 4), stride=(1, 2), channels=(1, 1))  # PyTorch is wrong about one channel
@example(batch=2, size=(4, 2), kernel=(4, 5), stride=(1, 3), channels=(1, 2))
def test_conv2d_with_same_padding_of_any_size(batch, size, kernel, stride, channels):
    # TensorFlow's CPU kernel leaves out elements there: see the next test.
    assume(not (channels[0] == 1 and batch > 1 and stride[0] == 1 < stride[1]))
    check_windows("Conv2D", values((batch, *size, channels[0])), values((*kernel, *channels), seed=1), stride=stride)


def test_conv2d_of_one_channel_where_tensorflow_is_wrong():
    """TensorFlow 2.21 on a CPU gives [a, 0, b, 0] for one product per element, with one channel and a stride of two along the width."""
    x, filter = values((2, 2, 1, 1)), values((1, 2, 1, 1), seed=1)
    found = run_lowering("Conv2D", [x, filter], attributes((1, 2)))
    np.testing.assert_allclose(to_numpy(found[0]), x * filter[0, 0, 0, 0], rtol=1e-6)


@pytest.mark.parametrize("explicit", [(1, 1, 2, 2), (0, 1, 0, 1), (1, 0, 2, 3), (0, 0, 0, 0)], ids=str)
@pytest.mark.parametrize("stride", [(1, 1), (2, 2)], ids=str)
def test_conv2d_explicit_paddings(explicit, stride):
    x, filter = values((2, 7, 8, 3)), values((3, 3, 3, 4), seed=1)
    check_windows("Conv2D", x, filter, stride=stride, padding="EXPLICIT", explicit=explicit)


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.parametrize("dilation", [(2, 2), (1, 3)], ids=str)
def test_conv2d_dilations(padding, dilation):
    x, filter = values((2, 11, 12, 3)), values((3, 3, 3, 4), seed=1)
    check_windows("Conv2D", x, filter, dilation=dilation, padding=padding)


@pytest.mark.parametrize("groups", [2, 3, 6])
def test_conv2d_groups_where_the_filter_has_fewer_channels(groups):
    x, filter = values((2, 7, 8, 6)), values((3, 3, 6 // groups, 12), seed=1)
    check_windows("Conv2D", x, filter, stride=(2, 2))


def test_conv2d_of_an_empty_batch():
    # float64, because oneDNN's float32 kernel in TensorFlow 2.21 gives an empty result the channels of the input.
    check("Conv2D", [values((0, 5, 5, 2), "float64"), values((3, 3, 2, 4), "float64")], attributes(), nchw=BOTH)


def test_windows_larger_than_the_data_are_refused():
    with pytest.raises(Unsupported, match="does not fit"):
        run_lowering("Conv2D", [values((1, 2, 2, 1)), values((3, 3, 1, 1))], attributes(padding="VALID"))


def test_integer_convolutions_are_refused():
    with pytest.raises(Unsupported, match="int32"):
        run_lowering("Conv2D", [values((1, 3, 3, 1), "int32"), values((3, 3, 1, 1), "int32")], attributes())


def test_channels_that_do_not_split_in_groups_are_refused():
    with pytest.raises(Unsupported, match="groups"):
        run_lowering("Conv2D", [values((1, 3, 3, 5)), values((1, 1, 2, 4))], attributes())


@sampled(10, dtype=FLOATS, stride=[(1, 1), (2, 2)], multiplier=[1, 2], padding=["SAME", "VALID"])
def test_depthwise_conv2d(dtype, stride, multiplier, padding):
    x, filter = values((2, 7, 8, 3), dtype), values((3, 3, 3, multiplier), dtype, seed=1)
    check_windows("DepthwiseConv2dNative", x, filter, stride=stride, padding=padding)


def test_depthwise_conv2d_explicit_paddings():
    x, filter = values((2, 7, 8, 3)), values((3, 3, 3, 2), seed=1)
    check_windows("DepthwiseConv2dNative", x, filter, padding="EXPLICIT", explicit=(1, 0, 2, 1))


def test_depthwise_conv2d_dilations_equal_those_of_a_grouped_conv2d():
    x, filter = values((2, 9, 9, 3)), values((3, 3, 3, 2), seed=1)
    attrs = attributes(dilation=(2, 2))
    # TensorFlow's CPU kernel has no dilations here.
    grouped = filter.reshape(3, 3, 1, 6)
    (expected,) = run_lowering("Conv2D", [x, grouped], attrs)
    check("DepthwiseConv2dNative", [x, filter], attrs, expected=[to_numpy(expected)], nchw=BOTH)


def check_transposed(size, kernel, channels, **window):
    """Conv2DBackpropInput for the given size of its result, in both formats."""
    source, target = channels
    shape = (2, *size, target)
    filter = values((*kernel, target, source), seed=1)
    forward = run_lowering("Conv2D", [values(shape), filter], attributes(**window))[0]
    x = values(tuple(forward.shape), seed=2)
    sizes = np.array(shape, np.int32)
    check_both_formats("Conv2DBackpropInput", [sizes, filter, x], attributes(**window), data=(0, 2))


@sampled(
    16,
    kernel=[(1, 1), (2, 2), (3, 3), (4, 5)],
    stride=[(1, 1), (2, 2), (3, 2)],
    padding=["SAME", "VALID"],
    size=[(8, 8), (7, 10)],
)
def test_transposed_conv2d(kernel, stride, padding, size):
    check_transposed(size, kernel, (3, 4), stride=stride, padding=padding)


@pytest.mark.parametrize("explicit", [(1, 1, 2, 2), (0, 1, 1, 0), (1, 0, 0, 2)], ids=str)
def test_transposed_conv2d_explicit_paddings(explicit):
    check_transposed((8, 7), (3, 3), (3, 4), stride=(2, 2), padding="EXPLICIT", explicit=explicit)


def test_transposed_conv2d_dilations():
    sizes, filter, x = np.array([2, 9, 9, 4], np.int32), values((3, 3, 4, 3)), values((2, 9, 9, 3), seed=1)
    check("Conv2DBackpropInput", [sizes, filter, x], attributes(dilation=(2, 2)), nchw=BOTH)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_transposed_conv2d_dtypes(dtype):
    sizes = np.array([2, 8, 8, 4], np.int32)
    filter, x = values((4, 4, 4, 3), dtype, low=-0.5, high=0.5), values((2, 4, 4, 3), dtype, seed=1)
    check("Conv2DBackpropInput", [sizes, filter, x], attributes((2, 2)), nchw=BOTH)


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.parametrize("stride", [1, 2])
def test_conv3d(padding, stride):
    x, filter = values((2, 5, 6, 7, 2)), values((3, 2, 3, 2, 4), seed=1)
    attrs = {"strides": (1, stride, stride, stride, 1), "padding": padding}
    check("Conv3D", [x, filter], attrs, nchw=BOTH)


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("kernel", [(3, 2, 3), (1, 2, 4)], ids=str)
def test_transposed_conv3d(padding, stride, kernel):
    filter, attrs = values((*kernel, 2, 4), seed=1), {"strides": (1, stride, stride, stride, 1), "padding": padding}
    forward = run_lowering("Conv3D", [values((2, 5, 6, 7, 2)), filter], attrs)[0]
    sizes, x = np.array([2, 5, 6, 7, 2], np.int32), values(tuple(forward.shape), seed=2)
    check("Conv3DBackpropInputV2", [sizes, filter, x], attrs, nchw=BOTH)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_transposed_conv3d_dtypes(dtype):
    filter, x = values((2, 2, 2, 3, 2), dtype, low=-0.5, high=0.5), values((1, 2, 3, 2, 2), dtype, seed=1)
    sizes, attrs = np.array([1, 4, 6, 4, 3], np.int64), {"strides": (1, 2, 2, 2, 1), "padding": "SAME"}
    check("Conv3DBackpropInputV2", [sizes, filter, x], attrs, nchw=BOTH)


@pytest.mark.parametrize("shape", [(3, 3, 4, 8), (1, 1, 4, 8), (3, 3, 1, 8), (2, 3, 3, 4, 8)], ids=str)
@pytest.mark.parametrize("channels_last", [False, True])
def test_prepared_filter_needs_no_copy(shape, channels_last):
    filter = torch.from_numpy(values(shape))
    prepared = prepare_filter(filter, channels_last)
    assert torch.equal(prepared, filter)
    weight = prepared.permute(-1, -2, *range(len(shape) - 2))
    last = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    assert weight.is_contiguous(memory_format=last if channels_last else torch.contiguous_format)


def test_prepared_depthwise_filter_needs_no_copy():
    filter = torch.from_numpy(values((3, 3, 4, 2)))
    prepared = prepare_depthwise_filter(filter, True)
    assert torch.equal(prepared, filter)
    assert prepared.permute(2, 3, 0, 1).is_contiguous()


class Copies(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the kernels that only move data."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ in ("clone", "copy_", "_to_copy", "constant_pad_nd", "contiguous")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("op", ["Conv2D", "DepthwiseConv2dNative"])
@pytest.mark.parametrize("nchw", [False, True])
def test_prepared_convolutions_in_a_row_copy_nothing(op, nchw):
    node = Node("conv", op, attributes(), nchw)
    filter = torch.from_numpy(values((3, 3, 4, 4) if op == "Conv2D" else (3, 3, 4, 1)))
    prepared = FILTERS[op](filter, keeps_channels_last(node))
    function = table()[op].function
    x = function(node, torch.from_numpy(values((2, 6, 6, 4))), prepared)
    with Copies() as copies:
        y = function(node, x, prepared)
    assert copies.count == 0
    assert y.permute(0, 3, 1, 2).is_contiguous(memory_format=torch.contiguous_format if nchw else torch.channels_last)


@pytest.mark.parametrize(("size", "count"), [(6, 2), (40, 1)])
def test_uneven_padding_costs_a_copy_of_small_data_only(size, count):
    node = Node("conv", "Conv2D", attributes((2, 2)), False)
    with Copies() as copies:
        table()["Conv2D"].function(node, torch.zeros(1, size, size, 4), torch.zeros(3, 3, 4, 4))
    assert copies.count == count  # One is the filter, which is not prepared.


@sampled(8, kernel=[(2, 2), (3, 3), (4, 7)], stride=[(1, 1), (2, 2), (3, 2)], size=[(40, 41), (45, 6)])
def test_conv2d_of_large_data_with_uneven_padding(kernel, stride, size):
    check_windows("Conv2D", values((1, *size, 2)), values((*kernel, 2, 3), seed=1), stride=stride)


@pytest.mark.parametrize("explicit", [(3, 0, 0, 2), (0, 3, 1, 2), (5, 1, 0, 0)], ids=str)
@pytest.mark.parametrize("stride", [(1, 1), (2, 3)], ids=str)
def test_conv2d_of_large_data_with_explicit_paddings(explicit, stride):
    x, filter = values((1, 40, 41, 2)), values((4, 3, 2, 3), seed=1)
    check_windows("Conv2D", x, filter, stride=stride, padding="EXPLICIT", explicit=explicit)
