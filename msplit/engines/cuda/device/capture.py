"""Capturing CUDA graphs, and the memory of graphs that are only timed."""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch

T = TypeVar("T")

_ALONE = threading.RLock()
"""Whoever captures holds it, and whoever waits for a whole device: CUDA refuses that while any stream of the device is captured, in
whichever thread, and may break off the capture."""

_kept: list[Any] = []
"""Objects that were kept for the graph that is being captured."""


def synchronize(place: torch.device) -> None:
    """Waits for all that a device has to do, when no other thread is capturing."""
    with _ALONE:
        torch.cuda.synchronize(place)


@contextlib.contextmanager
def no_capture(*, wait: bool) -> Iterator[bool]:
    """A block in which no thread captures, so that any stream may be waited for; False where one does, unless its end is waited for."""
    free = _ALONE.acquire(blocking=wait)
    try:
        yield free
    finally:
        if free:
            _ALONE.release()


def empty_cache() -> None:
    """Gives the memory that PyTorch keeps unused back to the device, when no other thread is capturing."""
    with _ALONE:
        torch.cuda.empty_cache()


def is_capturing() -> bool:
    """True if work issued on the current stream becomes part of a graph."""
    return bool(torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def keep(thing: T) -> T:
    """Lets memory that a kernel reads, and that is not the graph's own, live as long as the graph that is being captured."""
    _kept.append(thing)
    return thing


@contextlib.contextmanager
def capture(
    streams: Sequence[torch.cuda.Stream], pool: Any, *, release: bool = False
) -> Iterator[torch.cuda.CUDAGraph]:
    """Makes a graph of all that is issued inside, which begins and ends on the first stream, the current one.

    The others have to wait for the first before anything is issued on them, and it for them at the end. What fails inside is raised as it
    is: without care, ending its capture would raise an error of its own, about streams that were not joined, in its place. Threads capture
    one after the other; what is captured already may be replayed by any of them meanwhile.

    Args:
        streams: Those that are used inside, of one device or several.
        pool: The graph's memory.
        release: Give the memory that PyTorch keeps cached back to the device first, as `torch.cuda.graph` does. To map it again takes
            longer than all else where hundreds of graphs are captured to be timed.
    """
    origin, *others = streams
    graph = torch.cuda.CUDAGraph()
    with _ALONE, torch.cuda.stream(origin):
        torch.cuda.synchronize(origin.device)
        if release:
            torch.cuda.empty_cache()
        try:
            graph.capture_begin(pool=pool, capture_error_mode="relaxed")
        except RuntimeError:
            _leave(pool, origin)
            raise
        _kept.clear()
        try:
            yield graph
        except BaseException:
            torch.cuda.set_stream(origin)
            with contextlib.suppress(RuntimeError):
                for stream in others:
                    origin.wait_stream(stream)
            with contextlib.suppress(RuntimeError):
                _end(graph, pool)
            raise
        graph.kept = [*_kept]
        _kept.clear()
        _end(graph, pool)


def _leave(pool: Any, stream: torch.cuda.Stream) -> None:
    """Has a pool of memory take further captures: where one does not begin, or does not end, PyTorch (2.11) leaves the pool open."""
    with contextlib.suppress(AttributeError, RuntimeError, TypeError):  # it is not open, or is the graph's own
        torch._C._cuda_endAllocateToPool(stream.device_index, pool)


def _end(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    """Ends a capture on the current stream.

    Where that fails, PyTorch (2.11) leaves its generator of random numbers in the state of a capture, so that nothing in the process can
    draw any more. Another capture that ends well sets it back.
    """
    try:
        graph.capture_end()
    except RuntimeError:
        _leave(pool, torch.cuda.current_stream())
        with contextlib.suppress(RuntimeError), warnings.catch_warnings(action="ignore"):  # this graph is empty
            again = torch.cuda.CUDAGraph()
            again.capture_begin(capture_error_mode="relaxed")
            again.capture_end()
        raise


class ScratchPool:
    """One memory for all graphs that are only timed: they never run at once, nobody reads what they make, and mapping memory takes long."""

    def __init__(self, place: torch.device) -> None:
        self._place = place

    @property
    def handle(self) -> Any:
        """The pool to capture such graphs in."""
        return self._anchored[0]

    @functools.cached_property
    def _anchored(self) -> tuple[Any, torch.cuda.CUDAGraph, torch.Tensor]:
        """A pool with a graph that stays: PyTorch refuses a pool that no graph uses any more as long as anything lies in it."""
        with torch.cuda.device(self._place):
            handle, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
            with torch.cuda.stream(stream):
                torch.zeros(1, device=self._place)
            with capture([stream], handle) as graph:
                kept = torch.ones(1, device=self._place)
        return handle, graph, kept
