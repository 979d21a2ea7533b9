"""msplit.stream: which ops of a graph under construction get which stream id."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import msplit
from msplit.annotate import stream, stream_group
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


@pytest.mark.parametrize("steps", [0, 1, 7, 100, 200])
def test_the_example_says_what_so_many_steps_give(tf, steps, capsys, monkeypatch):
    spec = importlib.util.spec_from_file_location("deeprec_regression", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--steps", str(steps)])
    example.main()
    assert capsys.readouterr().out.splitlines()[-1].startswith("weights ")
    monkeypatch.setattr(example, "run", lambda steps, save: ([], np.zeros(3)))
    if steps == 200:
        with pytest.raises(SystemExit, match="should be closer"):
            example.main()
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--steps", "-1"])
    with pytest.raises(SystemExit):
        example.main()


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


def test_as_a_decorator_of_a_function_and_around_a_call(tf, graph):
    @stream(1, include_grad=False)
    def tower(x, *, times=1):
        """A tower."""
        return tf.nn.relu(x) * float(times)

    x = tf.constant([[1.0]])
    one, two = tower(x), tower(x, times=2)
    product = stream(2)(tf.matmul)(x, x)
    assert [id_of(t) for t in (x, one, two, product, tf.nn.relu(x))] == [None, 1, 1, 2, None]
    assert include_grad(one) is None
    assert (tower.__name__, tower.__doc__) == ("tower", "A tower.")


def test_as_a_decorator_of_methods(tf, graph):
    class Model:
        @stream(1)
        def method(self, x):
            return tf.nn.relu(x)

        @stream(2)
        @staticmethod
        def static(x):
            return tf.nn.relu(x)

        @classmethod
        @stream(3)
        def of_class(cls, x):
            return tf.nn.relu(x)

    x, model = tf.constant(1.0), Model()
    found = [id_of(t) for t in (model.method(x), model.static(x), Model.static(x), model.of_class(x))]
    assert found == [1, 2, 2, 3]
    assert id_of(stream(4)(model.method)(x)) == 1  # the innermost


def test_a_decorated_function_may_call_itself_and_fail(tf, graph):
    @stream(1)
    def deep(x, depth):
        if depth < 0:
            raise RuntimeError("too deep")
        return tf.nn.relu(deep(x, depth - 1) if depth else x)

    assert id_of(deep(tf.constant(1.0), 3)) == 1
    with pytest.raises(RuntimeError, match="too deep"):
        deep(tf.constant(1.0), -1)
    assert id_of(tf.constant(1.0)) is None


def test_decorated_functions_are_still_rewritten_by_autograph_and_their_gradients_follow(tf):
    @stream(2)
    def bounded(x):
        if tf.reduce_sum(x) > 10.0:
            return x * 0.5
        return tf.math.square(x)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(bounded(x) + stream(3)(tf.math.exp)(x))
        return tape.gradient(y, x)

    made = step.get_concrete_function(tf.TensorSpec([2])).graph
    (branch,) = [op for op in made.get_operations() if op.type in ("If", "StatelessIf") and "cond" in op.name][:1]
    assert id_of(branch) == 2
    assert {3} == {id_of(op) for op in made.get_operations() if op.type == "Exp"}
    np.testing.assert_allclose(step(tf.constant([1.0, 2.0])), [2 + np.e, 4 + np.e**2], rtol=1e-6)
    np.testing.assert_allclose(step(tf.constant([9.0, 2.0])), [0.5 + np.exp(9), 0.5 + np.e**2], rtol=1e-6)


def test_what_is_not_over_when_it_returns_is_refused():
    class Layer:
        def __call__(self):
            yield 1

    async def later():
        yield 1

    async def coroutine():
        return 1

    def generator():
        yield 1

    for wrong, word in (
        (generator, "a generator"),
        (Layer(), "a generator"),
        (later, "a generator"),
        (coroutine, "a coroutine"),
        (Layer, "the class Layer"),
        (3, "3 can not be put on a stream"),
    ):
        with pytest.raises(MsplitError, match=word):
            stream(1)(wrong)


def test_threads_may_share_a_scope(tf):
    import threading

    shared, found, meet = stream(1), [], threading.Barrier(2)

    def build():
        with tf.Graph().as_default():
            meet.wait()
            with shared:
                meet.wait()
                found.append(id_of(tf.constant(1.0)))
            found.append(id_of(tf.constant(1.0)))

    threads = [threading.Thread(target=build) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found, key=str) == [1, 1, None, None]


def test_a_group_has_streams_of_its_own(tf, graph):
    @stream(1)
    def second(x):
        return tf.nn.relu(x)

    x = tf.constant(1.0)
    with stream_group(2, size=3):
        plain = tf.nn.relu(x)
        with stream(0):
            a = tf.nn.relu(x)
            with stream(2):
                b = tf.nn.relu(x)
        c = second(x)
        with stream_group(np.int64(0), size=2):
            d, e = tf.nn.relu(x), second(x)
    outside = second(x)
    decorated = stream_group(1, size=3)(second)(x)
    assert [id_of(t) for t in (plain, a, b, c, d, e, outside, decorated)] == [6, 6, 8, 7, 0, 1, 1, 4]
    with (
        stream_group(0, size=2),
        pytest.raises(MsplitError, match="stream 2 is not in a group of 2 streams"),
        stream(2),
    ):
        pass
    assert id_of(tf.nn.relu(x)) is None


def test_a_group_is_about_its_own_graph(tf, graph):
    @tf.function
    def inner(x):
        with stream(1):
            return tf.nn.relu(x, name="inside")

    with stream_group(2, size=3):
        inner(tf.constant(1.0))
    body = inner.get_concrete_function(tf.TensorSpec([])).graph
    assert id_of(body.get_operation_by_name("inside")) == 1


@pytest.mark.parametrize(("group", "size"), [(-1, 2), (0, 0), (1.0, 2), (0, None), (True, 2), (0, "2")])
def test_groups_that_are_none_are_errors(group, size):
    with pytest.raises(MsplitError, match=r"integer|or more"):
        stream_group(group, size=size)


def towers(tf):
    """A Keras model with a group of streams per tower, and a variable that no tower has."""
    layers = tf.keras.layers

    class Towers(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.first = layers.Dense(4, use_bias=False)
            self.hidden = [layers.Dense(4, activation="relu") for _ in range(2)]
            self.out = [layers.Dense(1) for _ in range(2)]
            self.last = layers.Dense(1)

        def call(self, given):
            x = stream(1)(self.first)(given)
            made = []
            for group in range(2):
                with stream_group(group, size=2):
                    with stream(0):
                        y = self.hidden[group](x)
                    made.append(stream(1)(self.out[group])(y))
            return self.last(tf.concat(made, -1))

    model = Towers()
    model.build((None, 4))
    return model


def test_variables_are_where_their_layers_are_after_export(tf, tmp_path):
    model = towers(tf)
    model.export(tmp_path / "model", input_signature=[tf.TensorSpec([None, 4])], verbose=False)

    flat = msplit.load(tmp_path / "model")
    handles = [
        flat.graph.attrs[node].get("_stream_id") for node, op in enumerate(flat.graph.ops) if op == "VarHandleOp"
    ]
    assert sorted(handles, key=str) == [0, 0, 1, 1, 1, 2, 2, 3, 3, None, None]
    report = msplit.check(flat)
    assert [found for found in report.findings if found.code in ("MS006", "MS007")] == []


def test_variables_of_a_tf_module_follow_the_scope_they_are_read_in(tf, tmp_path):
    class Module(tf.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = tf.Variable([1.0], name="a"), tf.Variable([2.0], name="b")

        @tf.function(input_signature=[tf.TensorSpec([None])])
        def __call__(self, x):
            def body(i, y):
                return i + 1, stream(2)(tf.multiply)(y, self.b)

            with stream(1):
                y = x + self.a
            with stream(2):
                _, y = tf.while_loop(lambda i, y: i < 3, body, (0, y))
            return y

    module = Module()
    tf.saved_model.save(module, str(tmp_path / "module"))
    graph = msplit.load(tmp_path / "module").model.graph
    found = {
        str(graph.attrs[node].get("shared_name")): graph.attrs[node].get("_stream_id")
        for node, op in enumerate(graph.ops)
        if op == "VarHandleOp"
    }
    assert (found["a"], found["b"]) == (1, 2)


def test_a_variable_of_a_version_1_graph_follows_its_reader_unless_it_has_a_stream(tf, graph):
    with stream(3):
        own = tf.compat.v1.get_variable("own", [1], use_resource=True)
    free = tf.compat.v1.get_variable("free", [1], use_resource=True)
    with stream(1):
        own + free
    assert (id_of(own.handle), id_of(free.handle)) == (3, 1)
