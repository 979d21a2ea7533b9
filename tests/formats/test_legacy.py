"""Graphs of early TensorFlow: what their attributes mean follows from the version that made them, as TensorFlow reads them."""

import itertools

import numpy as np
import pytest

from msplit.benchmark.benchmark import bench
from msplit.flatten.build import flatten
from msplit.shapes import infer
from msplit.verify.results import Settings
from tests.cli.runner import msplit
from tests.formats.models import read

pytestmark = pytest.mark.tf

SAYS_A_SHAPE = {
    "Placeholder": "x",
    "PlaceholderV2": "x",
    "Variable": "v",
    "VariableV2": "v",
    "TemporaryVariable": "v",
}


PRODUCERS = [None, 10, 21, 22, 1000]
REMOVED = ("PlaceholderV2", 1000)
"""TensorFlow has no such op since version 23."""


@pytest.mark.parametrize(
    ("op", "producer"), [pair for pair in itertools.product(SAYS_A_SHAPE, PRODUCERS) if pair != REMOVED]
)
@pytest.mark.parametrize("sizes", [(), (3, 4)], ids=str)
def test_a_shape_means_what_it_means_to_tensorflow(tmp_path, op, producer, sizes):
    import tensorflow as tf

    v1 = tf.compat.v1
    graph = v1.GraphDef()
    node = graph.node.add(name=SAYS_A_SHAPE[op], op=op)
    node.attr["dtype"].type = tf.float32.as_datatype_enum
    node.attr["shape"].shape.CopyFrom(tf.TensorShape(sizes).as_proto())
    y = graph.node.add(name="y", op="Identity", input=[node.name])
    y.attr["T"].type = tf.float32.as_datatype_enum
    if producer is not None:
        graph.versions.producer = producer
    with tf.Graph().as_default() as loaded:
        v1.import_graph_def(graph, name="")
        wanted = loaded.get_tensor_by_name("y:0").shape
    model = read(tmp_path, graph, outputs=["y"])
    flat = flatten(model)
    found = infer(flat).shape(flat.graph.index["y"], 0)
    assert found == (None if wanted.rank is None else tuple(wanted))


def test_axes_of_a_reduction_may_be_a_matrix(tmp_path):
    import tensorflow as tf

    v1 = tf.compat.v1
    with tf.Graph().as_default() as made:
        x = v1.placeholder("float", [2, 3, 4], "x")
        axes = v1.placeholder("int32", [1, 2], "axes")
        tf.raw_ops.Sum(input=x, axis=[0, 2], name="y")
        tf.raw_ops.Sum(input=x, axis=tf.reshape(axes, [2]), name="z")
    graph = made.as_graph_def()
    graph.versions.producer = 20
    for node in graph.node:
        if node.name == "y/axis":
            node.attr["value"].tensor.tensor_shape.CopyFrom(tf.TensorShape([1, 2]).as_proto())
        if node.name == "z":
            node.input[1] = "axes"
    flat = flatten(read(tmp_path, graph, outputs=["y", "z"]))
    shapes = infer(flat, shapes={"x": (2, 3, 4), "axes": (1, 2)})
    assert [shapes.shape(flat.graph.index[name], 0) for name in "yz"] == [(3,), (None,)]
    quick = Settings(duration=0, warmup=0, min_rounds=1, builds=1, verify_inputs=1)
    one = flatten(read(tmp_path, graph, outputs=["y"]))
    request = {"engine": "cuda", "device": "cpu", "shapes": {"x": (2, 3, 4)}, "streams": (1,), "settings": quick}
    result = bench(one, **request).result
    assert not result.failed, result.describe_failures()


def old_model(folder):
    """A layer as TensorFlow 1.1 writes it, whose placeholder says nothing, and its value for ones."""
    import tensorflow as tf

    v1 = tf.compat.v1
    weights = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    with tf.Graph().as_default() as made:
        v1.nn.relu(tf.matmul(v1.placeholder("float", [None, 8], "x"), weights, name="mm"), name="y")
    graph = made.as_graph_def()
    graph.versions.producer = 21
    for node in graph.node:
        if node.op == "Placeholder":
            node.attr["shape"].shape.Clear()
        if node.op == "MatMul":
            for name in set(node.attr) - {"T", "transpose_a", "transpose_b"}:
                del node.attr[name]
    (folder / "old.pb").write_bytes(graph.SerializeToString())
    return folder / "old.pb"


def test_a_placeholder_of_an_old_graph_takes_the_shape_that_is_given(tmp_path):
    path = old_model(tmp_path)
    assert "scalar" not in msplit("show", path).out
    quick = ("--engine", "tensorflow", "--streams", "1,2", "--measure", "duration=0", "--measure", "builds=1")
    assert msplit("bench", path, *quick, "--shape", "x=4,8").code == 0
    told = msplit("bench", path, *quick)
    assert told.code == 2
    assert "--shape x=" in told.err
