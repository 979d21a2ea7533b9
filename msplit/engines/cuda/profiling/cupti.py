"""Reads CUPTI's records of kernels: their grids, and how many of their blocks an SM holds. Read from PyTorch's profiler."""

from __future__ import annotations

import bisect
import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MARK = "msplit-step-"
_LAUNCHES = ("cuda_runtime", "cuda_driver")


@dataclass(frozen=True)
class KernelRecord:
    """One kernel as it ran.

    Attributes:
        occupancy: Share of the threads that an SM can hold that this kernel's blocks fill, 0 to 1, by CUPTI's estimate; None: not given.
        time_us: How long this one run took.
    """

    name: str
    blocks: int
    threads: int
    registers: int
    shared_bytes: int
    occupancy: float | None
    time_us: float


def record(run: Callable[[], None]) -> dict[int, list[KernelRecord]]:
    """Runs something under the profiler. What it runs inside of ``torch.profiler.record_function(f"{MARK}{number}")`` is told by number.

    Raises:
        RuntimeError: The profiler can not record kernels here.
    """
    from torch.profiler import ProfilerActivity, profile

    with tempfile.TemporaryDirectory(prefix="msplit-") as folder:
        path = Path(folder) / "trace.json"
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiler:
            run()
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
    return parse(events)


def parse(events: Sequence[Mapping[str, Any]]) -> dict[int, list[KernelRecord]]:
    """Kernels by the number of the mark that they were launched in, from the events of a Chrome trace.

    A launch on the host lies between the ends of its mark; the kernel on the device has the launch's correlation id.
    """
    marks = sorted(
        (event["ts"], event["ts"] + event["dur"], int(event["name"].removeprefix(MARK)))
        for event in events
        if event.get("cat") == "user_annotation" and str(event.get("name", "")).startswith(MARK)
    )
    starts = [mark[0] for mark in marks]
    launched: dict[int, int] = {}
    for event in events:
        if event.get("cat") not in _LAUNCHES or "correlation" not in event.get("args", {}):
            continue
        place = bisect.bisect_right(starts, event["ts"]) - 1
        if place >= 0 and event["ts"] <= marks[place][1]:
            launched[int(event["args"]["correlation"])] = marks[place][2]
    found: dict[int, list[KernelRecord]] = {}
    kernels = (event for event in events if event.get("cat") == "kernel")
    for event in sorted(kernels, key=lambda event: float(event["ts"])):
        arguments = event.get("args", {})
        number = launched.get(int(arguments.get("correlation", -1)))
        if number is not None:
            found.setdefault(number, []).append(_read(event, arguments))
    return found


def _read(event: Mapping[str, Any], arguments: Mapping[str, Any]) -> KernelRecord:
    occupancy = arguments.get("est. achieved occupancy %")
    return KernelRecord(
        name=str(event.get("name", "")),
        blocks=_volume(arguments.get("grid")),
        threads=_volume(arguments.get("block")),
        registers=int(arguments.get("registers per thread", 0)),
        shared_bytes=int(arguments.get("shared memory", 0)),
        occupancy=None if occupancy is None else float(occupancy) / 100,
        time_us=float(event.get("dur", 0.0)),
    )


def _volume(sizes: object) -> int:
    return math.prod(map(int, sizes)) if isinstance(sizes, list) else 1
