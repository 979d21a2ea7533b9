"""msplit.stream: which ops of a graph under construction get which stream id."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from msplit.annotate import stream
from msplit.errors import EngineError, MsplitError

pytestmark = pytest.mark.tf
EXAMPLE = Path(__file__).parent.parent / "docs" / "examples" / "deeprec_regression.py"


@pytest.fixture(scope="module")
def tf():
    import tensorflow

    return tensorflow


@pytest.fixture
def graph(tf):
    with tf.Graph().as_default() as graph:
        yield graph


def id_of(node):
    """Stream id of an op or of what made a tensor; None without one."""
    try:
        return getattr(node, "op", node).get_attr("_stream_id")
    except ValueError:
        return None


def include_grad(node):
    try:
        return getattr(node, "op", node).get_attr("_stream_assign_include_grad")
    except ValueError:
        return None


def ids(graph, part=""):
    return {op.name: id_of(op) for op in graph.get_operations() if part in op.name}


def test_every_op_inside_gets_the_id_and_no_op_outside(tf, graph):
    before = tf.constant(1.0)
    with stream(2):
        inside = tf.nn.relu(before)
        also = tf.add(inside, 3.0)
    after = tf.nn.relu(also)
    assert [id_of(t) for t in (before, inside, also, also.op.inputs[1], after)] == [None, 2, 2, 2, None]
    attr = inside.op.node_def.attr["_stream_id"]
    assert attr.WhichOneof("value") == "i"


def test_the_innermost_scope_wins_and_zero_is_written(tf, graph):
    with stream(1):
        a = tf.constant(1.0)
        with stream(np.int64(0)):
            b = tf.constant(1.0)
            with stream(3, include_grad=False):
                c = tf.constant(1.0)
        d = tf.constant(1.0)
    assert [id_of(t) for t in (a, b, c, d)] == [1, 0, 3, 1]
    assert [include_grad(t) for t in (a, b, c)] == [True, True, None]


def test_a_scope_ends_with_an_exception_and_can_be_entered_again(tf, graph):
    scope = stream(1)
    with pytest.raises(RuntimeError, match="inside"), scope:
        raise RuntimeError("inside")
    a = tf.constant(1.0)
    with scope, scope:
        b = tf.constant(1.0)
    c = tf.constant(1.0)
    assert [id_of(t) for t in (a, b, c)] == [None, 1, None]


def test_scopes_are_about_their_own_graph(tf, graph):
    with stream(1), tf.Graph().as_default():
        other = tf.constant(1.0)
    assert id_of(other) is None


def test_colocation_takes_the_stream_of_the_other_op(tf, graph):
    with stream(1):
        one = tf.constant(1.0, name="one")
    with stream(2):
        two = tf.constant(1.0, name="two")
    nothing = tf.constant(1.0, name="nothing")
    with stream(3):
        with tf.compat.v1.colocate_with(one):
            a = tf.nn.relu(two)
        with tf.compat.v1.colocate_with(nothing):
            b = tf.nn.relu(two)
        with tf.compat.v1.colocate_with(one), tf.compat.v1.colocate_with(two):
            c = tf.nn.relu(two)
        with tf.compat.v1.colocate_with(nothing), tf.compat.v1.colocate_with(two):
            d = tf.nn.relu(two)
    assert [id_of(t) for t in (a, b, c, d)] == [1, 3, 1, 2]
    assert a.op.get_attr("_class") == [b"loc:@one"]


def test_assignments_to_a_ref_variable_follow_it(tf, graph):
    with stream(1):
        variable = tf.compat.v1.get_variable("v", initializer=1.0, use_resource=False)
    assert id_of(tf.compat.v1.assign(variable, 2.0)) == 1


def test_imported_nodes_keep_the_ids_that_they_have(tf, graph):
    with tf.Graph().as_default() as source, stream(1):
        tf.constant(1.0, name="x")
    with stream(2):
        tf.import_graph_def(source.as_graph_def(), name="")
    assert ids(graph) == {"x": 1}


@pytest.mark.parametrize("colocate", [False, True])
def test_gradients_follow_their_ops(tf, graph, colocate):
    x = tf.compat.v1.placeholder(tf.float32, [4, 4])
    with stream(1):
        a = tf.matmul(x, x, name="first")
    with stream(2):
        b = tf.sigmoid(a, name="second")
    with stream(3, include_grad=False):
        c = tf.tanh(b, name="third")
    tf.compat.v1.gradients(tf.reduce_sum(c), x, name="back", colocate_gradients_with_ops=colocate, gate_gradients=True)
    for part, expected in {"first_grad": 1, "second_grad": 2, "third_grad": None}.items():
        found = ids(graph, part)
        assert found, part
        assert set(found.values()) == {expected}, part


def test_gradients_follow_their_ops_and_not_the_scope_around_tf_gradients(tf, graph):
    x = tf.compat.v1.placeholder(tf.float32, [4, 4])
    with stream(1):
        a = tf.sigmoid(x, name="first")
    loss = tf.reduce_sum(tf.tanh(a, name="plain"))
    with stream(2):
        tf.gradients(loss, x)
    assert set(ids(graph, "first_grad").values()) == {1}
    assert set(ids(graph, "plain_grad").values()) == {2}


def test_gradients_of_gradients_follow_too(tf, graph):
    x = tf.compat.v1.placeholder(tf.float32, [4])
    with stream(1):
        y = tf.pow(x, 3.0, name="cube")
    (first,) = tf.gradients(y, x, name="once")
    tf.gradients(first, x, name="twice")
    found = {name: stream_id for name, stream_id in ids(graph, "twice/").items() if "_grad" in name}
    assert found
    assert set(found.values()) == {1}


def test_sums_of_gradients_are_on_the_stream_of_the_op_they_are_for(tf, graph):
    x = tf.compat.v1.placeholder(tf.float32, [4])
    with stream(1):
        y = tf.sigmoid(x, name="shared")
    tf.gradients(tf.tanh(y) + tf.exp(y), x)
    sums = [op for op in graph.get_operations() if op.type == "AddN"]
    assert [id_of(op) for op in sums] == [1]


def test_works_inside_a_tf_function_with_autograph_and_a_tape(tf):
    @tf.function
    def step(x, w):
        with tf.GradientTape() as tape:
            tape.watch(w)
            with stream(1):
                if tf.reduce_sum(x) > -1e9:
                    y = tf.matmul(x, w, name="first")
                else:
                    y = x
                y = tf.matmul(y, w, name="second")
            with stream(2):
                z = tf.nn.softmax(y, name="third")
            with stream(3, include_grad=False):
                loss = tf.reduce_sum(tf.square(z, name="fourth"), name="fifth")
        return tape.gradient(loss, w)

    x = tf.constant(np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32))
    concrete = step.get_concrete_function(x, x)
    found = ids(concrete.graph)
    assert found["second"] == 1
    assert found["third"] == 2
    tape = {name: stream_id for name, stream_id in found.items() if name.startswith("gradient_tape/")}
    assert {stream_id for name, stream_id in tape.items() if "MatMul" in name} == {1}
    softmax = [
        op for op in concrete.graph.get_operations() if op.name.startswith("gradient_tape/") and op.type == "Mul"
    ]
    assert {id_of(op) for op in softmax} >= {2}
    assert 3 not in tape.values()
    assert np.isfinite(concrete(x, x).numpy()).all()


def test_tape_gradients_are_what_they_are_without_streams(tf):
    def loss(x, w, scope):
        with scope(1):
            y = tf.nn.silu(tf.matmul(x, w))
        with scope(2):
            return tf.reduce_mean(tf.nn.log_softmax(tf.matmul(y, w)) * x)

    class Nothing:
        def __init__(self, stream_id):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *error):
            return None

    def gradient(scope):
        @tf.function
        def step(x, w):
            with tf.GradientTape() as tape:
                tape.watch(w)
                value = loss(x, w, scope)
            return tape.gradient(value, w)

        return step

    random = np.random.default_rng(0)
    x, w = (tf.constant(random.normal(size=(4, 4)).astype(np.float32)) for _ in range(2))
    annotated = gradient(stream)
    assert np.array_equal(annotated(x, w), gradient(Nothing)(x, w))
    # silu is a tf.custom_gradient.
    found = [op for op in annotated.get_concrete_function(x, w).graph.get_operations() if "gradient_tape" in op.name]
    assert {id_of(op) for op in found} >= {1, 2}


def test_gradients_of_an_annotated_function_follow_in_its_backward_function(tf):
    @tf.function
    def forward(w):
        with stream(1):
            return tf.reduce_sum(tf.sigmoid(tf.matmul(w, w)))

    w = tf.ones([3, 3])
    with tf.GradientTape() as tape:
        tape.watch(w)
        value = forward(w)
    assert tape.gradient(value, w).shape == (3, 3)
    concrete = forward.get_concrete_function(w)
    _, backward = concrete._delayed_rewrite_functions.forward_backward()
    assert {id_of(op) for op in backward.graph.get_operations() if op.type in ("MatMul", "SigmoidGrad")} == {1}


def test_custom_gradients_follow(tf):
    @tf.custom_gradient
    def double(x):
        return tf.identity(x * 2.0), lambda up: tf.multiply(up, 2.0, name="mine")

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            with stream(4):
                y = double(x)
        return tape.gradient(y, x)

    graph = step.get_concrete_function(tf.ones([3])).graph
    assert set(ids(graph, "mine").values()) == {4}


def test_a_scope_does_not_enter_the_functions_called_in_it(tf, graph):
    @tf.function
    def inner(x):
        return tf.sigmoid(x, name="in_there")

    with stream(1):
        y = inner(tf.constant(1.0))
    call = next(op for op in graph.get_operations() if op.type in ("PartitionedCall", "StatefulPartitionedCall"))
    assert id_of(call) == 1
    assert id_of(y) == 1
    assert set(ids(inner.get_concrete_function(tf.constant(1.0)).graph, "in_there").values()) == {None}


def test_eager_code_is_an_error_that_says_what_to_do(tf):
    with pytest.raises(EngineError, match=r"(?s)eagerly.*tf\.function"), stream(1):
        pass


@pytest.mark.parametrize("wrong", [-1, 1.5, "1", None, True])
def test_ids_that_are_none_are_errors(wrong):
    with pytest.raises(MsplitError, match="a stream id is"):
        stream(wrong)


def test_importing_it_does_not_import_tensorflow():
    code = "import sys, msplit.annotate as a\na.stream(1)\nsys.exit('tensorflow' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_example_learns_and_its_gradients_follow(tf, capsys):
    spec = importlib.util.spec_from_file_location("deeprec_regression", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    losses, weights = example.run(steps=300)
    assert losses[-1] < 0.01 * losses[0]
    assert np.allclose(weights, [*example.TRUE_WEIGHTS, example.TRUE_BIAS], atol=0.1)
    assert "loss" in capsys.readouterr().out
    graph = tf.Graph()
    example.build(graph)
    found = ids(graph)
    assert [found[name] for name in ("weight_0", "bias", "left", "weight_1", "right", "first", "prediction")] == [
        *(0, 0, 0, 1, 1, None, None)
    ]
    for part, expected in {"left_grad": 0, "scale_0_grad": 0, "right_grad": 1, "prediction_grad": None}.items():
        assert set(ids(graph, f"gradients/{part}").values()) == {expected}, part
    for part, expected in {"update_weight_0": 0, "update_bias": 0, "update_weight_1": 1}.items():
        assert set(ids(graph, part).values()) == {expected}, part
