"""Gradients that models compute at inference, against TensorFlow's kernels."""

import itertools

import numpy as np
import pytest

from msplit.engines.cuda.ir.node import Unsupported

from .harness import FLOATS, check, check_both_formats, ints, run_lowering, run_tensorflow, values

pytestmark = pytest.mark.tf

PADDINGS = ["SAME", "VALID"]


@pytest.mark.parametrize("op", ["TanhGrad", "SigmoidGrad"])
@pytest.mark.parametrize("dtype", [*FLOATS, "float64", "complex64"], ids=str)
def test_gradients_of_squashing_functions(op, dtype):
    check(op, [values((3, 4), dtype, low=0, high=1), values((3, 4), dtype, seed=1)])


@pytest.mark.parametrize("dtype", [*FLOATS, "float64", "int32"], ids=str)
@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4), (2, 3, 4, 5), (0, 4)], ids=str)
def test_gradient_of_a_bias(shape, dtype):
    check("BiasAddGrad", [values(shape, dtype)])
    if len(shape) > 2:
        check("BiasAddGrad", [values(shape, dtype)], {"data_format": "NCHW"})


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_axes_of_broadcast_gradients(dtype):
    shapes = [(), (1,), (3,), (1, 1), (1, 3), (3, 1), (2, 3), (2, 1, 3), (1, 1, 1), (0, 3), (0,), (1, 0)]
    for first, second in itertools.product(shapes, shapes):
        vectors = [np.asarray(shape, dtype).reshape(-1) for shape in (first, second)]
        try:
            np.broadcast_shapes(first, second)
        except ValueError:
            with pytest.raises(Unsupported, match="do not broadcast"):
                run_lowering("BroadcastGradientArgs", vectors)
            continue
        check("BroadcastGradientArgs", vectors)


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize(("kernel", "stride"), [(2, 2), (3, 2), (3, 1), (2, 3)])
def test_gradients_of_pools(padding, kernel, stride):
    attrs = {"ksize": (1, kernel, kernel, 1), "strides": (1, stride, stride, 1), "padding": padding}
    data = values((2, 7, 8, 3))
    (result,) = run_tensorflow("MaxPool", [data], attrs)
    gradients = values(result.shape, seed=1)
    check_both_formats("MaxPoolGrad", [data, result, gradients], attrs, data=(0, 1, 2))
    check_both_formats("AvgPoolGrad", [ints(2, 7, 8, 3), gradients], attrs, data=(0, 1))
    tied = np.round(data)
    check("MaxPoolGrad", [tied, run_tensorflow("MaxPool", [tied], attrs)[0], gradients], attrs)


@pytest.mark.parametrize("padding", PADDINGS)
def test_gradients_of_pools_over_three_axes(padding):
    attrs = {"ksize": (1, 2, 3, 2, 1), "strides": (1, 2, 2, 1, 1), "padding": padding}
    data = values((2, 5, 6, 4, 3))
    (result,) = run_tensorflow("MaxPool3D", [data], attrs)
    gradients = values(result.shape, seed=1)
    check("MaxPool3DGrad", [data, result, gradients], attrs)
    check("AvgPool3DGrad", [ints(2, 5, 6, 4, 3), gradients], attrs)


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("stride", [1, 2])
def test_gradients_of_convolutions(padding, stride):
    attrs = {"strides": (1, stride, stride, 1), "padding": padding}
    data, filter = values((2, 9, 8, 3)), values((3, 2, 3, 4))
    (result,) = run_tensorflow("Conv2D", [data, filter], attrs)
    check("Conv2DBackpropFilter", [data, ints(3, 2, 3, 4), values(result.shape, seed=1)], attrs)
    (result,) = run_tensorflow("DepthwiseConv2dNative", [data, filter], attrs)
    gradients = values(result.shape, seed=1)
    check("DepthwiseConv2dNativeBackpropInput", [ints(2, 9, 8, 3), filter, gradients], attrs)
    check("DepthwiseConv2dNativeBackpropFilter", [data, ints(3, 2, 3, 4), gradients], attrs)


def test_gradient_of_a_convolution_over_three_axes_with_respect_to_its_filter():
    attrs = {"strides": (1, 2, 1, 1, 1), "padding": "SAME"}
    data, filter = values((2, 5, 6, 4, 3)), values((3, 2, 3, 3, 4))
    (result,) = run_tensorflow("Conv3D", [data, filter], attrs)
    check("Conv3DBackpropFilterV2", [data, ints(*filter.shape), values(result.shape, seed=1)], attrs)


@pytest.mark.parametrize("op", ["FusedBatchNormGrad", "FusedBatchNormGradV2", "FusedBatchNormGradV3"])
@pytest.mark.parametrize("training", [False, True])
def test_gradients_of_batch_normalization(op, training):
    scale, mean, variance = values((4,)), values((4,), seed=3), values((4,), seed=4, low=0.5, high=2)
    inputs = [values((2, 5, 6, 4)), values((2, 5, 6, 4), seed=1), scale, mean, variance]
    if training:
        mean, variance = inputs[1].mean((0, 1, 2)), inputs[1].var((0, 1, 2))
        inputs[3:] = [mean, variance]
    inputs += [np.zeros(0, np.float32)] if op.endswith("V3") else []
    check(op, inputs, {"is_training": training}, outputs=[0, 1, 2], rtol=1e-4)


@pytest.mark.parametrize("mode", ["REFLECT", "SYMMETRIC"])
@pytest.mark.parametrize("pads", [[(0, 0), (1, 2)], [(2, 1), (1, 0)], [(2, 2), (3, 3)]], ids=str)
def test_gradient_of_mirrored_padding(mode, pads):
    shape = [size + low + high for size, (low, high) in zip((3, 4), pads, strict=True)]
    check("MirrorPadGrad", [values(shape), np.asarray(pads, np.int32)], {"mode": mode})


@pytest.mark.parametrize(
    ("align", "half"), [(False, False), (True, False), (False, True)], ids=["plain", "aligned", "half"]
)
@pytest.mark.parametrize("to", [(3, 9), (8, 4), (5, 6), (1, 1)], ids=str)
def test_gradients_of_resizing(align, half, to):
    attrs = {"align_corners": align, "half_pixel_centers": half}
    gradients, original = values((2, *to, 3)), values((2, 5, 6, 3), seed=1)
    check("ResizeBilinearGrad", [gradients, original], attrs)
    check("ResizeBicubicGrad", [gradients, original], attrs, rtol=1e-4)
    check("ResizeNearestNeighborGrad", [gradients, ints(5, 6)], attrs)


def test_gradient_of_local_response_normalization():
    attrs = {"depth_radius": 2, "bias": 1.5, "alpha": 0.3, "beta": 0.75}
    data = values((2, 3, 4, 7))
    (result,) = run_tensorflow("LRN", [data], attrs)
    check("LRNGrad", [values(data.shape, seed=1), data, result], attrs, rtol=1e-4)
