"""Commands in processes of their own that have TensorFlow and PyTorch a moment after they are asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests import forked


def start(
    arguments: tuple[object, ...], environment: Mapping[str, str] | None = None, says: Path | None = None
) -> forked.Popen:
    """Starts a command. What it says goes to a file."""
    with open(says or os.devnull, "ab") as file:
        return forked.Popen(
            [sys.executable, "-m", "msplit", *map(str, arguments)],
            server=forked.TENSORFLOW,
            quick=True,
            cwd=forked.ROOT,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )


def run(arguments: tuple[object, ...]) -> int:
    """Runs a command, and gives its exit code."""
    return start(arguments).wait()
