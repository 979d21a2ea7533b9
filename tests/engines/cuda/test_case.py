"""A Case that an input decides, and its gradient: every branch runs, and one is chosen."""

from __future__ import annotations

import numpy as np
import pytest

from msplit.engines.cuda.coverage import cover
from tests.engines.cuda.cases import assert_equals_tensorflow, flat_of

pytestmark = pytest.mark.tf


@pytest.fixture(scope="module")
def flat():
    import tensorflow as tf

    v1 = tf.compat.v1
    rng = np.random.default_rng(0)
    one, other = (rng.standard_normal((4, 4)).astype(np.float32) for _ in range(2))
    before = v1.control_flow_v2_enabled()
    v1.enable_control_flow_v2()
    try:
        with tf.Graph().as_default() as graph:
            x, number = v1.placeholder(tf.float32, [3, 4], name="x"), v1.placeholder(tf.int32, [], name="number")
            branches = [
                lambda: (tf.tanh(tf.matmul(x, one)), x),
                lambda: (tf.nn.relu(x), x * 2.0),
                lambda: (tf.sqrt(tf.matmul(x, other) - 100.0), x),  # NaN: it must not be seen where it is not chosen
            ]
            y, z = tf.switch_case(number, branches, default=lambda: (tf.zeros_like(x) - 2.0, x + 1.0))
            tf.identity(y + z, name="y")
            tf.identity(tf.gradients(tf.reduce_sum(y * y + z), [x])[0], name="gradient")
    finally:
        if not before:
            v1.disable_control_flow_v2()
    definition = graph.as_graph_def()
    assert any(node.op in ("Case", "StatelessCase") for node in definition.node)
    return flat_of(definition, outputs=["y", "gradient"])


@pytest.mark.parametrize("number", [0, 1, 2, 3, 7, -1])
def test_the_branch_of_a_number_that_is_fed(flat, number):
    found = cover(flat)
    assert not found.missing
    assert not found.stuck
    feeds = {"x": np.random.default_rng(1).standard_normal((3, 4)).astype(np.float32), "number": np.int32(number)}
    assert_equals_tensorflow(flat, feeds)
