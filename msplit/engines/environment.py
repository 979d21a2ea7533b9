"""Describes the machine of a measurement: versions, processor, GPU, commit.

Asks the driver about NVIDIA's GPUs, by `nvidia-smi`: it comes with every driver. Nothing here imports a framework.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import os
import platform
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from msplit._version import __version__

COPY_THREADS = Path(__file__).parent / "cuda" / "runtime" / "copy_threads.native"
"""The library that `hatch_build.py` compiles, where there is a C compiler."""
HOST_OPS = Path(__file__).parent / "host" / "host_ops.native"
"""Likewise."""

THREADS_BYTES = 1 << 20
"""Arrays from this size on are copied by native threads: 512 KB take one thread 27 µs and eight 43, 2 MB 205 and 63, 8 MB 1,080 and 165."""
THREADS = 7
"""Native threads that help at most: with 3, 2 MB take 91 µs and 8 MB 280."""

_LIMIT = 20
"""Seconds that it may take; a driver that wakes a GPU takes some."""


@functools.cache
def native_threads() -> Callable[[int, int, int, int], None] | None:
    """The function of `copy_threads.c`: to, from, bytes, helpers. It lets go of the interpreter's lock. None where it was not compiled."""
    try:
        copy = ctypes.CDLL(str(COPY_THREADS)).copy_threads
    except OSError:
        return None
    copy.argtypes, copy.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), None
    return copy


def nvidia_smi(what: str, fields: str, form: str = "csv,noheader") -> list[list[str]] | None:
    """Rows of `nvidia-smi --query-WHAT=FIELDS`; None where no driver answers."""
    listed = output_of("nvidia-smi", f"--query-{what}={fields}", f"--format={form}")
    if listed is None:
        return None
    return [[cell.strip() for cell in line.split(",")] for line in listed.splitlines() if line.strip()]


def driver_cuda() -> int:
    """Major version of CUDA that the driver is for; 0 where there is no driver. CUDA is not started."""
    try:
        number = ctypes.c_int()
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return 0
    return number.value // 1000


def output_of(*command: str) -> str | None:
    """Output of a command; None where it fails or is not there."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


_MPS = "nvidia-cuda-mps-control"


def mps(*, start: bool = False) -> str:
    """Reason why processes do not share a GPU at the same time, by NVIDIA's multi-process service; empty where its daemon runs.

    A daemon serves all processes that find it by CUDA_MPS_PIPE_DIRECTORY, and stays until `echo quit | nvidia-cuda-mps-control`.

    Args:
        start: True to start it where it does not run.
    """
    if shutil.which(_MPS) is None:
        return f"{_MPS}, which comes with the driver, is not installed here"
    for command in (None, (_MPS, "-d")) if start else (None,):
        if command is not None and output_of(*command) is None:
            return f"`{_MPS} -d` fails here: it may not be allowed, as in many containers"
        try:
            asked = {"input": "get_server_list\n", "capture_output": True, "text": True, "timeout": _LIMIT}
            if subprocess.run([_MPS], **asked).returncode == 0:  # type: ignore[call-overload]
                return ""
        except (OSError, subprocess.SubprocessError):
            pass
    return f"its daemon does not run: `{_MPS} -d` starts it"


def visible(uuids: Sequence[str]) -> list[int]:
    """Positions of the GPUs that this process may use, in the order in which frameworks number them, as CUDA_VISIBLE_DEVICES says.

    Numbers are taken as the driver's: on GPUs of several kinds that takes ``CUDA_DEVICE_ORDER=PCI_BUS_ID``. As in CUDA, what comes behind a
    GPU that is not there does not count.

    Args:
        uuids: Of all GPUs, in the driver's order.
    """
    setting = os.environ.get("CUDA_VISIBLE_DEVICES")
    if setting is None:
        return list(range(len(uuids)))
    found: list[int] = []
    for name in map(str.strip, setting.split(",")):
        if name.isdecimal():
            matching = [int(name)] if int(name) < len(uuids) else []
        else:
            matching = [
                number for number, uuid in enumerate(uuids) if name.startswith("GPU-") and uuid.startswith(name)
            ]
        if len(matching) != 1 or matching[0] in found:
            break
        found += matching
    return found


def utilization(step: Callable[[], object], seconds: float = 0.5) -> float | None:
    """Share of time, in per cent, in which a kernel ran on the first visible GPU while steps followed each other; None where nobody tells.

    It says nothing of how much of the GPU these kernels filled.

    Args:
        step: Runs one; it is called again and again while the driver looks, which it does up to a second back.
        seconds: How long steps run before it is asked.
    """
    if shutil.which("nvidia-smi") is None:
        return None
    asked: list[list[list[str]] | None] = []

    def ask() -> None:
        time.sleep(seconds)
        asked.append(nvidia_smi("gpu", "uuid,utilization.gpu", "csv,noheader,nounits"))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    while thread.is_alive():
        step()
    rows = asked[0] if asked else None
    positions = visible([row[0] for row in rows]) if rows else []
    if not rows or not positions or len(rows[positions[0]]) < 2:
        return None
    try:
        return float(rows[positions[0]][1])
    except ValueError:  # [N/A], as on parts of a GPU
        return None


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
