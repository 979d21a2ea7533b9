"""Gradients of functions of TensorFlow 1, `SymbolicGradient` nodes: what TensorFlow makes of them is in the flat graph."""

from __future__ import annotations

import numpy as np
import pytest

from msplit.engines.cuda.coverage import cover
from msplit.flatten.flat import original, to_ids
from msplit.verify.compare import compare
from tests.engines.cuda.cases import flat_of, run

pytestmark = pytest.mark.tf

X = np.random.default_rng(3).normal(size=(2, 3)).astype(np.float32)


@pytest.fixture(scope="module")
def tf1():
    """TensorFlow, its decorator of functions, and the gradient of one, whose inputs are followed by the gradients of its outputs."""
    import tensorflow as tf
    from tensorflow.python.framework.function import Defun
    from tensorflow.python.ops.functional_ops import symbolic_gradient

    def gradient(function, *inputs, types=None):
        function.add_to_graph(tf.compat.v1.get_default_graph())
        found = symbolic_gradient(list(inputs), types or [tf.float32], function)
        return found if isinstance(found, list) else [found]

    return tf, Defun, gradient


def several(tf, Defun, gradient, x, *, noinline=False):
    """Three outputs, an input of integers, one that nobody uses, and a call inside."""

    @Defun(tf.float32, noinline=noinline)
    def inner(x):
        return tf.sin(x) * x

    @Defun(tf.float32, tf.float32, tf.int32, tf.float32, noinline=noinline)
    def function(x, y, n, unused):
        return tf.tanh(inner(x)) * x, y * tf.cast(n, tf.float32) + x, n * n

    n = tf.constant([4, 5, 6])
    types = [tf.float32, tf.float32, tf.int32, tf.float32]
    return gradient(function, x, x[0], n, x[1], x * 2, x + 1, tf.constant([1, -2, 3]), types=types)


def never_inlined(tf, Defun, gradient, x):
    return several(tf, Defun, gradient, x, noinline=True)


def of_a_gradient(tf, Defun, gradient, x):
    @Defun(tf.float32)
    def function(x):
        return tf.exp(x)

    @Defun(tf.float32, tf.float32)
    def first(x, dy):
        return gradient(function, x, dy)[0]

    return gradient(first, x, x * 2, x + 1, types=[tf.float32, tf.float32])


def in_a_function(tf, Defun, gradient, x):
    @Defun(tf.float32)
    def function(x):
        return tf.tanh(x) * x

    @Defun(tf.float32, tf.float32)
    def twice(x, dy):
        return gradient(function, x, dy)[0] * 2

    return [twice(x, x), twice(x * 3, x)]


def nested(tf, Defun, gradient, x):
    """By `tf.gradients`; inside one function is called twice, and one of TensorFlow 2."""

    @tf.function
    def new(x):
        return tf.tanh(x)

    @Defun(tf.float32)
    def inner(x):
        return new(x) * x

    @Defun(tf.float32)
    def function(x):
        return inner(inner(x)) + tf.nn.relu(tf.matmul(x, tf.transpose(x)))[:, :1]

    return tf.gradients(function(x), x)


def of_the_users_own(tf, Defun, gradient, x):
    @Defun(tf.float32, tf.float32)
    def own(x, dy):
        return dy * 42 + x

    @Defun(tf.float32, grad_func=own)
    def function(x):
        return tf.tanh(x)

    return tf.gradients(function(x), x)


def of_random_numbers(tf, Defun, gradient, x):
    tf.compat.v1.set_random_seed(3)

    @Defun(tf.float32)
    def function(x):
        return x * tf.random.uniform(X.shape, seed=1)

    y = function(x)
    return [y, *tf.gradients(y, x)]


def in_a_loop(tf, Defun, gradient, x):
    @Defun(tf.float32)
    def function(x):
        return tf.tanh(x) * x

    return tf.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, *gradient(function, h, x)), (0, x))[1:]


def in_a_loop_of_tensorflow_2(tf, *given):
    v1 = tf.compat.v1
    before = v1.control_flow_v2_enabled()
    v1.enable_control_flow_v2()
    try:
        return in_a_loop(tf, *given)
    finally:
        None if before else v1.disable_control_flow_v2()


def built(tf1, build, steps=2):
    """The flat graph of what is built of an input x, and what a plain session of TensorFlow gives for the last of some steps."""
    tf, *_ = tf1
    options = tf.compat.v1.ConfigProto()  # it rewrites graphs: no kernel takes a gradient of a gradient
    with tf.Graph().as_default() as graph, tf.compat.v1.Session(config=options) as session:
        found = build(*tf1, tf.compat.v1.placeholder(tf.float32, X.shape, name="x"))
        outputs = {f"y{i}": tf.identity(value, name=f"y{i}") for i, value in enumerate(found)}
        for _ in range(steps):
            expected = session.run(outputs, {"x:0": X})
    return flat_of(graph.as_graph_def(), outputs=list(outputs)), expected


@pytest.mark.parametrize(
    "build",
    [
        several,
        never_inlined,
        of_a_gradient,
        in_a_function,
        nested,
        of_the_users_own,
        of_random_numbers,
        in_a_loop,
        in_a_loop_of_tensorflow_2,
    ],
)
def test_values_are_those_of_tensorflow(tf1, build):
    flat, expected = built(tf1, build)
    assert "SymbolicGradient" not in flat.graph.ops
    found = compare(run(flat, {"x": X}, 4, steps=2), expected)
    assert found.passed, found.describe()


@pytest.mark.parametrize("build", [several, in_a_function])
def test_nodes_of_a_gradient_come_from_its_node(tf1, build):
    """A file has no place for their ids."""
    flat, _ = built(tf1, build)
    nodes = [node for node, name in enumerate(flat.graph.names) if "/gradient/" in name]
    origins = {original(flat, int(flat.origin_function[n]), int(flat.origin_node[n]))[1:] for n in nodes}
    assert origins == {("SymbolicGradient", "SymbolicGradient")}
    ids, conflicts = to_ids(flat, [1] * len(flat))
    assert not conflicts
    assert not any("gradient of" in str(function) for function, _ in ids)


def calling(graph_def, name, other):
    """A function that calls another one."""
    function = graph_def.library.function.add()
    function.signature.name = name
    for arguments, argument in ((function.signature.input_arg, "x"), (function.signature.output_arg, "y")):
        arguments.add(name=argument, type=1)
    function.node_def.add(name="called", op=other, input=["x"])
    function.ret["y"] = "called:y:0"


@pytest.mark.parametrize(("calls", "inlined"), [(3, True), (200, False), (0, False)])
def test_a_function_that_calls_itself_or_far_down_is_no_work_for_tensorflow(tf1, calls, inlined):
    tf, *_ = tf1
    graph_def = tf.compat.v1.GraphDef()
    for number in range(calls):
        calling(graph_def, f"f{number}", f"f{number + 1}")
    calling(graph_def, f"f{calls}", "last" if calls else "f0")
    calling(graph_def, "last", "Tanh")
    graph_def.library.function[-1].node_def[0].attr["T"].type = 1
    graph_def.node.add(name="x", op="Placeholder").attr["dtype"].type = 1
    node = graph_def.node.add(name="y", op="SymbolicGradient", input=["x", "x"])
    node.attr["Tin"].list.type.extend([1, 1])
    node.attr["Tout"].list.type.append(1)
    node.attr["f"].func.name = "f0"
    flat = flat_of(graph_def, outputs=["y"])
    assert ("SymbolicGradient" not in flat.graph.ops) is inlined
    assert bool(cover(flat).missing) is not inlined
