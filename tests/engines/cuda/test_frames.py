"""Loops and conds of TensorFlow 1, and those that freezing a TensorFlow 2 model makes, against TensorFlow."""

import numpy as np
import pytest

from msplit.engines.cuda.coverage import cover
from msplit.errors import EngineError, MsplitError
from msplit.flatten.build import flatten
from msplit.formats import read
from msplit.inputs.make import make_inputs
from tests.campaign import CAMPAIGN
from tests.engines.cuda.cases import SAMPLES, assert_equals_tensorflow, flat_of, program_of, run
from tests.engines.cuda.control_flow import feeds_of, frames_of
from tests.formats import foreign
from tests.formats.foreign import built

pytestmark = pytest.mark.tf


def check(build, flags=(True,), **options):
    flat = frames_of(build)
    assert not cover(flat).missing
    for flag in flags:
        assert_equals_tensorflow(flat, feeds_of(flat, flag), streams=(1, 3), **options)
    return flat


@pytest.mark.parametrize("larger", [{}, {"group": True, "fuse": True}])
def test_a_loop_with_several_variables_of_which_all_leave(larger):
    def build(tf, x, y, flag):
        return tf.while_loop(lambda i, a, b: i < 3, lambda i, a, b: (i + 1, a + b * x, tf.tanh(a)), (0, x, y))

    flat = check(build, **larger)
    steps = program_of(flat, feeds_of(flat)).steps
    assert sum(step.op.op == "Tanh" for step in steps) == 3
    (leader,) = {step.op.source_nodes[0] for step in steps}
    assert flat.graph.ops[leader] == "Exit"


def test_loops_after_each_other_and_one_without_a_turn():
    def build(tf, x, y, flag):
        _, first = tf.while_loop(lambda i, a: i < 2, lambda i, a: (i + 1, tf.sin(a) + y), (0, x))
        _, never = tf.while_loop(lambda i, a: i < 0, lambda i, a: (i + 1, a * 2.0), (0, first))
        return (tf.while_loop(lambda i, a: i < 2, lambda i, a: (i + 1, a - never), (0, first))[1],)

    check(build)


def test_arrays_of_a_loop():
    def build(tf, x, y, flag):
        rows = tf.TensorArray(tf.float32, 2).unstack(x)
        made = tf.TensorArray(tf.float32, 0, dynamic_size=True)
        _, made = tf.while_loop(lambda i, a: i < 2, lambda i, a: (i + 1, a.write(i, rows.read(1 - i) * 2.0)), (0, made))
        return made.stack(), made.size()

    check(build)


def test_a_cond_that_only_the_run_knows():
    def build(tf, x, y, flag):
        chosen = tf.cond(flag, lambda: tf.exp(x), lambda: x * y)
        deeper = tf.cond(flag, lambda: tf.cond(chosen[0, 0] > 0.0, lambda: x, lambda: y), lambda: chosen - 1.0)
        return chosen, deeper, tf.cond(flag, lambda: tf.constant(1.0), lambda: tf.constant(2.0)) * x

    check(build, flags=(True, False))


def test_a_cond_inside_of_a_loop():
    def build(tf, x, y, flag):
        def turn(i, a):
            return i + 1, tf.cond(tf.equal(i, 1), lambda: a * 3.0, lambda: tf.tanh(a))

        return (tf.while_loop(lambda i, a: i < 3, turn, (0, x))[1],)

    check(build)


def test_a_branch_that_is_never_taken_may_hold_what_the_engine_lacks():
    def build(tf, x, y, flag):
        training = tf.compat.v1.placeholder_with_default(False, [], "is_training")
        return (tf.cond(training, lambda: tf.compat.v1.nn.dropout(x, rate=0.5), lambda: tf.identity(x)) + 1.0,)

    flat = check(build)
    assert {step.op.op for step in program_of(flat, feeds_of(flat)).steps} == {"AddV2"}


def test_branches_of_two_shapes_are_refused_where_only_the_run_knows():
    def build(tf, x, y, flag):
        return (tf.cond(flag, lambda: x, lambda: y[:1]),)

    with pytest.raises(EngineError, match=r"which branch is taken depends on values"):
        run(flat := frames_of(build), feeds_of(flat))


def test_a_loop_in_front_of_host_nodes_runs_with_them():
    """The host's session knows the loop by its Exits."""

    def build(tf, x, y, flag):
        _, a, b = tf.while_loop(lambda i, *_: i < 2, lambda i, a, b: (i + 1, a + b, b * 2.0), (0, x, x))
        ids = tf.strings.to_hash_bucket_fast(tf.strings.as_string(tf.cast(a[:, 0] * 9.0, tf.int32)), 7)
        return (tf.gather(tf.reshape(tf.range(21.0), [7, 3]), ids) * b,)

    check(build)


def test_host_nodes_behind_a_loop_run_when_the_device_is_done():
    """The host's second session is fed the loop's Exits."""

    def build(tf, x, y, flag):
        weights = np.full((3, 3), 0.5, np.float32)
        _, a, b = tf.while_loop(
            lambda i, *_: i < 2, lambda i, a, b: (i + 1, tf.matmul(a, weights) + b, b * 2.0), (0, x, x)
        )
        ids = tf.strings.to_hash_bucket_fast(tf.strings.as_string(tf.cast(a[:, 0] * 9.0, tf.int32)), 7)
        return tf.gather(tf.reshape(tf.range(21.0), [7, 3]), ids) * b, a

    check(build)


def test_loops_in_loops():
    def build(tf, x, y, flag):
        def turn(i, a):
            inner = tf.while_loop(
                lambda j, b: j < 2, lambda j, b: (j + 1, tf.sin(b) + y + tf.cast(i, tf.float32)), (0, a)
            )
            return i + 1, inner[1] * x

        _, twice = tf.while_loop(lambda i, a: i < 3, turn, (0, x))
        return (tf.while_loop(lambda i, a: i < 2, turn, (0, twice))[1],)

    flat = check(build)
    assert sum(step.op.op == "Sin" for step in program_of(flat, feeds_of(flat)).steps) == 2 * 3 + 2 * 2


@pytest.mark.parametrize("name", ["while_v1.pb", "cond_v1.pb"])
@pytest.mark.parametrize("damage", ["input", "attributes", "cycle"])
def test_damaged_control_flow_is_refused(name, damage):
    """Every node in turn (here every third) without an input, without attributes, or reading what comes after it."""
    from msplit.opset import schema

    original = read(SAMPLES / name).graph_def
    last = next(node.name for node in reversed(original.node) if node.op in ("Exit", "Merge"))
    outcomes = set()
    for number in range(0, len(original.node), 1 if CAMPAIGN else 3):
        damaged = schema.graph_pb2.GraphDef()
        damaged.CopyFrom(original)
        node = damaged.node[number]
        if damage == "attributes":
            node.attr.clear()
        elif node.input:
            node.input[0] = last
            del node.input[: 1 if damage == "input" else 0]
        try:
            flat = flat_of(damaged)
            found = cover(flat)
            if not found.missing and not found.host:
                run(flat, make_inputs(flat, {}, batch=2))
            outcomes.add("fine")
        except MsplitError:
            outcomes.add("refused")
    assert "refused" in outcomes


@pytest.mark.parametrize("name", ["cond_v1.pb", "while_v1.pb"])
def test_a_sample(name):
    flat = flatten(read(SAMPLES / name))
    assert not cover(flat).missing
    assert_equals_tensorflow(flat, make_inputs(flat, {}, batch=2), streams=(1, 3))


def test_a_recurrent_layer_of_keras_frozen():
    """`convert_variables_to_constants_v2` makes frames of its loop, and leaves placeholders behind that nobody reads."""
    import keras
    import tensorflow as tf
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    keras.utils.set_random_seed(1)
    x = keras.Input((4, 3))
    model = keras.Model(x, keras.layers.GRU(3)(keras.layers.LSTM(4, return_sequences=True)(x)))
    concrete = tf.function(lambda x: model(x)).get_concrete_function(tf.TensorSpec([None, 4, 3], tf.float32, "x"))
    flat = flat_of(convert_variables_to_constants_v2(concrete).graph.as_graph_def())
    assert [tensor.name for tensor in flat.inputs] == ["x"]
    assert "LoopCond" in flat.graph.ops
    assert not cover(flat).missing
    assert_equals_tensorflow(flat, make_inputs(flat, {}, batch=2))


def test_a_cond_at_the_end_runs_with_the_outputs_that_are_guessed():
    made = built(foreign.cond_at_the_end).as_graph_def()
    flat = flat_of(made)
    assert [tensor.name for tensor in flat.outputs] == ["choice/Merge"]
    x = np.random.default_rng(0).standard_normal((2, 4), np.float32)
    for p in (True, False):
        assert_equals_tensorflow(flat, {"x": x, "p": np.array(p)})
    with pytest.raises(
        EngineError, match=r"no lowering for:(.|\n)*Merge: .*such as choice/Merge(.|\n)*--part inputs= and outputs="
    ):
        run(flat_of(made, outputs=["choice/Merge:1"]), {"x": x, "p": np.array(True)})
