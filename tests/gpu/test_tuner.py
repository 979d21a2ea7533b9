"""Timing on a real GPU: large results, and calls that fail while they are captured."""

from __future__ import annotations

import pytest
import torch

from msplit.engines.cuda.autotune import tuner
from msplit.engines.cuda.autotune.tuner import Tuner

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")


def test_large_results_are_not_all_kept() -> None:
    data = torch.ones(1 << 28, device="cuda")  # 1 GiB; all results of all streams would be 80
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert Tuner.of(GPU).milliseconds(lambda: data + 1, tuner.LANES) > 0
    assert torch.cuda.max_memory_allocated() - before < 20 << 30


def test_what_fails_in_a_capture_is_told_and_harms_no_later_one() -> None:
    data = torch.ones(64, device="cuda")
    calls = [0]

    def fails() -> torch.Tensor:
        calls[0] += 1
        if calls[0] > tuner.LANES + 3:
            raise ValueError("in the middle")
        return data + 1

    with pytest.raises(ValueError, match="in the middle"):
        Tuner.of(GPU).milliseconds(fails, tuner.LANES)
    assert Tuner.of(GPU).milliseconds(lambda: data + 1) > 0


def test_one_timing_after_the_other_takes_no_more_memory() -> None:
    """PyTorch keeps memory by stream: streams of their own for every timing would keep a gigabyte each."""
    data = torch.ones(1 << 28, device="cuda")
    before = torch.cuda.memory_reserved()
    for _ in range(12):
        assert Tuner.of(GPU).milliseconds(lambda: data + 1) > 0
    assert torch.cuda.memory_reserved() - before < 8 << 30


def test_weights_rotate() -> None:
    data, weights = torch.ones(4, 4, device="cuda"), torch.ones(4, 4, device="cuda")
    seen: list[int] = []

    def run(data: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        seen.append(weights.data_ptr())
        return data @ weights

    call = tuner.RotatingWeights(run, data, tuner.copies(weights), ())
    assert Tuner.of(GPU).milliseconds(call, tuner.LANES, cold=True) > 0
    assert len(set(seen)) == tuner.CALLS * tuner.LANES
