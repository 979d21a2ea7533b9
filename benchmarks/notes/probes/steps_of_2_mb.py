"""A step of MMoE at 1,024 rows, 2 MB of inputs, by ways of bringing them, each in turns; and steps of a pool with two slots.

PYTHONPATH=. python benchmarks/notes/probes/steps_of_2_mb.py GRAPHS [cpu]
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
import models

import msplit

ROWS = 1024


def timed(step: Any, feeds: Sequence[Any], seconds: float) -> list[float]:
    times: list[float] = []
    end = time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        step(feeds[len(times) % len(feeds)])
        times.append(time.perf_counter() - start)
    return times


def flood(pool: Any, feeds: Sequence[Any], window: int, seconds: float) -> float:
    """Microseconds from one step to the next with so many in flight."""
    going: deque[Any] = deque()
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        if len(going) < window:
            going.append(pool.submit(feeds[count % len(feeds)]))
            count += 1
        else:
            going.popleft().result()
    for one in going:
        one.result()
    return (time.perf_counter() - start) / count * 1e6


def main() -> None:
    cpu = "cpu" in sys.argv[2:]
    path = models.fill(Path(sys.argv[1]), Path("/tmp/msplit-models"), "mmoe", ROWS)
    how: dict[str, Any] = {"engine": "cuda", "batch": ROWS, "streams": 8}
    how |= {"device": "cpu", "effort": "fast"} if cpu else {}
    rng = np.random.default_rng(0)
    with msplit.prepare(path, **how) as runner:
        feeds = [
            {name: rng.standard_normal(value.shape).astype(value.dtype) for name, value in runner.buffers.items()}
            for _ in range(8)
        ]
        tensors = [{name: torch.from_numpy(value) for name, value in row.items()} for row in feeds]
        ways: dict[str, Sequence[Any]] = {
            "arrays": feeds,
            "own buffers": [runner.buffers],
            "tensors of the host": tensors,
        }
        if not cpu:
            ways["pinned tensors"] = [{name: value.pin_memory() for name, value in row.items()} for row in tensors]
            ways["tensors of the GPU"] = [{name: value.cuda() for name, value in row.items()} for row in tensors]
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(6):
            for name, fed in ways.items():
                timed(runner.step, fed, 0.02)
                times[name] += timed(runner.step, fed, 0.15)
        for name, found in times.items():
            tenth, half, ninetieth = np.percentile(found, (10, 50, 90)) * 1e6
            print(f"{name:20} {half:8.1f} µs (10th {tenth:.0f}, 90th {ninetieth:.0f})", flush=True)
    del how["batch"]
    with msplit.pool(path, **how, groups=2, batches=[ROWS]) as pool:
        for window in (1, 2, 3):
            flood(pool, feeds, window, 0.1)
            low, _, half, _, high = sorted(flood(pool, feeds, window, 0.3) for _ in range(5))
            print(f"pool, {window} in flight   {half:8.1f} µs a step ({low:.0f} to {high:.0f})", flush=True)


if __name__ == "__main__":
    main()
