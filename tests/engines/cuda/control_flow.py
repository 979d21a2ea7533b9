"""Graphs with loops and conds, of TensorFlow 1 and 2."""

import numpy as np

from tests.engines.cuda.cases import flat_of


def frames_of(build):
    """The flat graph of what `build` makes of x, y and a truth value, with control flow of TensorFlow 1. Its results are the outputs."""
    import tensorflow as tf

    v1 = tf.compat.v1
    before = v1.control_flow_v2_enabled()
    v1.disable_control_flow_v2()
    try:
        with tf.Graph().as_default() as graph:
            x, y = v1.placeholder(tf.float32, [2, 3], "x"), v1.placeholder(tf.float32, [2, 3], "y")
            results = build(tf, x, y, v1.placeholder(tf.bool, [], "flag"))
            names = [tf.identity(result, f"out{number}").op.name for number, result in enumerate(results)]
    finally:
        (v1.enable_control_flow_v2 if before else v1.disable_control_flow_v2)()
    return flat_of(graph.as_graph_def(), outputs=names)


def feeds_of(flat, flag=True):
    """Inputs of such a graph."""
    rng = np.random.default_rng(0)
    drawn = {name: rng.uniform(-1, 1, (2, 3)).astype(np.float32) for name in ("x", "y")} | {"flag": np.asarray(flag)}
    return {tensor.name: drawn[tensor.name] for tensor in flat.inputs}


def graph_of_function(function, *specs):
    """The flat graph of a tf.function with its control flow as functional ops. Outputs are out0, out1, …"""
    import tensorflow as tf

    concrete = tf.function(function).get_concrete_function(*specs)
    graph = tf.Graph()
    with graph.as_default():
        inputs = [tf.compat.v1.placeholder(spec.dtype, spec.shape, name=spec.name) for spec in specs]
        results = tf.nest.flatten(concrete(*inputs))
        names = [tf.identity(result, name=f"out{number}").op.name for number, result in enumerate(results)]
    return flat_of(graph.as_graph_def(), inputs=[spec.name for spec in specs], outputs=names)


def spec(shape, dtype="float32", name="x"):
    """An argument of such a function."""
    import tensorflow as tf

    return tf.TensorSpec(shape, dtype, name)


class Lstm:
    """A cell as `dynamic_rnn` wants it; TensorFlow's own need another Keras."""

    state_size = (4, 4)
    output_size = 4

    def __init__(self, gates):
        self.gates = gates

    def __call__(self, row, state, scope=None):
        import tensorflow as tf

        c, h = state
        i, j, f, o = tf.split(tf.matmul(tf.concat([row, h], 1), self.gates), 4, 1)
        c = c * tf.sigmoid(f + 1.0) + tf.sigmoid(i) * tf.tanh(j)
        h = tf.tanh(c) * tf.sigmoid(o)
        return h, (c, h)

    def zero_state(self, rows, dtype):
        import tensorflow as tf

        return tf.zeros([rows, 4], dtype), tf.zeros([rows, 4], dtype)
