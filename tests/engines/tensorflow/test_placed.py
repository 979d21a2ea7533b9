"""The GraphDef that the session gets: devices, copies of constants, what must stay together. No TensorFlow runs here."""

import numpy as np
import pytest
from google.protobuf import text_format

from msplit.engines.tensorflow.placed import HOST, place, unplaced
from msplit.flatten.build import flatten
from msplit.formats import read
from msplit.opset import schema

DEVICES = ["/device:GPU:0", "/device:GPU:1", "/device:GPU:2"]
CPU = "/device:CPU:0"

HEAD = """
node { name: "x" op: "Placeholder" attr { key: "dtype" value { type: DT_FLOAT } } }
"""


def const(name, values, *, control=None, dtype="DT_FLOAT", count=None):
    shape = f"dim {{ size: {count or len(values)} }}"
    data = " ".join(f"float_val: {value}" for value in values) if dtype == "DT_FLOAT" else 'string_val: "a"'
    waits = f'input: "^{control}"' if control else ""
    return f"""
    node {{ name: "{name}" op: "Const" {waits} attr {{ key: "dtype" value {{ type: {dtype} }} }}
      attr {{ key: "value" value {{ tensor {{ dtype: {dtype} tensor_shape {{ {shape} }} {data} }} }} }} }}"""


def op(name, kind, *inputs, dtype="DT_FLOAT", extra=""):
    listed = " ".join(f'input: "{source}"' for source in inputs)
    return f'node {{ name: "{name}" op: "{kind}" {listed} attr {{ key: "T" value {{ type: {dtype} }} }} {extra} }}'


def handle(name, shared=""):
    return f"""node {{ name: "{name}" op: "VarHandleOp" attr {{ key: "dtype" value {{ type: DT_FLOAT }} }}
      attr {{ key: "shape" value {{ shape {{ dim {{ size: 1 }} }} }} }} attr {{ key: "shared_name" value {{ s: "{shared}" }} }} }}"""


def read_of(name, source):
    return f'node {{ name: "{name}" op: "ReadVariableOp" input: "{source}" attr {{ key: "dtype" value {{ type: DT_FLOAT }} }} }}'


def load(tmp_path, text, **more):
    graph_def = text_format.Parse(text, schema.graph_pb2.GraphDef())
    (tmp_path / "g.pb").write_bytes(graph_def.SerializeToString())
    return flatten(read(tmp_path / "g.pb", **more))


def placed(flat, where, **more):
    ids = np.array([where.get(name, 0) for name in flat.graph.names], np.int32)
    result = place(flat, ids, DEVICES, CPU, **more)
    return result, {node.name: node for node in result.graph_def.node}


def test_nodes_get_the_device_of_their_stream(tmp_path):
    flat = load(tmp_path, HEAD + op("a", "Relu", "x") + op("b", "Relu", "x") + op("c", "AddV2", "a", "b"))
    result, nodes = placed(flat, {"b": 2})
    assert {name: node.device for name, node in nodes.items()} == {
        "x": DEVICES[0],
        "a": DEVICES[0],
        "b": DEVICES[2],
        "c": DEVICES[0],
    }
    assert result.copies == 2, "x goes to stream 2, b comes back"
    assert list(nodes["c"].input) == ["a", "b"]
    assert not any(node.device for node in flat.model.graph_def.node), "the model itself stays as it is"


def test_small_constants_are_copied_to_every_stream_that_reads_them_once(tmp_path):
    text = (
        HEAD + const("k", [1.0, 2.0]) + op("a", "Mul", "x", "k") + op("b", "Mul", "x", "k") + op("c", "Mul", "b", "k")
    )
    flat = load(tmp_path, text)
    result, nodes = placed(flat, {"b": 1, "c": 1})
    assert result.clones == 1
    assert nodes["k__stream_1"].device == DEVICES[1]
    assert list(nodes["b"].input) == ["x", "k__stream_1"]
    assert list(nodes["c"].input) == ["b", "k__stream_1"]
    assert list(nodes["a"].input) == ["x", "k"]
    assert nodes["k__stream_1"].attr["value"] == nodes["k"].attr["value"]


@pytest.mark.parametrize("splat", [False, True])
def test_a_large_constant_stays_single(tmp_path, splat):
    value = const("k", [1.0], count=1000) if splat else const("k", [float(i) for i in range(1000)])
    flat = load(tmp_path, HEAD + value + op("a", "Mul", "x", "k") + op("b", "Mul", "x", "k"))
    result, nodes = placed(flat, {"b": 1}, clone_limit=1000)
    assert result.clones == 0
    assert list(nodes["b"].input) == ["x", "k"]
    assert result.copies == 2


def test_a_constant_that_its_own_stream_does_not_read_moves(tmp_path):
    flat = load(tmp_path, HEAD + const("k", [1.0]) + op("a", "Mul", "x", "k") + op("b", "Relu", "x"))
    result, nodes = placed(flat, {"a": 2}, clone_limit=0)
    assert nodes["k"].device == DEVICES[2]
    assert result.copies == 1


def test_a_constant_of_a_branch_is_not_copied_out_of_it(tmp_path):
    text = (
        HEAD
        + op("a", "Relu", "x")
        + const("k", [1.0], control="a")
        + op("b", "Mul", "x", "k")
        + op("c", "Mul", "a", "k")
    )
    result, nodes = placed(load(tmp_path, text), {"b": 1})
    assert result.clones == 0
    assert list(nodes["b"].input) == ["x", "k"]


def test_a_name_that_is_taken_is_not_taken_again(tmp_path):
    text = HEAD + const("k", [1.0]) + op("k__stream_1", "Mul", "x", "k") + op("b", "Mul", "k__stream_1", "k")
    result, nodes = placed(load(tmp_path, text), {"b": 1})
    assert result.clones == 1
    assert nodes["k__stream_1"].op == "Mul"
    assert nodes["k__stream_1__1"].op == "Const"
    assert len(nodes) == len(result.graph_def.node)


def test_readers_follow_their_variable(tmp_path):
    text = HEAD + handle("v") + read_of("r", "v") + op("a", "Mul", "x", "r")
    result, nodes = placed(load(tmp_path, text), {"v": 1, "r": 2, "a": 2})
    assert (nodes["v"].device, nodes["r"].device, nodes["a"].device) == (DEVICES[1], DEVICES[1], DEVICES[2])
    assert result.moved == 1
    assert result.variables == ("v",)


def test_two_handles_of_one_variable_are_on_one_device_needed_or_not(tmp_path):
    text = HEAD + handle("v", "shared") + handle("w", "shared") + handle("u", "shared") + handle("other", "mine")
    text += (
        read_of("r", "v")
        + read_of("s", "w")
        + read_of("t", "u")
        + op("a", "AddN", "r", "s", extra='attr { key: "N" value { i: 2 } }')
    )
    flat = load(tmp_path, text, outputs=["a"])
    result, nodes = placed(flat, {"v": 1, "w": 2, "r": 1, "s": 2})
    assert nodes["v"].device == nodes["w"].device == nodes["u"].device == DEVICES[1]
    assert nodes["other"].device == ""
    assert len(result.variables) == 1


def test_reference_variables_keep_their_writers(tmp_path):
    text = """
    node { name: "v" op: "VariableV2" attr { key: "dtype" value { type: DT_FLOAT } }
      attr { key: "shape" value { shape { dim { size: 1 } } } } attr { key: "_class" value { list { s: "loc:@v" } } } }"""
    text += HEAD + op("write", "AssignAdd", "v", "x") + op("y", "Relu", "write")
    flat = load(tmp_path, text, outputs=["y"])
    _, nodes = placed(flat, {"v": 1, "write": 0, "y": 0})
    assert nodes["write"].device == DEVICES[1]
    assert nodes["y"].device == DEVICES[1], "what reads the reference itself stays with it"
    assert "_class" not in nodes["v"].attr


def test_host_nodes_are_on_the_cpu(tmp_path):
    text = HEAD + const("s", ["a"], dtype="DT_STRING")
    text += """node { name: "n" op: "StringToNumber" input: "s" attr { key: "out_type" value { type: DT_FLOAT } } }"""
    text += op("a", "Mul", "x", "n")
    _, nodes = placed(load(tmp_path, text), {"s": 1, "n": 2, "a": 1})
    assert nodes["n"].device == CPU
    assert nodes["s"].device == CPU
    assert nodes["a"].device == DEVICES[1]
    assert HOST < 0


def test_what_the_outputs_do_not_need_is_left_to_tensorflow(tmp_path):
    text = HEAD + op("a", "Relu", "x") + op("unused", "Relu", "x").replace("op:", 'device: "/device:GPU:7" op:')
    _, nodes = placed(load(tmp_path, text, outputs=["a"]), {})
    assert nodes["unused"].device == ""


def test_random_ops_get_seeds_of_their_own_and_seeded_ones_keep_theirs(tmp_path):
    shape = const("n", [2.0])
    random = '{} attr {{ key: "dtype" value {{ type: DT_FLOAT }} }} attr {{ key: "seed" value {{ i: {} }} }}'
    text = shape.replace("DT_FLOAT", "DT_INT32").replace("float_val: 2.0", "int_val: 2")
    for name, seed in (("a", 0), ("b", 0), ("c", 5)):
        text += op(name, "RandomUniform", "n", dtype="DT_INT32", extra=random.format("", seed))
    flat = load(tmp_path, text)
    nodes = {node.name: node for node in unplaced(flat).graph_def.node}
    seeds = [nodes[name].attr["seed"].i for name in "abc"]
    assert len(set(seeds)) == 3
    assert all(seeds)
    assert seeds[2] == 5
    _, again = placed(flat, {"b": 1})
    assert [again[name].attr["seed"].i for name in "abc"] == seeds
    assert [node.attr["seed"].i for node in flat.model.graph_def.node if node.op == "RandomUniform"] == [0, 0, 5]


def test_a_model_without_random_ops_is_taken_as_it_is(tmp_path):
    flat = load(tmp_path, HEAD + op("a", "Relu", "x"))
    result = unplaced(flat)
    assert result.graph_def is flat.model.graph_def
    assert not result.changed


@pytest.mark.tf
def test_a_function_with_a_loop_called_twice_runs_each_loop_in_its_own_frame(tmp_path):
    from msplit.engines.base import Job
    from msplit.engines.tensorflow.engine import ENGINE
    from msplit.engines.tensorflow.runtime import tensorflow

    tf = tensorflow()
    from tensorflow.python.framework import function

    v1 = tf.compat.v1
    enabled = v1.control_flow_v2_enabled()
    v1.disable_control_flow_v2()
    try:

        @function.Defun(tf.float32)  # functions of TensorFlow 2 have no loops of this kind
        def grown(h):
            return v1.while_loop(lambda i, _: i < 3, lambda i, h: (i + 1, h * 2 + 1), (0, h))[1]

        graph = tf.Graph()
        with graph.as_default():
            x = v1.placeholder(tf.float32, [2], name="x")
            tf.identity(grown(x) - grown(grown(x)), name="out")
    finally:
        if enabled:
            v1.enable_control_flow_v2()
    (tmp_path / "g.pb").write_bytes(graph.as_graph_def().SerializeToString())
    flat = flatten(read(tmp_path / "g.pb", outputs=["out"]))
    frames = {attrs["frame_name"] for op, attrs in zip(flat.graph.ops, flat.graph.attrs, strict=True) if op == "Enter"}
    assert len(frames) == 3
    feeds = {"x": np.array([1.0, -2.0], np.float32)}
    for streams in (1, 3):
        executable = ENGINE.build(Job(flat, np.arange(len(flat), dtype=np.int32) % streams, streams, feeds))
        assert executable.step(feeds)["out"].tolist() == [15.0 - 127.0, -9.0 + 65.0]
        executable.close()
