"""Times calls alone on the device, as nodes of a CUDA graph: without what launching them from the host costs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from msplit.engines.cuda.device import stream_pool as pool

Call = Callable[[], object]
Lane = Sequence[Call]

RUNS = 7
"""Replays of a graph; their median counts."""

WARM_SECONDS = 0.05
"""Work before the first measurement, so that the clocks are up."""

HEAD_START_CYCLES = 2_000_000
NODE_CYCLES = 4_000
"""The device sleeps for so long (1 ms, and 2 µs per node) while the host issues all replays. Otherwise short ones would last as long as
issuing them does."""


class Timer(Protocol):
    """Measures how long calls take."""

    @property
    def lanes(self) -> int:
        """How many calls it can run side by side."""
        ...

    def graph_us(self, lanes: Sequence[Lane], *, repeat: int = 1, before: Lane = (), after: Lane = ()) -> float:
        """µs of one run: `before` in order, then the lanes side by side, each in order, then `after`; all of that `repeat` times."""
        ...

    def close(self) -> None:
        """Frees what it holds."""
        ...


class CudaTimer:
    """Captures the calls once as a graph and replays it. Everything is in the L2 cache that fits there, since the runs are alike.

    Args:
        device: Where to run.
        lanes: Most lanes of a graph.
    """

    def __init__(self, device: torch.device, lanes: int = 16) -> None:
        self._device = device
        self._streams = pool.lease(device, lanes)
        self._memory = torch.cuda.graph_pool_handle()
        self._warm()
        # PyTorch gives a pool up when the last of its graphs is gone; this one stays.
        self._keeper = self._captured(lambda: torch.ones(1, device=device))

    @property
    def lanes(self) -> int:
        """See `Timer`."""
        return len(self._streams)

    def _warm(self) -> None:
        tensor = torch.ones(1 << 20, device=self._device)
        end = time.perf_counter() + WARM_SECONDS
        while time.perf_counter() < end:
            tensor = tensor * 1.0
        torch.cuda.synchronize(self._device)

    def graph_us(self, lanes: Sequence[Lane], *, repeat: int = 1, before: Lane = (), after: Lane = ()) -> float:
        """See `Timer`. The time that the device takes to begin with a graph is in it.

        Raises:
            RuntimeError: A call can not be captured.
        """
        streams = self._streams[: max(len(lanes), 1)]
        origin = streams[0]
        torch.cuda.synchronize(self._device)
        with torch.no_grad(), torch.cuda.device(self._device), torch.cuda.stream(origin):
            # Each call once on its stream, outside of the capture: kernels are loaded and libraries make their handles there.
            for stream, lane in zip(streams, lanes, strict=False):
                with torch.cuda.stream(stream):
                    for call in dict.fromkeys(lane):
                        call()
            for call in dict.fromkeys([*before, *after]):
                call()
            torch.cuda.synchronize(self._device)
            graph = self._captured(lambda: _record(streams, lanes, before, after, repeat))
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(2 * RUNS)]
            graph.replay()
            nodes = repeat * (len(before) + sum(map(len, lanes)) + len(after))
            torch.cuda._sleep(HEAD_START_CYCLES + NODE_CYCLES * nodes)
            for run in range(RUNS):
                marks[2 * run].record(origin)
                graph.replay()
                marks[2 * run + 1].record(origin)
            origin.synchronize()
        times = sorted(first.elapsed_time(last) * 1e3 for first, last in zip(marks[::2], marks[1::2], strict=True))
        graph.reset()
        return float(times[RUNS // 2])

    def _captured(self, run: Call) -> torch.cuda.CUDAGraph:
        """The graph of what a call issues. (`torch.cuda.graph` would also empty the allocator's caches, every time.)"""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device), torch.cuda.stream(self._streams[0]):
            graph.capture_begin(pool=self._memory, capture_error_mode="relaxed")
            try:
                run()
            except BaseException:
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph

    def close(self) -> None:
        """Gives the streams back."""
        if self._streams:
            torch.cuda.synchronize(self._device)
            self._keeper.reset()
            pool.give_back(self._device, self._streams)
            self._streams = []


def _record(
    streams: Sequence[torch.cuda.Stream], lanes: Sequence[Lane], before: Lane, after: Lane, repeat: int
) -> None:
    """Forks right after `before`, joins right before `after`. What a call makes is dropped at once, on the stream that made it."""
    origin = streams[0]
    for _ in range(repeat):
        for call in before:
            call()
        for stream in streams[1:]:
            stream.wait_stream(origin)
        for stream, lane in zip(streams, lanes, strict=False):
            with torch.cuda.stream(stream):
                for call in lane:
                    call()
        for stream in streams[1:]:
            origin.wait_stream(stream)
        for call in after:
            call()


class CpuTimer:
    """Runs the calls one after the other on the CPU, for tests: its times say nothing about a GPU."""

    lanes = 1

    def graph_us(self, lanes: Sequence[Lane], *, repeat: int = 1, before: Lane = (), after: Lane = ()) -> float:
        """See `Timer`."""
        calls = [*before, *(call for lane in lanes for call in lane), *after]
        with torch.no_grad():
            for call in dict.fromkeys(calls):
                call()
            start = time.perf_counter()
            for _ in range(repeat):
                for call in calls:
                    call()
        return (time.perf_counter() - start) * 1e6

    def close(self) -> None:
        """Nothing to free."""
