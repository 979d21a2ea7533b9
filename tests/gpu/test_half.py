"""Half precision on a real GPU: kernels chosen for it, captured, fused and grouped, near what the CPU gives in float32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

import msplit
from msplit.core.arguments import Precision
from msplit.engines.cuda.autotune import conv, matmul
from msplit.engines.cuda.autotune.tuner import Tuner, differ
from msplit.engines.cuda.device.device import precision
from msplit.engines.cuda.engine import ENGINE, CudaEngine
from msplit.engines.cuda.ir.graph import Op
from msplit.engines.cuda.ops.linalg import product
from msplit.engines.cuda.options import Torture
from msplit.engines.cuda.passes.convolution import fuse_prologue
from msplit.engines.cuda.passes.measured import deciding
from msplit.inputs.make import make_inputs
from msplit.verify.compare import compare
from tests.engines.cuda.cases import bits, flat_of, job, run, scattered
from tests.engines.cuda.passes.convolution.test_merge_convolutions import block
from tests.engines.cuda.random_graphs import FLOAT, POINTWISE, random_graphs
from tests.gpu.test_products import lowered

pytestmark = pytest.mark.gpu

DT_UINT8 = 4
SAMPLES = Path(__file__).parents[2] / "sample_graphs"
HALVES = {Precision.BF16: 3e-2, Precision.FP16: 4e-3}
"""How far outputs of these few layers may be from float32: the CPU is 0.005 and 0.0008 away at most."""


@pytest.fixture(autouse=True)
def _time_to_measure(monkeypatch):
    monkeypatch.setattr(Tuner.of(torch.device("cuda")), "spent", 0.0)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize(
    "options", [{}, {"fuse": True}, {"group": True}, {"fuse": True, "group": True}, {"layout": "nchw"}]
)
@pytest.mark.parametrize("name", ["mmoe_small.pb", "towers_small.pb", "lstm_small.pb", "keras_inception"])
def test_a_captured_step_in_half_precision_is_near_float32_and_the_same_in_every_replay(name, half, options):
    flat = msplit.load(SAMPLES / name)
    feeds = make_inputs(flat, {}, batch=16, seed=0)
    expected = run(flat, feeds)
    torture = Torture(poison=True, delay_cycles=20_000, seed=1)
    wanted = job(flat, feeds, scattered(flat, 4), streams=4, device="cuda", torture=torture, **options)
    executable = ENGINE.build(replace(wanted, precision=half))
    first = executable.step(feeds)
    for _ in range(3):
        assert bits(executable.step(feeds)) == bits(first)
    executable.close()
    found = compare(first, expected, precision=half, tolerance=HALVES[half])
    assert found.passed, found.describe()
    assert {key: value.dtype for key, value in first.items()} == {key: value.dtype for key, value in expected.items()}


@pytest.mark.parametrize("taken", ["measured", "always"])
@pytest.mark.parametrize("precision", [Precision.TF32, Precision.FP16, Precision.BF16])
@pytest.mark.parametrize("source", ["float32", "uint8"])
def test_an_image_that_its_convolution_converts(source, precision, taken):
    graph = block()
    exact = precision is Precision.TF32
    if exact:  # small whole numbers, whose sums TF32 holds, too: nothing is rounded anywhere, and nothing may differ
        graph.normal = lambda *shape: graph.constant(graph.rng.integers(-2, 3, shape).astype(np.float32))
    x = graph.placeholder("x", [4, 149, 147, 3], DT_UINT8 if source == "uint8" else FLOAT)
    rng = np.random.default_rng(0)
    feeds = {"x": rng.integers(0, 8 if exact else 256, (4, 149, 147, 3)).astype(np.uint8)}
    if source == "float32":
        image = rng.integers(-8, 9, (4, 149, 147, 3)) if exact else rng.standard_normal((4, 149, 147, 3))
        feeds = {"x": image.astype(np.float32)}
    else:
        x = graph.node("Cast", [x])
        graph.graph_def.node[-1].attr["SrcT"].type, graph.graph_def.node[-1].attr["DstT"].type = DT_UINT8, FLOAT
        x = graph.node("Mul", [x, graph.constant(np.float32(1 / 4 if exact else 1 / 255))], T=FLOAT)
    y = graph.conv(x, 3, 40, window=(3, 3), stride=2, padding="VALID")
    flat = graph.finish([graph.conv(y, 40, 24)])
    decisions = {}
    if taken == "always":
        (tiles, *_) = conv.FEW_CHANNELS
        decisions = {fuse_prologue.CASTS: lambda graph, found: (True, tiles)}
    wanted = replace(job(flat, feeds, scattered(flat, 1), device="cuda", layout="nhwc"), precision=precision)
    with deciding(decisions):
        program = CudaEngine().compile(wanted).program
    converting = source == "uint8" or not exact
    if taken == "always":
        assert sum(step.op.op == fuse_prologue.CAST for step in program.steps) == converting
    executable = ENGINE.build(wanted)
    first = executable.step(feeds)
    assert bits(executable.step(feeds)) == bits(first)
    executable.close()
    expected = run(flat, feeds)
    if exact:
        for name, value in expected.items():
            np.testing.assert_array_equal(first[name], value)
    else:
        found = compare(first, expected, precision=precision, tolerance=HALVES[precision])
        assert found.passed, found.describe()


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(random_graphs(most=25, steps=POINTWISE))
def test_fused_kernels_of_half_precision_round_as_single_ones_do(case):
    graph_def, feeds, outputs = case
    flat = flat_of(graph_def, outputs=outputs)
    engine = CudaEngine()
    for half, most in HALVES.items():
        made = {}
        for fuse in (False, True):
            wanted = job(flat, feeds, scattered(flat, 4), streams=4, device="cuda", layout="nhwc", fuse=fuse)
            executable = engine.build(replace(wanted, precision=half))
            made[fuse] = executable.step(feeds)
            executable.close()
        found = compare(made[True], made[False], precision=half, tolerance=most)
        assert found.passed, found.describe()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "inner", "columns"), [(128, 512, 256), (16, 2048, 33), (1024, 96, 512)])
def test_every_kernel_that_a_product_in_half_precision_may_get_adds_in_float32(dtype, rows, inner, columns):
    x, weights = torch.rand(rows, inner, device="cuda").to(dtype), torch.rand(inner, columns, device="cuda").to(dtype)
    expected = x.double() @ weights.double()
    op = Op(3, "n", "MatMul", {}, [(1, 0), (2, 0)], [3])
    with precision(ieee=False):
        chosen, laid = matmul.choose(op, [x, weights], lowered, movable=False)
        for one in (chosen, *(matmul._tiled(op, tile) for tile in matmul._tiles(op, [x, laid]))):
            (found,) = lowered(one)(x, laid)
            assert found.dtype == dtype
            # One rounding of the result: all numbers are positive, so that sums in half precision would be far too small.
            assert float(((found - expected) / expected).abs().max()) < 1.01 * torch.finfo(dtype).eps


def test_results_that_differ_by_a_last_bit_are_the_same():
    for dtype in (torch.float16, torch.bfloat16):
        value = torch.full((4,), 1.5, device="cuda", dtype=dtype)
        assert not differ(
            [torch.nextafter(value.float(), value.float() * 2).to(dtype) + torch.finfo(dtype).eps], [value]
        )
        assert differ([value * 1.1], [value])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_bench_in_half_precision_tells_the_error_and_passes(precision):
    request = {
        "streams": (4,),
        "engine": "cuda",
        "batch": 16,
        "precision": precision,
        "settings": msplit.Settings(duration=0.3, builds=1),
    }
    found = msplit.bench(SAMPLES / "mmoe_small.pb", **request)
    assert not found.result.failed, found.result.describe_failures()
    labels = [one.label for one in found.result.variants]
    assert any(label.endswith("float32") for label in labels)
    assert any(label.endswith(precision) for label in labels)


@pytest.mark.parametrize("shapes", [((64, 256), (256, 32)), ((128, 512), (16, 512, 8)), ((3, 1, 8, 64), (4, 64, 16))])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_product_gives_float32_that_was_never_rounded_to_half_precision(shapes, dtype):
    a, b = (torch.randn(shape, device="cuda").to(dtype) for shape in shapes)
    for x, y in ((a, b), (a.mT.contiguous().mT, b), (a, b.mT.contiguous().mT)):
        found = product(x, y, torch.float32)
        assert found.dtype == torch.float32
        exact = a.double() @ b.double()
        off = (found - exact).abs().max()
        assert off < 1e-4 * exact.abs().max()
        assert off < 0.1 * (product(x, y).double() - exact).abs().max()
