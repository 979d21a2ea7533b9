"""What measures processes behind one pool runs without a GPU, and says that its times are no GPU's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmark_figures import figures_of
from tests.campaign import campaign


@campaign
@pytest.mark.slow
@pytest.mark.tf
def test_a_soak(tmp_path: Path) -> None:
    asked = ("--model", "towers_small.pb:8", "--gpus", "2", "--clients", "1", "--kill-every", "3")
    _, found = figures_of("processes", tmp_path, *asked, "--soak", "1000000", "--soak-seconds", "8")
    (row,) = found["soak"]
    assert row["kills"] >= 1
    assert row["requests"] == row["right"] > 0
    assert (row["wrong"], row["without an answer"]) == (0, 0)


@campaign
@pytest.mark.slow
@pytest.mark.tf
def test_rates_kills_and_trips(tmp_path: Path) -> None:
    asked = ("--model", "towers_small.pb:8", "--gpus", "1,2", "--seconds", "0.1", "--kills", "2", "--every", "0.5")
    said, found = figures_of("processes", tmp_path, *asked)
    assert "these times say nothing about any GPU" in said
    hows = {"by the process that has the pool", "by 1 other process for each GPU", "by 2 other processes for each GPU"}
    told = {(row["what"], row["GPUs"]) for row in found["rates"]}
    assert told == {("in this process", 1), *((how, count) for how in hows for count in (1, 2))}
    assert not any(row["wrong"] for row in found["rates"])
    (kills,) = found["kills"]
    assert (kills["kills"], kills["restarts"], kills["wrong"]) == (2, 2, 0)
    assert kills["right"]
