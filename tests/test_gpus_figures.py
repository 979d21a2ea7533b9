"""What measures several GPUs runs without any, and says that its times are no GPU's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmark_figures import figures_of
from tests.campaign import campaign


@campaign
@pytest.mark.slow
@pytest.mark.tf
def test_steps_and_requests_on_one_and_two(tmp_path: Path) -> None:
    asked = ("--models", "towers_small.pb:6", "--gpus", "1,2", "--seconds", "0.1")
    said, found = figures_of("gpus", tmp_path, *asked)
    assert "these times say nothing about any GPU" in said
    assert found["problems"] == []
    told = {(row["what"], row["gpus"], row["rows"]) for row in found["rows"]}
    assert told == {
        *{("the same batch", 1, 6), ("the same batch", 2, 6), ("a batch for each", 2, 12)},
        *{(f"requests, {how}", count, 6) for how in ("one pool", "a process for each") for count in (1, 2)},
    }
    ones = [
        row["efficiency"]
        for row in found["rows"]
        if row["what"] in ("the same batch", "requests, one pool") and row["gpus"] == 1
    ]
    assert ones == [{"host_us": 1.0}, {"rate": 1.0}]
