"""Concats in place, prologues, small layers and ends of classifiers in one kernel on a real GPU: right, under torture, with the kernels
that are meant."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from msplit.core.arguments import Precision
from msplit.engines.cuda.autotune import conv
from msplit.engines.cuda.autotune.tuner import Tuner
from msplit.engines.cuda.engine import ENGINE, CudaEngine
from msplit.engines.cuda.ir.windows import TILES
from msplit.engines.cuda.kernels import mlp
from msplit.engines.cuda.ops.fused import CLASSIFIER, MLP, SQUEEZE
from msplit.engines.cuda.options import Torture
from msplit.engines.cuda.passes.convolution import concat_into, fuse_prologue
from msplit.engines.cuda.passes.convolution.fuse_mlp import MLPS, SQUEEZES
from msplit.engines.cuda.passes.convolution.fuse_prologue import PROLOGUES
from msplit.engines.cuda.passes.measured import deciding
from msplit.verify.compare import compare
from tests.engines.cuda.cases import bits, flat_of, job, run, scattered
from tests.engines.cuda.random_graphs import FLOAT, INT32, _Graph, random_graphs

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _time_to_measure(monkeypatch):
    monkeypatch.setattr(Tuner.of(torch.device("cuda")), "spent", 0.0)


class Net(_Graph):
    """A dense block and a block of branches."""

    def __init__(self):
        super().__init__(lambda strategy: 0)

    def conv(self, data, channels, results, size=1, *, relu=True):
        scale = 1 / (size * channels**0.5)  # so that float16 holds what comes behind ten layers
        filter = self.constant(self.rng.standard_normal((size, size, channels, results)).astype(np.float32) * scale)
        strides = [1, 1, 1, 1]
        y = self.node("Conv2D", [data, filter], T=FLOAT, strides=strides, padding="SAME", data_format="NHWC")
        y = self.node("BiasAdd", [y, self.normal(results)], T=FLOAT, data_format="NHWC")
        return self.node("Relu", [y], T=FLOAT) if relu else y

    def prepared(self, data, channels):
        y = self.node("Mul", [data, self.normal(channels)], T=FLOAT)
        return self.node("Relu", [self.node("AddV2", [y, self.normal(channels)], T=FLOAT)], T=FLOAT)

    def joined(self, *parts):
        axis = self.constant(np.array(3, np.int32))
        return self.node("ConcatV2", [*parts, axis], T=FLOAT, Tidx=INT32, N=len(parts))


def net(layers=4):
    made = Net()
    x = made.conv(made.placeholder("x", [-1, 14, 14, 16]), 16, 64)
    window = {"ksize": [1, 3, 3, 1], "strides": [1, 1, 1, 1], "padding": "SAME", "data_format": "NHWC"}
    x, channels = made.node("MaxPool", [x], T=FLOAT, **window), 64
    for _ in range(layers):
        y = made.conv(made.prepared(x, channels), channels, 64)
        x, channels = made.joined(x, made.conv(y, 64, 32, 3, relu=False)), channels + 32
    branches = [made.conv(x, channels, 32), made.conv(made.conv(x, channels, 16), 16, 48, 3)]
    branches.append(made.node("AvgPool", [x], T=FLOAT, **window))
    x = made.joined(*branches)
    out = made.node("Identity", [made.conv(made.prepared(x, channels + 80), channels + 80, 24)], T=FLOAT)
    return flat_of(made.graph_def, outputs=[out])


def feeds(batch=1):
    return {"x": np.random.default_rng(0).standard_normal((batch, 14, 14, 16)).astype(np.float32)}


def distance(found, expected):
    """Root of the mean square of what outputs differ by, as a part of theirs."""
    pairs = [(found[name].astype(np.float64), expected[name].astype(np.float64)) for name in expected]
    return max(float(np.sqrt(((one - other) ** 2).mean() / (other**2).mean())) for one, other in pairs)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("options", [{}, {"fuse": True}, {"fuse": True, "group": True}])
def test_in_ieee_precision_with_both_everywhere(batch, options, monkeypatch):
    """As if everything had measured faster. Libraries' results are copied to their places."""
    writes = {concat_into.concat_into: lambda graph, op: (op.op in concat_into._MAKES, None)}
    flat, given = net(), feeds(batch)
    expected = run(flat, given)
    torture = Torture(poison=True, delay_cycles=20_000, seed=1)
    asked = job(flat, given, scattered(flat, 4), streams=4, device="cuda", layout="nhwc", torture=torture, **options)
    with deciding({**writes, PROLOGUES: lambda graph, found: (True, None)}):
        executable = ENGINE.build(asked)
    for _ in range(3):
        found = compare(executable.step(given), expected, tolerance=1e-4)
        assert found.passed, found.describe()
    executable.close()


@pytest.mark.parametrize("precision", [Precision.TF32, Precision.BF16, Precision.FP16])
@pytest.mark.parametrize("batch", [1, 3])
def test_other_precisions_are_as_far_from_ieee_as_without(precision, batch, monkeypatch):
    given = feeds(batch)
    expected = run(net(), given)

    def outputs(flat):
        asked = job(flat, given, scattered(flat, 4), streams=4, device="cuda", layout="nhwc", fuse=True)
        executable = ENGINE.build(replace(asked, precision=precision))
        first = executable.step(given)
        for _ in range(3):
            assert bits(executable.step(given)) == bits(first)
        executable.close()
        return first

    found = distance(outputs(net()), expected)
    never = dict.fromkeys((concat_into.concat_into, PROLOGUES), lambda graph, found: (False, None))
    with deciding(never):
        assert found <= 2 * distance(outputs(net()), expected) + 1e-4


def test_at_batch_1_our_kernels_take_both():
    """What is chosen is measured, so that not all need; of five convolutions with a prologue most do on an H100 or H200."""
    flat, given = net(), feeds()
    program = (
        CudaEngine().compile(replace(job(flat, given, device="cuda", layout="nhwc"), precision=Precision.TF32)).program
    )
    ops = [step.op for step in program.steps]
    taken = [op for op in ops if op.op == fuse_prologue.OP]
    assert len(taken) >= 3
    assert all(TILES in op.attrs for op in taken)
    assert sum(op.op == "ConcatV2" for op in ops) <= 1


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(random_graphs())
def test_random_graphs_are_the_same(case):
    graph_def, given, outputs = case
    flat = flat_of(graph_def, outputs=outputs)
    expected = run(flat, given)
    executable = ENGINE.build(job(flat, given, scattered(flat, 3), streams=3, device="cuda", layout="nhwc"))
    found = compare(executable.step(given), expected)
    executable.close()
    assert found.passed, found.describe()


def depthwise_net():
    """Inverted residuals with padding that differs between the ends, and squeeze-and-excitation."""
    made = Net()
    x = made.conv(made.placeholder("x", [-1, 14, 14, 16]), 16, 32, relu=False)
    for size, stride in ((3, 1), (5, 2), (3, 2)):
        x = made.node("Mul", [x, made.node("Sigmoid", [x], T=FLOAT)], T=FLOAT)
        sides = [size // 2 - (stride > 1), size // 2]
        paddings = np.array([[0, 0], sides, sides, [0, 0]], np.int32)
        padded = made.node("Pad", [x, made.constant(paddings)], T=FLOAT, Tpaddings=INT32)
        filter = made.normal(size, size, 32, 1)
        strides = [1, stride, stride, 1]
        x = made.node(
            "DepthwiseConv2dNative", [padded, filter], T=FLOAT, strides=strides, padding="VALID", data_format="NHWC"
        )
        x = made.node("BiasAdd", [x, made.normal(32)], T=FLOAT, data_format="NHWC")
        x = made.node("Mul", [x, made.node("Sigmoid", [x], T=FLOAT)], T=FLOAT)
        axes = made.constant(np.array([1, 2], np.int32))
        mean = made.node("Mean", [x, axes], T=FLOAT, Tidx=INT32, keep_dims=True)
        gate = made.node("Sigmoid", [made.conv(made.conv(mean, 32, 8), 8, 32, relu=False)], T=FLOAT)
        x = made.conv(made.node("Mul", [x, gate], T=FLOAT), 32, 32, relu=False)
    return flat_of(made.graph_def, outputs=[made.node("Identity", [x], T=FLOAT)])


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("options", [{}, {"fuse": True, "group": True}])
def test_depthwise_convolutions_in_ieee_precision(batch, options):
    """Our own kernel of them may win in any precision."""
    given = feeds(batch)
    expected = run(depthwise_net(), given)
    flat = depthwise_net()
    executable = ENGINE.build(job(flat, given, scattered(flat, 4), streams=4, device="cuda", layout="nhwc", **options))
    found = compare(executable.step(given), expected, tolerance=1e-4)
    executable.close()
    assert found.passed, found.describe()


@pytest.mark.parametrize("op", [MLP, SQUEEZE])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("options", [{}, {"fuse": True, "group": True}])
def test_squeeze_and_excitation_in_one_kernel_everywhere(op, batch, options, monkeypatch):
    """As if it had measured faster. Two executables replay side by side, each on counters of its own."""
    takes = op == SQUEEZE, conv.SQUEEZES[2]
    layers = {MLPS: lambda graph, found: (True, next(mlp.candidates(196))), SQUEEZES: lambda graph, found: takes}
    given = feeds(batch)
    expected = run(depthwise_net(), given)
    flat = depthwise_net()
    torture = Torture(poison=True, delay_cycles=20_000, seed=1)
    asked = job(flat, given, scattered(flat, 4), streams=4, device="cuda", layout="nhwc", torture=torture, **options)
    with deciding(layers):
        steps = CudaEngine().compile(asked).program.steps
    assert sum(TILES in step.op.attrs for step in steps if step.op.op == op) == 3
    executables = [ENGINE.build(asked) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda one: [one.step(given) for _ in range(20)], executables))
    for executable in executables:
        executable.close()
    first = found[0][0]
    assert compare(first, expected, tolerance=1e-4).passed
    assert all(bits(one) == bits(first) for outputs in found for one in outputs)


def test_at_batch_1_squeeze_and_excitation_is_one_kernel():
    """What is chosen is measured; of three blocks of this size most take it on an H100 or H200, by themselves or with their convolution."""
    program = CudaEngine().compile(job(depthwise_net(), feeds(), device="cuda", layout="nhwc", fuse=True)).program
    assert sum(TILES in step.op.attrs for step in program.steps if step.op.op in (MLP, SQUEEZE)) >= 2


def classifier_net(softmax=True):
    """The end of DenseNet: joined, normalized, cut off below zero, averaged, and classified."""
    made = Net()
    x = made.conv(made.placeholder("x", [-1, 14, 14, 16]), 16, 64)
    x = made.prepared(made.joined(x, made.conv(x, 64, 33)), 97)
    mean = made.node("Mean", [x, made.constant(np.array([1, 2], np.int32))], T=FLOAT, Tidx=INT32, keep_dims=False)
    y = made.node("MatMul", [mean, made.normal(97, 1001)], T=FLOAT, transpose_a=False, transpose_b=False)
    y = made.node("BiasAdd", [y, made.normal(1001)], T=FLOAT, data_format="NHWC")
    y = made.node("Softmax", [y], T=FLOAT) if softmax else y
    return flat_of(made.graph_def, outputs=[made.node("Identity", [y], T=FLOAT)])


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("softmax", [True, False])
@pytest.mark.parametrize("options", [{}, {"fuse": True, "group": True}])
def test_the_end_of_a_classifier_in_one_kernel(batch, softmax, options, monkeypatch):
    """As if it had measured faster, started early where that is possible; see `test_squeeze_and_excitation_in_one_kernel_everywhere`."""
    early = conv.starts_early(torch.empty(0, device="cuda"))
    takes = True, list(mlp.classifier_candidates(97, early=early))[-1]
    flat, given = classifier_net(softmax), feeds(batch)
    expected = run(flat, given)
    torture = Torture(poison=True, delay_cycles=20_000, seed=1)
    asked = job(flat, given, scattered(flat, 4), streams=4, device="cuda", layout="nhwc", torture=torture, **options)
    with deciding({MLPS: lambda graph, found: takes}):
        assert any(step.op.op == CLASSIFIER for step in CudaEngine().compile(asked).program.steps)
    executables = [ENGINE.build(asked) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda one: [one.step(given) for _ in range(20)], executables))
    for executable in executables:
        executable.close()
    first = found[0][0]
    assert compare(first, expected, tolerance=1e-4).passed
    assert all(bits(one) == bits(first) for outputs in found for one in outputs)


@pytest.mark.parametrize(
    ("precision", "most"), [(Precision.TF32, 5e-3), (Precision.BF16, 5e-2), (Precision.FP16, 1e-2)]
)
def test_depthwise_convolutions_in_other_precisions(precision, most):
    given = feeds()
    expected = run(depthwise_net(), given)
    flat = depthwise_net()
    asked = job(flat, given, scattered(flat, 4), streams=4, device="cuda", layout="nhwc", fuse=True, group=True)
    program = CudaEngine().compile(replace(asked, precision=precision)).program
    assert any(TILES in step.op.attrs for step in program.steps if "Depthwise" in step.op.op)
    executable = ENGINE.build(replace(asked, precision=precision))
    assert distance(executable.step(given), expected) <= most
    executable.close()
