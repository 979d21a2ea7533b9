"""What measures processes behind one pool runs without a GPU, and says that its times are no GPU's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.campaign import campaign

ROOT = Path(__file__).parents[1]


@campaign
@pytest.mark.slow
@pytest.mark.tf
def test_a_soak(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, ROOT / "benchmarks" / "processes.py", ROOT / "sample_graphs"),
            *("--model", "towers_small.pb:8", "--device", "cpu", "--gpus", "2", "--streams", "2", "--clients", "1"),
            *("--soak", "1000000", "--soak-seconds", "8", "--kill-every", "3", "--out", tmp_path),
        ],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "processes.json").read_text())["soak"]
    assert row["kills"] >= 1
    assert row["requests"] == row["right"] > 0
    assert (row["wrong"], row["without an answer"]) == (0, 0)


@campaign
@pytest.mark.slow
@pytest.mark.tf
def test_rates_kills_and_trips(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, ROOT / "benchmarks" / "processes.py", ROOT / "sample_graphs"),
            *("--model", "towers_small.pb:8", "--device", "cpu", "--gpus", "1,2", "--streams", "2"),
            *("--seconds", "0.1", "--kills", "2", "--every", "0.5", "--out", tmp_path),
        ],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert "these times say nothing about any GPU" in done.stdout
    found = json.loads((tmp_path / "processes.json").read_text())
    hows = {"by the process that has the pool", "by 1 other process for each GPU", "by 2 other processes for each GPU"}
    told = {(row["what"], row["GPUs"]) for row in found["rates"]}
    assert told == {("in this process", 1), *((how, count) for how in hows for count in (1, 2))}
    assert not any(row["wrong"] for row in found["rates"])
    (kills,) = found["kills"]
    assert (kills["kills"], kills["restarts"], kills["wrong"]) == (2, 2, 0)
    assert kills["right"]
