"""Einsums and batched products with one matrix are products of matrices."""

import pytest

from msplit.engines.cuda.passes.convolution.fuse_mlp import MLPS
from msplit.engines.cuda.passes.measured import deciding
from tests.engines.cuda.cases import assert_equals_tensorflow, graph_of, kernels, program_of
from tests.engines.cuda.passes.harness import assert_equals_itself, check, normal, placeholder

pytestmark = pytest.mark.tf


@pytest.mark.parametrize(
    ("equation", "weights", "bias"),
    [
        ("abc,cd->abd", (6, 4), (4,)),
        ("abc,cde->abde", (6, 2, 3), (2, 3)),
        ("abc,cde->abde", (6, 2, 3), (1, 1, 2, 3)),
        ("acd,cde->ae", (3, 6, 5), (5,)),
    ],
)
def test_an_einsum_with_constant_weights_is_one_product(equation, weights, bias):
    feeds = {"x": normal(2, 3, 6)}

    def build(tf, v1):
        y = tf.einsum(equation, placeholder(tf, v1, feeds["x"]), tf.constant(normal(*weights)))
        tf.nn.relu(y + normal(*bias), name="out")

    check(build, feeds, ["_FusedMatMul"], outputs=["out"])


def test_an_einsum_that_is_no_plain_product_stays():
    feeds = {"x": normal(2, 3, 6)}

    def build(tf, v1):
        tf.einsum("abc,cd->adb", placeholder(tf, v1, feeds["x"]), tf.constant(normal(6, 4)), name="out")

    flat = graph_of(build)
    assert_equals_tensorflow(flat, feeds)
    assert "Einsum" in kernels(program_of(flat, feeds))


@pytest.mark.parametrize("transposed", [False, True])
def test_a_batched_product_with_one_matrix_is_a_product_of_matrices(transposed):
    feeds = {"x": normal(2, 3, 6)}

    def build(tf, v1):
        weights = tf.constant(normal(4, 6) if transposed else normal(6, 4))
        y = tf.raw_ops.BatchMatMulV2(x=placeholder(tf, v1, feeds["x"]), y=weights, adj_y=transposed)
        tf.nn.gelu(y + normal(4), name="out", approximate=True)

    flat = graph_of(build)
    assert_equals_tensorflow(flat, feeds)
    assert kernels(program_of(flat, feeds)) == ["_FusedMatMul"]


@pytest.mark.parametrize("act", ["relu", "gelu"])
def test_a_dense_layer_on_a_sequence_is_one_product(act):
    """Keras' Dense takes a tensor of rank three through Tensordot: reshapes around the product, the bias behind them."""
    feeds = {"x": normal(2, 3, 6)}

    def build(tf, v1):
        y = tf.tensordot(placeholder(tf, v1, feeds["x"]), tf.constant(normal(6, 4)), [[2], [0]])
        tf.identity(getattr(tf.nn, act)(tf.nn.bias_add(y, normal(4))), name="out")

    check(build, feeds, ["_FusedMatMul"], outputs=["out"])


def squeeze_and_excite(tf, x, inner, *, padding="SAME", strides=1):
    """As Keras's EfficientNet has it: how much each channel counts, by two products of the means of all channels."""
    channels = x.shape[-1]
    mean = tf.reduce_mean(x, [1, 2], keepdims=True)
    y = tf.nn.bias_add(tf.nn.conv2d(mean, normal(1, 1, channels, inner), strides, padding), normal(inner))
    y = y * tf.sigmoid(y)
    y = tf.nn.bias_add(tf.nn.conv2d(y, normal(1, 1, inner, channels), 1, "VALID"), normal(channels))
    return x * tf.sigmoid(y)


@pytest.mark.parametrize("strides", [1, 2])
def test_a_squeeze_and_excite_block_is_two_products(strides):
    feeds = {"x": normal(2, 5, 4, 6)}

    def build(tf, v1):
        tf.identity(squeeze_and_excite(tf, placeholder(tf, v1, feeds["x"]), 3, strides=strides), name="out")

    with deciding({MLPS: lambda graph, found: (False, None)}):
        program = check(build, feeds, ["Mean", "Mul", "_FusedMatMul", "_FusedMatMul"], outputs=["out"])
    products = [step.op.attrs["fused_ops"] for step in program.steps if step.op.op == "_FusedMatMul"]
    assert products == [("BiasAdd", "Swish"), ("BiasAdd", "Sigmoid")]


@pytest.mark.parametrize(
    ("size", "window", "strides", "padding"),
    [
        ((1, 2), (1, 1), 1, "SAME"),
        ((2, 2), (1, 1), 2, "SAME"),
        ((1, 1), (1, 3), 1, "SAME"),
        ((1, 1), (1, 1), 3, [[0, 0], [1, 1], [1, 1], [0, 0]]),
        ((1, 1), (1, 1), 1, [[0, 0], [0, 1], [0, 0], [0, 0]]),
    ],
)
def test_convolutions_that_see_more_than_one_pixel_stay(size, window, strides, padding):
    feeds = {"x": normal(2, *size, 6)}

    def build(tf, v1):
        x = placeholder(tf, v1, feeds["x"])
        tf.nn.conv2d(x, normal(*window, 6, 5), strides, padding, name="out")

    check(build, feeds, ["Conv2D"], outputs=["out"])


def test_a_convolution_of_groups_of_channels_of_one_pixel_stays():
    feeds = {"x": normal(2, 1, 1, 6)}

    def build(tf, v1):
        tf.nn.conv2d(placeholder(tf, v1, feeds["x"]), normal(1, 1, 3, 4), 1, "VALID", name="out")

    flat = graph_of(build, outputs=["out"])
    assert kernels(program_of(flat, feeds)) == ["Conv2D"]


def test_a_convolution_of_one_pixel_with_its_channels_in_front():
    feeds = {"x": normal(2, 6, 1, 1)}

    def build(tf, v1):
        x = placeholder(tf, v1, feeds["x"])
        y = tf.raw_ops.Conv2D(
            input=x, filter=tf.constant(normal(1, 1, 6, 5)), strides=[1] * 4, padding="VALID", data_format="NCHW"
        )
        tf.nn.relu(tf.nn.bias_add(y, normal(5), data_format="NCHW"), name="out")

    flat = graph_of(build, outputs=["out"])
    assert_equals_itself(flat, feeds)
    assert "_FusedConv2D" not in kernels(program_of(flat, feeds))
