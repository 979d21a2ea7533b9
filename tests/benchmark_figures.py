"""Figures that a script of benchmarks/ writes, run without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def figures_of(name: str, folder: Path, *options: str) -> tuple[str, Any]:
    """Standard output of a script for the samples, and what it has written to a folder."""
    script = ROOT / "benchmarks" / f"{name}.py"
    given = ("--device", "cpu", "--streams", "2", *options, "--out", folder)
    done = subprocess.run(
        [sys.executable, script, ROOT / "sample_graphs", *given], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads((folder / f"{name}.json").read_text())
