"""Pools that a device hands out from: streams to executables, and counters to the launches of split-K kernels."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Iterator, Sequence

import torch

from msplit.engines.cuda.device.capture import is_capturing, synchronize

_NON_BLOCKING = 1  # cudaStreamNonBlocking: no implicit order with the legacy default stream

SUPPLY = 1 << 22
"""Counters of a device: 16 MiB."""

_ALIGNED = 4
"""Counters in 16 bytes: a kernel is compiled anew for a pointer that is not a multiple of them."""


class StreamPool:
    """The CUDA streams of one GPU that nobody holds, lent to one executable at a time.

    Libraries key their workspaces by stream: two graphs captured on the same stream share one, and corrupt each other when they replay
    at the same time. PyTorch deals its streams out of a ring of 32, so they repeat. These do not.
    """

    def __init__(self, place: torch.device) -> None:
        self._place = place
        self._lock = threading.Lock()
        self._free: dict[int, list[torch.cuda.Stream]] = {}
        self._priorities: dict[int, int] = {}

    def lease(self, count: int, priority: int = 0) -> list[torch.cuda.Stream]:
        """Streams that nobody else holds, made when there are not enough.

        Args:
            priority: As CUDA has it: 0, or less than 0 for what is more urgent. More urgent than the device knows is as urgent as it knows.
        """
        with self._lock:
            free = self._free.setdefault(priority, [])
            taken = [free.pop() for _ in range(min(count, len(free)))]
        made = [new_stream(self._place, priority) for _ in range(count - len(taken))]
        self._priorities |= {stream.cuda_stream: priority for stream in made}
        return taken + made

    def give_back(self, streams: list[torch.cuda.Stream]) -> None:
        """Returns streams with no work in flight."""
        with self._lock:
            for stream in streams:
                self._free[self._priorities[stream.cuda_stream]].append(stream)


def new_stream(place: torch.device, priority: int = 0) -> torch.cuda.Stream:
    """A stream that PyTorch deals to nobody. It is never destroyed."""
    handle = ctypes.c_void_p()
    with torch.cuda.device(place):
        check(runtime().cudaStreamCreateWithPriority(ctypes.byref(handle), _NON_BLOCKING, priority))
    return torch.cuda.ExternalStream(handle.value, device=place)


def priorities(place: torch.device) -> int:
    """Number of levels of priority that the streams of a device have: from 0 down to 1 less than that, negated."""
    least, most = ctypes.c_int(), ctypes.c_int()
    with torch.cuda.device(place):
        check(runtime().cudaDeviceGetStreamPriorityRange(ctypes.byref(least), ctypes.byref(most)))
    return least.value - most.value + 1


@functools.cache
def runtime() -> ctypes.CDLL:
    """The runtime library that PyTorch has loaded already."""
    return ctypes.CDLL(_library())


@functools.cache
def holding() -> ctypes.PyDLL:
    """Runtime library, called without letting go of the interpreter's lock."""
    return ctypes.PyDLL(_library())


def _library() -> str:
    major = str(torch.version.cuda).split(".", maxsplit=1)[0]
    return f"libcudart.so.{major}"


def check(status: int) -> None:
    """Raises what a call of that library answered, unless it is that all is well."""
    if status:
        torch.cuda.check_error(status)


class Semaphores:
    """Counters by which the blocks of a split-K kernel find out which of them is done last.

    Each launch has counters of its own, since any two of them may run at once. They begin at zero, and the last block puts them back. A
    launch in a captured graph runs again and again on the same counters: they are handed out of a supply that lasts for thousands of
    graphs. Those of a graph that is gone are given back (`noted`), those of graphs that are only timed are taken back (`lent`).

    Attributes:
        supply: All of them, made before the first capture that may need some.
        taken: How many are handed out, or were.
    """

    def __init__(self, place: torch.device) -> None:
        self._place = place
        self._lock = threading.Lock()
        self._free: dict[int, list[torch.Tensor]] = {}
        self._noted: list[torch.Tensor] | None = None
        self.supply: torch.Tensor | None = None
        self.taken = 0

    def take(self, count: int) -> torch.Tensor | None:
        """Counters at zero for one launch on the current stream, captured or not; None where there are no more.

        Outside of captures they are made for the launch, which takes a kernel more: that is what runs step by step, to look for faults.
        """
        if not is_capturing():
            if self._place.type == "cuda" and self.supply is None:
                self.supply = torch.zeros(SUPPLY, dtype=torch.int32, device=self._place)
                synchronize(self._place)
            return torch.zeros(count, dtype=torch.int32, device=self._place)
        count += -count % _ALIGNED
        with self._lock:
            if self._free.get(count) and self._noted is not None:
                found = self._free[count].pop()
            elif self.supply is None or self.taken + count > SUPPLY:
                return None
            else:
                self.taken += count
                found = self.supply[self.taken - count : self.taken]
            if self._noted is not None:
                self._noted.append(found)
        return found

    @contextlib.contextmanager
    def noted(self, into: list[torch.Tensor]) -> Iterator[None]:
        """Notes what is taken inside, to be given back. One thread captures at a time."""
        self._noted = into
        try:
            yield
        finally:
            self._noted = None

    def give_back(self, counters: Sequence[torch.Tensor]) -> None:
        """Takes back what was noted for a graph that is gone. Nothing runs on it, so that all of it is at zero."""
        with self._lock:
            for one in counters:
                self._free.setdefault(len(one), []).append(one)

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Block that gives back what was taken inside: for graphs that do not outlive this, and of which one runs at a time."""
        before = self.taken
        try:
            yield
        finally:
            self.taken = before
