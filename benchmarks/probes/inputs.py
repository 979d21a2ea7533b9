"""How does one large input come to the GPU soonest?

    python benchmarks/probes/inputs.py

Needs neither TensorFlow nor graphs; run it on a quiet machine. One process, all ways in turns, medians in µs by the host's clock:
an array is copied into host memory that the GPU sees, from there to the GPU, and one kernel runs. What the copy on the host takes
of it stands behind the slash.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).parent.parent))
from step_probe import captured

from msplit.engines.cuda.kernels import copy as copy_kernel, host_copy, staging
from msplit.engines.cuda.device.stream_pool import check, runtime

GPU = torch.device("cuda")
PIECE = 1 << 18
ROUNDS, STEPS = 6, 40
WRITE_COMBINED = 6  # cudaHostAllocMapped | cudaHostAllocWriteCombined


@triton.jit
def follow(source, target, count, progress, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copies words as far as the host says that they are there, and waits for the next."""
    block = tl.program_id(0)
    there = tl.zeros((), tl.int64)
    while block * BLOCK < count:
        last = tl.minimum((block + 1) * BLOCK, count)
        while there < last:
            there = tl.inline_asm_elementwise(
                "ld.acquire.sys.global.b64 $0, [$1];",
                "=l,l",
                [progress.to(tl.int64)],
                dtype=tl.int64,
                is_pure=False,
                pack=1,
            )
        place = block * BLOCK + tl.arange(0, BLOCK)
        exists = place < count
        tl.store(target + place, tl.load(source + place, mask=exists), mask=exists)
        block += tl.num_programs(0)


class Memory:
    """Host memory of CUDA's own with some flags, as a tensor."""

    def __init__(self, size: int, flags: int) -> None:
        address = ctypes.c_void_p()
        check(runtime().cudaHostAlloc(ctypes.byref(address), ctypes.c_size_t(size), ctypes.c_uint(flags)))
        self.array = np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_uint8)), (size,))
        self.tensor = torch.from_numpy(self.array)


def main() -> None:
    """See the module."""
    for kilobytes in (64, 256, 588, 1048, 2048, 4096, 8192):
        show(kilobytes)
    for kilobytes in (2048, 4096, 8192, 16 << 10, 32 << 10, 64 << 10, 134 << 10, 602 << 10):
        large(kilobytes)


def show(kilobytes: int) -> None:
    """One size, all ways."""
    size = kilobytes << 10
    source = np.ones(size, np.uint8)
    found = {}
    for label, memory in (("pinned", None), ("write combined", Memory(size, WRITE_COMBINED))):
        host = torch.zeros(size, dtype=torch.uint8, pin_memory=True) if memory is None else memory.tensor
        found |= {f"{label}, {name}": way for name, way in ways(source, host).items()}
    print(f"{kilobytes} KB: " + ", ".join(f"{name} {times}" for name, times in race(found).items()), flush=True)


def ways(source: Any, host: torch.Tensor) -> dict[str, Callable[[], float]]:
    """Each takes a step and tells how long the copy on the host took."""
    size = len(source)
    seen, target, some = (
        copy_kernel.seen_by(GPU, host),
        torch.zeros(size, dtype=torch.uint8, device=GPU),
        torch.zeros(64, device=GPU),
    )
    place = host.numpy()
    progress = torch.zeros(1, dtype=torch.int64, pin_memory=True)
    progress_seen, told = copy_kernel.seen_by(GPU, progress), memoryview(progress.numpy())
    words, wide = seen.view(torch.int64), target.view(torch.int64)
    one = captured(lambda: some.add_(1))
    whole = captured(lambda: (copy_kernel.copy(seen, target), some.add_(1)))
    ends = [(first, min(first + PIECE, size)) for first in range(0, size, PIECE)]
    parts = [captured(lambda f=f, e=e: copy_kernel.copy(seen[f:e], target[f:e])) for f, e in ends[:-1]]
    last = captured(lambda: (copy_kernel.copy(seen[ends[-1][0] :], target[ends[-1][0] :]), some.add_(1)))
    told[0] = size
    behind = captured(lambda: (follow[(48,)](words, wide, size // 8, progress_seen, BLOCK=1024), some.add_(1)))
    from msplit.engines.cuda.runtime.async_copy import Sender

    send = Sender(host, target).send

    def at_once() -> float:
        start = time.perf_counter()
        np.copyto(place, source)
        took = time.perf_counter() - start
        whole.start()
        whole.finish()
        return took

    def by_engine() -> float:
        start = time.perf_counter()
        for first, end in ends:
            np.copyto(place[first:end], source[first:end])
            send(first, end)
        took = time.perf_counter() - start
        one.start()
        one.finish()
        return took

    def by_kernels() -> float:
        start = time.perf_counter()
        for (first, end), part in zip(ends, parts, strict=False):
            np.copyto(place[first:end], source[first:end])
            part.start()
        np.copyto(place[ends[-1][0] :], source[ends[-1][0] :])
        took = time.perf_counter() - start
        last.start()
        last.finish()
        return took

    def by_one_that_follows() -> float:
        told[0] = 0
        behind.start()
        start = time.perf_counter()
        for first, end in fourths(ends):
            np.copyto(place[first:end], source[first:end])
            told[0] = end // 8
        took = time.perf_counter() - start
        behind.finish()
        return took

    found = {
        "at once": at_once,
        "pieces by the copy engine": by_engine,
        "pieces by kernels": by_kernels,
        "a kernel that follows": by_one_that_follows,
    }
    for number, (label, way) in enumerate(found.items()):
        source[:] = np.random.default_rng(number).integers(0, 255, size, np.uint8)
        way()
        if not np.array_equal(target.cpu().numpy(), source):
            print(f"  wrong: {label}, {size} B")
    return found


def fourths(ends: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Pieces of a fourth of the size: to tell a kernel of one costs next to nothing."""
    size = ends[-1][1]
    return [(first, min(first + PIECE // 4, size)) for first in range(0, size, PIECE // 4)]


def race(found: Mapping[str, Callable[[], float]], rounds: int = ROUNDS, steps: int = STEPS) -> dict[str, str]:
    """Medians, and of the copies on the host."""
    times: dict[str, list[tuple[float, float]]] = {label: [] for label in found}
    chance = np.random.default_rng(0)
    for _ in range(rounds):
        for label in chance.permutation(list(found)):
            for number in range(steps + 2):
                start = time.perf_counter()
                took = found[label]()
                if number >= 2:
                    times[label].append((time.perf_counter() - start, took))
    return {
        label: " / ".join(f"{value:.1f}" for value in np.median(np.array(values), axis=0) * 1e6)
        for label, values in times.items()
    }


def large(kilobytes: int) -> None:
    """With so many helpers on the host, or without; whole, or piece by piece."""
    size = kilobytes << 10
    source = np.ones(size, np.uint8)
    ahead = staging._AHEAD_BYTES
    staging._AHEAD_BYTES = 0
    given = staging.Inputs({"x": torch.zeros(size, dtype=torch.uint8)}, GPU)
    staging._AHEAD_BYTES = ahead
    some = torch.zeros(64, device=GPU)
    whole, one = captured(lambda: (given.to_device(), some.add_(1))), captured(lambda: some.add_(1))

    def step(fill: Callable[[Any], None], graph: Any, helpers: int | None) -> float:
        kept = host_copy._SHARED_BYTES, host_copy._helpers
        if helpers is not None:
            host_copy._SHARED_BYTES = 0 if helpers else 1 << 40
            host_copy._helpers = lambda size: helpers
        start = time.perf_counter()
        fill({"x": source})
        took = time.perf_counter() - start
        graph.start()
        graph.finish()
        host_copy._SHARED_BYTES, host_copy._helpers = kept
        return took

    found = {
        "one thread, whole": lambda: step(given.fill, whole, 0),
        "one thread, pieces": lambda: step(given.send, one, 0),
        "3 helpers, whole": lambda: step(given.fill, whole, 3),
        **{
            f"{count} helpers, pieces": lambda count=count: step(given.send, one, count)
            for count in (1, 2, 3, 5, 7, 9, 11)
        },
        "as msplit does": lambda: step(given.send, one, None),
    }
    times = race(found, rounds=4, steps=max(3, min(STEPS, (16 << 20) // size * 10)))
    print(f"{kilobytes} KB: " + ", ".join(f"{name} {value}" for name, value in times.items()), flush=True)


if __name__ == "__main__":
    main()
