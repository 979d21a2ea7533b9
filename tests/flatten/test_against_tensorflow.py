"""The flat view of SavedModels that TensorFlow exported, run by TensorFlow as a graph of its own."""

import numpy as np
import pytest

from msplit.core.graph import CONTROL
from msplit.flatten.build import flatten
from msplit.formats import read
from msplit.opset import schema

pytestmark = pytest.mark.tf


def as_graph_def(view):
    """The flat view as a GraphDef: the NodeDefs of the file with flat names and inputs."""
    result = schema.graph_pb2.GraphDef()
    result.versions.CopyFrom(view.model.graph_def.versions)
    result.library.CopyFrom(view.model.graph_def.library)
    graph = view.graph
    bodies = {function.signature.name: function for function in view.model.graph_def.library.function}
    for node, name in enumerate(graph.names):
        function_name, number = view.origin(node)
        original = (bodies[function_name].node_def if function_name else view.model.graph_def.node)[number]
        made = result.node.add(name=name, op=graph.ops[node])
        if original.op == made.op:
            for key, value in original.attr.items():
                if not key.startswith("_"):
                    made.attr[key].CopyFrom(value)
        elif made.op == "Identity":
            made.attr["T"].type = schema.types_pb2.DataType.Value("DT_FLOAT")
        for edge in graph.in_edges(node):
            source, port = graph.names[graph.edges.src[edge]], graph.edges.port[edge]
            made.input.append(f"^{source}" if port == CONTROL else f"{source}:{port}")
    return result


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    import tensorflow as tf

    @tf.function(jit_compile=True)
    def compiled(x):
        return tf.nn.relu(x) - 1.0

    @tf.function
    def halves(x):
        a, b = tf.split(x, 2, axis=1)
        tf.debugging.assert_all_finite(a, "a")
        return b, a, x

    @tf.function
    def twice(x):
        a, b, same = halves(x)
        c, d, _ = halves(same * 2.0)
        with tf.control_dependencies([c]):
            mean, variance = tf.nn.moments(d, axes=[0])
        return tf.concat([a * mean, b - variance], axis=1), same

    class Module(tf.Module):
        @tf.function(
            input_signature=[tf.TensorSpec([None, 6], tf.float32, name="x"), tf.TensorSpec([], tf.int32, name="steps")]
        )
        def forward(self, x, steps):
            first, same = twice(x)
            second, _ = twice(same + first)
            values, order = tf.unique(tf.cast(tf.round(second[:, 0]), tf.int32))
            looped = tf.while_loop(
                lambda i, v: i < steps, lambda i, v: (i + 1, tf.tanh(v) + halves(v)[2]), [0, second]
            )[1]
            return {"looped": looped, "order": order, "values": values, "compiled": compiled(second), "same": same}

    module = Module()
    folder = tmp_path_factory.mktemp("exported")
    tf.saved_model.save(module, str(folder), signatures=module.forward)
    return tf, folder, module


def test_flat_graph_computes_what_the_saved_model_computes(exported):
    tf, folder, module = exported
    view = flatten(read(folder))
    assert not {"PartitionedCall"} & {
        op for op, a in zip(view.graph.ops, view.graph.attrs, strict=True) if "_XlaMustCompile" not in a
    }
    graph = tf.Graph()
    with graph.as_default():
        tf.import_graph_def(tf.compat.v1.GraphDef.FromString(as_graph_def(view).SerializeToString()), name="")
    names = view.graph.names
    x = np.random.default_rng(0).normal(size=(5, 6)).astype(np.float32)
    wanted = module.forward(x, tf.constant(3))
    place = {tensor.name: f"{names[tensor.node]}:{tensor.port}" for tensor in (*view.inputs, *view.outputs)}
    with tf.compat.v1.Session(graph=graph) as session:
        found = session.run({name: place[name] for name in wanted}, {place["x"]: x, place["steps"]: 3})
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def test_calls_that_xla_compiles_stay_calls_in_what_tensorflow_exports(exported):
    _, folder, _ = exported
    view = flatten(read(folder))
    calls = [n for n, op in enumerate(view.graph.ops) if "PartitionedCall" in op]
    assert len(calls) == 1
    assert view.graph.attrs[calls[0]]["_XlaMustCompile"] is True
