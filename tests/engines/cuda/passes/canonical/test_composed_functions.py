"""Layer normalization, softmax and GELU, however they are spelled: each in one kernel."""

import numpy as np
import pytest

from tests.engines.cuda.cases import assert_equals_tensorflow, graph_of, kernels, program_of
from tests.engines.cuda.passes.harness import (
    assert_equals_itself,
    check,
    normal,
    placeholder,
)

pytestmark = pytest.mark.tf


def check_rows(spelled, shape, expected, *, dtype=np.float32, outputs=("out",)):
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
    check_rows(spelled, shape, ["_LayerNorm"])


def test_epsilon_is_read_off():
    program = check_rows(lambda tf, v1, x: bert(tf, v1, x, 0.01), (3, 8), ["_LayerNorm"], dtype=np.float64)
    assert program.steps[0].op.attrs["epsilon"] == pytest.approx(0.01, rel=1e-6)


def test_a_layer_norm_before_a_residual_leaves_its_input_alone():
    check_rows(
        lambda tf, v1, x: x + bert(tf, v1, tf.tanh(x)) + tf.tanh(x), (3, 8), ["AddV2", "AddV2", "Tanh", "_LayerNorm"]
    )


def test_a_mean_that_is_wanted_stays():
    program = check_rows(
        bert,
        (3, 8),
        ["AddV2", "AddV2", "Mean", "Mean", "Mul", "Mul", "Rsqrt", "Square", "Sub"],
        outputs=("mean", "out"),
    )
    assert len(program.fetches) == 2


def test_a_parameter_per_row_is_no_layer_norm():
    scale = normal(3, 1)
    check_rows(lambda tf, v1, x: bert(tf, v1, x) * scale, (3, 8), ["Mul", "_LayerNorm"])
    per_row = np.abs(normal(3, 1)) + 0.1

    def other(tf, v1, x):
        mean = tf.reduce_mean(x, -1, keepdims=True)
        variance = tf.reduce_mean(tf.square(x - mean), -1, keepdims=True)
        return (x - mean) * tf.math.rsqrt(variance + per_row)

    check_rows(other, (3, 8), ["AddV2", "Mean", "Mean", "Mul", "Rsqrt", "Square", "Sub"])


def test_a_norm_that_is_almost_one_stays():
    def other(tf, v1, x):
        mean = tf.reduce_mean(x, -1, keepdims=True)
        return (x - mean) / (tf.sqrt(tf.reduce_mean(tf.square(x - mean), -1, keepdims=True)) + 1e-3)

    check_rows(other, (3, 8), ["AddV2", "Mean", "Mean", "RealDiv", "Sqrt", "Square", "Sub"])


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
    check_rows(spelled_softmax, (2, 5, 16), ["Softmax"])


def test_a_softmax_that_may_overflow_stays():
    def other(tf, v1, x):
        raised = tf.exp(x)
        return raised / tf.reduce_sum(raised, -1, keepdims=True) + tf.reduce_max(x, -1, keepdims=True)

    check_rows(other, (3, 8), ["AddV2", "Exp", "Max", "RealDiv", "Sum"])


def test_an_activation_that_the_library_has_needs_no_bias():
    weights = normal(8, 4)
    check_rows(lambda tf, v1, x: tf.nn.relu(tf.matmul(x, weights)), (3, 8), ["_FusedMatMul"])
    check_rows(lambda tf, v1, x: tf.nn.gelu(tf.matmul(x, weights), approximate=True), (3, 8), ["_FusedMatMul"])
    check_rows(lambda tf, v1, x: tf.nn.relu(tf.reshape(tf.matmul(x, weights), (-1, 2, 2))), (3, 8), ["_FusedMatMul"])
    check_rows(lambda tf, v1, x: tf.tanh(tf.matmul(x, weights)), (3, 8), ["MatMul", "Tanh"])


def test_a_convolution_without_bias_takes_a_residual_and_relu_along():
    filter = normal(3, 3, 4, 4)
    check_rows(lambda tf, v1, x: tf.nn.relu(tf.nn.conv2d(x, filter, 1, "SAME")), (2, 6, 6, 4), ["_FusedConv2D"])
    check_rows(lambda tf, v1, x: tf.nn.relu(tf.nn.conv2d(x, filter, 1, "SAME") + x), (2, 6, 6, 4), ["_FusedConv2D"])
    check_rows(lambda tf, v1, x: tf.nn.conv2d(x, filter, 1, "SAME") + x, (2, 6, 6, 4), ["AddV2", "Conv2D"])


def times_itself(x):
    return x * x


EXACT = [
    lambda tf, x: 0.5 * x * (1.0 + tf.math.erf(x / np.float32(np.sqrt(2)))),
    lambda tf, x: x * (0.5 * (1.0 + tf.math.erf(x * np.float32(np.sqrt(0.5))))),
    lambda tf, x: (x * 0.5) * (tf.math.erf(0.70710678 * x) + 1.0),
    lambda tf, x: 0.5 * x * tf.math.erfc(-x * np.float32(np.sqrt(0.5))),
    lambda tf, x: tf.nn.gelu(x, approximate=False),
]
APPROXIMATE = [
    lambda tf, x: tf.nn.gelu(x, approximate=True),
    lambda tf, x: x * 0.5 * (1.0 + tf.tanh(0.7978845608 * (x + 0.044715 * x * x * x))),
    lambda tf, x: x * (0.5 * (1.0 + tf.tanh(np.float32(np.sqrt(2 / np.pi)) * (x + 0.044715 * tf.pow(x, 3.0))))),
    lambda tf, x: x * tf.sigmoid(1.5957691216 * (x + 0.044715 * tf.square(x) * x)),
    lambda tf, x: x * 0.5 * (1.0 + tf.tanh(0.7978845608 * (x + x * times_itself(x * 0.2114592158)))),
]


@pytest.mark.parametrize(
    ("form", "name"), [(form, "GeluExact") for form in EXACT] + [(form, "GeluApproximate") for form in APPROXIMATE]
)
def test_gelu_rides_on_a_product_however_it_is_written(form, name):
    feeds = {"x": normal(5, 6)}

    def build(tf, v1):
        y = tf.matmul(placeholder(tf, v1, feeds["x"]), normal(6, 4)) + normal(4)
        tf.identity(form(tf, y), name="out")

    program = check(build, feeds, ["_FusedMatMul"], outputs=["out"])
    assert program.steps[0].op.attrs["fused_ops"] == ("BiasAdd", name)


SWISH = [
    lambda tf, x: x * tf.sigmoid(x),
    lambda tf, x: tf.sigmoid(x) * x,
    lambda tf, x: x * tf.sigmoid(1.0 * x),
    lambda tf, x: x * (0.5 * tf.tanh(0.5 * x) + 0.5),
]


@pytest.mark.parametrize("form", SWISH)
def test_swish_rides_on_a_product_and_on_a_convolution(form):
    rng = np.random.default_rng(
        0
    )  # numbers of its own: where all sums are far below 0, the form with tanh loses its digits in TensorFlow

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    feeds = {"x": normal(2, 4, 4, 6)}

    def build(tf, v1):
        x = placeholder(tf, v1, feeds["x"])
        y = form(tf, tf.nn.conv2d(x, normal(3, 3, 6, 4), 1, "SAME") + normal(4))
        tf.identity(form(tf, tf.matmul(tf.reduce_max(y, [1, 2]), normal(4, 5)) + normal(5)), name="out")

    flat = graph_of(build, outputs=["out"])
    assert_equals_tensorflow(flat, feeds)
    steps = {step.op.op: step.op.attrs.get("fused_ops") for step in program_of(flat, feeds).steps}
    assert steps["_FusedMatMul"] == steps["_FusedConv2D"] == ("BiasAdd", "Swish")


@pytest.mark.parametrize(
    "form",
    [
        lambda tf, x: x * tf.sigmoid(0.98 * x),
        lambda tf, x: 0.5 * x * (1.0 + tf.math.erf(x * 0.72)),
        lambda tf, x: 0.51 * x * (1.0 + tf.math.erf(x * 0.70710678)),
        lambda tf, x: x * tf.sigmoid(1.702 * x),
        lambda tf, x: x * 0.5 * (1.0 + tf.tanh(0.7978845608 * (x + 0.05 * x * x * x))),
    ],
)
def test_what_is_only_near_gelu_stays(form):
    feeds = {"x": normal(5, 6)}

    def build(tf, v1):
        tf.identity(form(tf, tf.matmul(placeholder(tf, v1, feeds["x"]), normal(6, 4)) + normal(4)), name="out")

    # Not against TensorFlow: its own optimizer takes the last one of them for GELU.
    flat = graph_of(build, outputs=["out"])
    assert_equals_itself(flat, feeds)
    assert [op for op in kernels(program_of(flat, feeds)) if op == "Mul"]


ROUNDED = [
    lambda tf, x: 0.5 * x * (1.0 + tf.math.erf(0.70710678 * x)),
    lambda tf, x: 0.5 * x * (1.0 + tf.math.erf(x / float(np.float32(np.sqrt(2))))),
    lambda tf, x: 0.5 * x * (1.0 + tf.math.erf(x / 1.41421356)),
    lambda tf, x: 0.5 * x * (1.0 + tf.tanh(0.79788456 * (x + 0.044715 * x * x * x))),
    lambda tf, x: 0.5 * x * (1.0 + tf.tanh(np.sqrt(2 / np.pi) * (x + float(np.float32(0.044715)) * x * x * x))),
    lambda tf, x: x * tf.sigmoid(1.00000001 * x),
]
IN_FULL = [
    lambda tf, x: 0.5 * x * (1.0 + tf.math.erf(x * np.sqrt(0.5))),
    lambda tf, x: x * (0.5 + 0.5 * tf.math.erf(x / np.sqrt(2))),
    lambda tf, x: 0.5 * x * (1.0 + tf.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * tf.pow(x, 3.0)))),
    lambda tf, x: x * tf.sigmoid(x),
]


@pytest.mark.parametrize(("form", "fuses"), [(form, False) for form in ROUNDED] + [(form, True) for form in IN_FULL])
def test_an_activation_of_float64_keeps_the_constants_of_the_model(form, fuses):
    feeds = {"x": normal(50, 6).astype(np.float64)}

    def build(tf, v1):
        y = tf.matmul(placeholder(tf, v1, feeds["x"]), normal(6, 4).astype(np.float64)) + normal(4).astype(np.float64)
        tf.identity(form(tf, y), name="out")

    flat = graph_of(build, outputs=["out"])
    assert_equals_tensorflow(flat, feeds, tolerance=1e-12)
    assert ("Mul" not in kernels(program_of(flat, feeds))) == fuses


def test_a_softmax_and_a_norm_of_float64_keep_the_constants_of_the_model():
    def soft(tf, v1, x):
        raised = tf.exp(x - tf.reduce_max(x, -1, keepdims=True))
        return raised / (tf.reduce_sum(raised, -1, keepdims=True) + 5e-10)

    def norm(tf, v1, x):
        mean = tf.reduce_mean(x, -1, keepdims=True)
        variance = tf.reduce_mean(tf.square(x - mean), -1, keepdims=True) * (1 - 1e-6)
        return (x - mean) * tf.math.rsqrt(variance + 1e-5)

    for spelled, alone in ((soft, "Softmax"), (norm, "_LayerNorm")):
        feeds = {"x": normal(5, 8).astype(np.float64) * np.logspace(-4, 0, 5)[:, None]}
        flat = graph_of(
            lambda tf, v1, spelled=spelled, x=feeds["x"]: tf.identity(
                spelled(tf, v1, placeholder(tf, v1, x)), name="out"
            ),
            outputs=["out"],
        )
        assert_equals_tensorflow(flat, feeds, tolerance=1e-12)
        assert alone not in kernels(program_of(flat, feeds))


def test_gelu_whose_parts_are_wanted_elsewhere_stays():
    feeds = {"x": normal(5, 6)}

    def build(tf, v1):
        y = tf.matmul(placeholder(tf, v1, feeds["x"]), normal(6, 4)) + normal(4)
        tf.add(tf.nn.gelu(y, approximate=True), y, name="out")

    flat = graph_of(build, outputs=["out"])
    assert_equals_tensorflow(flat, feeds)
    assert "Tanh" in kernels(program_of(flat, feeds))
