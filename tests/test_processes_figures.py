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
    hows = [("in this process", 1)]
    hows += [(f"a process for each, {how}", count) for how in ("one pool", "on its own") for count in (1, 2)]
    told = {(row["what"], row["gpus"]) for row in found["rates"]}
    assert told == {(f"{rows}, {how}", count) for rows in ("8 rows", "1 row") for how, count in hows}
    (kills,) = found["kills"]
    assert (kills["kills"], kills["restarts"], kills["wrong"]) == (2, 2, 0)
    assert kills["right"]
