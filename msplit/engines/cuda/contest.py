"""How long calls take on the GPU, alone and side by side: what decides between two ways to compute the same."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from msplit.engines.cuda import tickets, trial_memory

CALLS = 10
"""Calls in one timed graph, on each stream."""
RUNS = 21
LANES = 8
"""Streams of the timing side by side: what is faster alone often fills more of the GPU, and then streams gain nothing."""
MARGIN = 0.97
"""The challenger must be this much faster: a tie changes nothing."""
MOST_KEPT = 4 << 30
"""Bytes of results that are kept until a graph ends; where there would be more, each stream writes over its own."""

MOST_SIDE_BY_SIDE = 2 << 30
"""Bytes of results that calls side by side make at once. Kernels of more fill the GPU: they run one after the other anyway."""


def beats(challenger: Callable[[], Any], holder: Callable[[], Any]) -> bool:
    """Whether one call is faster than another both alone and side by side."""
    return all(milliseconds(challenger, lanes) < MARGIN * milliseconds(holder, lanes) for lanes in (1, LANES))


def milliseconds(call: Callable[[], Any], lanes: int = 1) -> float:
    """Time of a graph of `CALLS` calls on each of some streams."""
    if lanes > 1 and lanes * _bytes_of(call()) > MOST_SIDE_BY_SIDE:
        return lanes * milliseconds_of([call])
    return milliseconds_of([call] * lanes)


def milliseconds_of(lanes: Sequence[Callable[[], Any]]) -> float:
    """Time of a graph of `CALLS` calls on each stream, given the call of each."""
    origin = torch.cuda.Stream()
    streams = [origin, *(torch.cuda.Stream() for _ in lanes[1:])]
    origin.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(origin), tickets.lent():
        # A kernel that is not loaded yet, or a handle made on the way, must not count: each stream runs once before.
        size = 0
        for stream, call in zip(streams, lanes, strict=True):
            with torch.cuda.stream(stream):
                size += CALLS * _bytes_of(call())
                stream.synchronize()
        # Not `torch.cuda.graph`, which collects garbage first: that takes longer than all else here.
        graph.capture_begin(pool=trial_memory.pool(), capture_error_mode="relaxed")
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
        for _ in range(RUNS):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
    torch.cuda.current_stream().wait_stream(origin)
    graph.reset()
    return sorted(times)[RUNS // 2]


def _bytes_of(result: Any) -> int:
    """Of a tensor, or of all in a list or tuple of results."""
    return result.nbytes if isinstance(result, torch.Tensor) else sum(_bytes_of(one) for one in result)
