"""Describes the machine of a measurement: versions, processor, GPU, commit."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from msplit._version import __version__
from msplit.engines.nvidia import nvidia_smi, output_of

_PACKAGES = ("tensorflow", "torch", "numpy", "protobuf", "keras")


def environment(command: Sequence[str] = ()) -> dict[str, Any]:
    """Describes this machine and this process as plain data. Imports nothing heavy; what is not known is None or left out."""
    return {
        "msplit": __version__,
        "commit": _commit(),
        "command": list(command),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "system": platform.platform(),
        "versions": {name: found for name in _PACKAGES if (found := version(name)) is not None},
        "cpu": {"model": _cpu(), "cores": os.cpu_count(), "usable_cores": len(os.sched_getaffinity(0))},
        "gpus": gpus(),
        "variables": {
            key: os.environ[key] for key in sorted(os.environ) if key.startswith(("TF_", "XLA_", "CUDA_", "OMP_"))
        },
    }


def gpus() -> list[dict[str, str]]:
    """Name, driver and memory of every NVIDIA GPU, as the driver tells."""
    rows = nvidia_smi("gpu", "name,driver_version,memory.total") or ()
    return [dict(zip(("name", "driver", "memory"), row, strict=True)) for row in rows if len(row) == 3]


def version(package: str) -> str | None:
    """Version of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Commit of the checkout that msplit runs from. An environment inside of somebody's repository, which does not track it, has none."""
    here = Path(__file__)
    if output_of("git", "-C", str(here.parent), "ls-files", "--error-unmatch", here.name) is None:
        return None
    return output_of("git", "-C", str(here.parent), "rev-parse", "HEAD")


def _cpu() -> str | None:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or None
