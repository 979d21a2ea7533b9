"""CUDA streams of our own, lent to one executable at a time.

Libraries key their workspaces by stream: two graphs captured on the same stream share one, and corrupt each other when they replay
at the same time. PyTorch deals its streams out of a ring of 32, so they repeat. These do not: a stream that an executable
holds is nobody else's until it is given back.
"""

from __future__ import annotations

import ctypes
import functools
import threading

import torch

_NON_BLOCKING = 1  # cudaStreamNonBlocking: no implicit order with the legacy default stream

_lock = threading.Lock()
_free: dict[int, list[torch.cuda.Stream]] = {}


def lease(device: torch.device, count: int) -> list[torch.cuda.Stream]:
    """Streams that nobody else holds, made when there are not enough."""
    index = device.index or 0
    with _lock:
        idle = _free.setdefault(index, [])
        taken = [idle.pop() for _ in range(min(count, len(idle)))]
    return taken + [_new(device) for _ in range(count - len(taken))]


def give_back(device: torch.device, streams: list[torch.cuda.Stream]) -> None:
    """Returns streams with no work in flight."""
    with _lock:
        _free.setdefault(device.index or 0, []).extend(streams)


def _new(device: torch.device) -> torch.cuda.Stream:
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        status = runtime().cudaStreamCreateWithFlags(ctypes.byref(handle), _NON_BLOCKING)
    if status != 0 or handle.value is None:
        raise RuntimeError(f"cudaStreamCreateWithFlags failed with status {status}")
    return torch.cuda.ExternalStream(handle.value, device=device)


@functools.cache
def runtime() -> ctypes.CDLL:
    """The runtime library that PyTorch has loaded already."""
    major = str(torch.version.cuda).split(".", maxsplit=1)[0]
    return ctypes.CDLL(f"libcudart.so.{major}")


def check(status: int) -> None:
    """Raises what a call of that library answered, unless it is that all is well."""
    if status:
        torch.cuda.check_error(status)
