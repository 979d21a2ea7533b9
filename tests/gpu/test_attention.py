"""Attention on a real GPU: every kernel that the tuner may choose gives the same numbers, in captured steps too."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from msplit.core.arguments import Precision
from msplit.engines.cuda.autotune.tuner import differ
from msplit.engines.cuda.engine import ENGINE
from msplit.engines.cuda.ir.graph import Op
from msplit.engines.cuda.ir.interpret import as_tuple, call
from msplit.engines.cuda.ir.lowering import table
from msplit.engines.cuda.kernels.matmul import ATTENTION_TILES, names
from msplit.engines.cuda.ops.fused import KERNEL
from msplit.engines.cuda.options import Torture
from msplit.engines.cuda.passes.attention import fuse_attention as choose
from msplit.engines.cuda.passes.measured import deciding
from tests.campaign import sampled
from tests.engines.cuda.cases import job, run, scattered
from tests.engines.cuda.passes.attention.graphs import attention_graph

pytestmark = pytest.mark.gpu

CLOSE = 4e-3
"""Relative to the largest: TF32 rounds to 11 bits."""


@sampled(
    18,
    shape=[(4, 4, 128, 128, 64), (3, 2, 50, 41, 16), (2, 8, 1, 77, 32)],
    ieee=[False, True],
    least=[-1e9, -np.inf],
    kernel=[None, choose.LIBRARY[0], "16 queries, 64 keys, 4 warps"],
    options=[{}, {"fuse": True}, {"group": True}],
)
def test_a_captured_step(shape, ieee, least, kernel, options):
    """As the tuner chooses, and with the library's kernel or our own, whatever it measures."""
    if ieee and kernel in ATTENTION_TILES:
        pytest.skip("our own is not tried in IEEE precision")
    flat, feeds = attention_graph(*shape, least)
    expected = run(flat, feeds)
    torture = Torture(poison=True, delay_cycles=20_000, seed=1)
    wanted = job(flat, feeds, scattered(flat, 4), streams=4, device="cuda", torture=torture, **options)
    with deciding({} if kernel is None else {choose.ATTENTION: lambda graph, found: (True, kernel)}):
        executable = ENGINE.build(replace(wanted, precision=Precision.IEEE if ieee else Precision.TF32))
    for _ in range(3):
        for name, value in executable.step(feeds).items():
            most = np.nanmax(np.abs(expected[name]))
            np.testing.assert_allclose(value, expected[name], rtol=0, atol=(1e-5 if ieee else CLOSE) * most)
    executable.close()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_kernel_of_the_library(dtype, masked):
    """Those that can not do it say so, and no wrong one is taken for right."""
    size = {"A": 3, "B": 4, "q": 100, "k": 100, "d": 64, "v": 64}
    query, key, value = (
        torch.randn([size[axis] for axis in term], device="cuda").to(dtype) for term in ("AqBd", "AkBd", "AkBv")
    )
    rest = [torch.randn(3, 1, 1, 100, device="cuda").to(dtype)] if masked else []
    attrs = {"equation": "AqBd,AkBd,AkBv->AqBv", "scale": 0.125, "causal": not masked}
    ran = []
    exact = _run({**attrs, KERNEL: "MATH"}, *(one.float() for one in (query, key, value, *rest)))
    for name in (*choose.LIBRARY, *(names(100) if dtype != torch.float32 else ())):
        try:
            found = _run({**attrs, KERNEL: name}, query, key, value, *rest)
        except Exception:
            continue
        assert not differ([found], [exact]), name
        ran.append(name)
    assert "EFFICIENT_ATTENTION" in ran
    assert len(ran) > 1 or dtype == torch.float32


def _run(attrs, *tensors):
    op = Op(3, "n", "_Attention", attrs, [(number, 0) for number in range(len(tensors))], [3])
    return as_tuple(call(table()[op.op], op, list(tensors)))[0]
