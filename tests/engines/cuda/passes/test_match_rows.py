"""Layer norm and softmax, however they are spelled, are one kernel; what only looks like them stays."""

import numpy as np
import pytest

from tests.engines.cuda.cases import assert_equals_tensorflow, graph_of, kernels, program_of
from tests.engines.cuda.passes.harness import normal

pytestmark = pytest.mark.tf


def check(spelled, shape, expected, *, dtype=np.float32, outputs=("out",)):
    """Equal to TensorFlow, in exactly these kernels."""
    feeds = {"x": 3 * normal(*shape, dtype=dtype) + 1}

    def build(tf, v1):
        x = v1.placeholder(tf.as_dtype(dtype), [None, *shape[1:]], name="x")
        v1.identity(spelled(tf, v1, x), name="out")

    flat = graph_of(build, outputs=list(outputs))
    assert_equals_tensorflow(flat, feeds)
    program = program_of(flat, feeds)
    assert kernels(program) == sorted(expected)
    return program


def bert(tf, v1, x, epsilon=1e-6):
    width = x.shape[-1]
    mean = tf.reduce_mean(x, -1, keepdims=True, name="mean")
    centred = x - mean
    variance = tf.reduce_mean(tf.square(centred), -1, keepdims=True)
    gamma, beta = normal(width, dtype=x.dtype.as_numpy_dtype), normal(width, dtype=x.dtype.as_numpy_dtype)
    return centred * tf.math.rsqrt(variance + epsilon) * gamma + beta


def moments(tf, v1, x):
    mean, variance = tf.nn.moments(x, [-1], keepdims=True)
    return tf.nn.batch_normalization(x, mean, variance, normal(x.shape[-1]), normal(x.shape[-1]), 1e-3)


def divided(tf, v1, x):
    mean = tf.reduce_mean(x, [-1], keepdims=True)
    variance = tf.reduce_mean(tf.math.squared_difference(x, mean), [-1], keepdims=True)
    return (x - mean) / tf.sqrt(variance + 1e-5)


@pytest.mark.parametrize("spelled", [bert, moments, divided])
@pytest.mark.parametrize("shape", [(3, 8), (2, 5, 16)])
def test_a_layer_norm_is_one_kernel(spelled, shape):
    check(spelled, shape, ["_LayerNorm"])


def test_epsilon_is_read_off():
    program = check(lambda tf, v1, x: bert(tf, v1, x, 0.01), (3, 8), ["_LayerNorm"], dtype=np.float64)
    assert program.steps[0].op.attrs["epsilon"] == pytest.approx(0.01, rel=1e-6)


def test_a_layer_norm_before_a_residual_leaves_its_input_alone():
    check(lambda tf, v1, x: x + bert(tf, v1, tf.tanh(x)) + tf.tanh(x), (3, 8), ["AddV2", "AddV2", "Tanh", "_LayerNorm"])


def test_a_mean_that_is_wanted_stays():
    program = check(
        bert,
        (3, 8),
        ["AddV2", "AddV2", "Mean", "Mean", "Mul", "Mul", "Rsqrt", "Square", "Sub"],
        outputs=("mean", "out"),
    )
    assert len(program.fetches) == 2


def test_a_parameter_per_row_is_no_layer_norm():
    scale = normal(3, 1)
    check(lambda tf, v1, x: bert(tf, v1, x) * scale, (3, 8), ["Mul", "_LayerNorm"])
    per_row = np.abs(normal(3, 1)) + 0.1

    def other(tf, v1, x):
        mean = tf.reduce_mean(x, -1, keepdims=True)
        variance = tf.reduce_mean(tf.square(x - mean), -1, keepdims=True)
        return (x - mean) * tf.math.rsqrt(variance + per_row)

    check(other, (3, 8), ["AddV2", "Mean", "Mean", "Mul", "Rsqrt", "Square", "Sub"])


def test_a_norm_that_is_almost_one_stays():
    def other(tf, v1, x):
        mean = tf.reduce_mean(x, -1, keepdims=True)
        return (x - mean) / (tf.sqrt(tf.reduce_mean(tf.square(x - mean), -1, keepdims=True)) + 1e-3)

    check(other, (3, 8), ["AddV2", "Mean", "Mean", "RealDiv", "Sqrt", "Square", "Sub"])


def test_half_precision_keeps_its_rounding():
    assert "_LayerNorm" not in kernels(
        program_of(
            graph_of(
                lambda tf, v1: v1.identity(bert(tf, v1, v1.placeholder(tf.float16, [3, 8], name="x"), 1e-3), name="o")
            ),
            {"x": normal(3, 8, dtype=np.float16)},
        )
    )


def spelled_softmax(tf, v1, x):
    raised = tf.exp(x - tf.reduce_max(x, -1, keepdims=True))
    return raised / tf.reduce_sum(raised, -1, keepdims=True)


def test_a_softmax_is_one_kernel():
    check(spelled_softmax, (2, 5, 16), ["Softmax"])


def test_a_softmax_that_may_overflow_stays():
    def other(tf, v1, x):
        raised = tf.exp(x)
        return raised / tf.reduce_sum(raised, -1, keepdims=True) + tf.reduce_max(x, -1, keepdims=True)

    check(other, (3, 8), ["AddV2", "Exp", "Max", "RealDiv", "Sum"])


def test_an_activation_that_the_library_has_needs_no_bias():
    weights = normal(8, 4)
    check(lambda tf, v1, x: tf.nn.relu(tf.matmul(x, weights)), (3, 8), ["_FusedMatMul"])
    check(lambda tf, v1, x: tf.nn.gelu(tf.matmul(x, weights), approximate=True), (3, 8), ["_FusedMatMul"])
    check(lambda tf, v1, x: tf.nn.relu(tf.reshape(tf.matmul(x, weights), (-1, 2, 2))), (3, 8), ["_FusedMatMul"])
    check(lambda tf, v1, x: tf.tanh(tf.matmul(x, weights)), (3, 8), ["MatMul", "Tanh"])


def test_a_convolution_without_bias_takes_a_residual_and_relu_along():
    filter = normal(3, 3, 4, 4)
    check(lambda tf, v1, x: tf.nn.relu(tf.nn.conv2d(x, filter, 1, "SAME")), (2, 6, 6, 4), ["_FusedConv2D"])
    check(lambda tf, v1, x: tf.nn.relu(tf.nn.conv2d(x, filter, 1, "SAME") + x), (2, 6, 6, 4), ["_FusedConv2D"])
    check(lambda tf, v1, x: tf.nn.conv2d(x, filter, 1, "SAME") + x, (2, 6, 6, 4), ["AddV2", "Conv2D"])
