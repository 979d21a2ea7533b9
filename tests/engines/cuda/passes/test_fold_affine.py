"""Scales, offsets and batch norms fold into the product or convolution in front of them."""

import numpy as np
import pytest

from msplit.engines.cuda.compile import optimize
from tests.engines.cuda.cases import CPU, graph_of
from tests.engines.cuda.passes.harness import (
    check,
    image,
    normal,
    normalized,
    placeholder,
)

pytestmark = pytest.mark.tf


# Not Tanh: TensorFlow 2.21's own optimizer fuses it with batch norm, and then has no kernel for that.
@pytest.mark.parametrize("act", [None, "Relu", "Relu6", "Elu", "LeakyRelu", "Sigmoid"])
def test_batch_norm_folds_into_a_convolution_and_takes_the_activation_along(act):
    feeds = image()

    def build(tf, v1):
        y = tf.nn.conv2d(placeholder(tf, v1, feeds["x"]), normal(3, 3, 3, 4), 2, "SAME")
        y, _, _ = normalized(tf, y, 4)
        if act is not None:
            y = getattr(tf.raw_ops, act)(**{"x" if act == "Sigmoid" else "features": y})
        tf.identity(y, name="out")

    program = check(build, feeds, ["_FusedConv2D"], outputs=["out"])
    fused = program.steps[0].op.attrs["fused_ops"]
    assert fused == (("BiasAdd",) if act is None else ("BiasAdd", act))


def test_batch_norm_folds_into_a_depthwise_convolution():
    feeds = image()

    def build(tf, v1):
        y = tf.nn.depthwise_conv2d(placeholder(tf, v1, feeds["x"]), normal(3, 3, 3, 2), [1, 1, 1, 1], "SAME")
        y, _, _ = normalized(tf, y, 6)
        tf.nn.relu6(y, name="out")

    check(build, feeds, ["_FusedDepthwiseConv2dNative"], outputs=["out"])


@pytest.mark.parametrize("shape", [(4,), (1, 1, 1, 4), (1, 4)])
@pytest.mark.parametrize("last", ["add", "sub", "rsub"])
def test_batch_norm_taken_apart_folds_too(shape, last):
    feeds = image()

    def build(tf, v1):
        y = tf.nn.conv2d(placeholder(tf, v1, feeds["x"]), normal(3, 3, 3, 4), 1, "VALID")
        y = tf.nn.bias_add(y, normal(4)) * tf.constant(normal(*shape))
        offset = tf.constant(normal(*shape))
        y = {"add": tf.add, "sub": tf.subtract, "rsub": lambda a, b: tf.subtract(b, a)}[last](y, offset)
        tf.nn.relu(y, name="out")

    check(build, feeds, ["_FusedConv2D"], outputs=["out"])


def test_scales_offsets_and_divisions_behind_a_dense_layer_fold_into_it():
    feeds = {"x": normal(5, 6)}

    def build(tf, v1):
        y = tf.matmul(placeholder(tf, v1, feeds["x"]), normal(4, 6), transpose_b=True) + normal(4)
        y = (y - normal(4)) / (np.abs(normal(4)) + 0.5) * 0.25
        tf.nn.relu(y + normal(1, 4), name="out")

    check(build, feeds, ["_FusedMatMul"], outputs=["out"])


def test_a_scale_alone_needs_no_bias():
    feeds = {"x": normal(5, 6)}

    def build(tf, v1):
        tf.multiply(tf.matmul(placeholder(tf, v1, feeds["x"]), normal(6, 4)), 0.125, name="out")

    check(build, feeds, ["MatMul"], outputs=["out"])


def test_folded_weights_of_a_shared_filter_leave_the_other_reader_its_own():
    feeds = image()

    def build(tf, v1):
        x = placeholder(tf, v1, feeds["x"])
        filters = tf.constant(normal(3, 3, 3, 4))
        a = tf.nn.relu(tf.nn.conv2d(x, filters, 1, "SAME") * normal(4) + normal(4))
        tf.add(a, tf.nn.conv2d(x, filters, 1, "SAME"), name="out")

    check(build, feeds, ["AddV2", "Conv2D", "_FusedConv2D"], outputs=["out"])


def test_every_rewritten_op_does_the_work_of_the_nodes_it_replaced():
    feeds = image()

    def build(tf, v1):
        y = tf.nn.conv2d(placeholder(tf, v1, feeds["x"]), normal(3, 3, 3, 4), 1, "SAME", name="conv")
        y = tf.nn.relu(tf.multiply(y, normal(4), name="scale") + normal(4), name="out")

    flat = graph_of(build)
    optimized = optimize(flat, feeds, CPU)
    (op,) = optimized.graph.ops.values()
    names = [flat.graph.names[node] for node in op.source_nodes]
    assert names[0] == "conv"
    assert {"conv", "scale", "out"} <= set(names)
    assert len(names) == len(set(names)) == 4
