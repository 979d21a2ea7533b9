"""How many requests a pool answers, in one process: by slots, rows of a request, threads. Figures are those of `requests.md`.

python benchmarks/pools.py GRAPHS [--models ple,mmoe] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import models

import msplit

SECONDS = 1.0
SIZES: dict[str, tuple[int, tuple[int, ...]]] = {"inception_v3": (1, (1, 4, 16))}
"""Of models that are not recommenders: rows of a request, and the batches that are built."""


def requests_of(pool: Any, rows: int, count: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    return [
        {
            name: rng.standard_normal([rows if size is None else size for size in port.shape]).astype(port.dtype)
            for name, port in pool.inputs.items()
        }
        for _ in range(count)
    ]


def flood(pool: Any, feeds: list[Any], window: int, seconds: float = SECONDS) -> tuple[float, float, float]:
    """One thread that keeps so many requests going: requests per second, and median and 99th percentile of µs from request to answer."""
    going: deque[tuple[Any, float]] = deque()
    times = []
    end = time.perf_counter() + seconds
    number = done = 0
    start = time.perf_counter()
    while True:
        now = time.perf_counter()
        if now < end and len(going) < window:
            going.append((pool.submit(feeds[number % len(feeds)]), now))
            number += 1
            continue
        if not going:
            break
        future, since = going.popleft()
        future.result()
        times.append(time.perf_counter() - since)
        done += 1
    took = time.perf_counter() - start
    return done / took, statistics.median(times) * 1e6, float(np.quantile(times, 0.99)) * 1e6


def threads(step: Any, feeds: list[Any], count: int, seconds: float = SECONDS) -> tuple[float, float, float]:
    """So many threads, each with one request at a time."""
    times: list[list[float]] = [[] for _ in range(count)]
    gate = threading.Barrier(count + 1)
    stop = [False]

    def run(mine: list[float], first: int) -> None:
        gate.wait()
        number = first
        while not stop[0]:
            start = time.perf_counter()
            step(feeds[number % len(feeds)])
            mine.append(time.perf_counter() - start)
            number += 1

    every = [threading.Thread(target=run, args=(mine, 7 * number)) for number, mine in enumerate(times)]
    for one in every:
        one.start()
    gate.wait()
    start = time.perf_counter()
    time.sleep(seconds)
    stop[0] = True
    for one in every:
        one.join()
    took = time.perf_counter() - start
    joined = [one for mine in times for one in mine]
    return len(joined) / took, statistics.median(joined) * 1e6, float(np.quantile(joined, 0.99)) * 1e6


def every_answer(built: Path, groups: int, count: int) -> str:
    """So many single rows, no two alike, answered by slots whose memory is poisoned and whose kernels are delayed at random: every answer
    is held against what whole batches give."""
    from msplit.engines.cuda.options import Torture
    from msplit.engines.cuda.stored import builds

    plain, chunk = builds.Opened.slot, 1 << 15

    def tortured(self: Any, *args: Any, **options: Any) -> Any:
        self._options = replace(self._options, torture=Torture(poison=True, delay_cycles=2_000, seed=1))
        return plain(self, *args, **options)

    wrong, worst, answered, seconds = 0, 0.0, 0, 0.0
    with msplit.open(built) as runner:
        builds.Opened.slot = tortured  # type: ignore[method-assign]
        with msplit.pool(built, groups=groups) as pool:
            builds.Opened.slot = plain  # type: ignore[method-assign]
            ((name, port),) = pool.inputs.items()
            step = pool.batches[-1]
            for first in range(0, count, chunk):
                rows = np.random.default_rng(first).standard_normal((chunk, *port.shape[1:])).astype(port.dtype)
                parts = [runner.step({name: rows[at : at + step]}) for at in range(0, chunk, step)]
                expected = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
                start = time.perf_counter()
                going = [pool.submit({name: rows[at : at + 1]}) for at in range(chunk)]
                answers = [one.result() for one in going]
                seconds += time.perf_counter() - start
                for key, value in expected.items():
                    found = np.concatenate([answer[key] for answer in answers])
                    away = np.abs(found - value)
                    worst = max(worst, float(away.max()))
                    wrong += int((away > 2e-2 * np.abs(value) + 2e-3).any(axis=1).sum())
                answered += len(answers)
            steps = pool.stats().steps
    return (
        f"{answered:,} requests with distinct inputs, {groups} slots, poisoned memory, kernels delayed at random: {wrong} wrong,"
        f" largest difference {worst:.1e}; {steps:,} steps, {answered / seconds:,.0f} requests/s"
    )


def open_and_close(built: Path, count: int) -> str:
    """Memory that is left when a pool was opened and closed so often."""
    import psutil
    import torch

    def left() -> tuple[float, float, int]:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        process = psutil.Process()
        return torch.cuda.mem_get_info()[0] / 1e6, process.memory_info().rss / 1e6, process.num_threads()

    for _ in range(20):
        msplit.pool(built, groups=2).close()
    before = left()
    start = time.perf_counter()
    for _ in range(count):
        msplit.pool(built, groups=2).close()
    seconds = time.perf_counter() - start
    after = left()
    return (
        f"{count} opens and closes of 2 slots, {seconds / count * 1e3:.0f} ms each: {before[0] - after[0]:+.1f} MB of the device,"
        f" {after[1] - before[1]:+.1f} MB of the host, {after[2] - before[2]:+d} threads"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", default="ple,mmoe")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--groups", default="1,2,4,8,16")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--every", type=int, default=0, help="requests of which every answer is checked")
    parser.add_argument("--opens", type=int, default=0, help="how often to open and close a pool")
    args = parser.parse_args()
    request = {"engine": "cuda", "device": args.device, "effort": "full" if args.device == "cuda" else "fast"}
    rows_found: list[dict[str, Any]] = []
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        print(text, flush=True)

    def tell(what: str, figures: tuple[float, float, float]) -> None:
        rate, median, high = figures
        rows_found.append({"what": what, "rate": rate, "p50_us": median, "p99_us": high})
        print(f"{what:60} {rate:10,.0f}/s  p50 {median:9,.1f}  p99 {high:9,.1f} µs", flush=True)

    for name in filter(None, args.models.split(",")):
        path = models.fill(args.folder, Path("/tmp/filled"), name, 128)
        built = Path(f"/tmp/{name}.build")
        start = time.perf_counter()
        rows, batches = SIZES.get(name, (128, (1, 16, 64, 128, 512)))
        msplit.build(path, built, **request, batches=batches, force=True)
        say(f"{name}: built in {time.perf_counter() - start:.1f} s")
        with msplit.pool(built, groups=1) as pool:
            whole, single = requests_of(pool, rows, 64), requests_of(pool, 1, 1024)
        with msplit.open(built) as runner:
            for count in (1, 4):
                tell(f"{name} runner, {rows} rows, {count} threads", threads(runner.step, whole, count))
        for groups in map(int, args.groups.split(",")):
            start = time.perf_counter()
            with msplit.pool(built, groups=groups) as pool:
                facts = pool.about.facts
                megabytes = ", ".join(
                    f"{what} {facts[what] / 1e6:.1f}" for what in ("weight_bytes", "arena_bytes", "bytes")
                )
                say(f"{name}: {groups} slots opened in {time.perf_counter() - start:.1f} s; MB: {megabytes}")
                about = f"{name} {groups} slots"
                tell(f"{about}, {rows} rows, 1 thread, step", threads(pool.step, whole, 1))
                for going in (2 * groups, 8 * groups):
                    tell(f"{about}, {rows} rows, {going} going", flood(pool, whole, going))
                for going in (256, 1024, 8192) if rows > 1 else ():
                    tell(f"{about}, 1 row, {going} going", flood(pool, single, going))
                for count in (4, 16):
                    tell(f"{about}, {rows} rows, {count} threads", threads(pool.step, whole, count))
                say(f"{about}: {pool.stats()}")
        if args.every:
            say(f"{name}: {every_answer(built, 8, args.every)}")
    if args.opens:
        small = Path("/tmp/small.build")
        msplit.build(Path("sample_graphs/mmoe_small.pb"), small, **request, batches=(1, 16), force=True)
        say(open_and_close(small, args.opens))
    if args.out:
        (args.out / "requests.json").write_text(
            json.dumps({"rows": rows_found, "said": said, "argv": sys.argv}, indent=1)
        )


if __name__ == "__main__":
    main()
