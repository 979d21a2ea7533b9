"""What a measurement was taken on: versions, processor, GPU, commit."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from msplit._version import __version__

_PACKAGES = ("tensorflow", "torch", "numpy", "protobuf", "keras")


def environment(command: Sequence[str] = ()) -> dict[str, Any]:
    """Describes this machine and this process as plain data. Imports nothing heavy; what is not known is None or left out.

    Args:
        command: The command line that is being run.
    """
    return {
        "msplit": __version__,
        "commit": _run("git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"),
        "command": list(command),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "system": platform.platform(),
        "versions": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
        "cpu": {"model": _cpu(), "cores": os.cpu_count(), "usable_cores": len(os.sched_getaffinity(0))},
        "gpus": gpus(),
        "variables": {
            key: os.environ[key] for key in sorted(os.environ) if key.startswith(("TF_", "XLA_", "CUDA_", "OMP_"))
        },
    }


def gpus() -> list[dict[str, str]]:
    """Name, driver and memory of every NVIDIA GPU, as the driver tells."""
    fields = ("name", "driver_version", "memory.total")
    listed = _run("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader")
    rows = [[cell.strip() for cell in line.split(",")] for line in (listed or "").splitlines()]
    return [dict(zip(("name", "driver", "memory"), row, strict=True)) for row in rows if len(row) == len(fields)]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> str | None:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or None


def _run(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
