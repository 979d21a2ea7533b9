"""Prices of one captured graph over two GPUs: a copy between them by our kernel and by CUDA, and the start of the second GPU.

    PYTHONPATH=. python benchmarks/notes/probes/peer_copies.py               # on a machine with two GPUs; less than a minute

- `copies`: a graph of copies from one GPU to the other and back, each behind the one before, by size; what came back is checked. Kernel:
  it reads the peer where it lies. CUDA: `cudaMemcpyAsync` by address.
- `busy`: products on the GPU that reads, beside such a copy: how much longer they take.
- `start`: small kernels on one GPU, and as many on each of two that begin and end together.
- `steps`: samples with their nodes scattered over two GPUs, captured and launched by the host, beside one GPU.

Times are the device's clock, medians of replays with the 10th and the 90th percentile.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import msplit
from msplit.core.arguments import Precision
from msplit.cost.profile import Workload
from msplit.engines.base import Job
from msplit.engines.cuda.device import capture as capturing
from msplit.engines.cuda.device.device import Device
from msplit.engines.cuda.engine import CudaEngine
from msplit.engines.cuda.ops import optimizers
from msplit.engines.cuda.options import EngineOptions
from msplit.engines.cuda.runtime.plan_binding import CaptureMemory
from msplit.inputs.make import feeds_for

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)
REPLAYS, COPIES, KERNELS = 30, 20, 60
SAMPLES = Path(msplit.__file__).parents[1] / "sample_graphs"


def micros(values: list[float], each: int = 1) -> str:
    """Median and spread."""
    low, high = np.quantile(values, (0.1, 0.9))
    return f"{statistics.median(values) / each:.1f} ({low / each:.1f}-{high / each:.1f}) µs"


def together() -> None:
    """Waits for both GPUs."""
    for place in (FIRST, SECOND):
        torch.cuda.synchronize(place)


def after(one: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
    """Lets a stream wait for another one, on whichever GPU."""
    event = torch.cuda.Event()
    event.record(one)
    other.wait_event(event)


def peer_copy(value: torch.Tensor, place: torch.device) -> torch.Tensor:
    """The engine's own copy on the current stream."""
    return optimizers.peer_copy(SimpleNamespace(get=lambda name: place.index), value)


@contextmanager
def by(kernel: bool) -> Iterator[None]:
    """A block in which copies are made by our kernel, or by CUDA."""
    usual = optimizers.reads
    optimizers.reads = usual if kernel else lambda reader, owner: False
    try:
        yield
    finally:
        optimizers.reads = usual


def captured(issue: Callable[[list[torch.cuda.Stream]], Any]) -> tuple[list[float], Any]:
    """Times in µs of replays of what is issued on a stream of each GPU and ends on the first, and what it gave."""
    streams = [Device.of(place).streams.lease(1)[0] for place in (FIRST, SECOND)]
    memory = CaptureMemory(SECOND)
    with torch.no_grad(), torch.cuda.device(FIRST):
        together()  # these streams do not wait for the default ones
        torch.cuda.set_stream(streams[0])
        issue(streams)  # kernels are compiled, and handles made
        together()
        with capturing.capture(streams, torch.cuda.graph_pool_handle()) as graph, memory.used():
            made = issue(streams)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
        marks[0].record(streams[0])
        for mark in marks[1:]:
            graph.replay()
            mark.record(streams[0])
        streams[0].synchronize()
        times = [1e3 * one.elapsed_time(other) for one, other in itertools.pairwise(marks)]
    torch.cuda.set_stream(torch.cuda.default_stream(FIRST))
    captured.kept = [graph, memory]  # type: ignore[attr-defined]  # what it gave lies there
    return times[3:], made


def copies() -> None:
    """Copies there and back by size."""
    for size in (1 << 12, 1 << 16, 1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 28):
        value = torch.randn(size // 4, device=FIRST)

        def issue(streams: list[torch.cuda.Stream], value: torch.Tensor = value) -> torch.Tensor:
            for number in range(COPIES):
                here, there = (streams, streams[::-1])[number % 2]
                after(here, there)
                torch.cuda.set_stream(there)
                value = peer_copy(value, (SECOND, FIRST)[number % 2])
            return value

        told = []
        for kernel in (True, False):
            with by(kernel):
                times, made = captured(issue)
            assert made.equal(value), (size, kernel)
            told.append(micros(times, COPIES))
        print(f"copies: {size / 1e6:.3f} MB: kernel {told[0]}, CUDA {told[1]} each", flush=True)


def busy() -> None:
    """Products on the reader beside a copy."""
    value, factor = torch.randn(1 << 24, device=FIRST), torch.randn(2048, 2048, device=SECOND)
    side = Device.of(SECOND).streams.lease(1)[0]

    def issue(streams: list[torch.cuda.Stream], copied: bool) -> None:
        after(streams[0], streams[1])
        after(streams[1], side)
        torch.cuda.set_stream(side)
        if copied:
            peer_copy(value, SECOND)
        torch.cuda.set_stream(streams[1])
        for _ in range(10):
            factor @ factor
        after(side, streams[1])
        after(streams[1], streams[0])
        torch.cuda.set_stream(streams[0])

    for name, copied, kernel in (("alone", False, True), ("kernel", True, True), ("CUDA", True, False)):
        with by(kernel):
            print(f"busy: 10 products beside 64 MB, {name}: {micros(captured(lambda s, c=copied: issue(s, c))[0])}")


def start() -> None:
    """The second GPU's start, and its join."""
    values = [torch.zeros(1024, device=place) for place in (FIRST, SECOND)]

    def issue(streams: list[torch.cuda.Stream], gpus: int) -> None:
        if gpus == 2:
            after(streams[0], streams[1])
        for stream, value in list(zip(streams, values, strict=True))[:gpus]:
            torch.cuda.set_stream(stream)
            for _ in range(KERNELS):
                value.add_(1)
        if gpus == 2:
            after(streams[1], streams[0])
        torch.cuda.set_stream(streams[0])

    for gpus in (1, 2):
        times, _ = captured(lambda streams, gpus=gpus: issue(streams, gpus))
        print(f"start: {KERNELS} kernels on {gpus} of two GPUs: {micros(times)}", flush=True)


def steps() -> None:
    """Steps of samples by the engine."""
    for name in ("towers_small.pb", "mmoe_small.pb"):
        flat = msplit.load(SAMPLES / name)
        feeds, count = feeds_for(flat, Workload(64)), 4
        ids = (np.arange(len(flat)) * 7 % count).astype(np.int32)
        found = {}
        for label, options in (
            ("one GPU", {}),
            ("two, captured", {"split": (0, 1)}),
            ("two, launched", {"split": (0, 1), "capture": False}),
        ):
            job = Job(flat, ids, count, feeds, precision=Precision.IEEE, options=EngineOptions("cuda", **options))
            executable = CudaEngine().build(job)
            outputs = executable.step(feeds)
            for key, value in found.setdefault("outputs", outputs).items():
                np.testing.assert_allclose(outputs[key], value, rtol=1e-4, atol=1e-5)
            times = [1e6 * one for one in executable.device_times(REPLAYS)]
            facts = executable.facts()
            about = f"captured {facts['captured']}, {facts['kernels']} kernels, {facts.get('copies', 0)} copies"
            print(f"steps: {name}, {label}: {micros(times)}; {about}", flush=True)
            executable.close()


def main() -> None:
    if torch.cuda.device_count() < 2:
        sys.exit("this needs two GPUs")
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, {msplit.__version__}")
    for part in (copies, busy, start, steps):
        if not sys.argv[1:] or part.__name__ in sys.argv[1:]:
            part()


if __name__ == "__main__":
    main()
