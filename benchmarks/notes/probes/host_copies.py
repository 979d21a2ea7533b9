"""How long one thread, PyTorch's, Python's and our native threads take to copy an array from pageable into pinned memory.

    python hatch_build.py && PYTHONPATH=. python benchmarks/notes/probes/host_copies.py

Each size is copied 200 times from eight sources in turns, 0.2 ms after the copy before: median, and the 10th and 90th percentile, in µs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from msplit.engines.environment import native_threads

ROUNDS = 200
Copy = Callable[[NDArray[Any], NDArray[Any]], object]


def by_pytorch(threads: int, source: NDArray[Any], target: NDArray[Any]) -> None:
    torch.set_num_threads(threads)
    torch.from_numpy(target).copy_(torch.from_numpy(source))


def by_python(pool: ThreadPoolExecutor, threads: int, source: NDArray[Any], target: NDArray[Any]) -> None:
    list(pool.map(np.copyto, np.array_split(target, threads), np.array_split(source, threads)))


def by_ours(helpers: int, source: NDArray[Any], target: NDArray[Any]) -> None:
    threads = native_threads()
    assert threads is not None
    threads(target.ctypes.data, source.ctypes.data, target.nbytes, helpers)


def measured(copy: Copy, sources: list[NDArray[Any]], target: NDArray[Any]) -> str:
    """Median and percentiles of a copy, in µs."""
    times = []
    for number in range(ROUNDS):
        time.sleep(2e-4)
        start = time.perf_counter()
        copy(sources[number % len(sources)], target)
        times.append((time.perf_counter() - start) * 1e6)
    low, middle, high = np.quantile(times, (0.1, 0.5, 0.9))
    return f"{middle:7.1f} ({low:.0f}-{high:.0f})"


def main() -> None:
    pool = ThreadPoolExecutor(4)
    ways: dict[str, Copy] = {"one thread of NumPy": lambda source, target: np.copyto(target, source)}
    ways |= {f"PyTorch, {count} threads": partial(by_pytorch, count) for count in (1, 2, 4)}
    ways |= {f"Python, {count} threads": partial(by_python, pool, count) for count in (2, 4)}
    ways |= {f"ours, {count} helpers": partial(by_ours, count) for count in (1, 3, 7)} if native_threads() else {}
    for size in (1 << 19, 1 << 20, 1 << 21, 1 << 23):
        sources = [np.random.default_rng(seed).integers(0, 255, size, dtype=np.uint8) for seed in range(8)]
        target = torch.zeros(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available()).numpy()
        print(f"--- {size >> 10} KB")
        for name, copy in ways.items():
            print(f"{name:22}", measured(copy, sources, target), flush=True)


if __name__ == "__main__":
    main()
