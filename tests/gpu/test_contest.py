"""Contests on a real GPU: large results, and calls that fail while they are captured."""

from __future__ import annotations

import pytest
import torch

from msplit.engines.cuda import contest

pytestmark = pytest.mark.gpu


def test_large_results_are_not_all_kept() -> None:
    data = torch.ones(1 << 28, device="cuda")  # 1 GiB; all results of all streams would be 80
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert contest.milliseconds(lambda: data + 1, contest.LANES) > 0
    assert torch.cuda.max_memory_allocated() - before < 20 << 30


def test_what_fails_in_a_capture_is_told_and_harms_no_later_one() -> None:
    data = torch.ones(64, device="cuda")
    calls = [0]

    def fails() -> torch.Tensor:
        calls[0] += 1
        if calls[0] > contest.LANES + 3:
            raise ValueError("in the middle")
        return data + 1

    with pytest.raises(ValueError, match="in the middle"):
        contest.milliseconds(fails, contest.LANES)
    assert contest.milliseconds(lambda: data + 1) > 0
