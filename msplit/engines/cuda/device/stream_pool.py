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


class StreamPool:
    """The streams of one GPU that nobody holds."""

    def __init__(self, place: torch.device) -> None:
        self._place = place
        self._lock = threading.Lock()
        self._free: list[torch.cuda.Stream] = []

    def lease(self, count: int) -> list[torch.cuda.Stream]:
        """Streams that nobody else holds, made when there are not enough."""
        with self._lock:
            taken = [self._free.pop() for _ in range(min(count, len(self._free)))]
        return taken + [new_stream(self._place) for _ in range(count - len(taken))]

    def give_back(self, streams: list[torch.cuda.Stream]) -> None:
        """Returns streams with no work in flight."""
        with self._lock:
            self._free.extend(streams)


def new_stream(place: torch.device) -> torch.cuda.Stream:
    """A stream that PyTorch deals to nobody. It is never destroyed."""
    handle = ctypes.c_void_p()
    with torch.cuda.device(place):
        status = runtime().cudaStreamCreateWithFlags(ctypes.byref(handle), _NON_BLOCKING)
    if status != 0 or handle.value is None:
        raise RuntimeError(f"cudaStreamCreateWithFlags failed with status {status}")
    return torch.cuda.ExternalStream(handle.value, device=place)


@functools.cache
def runtime() -> ctypes.CDLL:
    """The runtime library that PyTorch has loaded already."""
    major = str(torch.version.cuda).split(".", maxsplit=1)[0]
    return ctypes.CDLL(f"libcudart.so.{major}")


def check(status: int) -> None:
    """Raises what a call of that library answered, unless it is that all is well."""
    if status:
        torch.cuda.check_error(status)
