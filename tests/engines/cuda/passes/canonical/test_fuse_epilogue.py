"""Bias, sums and activations ride on the product or convolution in front of them."""

import pytest

from tests.engines.cuda.cases import assert_equals_tensorflow, graph_of, program_of
from tests.engines.cuda.passes.harness import (
    check,
    image,
    normal,
    normalized,
    placeholder,
)

pytestmark = pytest.mark.tf


@pytest.mark.parametrize("act", [None, "Relu", "Relu6", "Elu", "LeakyRelu", "Tanh", "Sigmoid"])
@pytest.mark.parametrize("add", ["BiasAdd", "AddV2", "AddV2 the other way"])
def test_bias_and_activation_ride_on_a_product(act, add):
    feeds = {"x": normal(5, 6)}

    def build(tf, v1):
        y = tf.matmul(placeholder(tf, v1, feeds["x"]), normal(6, 4))
        bias = tf.constant(normal(4))
        y = {"BiasAdd": tf.nn.bias_add, "AddV2": tf.add}.get(add, lambda a, b: tf.add(b, a))(y, bias)
        if act == "LeakyRelu":
            y = tf.nn.leaky_relu(y, 0.3)
        elif act is not None:
            y = getattr(tf, act.lower())(y) if act in ("Tanh", "Sigmoid") else getattr(tf.nn, act.lower())(y)
        tf.identity(y, name="out")

    check(build, feeds, ["_FusedMatMul"], outputs=["out"])


def test_a_sum_rides_on_a_convolution_that_a_relu_follows():
    feeds = image(4)

    def build(tf, v1):
        x = placeholder(tf, v1, feeds["x"])
        y, _, _ = normalized(tf, tf.nn.conv2d(x, normal(3, 3, 4, 4), 1, "SAME"), 4)
        y = tf.nn.relu(y)
        y, _, _ = normalized(tf, tf.nn.conv2d(y, normal(3, 3, 4, 4), 1, "SAME"), 4)
        tf.nn.relu(x + y, name="out")

    program = check(build, feeds, ["_FusedConv2D", "_FusedConv2D"], outputs=["out"])
    assert program.steps[1].op.attrs["fused_ops"] == ("BiasAdd", "Add", "Relu")


def test_a_sum_that_broadcasts_does_not_ride_along():
    feeds = {"x": normal(2, 8, 8, 4), "z": normal(2, 1, 1, 4)}

    def build(tf, v1):
        y = tf.nn.conv2d(placeholder(tf, v1, feeds["x"]), normal(3, 3, 4, 4), 1, "SAME")
        tf.nn.relu(tf.nn.bias_add(y, normal(4)) + placeholder(tf, v1, feeds["z"], "z"), name="out")

    check(build, feeds, ["AddV2", "Relu", "_FusedConv2D"], outputs=["out"])


def test_a_bias_behind_two_products_rides_on_one_of_them():
    feeds = {"x": normal(2, 6), "h": normal(2, 3)}

    def build(tf, v1):
        x, h = placeholder(tf, v1, feeds["x"]), placeholder(tf, v1, feeds["h"], "h")
        y = tf.nn.bias_add(tf.matmul(x, normal(6, 4)) + tf.matmul(tf.tanh(h), normal(3, 4)), normal(4))
        tf.tanh(y, name="out")

    program = check(build, feeds, ["AddV2", "MatMul", "Tanh", "Tanh", "_FusedMatMul"], outputs=["out"])
    (fused,) = [step for step in program.steps if step.op.op == "_FusedMatMul"]
    assert fused.inputs[0] in program.feeds.values(), "the product that is ready first takes the bias"


def test_a_constant_behind_a_sum_of_numbers_stays():
    feeds = {"x": normal(2, 6)}

    def build(tf, v1):
        x = placeholder(tf, v1, feeds["x"])
        tf.add(tf.reduce_sum(x) + tf.reduce_max(x), 1.0, name="out")

    check(build, feeds, ["AddV2", "AddV2", "Max", "Sum"], outputs=["out"])


@pytest.mark.parametrize("kind", ["Conv2D", "DepthwiseConv2dNative"])
@pytest.mark.parametrize("spelled", ["silu", "product", "the other way"])
def test_swish_rides_on_a_convolution(kind, spelled):
    feeds = image(4)

    def build(tf, v1):
        x = placeholder(tf, v1, feeds["x"])
        depthwise = kind != "Conv2D"
        y = (
            tf.nn.depthwise_conv2d(x, normal(3, 3, 4, 1), [1, 2, 2, 1], "SAME")
            if depthwise
            else tf.nn.conv2d(x, normal(3, 3, 4, 4), 1, "SAME")
        )
        y = tf.nn.bias_add(y, normal(4))
        y = {"silu": tf.nn.silu, "product": lambda y: y * tf.sigmoid(y)}.get(spelled, lambda y: tf.sigmoid(y) * y)(y)
        tf.identity(y, name="out")

    program = check(build, feeds, [f"_Fused{kind}"], outputs=["out"], tolerance=1e-4)
    assert program.steps[-1].op.attrs["fused_ops"] == ("BiasAdd", "Swish")


@pytest.mark.parametrize("what", ["slope", "read twice", "square"])
def test_what_is_no_swish_stays(what):
    feeds = image(4)

    def build(tf, v1):
        x = placeholder(tf, v1, feeds["x"])
        y = tf.nn.bias_add(tf.nn.conv2d(x, normal(3, 3, 4, 4), 1, "SAME"), normal(4))
        gate = tf.sigmoid(2.0 * y if what == "slope" else y)
        tf.identity(gate * gate if what == "square" else y * gate, name="out")
        if what == "read twice":
            tf.identity(gate, name="gate")
        if what == "square":
            tf.identity(y, name="y")

    outputs = {"read twice": ["out", "gate"], "square": ["out", "y"]}.get(what, ["out"])
    flat = graph_of(build, outputs=outputs)
    assert_equals_tensorflow(flat, feeds, tolerance=1e-4)
    assert not any("Swish" in step.op.attrs.get("fused_ops", ()) for step in program_of(flat, feeds).steps)


def test_a_residual_rides_on_a_convolution_and_a_branch_beside_it_does_not():
    feeds = image(4)

    def build(tf, v1):
        x = tf.nn.relu(
            tf.nn.bias_add(tf.nn.conv2d(placeholder(tf, v1, feeds["x"]), normal(1, 1, 4, 4), 1, "SAME"), normal(4))
        )
        y = tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(x, normal(3, 3, 4, 6), 1, "SAME"), normal(6)))
        x = x + tf.nn.bias_add(tf.nn.conv2d(y, normal(1, 1, 6, 4), 1, "SAME"), normal(4))
        one, two = (tf.nn.bias_add(tf.nn.conv2d(x, normal(3, 3, 4, 4), 1, "SAME"), normal(4)) for _ in range(2))
        tf.add(one, two, name="out")

    program = check(build, feeds, ["AddV2", *["_FusedConv2D"] * 5], outputs=["out"], tolerance=1e-4)
    assert [step.op.attrs.get("fused_ops") for step in program.steps].count(("BiasAdd", "Add")) == 1
