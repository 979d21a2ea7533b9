"""Ops that compute the same run once."""

import pytest

from tests.engines.cuda.cases import assert_equals_tensorflow, graph_of, kernels, program_of
from tests.engines.cuda.passes.harness import check, image, normal, placeholder

pytestmark = pytest.mark.tf


def test_ops_that_compute_the_same_run_once():
    def build(tf, v1):
        x = placeholder(tf, v1, normal(3, 8))
        left, right = tf.nn.relu(x), tf.nn.relu(x)
        v1.identity(tf.tanh(left * 2.0) + tf.sigmoid(right * 2.0) - left, name="out")

    check(build, {"x": normal(3, 8)}, ["AddV2", "Mul", "Relu", "Sigmoid", "Sub", "Tanh"], outputs=["out"])


def test_equal_ops_with_other_attributes_or_random_numbers_are_not_duplicates():
    def build(tf, v1):
        x = placeholder(tf, v1, normal(3, 8))
        sloped = tf.nn.leaky_relu(x, 0.1) + tf.nn.leaky_relu(x, 0.3)
        noise = [tf.random.stateless_uniform([3, 8], [1, seed]) for seed in (1, 2)]
        v1.identity(sloped * noise[0] + noise[1], name="out")

    flat = graph_of(build, outputs=["out"])
    assert_equals_tensorflow(flat, {"x": normal(3, 8)})
    assert kernels(program_of(flat, {"x": normal(3, 8)})).count("LeakyRelu") == 2


def test_each_convolution_still_takes_its_own_padding_along():
    filters = [normal(3, 3, 3, 4) for _ in range(2)]

    def build(tf, v1):
        x = placeholder(tf, v1, normal(2, 8, 8, 3))
        padded = [tf.pad(tf.nn.relu(x), [[0, 0], [1, 1], [1, 1], [0, 0]]) for _ in range(2)]
        made = [tf.nn.conv2d(p, f, 1, "VALID") for p, f in zip(padded, filters, strict=True)]
        v1.identity(made[0] + made[1], name="out")

    check(build, image(), ["AddV2", "Conv2D", "Conv2D", "Relu"], outputs=["out"])
