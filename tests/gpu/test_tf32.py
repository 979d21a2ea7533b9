"""TF32 on a real GPU: as near to exact results as rounding is, kernels of our own included, whose tensor cores would cut bits off."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import msplit
from msplit.core.precision import Precision
from msplit.engines.cuda.autotune import conv, matmul
from msplit.engines.cuda.autotune.tuner import Tuner
from msplit.engines.cuda.device.device import precision
from msplit.engines.cuda.engine import ENGINE
from msplit.engines.cuda.ir.dtypes import to_tf32
from msplit.engines.cuda.ir.graph import Op
from msplit.engines.cuda.kernels import attention
from msplit.inputs.make import make_inputs
from msplit.measure.mixed_precision import emulated_errors
from msplit.measure.verification import compare
from tests.engines.cuda.cases import job, run, scattered
from tests.engines.cuda.passes.test_merge_convolutions import block
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


@pytest.mark.parametrize("name", attention.TILES)
def test_attention(name):
    query, key, value = (torch.rand(2, 4, 64, 32, device="cuda") + 0.5 for _ in range(3))
    expected = torch.softmax(query.double() @ key.double().mT, -1) @ value.double()
    found = attention.attention(query, key, value, None, attention.TILES[name], scale=1.0, tf32=True)
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
