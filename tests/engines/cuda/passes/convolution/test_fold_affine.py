"""Scales, offsets and batch norms fold into the product or convolution in front of them."""

import numpy as np
import pytest

from msplit.engines.cuda.compile import optimize
from tests.engines.cuda.cases import CPU, assert_equals_tensorflow, graph_of, kernels, program_of
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


@pytest.mark.parametrize("how", ["scalar", "channels", "divided", "offset of zero", "shifted there and back"])
@pytest.mark.parametrize("head", ["conv", "depthwise", "dense", "dense transposed"])
def test_a_scale_in_front_folds_into_the_weights(head, how):
    feeds = {"x": normal(2, 6)} if "dense" in head else image(6)

    def build(tf, v1):
        x = placeholder(tf, v1, feeds["x"])
        x = {
            "scalar": lambda: x * 0.25,
            "channels": lambda: normal(6) * x,
            "divided": lambda: x / 3.0 * normal(6),
            "offset of zero": lambda: x * 0.25 + 0.0,
            "shifted there and back": lambda: ((x + 1.0) - 1.0) * 2.0,
        }[how]()
        if head == "dense":
            tf.matmul(x, normal(6, 5), name="out")
        elif head == "dense transposed":
            tf.matmul(x, normal(5, 6), transpose_b=True, name="out")
        elif head == "depthwise":
            tf.nn.depthwise_conv2d(x, normal(3, 3, 6, 2), [1, 1, 1, 1], "SAME", name="out")
        else:
            tf.nn.conv2d(x, normal(3, 3, 6, 4), 2, "SAME", name="out")

    flat = graph_of(build)
    assert_equals_tensorflow(flat, feeds, tolerance=1e-4)
    assert len(kernels(program_of(flat, feeds))) == 1


@pytest.mark.parametrize("what", ["offset", "read twice", "along height", "fetched", "no constant"])
def test_what_stays_in_front(what):
    feeds = image(6)

    def build(tf, v1):
        x = placeholder(tf, v1, feeds["x"])
        y = {
            "offset": lambda: x * 2.0 + 1.0,
            "along height": lambda: x * normal(8, 1, 6),
            "no constant": lambda: x * tf.reduce_max(x),
        }.get(what, lambda: x * 2.0)()
        y = tf.identity(y, name="seen")
        z = tf.nn.conv2d(y, normal(3, 3, 6, 4), 1, "SAME")
        tf.identity(z + tf.reduce_sum(y) if what == "read twice" else z, name="out")

    flat = graph_of(build, outputs=["out", "seen"] if what == "fetched" else ["out"])
    assert len(kernels(program_of(flat, feeds))) > 1
    assert_equals_tensorflow(flat, feeds, tolerance=1e-4)
