"""Merged branches on the GPU give what the CPU gives branch by branch, under torture too."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from msplit.engines.cuda.autotune import batched_matmul
from msplit.engines.cuda.autotune.tuner import Tuner
from msplit.engines.cuda.engine import ENGINE
from msplit.engines.cuda.ir.graph import Op
from msplit.engines.cuda.options import Torture
from msplit.verify.compare import compare
from tests.engines.cuda.alike_branches import alike_branches
from tests.engines.cuda.cases import flat_of, job, run, scattered

pytestmark = pytest.mark.gpu


@given(alike_branches(), st.integers(1, 4), st.integers(0, 99))
@settings(max_examples=40)
def test_random_branches(case, streams, seed):
    graph_def, feeds, outputs = case
    flat = flat_of(graph_def, outputs=outputs)
    expected = run(flat, feeds)
    torture = Torture(poison=True, delay_cycles=20_000, seed=seed)
    ids = scattered(flat, streams, seed)
    executable = ENGINE.build(job(flat, feeds, ids, streams=streams, device="cuda", group=True, torture=torture))
    for _ in range(2):
        found = compare(executable.step(feeds), expected)
        assert found.passed, found.describe()
    executable.close()


@pytest.mark.parametrize("rows", [1, 8, 128])
@pytest.mark.parametrize("shared", [False, True])
def test_whatever_is_chosen_is_right(rows, shared):
    def normal(*shape):
        return torch.randn(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(sum(shape)))

    x = normal(rows, 96) if shared else normal(10, rows, 96)
    arguments = [x, normal(96, 10, 64) if shared else normal(10, 96, 64), normal(10, 64)]
    layer = {"start": 0, "count": 10, "bias": 0, "biases": 10, **({"wide": 1} if shared else {})}
    op = Op(3, "group", "_GroupedMatMul", {"layers": (layer,), "activation": "Relu"}, [], [3])
    work = batched_matmul.grouped(op.attrs, *arguments)
    found = batched_matmul.run(work, batched_matmul.choose(op, arguments).attrs)
    torch.testing.assert_close(found, batched_matmul.by_library(work), rtol=1e-4, atol=1e-4)
    chosen, times = Tuner.of(x.device).chosen(batched_matmul.FAMILY)[batched_matmul.key_of(work)]
    assert chosen in times
    assert len(times) > 1


def test_a_wrong_id_gives_zeros_from_its_own_table():
    from msplit.engines.cuda.ir.lowering import table
    from msplit.engines.cuda.ir.node import Node

    rows = torch.arange(12, dtype=torch.float32, device="cuda").reshape(6, 2) + 1
    ids = torch.tensor([[0, 3, -1], [2, 0, 5]], dtype=torch.int32, device="cuda")
    starts, sizes = torch.tensor([0, 3], device="cuda"), torch.tensor([3, 3], device="cuda")
    node = Node("lookup", "_GroupedLookup", {"count": 2})
    result = table()["_GroupedLookup"].function(node, rows, ids, starts, sizes).cpu().numpy()
    assert np.array_equal(result[0], [[1, 2], [0, 0], [0, 0]])
    assert np.array_equal(result[1], [[11, 12], [7, 8], [0, 0]])
