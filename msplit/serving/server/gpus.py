"""Memory and use of GPUs as NVML tells them, where its package (`nvidia-ml-py`) is installed."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from importlib import import_module
from typing import Any, NamedTuple


class GpuState(NamedTuple):
    """State of a GPU now.

    Attributes:
        number: As NVML counts: `CUDA_VISIBLE_DEVICES` does not change it.
        name: Its model.
        used: Bytes of its memory that are in use, by whatever process.
        total: Bytes of its memory.
        busy: Share of the last second or so in which a kernel ran, 0 to 1.
    """

    number: int
    name: str
    used: int
    total: int
    busy: float


@functools.cache
def _nvml() -> Any:
    """The library, ready to be asked; None where it, or a driver, is missing."""
    try:
        library = import_module("pynvml")
    except ModuleNotFoundError:
        return None
    try:
        library.nvmlInit()
    except library.NVMLError:
        return None
    return library


def _count(library: Any) -> int:
    """Number of GPUs; 0 where the driver does not answer."""
    try:
        found: int = library.nvmlDeviceGetCount()
    except library.NVMLError:
        return 0
    return found


def gpus() -> Iterator[GpuState]:
    """States of all GPUs that this process may see; none where nobody can tell. One that does not answer is left out."""
    library = _nvml()
    for index in range(0 if library is None else _count(library)):
        try:
            handle = library.nvmlDeviceGetHandleByIndex(index)
            memory, name = library.nvmlDeviceGetMemoryInfo(handle), library.nvmlDeviceGetName(handle)
            busy = library.nvmlDeviceGetUtilizationRates(handle).gpu / 100
        except library.NVMLError:
            continue
        yield GpuState(index, name if isinstance(name, str) else name.decode(), memory.used, memory.total, busy)
