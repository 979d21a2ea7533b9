"""What one op does for several: a product or a convolution with what follows it."""

import numpy as np
import pytest
import torch

from msplit.engines.cuda.ir.dtypes import to_numpy, to_torch
from msplit.engines.cuda.ir.node import Unsupported
from msplit.engines.cuda.kernels.activations import activate

from .harness import BOTH, FLOATS, check, check_both_formats, run_lowering, run_tensorflow, values

pytestmark = pytest.mark.tf

ACTIVATIONS = ["Relu", "Relu6", "Elu", "LeakyRelu", "Tanh", "Sigmoid"]


def after(result, name):
    """The activation behind a result of TensorFlow's."""
    return to_numpy(activate(name)(to_torch(result)))


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize(("transpose_a", "transpose_b"), [(False, False), (True, False), (False, True)])
def test_fused_matmul(activation, transpose_a, transpose_b):
    a = values((5, 3) if transpose_a else (3, 5), seed=1)
    b = values((4, 5) if transpose_b else (5, 4), seed=2)
    attrs = {"transpose_a": transpose_a, "transpose_b": transpose_b}
    attrs["fused_ops"] = ("BiasAdd", activation) if activation else ("BiasAdd",)
    check("_FusedMatMul", [a, b, values((4,), seed=3)], attrs)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("activation", ["GeluApproximate", "GeluExact", "Relu"])
def test_fused_matmul_with_an_activation_that_the_cpu_kernel_lacks(dtype, activation):
    a, b, bias = values((3, 5), dtype), values((5, 4), dtype, seed=1), values((4,), dtype, seed=2)
    plain = run_tensorflow("BiasAdd", [run_tensorflow("MatMul", [a, b])[0], bias])[0]
    check("_FusedMatMul", [a, b, bias], {"fused_ops": ("BiasAdd", activation)}, expected=[after(plain, activation)])


def test_fused_matmul_with_a_slope():
    inputs = [values((3, 5)), values((5, 4), seed=1), values((4,), seed=2)]
    check("_FusedMatMul", inputs, {"fused_ops": ("BiasAdd", "LeakyRelu"), "leakyrelu_alpha": 0.4})


def test_fused_matmul_of_an_empty_batch():
    inputs = [values((0, 5)), values((5, 4), seed=1), values((4,), seed=2)]
    check("_FusedMatMul", inputs, {"fused_ops": ("BiasAdd", "Relu")})


def test_fused_matmul_with_a_side_input():
    a, b, bias, side = values((3, 5)), values((5, 4), seed=1), values((4,), seed=2), values((3, 4), seed=3)
    attrs = {"fused_ops": ("BiasAdd", "Add", "Relu")}
    check("_FusedMatMul", [a, b, bias, side], attrs, expected=[np.maximum(a @ b + bias + side, 0)])


@pytest.mark.parametrize("op", ["_FusedMatMul", "_FusedConv2D"])
def test_unknown_fused_ops_are_refused(op):
    x = values((2, 2)) if op == "_FusedMatMul" else values((1, 2, 2, 2))
    filter = values((2, 2)) if op == "_FusedMatMul" else values((1, 1, 2, 2))
    attrs = {"fused_ops": ("BiasAdd", "Mish")}
    if op == "_FusedConv2D":
        attrs |= {"strides": (1, 1, 1, 1), "padding": "SAME", "num_args": 1, "TArgs": ("float32",)}
    with pytest.raises(Unsupported, match="Mish"):
        run_lowering(op, [x, filter, values((2,))], attrs)


def conv(fused_ops, num_args, **attrs):
    types = {"num_args": num_args, "TArgs": ("float32",) * num_args}
    return {"strides": (1, 2, 1, 1), "padding": "SAME", "fused_ops": fused_ops} | types | attrs


X, FILTER, BIAS = values((2, 7, 8, 3)), values((3, 3, 3, 4), seed=1), values((4,), seed=2)
NORM = [values((4,), seed=3 + i, low=0.5) for i in range(4)]


@pytest.mark.parametrize("activation", [None, "Relu", "Relu6", "Elu", "LeakyRelu"])
@pytest.mark.parametrize("first", ["BiasAdd", "FusedBatchNorm"])
def test_fused_conv2d(activation, first):
    args = [BIAS] if first == "BiasAdd" else NORM
    attrs = conv((first, activation) if activation else (first,), len(args), epsilon=0.01)
    check_both_formats("_FusedConv2D", [X, FILTER, *args], attrs)


@pytest.mark.parametrize("activation", [None, "Relu", "Elu"])
def test_fused_conv2d_with_a_side_input(activation):
    plain = {"strides": (1, 2, 1, 1), "padding": "SAME"}
    (result,) = run_tensorflow("Conv2D", [X, FILTER], plain)
    side = values(result.shape, seed=9)
    expected = result + BIAS + side
    expected = after(expected, activation) if activation else expected
    attrs = conv(("BiasAdd", "Add", activation) if activation else ("BiasAdd", "Add"), 2)
    check("_FusedConv2D", [X, FILTER, BIAS, side], attrs, expected=[expected], nchw=BOTH)


@pytest.mark.parametrize("size", [(40, 40), (6, 6)], ids=str)
@pytest.mark.parametrize("side", [False, True])
def test_fused_conv2d_with_uneven_padding(size, side):
    x = values((1, *size, 3))
    window = {"strides": (1, 2, 2, 1), "padding": "SAME"}
    (result,) = run_tensorflow("Conv2D", [x, FILTER], window)
    args = [BIAS, values(result.shape, seed=9)] if side else [BIAS]
    steps = ("BiasAdd", "Add", "Relu") if side else ("BiasAdd", "Relu")
    expected = [np.maximum(result + sum(args), 0)]
    check("_FusedConv2D", [x, FILTER, *args], conv(steps, len(args), **window), expected=expected, nchw=BOTH)


def test_fused_conv2d_of_another_filter_format_is_refused():
    with pytest.raises(Unsupported, match="OIHW"):
        run_lowering("_FusedConv2D", [X, FILTER, BIAS], conv(("BiasAdd",), 1, filter_format="OIHW"))


@pytest.mark.parametrize("activation", [None, "Relu", "Relu6"])
def test_fused_depthwise_conv2d(activation):
    filter, bias = values((3, 3, 3, 2), seed=1), values((6,), seed=2)
    window = {"strides": (1, 2, 2, 1), "padding": "SAME"}
    (plain,) = run_tensorflow("DepthwiseConv2dNative", [X, filter], window)
    expected = after(plain + bias, activation) if activation else plain + bias
    attrs = window | {"fused_ops": ("BiasAdd", activation) if activation else ("BiasAdd",)}
    check("_FusedDepthwiseConv2dNative", [X, filter, bias], attrs, expected=[expected], nchw=BOTH)


def test_library_epilogue_takes_these_arguments():
    # The lowering calls it on a GPU only, where this suite does not run: at least its signature must hold.
    a, b, bias = torch.ones(2, 3), torch.ones(3, 4), torch.ones(4)
    assert torch._addmm_activation(bias, a, b, use_gelu=True).shape == (2, 4)
