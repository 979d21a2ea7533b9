"""Results that only products in TF32 read are rounded where they are made: every product reads what it would have rounded itself."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from msplit import samples
from msplit.engines.cuda.compile import optimize
from msplit.engines.cuda.device import device as devices
from msplit.engines.cuda.engine import CudaEngine
from msplit.engines.cuda.ir.windows import ROUNDED, ROUNDS
from msplit.engines.cuda.kernels.matmul import ATTENTION_TILES
from msplit.engines.cuda.passes import pipeline, tracing
from msplit.engines.cuda.passes.attention.fuse_attention import ATTENTION
from msplit.engines.cuda.passes.measured import deciding
from msplit.engines.cuda.passes.pointwise_fusion import fuse
from msplit.engines.cuda.passes.precision import round_results
from msplit.engines.cuda.passes.precision.round_results import can_round, expect_rounded, read_by_products
from msplit.engines.cuda.runtime.executables import RoundedProducts
from msplit.engines.cuda.stored.program import StoredTables, Weights, pack, unpack
from tests.campaign import examples
from tests.engines.cuda.cases import CPU, built_sample, flat_of, job, run
from tests.engines.cuda.passes.convolution.test_merge_convolutions import block, data
from tests.engines.cuda.random_graphs import FLOAT

FOUR = [1, 3, 3, 1]
POOL = {"T": FLOAT, "ksize": FOUR, "strides": [1, 1, 1, 1], "padding": "SAME", "data_format": "NHWC"}


def as_on_a_gpu(patch):
    """The simulated engine rounds as it would on a GPU, where all kernels are ours. What was compiled before is forgotten."""
    patch.setattr(devices, "_DEVICES", {})
    for module in (pipeline, tracing, fuse):
        patch.setattr(module, "takes_tf32", lambda device: True)
    patch.setattr(round_results, "rounds", can_round)


@pytest.fixture
def on_a_gpu(monkeypatch):
    as_on_a_gpu(monkeypatch)


def source_of(flat, feeds, **options):
    return optimize(flat, feeds, CPU, **options).graph


def made_by(graph, keys):
    return sorted(graph.ops[number].op for number, _ in keys)


def ops_of(flat, feeds, **options):
    program = CudaEngine().compile(job(flat, feeds, **options)).program
    return [call.op for call in program.steps]


STEP = st.sampled_from(
    ["conv", "conv", "conv", "depthwise", "max", "relu", "concat", "add", "reshape", "dense", "dense", "gate"]
)


def rows(graph, image):
    return graph.node("Reshape", [image, graph.constant(np.array((84, 6), np.int32))], T=FLOAT)


def image(graph, rows):
    return graph.node("Reshape", [rows, graph.constant(np.array((2, 7, 6, 6), np.int32))], T=FLOAT)


def dense(graph, x, inputs, outputs, relu=True):
    made = graph.node("MatMul", [x, graph.normal(inputs, outputs)], T=FLOAT, transpose_a=False, transpose_b=False)
    made = graph.node("BiasAdd", [made, graph.normal(outputs)], T=FLOAT)
    return graph.node("Relu", [made], T=FLOAT) if relu else made


@settings(max_examples=examples(12, 40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(st.tuples(STEP, st.integers(0, 5), st.integers(0, 5), st.booleans()), min_size=2, max_size=12),
    fetched=st.integers(0, 3),
    mode=st.sampled_from([{}, {"group": True}, {"fuse": True, "group": True}]),
)
def test_no_output_changes_by_a_bit(monkeypatch, steps, fetched, mode):
    """Where products round what they read, it is all the same whether it was rounded before. (A mean may change: see below.)"""
    graph = block(len(steps))
    channels = 6
    values = [graph.conv(graph.placeholder("x", [2, 7, 6, channels]), channels, channels)]
    for kind, first, second, relu in steps:
        one, two = values[-1 - first % len(values)], values[-1 - second % len(values)]
        if kind == "conv":
            made = graph.conv(one, channels, channels, window=(3, 3) if relu else (1, 1), relu=relu)
        elif kind == "depthwise":
            filter = graph.normal(3, 3, channels, 1)
            attrs = {"T": FLOAT, "strides": [1, 1, 1, 1], "padding": "SAME", "data_format": "NHWC"}
            made = graph.node("DepthwiseConv2dNative", [one, filter], **attrs)
        elif kind == "max":
            made = graph.node("MaxPool", [one], **POOL)
        elif kind == "relu":
            made = graph.node("Relu", [one], T=FLOAT)
        elif kind == "add":
            made = graph.node("AddV2", [one, two], T=FLOAT)
        elif kind == "gate":
            made = graph.node("Mul", [graph.node("Sigmoid", [one], T=FLOAT), two], T=FLOAT)
        elif kind == "dense":
            made = image(graph, dense(graph, dense(graph, rows(graph, one), channels, 12, relu), 12, channels, relu))
        elif kind == "reshape":
            sizes = [graph.constant(np.array(shape, np.int32)) for shape in ((2, 42, channels), (2, 7, 6, channels))]
            made = graph.node("Reshape", [graph.node("Reshape", [one, sizes[0]], T=FLOAT), sizes[1]], T=FLOAT)
        else:
            axis = graph.constant(np.array(3, np.int32))
            both = graph.node("ConcatV2", [one, two, axis], N=2, T=FLOAT)
            made = graph.conv(both, 2 * channels, channels)
        values.append(made)
    flat = graph.finish([values[-1], *values[:fetched]])
    feeds = data(2, 7, 6, channels)
    with RoundedProducts():
        plain = run(flat, feeds, 3, **mode)
        with monkeypatch.context() as patch:
            as_on_a_gpu(patch)
            rounded = run(flat, feeds, 3, **mode)
    for name, value in plain.items():
        np.testing.assert_array_equal(rounded[name], value)


def tower():
    """Convolutions that read each other, a mean, and what is wanted."""
    graph = block()
    x = graph.placeholder("x", [1, 6, 6, 8])
    first = graph.conv(x, 8, 16)
    mean = graph.conv(graph.node("AvgPool", [first], **POOL), 16, 4)
    largest = graph.conv(graph.node("MaxPool", [first], **POOL), 16, 4)
    both = graph.node("ConcatV2", [mean, largest, graph.constant(np.array(3, np.int32))], N=2, T=FLOAT)
    read = graph.conv(both, 8, 5, window=(3, 3))
    return graph.finish([graph.conv(read, 5, 3), read])


def perceptron(*sizes, batch=4):
    graph = block()
    x = graph.placeholder("x", [batch, sizes[0]])
    for inputs, outputs in pairwise(sizes):
        x = dense(graph, x, inputs, outputs)
    return graph.finish([x])


def features(*shape):
    return {"x": np.random.default_rng(0).standard_normal(shape).astype(np.float32)}


@pytest.mark.parametrize(
    ("sizes", "batch", "rounds"),
    [
        ((12, 16, 24, 32), 4, [True, True, False]),
        ((12, 16, 24, 4), 4, [True, False, False]),  # the last one has few columns, and multiplies in float32
        ((12, 16, 24, 32), 1, [False, False, False]),  # and so does one row
    ],
)
def test_products_round_for_products_on_tensor_cores(on_a_gpu, sizes, batch, rounds):
    made = ops_of(perceptron(*sizes, batch=batch), features(batch, sizes[0]))
    layers = [op for op in made if op.op == "_FusedMatMul"]
    assert [bool(op.attrs.get(ROUNDS)) for op in layers] == rounds
    assert [bool(op.attrs.get(ROUNDED)) for op in layers] == [False, *rounds[:-1]]


@pytest.mark.parametrize("wanted", [False, True])
def test_a_fused_group_rounds_what_only_products_read(on_a_gpu, wanted):
    graph = block()
    x = graph.placeholder("x", [4, 12])
    first = dense(graph, x, 12, 16)
    gate = graph.node("Mul", [graph.node("Sigmoid", [first], T=FLOAT), graph.node("Tanh", [first], T=FLOAT)], T=FLOAT)
    made = ops_of(graph.finish([dense(graph, gate, 16, 24), *[gate] * wanted]), features(4, 12), fuse=True)
    (group,) = (op for op in made if op.op == "_FusedPointwise")
    assert bool(group.attrs.get(ROUNDS)) != wanted
    assert [bool(op.attrs.get(ROUNDED)) for op in made if op.op == "_FusedMatMul"] == [False, not wanted]


def test_what_only_products_read():
    graph = source_of(tower(), data(1, 6, 6, 8))
    # The first one is read by a mean and a pool that products read, the last two are wanted.
    assert made_by(graph, read_by_products(graph)) == [
        "AvgPool",
        "ConcatV2",
        "MaxPool",
        "_FusedConv2D",
        "_FusedConv2D",
        "_FusedConv2D",
    ]


def test_what_a_sum_reads_too_stays_as_it_is():
    graph = block()
    x = graph.placeholder("x", [1, 6, 6, 8])
    first = graph.conv(x, 8, 8)
    end = graph.node("Sub", [graph.conv(first, 8, 8), graph.node("Sigmoid", [first], T=FLOAT)], T=FLOAT)
    assert not read_by_products(source_of(graph.finish([end]), data(1, 6, 6, 8)))


def test_a_residual_sum_is_no_product():
    """It rides on the convolution, as its fourth input."""
    graph = block()
    x = graph.placeholder("x", [1, 6, 6, 8])
    first = graph.conv(x, 8, 8)
    end = graph.node("AddV2", [graph.conv(first, 8, 8, relu=False), first], T=FLOAT)
    source = source_of(graph.finish([end]), data(1, 6, 6, 8))
    assert [op.op for op in source.ops.values()].count("_FusedConv2D") == 2
    assert not read_by_products(source)


def test_convolutions_are_told_what_they_will_read():
    graph = source_of(tower(), data(1, 6, 6, 8))
    assert expect_rounded(graph)
    convolutions = [op for op in graph.ops.values() if op.op == "_FusedConv2D"]
    assert [bool(op.attrs.get(ROUNDED)) for op in convolutions] == [False, True, True, True, False]
    assert graph.shapes[convolutions[-1].node, 0][-1] == 3, "its data are an output, too"


@pytest.mark.parametrize("options", [{}, {"group": True}])
def test_our_kernels_round_and_find_it_rounded(on_a_gpu, options):
    made = ops_of(tower(), data(1, 6, 6, 8), **options)
    rounding = {op.op for op in made if op.attrs.get(ROUNDS)}
    assert rounding == {"AvgPool", "_FusedConv2D"}
    assert sum(bool(op.attrs.get(ROUNDED)) for op in made) == 3


def test_where_a_library_made_the_data_ours_rounds_them(on_a_gpu, monkeypatch):
    monkeypatch.setattr(round_results, "rounds", lambda op: op.op == "AvgPool")
    made = ops_of(tower(), data(1, 6, 6, 8))
    rounded = [op for op in made if op.attrs.get(ROUNDED)]
    assert len(rounded) == 1, "only the mean is"
    assert {op.op for op in made if op.attrs.get(ROUNDS)} == {"AvgPool"}


def test_a_mean_of_rounded_numbers_is_as_near_as_a_rounded_mean(on_a_gpu, monkeypatch):
    flat, feeds = tower(), data(1, 6, 6, 8)
    exact = None
    errors = []
    for rounds in (can_round, lambda op: False):
        monkeypatch.setattr(devices, "_DEVICES", {})
        monkeypatch.setattr(round_results, "rounds", rounds)
        with RoundedProducts():
            found = run(flat, feeds)
        if exact is None:
            monkeypatch.setattr(devices, "_DEVICES", {})
            monkeypatch.setattr(round_results, "rounds", lambda op: False)
            exact = run(flat, feeds)
        errors.append([np.sqrt(np.mean((found[name] - exact[name]) ** 2)) for name in exact])
    here, everywhere = errors
    assert all(one < 1.3 * other for one, other in zip(here, everywhere, strict=True))


@pytest.mark.parametrize("name", ["_rounded", "_rounds", "_tiles", "_siblings", "_prologue", "_cast_from", "_into"])
def test_a_model_s_own_attribute_of_a_name_of_ours_says_nothing(on_a_gpu, name):
    graph = block()
    x = graph.placeholder("x", [1, 6, 6, 8])
    end = graph.conv(x, 8, 8, relu=False, bias=False)
    for node in graph.graph_def.node:
        if node.op == "Conv2D":
            node.attr[name].i = 1
    (convolution,) = (op for op in ops_of(graph.finish([end]), data(1, 6, 6, 8)) if "Conv2D" in op.op)
    assert name not in convolution.attrs


def test_on_another_gpu_who_rounds_is_decided_anew(on_a_gpu, monkeypatch):
    """There the library may win, and to round what it gives would be a kernel of its own. What a fused group computes is what it was."""
    graph = block()
    x = graph.placeholder("x", [4, 12])
    first = dense(graph, dense(graph, x, 12, 16), 16, 16)
    gate = graph.node("Mul", [graph.node("Sigmoid", [first], T=FLOAT), graph.node("Tanh", [first], T=FLOAT)], T=FLOAT)
    feeds = features(4, 12)
    asked = job(graph.finish([dense(graph, gate, 16, 24)]), feeds, fuse=True)
    compiled = CudaEngine().compile(asked)
    weights = Weights()
    data = pack(compiled, compiled.plan(asked), weights)
    rounding = [step.op.op for step in compiled.program.steps if step.op.attrs.get(ROUNDS)]
    assert rounding == ["_FusedMatMul", "_FusedPointwise"]
    monkeypatch.setattr(round_results, "rounds", lambda op: False)
    for fits, wanted in ((True, rounding), (False, ["_FusedPointwise"])):
        restored = unpack(
            data,
            torch.from_numpy(weights.memory()),
            StoredTables(np.zeros(0, np.uint8), torch.device("cpu")),
            feeds,
            fits=fits,
        ).compiled.program
        assert [step.op.op for step in restored.steps if step.op.attrs.get(ROUNDS)] == wanted
        reads = [bool(step.op.attrs.get(ROUNDED)) for step in restored.steps if step.op.op == "_FusedMatMul"]
        assert reads == [False, fits, True]


@pytest.mark.parametrize("mode", [{}, {"fuse": True, "group": True}])
@pytest.mark.parametrize(("kernel", "rounds"), [(next(iter(ATTENTION_TILES)), True), ("", False)])
def test_attention_reads_rounded_data_and_rounds_for_the_product_behind_it(on_a_gpu, monkeypatch, kernel, rounds, mode):
    """Where it is our own kernel; the library's would have to have its result rounded by another."""
    made = built_sample("bert", layers=2, hidden=16, heads=2, sequence=4, vocabulary=30)
    flat, feeds = flat_of(made.graph_def, outputs=list(made.outputs)), samples.make_inputs(made, 3)
    with deciding({ATTENTION: lambda graph, found: (True, kernel)}):
        found = [op for op in ops_of(flat, feeds, **mode) if op.op == "_Attention"]
        assert len(found) == 2
        assert {(bool(op.attrs.get(ROUNDED)), bool(op.attrs.get(ROUNDS))) for op in found} == {(rounds, rounds)}
        with RoundedProducts():
            rounded = run(flat, feeds, 2, **mode)
    with RoundedProducts():
        monkeypatch.undo()
        monkeypatch.setattr(devices, "_DEVICES", {})
        plain = run(flat, feeds, 2, **mode)
    for name, value in plain.items():
        np.testing.assert_array_equal(rounded[name], value)


def test_in_the_other_layout_only_products_round(on_a_gpu):
    """Our kernels of convolutions read NHWC data: to round the libraries' results would be kernels of its own."""
    made = ops_of(perceptron(12, 16, 24, 32), features(4, 12), layout="nchw")
    assert [bool(op.attrs.get(ROUNDS)) for op in made] == [True, True, False]
    assert not any(op.attrs.keys() & {ROUNDED, ROUNDS} for op in ops_of(tower(), data(1, 6, 6, 8), layout="nchw"))


@pytest.mark.parametrize(("activation", "rounds"), [("Relu6", True), ("Tanh", False), ("Elu", False)])
def test_what_is_no_part_of_the_kernel_is_not_rounded_in_it(on_a_gpu, activation, rounds):
    graph = block()
    x = graph.placeholder("x", [1, 6, 6, 8])
    first = graph.node(activation, [graph.conv(x, 8, 8, relu=False)], T=FLOAT)
    made = ops_of(graph.finish([graph.conv(first, 8, 4)]), data(1, 6, 6, 8))
    assert any(op.attrs.get(ROUNDS) for op in made) == rounds


def test_off_the_gpu_nothing_is_rounded():
    assert not round_results.takes_tf32(CPU)
    assert not any(op.attrs.keys() & {ROUNDED, ROUNDS} for op in ops_of(tower(), data(1, 6, 6, 8)))
