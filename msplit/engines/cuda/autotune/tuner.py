"""How long calls take on the GPU, alone and side by side: what decides between two ways to compute the same.

A kernel that runs ten times in a row finds its weights in the cache and their pages in the tables of addresses. In a model it finds
neither: of 26 convolutions of Inception-v3 one after the other on an H200, cuDNN's take 6 % longer than each in a row of its own, our own
up to 14 %, and another one of ours is then the fastest (`benchmarks/notes`). `Turns` gives every call weights of its own, and they are not
in the cache when it starts.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from msplit.engines.cuda.device import scratch
from msplit.engines.cuda.kernels import semaphores

CALLS = 10
"""Calls in one timed graph, on each stream."""
RUNS = 21
"""Runs of that graph, of which the median counts."""
FEWEST_RUNS = 5
ENOUGH_MS = 100.0
"""Milliseconds of runs after which the fewest are enough. What takes long varies little, and a model's convolutions at a batch of 1024
would otherwise be timed for minutes."""
LANES = 8
"""Streams of the timing side by side: what is faster alone often fills more of the GPU, and then streams gain nothing."""
MARGIN = 0.97
"""The challenger must be this much faster: a tie changes nothing."""
MOST_KEPT = 4 << 30
"""Bytes of results that are kept until a graph ends; where there would be more, each stream writes over its own."""

MOST_COPIED = 256 << 20
"""Bytes of copies of weights. Larger ones than a cache are not in it the next time anyway."""

MOST_SIDE_BY_SIDE = 2 << 30
"""Bytes of results that calls side by side make at once. Kernels of more fill the GPU: they run one after the other anyway."""


def copies(weights: torch.Tensor) -> list[torch.Tensor]:
    """Weights for as many calls as one contest has, or as are worth their memory: themselves, and copies that lie like them."""
    count = min(max(MOST_COPIED // max(weights.nbytes, 1), 1), CALLS * LANES)
    return [weights, *(weights.clone() for _ in range(count - 1))]


class Turns:
    """A call of a function with other weights each time, in turns.

    Args:
        run: Takes the data, the weights, and the rest.
        data: The first argument.
        weights: What `copies` made.
        rest: Further arguments.
    """

    def __init__(
        self, run: Callable[..., Any], data: torch.Tensor, weights: Sequence[torch.Tensor], rest: Sequence[torch.Tensor]
    ) -> None:
        self.run = run
        self._data, self._turns, self._rest = data, itertools.cycle(weights), tuple(rest)

    def __call__(self) -> Any:
        """Runs it with the weights whose turn it is."""
        return self.run(self._data, next(self._turns), *self._rest)


def beats(challenger: Callable[[], Any], holder: Callable[[], Any]) -> bool:
    """Whether one call is faster than another both alone and side by side."""
    return all(milliseconds(challenger, lanes) < MARGIN * milliseconds(holder, lanes) for lanes in (1, LANES))


def milliseconds(call: Callable[[], Any], lanes: int = 1, *, cold: bool = False) -> float:
    """Time of a graph of `CALLS` calls on each of some streams; `cold` as `milliseconds_of` has it."""
    if lanes > 1 and lanes * _bytes_of(call()) > MOST_SIDE_BY_SIDE:
        return lanes * milliseconds_of([call], cold=cold)
    return milliseconds_of([call] * lanes, cold=cold)


def milliseconds_of(lanes: Sequence[Callable[[], Any]], *, cold: bool = False) -> float:
    """Time of a graph of `CALLS` calls on each stream, given the call of each.

    Args:
        lanes: A call for each stream.
        cold: Whether the cache is emptied before each run of the graph.
    """
    streams = _streams(torch.cuda.current_device())[: len(lanes)]
    origin = streams[0]
    origin.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(origin), semaphores.lent():
        # A kernel that is not loaded yet, or a handle made on the way, must not count: each stream runs once before.
        size = 0
        for stream, call in zip(streams, lanes, strict=True):
            with torch.cuda.stream(stream):
                size += CALLS * _bytes_of(call())
                stream.synchronize()
        if size > MOST_KEPT:
            torch.cuda.empty_cache()  # what lies there unused can not be had while a capture is under way
        # Not `torch.cuda.graph`, which collects garbage first: that takes longer than all else here.
        graph.capture_begin(pool=scratch.pool(), capture_error_mode="relaxed")
        kept = []
        try:
            for stream in streams[1:]:
                stream.wait_stream(origin)
            for stream, call in zip(streams, lanes, strict=True):
                with torch.cuda.stream(stream):
                    for _ in range(CALLS):
                        result = call()
                        if size <= MOST_KEPT:
                            kept.append(result)
                        del result
            for stream in streams[1:]:
                origin.wait_stream(stream)
        except BaseException:
            # Left as it is, the capture would end with an error of its own, about streams that were not joined, in place of this one.
            with contextlib.suppress(RuntimeError):
                for stream in streams[1:]:
                    origin.wait_stream(stream)
                graph.capture_end()
            raise
        graph.capture_end()
        times: list[float] = []
        flush = torch.empty(_flush_bytes() if cold else 0, dtype=torch.uint8, device="cuda")
        while not _enough(times):
            flush.zero_()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
    torch.cuda.current_stream().wait_stream(origin)
    graph.reset()
    return statistics.median(times)


def _enough(times: Sequence[float]) -> bool:
    """Whether so many runs, of so many milliseconds each, tell their median."""
    return len(times) >= RUNS or (len(times) >= FEWEST_RUNS and sum(times) >= ENOUGH_MS)


@functools.cache
def _streams(device: int) -> list[torch.cuda.Stream]:
    """Always the same ones: PyTorch keeps the memory of each for itself, and results may be of gigabytes."""
    return [torch.cuda.Stream(device) for _ in range(LANES)]


def _flush_bytes() -> int:
    """Bytes that leave nothing else in the L2 cache when they are written."""
    return 2 * int(torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size)


def _bytes_of(result: Any) -> int:
    """Of a tensor, or of all in a list or tuple of results."""
    return result.nbytes if isinstance(result, torch.Tensor) else sum(_bytes_of(one) for one in result)
