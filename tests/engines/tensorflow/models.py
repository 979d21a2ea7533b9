"""Small models for the tests of the engine, made by TensorFlow, as flat graphs without the reader."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from msplit.core.graph import CONTROL, Edges, Graph, TensorValue
from msplit.engines.tensorflow.runtime import tensorflow
from msplit.flatten.flat import FlatGraph, Region, Tensor
from msplit.formats.model import Endpoint, Format, Model
from msplit.opset import schema


def plain(value):
    kind = value.WhichOneof("value")
    if kind == "type":
        return tensorflow().dtypes.as_dtype(value.type).name
    if kind == "s":
        return value.s.decode("utf-8", "replace")
    if kind == "tensor":
        array = tensorflow().make_ndarray(value.tensor)
        return TensorValue(str(array.dtype), array.shape, lambda: array)
    if kind in ("i", "f", "b"):
        return getattr(value, kind)
    return None


def flat_of(
    graph_def, inputs, outputs, *, targets=(), init_ops=(), path=Path("test.pb"), fmt=Format.GRAPH_DEF, proto=None
):
    """The flat graph of a GraphDef without functions.

    Args:
        inputs: (name, tensor name) of what is fed.
        outputs: Likewise of what is fetched.
    """
    index = {node.name: i for i, node in enumerate(graph_def.node)}
    columns = ([], [], [], [])
    back = ([], [], [], [])
    for v, node in enumerate(graph_def.node):
        slot = 0
        for text in node.input:
            if text.startswith("^"):
                row = (index[text[1:]], CONTROL, v, CONTROL)
            else:
                name, _, port = text.partition(":")
                row = (index[name], int(port or 0), v, slot)
                slot += 1
            which = back if graph_def.node[row[0]].op == "NextIteration" else columns
            for column, item in zip(which, row, strict=True):
                column.append(item)
    attrs = [{key: plain(value) for key, value in node.attr.items()} for node in graph_def.node]
    graph = Graph(
        names=[n.name for n in graph_def.node],
        ops=[n.op for n in graph_def.node],
        devices=[n.device for n in graph_def.node],
        attrs=attrs,
        edges=Edges.of(*columns),
    )
    endpoint = lambda name, tensor: Endpoint(name, tensor.split(":")[0], int(tensor.split(":")[1]), "", None)  # noqa: E731
    model = Model(
        path=path,
        format=fmt,
        proto=proto if proto is not None else graph_def,
        graph_def=graph_def,
        graph=graph,
        inputs=tuple(endpoint(*pair) for pair in inputs),
        outputs=tuple(endpoint(*pair) for pair in outputs),
        targets=tuple(targets),
        init_ops=tuple(init_ops),
    )
    count = len(graph)
    loops = [node.op in LOOP_OPS for node in graph_def.node]
    tensor = lambda name, full: Tensor(name, index[full.split(":")[0]], int(full.split(":")[1]))  # noqa: E731
    return FlatGraph(
        model=model,
        graph=graph,
        back_edges=Edges.of(*back),
        origin_function=np.full(count, -1, np.int32),
        origin_node=np.arange(count, dtype=np.int32),
        function_names=(),
        region=np.where(loops, 0, -1).astype(np.int32),
        regions=(Region("loop", "while"),) if any(loops) else (),
        host=np.array([_is_host(node.op, a) for node, a in zip(graph_def.node, attrs, strict=True)]),
        stateful=np.array([bool(getattr(schema.lookup(node.op), "stateful", False)) for node in graph_def.node]),
        inputs=tuple(tensor(*pair) for pair in inputs),
        outputs=tuple(tensor(*pair) for pair in outputs),
        targets=tuple(index[name] for name in targets),
    )


LOOP_OPS = frozenset({"Enter", "Exit", "Merge", "Switch", "NextIteration", "LoopCond"})


def _is_host(op, attrs):
    return schema.lookup(op) is not None and schema.gpu_kernel(op, attrs) is None


def towers(count=4, *, rows=50, width=8, seed=0):
    """Embedding towers on frozen tables, joined by a concat."""
    tf = tensorflow()
    rng = np.random.default_rng(seed)
    graph = tf.Graph()
    with graph.as_default():
        ids = tf.compat.v1.placeholder(tf.int32, [None, count], name="ids")
        columns = []
        for tower in range(count):
            with tf.name_scope(f"tower_{tower}"):
                table = tf.constant(rng.standard_normal((rows, width)).astype(np.float32), name="table")
                x = tf.gather(table, ids[:, tower], name="lookup")
                kernel = tf.constant(rng.standard_normal((width, width)).astype(np.float32), name="kernel")
                columns.append(tf.nn.relu(tf.matmul(x, kernel), name="relu"))
        tf.concat(columns, 1, name="out")
    return flat_of(graph.as_graph_def(), [("ids", "ids:0")], [("out", "out:0")])


def by_scope(flat, streams):
    """Stream k for everything in a scope that ends in _k."""
    ids = np.zeros(len(flat), np.int32)
    for v, name in enumerate(flat.graph.names):
        scope = name.split("/")[0]
        if "_" in scope and scope.rpartition("_")[2].isdigit():
            ids[v] = int(scope.rpartition("_")[2]) % streams
    return ids


def scattered(flat, streams, seed=0):
    """A stream at random for every node: the worst that an assignment can do."""
    return np.random.default_rng(seed).integers(0, streams, len(flat)).astype(np.int32)


def training(*, resource, path=Path("train.meta")):
    """Two inputs with a weight each and gradient descent: the loss and the step are fetched."""
    tf, v1 = tensorflow(), tensorflow().compat.v1
    tf, v1 = tensorflow(), tensorflow().compat.v1
    graph = tf.Graph()
    with graph.as_default(), v1.variable_scope("", use_resource=resource):
        a = v1.placeholder(tf.float32, [None, 3], name="a")
        b = v1.placeholder(tf.float32, [None, 3], name="b")
        y = v1.placeholder(tf.float32, [None, 1], name="y")
        w_a = v1.get_variable("w_a", [3, 1], initializer=v1.random_normal_initializer())
        w_b = v1.get_variable("w_b", [3, 1], initializer=v1.zeros_initializer())
        bias = v1.get_variable("bias", [1], initializer=v1.zeros_initializer())
        prediction = tf.add(tf.matmul(a, w_a) + bias, tf.matmul(b, w_b), name="prediction")
        loss = tf.reduce_mean(tf.square(prediction - y), name="loss")
        v1.train.GradientDescentOptimizer(0.05).minimize(loss, name="train")
        v1.global_variables_initializer()
        saver = v1.train.Saver()
        meta = v1.train.export_meta_graph(saver_def=saver.as_saver_def())
    flat = flat_of(
        meta.graph_def,
        [("a", "a:0"), ("b", "b:0"), ("y", "y:0")],
        [("loss", "loss:0"), ("train", "train:0")],
        init_ops=["init"],
        path=path,
        fmt=Format.META_GRAPH,
        proto=meta,
    )
    return flat, graph, saver


def loop():
    """A v1 while loop of matrix products between two branches."""
    tf, v1 = tensorflow(), tensorflow().compat.v1
    graph = tf.Graph()
    with graph.as_default():
        switched = tf.compat.v1.control_flow_v2_enabled()
        v1.disable_control_flow_v2()
        x = v1.placeholder(tf.float32, [None, 4], name="x")
        w = tf.constant(np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32) / 2, name="w")
        left = tf.tanh(x, name="left")
        _, looped = v1.while_loop(lambda i, _: i < 5, lambda i, h: (i + 1, tf.tanh(tf.matmul(h, w))), (0, left))
        right = tf.nn.relu(tf.matmul(x, w), name="right")
        tf.add(looped, right, name="out")
        if switched:
            v1.enable_control_flow_v2()
    return flat_of(graph.as_graph_def(), [("x", "x:0")], [("out", "out:0")])


def dropout():
    """Random ops without a seed."""
    tf, v1 = tensorflow(), tensorflow().compat.v1
    graph = tf.Graph()
    with graph.as_default():
        x = v1.placeholder(tf.float32, [8], name="x")
        a = tf.multiply(x, tf.raw_ops.RandomUniform(shape=[8], dtype=tf.float32, name="noise_0"), name="a_0")
        b = tf.multiply(x, tf.raw_ops.RandomStandardNormal(shape=[8], dtype=tf.float32, name="noise_1"), name="b_1")
        tf.add(a, b, name="out")
    return flat_of(graph.as_graph_def(), [("x", "x:0")], [("out", "out:0")])


def strings():
    """A string feature hashed on the host, its embedding on a stream."""
    tf, v1 = tensorflow(), tensorflow().compat.v1
    graph = tf.Graph()
    with graph.as_default():
        city = v1.placeholder(tf.string, [None], name="city")
        ids = tf.strings.to_hash_bucket_fast(city, 20, name="hash_1")
        table = tf.constant(np.random.default_rng(0).standard_normal((20, 4)).astype(np.float32), name="table_1")
        tf.gather(table, ids, name="out_1")
        tf.strings.upper(city, name="upper")
    return flat_of(graph.as_graph_def(), [("city", "city:0")], [("vector", "out_1:0"), ("upper", "upper:0")])
