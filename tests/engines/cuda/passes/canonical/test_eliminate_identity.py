"""What gives its input back vanishes."""

import numpy as np
import pytest

from tests.engines.cuda.cases import assert_equals_tensorflow, graph_of, program_of
from tests.engines.cuda.passes.harness import (
    check,
    normal,
    placeholder,
)

pytestmark = pytest.mark.tf


def test_what_changes_nothing_is_no_step():
    feeds = {"x": normal(2, 4)}

    def build(tf, v1):
        x = tf.stop_gradient(tf.identity(placeholder(tf, v1, feeds["x"])))
        x = tf.identity_n([x, x])[1]
        x = tf.cast(x, tf.float32)
        x = tf.constant(1.0) * (tf.reshape(x, [-1, 4]) * 1.0 / 1.0 - 0.0)
        x = tf.debugging.check_numerics(tf.transpose(x, [0, 1]), "nan")
        x = tf.tile(tf.pad(x, [[0, 0], [0, 0]]), [1, 1])[:, :]
        tf.tanh(tf.slice(tf.concat([x], 0), [0, 0], [-1, -1]), name="out")

    flat = graph_of(build, outputs=["out"])
    assert_equals_tensorflow(flat, feeds)
    assert [step.op.op for step in program_of(flat, feeds).steps if step.launches] == ["Tanh"]


def test_arithmetic_that_changes_the_shape_is_no_identity():
    feeds = {"x": normal(2, 1)}

    def build(tf, v1):
        tf.multiply(placeholder(tf, v1, feeds["x"]), np.ones((2, 3), np.float32), name="out")

    check(build, feeds, ["Mul"], outputs=["out"])
