"""Products on a real GPU: what the tuner chose computes the same, in replay after replay and side by side on streams."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from msplit.core.arguments import Precision
from msplit.engines.cuda.autotune import matmul
from msplit.engines.cuda.autotune.tuner import Tuner
from msplit.engines.cuda.device.device import precision
from msplit.engines.cuda.engine import ENGINE
from msplit.engines.cuda.ir.graph import Op
from msplit.engines.cuda.ir.interpret import as_tuple, call
from msplit.engines.cuda.ir.lowering import table
from msplit.engines.cuda.options import Torture
from tests.engines.cuda.cases import flat_of, job, run, scattered
from tests.engines.cuda.random_graphs import FLOAT, _Graph

pytestmark = pytest.mark.gpu

CLOSE = 4e-3
"""Relative to the largest: TF32 rounds to 11 bits."""


@pytest.fixture(autouse=True)
def _time_to_measure(monkeypatch):
    monkeypatch.setattr(Tuner.of(torch.device("cuda")), "spent", 0.0)


def lowered(op):
    return lambda *tensors: as_tuple(call(table()[op.op], op, list(tensors)))


class Fixed:
    def __call__(self, strategy):
        return 0


class Branches(_Graph):
    """Dense layers side by side, each chain of other sizes, that end in few columns."""

    def weights(self, *shape):
        return self.constant((self.rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32))

    def dense(self, data, inner, columns, activation):
        y = self.node("MatMul", [data, self.weights(inner, columns)], T=FLOAT, transpose_a=False, transpose_b=False)
        y = self.node("BiasAdd", [y, self.weights(columns)], T=FLOAT, data_format="NHWC")
        return self.node(activation, [y], T=FLOAT) if activation else y


def branches(rows):
    g = Branches(Fixed())
    g.placeholder("x", (rows, 416))
    ends = []
    for number, (width, columns) in enumerate([(512, 1), (384, 2), (415, 64), (200, 1), (512, 8), (130, 3)]):
        y = g.dense("x", 416, width, "Relu")
        y = g.dense(y, width, 512, ("Tanh", "Sigmoid", "Relu6")[number % 3])
        ends.append(g.node("Identity", [g.dense(y, 512, columns, ("Sigmoid", "")[number % 2])], T=FLOAT))
    return flat_of(g.graph_def, outputs=ends)


@pytest.mark.parametrize("rows", [1, 16, 128, 1000])
@pytest.mark.parametrize("ieee", [False, True])
@pytest.mark.parametrize("options", [{}, {"fuse": True}, {"group": True}])
def test_chosen_kernels_in_a_captured_step(rows, ieee, options):
    flat = branches(rows)
    feeds = {"x": np.random.default_rng(1).standard_normal((rows, 416)).astype(np.float32)}
    expected = run(flat, feeds)
    torture = Torture(poison=True, delay_cycles=20_000, seed=rows)
    wanted = job(flat, feeds, scattered(flat, 6), streams=6, device="cuda", torture=torture, **options)
    executable = ENGINE.build(replace(wanted, precision=Precision.IEEE if ieee else Precision.TF32))
    for _ in range(3):
        for name, value in executable.step(feeds).items():
            most = np.abs(expected[name]).max()
            np.testing.assert_allclose(value, expected[name], rtol=0, atol=(1e-5 if ieee else CLOSE) * max(most, 1))
    executable.close()
    for key, choice in Tuner.of(torch.device("cuda")).chosen(matmul.FAMILY).items():
        assert choice.tile is None or choice.tile.exact or key[6], key  # the seventh: whether TF32 is allowed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("members", "rows", "inner"), [((300,), 27, 64), ((2, 6), 40, 33), ((1024,), 27, 64)])
def test_batched_products_of_small_matrices(dtype, members, rows, inner):
    x = torch.randn(*members, rows, inner, device="cuda").to(dtype)
    op = Op(3, "n", "BatchMatMulV2", {"adj_y": True}, [(1, 0), (2, 0)], [3])
    expected = x.double() @ x.double().mT
    with precision(ieee=False):
        chosen, same = matmul.choose(op, [x, x], lowered, movable=False)
        assert same is x
        tried = matmul._tiles(op, [x, x])
        assert tried
        for one in (chosen, *(matmul._tiled(op, tile) for tile in tried)):
            (found,) = lowered(one)(x, x)
            assert found.shape == expected.shape
            assert float((found - expected).abs().max()) < CLOSE * float(expected.abs().max())


def test_batch_axes_that_are_no_single_axis_in_memory_are_left_to_the_library():
    x = torch.randn(3, 20, 4, 16, device="cuda").permute(0, 2, 1, 3)
    op = Op(3, "n", "BatchMatMulV2", {"adj_y": True}, [(1, 0), (2, 0)], [3])
    with precision(ieee=False):
        assert matmul.choose(op, [x, x], lowered, movable=False)[0] is op
