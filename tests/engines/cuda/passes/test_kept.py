"""What no rewrite may touch."""

import numpy as np
import pytest

from tests.engines.cuda.cases import assert_equals_tensorflow, graph_of, kernels, program_of
from tests.engines.cuda.passes.harness import (
    check,
    image,
    normal,
    placeholder,
)

pytestmark = pytest.mark.tf


def dense(tf, v1, feeds):
    return tf.matmul(placeholder(tf, v1, feeds["x"]), normal(6, 4), name="product")


@pytest.mark.parametrize("fetched", ["product", "biased", "scaled"])
def test_nothing_is_folded_across_a_fetched_value(fetched):
    feeds = {"x": normal(5, 6)}

    def build(tf, v1):
        y = tf.add(dense(tf, v1, feeds), normal(4), name="biased")
        tf.nn.relu(tf.multiply(y, normal(4), name="scaled"), name="out")

    flat = graph_of(build, outputs=[fetched, "out"])
    assert_equals_tensorflow(flat, feeds)
    assert len(kernels(program_of(flat, feeds))) > 1


def test_nothing_is_folded_across_a_value_with_another_reader():
    feeds = {"x": normal(5, 6)}

    def build(tf, v1):
        y = tf.nn.bias_add(dense(tf, v1, feeds), normal(4))
        tf.add(tf.nn.relu(y), tf.tanh(y), name="out")

    check(build, feeds, ["AddV2", "Relu", "Tanh", "_FusedMatMul"], outputs=["out"])


def test_a_value_that_is_added_to_itself_is_no_bias():
    feeds = {"x": normal(5, 6)}

    def build(tf, v1):
        y = dense(tf, v1, feeds)
        tf.add(y, y, name="out")

    check(build, feeds, ["AddV2", "MatMul"], outputs=["out"])


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("how", ["Mul", "AddV2"])
def test_constants_that_are_not_finite_stay_where_they_are(value, how):
    feeds = {"x": np.abs(normal(5, 6)) + 1}
    constant = np.array([1, value, 2, 3], np.float32)

    def build(tf, v1):
        y = tf.matmul(placeholder(tf, v1, feeds["x"]), np.abs(normal(6, 4)) + 1)
        tf.identity(tf.multiply(y, constant) if how == "Mul" else tf.add(y, constant), name="out")

    check(build, feeds, [how, "MatMul"], outputs=["out"])


def test_a_scale_that_the_type_can_not_hold_stays():
    feeds = {"x": normal(5, 6, dtype=np.float16)}

    def build(tf, v1):
        weights = np.full((6, 4), 60, np.float16)
        tf.multiply(tf.matmul(placeholder(tf, v1, feeds["x"] * np.float16(1e-3)), weights), np.float16(3e4), name="out")

    flat = graph_of(build, outputs=["out"])
    assert kernels(program_of(flat, feeds)) == ["MatMul", "Mul"]


def test_a_constant_per_position_is_no_scale_of_channels():
    feeds = {"x": normal(4, 6)}

    def build(tf, v1):
        tf.multiply(tf.matmul(placeholder(tf, v1, feeds["x"]), normal(6, 4)), normal(4, 1), name="out")

    check(build, feeds, ["MatMul", "Mul"], outputs=["out"])


def test_a_constant_that_makes_the_result_wider_is_no_bias():
    feeds = {"x": normal(4, 6)}

    def build(tf, v1):
        y = tf.add(tf.matmul(placeholder(tf, v1, feeds["x"]), normal(6, 1)), normal(3), name="wide")
        tf.add(y, normal(2, 1, 1), name="out")

    check(build, feeds, ["AddV2", "AddV2", "MatMul"], outputs=["out"])


def test_batch_norm_in_training_or_with_wanted_statistics_stays():
    feeds = image()

    def build(tf, v1):
        y = tf.nn.conv2d(placeholder(tf, v1, feeds["x"]), normal(3, 3, 3, 4), 1, "SAME")
        y, mean, _ = v1.nn.fused_batch_norm(y, normal(4), normal(4), is_training=True)
        tf.identity(y, name="out")
        tf.identity(mean, name="mean")

    check(build, feeds, ["Conv2D", "FusedBatchNormV3"], outputs=["out", "mean"])


def test_a_product_of_integers_is_not_fused():
    feeds = {"x": np.arange(12, dtype=np.int32).reshape(2, 6)}

    def build(tf, v1):
        y = tf.matmul(placeholder(tf, v1, feeds["x"]), np.ones((6, 4), np.int32))
        tf.identity(tf.nn.bias_add(y, np.arange(4, dtype=np.int32)) * 3, name="out")

    check(build, feeds, ["BiasAdd", "MatMul", "Mul"], outputs=["out"])
