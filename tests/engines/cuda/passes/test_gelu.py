"""GELU rides on a product however it is written; what is only near it stays."""

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


@pytest.mark.parametrize(
    "form",
    [
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


def test_gelu_whose_parts_are_wanted_elsewhere_stays():
    feeds = {"x": normal(5, 6)}

    def build(tf, v1):
        y = tf.matmul(placeholder(tf, v1, feeds["x"]), normal(6, 4)) + normal(4)
        tf.add(tf.nn.gelu(y, approximate=True), y, name="out")

    flat = graph_of(build, outputs=["out"])
    assert_equals_tensorflow(flat, feeds)
    assert "Tanh" in kernels(program_of(flat, feeds))
