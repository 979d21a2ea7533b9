"""The trace: what launches, who shares memory, what is known before the run, what changes from run to run."""

import numpy as np
import pytest
import torch

from msplit.engines.cuda.compile import optimize
from msplit.engines.cuda.device.device import Device
from msplit.engines.cuda.ir import program as module
from msplit.engines.cuda.ir.program import Placed, place_of
from msplit.engines.cuda.ops.conv import FILTERS
from msplit.engines.cuda.passes import tracing as module_of_traces
from msplit.engines.cuda.passes.specialize import specialize
from msplit.engines.cuda.passes.tracing import trace
from msplit.errors import EngineError
from tests.engines.cuda.cases import CPU, assert_equals_tensorflow, graph_of, program_of, run

pytestmark = pytest.mark.tf


def steps_by_name(program):
    return {step.op.name: (number, step) for number, step in enumerate(program.steps)}


def test_views_launch_nothing_and_lie_in_their_inputs_memory():
    def graph(tf, v1):
        x = v1.placeholder(tf.float32, [None, 6], name="x")
        y = tf.tanh(x, name="made")
        first, second = tf.split(y, 2, axis=1, name="split")
        tf.add(tf.transpose(first, name="turned"), 1.0, name="a")
        tf.add(tf.unstack(second, axis=1, name="unpack")[1], 1.0, name="b")

    flat = graph_of(graph, outputs=["a", "b"])
    feeds = {"x": np.ones((4, 6), np.float32)}
    program = program_of(flat, feeds)
    named = steps_by_name(program)
    made = named["made"][0]
    for name in ("split", "turned", "unpack"):
        step = named[name][1]
        assert not step.launches
        assert step.bytes == 0
        assert set(step.bases) == {made}
    assert named["made"][1].bytes == 4 * 6 * 4
    assert named["made"][1].bases == (made,)
    lanes, count = program.lanes(np.arange(len(flat), dtype=np.int32))
    assert [int(lane) >= 0 for lane in lanes] == [step.launches for step in program.steps]
    assert count == 3


def test_views_of_inputs_and_constants_belong_to_nobody():
    def graph(tf, v1):
        x = v1.placeholder(tf.float32, [None, 6], name="x")
        tf.add(tf.split(x, 2, axis=1, name="split")[1], 1.0, name="out")
        tf.transpose(x, name="turned")

    flat = graph_of(graph, outputs=["out", "turned"])
    feeds = {"x": np.arange(24, dtype=np.float32).reshape(4, 6)}
    named = steps_by_name(program_of(flat, feeds))
    assert named["split"][1].bases == (-1, -1)
    assert named["turned"][1].bases == (-1,)
    assert_equals_tensorflow(flat, feeds, streams=(1, 3))


def test_shape_arithmetic_disappears():
    def graph(tf, v1):
        x = v1.placeholder(tf.float32, [None, 2, 3], name="x")
        shape = tf.shape(x)
        y = tf.reshape(tf.tanh(x), tf.stack([shape[0], tf.reduce_prod(shape[1:])]))
        tf.add(y, tf.zeros([shape[0], 1]) + tf.cast(tf.size(x), tf.float32), name="out")
        tf.identity(tf.shape(y), name="shape_of_y")

    flat = graph_of(graph, outputs=["out", "shape_of_y"])
    feeds = {"x": np.ones((4, 2, 3), np.float32)}
    program = program_of(flat, feeds)
    assert sorted(step.op.op for step in program.steps) == ["AddV2", "Reshape", "Tanh"]
    assert program.known["shape_of_y"].tolist() == [4, 6]
    assert_equals_tensorflow(flat, feeds)


def test_infer_knows_every_shape():
    def graph(tf, v1):
        x = v1.placeholder(tf.float32, [None, 4], name="x")
        tf.reduce_sum(tf.concat([x, tf.tanh(x)], 1), axis=0, name="out")

    flat = graph_of(graph)
    graph = optimize(flat, {"x": np.ones((3, 4), np.float32)}, CPU, simplify=False).graph
    shapes = {op.name: graph.shapes[op.node, 0] for op in graph.ops.values()}
    assert shapes == {"Tanh": (3, 4), "concat": (3, 8), "out": (8,)}


@pytest.mark.parametrize("nchw", [False, True])
def test_constant_filters_are_laid_out_once(nchw):
    def graph(tf, v1):
        x = v1.placeholder(tf.float32, [None, 8, 8, 3], name="x")
        y = tf.nn.relu(tf.nn.conv2d(x, np.ones((3, 3, 3, 4), np.float32), 1, "SAME") + np.ones(4, np.float32))
        y = tf.nn.depthwise_conv2d(y, np.ones((3, 3, 4, 2), np.float32), [1, 1, 1, 1], "SAME")
        tf.nn.conv2d_transpose(y, np.ones((2, 2, 5, 8), np.float32), [2, 8, 8, 5], 1, name="out")

    flat = graph_of(graph)
    optimized = optimize(flat, {"x": np.ones((2, 8, 8, 3), np.float32)}, CPU)
    program = trace(optimized.graph, optimized.feeds, CPU, nchw=nchw)
    convolutions = [step for step in program.steps if step.op.op in FILTERS]
    assert sorted(step.op.op for step in convolutions) == [
        "Conv2DBackpropInput",
        "DepthwiseConv2dNative",
        "_FusedConv2D",
    ]
    for step in convolutions:
        filters = program.constants[step.op.inputs[1]]
        weight = filters.permute(3, 2, 0, 1) if step.op.op != "DepthwiseConv2dNative" else filters.permute(2, 3, 0, 1)
        wanted = torch.contiguous_format if nchw or step.op.op == "DepthwiseConv2dNative" else torch.channels_last
        assert weight.is_contiguous(memory_format=wanted), step.op.op


def test_observe_sees_every_step_with_its_inputs():
    def graph(tf, v1):
        x = v1.placeholder(tf.float32, [None, 4], name="x")
        tf.matmul(tf.tanh(x), np.ones((4, 2), np.float32), name="out")

    flat = graph_of(graph)
    optimized = optimize(flat, {"x": np.zeros((3, 4), np.float32)}, CPU)
    seen = []
    trace(optimized.graph, optimized.feeds, CPU, observe=lambda step, inputs: seen.append((step.op.op, len(inputs))))
    assert seen == [("Tanh", 1), ("MatMul", 2)]


def test_a_missing_input_is_named():
    def graph(tf, v1):
        tf.tanh(v1.placeholder(tf.float32, [None, 4], name="x"), name="out")

    flat = graph_of(graph)
    optimized = optimize(flat, {"x": np.zeros((3, 4), np.float32)}, CPU)
    for function in (lambda: trace(optimized.graph, {}, CPU), lambda: specialize(optimized.graph, {}, CPU)):
        with pytest.raises(EngineError, match="no value for input x"):
            function()


def dynamic(tf, v1):
    """Keeps the rows whose first entry is positive, and works on them."""
    x = v1.placeholder(tf.float32, [None, 4], name="x")
    y = tf.tanh(x)
    rows = tf.where(x[:, 0] > 0)[:, 0]
    kept = tf.gather(y, rows)
    count = tf.shape(kept)[0]
    tf.reshape(kept * 2.0, tf.stack([count * 2, 2]), name="kept")
    tf.reduce_sum(tf.nn.relu(tf.matmul(kept, np.ones((4, 3), np.float32))), axis=0, name="sum")
    tf.identity(count, name="count")


def test_shapes_that_depend_on_values_run_launch_by_launch():
    flat = graph_of(dynamic, outputs=["kept", "sum", "count"])
    for positive in (3, 1, 0, 5):
        x = -np.ones((5, 4), np.float32)
        x[:positive] = np.arange(1, 4 * positive + 1).reshape(-1, 4)
        assert_equals_tensorflow(flat, {"x": x}, streams=(1, 2, 5), capture=False)


def test_one_executable_takes_values_that_give_other_shapes():
    flat = graph_of(dynamic, outputs=["kept", "sum", "count"])
    from msplit.engines.cuda.engine import ENGINE
    from msplit.engines.tensorflow.engine import reference
    from msplit.verify.compare import compare
    from tests.engines.cuda.cases import job, scattered

    feeds = {"x": np.ones((5, 4), np.float32)}
    executable = ENGINE.build(job(flat, feeds, scattered(flat, 4), streams=4, capture=False))
    for positive in (5, 0, 2, 4):
        x = -np.ones((5, 4), np.float32)
        x[:positive] = 1.5
        assert compare(executable.step({"x": x}), reference(flat, {"x": x})).passed


def test_such_a_graph_is_not_captured_and_the_ops_are_named():
    flat = graph_of(dynamic, outputs=["sum"])
    with pytest.raises(EngineError, match=r"(?s)Where \(.*--cuda capture=no"):
        run(flat, {"x": np.ones((5, 4), np.float32)})


def test_a_dynamic_op_on_known_values_is_a_constant():
    def graph(tf, v1):
        x = v1.placeholder(tf.float32, [None, 4], name="x")
        rows = tf.where(tf.constant([True, False, True]))[:, 0]
        tf.gather(x, rows, name="out")

    flat = graph_of(graph)
    feeds = {"x": np.arange(12, dtype=np.float32).reshape(3, 4)}
    assert_equals_tensorflow(flat, feeds)
    assert not program_of(flat, feeds).dynamic


def test_constants_lie_on_a_device_once_and_only_as_long_as_they_are_held(monkeypatch):
    monkeypatch.setattr(module, "to_torch", lambda array, device: torch.from_numpy(array.copy()))
    placed = Placed(Device(CPU))
    array = np.arange(3.0)
    first = placed.of(array)
    assert placed.of(array) is first
    assert placed.of(array.copy()) is not first
    del first
    assert placed._made[place_of(array)][1]() is None, "nobody holds it"
    held = placed.of(array)
    for number in range(100):  # others get its number
        del array
        array = np.full(3, float(number))
        assert placed.of(array).tolist() == [number] * 3
    assert held.tolist() == [0, 1, 2]
    del array
    assert not placed._made


def test_shapes_are_found_without_a_copy_of_large_tables(monkeypatch):
    """Which lie in the host's memory or on the device, and may be as large as either."""

    def build(tf, v1):
        table = tf.constant(np.ones((1 << 14, 32), np.float32))
        tf.identity(tf.gather(table, v1.placeholder(tf.int32, [None], name="ids")), name="out")

    flat, moved = graph_of(build, outputs=["out"]), []
    whole = module.to_torch
    monkeypatch.setattr(module, "to_torch", lambda array, device: moved.append(array.nbytes) or whole(array, device))
    graph = optimize(flat, {"ids": np.zeros(3, np.int32)}, CPU).graph
    assert graph.shapes[graph.fetches["out"]] == (3, 32)
    assert max(moved, default=0) < 1 << 20


@pytest.fixture
def measures(monkeypatch):
    """Kernels are chosen as on a GPU, where they are measured. Of these here there is one each."""
    begin = module_of_traces.Tracer.__init__

    def on_a_gpu(self, *arguments, **options):
        begin(self, *arguments, **options)
        self.measures = True

    monkeypatch.setattr(module_of_traces.Tracer, "__init__", on_a_gpu)
    monkeypatch.setattr(
        "msplit.engines.cuda.autotune.conv.can_compile", lambda: False
    )  # another test may have said yes


@pytest.mark.parametrize("op", ["transposed", "gradient", "depthwise"])
def test_a_filter_stays_what_it_is_behind_an_op_whose_sizes_are_known(measures, op):
    """The sizes that such a convolution gives, input 0, are no argument: what lies in the place of the filter is the data. It was kept as
    the filter, and whatever read that next multiplied by the data, without a word where the shapes agree."""

    def build(tf, v1):
        x = v1.placeholder(tf.float32, (4, 4, 4, 4), "x")
        filter = tf.constant(np.random.default_rng(0).standard_normal((4, 4, 4, 4), np.float32))
        if op == "depthwise":
            sizes, filter = (4, 4, 4, 4), filter[:, :, :, :1]
            first = v1.nn.depthwise_conv2d_native_backprop_input(sizes, filter, x, [1] * 4, "SAME")
            second = v1.nn.depthwise_conv2d_native(first, filter, [1] * 4, "SAME")
        elif op == "transposed":
            first = tf.nn.conv2d_transpose(x, filter, (4, 4, 4, 4), 1, "SAME")
            second = tf.nn.conv2d(first, filter, 1, "SAME")
        else:
            (first,) = v1.gradients(tf.nn.conv2d(x, filter, 1, "SAME"), x, grad_ys=x)
            second = tf.nn.conv2d(first, filter, 1, "SAME")
        tf.identity(first, name="first")
        tf.identity(second, name="second")

    flat = graph_of(build, outputs=["first", "second"])
    assert_equals_tensorflow(flat, {"x": np.random.default_rng(1).standard_normal((4, 4, 4, 4), np.float32)})
