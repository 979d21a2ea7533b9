"""Processes behind one pool: what a request's trip there and back costs, how many GPUs one thread keeps busy, and what kills do.

    python benchmarks/models.py GRAPHS                       # where TensorFlow is
    python benchmarks/processes.py GRAPHS --out OUT [--gpus 1,2,4] [--models ple:128] [--requests 1000000]
    python benchmarks/processes.py --only wakeups,trip       # needs no GPU and no models

Three parts, each by `--only`:

- *wakeups*: ways to wake another process: a trip there and back, and what telling costs the one who tells.
- *trip*: requests to a model that does nothing, in this process and in others: p50, requests per second, and processor time here.
- *rates*: a model on n GPUs, asked by one thread: a pool in this process on one GPU, and a process for each. Efficiency is over n times the
  first. Answers are looked at in the next part.
- *kills*: so many requests, each with other inputs, while a process is killed every few seconds. Each answer is held against a plain step.

`--device cpu` shows that it works; its times say nothing about a GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import mmap
import multiprocessing
import os
import resource
import signal
import statistics
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import models
from pools import flood

import msplit
from msplit.progress import Progress, silent
from msplit.serving.loadtest.corpus import of_build, of_ports
from msplit.serving.pool import making
from msplit.serving.pool.pool import About, Pool
from msplit.serving.pool.ports import Port, Ports
from msplit.serving.pool.settings import PoolSettings
from msplit.serving.pool.steps import SimulatedSlot, StepSlot

TRIPS = 2000
GROUPS, WINDOW = 4, 4
"""Arenas on each GPU, and requests on their way for each arena."""
DISTINCT = 64
CHUNK = 4096
"""Requests that are compared at once."""


# Wake-ups

_FUTEX = 202
_WAIT, _WAKE = 0, 1
_LIBC = ctypes.CDLL(None, use_errno=True)


Way = tuple[Callable[[], object], Callable[[], object]]
"""Tells, and waits until it is told."""


def _eventfd() -> Way:
    handle = os.eventfd(0)
    return lambda: os.eventfd_write(handle, 1), lambda: os.eventfd_read(handle)


def _pipe() -> Way:
    reads, writes = os.pipe()
    return lambda: os.write(writes, b"."), lambda: os.read(reads, 1)


def _semaphore() -> Way:
    one = multiprocessing.Semaphore(0)
    return one.release, one.acquire


def _futex() -> Way:
    word = ctypes.c_uint32.from_buffer(mmap.mmap(-1, mmap.PAGESIZE))

    def tell() -> None:
        word.value = 1
        _LIBC.syscall(_FUTEX, ctypes.byref(word), _WAKE, 1, None, None, 0)

    def wait() -> None:
        while not word.value:
            _LIBC.syscall(_FUTEX, ctypes.byref(word), _WAIT, 0, None, None, 0)
        word.value = 0

    return tell, wait


def wakeups(args: argparse.Namespace) -> list[dict[str, Any]]:
    """µs from one process to another and back, of each way, and of telling where nobody waits. Ways take turns."""
    del args
    ways = {"eventfd": _eventfd, "pipe": _pipe, "semaphore": _semaphore, "futex": _futex}
    found: dict[str, list[float]] = {name: [] for name in ways}
    telling: dict[str, float] = {}
    for turn in range(3):
        for name, way in ways.items():
            (tell, wait), (back, hear) = way(), way()
            child = os.fork()
            if not child:
                for _ in range(TRIPS):
                    wait()
                    back()
                os._exit(0)
            for _ in range(TRIPS):
                start = time.perf_counter()
                tell()
                hear()
                found[name].append(time.perf_counter() - start)
            os.waitpid(child, 0)
            if not turn:
                start = time.process_time()
                for _ in range(TRIPS):
                    tell()
                telling[name] = (time.process_time() - start) / TRIPS * 1e6
    return [
        {"what": name, "p50_us": statistics.median(times) * 1e6, "tell_us": telling[name]}
        for name, times in found.items()
    ]


# A model that does nothing


def empty(settings: PoolSettings, tell: Progress) -> Pool:
    """A pool whose steps are over at once, for requests of 64 numbers."""
    del tell
    number = np.dtype(np.float32)
    ports = Ports({"x": number}, {batch: {"x": (batch, 64)} for batch in (1, 4, 16, 64)}, ({"x": 1}, {"y": 1}))
    slots = [
        (0, SimulatedSlot(StepSlot({0: lambda feeds: {"y": feeds["x"]}}, ports))) for _ in range(int(settings.groups))
    ]
    return Pool(ports, slots, settings, About("empty", {"y": Port("float32", (None, 64))}, (), (), {}))


def trip(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One request at a time, and many: in this process, and in one and two others."""
    own = importlib.import_module("processes")  # what is sent to a process is found by the module's name
    settings, found = PoolSettings(groups=GROUPS), []
    feeds = [{"x": np.full((1, 64), number, np.float32)} for number in range(DISTINCT)]
    for count in (0, 1, 2):
        places = [f"cpu:{number}" for number in range(count)]
        made = (
            making.make_processes(
                lambda number, own_settings: partial(own.empty, own_settings), places, settings, silent, together=True
            )
            if count
            else empty(settings, silent)
        )
        with made as pool:
            flood(pool, feeds, 64, 0.1)
            times = []
            for number in range(int(TRIPS * min(1.0, args.seconds))):
                start = time.perf_counter()
                pool.step(feeds[number % DISTINCT])
                times.append(time.perf_counter() - start)
            used = _used()
            rate, *_ = flood(pool, feeds, 64, args.seconds)
            per = (_used() - used) / (rate * args.seconds) * 1e6
        what = f"{count} processes" if count else "in this process"
        found.append({"what": what, "p50_us": statistics.median(times) * 1e6, "rate": rate, "processor_us": per})
    return found


def _used() -> float:
    """Processor seconds of this process."""
    now = resource.getrusage(resource.RUSAGE_SELF)
    return now.ru_utime + now.ru_stime


# Models on GPUs


def built(args: argparse.Namespace, item: str) -> tuple[Path, int]:
    """A model's build, and the rows of its requests."""
    name, _, size = item.partition(":")
    path = args.folder / name
    if not path.is_file():
        path = models.fill(args.folder, args.out, name, int(size))
    fast = {"effort": "fast"} if args.device == "cpu" else {}
    made = args.out / f"{name}-{size}.build"
    msplit.build(
        path, made, streams=(args.streams,), engine="cuda", device=args.device, batches=(int(size),), force=True, **fast
    )
    return made, int(size)


def rates(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Requests per second of one thread, the best of three turns."""
    found: dict[tuple[str, str, int], tuple[float, float, float]] = {}
    for item in args.models.split(","):
        path, rows = built(args, item)
        for _ in range(1 if args.seconds < 1 else 3):
            for count in (0, *args.counts):
                gpus = {"devices": tuple(range(count)), "workers": 1} if count else {}
                with msplit.pool(path, engine="cuda", device=args.device, groups=GROUPS, **gpus) as pool:
                    feeds = of_ports(of_build(path), pool.inputs, rows, DISTINCT, 0)
                    flood(pool, feeds, GROUPS * WINDOW, min(0.2, args.seconds))
                    used = _used()
                    one = flood(pool, feeds, GROUPS * WINDOW * max(count, 1), args.seconds)
                    one = (*one, (_used() - used) / (one[0] * args.seconds) * 1e6)
                found[item, "processes" if count else "in this process", count or 1] = max(
                    one, found.get((item, "processes" if count else "in this process", count or 1), one)
                )
    return [
        {
            "what": f"{item}, {how}", "gpus": count, "rate": rate, "p50_us": median, "p99_us": high, "processor_us": used,
            "efficiency": rate / found[item, "in this process", 1][0] / count,
        }
        for (item, how, count), (rate, median, high, used) in found.items()
    ]  # fmt: skip


def kills(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Distinct requests while a process is killed every few seconds: how many were right, wrong, and not answered."""
    path, rows = built(args, args.models.split(",")[0])
    gpus = tuple(range(max(args.counts)))
    done, over, killed = Counter[str](), threading.Event(), list[int]()
    began = time.monotonic()
    with (
        msplit.open(path) as runner,
        msplit.pool(path, engine="cuda", device=args.device, devices=gpus, workers=args.workers, groups=GROUPS) as pool,
    ):

        def kill() -> None:
            while not over.wait(args.every):
                alive = [one.pid for one in pool.processes() if one.pid]
                if alive:
                    killed.append(alive[len(killed) % len(alive)])
                    os.kill(killed[-1], signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        try:
            for first in range(0, args.requests, CHUNK):
                feeds = of_ports(of_build(path), pool.inputs, rows, min(CHUNK, args.requests - first), seed=first)
                going: deque[Any] = deque()
                for one in feeds:
                    going.append((one, pool.submit(one)))
                    if len(going) >= GROUPS * WINDOW * len(pool.processes()):
                        done[_outcome(runner, *going.popleft())] += 1
                for one, answer in going:
                    done[_outcome(runner, one, answer)] += 1
        finally:
            over.set()
            killer.join()
        restarts = sum(one.restarts for one in pool.processes())
    seconds = time.monotonic() - began
    return [
        {
            "what": "kills",
            "requests": args.requests,
            "kills": len(killed),
            "restarts": restarts,
            "seconds": seconds,
            **done,
        }
    ]


def _outcome(runner: Any, feeds: Any, answer: Any) -> str:
    """What became of a request: right, wrong, or the error that it got."""
    try:
        found = answer.result(120)
    except msplit.MsplitError as problem:
        return type(problem).__name__
    expected = runner.step(feeds)
    right = all(np.allclose(found[name], value, rtol=2e-3, atol=2e-3) for name, value in expected.items())
    return "right" if right and found.keys() == expected.keys() else "wrong"


PARTS: dict[str, Callable[[argparse.Namespace], list[dict[str, Any]]]] = {
    "wakeups": wakeups,
    "trip": trip,
    "rates": rates,
    "kills": kills,
}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A part's table."""
    names = list(rows[0])
    lines = [f"| {' | '.join(names)} |", f"| {' | '.join('---' if name == 'what' else '---:' for name in names)} |"]
    for row in rows:
        numbers = (
            f"{value:,.2f}" if isinstance(value, float) and value < 10 else f"{value:,.0f}"
            for value in [*row.values()][1:]
        )
        lines.append(f"| {' | '.join([row['what'], *numbers])} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="models; needed for rates and kills")
    parser.add_argument("--only", help=f"parts, such as {','.join(PARTS)} (default: all for which there is a folder)")
    parser.add_argument("--models", default="ple:128")
    parser.add_argument("--out", type=Path, default=Path("processes-results"))
    parser.add_argument("--gpus", help="how many, such as 1,2,4 (default: 1, 2, 4, 8 as far as there are)")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    parser.add_argument("--requests", type=int, default=1_000_000, help="of the part kills")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two kills")
    parser.add_argument("--workers", type=int, default=1, help="on each GPU, of the part kills")
    args = parser.parse_args()
    chosen = args.only.split(",") if args.only else [*PARTS][: None if args.folder else 2]
    if args.folder is None and not {*chosen} <= {"wakeups", "trip"}:
        parser.error("rates and kills need the folder of models")
    if args.folder is not None:
        import torch

        there = torch.cuda.device_count() if args.device == "cuda" else 2
        asked = {*map(int, args.gpus.split(","))} if args.gpus else {1, 2, 4, 8}
        args.counts = sorted(count for count in asked if count <= there or args.gpus)
    args.out.mkdir(parents=True, exist_ok=True)
    known: dict[str, Any] = {"argv": sys.argv, "device": args.device, "cores": len(os.sched_getaffinity(0))}
    for name in chosen:
        known[name] = PARTS[name](args)
        print(f"\n{name}\n\n{table(known[name])}", flush=True)
        (args.out / "processes.json").write_text(json.dumps(known, indent=1))
    if args.device == "cpu":
        print("\nOf simulated GPUs: these times say nothing about any GPU.")
    if known.get("kills", [{}])[0].get("wrong"):
        sys.exit(1)


if __name__ == "__main__":
    main()
