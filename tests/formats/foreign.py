"""Graphs as TensorFlow 1 programs make them, with what their users never see: frames, pivots, guards, counters, gradients."""

from __future__ import annotations


def _lstm(tf, size):
    def cell(x, c, h):
        v1 = tf.compat.v1
        with v1.variable_scope("cell", reuse=v1.AUTO_REUSE):
            kernel = v1.get_variable("kernel", (x.shape[-1] + size, 4 * size))
            bias = v1.get_variable("bias", (4 * size,), initializer=v1.zeros_initializer())
        i, j, f, o = tf.split(tf.concat([x, h], 1) @ kernel + bias, 4, axis=1)
        c = tf.sigmoid(f + 1.0) * c + tf.sigmoid(i) * tf.tanh(j)
        return c, tf.tanh(c) * tf.sigmoid(o)

    return cell


def dynamic_rnn(tf, x, size, lengths=None):
    """What tf.nn.dynamic_rnn builds around an LSTM cell, conds on the lengths included. Its cells went with Keras 2."""
    v1 = tf.compat.v1
    cell = _lstm(tf, size)
    with v1.variable_scope("rnn"):
        xs = tf.transpose(x, [1, 0, 2])
        steps, batch = tf.shape(xs)[0], tf.shape(xs)[1]
        zero = tf.zeros([batch, size])
        out = v1.TensorArray(tf.float32, steps)
        given = v1.TensorArray(tf.float32, steps).unstack(xs)
        shortest, longest = (steps, steps) if lengths is None else (tf.reduce_min(lengths), tf.reduce_max(lengths))

        def body(time, out, c, h):
            now = given.read(time)
            now.set_shape([None, x.shape[-1]])

            def step():
                return cell(now, c, h)

            def some():
                return [tf.where((time >= lengths)[:, None], old, new) for new, old in zip(step(), (c, h), strict=True)]

            if lengths is None:
                new_c, new_h = step()
            else:
                new_c, new_h = v1.cond(
                    time >= longest, lambda: [c, h], lambda: v1.cond(time < shortest, lambda: list(step()), some)
                )
                new_c.set_shape([None, size])
                new_h.set_shape([None, size])
            return time + 1, out.write(time, new_h), new_c, new_h

        bound = tf.minimum(steps, tf.maximum(1, longest))
        start = (tf.constant(0, name="time"), out, zero, zero)
        _, out, c, h = v1.while_loop(lambda time, *_: time < bound, body, start)
        return tf.transpose(out.stack(), [1, 0, 2], name="outputs"), c, h


def cond_at_the_end(tf, v1):
    x, p = v1.placeholder(tf.float32, (None, 4), "x"), v1.placeholder(tf.bool, (), "p")
    v1.cond(p, lambda: tf.nn.relu(x), lambda: tf.tanh(x), name="choice")


def conds_in_a_cond(tf, v1):
    x = v1.placeholder(tf.float32, (None, 4), "x")
    p, q = v1.placeholder(tf.bool, (), "p"), v1.placeholder(tf.bool, (), "q")
    v1.cond(p, lambda: v1.cond(q, lambda: x * 2, lambda: x + 3.0), lambda: tf.tanh(x), name="choice")


def loose_ends_in_a_branch(tf, v1):
    x, p = v1.placeholder(tf.float32, (None, 4), "x"), v1.placeholder(tf.bool, (), "p")

    def yes():
        tf.exp(x, name="unused")
        tf.constant(3.0, name="unused_constant")
        return tf.nn.relu(x)

    tf.sigmoid(v1.cond(p, yes, lambda: tf.tanh(x)), name="out")


def a_case_on_an_input(tf, v1):
    x, i = v1.placeholder(tf.float32, (None, 4), "x"), v1.placeholder(tf.int32, (), "i")
    v1.case([(tf.equal(i, 0), lambda: x * 2), (tf.equal(i, 1), lambda: x + 1)], default=lambda: x - 1, name="choice")


def a_switch_that_nothing_merges(tf, v1):
    x, p = v1.placeholder(tf.float32, (None, 4), "x"), v1.placeholder(tf.bool, (), "p")
    _, yes = tf.raw_ops.Switch(data=x, pred=p)
    tf.exp(yes, name="only_where_true")
    tf.tanh(x, name="out")


def loop_at_the_end(tf, v1):
    x = v1.placeholder(tf.float32, (None, 4), "x")
    turns = tf.shape(x)[1]
    v1.while_loop(lambda i, s: i < turns, lambda i, s: (i + 1, tf.tanh(s * 0.5)), (tf.constant(0), x), name="loop")


def loose_ends_in_a_loop(tf, v1):
    x = v1.placeholder(tf.float32, (None, 4), "x")

    def body(i, s):
        tf.constant(7.0, name="unused_constant")
        tf.exp(s, name="unused")
        return i + 1, s * 0.5

    tf.identity(v1.while_loop(lambda i, s: i < 5, body, (tf.constant(0), x))[1], name="out")


def rnn(tf, v1):
    outputs, _, _ = dynamic_rnn(tf, v1.placeholder(tf.float32, (None, 6, 4), "x"), 5)
    tf.reduce_sum(outputs[:, -1], 1, name="score")


def rnn_with_lengths(tf, v1):
    x, lengths = v1.placeholder(tf.float32, (None, 6, 4), "x"), v1.placeholder(tf.int32, (None,), "lengths")
    dynamic_rnn(tf, x, 5, lengths)


def rnn_in_training(tf, v1):
    x, y = v1.placeholder(tf.float32, (None, 6, 4), "x"), v1.placeholder(tf.float32, (None,), "y")
    outputs, _, _ = dynamic_rnn(tf, x, 5)
    loss = tf.reduce_mean((tf.reduce_sum(outputs[:, -1], 1) - y) ** 2, name="loss")
    v1.train.AdamOptimizer(0.01).minimize(loss, name="train")


def rnn_with_gradients(tf, v1):
    x = v1.placeholder(tf.float32, (None, 6, 4), "x")
    outputs, _, _ = dynamic_rnn(tf, x, 5)
    wanted = [x, *v1.trainable_variables()]
    for number, gradient in enumerate(tf.gradients(tf.reduce_sum(outputs, name="energy"), wanted)):
        tf.identity(gradient, name=f"gradient_{number}")


def map_fn(tf, v1):
    tf.map_fn(lambda row: tf.tanh(row) * 2, v1.placeholder(tf.float32, (None, 4), "x"), name="map")


def map_fn_of_two(tf, v1):
    x = v1.placeholder(tf.float32, (None, 4), "x")
    types = (tf.float32, tf.float32)
    tf.map_fn(lambda row: (tf.tanh(row), tf.reduce_sum(row)), x, fn_output_signature=types, name="map")


def scan(tf, v1):
    tf.scan(lambda total, row: total + row, v1.placeholder(tf.float32, (None, 4), "x"), name="scan")


def tensor_array(tf, v1):
    x = v1.placeholder(tf.float32, (None, 4), "x")
    v1.TensorArray(tf.float32, 2).write(0, x).write(1, x * 2).stack(name="out")


def training_with_summaries(tf, v1):
    x, y = v1.placeholder(tf.float32, (None, 4), "x"), v1.placeholder(tf.float32, (None, 1), "y")
    p = tf.sigmoid(x @ v1.get_variable("w", (4, 1)), name="probability")
    loss = tf.reduce_mean((p - y) ** 2, name="loss")
    v1.summary.scalar("loss", loss)
    v1.summary.histogram("probability", p)
    v1.summary.merge_all()
    v1.metrics.auc(y > 0.5, p, name="auc")
    v1.train.MomentumOptimizer(0.1, 0.9).minimize(loss, name="train")
    v1.train.Saver()


def evaluation(tf, v1):
    x, y = v1.placeholder(tf.float32, (None, 4), "x"), v1.placeholder(tf.int64, (None,), "y")
    predicted = tf.argmax(x @ v1.get_variable("w", (4, 3)), 1, name="predicted")
    v1.metrics.accuracy(y, predicted, name="accuracy")
    v1.metrics.precision(y > 0, predicted > 0, name="precision")


def guarded(tf, v1):
    x = v1.placeholder(tf.float32, (None, 4), "x")
    tf.debugging.assert_less(x, 1e6)
    tf.tanh(x, name="out")


def printed(tf, v1):
    x = v1.placeholder(tf.float32, (None, 4), "x")
    tf.debugging.assert_less(x, 1e6)
    v1.Print(tf.tanh(x), [x], name="out")


def lookup(tf, v1):
    words = v1.placeholder(tf.string, (None,), "words")
    values = tf.lookup.KeyValueTensorInitializer(["a", "b"], tf.constant([1, 2], tf.int64))
    tf.lookup.StaticHashTable(values, 0).lookup(words, name="out")


def several_results_of_one_op(tf, v1):
    x = v1.placeholder(tf.float32, (None, 8), "x")
    tf.nn.top_k(x, 3, name="best")
    tf.split(x, 2, axis=1, name="halves")


WANTED = {
    cond_at_the_end: (["choice/Merge"], ["choice/Identity"]),
    conds_in_a_cond: (["choice/Merge"], ["choice/Identity"]),
    loose_ends_in_a_branch: ["out"],
    a_case_on_an_input: (["choice/cond/Merge"], ["choice/cond/Identity"]),
    a_switch_that_nothing_merges: ["out"],
    loop_at_the_end: (["loop/Exit_1"], ["loop/Identity_3"]),
    loose_ends_in_a_loop: ["out"],
    rnn: (["rnn/while/Exit_2", "rnn/while/Exit_3", "score"], ["rnn/while/Identity_4", "rnn/while/Identity_5", "score"]),
    rnn_with_lengths: (
        ["rnn/while/Exit_2", "rnn/while/Exit_3", "rnn/outputs"],
        ["rnn/while/Identity_4", "rnn/while/Identity_5", "rnn/outputs"],
    ),
    rnn_in_training: (["loss"], ["rnn/while/Identity_4", "rnn/while/Identity_5", "loss"]),
    rnn_with_gradients: (
        ["energy", "gradient_0", "gradient_1", "gradient_2"],
        ["rnn/while/Identity_4", "rnn/while/Identity_5", "energy", "gradient_0", "gradient_1", "gradient_2"],
    ),
    map_fn: (["map/TensorArrayStack/TensorArrayGatherV3"], ["map/TensorArrayV2Stack/TensorListStack"]),
    map_fn_of_two: (
        ["map/TensorArrayStack/TensorArrayGatherV3", "map/TensorArrayStack_1/TensorArrayGatherV3"],
        ["map/TensorArrayV2Stack/TensorListStack", "map/TensorArrayV2Stack_1/TensorListStack"],
    ),
    scan: (
        ["scan/while/Exit_2", "scan/TensorArrayStack/TensorArrayGatherV3"],
        ["scan/while/Identity_3", "scan/TensorArrayV2Stack/TensorListStack"],
    ),
    tensor_array: (["out/out"], ["out/TensorListStack"]),
    training_with_summaries: ["loss", "auc/update_op"],
    evaluation: ["accuracy/update_op", "precision/update_op"],
    guarded: ["out"],
    printed: ["out"],
    lookup: ["out/LookupTableFindV2"],
    several_results_of_one_op: ["best", "best:1", "halves", "halves:1"],
}
"""Builder -> the outputs that its user would name; two lists where TensorFlow 1's control flow has other names than TensorFlow 2's."""


def built(build, *, v2: bool = False):
    """The graph that a builder makes, with TensorFlow 1's control flow or TensorFlow 2's."""
    import tensorflow as tf

    v1 = tf.compat.v1
    before = v1.control_flow_v2_enabled()
    (v1.enable_control_flow_v2 if v2 else v1.disable_control_flow_v2)()
    try:
        graph = tf.Graph()
        with graph.as_default():
            v1.set_random_seed(1)
            build(tf, v1)
    finally:
        (v1.enable_control_flow_v2 if before else v1.disable_control_flow_v2)()
    return graph
