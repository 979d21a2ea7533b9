"""Loops, conds and calls of TensorFlow 2, unrolled, against TensorFlow."""

import numpy as np
import pytest

from msplit.engines.cuda.coverage import cover
from msplit.engines.cuda.frontend import unroll
from msplit.engines.cuda.ir.functions import functions_of
from msplit.errors import EngineError
from msplit.flatten.build import flatten
from msplit.formats import read
from msplit.inputs.make import make_inputs
from tests.engines.cuda.cases import SAMPLES, assert_equals_tensorflow, flat_of, program_of, run, saved_keras
from tests.engines.cuda.control_flow import graph_of_function, spec

pytestmark = pytest.mark.tf


def ones(*shape):
    return np.linspace(-1, 1, int(np.prod(shape)), dtype=np.float32).reshape(shape)


def check(function, *specs, feeds=None, **options):
    flat = graph_of_function(function, *specs)
    assert not cover(flat).missing
    feeds = make_inputs(flat, {}, batch=3) if feeds is None else feeds
    assert_equals_tensorflow(flat, feeds, streams=(1, 3), **options)
    return flat, feeds


@pytest.mark.parametrize("larger", [{}, {"group": True, "fuse": True}])
def test_a_sample_with_a_recurrent_layer(larger):
    flat = flatten(read(SAMPLES / "gru_while"))
    assert_equals_tensorflow(flat, make_inputs(flat, {}, batch=2), streams=(1, 3), **larger)


def check_keras(model, folder):
    flat = saved_keras(model, folder)
    assert not cover(flat).missing
    feeds = make_inputs(flat, {}, batch=2)
    assert_equals_tensorflow(flat, feeds, streams=(1, 3))
    return flat, feeds


def test_recurrent_layers_that_are_not_unrolled(tmp_path):
    """Both directions, masks, layers on top of each other, in one loop each, whose steps run on the loop's stream."""
    import keras

    keras.utils.set_random_seed(3)
    ids = keras.Input((6,), dtype="int32")
    x = keras.layers.Embedding(9, 4, mask_zero=True)(ids)
    y = keras.layers.Bidirectional(keras.layers.LSTM(3, return_sequences=True))(x)
    y = keras.layers.GRU(3)(y)
    model = keras.Model(ids, y)
    flat, feeds = check_keras(model, tmp_path)
    loops = [node for node, op in enumerate(flat.graph.ops) if op == "While"]
    assert len(loops) == 3
    program = program_of(flat, feeds)
    for loop in loops:
        assert sum(step.op.source_nodes[0] == loop for step in program.steps) > 12


def test_a_loop_in_a_loop_with_a_cond_inside():
    import tensorflow as tf

    def function(x):
        for i in tf.range(3):
            for j in tf.range(2):
                x = tf.sin(x) * tf.cast(j + 1, tf.float32)
            if i == 1:
                x = x + 1.0
            else:
                x = x - tf.cast(i, tf.float32)
        return x

    check(function, spec([None, 4]))


def test_how_often_a_loop_turns_may_follow_from_the_batch():
    import tensorflow as tf

    flat, feeds = check(lambda x: tf.map_fn(lambda row: tf.reduce_sum(row) * row, x), spec([None, 4]))
    assert sum(step.op.op == "Sum" for step in program_of(flat, feeds).steps) == len(feeds["x"])


def test_values_that_pass_through_a_loop_unchanged_and_a_loop_without_a_turn():
    import tensorflow as tf

    def function(x):
        _, kept, _ = tf.while_loop(lambda i, *_: i < 2, lambda i, a, b: (i + 1, a, b + a), (0, x, x))
        _, never = tf.while_loop(lambda i, _: i < 0, lambda i, a: (i + 1, a * 2), (0, kept))
        return kept, never + 1.0

    check(function, spec([2, 2]))


@pytest.mark.parametrize("flag", [True, False])
def test_a_cond_that_only_the_run_knows_computes_both_branches(flag):
    import tensorflow as tf

    def function(x, flag):
        return tf.cond(flag, lambda: (tf.exp(x), x), lambda: (x * 2.0, x))

    feeds = {"x": ones(2, 3), "flag": np.asarray(flag)}
    flat, _ = check(function, spec([2, 3]), spec([], "bool", "flag"), feeds=feeds)
    assert {"Exp", "Mul", "SelectV2"} <= {step.op.op for step in program_of(flat, feeds).steps}


def test_a_cond_that_is_known_runs_one_branch():
    import tensorflow as tf

    def function(x):
        return tf.cond(tf.shape(x)[0] > 2, lambda: tf.exp(x), lambda: x * 2.0)

    for batch, op in ((3, "Exp"), (2, "Mul")):
        flat, feeds = check(function, spec([None, 3]), feeds={"x": ones(batch, 3)})
        assert {step.op.op for step in program_of(flat, feeds).steps} == {op}


def test_a_frozen_cond_on_is_training_runs_the_branch_of_its_default():
    """What the other branch needs (random numbers here) is nothing that is missing."""
    import tensorflow as tf

    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        v1.enable_control_flow_v2()
        x = v1.placeholder(tf.float32, [None, 4], "x")
        training = v1.placeholder_with_default(False, [], "is_training")
        y = tf.cond(training, lambda: v1.nn.dropout(x, rate=0.5), lambda: tf.identity(x))
        tf.nn.softmax(y, name="out")
    flat = flat_of(graph.as_graph_def())
    assert [tensor.name for tensor in flat.inputs] == ["x"]
    assert not cover(flat).missing
    assert_equals_tensorflow(flat, {"x": ones(2, 4)})
    fed = flat_of(graph.as_graph_def(), inputs=["x", "is_training"])
    assert list(cover(fed).missing) == ["RandomUniform"]


def test_a_number_as_the_condition():
    import tensorflow as tf

    def graph(x, number):
        then = tf.function(tf.exp).get_concrete_function(x)
        otherwise = tf.function(tf.negative).get_concrete_function(x)
        return tf.raw_ops.If(cond=number, input=[x], Tout=[tf.float32], then_branch=then, else_branch=otherwise)

    for number in (0, 3):
        feeds = {"x": ones(2, 3), "number": np.asarray(number, np.int32)}
        check(graph, spec([2, 3]), spec([], "int32", "number"), feeds=feeds)


@pytest.mark.parametrize("branch", [0, 1, 2, 7, -1])
def test_a_case_takes_the_last_branch_for_a_number_that_none_has(branch):
    import tensorflow as tf

    def function(x):
        number = tf.shape(x)[0] * 0 + branch
        return tf.switch_case(number, [lambda: tf.exp(x), lambda: x * 2.0, lambda: -x])

    check(function, spec([None, 3]))


def test_a_call_that_xla_compiles_as_a_whole():
    import tensorflow as tf

    @tf.function(jit_compile=True)
    def compiled(x):
        return tf.tanh(x @ tf.ones([4, 4])), x + 1.0

    check(lambda x: compiled(tf.sin(x)), spec([None, 4]))


def test_grouped_convolutions_of_keras(tmp_path):
    """Keras has them compiled by XLA on a CPU, so that they come as a call."""
    import keras

    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6, 6, 4)), keras.layers.Conv2D(8, 3, groups=2)])
    flat, feeds = check_keras(model, tmp_path)
    assert "StatefulPartitionedCall" in flat.graph.ops
    assert [step.op.op for step in program_of(flat, feeds).steps][:1] == ["Conv2D"]


def test_every_op_of_lists():
    import tensorflow as tf

    raw = tf.raw_ops

    def function(x):
        shape = tf.constant([2], tf.int32)
        held = raw.TensorListReserve(element_shape=shape, num_elements=4, element_dtype=tf.float32)
        held = raw.TensorListSetItem(input_handle=held, index=1, item=x[0])
        held = raw.TensorListSetItem(input_handle=held, index=5, item=x[1], resize_if_index_out_of_bounds=True)
        length = raw.TensorListLength(input_handle=held)
        stacked = raw.TensorListStack(input_handle=held, element_shape=shape, element_dtype=tf.float32)
        picked = raw.TensorListGather(
            input_handle=held, indices=[5, 0, 1], element_shape=shape, element_dtype=tf.float32
        )
        fresh = raw.EmptyTensorList(element_shape=[-1, 2], max_num_elements=-1, element_dtype=tf.float32)
        fresh = raw.TensorListPushBack(input_handle=fresh, tensor=x)
        fresh = raw.TensorListPushBack(input_handle=fresh, tensor=x[:1] * 2.0)
        joined = raw.TensorListConcatV2(
            input_handle=fresh, element_shape=[-1, 2], leading_dims=tf.zeros([0], tf.int64), element_dtype=tf.float32
        )
        popped = raw.TensorListPopBack(input_handle=fresh, element_shape=[-1, 2], element_dtype=tf.float32)
        short = raw.TensorListResize(input_handle=raw.TensorListFromTensor(tensor=x, element_shape=shape), size=1)
        one = raw.TensorListGetItem(input_handle=short, index=0, element_shape=shape, element_dtype=tf.float32)
        scattered = {"tensor": x, "indices": [2, 0, 1], "element_shape": shape}
        rows = raw.TensorListScatter(**scattered)
        more = raw.TensorListScatterV2(**scattered, num_elements=5)
        more = raw.TensorListScatterIntoExistingList(input_handle=more, tensor=x * 2.0, indices=[4, 0, 1])
        lists = [
            raw.TensorListStack(input_handle=one, element_shape=shape, element_dtype=tf.float32) for one in (rows, more)
        ]
        return length, stacked, picked, joined.tensor, joined.lengths, popped.tensor, one, *lists

    check(function, spec([3, 2]))


def test_a_loop_whose_turns_depend_on_values_is_refused_by_name():
    import tensorflow as tf

    flat = graph_of_function(
        lambda x: tf.while_loop(lambda a: tf.reduce_sum(a) < 10.0, lambda a: (a * 2.0,), (x,))[0], spec([2])
    )
    with pytest.raises(EngineError, match=r"(?s)while: .*how many turns.*depends on values.*--engine tensorflow"):
        run(flat, {"x": np.ones(2, np.float32)})


def test_a_loop_whose_turns_an_input_says_is_refused():
    flat = flatten(read(SAMPLES / "control_flow_v2"))
    assert not cover(flat).missing
    with pytest.raises(EngineError, match=r"(?s)while: .*how many turns"):
        run(flat, make_inputs(flat, {}, batch=2))


def test_a_loop_without_end_is_refused(monkeypatch):
    import tensorflow as tf

    monkeypatch.setattr(unroll, "MOST_OPS", 50)
    flat = graph_of_function(
        lambda x: tf.while_loop(lambda i, _: i < 1000, lambda i, a: (i + 1, tf.sin(a)), (0, x))[1], spec([2])
    )
    with pytest.raises(EngineError, match=r"while: .*more than 50 ops"):
        run(flat, {"x": np.ones(2, np.float32)})


def test_a_loop_without_ops_and_without_end_is_refused(monkeypatch):
    import tensorflow as tf

    monkeypatch.setattr(unroll, "MOST_OPS", 1000)
    flat = graph_of_function(
        lambda x: tf.while_loop(lambda a: tf.constant(True), lambda a: (tf.identity(a),), (x,))[0], spec([2])
    )
    with pytest.raises(EngineError, match="ops when they are unrolled"):
        run(flat, {"x": np.ones(2, np.float32)})


@pytest.mark.parametrize("damage", [7, 2.5, b"branches", "ab", True, None, (), [7, "a"]])
@pytest.mark.parametrize("op", ["If", "Case", "StatelessCase", "While", "PartitionedCall"])
def test_attributes_of_any_kind_name_no_functions(op, damage):
    """A damaged graph may hold a number where functions belong; found by the campaign of a test run."""
    attrs = dict.fromkeys(["branches", "then_branch", "else_branch", "cond", "body", "f"], damage)
    assert functions_of(op, attrs) == []


@pytest.mark.parametrize("grown", [False, True])
def test_a_list_that_is_longer_than_any_model_needs_is_refused(grown):
    """A damaged graph may ask for any number: memory is not asked for it."""
    import tensorflow as tf

    def function(x):
        raw = tf.raw_ops
        count = 1 if grown else 2**31 - 1
        held = raw.TensorListReserve(element_shape=[2], num_elements=count, element_dtype=tf.float32)
        held = raw.TensorListSetItem(input_handle=held, index=2**31 - 2, item=x, resize_if_index_out_of_bounds=grown)
        return raw.TensorListLength(input_handle=held)

    flat = graph_of_function(function, spec([2]))
    with pytest.raises(EngineError, match=r"TensorList.*: a list of 2,147,483,64\d elements"):
        run(flat, {"x": np.ones(2, np.float32)})


def test_an_op_that_is_missing_inside_of_a_loop_is_named_with_the_loop():
    import tensorflow as tf

    flat = graph_of_function(
        lambda x: tf.while_loop(lambda i, _: i < 2, lambda i, a: (i + 1, tf.linalg.eigh(a)[1]), (0, x))[1], spec([2, 2])
    )
    ((op, (name,)),) = cover(flat).missing.items()
    assert op == "SelfAdjointEigV2"
    assert "while/" in name
    with pytest.raises(EngineError, match=r"SelfAdjointEigV2: 1 node, such as .*while/"):
        run(flat, {"x": np.eye(2, dtype=np.float32)})


def test_a_loop_that_writes_a_variable_is_refused(tmp_path):
    import tensorflow as tf

    class Counts(tf.Module):
        def __init__(self):
            self.seen = tf.Variable(0.0)

        @tf.function(input_signature=[spec([2])])
        def __call__(self, x):
            for _ in tf.range(2):
                self.seen.assign_add(1.0)
                x = x + self.seen
            return x

    tf.saved_model.save(Counts(), tmp_path / "m")
    flat = flatten(read(tmp_path / "m"))
    with pytest.raises(EngineError, match="run for an effect"):
        run(flat, {flat.inputs[0].name: np.ones(2, np.float32)})
