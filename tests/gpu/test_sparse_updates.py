"""Updates of rows of embedding tables by our own kernels, on a real GPU."""

from __future__ import annotations

import pytest
import torch

from msplit.engines.cuda.device.capture import capture
from msplit.engines.cuda.ir.lowering import table
from msplit.engines.cuda.ir.node import Node
from tests.engines.cuda.kernels.sparse_cases import check_distinct, check_segments, check_updates

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("hosted", [frozenset(), frozenset([0, 2]), frozenset(range(4))], ids=len)
@pytest.mark.parametrize("repeat", [1, 100])
def test_every_optimizer_of_rows(repeat: int, hosted: frozenset[int]) -> None:
    """On tables and slots of the GPU, and in the host's memory, where the host finds what the kernel has written."""
    check_updates("cuda", repeat, hosted=hosted)


def test_distinct_ids() -> None:
    check_distinct("cuda", 2000)


def test_gradients_of_segments() -> None:
    check_segments("cuda", 200)


@pytest.mark.parametrize("count", [300, 5000])
def test_a_captured_update_runs_again(count: int) -> None:
    """On other ids and gradients, in the same memory: what one that was not captured makes of them."""
    rows, ids = torch.randn(count, 16), torch.randint(-1, 999, (count,))
    states = [[torch.ones(999, 16).to(place) for _ in range(2)] for place in ("cuda", "cpu")]
    given = [(rows.to(place), ids.to(place)) for place in ("cuda", "cpu")]
    rates = [torch.tensor(0.1, device=place) for place in ("cuda", "cpu")]
    node = Node("node", "_ApplyRows", {"op": "SparseApplyAdagrad", "count": 1, "summed": True})

    def step(place: int) -> None:
        table()["_ApplyRows"].function(node, *states[place], rates[place], *given[place])

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step(0)
    side.synchronize()
    for one in states[0]:
        one.fill_(1)
    with capture([side], torch.cuda.graph_pool_handle()) as graph:
        step(0)
    for number in range(3):
        for device, host in zip(given[0], given[1], strict=True):
            host.copy_(host.roll(number, 0))
            device.copy_(host)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            graph.replay()
        side.synchronize()
        step(1)
    for found, right in zip(*states, strict=True):
        torch.testing.assert_close(found.cpu(), right, rtol=1e-5, atol=1e-6)
