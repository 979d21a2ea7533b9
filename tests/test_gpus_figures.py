"""What measures several GPUs runs without any, and says that its times are no GPU's."""

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
def test_steps_and_requests_on_one_and_two(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, ROOT / "benchmarks" / "gpus.py", ROOT / "sample_graphs", "--models", "towers_small.pb:6"),
            *("--device", "cpu", "--gpus", "1,2", "--seconds", "0.1", "--streams", "2", "--out", tmp_path),
        ],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert "these times say nothing about any GPU" in done.stdout
    found = json.loads((tmp_path / "gpus.json").read_text())
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
