"""Zeros around an image become padding of the convolution."""

import numpy as np
import pytest

from tests.engines.cuda.cases import graph_of, kernels, program_of
from tests.engines.cuda.passes.harness import assert_equals_itself, check, image, normal, placeholder

pytestmark = pytest.mark.tf


@pytest.mark.parametrize("kind", ["Conv2D", "DepthwiseConv2dNative"])
def test_zeros_around_an_image_become_padding(kind):
    feeds = image()

    def build(tf, v1):
        x = tf.pad(placeholder(tf, v1, feeds["x"]), [[0, 0], [1, 2], [0, 1], [0, 0]])
        y = (
            tf.nn.conv2d(x, normal(3, 3, 3, 4), 2, "VALID")
            if kind == "Conv2D"
            else tf.nn.depthwise_conv2d(x, normal(3, 3, 3, 2), [1, 2, 2, 1], "VALID")
        )
        tf.identity(y, name="out")

    check(build, feeds, [kind], outputs=["out"])


@pytest.mark.parametrize(
    ("paddings", "value", "mode"),
    [
        ([[0, 0], [1, 1], [1, 1], [0, 1]], 0.0, "VALID"),
        ([[0, 0], [1, 1], [1, 1], [0, 0]], 1.0, "VALID"),
        ([[0, 0], [1, 1], [1, 1], [0, 0]], 0.0, "SAME"),
    ],
)
def test_other_padding_stays(paddings, value, mode):
    feeds = image()

    def build(tf, v1):
        x = tf.pad(placeholder(tf, v1, feeds["x"]), paddings, constant_values=value)
        tf.nn.conv2d(x, normal(3, 3, 3 + paddings[3][1], 4), 2, mode, name="out")

    # Not against TensorFlow: its own optimizer folds padding of the channels too, and fails.
    flat = graph_of(build)
    assert_equals_itself(flat, feeds)
    assert len(kernels(program_of(flat, feeds))) == 2


@pytest.mark.parametrize("axis", [1, 2])
def test_zeros_around_a_sequence_become_padding(axis):
    feeds = {"x": normal(2, 9, 3)}

    def build(tf, v1):
        x = tf.pad(placeholder(tf, v1, feeds["x"]), [[0, 0], [2, 1], [0, 0]])
        filter = np.expand_dims(normal(3, 3, 4), axis - 1)
        tf.squeeze(tf.nn.conv2d(tf.expand_dims(x, axis), filter, 1, "VALID"), axis, name="out")

    check(build, feeds, ["Conv2D"], outputs=["out"])
