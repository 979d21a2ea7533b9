"""TF32 on a real GPU: as near to exact results as rounding is, kernels of our own included, whose tensor cores would cut bits off."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import msplit
from msplit.core.arguments import Precision
from msplit.engines.cuda.autotune import conv, matmul
from msplit.engines.cuda.autotune.batched_matmul import TILE, by_wide_product
from msplit.engines.cuda.autotune.tuner import Tuner
from msplit.engines.cuda.device.device import precision
from msplit.engines.cuda.engine import ENGINE, CudaEngine
from msplit.engines.cuda.ir.graph import Op
from msplit.engines.cuda.ir.windows import ROUNDED, ROUNDED_WEIGHTS, ROUNDS, TILES, to_tf32
from msplit.engines.cuda.kernels import matmul as attention
from msplit.inputs.make import make_inputs
from msplit.opset.traits import MATMULS
from msplit.verify.compare import compare
from msplit.verify.mixed_precision import emulated_errors
from tests.engines.cuda.cases import job, run, scattered
from tests.engines.cuda.passes.convolution.test_merge_convolutions import block
from tests.engines.cuda.random_graphs import FLOAT
from tests.engines.cuda.test_tf32 import deep
from tests.gpu.test_products import lowered

pytestmark = pytest.mark.gpu

SAMPLES = Path(__file__).parents[2] / "sample_graphs"
CUT = 2.0**-11
"""What cutting off makes a number smaller by, on average, and rounding does not: of a product it is twice as much."""


@pytest.fixture(autouse=True)
def _time_to_measure(monkeypatch):
    monkeypatch.setattr(Tuner.of(torch.device("cuda")), "spent", 0.0)


def shift(found: torch.Tensor, expected: torch.Tensor) -> float:
    """By how much results are too large or too small on average. All numbers are positive."""
    return abs(float(((found.double() - expected) / expected).mean()))


@pytest.mark.parametrize(
    ("rows", "inner", "columns"), [(128, 512, 256), (16, 2048, 40), (32, 256, 64), (1024, 96, 512)]
)
def test_products(rows, inner, columns):
    x, weights = torch.rand(rows, inner, device="cuda") + 0.5, torch.rand(inner, columns, device="cuda") + 0.5
    expected = x.double() @ weights.double()
    op = Op(3, "n", "MatMul", {}, [(1, 0), (2, 0)], [3])
    with precision(ieee=False):
        for tile in matmul._tiles(op, [x, weights]):
            (found,) = lowered(matmul._tiled(op, tile))(x, weights)
            assert shift(found, expected) < CUT / 8, tile


@pytest.mark.parametrize(("channels", "size"), [(3, 35), (64, 14), (256, 7)])
def test_convolutions(channels, size):
    data = torch.rand(4, size, size, channels, device="cuda") + 0.5
    filter = (torch.rand(48, 3, 3, channels, device="cuda") + 0.5).permute(1, 2, 3, 0)
    expected = torch.nn.functional.conv2d(data.permute(0, 3, 1, 2).double(), filter.permute(3, 2, 0, 1).double())
    attrs = {"strides": (1, 1, 1, 1), "padding": "VALID"}
    op = Op(3, "n", "Conv2D", attrs, [(1, 0), (2, 0)], [3])
    tried = 0
    with precision(ieee=False):
        for tiles in conv.cuts(op, data, filter, [expected]):
            laid = filter.contiguous() if tiles.turned else filter
            (found,) = lowered(conv._tiled(op, tiles))(data, to_tf32(laid))
            assert shift(found.permute(0, 3, 1, 2), expected) < CUT / 8, tiles
            tried += 1
    assert tried


@pytest.mark.parametrize("name", attention.ATTENTION_TILES)
def test_attention(name):
    query, key, value = (torch.rand(2, 4, 64, 32, device="cuda") + 0.5 for _ in range(3))
    expected = torch.softmax(query.double() @ key.double().mT, -1) @ value.double()
    found = attention.attention(query, key, value, None, attention.ATTENTION_TILES[name], scale=1.0, tf32=True)
    assert shift(found, expected) < CUT / 8


@pytest.mark.parametrize("options", [{}, {"fuse": True, "group": True}, {"layout": "nchw"}])
@pytest.mark.parametrize("name", ["deep", "keras_inception", "mmoe_small.pb", "lstm_small.pb"])
def test_a_model_is_as_far_from_exact_as_rounding_puts_it(name, options):
    """What a bench asks for (`ROOM`), with less room."""
    flat = deep() if name == "deep" else msplit.load(SAMPLES / name)
    inputs = [make_inputs(flat, {}, batch=16, seed=seed) for seed in range(2)]
    wanted = replace(
        job(flat, inputs[0], scattered(flat, 4), streams=4, device="cuda", **options), precision=Precision.TF32
    )
    emulated = emulated_errors(wanted, inputs)
    executable = ENGINE.build(wanted)
    found = [compare(executable.step(feeds), run(flat, feeds), precision=Precision.TF32) for feeds in inputs]
    executable.close()
    for outputs in zip(*(one.outputs for one in found), strict=True):
        away = np.sqrt(np.mean([output.distance**2 for output in outputs]))
        assert away < max(2 * emulated[outputs[0].name], CUT), outputs[0].name


def test_a_filter_that_others_read_too_is_theirs_as_it_is():
    graph = block()
    x = graph.placeholder("x", [1, 14, 14, 24])
    filter = graph.normal(3, 3, 24, 64)
    y = graph.conv(x, 24, 64, window=(3, 3), filter=filter)
    z = graph.node(
        "Mul", [filter, graph.node("Sum", [x, graph.constant(np.arange(4, dtype=np.int32))], T=FLOAT)], T=FLOAT
    )
    flat = graph.finish([y, z])
    feeds = {"x": np.random.default_rng(0).random((1, 14, 14, 24), np.float32)}
    executable = ENGINE.build(replace(job(flat, feeds, scattered(flat, 1), device="cuda"), precision=Precision.TF32))
    found, expected = executable.step(feeds), run(flat, feeds)
    executable.close()
    last = list(expected)[-1]
    np.testing.assert_allclose(found[last], expected[last], rtol=2e-6)


@pytest.mark.parametrize(("channels", "size", "results"), [(3, 35, 48), (64, 14, 48), (256, 7, 48)])
def test_rounded_data_and_rounded_results(channels, size, results):
    """Data that TF32 holds are the same to a kernel that is told so and to one that is not, and results that are to be rounded are, in all
    tiles."""
    data = to_tf32(torch.randn(4, size, size, channels, device="cuda"))
    filter = torch.randn(results, 3, 3, channels, device="cuda").permute(1, 2, 3, 0)
    expected = torch.nn.functional.conv2d(data.permute(0, 3, 1, 2).double(), filter.permute(3, 2, 0, 1).double())
    op = Op(3, "n", "Conv2D", {"strides": (1, 1, 1, 1), "padding": "VALID"}, [(1, 0), (2, 0)], [3])
    with precision(ieee=False):
        for tiles in conv.cuts(op, data, filter, [expected]):
            laid = to_tf32(filter.contiguous() if tiles.turned else filter)
            tiled = conv._tiled(op, tiles)
            (found,) = lowered(tiled)(data, laid)
            (same,) = lowered(replace(tiled, attrs={**tiled.attrs, ROUNDED: True}))(data, laid)
            torch.testing.assert_close(same, found, rtol=1e-6, atol=1e-5)
            (stored,) = lowered(replace(tiled, attrs={**tiled.attrs, ROUNDS: (0,)}))(data, laid)
            assert torch.equal(stored, to_tf32(found)), tiles


def test_other_kernels_round_results_too():
    data, filter = torch.randn(2, 14, 14, 64, device="cuda"), torch.randn(3, 3, 64, 1, device="cuda")
    filter[0, 0, 0], data[0, 0, 0, 1] = torch.inf, torch.nan
    depthwise = Op(3, "n", "DepthwiseConv2dNative", {"strides": (1, 1, 1, 1), "padding": "SAME"}, [(1, 0), (2, 0)], [3])
    window = {"ksize": (1, 3, 3, 1), "strides": (1, 1, 1, 1), "padding": "SAME", "data_format": "NHWC"}
    mean = Op(3, "n", "AvgPool", window, [(1, 0)], [3])
    ops = [(conv._tiled(depthwise, tiles), (data, filter)) for tiles in conv.cuts(depthwise, data, filter, [data])]
    assert ops
    for op, arguments in [*ops, (mean, (data,))]:
        (found,) = lowered(op)(*arguments)
        (stored,) = lowered(replace(op, attrs={**op.attrs, ROUNDS: (0,)}))(*arguments)
        assert not stored.isfinite().all()
        torch.testing.assert_close(stored, to_tf32(found), rtol=0, atol=0, equal_nan=True)


def test_convolutions_of_a_model_read_what_was_rounded_for_them():
    flat = msplit.load(SAMPLES / "keras_inception")
    feeds = make_inputs(flat, {}, batch=1)
    wanted = replace(job(flat, feeds, device="cuda", fuse=True, group=True), precision=Precision.TF32)
    ops = [step.op for step in CudaEngine().compile(wanted).program.steps]
    reading = [op for op in ops if op.op in {"_FusedConv2D", "_SiblingConv2D"} and TILES in op.attrs]
    assert sum(bool(op.attrs.get(ROUNDED)) for op in reading) > len(reading) / 2
    assert any(op.attrs.get(ROUNDS) for op in ops)


@pytest.mark.parametrize(("rows", "inner", "columns"), [(128, 512, 256), (16, 2048, 40), (1024, 96, 512)])
def test_weights_and_data_that_are_rounded_once(rows, inner, columns):
    x, weights = torch.randn(rows, inner, device="cuda"), torch.randn(inner, columns, device="cuda")
    op = Op(3, "n", "MatMul", {}, [(1, 0), (2, 0)], [3])
    with precision(ieee=False):
        for tile in matmul._tiles(op, [x, weights]):
            tiled = matmul._tiled(op, tile)
            (found,) = lowered(tiled)(x, weights)
            attrs = {**tiled.attrs, ROUNDED_WEIGHTS: True}
            (same,) = lowered(replace(tiled, attrs=attrs))(x, to_tf32(weights))
            torch.testing.assert_close(same, found, rtol=1e-5, atol=1e-4)
            (lifted,) = lowered(replace(tiled, attrs=attrs))(to_tf32(x), to_tf32(weights))
            attrs |= {ROUNDED: True}
            (as_they_are,) = lowered(replace(tiled, attrs=attrs))(to_tf32(x), to_tf32(weights))
            torch.testing.assert_close(as_they_are, lifted, rtol=1e-5, atol=1e-4)
            (stored,) = lowered(replace(tiled, attrs={**attrs, ROUNDS: (0,)}))(to_tf32(x), to_tf32(weights))
            assert torch.equal(stored, to_tf32(as_they_are))


def test_products_of_a_model_find_their_weights_rounded():
    """Where our kernel multiplies by them on tensor cores, and in TF32 only."""
    flat = deep(rows=64)  # of a few rows, two layers would be one kernel, in float32
    feeds = make_inputs(flat, {})
    for wanted, rounds in ((Precision.TF32, True), (Precision.IEEE, False)):
        program = CudaEngine().compile(replace(job(flat, feeds, device="cuda"), precision=wanted)).program
        ops = [step.op for step in program.steps if step.op.op in MATMULS]
        assert len(ops) == 12
        writers = {(op.node, 0): op for op in ops}
        for op in ops:
            tile, weights = op.attrs.get(TILE), program.constants[op.inputs[1]]
            rounded = rounds and tile is not None and not tile.exact
            assert torch.equal(to_tf32(weights), weights) == rounded
            assert bool(op.attrs.get(ROUNDED_WEIGHTS)) == rounds
            before = writers.get(op.inputs[0])
            assert bool(op.attrs.get(ROUNDED)) == (rounds and before is not None and TILE in before.attrs)


def test_what_a_fused_group_makes_for_products_alone_is_rounded():
    """As a recurrent cell does: its state is a gate's product, and goes to the next product."""
    graph = block()
    x = graph.placeholder("x", [64, 96])
    for _ in range(3):
        weights = graph.normal(96, 96)
        made = graph.node("MatMul", [x, weights], T=FLOAT, transpose_a=False, transpose_b=False)
        x = graph.node("Mul", [graph.node("Sigmoid", [made], T=FLOAT), graph.node("Tanh", [made], T=FLOAT)], T=FLOAT)
    flat = graph.finish([x])
    feeds = {"x": np.random.default_rng(0).standard_normal((64, 96)).astype(np.float32)}
    wanted = replace(job(flat, feeds, device="cuda", fuse=True), precision=Precision.TF32)
    program = CudaEngine().compile(wanted).program
    groups = [step.op for step in program.steps if step.op.op == "_FusedPointwise"]
    assert [bool(op.attrs.get(ROUNDS)) for op in groups] == [True, True, False]
    assert all(op.attrs["kernel"] is not None for op in groups)
    products = [step.op for step in program.steps if step.op.op in MATMULS]
    assert [bool(op.attrs.get(ROUNDED)) for op in products] == [False, True, True]
    emulated = emulated_errors(wanted, [feeds])
    executable = ENGINE.build(wanted)
    found = compare(executable.step(feeds), run(flat, feeds), precision=Precision.TF32)
    executable.close()
    (output,) = found.outputs
    assert output.distance < 2 * emulated[output.name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ieee", [False, True], ids=["TF32", "IEEE"])
def test_no_relu_of_a_library_makes_0_of_nan(dtype, ieee):
    """cuBLASLt's behind every product in TF32, and cuDNN's behind some convolutions: a model said 0.5 where TensorFlow says NaN."""
    made = torch.Generator("cuda").manual_seed(0)
    lost = []

    def look(op: Op, data: torch.Tensor, weights: torch.Tensor, *rest: torch.Tensor) -> None:
        data[0] = torch.nan
        (found,) = lowered(op)(data, weights, torch.zeros(weights.shape[-1], dtype=dtype, device="cuda"), *rest)
        if not found[0].isnan().all() or found[1:].isnan().any():
            lost.append((op.op, tuple(data.shape), tuple(weights.shape), len(rest)))

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=made, device="cuda").to(dtype)

    with precision(ieee=ieee):
        for rows, inner, columns in (
            (32, 8, 16),
            (2, 16, 4),
            (1024, 256, 256),
            (128, 1000, 1),
            (200, 512, 33),
            (17, 64, 2048),
        ):
            attrs = {"fused_ops": ("BiasAdd", "Relu"), "num_args": 1}
            look(
                Op(4, "n", "_FusedMatMul", attrs, [(1, 0), (2, 0), (3, 0)], [4]),
                values(rows, inner),
                values(inner, columns),
            )
            weights, bias = values(2, inner, columns), values(2, columns)
            x = values(rows, inner)
            x[0] = torch.nan
            grouped = by_wide_product(attention.Gemm(attention.Layer(x, weights, bias), activation="Relu"))
            if not grouped[:, 0].isnan().all() or grouped[:, 1:].isnan().any():
                lost.append(("wide", rows, inner, columns))
        for size, channels, results in itertools.product((7, 14, 35), (3, 16, 64, 256), (8, 48, 256)):
            for window, stride in ((1, 1), (3, 1), (3, 2), (5, 1)):
                for side in (False, True):
                    steps = ("BiasAdd", *(("Add",) if side else ()), "Relu")
                    attrs = {
                        "fused_ops": steps,
                        "num_args": 1 + side,
                        "strides": (1, stride, stride, 1),
                        "padding": "SAME",
                    }
                    op = Op(5, "n", "_FusedConv2D", attrs, [(1, 0), (2, 0), (3, 0), *([(4, 0)] if side else [])], [5])
                    out = -(-size // stride)
                    rest = [values(2, out, out, results)] if side else []
                    look(op, values(2, size, size, channels), values(window, window, channels, results), *rest)
    assert not lost, (len(lost), lost[:5])
