"""Triton's kernels on the CPU, in its interpreter."""

from __future__ import annotations

import os
import subprocess
import sys


def run_interpreted(script: str) -> None:
    """Runs a script in a process of its own: Triton decides at import whether it interprets its kernels or compiles them."""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
