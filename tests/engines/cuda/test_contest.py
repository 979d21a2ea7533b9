"""What is timed side by side, and what is too large for that. The timing itself is tested on a GPU."""

from __future__ import annotations

import pytest
import torch

from msplit.engines.cuda import contest


@pytest.mark.parametrize(("elements", "lanes"), [(1 << 20, contest.LANES), (1 << 28, 1)])
def test_calls_with_large_results_are_not_made_side_by_side(monkeypatch, elements, lanes):
    timed = []

    def takes(calls, *, cold):
        assert not cold
        timed.append(len(calls))
        return 3.0 * len(calls)

    monkeypatch.setattr(contest, "milliseconds_of", takes)
    made = torch.empty(elements, device="meta")
    assert contest.milliseconds(lambda: [made], contest.LANES) == 3.0 * contest.LANES
    assert contest.milliseconds(lambda: made) == 3.0
    assert timed == [lanes, 1]
