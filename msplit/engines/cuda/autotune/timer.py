"""Times calls alone on the device, as nodes of a CUDA graph: without what launching them from the host costs."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from msplit.engines.cuda.device.capture import capture, empty_cache, synchronize
from msplit.engines.cuda.device.device import Device

Call = Callable[[], object]
Lane = Sequence[Call]

RUNS = 7
"""Replays of a graph behind a head start; their median counts."""

WARM_SECONDS = 0.05
"""Work before the first measurement, so that the clocks are up."""

HEAD_START_CYCLES = 2_000_000
NODE_CYCLES = 4_000
"""The device sleeps for so long (1 ms, and 2 µs per node) while the host issues all replays. Otherwise short ones would last as long as
issuing them does."""

ISSUE_CYCLES = 50_000
"""The device sleeps for so long (25 µs) while the host issues one replay, which would be in its time otherwise, longer in one process
than in the next. Emptying the cache takes longer than that."""

MOST_REPLAYS = 21
"""Replays one by one, of which the median counts."""
FEWEST_REPLAYS = 5
ENOUGH_MS = 100.0
"""Milliseconds of replays after which the fewest are enough. What takes long varies little, and a model's convolutions at a batch of 1024
would otherwise be timed for minutes."""

MOST_KEPT = 4 << 30
"""Bytes of results that are kept until a graph ends; where there would be more, each stream writes over its own."""


class CudaTimer:
    """The timer of one GPU, which owns it: captures calls once as a graph and replays it.

    Its streams are always the same ones: PyTorch keeps the memory of each for itself, and results may be of gigabytes.
    """

    lanes = 16  # a step that as many copies of it do not slow down fills no more than a sixteenth of the device

    def __init__(self, device: Device) -> None:
        self._device = device
        self._streams: list[torch.cuda.Stream] = []

    @property
    def stream(self) -> torch.cuda.Stream:
        """The stream that calls are captured on first: what launches on a stream that was current before has to be made there."""
        self._streams += self._device.streams.lease(1 - len(self._streams))
        return self._streams[0]

    def warm(self) -> None:
        """Lets the device work until its clocks are up."""
        tensor = torch.ones(1 << 20, device=self._device.place)
        end = time.perf_counter() + WARM_SECONDS
        while time.perf_counter() < end:
            tensor = tensor * 1.0
        synchronize(self._device.place)

    def graph_us(self, lanes: Sequence[Lane], *, repeat: int = 1, before: Lane = ()) -> float:
        """µs of one run: `before` in order, then the lanes side by side, each in order; all of that `repeat` times.

        Calls are captured as a graph. Everything is in the L2 cache that fits there, since the runs are alike. The time that the
        device takes to begin with a graph is in it.

        Raises:
            RuntimeError: A call can not be captured.
        """
        with self._graph(lanes, before, repeat) as (graph, origin):
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(2 * RUNS)]
            graph.replay()
            nodes = repeat * (len(before) + sum(map(len, lanes)))
            torch.cuda._sleep(HEAD_START_CYCLES + NODE_CYCLES * nodes)
            for run in range(RUNS):
                marks[2 * run].record(origin)
                graph.replay()
                marks[2 * run + 1].record(origin)
            origin.synchronize()
        pairs = zip(marks[::2], marks[1::2], strict=True)
        return float(statistics.median(first.elapsed_time(last) * 1e3 for first, last in pairs))

    def replay_ms(self, lanes: Sequence[Lane], *, cold: bool) -> float:
        """Milliseconds of a graph of the lanes side by side, replayed one by one, each while the device still does something else.

        Every call writes to memory of its own, as far as there is enough.

        Args:
            lanes: At most `lanes` of them.
            cold: True if the L2 cache is emptied before each replay.
        """
        times: list[float] = []
        with self._graph(lanes, keep=True) as (graph, origin):
            flush = torch.empty(self._flush_bytes() if cold else 0, dtype=torch.uint8, device=self._device.place)
            while not enough(times):
                if cold:
                    flush.zero_()
                else:
                    torch.cuda._sleep(ISSUE_CYCLES)
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record(origin)
                graph.replay()
                end.record(origin)
                end.synchronize()
                times.append(start.elapsed_time(end))
        return statistics.median(times)

    @contextlib.contextmanager
    def _graph(
        self, lanes: Sequence[Lane], before: Lane = (), repeat: int = 1, *, keep: bool = False
    ) -> Iterator[tuple[torch.cuda.CUDAGraph, torch.cuda.Stream]]:
        """The captured calls and the current stream, to replay them on. With `keep`, results stay until the capture ends."""
        count = max(len(lanes), 1)
        self._streams += self._device.streams.lease(count - len(self._streams))
        streams, place = self._streams[:count], self._device.place
        synchronize(place)
        with (
            torch.no_grad(),
            torch.cuda.device(place),
            torch.cuda.stream(streams[0]),
            self._device.semaphores.lent(),
        ):
            # Each call once on its stream, outside of the capture: kernels are loaded and libraries make their handles there.
            size = 0
            for stream, lane in zip(streams, lanes, strict=False):
                with torch.cuda.stream(stream):
                    for call in dict.fromkeys(lane):
                        size += lane.count(call) * bytes_of(call())
            for call in dict.fromkeys(before):
                call()
            synchronize(place)
            if keep and size > MOST_KEPT:
                empty_cache()  # what lies there unused can not be had while a capture is under way
            kept: list[object] | None = [] if keep and size <= MOST_KEPT else None
            with capture(streams, self._device.scratch.handle) as graph:
                for _ in range(repeat):
                    _record(streams, lanes, before, kept)
            del kept
            try:
                yield graph, streams[0]
            finally:
                graph.reset()

    def _flush_bytes(self) -> int:
        """Bytes that leave nothing else in the L2 cache when they are written."""
        return 2 * int(torch.cuda.get_device_properties(self._device.place).L2_cache_size)


def _record(
    streams: Sequence[torch.cuda.Stream], lanes: Sequence[Lane], before: Lane, kept: list[object] | None
) -> None:
    """Forks right after `before`, and joins. What is not kept is dropped at once, on the stream that made it."""
    origin = streams[0]
    for call in before:
        call()
    for stream in streams[1:]:
        stream.wait_stream(origin)
    for stream, lane in zip(streams, lanes, strict=False):
        with torch.cuda.stream(stream):
            for call in lane:
                result = call()
                if kept is not None:
                    kept.append(result)
                del result
    for stream in streams[1:]:
        origin.wait_stream(stream)


def enough(times: Sequence[float]) -> bool:
    """True if so many replays, of so many milliseconds each, tell their median."""
    return len(times) >= MOST_REPLAYS or (len(times) >= FEWEST_REPLAYS and sum(times) >= ENOUGH_MS)


def bytes_of(result: Any) -> int:
    """Bytes of a tensor, or of all in a list or tuple of results; of anything else none."""
    if isinstance(result, torch.Tensor):
        return int(result.nbytes)
    return sum(map(bytes_of, result)) if isinstance(result, list | tuple) else 0


class CpuTimer:
    """Runs the calls one after the other on the CPU, for tests: its times say nothing about a GPU."""

    lanes = 1

    def graph_us(self, lanes: Sequence[Lane], *, repeat: int = 1, before: Lane = ()) -> float:
        """µs of one run as `CudaTimer` has it, by the host's clock."""
        calls = [*before, *(call for lane in lanes for call in lane)]
        with torch.no_grad():
            for call in dict.fromkeys(calls):
                call()
            start = time.perf_counter()
            for _ in range(repeat):
                for call in calls:
                    call()
        return (time.perf_counter() - start) * 1e6


Timer = CudaTimer | CpuTimer
"""Measures how long calls take."""
