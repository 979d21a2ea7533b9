"""Training graphs of recurrent nets against TensorFlow, and variables that loops and conds would change, which are refused by name."""

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from msplit.core.arguments import Precision
from msplit.engines.base import Job
from msplit.engines.cuda.coverage import cover
from msplit.engines.cuda.engine import ENGINE
from msplit.engines.tensorflow.engine import REFERENCE as TENSORFLOW
from msplit.errors import EngineError
from msplit.flatten.build import flatten
from msplit.formats import read
from tests.engines.cuda.cases import initial_values, job, saved, scattered
from tests.engines.cuda.control_flow import Lstm
from tests.training_graphs import apart

pytestmark = pytest.mark.tf


def trained(build, outputs, *, resource, v2=False):
    """The flat graph of what `build` makes of x and a truth value, and the variables as they begin. `build` gets ``tf``."""
    import tensorflow as tf

    v1 = tf.compat.v1
    before = v1.control_flow_v2_enabled()
    (v1.enable_control_flow_v2 if v2 else v1.disable_control_flow_v2)()
    try:
        with tf.Graph().as_default() as graph, v1.variable_scope("", use_resource=resource):
            build(tf, v1.placeholder(tf.float32, [None, 4, 3], "x"), v1.placeholder(tf.bool, [], "flag"))
            state = {name: np.asarray(value) for name, value in initial_values(v1).items()}
    finally:
        (v1.enable_control_flow_v2 if before else v1.disable_control_flow_v2)()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.pb"
        file.write_bytes(graph.as_graph_def().SerializeToString())
        return flatten(read(file, outputs=outputs)), state


def check_three_steps(flat, state):
    """Three steps from some variables equal TensorFlow's, and the variables have moved."""
    rng = np.random.default_rng(0)
    steps = [{tensor.name: rng.standard_normal((2, 4, 3), np.float32) for tensor in flat.inputs} for _ in range(3)]
    assert cover(flat).reasons == []
    theirs = TENSORFLOW.build(
        Job(flat, np.zeros(len(flat), np.int32), 1, steps[0], precision=Precision.IEEE, state=state)
    )
    theirs.load_state(state)
    ours = ENGINE.build(replace(job(flat, steps[0], scattered(flat, 3), streams=3), state=state))
    for feeds in steps:
        np.testing.assert_allclose(ours.step(feeds)["loss"], theirs.step(feeds)["loss"], rtol=1e-4)
    found, expected = ours.save_state(), theirs.save_state()
    ours.close()
    theirs.close()
    assert max(apart(found, expected).values()) < 1e-4
    still = {name for name, moved in apart(found, state).items() if moved < 1e-3}
    assert still <= {name for name in state if "learning_rate" in name}


def recurrent_net(kind, optimizer):
    """Builds the training graph of an LSTM with a loss that is the mean square of what it says."""

    def build(tf, x, flag):
        from tensorflow.python.ops import rnn

        v1, rng = tf.compat.v1, np.random.default_rng(2)
        gates = v1.get_variable("gates", initializer=(rng.standard_normal((7, 16)) / 3).astype(np.float32))
        head = v1.get_variable("head", initializer=rng.standard_normal((4, 2)).astype(np.float32))
        cell = Lstm(gates)
        if kind == "static":
            x.set_shape([2, 4, 3])
            outputs, _ = rnn.static_rnn(cell, tf.unstack(x, axis=1), dtype=tf.float32)
            last = outputs[-1]
        else:
            outputs, _ = rnn.dynamic_rnn(cell, x, dtype=tf.float32)
            last = outputs[:, -1]
        loss = tf.reduce_mean(tf.square(tf.matmul(last, head) - 1.0), name="loss")
        chosen = {"sgd": v1.train.GradientDescentOptimizer(0.5), "adam": v1.train.AdamOptimizer(0.1)}[optimizer]
        chosen.minimize(loss, v1.train.get_or_create_global_step(), name="train_op")

    return build


@pytest.mark.parametrize(
    ("kind", "optimizer", "resource", "v2"),
    [
        ("static", "sgd", False, False),
        ("dynamic", "adam", False, False),
        ("dynamic", "sgd", True, False),
        ("dynamic", "adam", True, True),
    ],
    ids=["unrolled", "frames, references", "frames, resources", "functions, resources"],
)
def test_training_a_recurrent_net(kind, optimizer, resource, v2):
    flat, state = trained(recurrent_net(kind, optimizer), ["loss", "train_op"], resource=resource, v2=v2)
    assert ("StackPopV2" in flat.graph.ops) == (kind == "dynamic" and not v2)
    assert bool({"While", "StatelessWhile"} & set(flat.graph.ops)) == v2
    check_three_steps(flat, state)


@pytest.mark.parametrize("size", [False, True])
def test_a_branch_that_reads_an_array_is_trained(size):
    """The gradient of a cond asks for the shape of the array's flow, which is a scalar, as a decoder's first step does."""

    def build(tf, x, flag):
        v1 = tf.compat.v1
        w = v1.get_variable("w", initializer=np.random.default_rng(1).standard_normal((3, 5)).astype(np.float32))
        steps = tf.transpose(tf.tensordot(x, w, 1), [1, 0, 2])
        array = v1.TensorArray(tf.float32, 4, clear_after_read=False, element_shape=[None, 5]).unstack(steps)
        first = v1.cond(tf.reduce_sum(x) > 0, lambda: tf.zeros_like(steps[0]), lambda: array.read(0) * array.read(2))
        last = v1.cond(tf.reduce_sum(x) < 0, lambda: array.gather([1, 2])[1], lambda: array.read(3) + 1.0)
        count = tf.cast(tf.size(array.flow), tf.float32) if size else 1.0
        loss = tf.reduce_sum(tf.square(first + last - 1.0) * count, name="loss")
        v1.train.GradientDescentOptimizer(0.01).minimize(loss, name="train")

    check_three_steps(*trained(build, ["loss", "train"], resource=True))


def test_a_list_is_read_as_no_tensor():
    def build(tf, x, flag):
        array = tf.compat.v1.TensorArray(tf.float32, size=4).unstack(tf.transpose(x, [1, 0, 2]))
        tf.add(tf.reduce_sum(array.read(0)), tf.cos(array.flow), name="loss")

    flat, _ = trained(build, ["loss"], resource=True)
    assert "Cos reads a list of tensors" in "; ".join(cover(flat, build=True).reasons)
    with pytest.raises(EngineError, match="Cos reads a list of tensors"):
        ENGINE.build(job(flat, {"x": np.ones((2, 4, 3), np.float32)}))


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_training_a_recurrent_layer_of_keras(optimizer, tmp_path):
    """The step of an exported model: its loop reads weights by handles, and its optimizer assigns what it has computed by itself."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(1)
    x = keras.Input((4, 3))
    model = keras.Model(x, keras.layers.Dense(1)(keras.layers.LSTM(4)(x)))
    chosen = getattr(keras.optimizers, optimizer)(0.05)
    chosen.build(model.trainable_variables)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - 1.0))
        variables = model.trainable_variables
        chosen.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"loss": loss}

    signature = [tf.TensorSpec([2, 4, 3], tf.float32, name="x")]
    if optimizer == "SGD":
        archive = keras.export.ExportArchive()
        archive.track(model)
        archive.track(chosen)
        archive.add_endpoint("serve", step, input_signature=signature)
        archive.write_out(tmp_path / "model", verbose=False)
        flat = flatten(read(tmp_path / "model"))
    else:
        flat = saved(step, signature, [one.value for one in (*model.variables, *chosen.variables)], tmp_path / "model")
    state = ENGINE.build(job(flat, {"x": np.zeros((2, 4, 3), np.float32)})).save_state()
    assert len(state) > 5
    check_three_steps(flat, state)


@pytest.mark.parametrize("resource", [True, False], ids=["resource", "reference"])
@pytest.mark.parametrize("v2", [True, False], ids=["functions", "frames"])
def test_a_state_that_is_carried_on_is_what_it_was_for_gradients(resource, v2):
    """The first turn's gradient reads the state that the step began with, which the loop's end has overwritten by then."""

    def build(tf, x, flag):
        v1, rng = tf.compat.v1, np.random.default_rng(2)
        weights = v1.get_variable("weights", initializer=(rng.standard_normal((3, 3)) / 3).astype(np.float32))
        state = v1.get_variable("state", initializer=np.ones((2, 3), np.float32), trainable=False)

        def turn(at, before):
            return at + 1, tf.tanh(tf.matmul(before * x[:, at], weights) + before)

        _, last = tf.while_loop(lambda at, _: at < 4, turn, (0, tf.identity(state)))
        loss = tf.reduce_mean(tf.square(last - 0.5), name="loss")
        (gradient,) = tf.gradients(loss, [weights])
        with tf.control_dependencies([state.assign(last)]):
            train = v1.train.GradientDescentOptimizer(0.5).apply_gradients([(tf.identity(gradient), weights)])
        tf.group(train, name="train_op")

    flat, state = trained(build, ["loss", "train_op"], resource=resource, v2=v2)
    check_three_steps(flat, state)


# Variables that loops and conds would change


def counted(where, *, fetched):
    """Builds a graph in which a variable grows inside of a loop or a cond, fetched by what that gives, or run as a target."""

    def build(tf, x, flag):
        v1 = tf.compat.v1
        count = v1.get_variable("count", initializer=np.zeros((), np.float32))

        def grown(value):
            with tf.control_dependencies([v1.assign_add(count, 1.0)]):
                return tf.identity(value)

        if where == "loop":
            found = tf.while_loop(lambda i, _: i < 3, lambda i, a: (i + 1, grown(a * 2.0)), (0, x))[1]
        elif where == "inner loop":

            def turn(i, a):
                inner = tf.while_loop(lambda j, _: j < 2, lambda j, b: (j + 1, grown(b * 2.0)), (0, a))[1]
                with tf.control_dependencies([inner]):
                    return i + 1, a + 1.0

            found = tf.while_loop(lambda i, _: i < 3, turn, (0, x))[1]
        else:
            if where == "taken":
                flag = v1.placeholder_with_default(True, [], "training")
            elif where == "not taken":
                flag = v1.placeholder_with_default(False, [], "training")
            found = tf.cond(flag, lambda: grown(x), lambda: x * 2.0)
        if fetched:
            tf.identity(found, name="out")
        else:
            tf.group(found.op, name="out")
            with tf.control_dependencies([v1.assign_add(v1.get_variable("other", initializer=0.0), 1.0)]):
                tf.reduce_sum(x, name="loss")

    return build


@pytest.mark.parametrize("fetched", [True, False], ids=["fetched", "target"])
@pytest.mark.parametrize("where", ["loop", "inner loop", "cond"])
@pytest.mark.parametrize(
    ("resource", "v2"), [(False, False), (True, False), (True, True)], ids=["references", "frames", "functions"]
)
def test_a_loop_or_a_cond_that_writes_a_variable_is_refused_by_name(where, fetched, resource, v2):
    flat, state = trained(
        counted(where, fetched=fetched), ["out"] if fetched else ["loss", "out"], resource=resource, v2=v2
    )
    feeds = {"x": np.ones((2, 4, 3), np.float32), "flag": np.asarray(True)}
    feeds = {tensor.name: feeds[tensor.name] for tensor in flat.inputs}
    with pytest.raises(EngineError, match=r"run for an effect .*(AssignAdd|while|cond)"):
        ENGINE.build(replace(job(flat, feeds), state=state))
    assert any("run for an effect" in reason for reason in cover(flat).reasons)


@pytest.mark.parametrize("fetched", [True, False], ids=["fetched", "target"])
@pytest.mark.parametrize("resource", [False, True], ids=["references", "resources"])
@pytest.mark.parametrize("where", ["taken", "not taken"])
def test_a_branch_writes_a_variable_if_it_is_known_to_be_taken(where, resource, fetched):
    flat, state = trained(counted(where, fetched=fetched), ["out"] if fetched else ["loss", "out"], resource=resource)
    feeds = {"x": np.ones((2, 4, 3), np.float32)} if {tensor.name for tensor in flat.inputs} >= {"x"} else {}
    feeds |= {tensor.name: np.asarray(where == "taken") for tensor in flat.inputs if tensor.name == "training"}
    found = ENGINE.build(replace(job(flat, feeds), state=state))
    found.step(feeds)
    assert float(found.save_state().get("count", 0.0)) == (1.0 if where == "taken" else 0.0)
    found.close()
