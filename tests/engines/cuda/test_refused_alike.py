"""What the engine does not run: `analyze`, by `cover`, and whoever builds it name the same op with the same reason."""

from __future__ import annotations

import numpy as np
import pytest

from msplit.engines.cuda.coverage import cover
from msplit.errors import EngineError
from tests.engines.cuda.cases import flat_of, run

pytestmark = pytest.mark.tf

X = np.ones((2, 5, 3), np.float32)


def random_in_a_branch(tf, v1):
    x, taken = v1.placeholder(tf.float32, X.shape, name="x"), v1.placeholder(tf.bool, [], name="taken")
    return v1.cond(taken, lambda: x + tf.random.uniform(X.shape, seed=1), lambda: x), {"taken": np.bool_(True)}


def turns_of_the_longest_row(tf, v1):
    """As `dynamic_rnn` has it where lengths are fed."""
    x, lengths = v1.placeholder(tf.float32, X.shape, name="x"), v1.placeholder(tf.int32, [2], name="lengths")
    bound = tf.reduce_max(lengths)
    _, state = v1.while_loop(
        lambda time, _: time < bound, lambda time, h: (time + 1, tf.tanh(h + x[:, time])), (0, tf.zeros([2, 3]))
    )
    return state, {"lengths": np.array([2, 3], np.int32)}


def gradient_of_digamma(tf, v1):
    """TensorFlow has no gradient of it for functions, and runs this no more than the engine."""
    from tensorflow.python.framework import function
    from tensorflow.python.ops import functional_ops

    @function.Defun(tf.float32)
    def digamma(x):
        return tf.math.digamma(x) * x

    x = v1.placeholder(tf.float32, X.shape, name="x")
    found = functional_ops.symbolic_gradient([x, tf.ones(X.shape)], [tf.float32], digamma)
    digamma.add_to_graph(v1.get_default_graph())
    return found[0] if isinstance(found, list) else found, {}


@pytest.mark.parametrize("second", [False, True], ids=["v1", "v2"])
@pytest.mark.parametrize(
    ("build", "named"),
    [
        (random_in_a_branch, "RandomUniform"),
        (turns_of_the_longest_row, "depends on values that only the run knows (after 0 of them)"),
        (gradient_of_digamma, "SymbolicGradient"),
    ],
)
def test_analysis_and_compiler_refuse_in_the_same_words(build, named, second):
    import tensorflow as tf

    v1 = tf.compat.v1
    before = v1.control_flow_v2_enabled()
    (v1.enable_control_flow_v2 if second else v1.disable_control_flow_v2)()
    try:
        with tf.Graph().as_default() as graph:
            found, feeds = build(tf, v1)
            tf.identity(found, name="y")
    finally:
        (v1.enable_control_flow_v2 if before else v1.disable_control_flow_v2)()
    flat = flat_of(graph.as_graph_def(), outputs=["y"])
    told = cover(flat)
    reasons = [*told.missing, *told.refused]
    with pytest.raises(EngineError) as error:
        run(flat, {"x": X, **feeds})
    assert reasons
    assert all(reason in str(error.value) for reason in reasons)
    assert named in str(error.value)
