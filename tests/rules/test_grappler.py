"""TensorFlow's optimizer makes as many nodes one in an annotated graph as in the graph that it was made of."""

import functools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from msplit import rules
from msplit.cost import estimate
from msplit.flatten.build import flatten
from msplit.flatten.flat import to_ids
from msplit.formats import read
from msplit.samples import fill
from msplit.shapes.infer import infer
from tests.campaign import campaign

pytestmark = [pytest.mark.tf, pytest.mark.no_cover]  # traced, the searches of `auto` take four times as long

SAMPLES = Path(__file__).parents[2] / "sample_graphs"
FILES = (
    "cond_v1.pb",
    "while_v1.pb",
    "lstm_small.pb",
    "mmoe_small.pb",
    "towers_small.pb",
    "feature_columns",
    "tf1_saved_model",
    "training.meta",
    "training_resource.meta",
)
DEAR = {"lstm_small.pb", "training.meta", "training_resource.meta"}
"""`auto` searches them for a second and more."""


def optimized(graph_def, fetches):
    """The ops of a graph after Grappler, counted."""
    import tensorflow as tf
    from tensorflow.core.protobuf import config_pb2, meta_graph_pb2
    from tensorflow.python.grappler import tf_optimizer

    with tf.Graph().as_default() as graph:
        tf.import_graph_def(graph_def, name="")
        meta = tf.compat.v1.train.export_meta_graph(graph_def=graph.as_graph_def(), graph=graph)
    wanted = meta_graph_pb2.CollectionDef()
    wanted.node_list.value.extend(fetches)
    meta.collection_def["train_op"].CopyFrom(wanted)
    config = config_pb2.ConfigProto()
    config.graph_options.rewrite_options.min_graph_nodes = -1
    return Counter(node.op for node in tf_optimizer.OptimizeGraph(config, meta).node)


def as_graph_def(message):
    import tensorflow as tf

    return tf.compat.v1.GraphDef.FromString(message.SerializeToString())


def annotated(graph_def, ids):
    result = type(graph_def)()
    result.CopyFrom(graph_def)
    for node in result.node:
        if (None, node.name) in ids:
            node.attr["_stream_id"].i = ids[None, node.name]
    return result


@functools.cache
def without_ids(path):
    """(graph_def, flat, costs, fetches, ops after Grappler) of a model."""
    model = read(path)
    graph_def, flat = as_graph_def(fill(model.graph_def)), flatten(model)
    fetches = [flat.graph.names[output.node] for output in flat.outputs]
    return graph_def, flat, estimate(flat, infer(flat)), fetches, optimized(graph_def, fetches)


def differing(path, name):
    """How many nodes more of each op there are with a rule set's ids than without any."""
    graph_def, flat, costs, fetches, before = without_ids(path)
    outcome = rules.assign(flat, costs, rules.load(name))
    ids, _ = to_ids(flat, np.where(flat.host, -1, outcome.ids).tolist(), costs.time_us.tolist())
    after = optimized(annotated(graph_def, ids), fetches)
    after.subtract(before)
    return {op: more for op, more in after.items() if more}


@pytest.mark.parametrize(
    ("file", "name"),
    [
        pytest.param(file, name, marks=campaign if name == "auto" and file in DEAR else ())
        for file in FILES
        for name in ("auto", "default", "recsys", "rnn", "vision")
    ],
)
def test_no_more_nodes_run(file, name):
    # A constant that the host reads has no id, and its copy on the GPU has one.
    assert differing(SAMPLES / file, name) == ({"Const": 3} if file == "feature_columns" else {})


def test_equal_nodes_with_different_ids_stay_apart(tmp_path):
    """What this is about: the optimizer takes the attribute for a part of what a node is."""
    import tensorflow as tf

    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, (4, 4), "x")
        tf.add(tf.nn.relu(x, "a") * 2.0, tf.tanh(tf.nn.relu(x, "b")), "out")
    graph_def = graph.as_graph_def()
    plain = optimized(graph_def, ["out"])
    assert plain["Relu"] == 1
    assert optimized(annotated(graph_def, {(None, "a"): 1, (None, "b"): 1}), ["out"]) == plain
    assert optimized(annotated(graph_def, {(None, "a"): 1, (None, "b"): 2}), ["out"])["Relu"] == 2
