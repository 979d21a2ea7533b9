"""Gradients through loops, conds and recurrent nets, of TensorFlow 1 and 2, against TensorFlow."""

import numpy as np
import pytest

from msplit.engines.cuda.coverage import cover
from msplit.errors import EngineError
from msplit.inputs.make import make_inputs
from tests.engines.cuda.cases import assert_equals_tensorflow, program_of, run, saved
from tests.engines.cuda.control_flow import Lstm, feeds_of, frames_of, graph_of_function, spec

pytestmark = pytest.mark.tf

WEIGHTS = (np.random.default_rng(1).standard_normal((3, 3)) / 2).astype(np.float32)
GATES = (np.random.default_rng(2).standard_normal((7, 16)) / 3).astype(np.float32)


def check(flat, every_feeds, **options):
    assert cover(flat).reasons == []
    for feeds in every_feeds:
        assert_equals_tensorflow(flat, feeds, streams=(3,), **options)


def check_frames(build, flags=(True,), **options):
    flat = frames_of(build)
    check(flat, [feeds_of(flat, flag) for flag in flags], **options)
    return flat


def turns(tf, count, body, start):
    """A value after some turns of a loop."""
    return tf.while_loop(lambda i, _: i < count, lambda i, a: (i + 1, body(i, a)), (0, start))[1]


# TensorFlow 1: stacks, arrays of gradients


@pytest.mark.parametrize("larger", [{}, {"group": True, "fuse": True}])
def test_what_a_frame_pushes_its_gradient_pops(larger):
    def build(tf, x, y, flag):
        a = turns(tf, 3, lambda i, a: tf.tanh(tf.matmul(a, WEIGHTS)) * y, x)
        return *tf.gradients(a, [x, y]), tf.gradients(a * a, [y])[0]

    flat = check_frames(build, **larger)
    assert {"StackPushV2", "StackPopV2"} < set(flat.graph.ops)
    assert not any(step.op.op.startswith("Stack") for step in program_of(flat, feeds_of(flat)).steps)


def test_gradients_of_frames_in_frames_and_inside_of_frames():
    def build(tf, x, y, flag):
        v1 = tf.compat.v1

        def more_each_time(i, a):
            return (
                v1.while_loop(lambda j, _: j < i, lambda j, b: (j + 1, tf.sin(b) * y), (0, a), swap_memory=True)[1] * x
            )

        def descent(i, a):
            b = turns(tf, 2, lambda j, b: tf.sin(b) * y, a)
            return a - 0.1 * tf.gradients(b * b, a)[0]

        return *tf.gradients(turns(tf, 3, more_each_time, x), [x, y]), turns(tf, 3, descent, x)

    check_frames(build)


def test_gradients_of_conds_around_and_inside_of_frames():
    def build(tf, x, y, flag):
        known = turns(
            tf, 3, lambda i, a: tf.cond(tf.equal(i, 1), lambda: a * tf.exp(y), lambda: tf.tanh(a) + tf.reduce_sum(a)), x
        )
        of_values = turns(
            tf,
            3,
            lambda i, a: tf.cond(tf.reduce_sum(a) > 0.2, lambda: a * tf.exp(y) - 1.0, lambda: tf.tanh(a) + 0.3),
            x,
        )
        around = tf.cond(flag, lambda: turns(tf, 2, lambda i, a: tf.sin(a) * y, x), lambda: x * y)
        return [tf.gradients(value, [x, y])[side] for value in (known, of_values, around) for side in (0, 1)]

    check_frames(build, flags=(True, False))


def test_gradients_of_arrays_add_what_is_written_twice():
    def build(tf, x, y, flag):
        rows = tf.TensorArray(tf.float32, 2, clear_after_read=False).unstack(x)
        made, unread = tf.TensorArray(tf.float32, 3, infer_shape=False), tf.TensorArray(tf.float32, 3)

        def turn(i, made, unread, h):
            h = tf.cond(tf.reduce_sum(h) > 0.0, lambda: h * rows.read(0), lambda: h - rows.read(1))
            return i + 1, made.write(i, tf.tanh(rows.read(i % 2) * h)), unread.write(i, tf.exp(h)), h

        _, made, _, _ = tf.while_loop(lambda i, *_: i < 3, turn, (0, made, unread, y[0]))
        chain = tf.TensorArray(tf.float32, 4, clear_after_read=False).write(0, x)
        chain = turns(tf, 3, lambda i, a: a.write(i + 1, tf.tanh(a.read(i) * y) + a.read(0)), chain)
        return *tf.gradients(made.gather([0, 2]), [x, y]), *tf.gradients(
            chain.gather([1, 3, 1]) * chain.read(2), [x, y]
        )

    assert "TensorArrayGradV3" in check_frames(build).graph.ops


def test_gradients_of_arrays_of_parts_of_several_lengths():
    def build(tf, x, y, flag):
        rows = tf.TensorArray(tf.float32, 2, infer_shape=False).split(tf.concat([x, x], 0), [1, 3])
        made = tf.TensorArray(tf.float32, 0, dynamic_size=True, infer_shape=False)
        made = turns(tf, 2, lambda i, a: a.write(i, tf.concat([rows.read(i)] * 2, 0) * y[0]), made).concat()
        last = tf.TensorArray(tf.float32, 2, infer_shape=False).split(tf.concat([x, x], 0), [1, 3]).read(1)
        return *tf.gradients(made * made, [x, y]), *tf.gradients(last * last, [x])

    check_frames(build)


def test_gradients_of_map_and_scan():
    def build(tf, x, y, flag):
        mapped = tf.map_fn(lambda row: tf.reduce_sum(row) * tf.exp(row), x)
        scanned = tf.scan(lambda h, row: tf.tanh(h * row), x, initializer=y[0])
        return *tf.gradients(mapped, [x]), *tf.gradients(scanned, [x, y])

    check_frames(build)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_gradients_of_recurrent_nets(kind):
    def build(tf, x, y, flag):
        from tensorflow.python.ops import rnn

        steps, cell = [x, y, x * y, x - y], Lstm(GATES)
        if kind == "static":
            outputs, (c, _) = rnn.static_rnn(
                cell, steps, sequence_length=tf.where(flag, [2, 4], [0, 1]), dtype=tf.float32
            )
            return tf.gradients([outputs[-1], c], [x, y])
        rows = tf.stack(steps, 1)
        _, (_, last) = rnn.dynamic_rnn(cell, rows, dtype=tf.float32)
        (there, back), _ = rnn.bidirectional_dynamic_rnn(cell, cell, rows, sequence_length=[2, 4], dtype=tf.float32)
        return *tf.gradients(last, [x, y]), *tf.gradients(there * back, [x, y])

    check_frames(build, flags=(True, False) if kind == "static" else (True,))


def test_the_gradient_of_a_frame_whose_turns_depend_on_values_is_refused_by_its_name():
    def build(tf, x, y, flag):
        with tf.name_scope("growth"):
            (a,) = tf.while_loop(lambda a: tf.reduce_sum(a) < 3.0, lambda a: (a + tf.exp(x),), (y,))
        return tf.gradients(a, [x])

    flat = frames_of(build)
    with pytest.raises(
        EngineError, match=r"how many turns the loop growth/while/while_context takes depends on values"
    ):
        run(flat, feeds_of(flat))
    assert any("the loop growth/while/while_context" in reason for reason in cover(flat).reasons)


# TensorFlow 2: lists that are added, optionals


def check_function(function, *specs, every=({},)):
    """The gradient of a function with respect to its first argument, for several values of the others."""
    import tensorflow as tf

    def gradient(x, *others):
        with tf.GradientTape() as tape:
            tape.watch(x)
            found = function(x, *others)
        return tape.gradient(found, x)

    flat = graph_of_function(gradient, *specs)
    feeds = make_inputs(flat, {}, batch=3)
    check(flat, [feeds | {name: np.asarray(value) for name, value in more.items()} for more in every])
    return flat


def test_gradients_of_loops_in_loops_with_conds_inside():
    import tensorflow as tf

    def function(x):
        def inner(i, a):
            return turns(tf, i, lambda j, b: tf.sin(b) * x, a) * x

        def chosen(i, a):
            of_values = tf.cond(tf.reduce_sum(a) > 0.1, lambda: tf.tanh(a) * x, lambda: tf.sin(a) * 2.0 - 1.0)
            return tf.cond(tf.equal(i, 1), lambda: of_values + tf.exp(a), lambda: of_values)

        return turns(tf, 3, inner, x) + turns(tf, 3, chosen, x)

    check_function(function, spec([2, 3]))


def test_gradients_of_gradients_of_a_loop():
    import tensorflow as tf

    def function(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            found = turns(tf, 3, lambda i, a: tf.tanh(tf.matmul(a, WEIGHTS)) * x, x)
        return tape.gradient(found, x)

    check_function(function, spec([2, 3]))


def test_gradients_of_lists():
    import tensorflow as tf

    def function(x):
        rows = tf.TensorArray(tf.float32, 2, clear_after_read=False).unstack(x)
        made = tf.TensorArray(tf.float32, 0, dynamic_size=True)

        def turn(i, made, h):
            return i + 1, made.write(i, tf.tanh(rows.read(i % 2) * h)), h * rows.read(1)

        _, made, _ = tf.while_loop(lambda i, *_: i < 3, turn, (0, made, x[0]))
        parts = tf.TensorArray(tf.float32, 2, infer_shape=False).split(x, [1, 1])
        joined = tf.TensorArray(tf.float32, 2, infer_shape=False)
        joined = turns(tf, 2, lambda i, a: a.write(i, tf.tanh(tf.concat([parts.read(i)] * 2, 0) * x)), joined)
        return tf.reduce_sum(made.stack() * made.gather([1, 2, 0])) + tf.reduce_sum(joined.concat())

    assert "TensorListScatterIntoExistingList" in check_function(function, spec([2, 3])).graph.ops


def test_gradients_of_map_scan_and_fold_over_a_batch():
    import tensorflow as tf

    def function(x):
        mapped = tf.map_fn(lambda row: tf.reduce_sum(row) * tf.exp(row), x)
        scanned = tf.scan(lambda h, row: tf.tanh(tf.linalg.matvec(WEIGHTS, h) + row), x)
        return mapped + scanned * tf.foldl(lambda a, row: tf.tanh(a * row), x)

    check_function(function, spec([None, 3]))


def test_gradients_of_conds_read_what_their_own_branch_made():
    """The branches' values lie in the same optionals, in two shapes."""
    import tensorflow as tf

    def function(x, flag):
        def narrow():
            return turns(tf, 3, lambda i, a: tf.tanh(a) * x, x)

        return tf.cond(flag, lambda: tf.exp(tf.concat([x, x], 0))[:2] * tf.sin(x), narrow)

    check_function(function, spec([2, 3]), spec([], "bool", "flag"), every=({"flag": True}, {"flag": False}))


def test_the_gradient_of_a_case_of_which_the_branch_is_known():
    import tensorflow as tf

    branches = [lambda x: x * x, lambda x: tf.exp(x) * tf.sin(x), lambda x: tf.tanh(x)]
    check_function(
        lambda x: tf.switch_case(tf.shape(x)[0] - 1, [lambda b=branch: b(x) for branch in branches]), spec([2, 3])
    )


def test_gradients_of_recurrent_layers_of_keras(tmp_path):
    """With respect to weights, that loops read by their handles, and to the input; masked, both ways, on top of each other."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(1)
    x = keras.Input((4, 3))
    y = keras.layers.Masking()(x)
    y = keras.layers.Bidirectional(keras.layers.LSTM(3, return_sequences=True))(y)
    model = keras.Model(x, keras.layers.GRU(3)(y))

    def gradients(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(model(x) ** 2)
        return tape.gradient(loss, [x, *model.trainable_variables])

    signature = [tf.TensorSpec([2, 4, 3], tf.float32, name="x")]
    flat = saved(gradients, signature, [one.value for one in model.variables], tmp_path / "model")
    assert len(flat.outputs) == 1 + 9
    check(flat, [make_inputs(flat, {}, batch=2)])
