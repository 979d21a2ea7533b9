"""From a flat graph to ops: what is evaluated once, what vanishes, what is refused."""

import numpy as np
import pytest
import torch

from msplit.engines.cuda.device.device import telling_out_of_memory
from msplit.engines.cuda.engine import ENGINE
from msplit.engines.cuda.frontend.importer import build
from msplit.engines.cuda.ir import interpret
from msplit.engines.cuda.ir.graph import Op
from msplit.engines.cuda.ir.lowering import Lowering
from msplit.errors import EngineError, OutOfMemory
from msplit.flatten.build import flatten
from msplit.formats import read
from tests.campaign import examples
from tests.engines.cuda.cases import SAMPLES, assert_equals_tensorflow, flat_of, graph_of, job, program_of, run

pytestmark = pytest.mark.tf


def fed(flat):
    return {tensor.name: (tensor.node, tensor.port) for tensor in flat.inputs}


def test_constants_are_evaluated_once_and_what_is_not_needed_is_left_out():
    def graph(tf, v1):
        x = v1.placeholder(tf.float32, [None, 3], name="x")
        weights = tf.reshape(tf.range(12, dtype=tf.float32) * 2.0, [3, 4]) / 7.0
        tf.tanh(x, name="dead")
        tf.matmul(x, tf.transpose(tf.transpose(weights)), name="out")

    flat = graph_of(graph, outputs=["out"])
    source = build(flat, fed(flat))
    (op,) = source.ops.values()
    assert op.op == "MatMul"
    weights = source.constants[op.inputs[1]]
    assert np.allclose(weights, (np.arange(12) * 2 / 7).reshape(3, 4))
    assert list(source.feeds) == ["x"]


def test_inputs_that_nothing_reads_are_no_inputs_of_the_device():
    def graph(tf, v1):
        x = v1.placeholder(tf.float32, [None, 3], name="x")
        y = v1.placeholder(tf.float32, [None, 5], name="y")
        tf.zeros_like(y, name="zeros")
        tf.tanh(x, name="out")

    flat = graph_of(graph, outputs=["out"])
    feeds = {tensor.name: np.ones((2, 3), np.float32) for tensor in flat.inputs}
    assert list(program_of(flat, feeds).feeds) == ["x"]


def test_variables_are_read_from_the_checkpoint_without_a_step():
    flat = flatten(read(SAMPLES / "keras_inception"))
    source = build(flat, fed(flat))
    assert not {"ReadVariableOp", "VarHandleOp", "Identity"} & {op.op for op in source.ops.values()}
    assert sum(value.nbytes for value in source.constants.values()) > 10_000


def test_a_constant_expression_that_would_grow_too_large_is_left_to_the_run(monkeypatch):
    monkeypatch.setattr(interpret, "LARGEST_FOLDED", 1000)

    def graph(tf, v1):
        x = v1.placeholder(tf.float32, [None], name="x")
        tf.add(x, tf.tile(tf.constant([1.0, 2.0]), [250]), name="large")
        tf.add(x, tf.tile(tf.constant([1.0, 2.0]), [3]), name="small")

    flat = graph_of(graph, outputs=["large", "small"])
    feeds = {"x": np.ones(1, np.float32)}
    assert [step.op.op for step in program_of(flat, feeds).steps if step.launches].count("Tile") == 1
    assert_equals_tensorflow(flat, feeds)


def test_a_lowering_that_refuses_names_the_node_and_the_way_out():
    def graph(tf, v1):
        x = v1.placeholder(tf.int32, [None, 4, 4, 1], name="x")
        tf.nn.conv2d(x, np.ones((2, 2, 1, 1), np.int32), 1, "SAME", name="integers")

    flat = graph_of(graph)
    with pytest.raises(EngineError, match=r"(?s)integers.*int32.*--engine tensorflow"):
        run(flat, {"x": np.ones((1, 4, 4, 1), np.int32)})


def test_shapes_that_do_not_fit_name_the_node_and_what_to_check():
    def graph(tf, v1):
        x, y = v1.placeholder(tf.float32, [None, None], name="x"), v1.placeholder(tf.float32, [None, None], name="y")
        tf.matmul(x, y, name="product")

    flat = graph_of(graph)
    with pytest.raises(EngineError, match=r"(?s)product.*--shape"):
        run(flat, {"x": np.ones((2, 3), np.float32), "y": np.ones((4, 5), np.float32)})


def test_too_little_memory_is_told_as_such():
    def fails(node, *arguments):
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.30 GiB. GPU 0 has a total capacity of 139.80 GiB"
        )

    wanted = r"node big: Neg: CUDA out of memory. Tried to allocate 2.30 GiB.\n  fix: use a smaller --batch or fewer --streams"
    with pytest.raises(EngineError, match=wanted):
        interpret.call(Lowering("Neg", fails), Op(0, "big", "Neg", {}, []), [])


def test_so_is_too_little_memory_for_inputs_and_constants():
    problem = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 1.02 GiB. GPU 0 has a total capacity of 139.80 GiB"
    )
    with (
        pytest.raises(OutOfMemory, match=r"CUDA out of memory. Tried to allocate 1.02 GiB.\n  fix:"),
        telling_out_of_memory(),
    ):
        raise problem


def test_a_long_chain_is_no_problem():
    from msplit.opset import schema

    graph_def = schema.graph_pb2.GraphDef()
    node = graph_def.node.add(name="x", op="Placeholder")
    node.attr["dtype"].type = 1
    node.attr["shape"].shape.dim.add(size=2)
    for number in range(examples(10_000, 50_000)):
        node = graph_def.node.add(name=f"n{number}", op="Identity", input=[graph_def.node[-1].name])
        node.attr["T"].type = 1
    node = graph_def.node.add(name="out", op="Neg", input=[graph_def.node[-1].name])
    node.attr["T"].type = 1
    flat = flat_of(graph_def)
    feeds = {"x": np.ones(2, np.float32)}
    executable = ENGINE.build(job(flat, feeds))
    assert executable.facts()["kernels"] == 1
    assert executable.step(feeds)["out"].tolist() == [-1, -1]
