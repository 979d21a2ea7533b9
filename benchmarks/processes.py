"""Processes behind one pool: how many GPUs one thread keeps busy, what a trip to another process costs, and what kills do.

    python benchmarks/foreign.py GRAPHS ple                                # where TensorFlow is: the model without its weights
    python benchmarks/processes.py GRAPHS --out OUT [--gpus 1,2,4]         # without it, in two minutes
    python benchmarks/processes.py GRAPHS --out OUT --only kills --kills 20 --every 10
    python benchmarks/processes.py --only trip                             # needs no GPU and no model

Parts, chosen by `--only`:

- *rates*: a model asked by one thread, with requests of as many rows as its largest step has, and of single rows, which share steps. In
  turns: a pool whose steps run in this process; pools of one process for each of n GPUs; and n processes with a pool and a caller of their
  own, which is the most that n GPUs can answer. Efficiency is over n times the first. *p50* is that of one request at a time.
- *kills*: requests that are all different, while a process is killed every few seconds. Each answer is held against a plain step.
- *trip*: a model that does nothing, in this process and in others: what a request costs here.

The build is made once and kept in OUT. `--device cpu` shows that it works; its times say nothing about a GPU.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import signal
import statistics
import subprocess
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
"""Slots on each GPU, and full requests on their way for each slot."""
SINGLE = 512
"""Single rows on their way for each GPU."""
DISTINCT = 64


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


# A model on GPUs


def built(args: argparse.Namespace) -> Path:
    """The model's build, made once."""
    name, _, size = args.model.partition(":")
    made: Path = args.out / f"{name}-{size}-{args.device}.build"
    if not made.is_dir():
        path = args.folder / name
        if not path.is_file():
            path = models.fill(args.folder, args.out, name, int(size))
        start = time.perf_counter()
        fast = {"effort": "fast"} if args.device == "cpu" else {}
        batches = tuple(sorted({1, max(int(size) // 8, 1), int(size)}))
        msplit.build(path, made, streams=(args.streams,), engine="cuda", device=args.device, batches=batches, **fast)
        print(f"built in {time.perf_counter() - start:.0f} s", flush=True)
    return made


def opened(args: argparse.Namespace, path: Path, count: int = 0) -> Pool:
    """A pool in this process, or one of a process for each of so many GPUs."""
    gpus = {"devices": tuple(range(count)), "workers": 1} if count else {}
    return msplit.pool(path, engine="cuda", device=args.device, groups=GROUPS, **gpus)


def asked(args: argparse.Namespace, path: Path, pool: Pool, count: int) -> list[tuple[float, ...]]:
    """Of full requests and of single rows: rate, p50 and p99 of many, p50 of one at a time, processor µs of each."""
    size = int(args.model.partition(":")[2])
    found: list[tuple[float, ...]] = []
    for rows, window in ((size, GROUPS * WINDOW * count), (1, SINGLE * count)):
        feeds = of_ports(of_build(path), pool.inputs, rows, DISTINCT, 0)
        flood(pool, feeds, window, min(0.3, args.seconds))
        times = []
        for number in range(TRIPS // 10):
            start = time.perf_counter()
            pool.step(feeds[number % DISTINCT])
            times.append(time.perf_counter() - start)
        used, start = _used(), time.perf_counter()
        rate, median, high = flood(pool, feeds, window, args.seconds)
        spent = (_used() - used) / (rate * (time.perf_counter() - start)) * 1e6
        found.append((rate, median, high, statistics.median(times) * 1e6, spent))
    return found


def beside(args: argparse.Namespace, path: Path, count: int) -> list[tuple[float, ...]]:
    """So many processes at once, each with a pool and a caller of its own: rates in all, the worst times."""
    seen = [one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]
    command = [sys.executable, __file__, str(path), "--worker", "--device", args.device, "--model", args.model]
    workers: list[Any] = []
    try:
        for gpu in range(count):
            own = (seen[gpu] if gpu < len(seen) else str(gpu)) if args.device == "cuda" else ""
            workers.append(
                subprocess.Popen(
                    [*command, "--seconds", str(args.seconds)],
                    env={**os.environ, "CUDA_VISIBLE_DEVICES": own},
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                )
            )  # fmt: skip
        for one in workers:
            if one.stdout.readline() != "ready\n":
                raise RuntimeError("a worker did not get ready: what it says is above")
        for one in workers:
            one.stdin.write("go\n")
            one.stdin.flush()
        told = [json.loads(one.communicate(timeout=60 + 20 * args.seconds)[0]) for one in workers]
    finally:
        for one in workers:
            one.kill()
            one.wait()
    return [
        (sum(one[0] for one in each), *(max(column) for column in [*zip(*each, strict=True)][1:]))
        for each in zip(*told, strict=True)
    ]


def work(args: argparse.Namespace) -> None:
    """One of these processes."""
    with opened(args, args.folder) as pool:
        pool.step(of_ports(of_build(args.folder), pool.inputs, 1, 1, 0)[0])
        print("ready", flush=True)
        sys.stdin.readline()
        print(json.dumps(asked(args, args.folder, pool, 1)), flush=True)


def rates(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The table of rates."""
    path, found = built(args), []
    for count in (0, *args.counts):
        with opened(args, path, count) as pool:
            found.append(
                (
                    "a process for each, one pool" if count else "in this process",
                    count or 1,
                    asked(args, path, pool, count or 1),
                )
            )
    for count in args.counts:
        found.append(("a process for each, on its own", count, beside(args, path, count)))
    first = found[0][2]
    size = args.model.partition(":")[2]
    return [
        {
            "what": f"{rows} rows, {how}" if number == 0 else f"1 row, {how}", "gpus": count, "rate": each[number][0],
            "efficiency": each[number][0] / first[number][0] / count, "p50_us, one": each[number][3],
            "p50_us, many": each[number][1], "p99_us, many": each[number][2], "processor_us": each[number][4],
        }
        for number, rows in enumerate((size, "1")) for how, count, each in found
    ]  # fmt: skip


def kills(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Distinct requests while a process is killed every few seconds: how many were right, wrong, and not answered."""
    path, rows = built(args), int(args.model.partition(":")[2])
    count = max(args.counts)
    done, over, killed = Counter[str](right=0, wrong=0), threading.Event(), list[int]()
    began = time.monotonic()
    with msplit.open(path) as runner, opened(args, path, count) as pool:

        def kill() -> None:
            while len(killed) < args.kills and not over.wait(args.every):
                alive = [one.pid for one in pool.processes() if one.pid]
                if alive:
                    killed.append(alive[len(killed) % len(alive)])
                    os.kill(killed[-1], signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        try:
            seed = 0
            while len(killed) < args.kills or not all(one.pid for one in pool.processes()):
                going: deque[Any] = deque()
                seed += 1
                for one in of_ports(of_build(path), pool.inputs, rows, DISTINCT * 4, seed):
                    going.append((one, pool.submit(one)))
                    if len(going) >= GROUPS * WINDOW * count:
                        done[_outcome(runner, *going.popleft())] += 1
                for one, answer in going:
                    done[_outcome(runner, one, answer)] += 1
        finally:
            over.set()
            killer.join()
        restarts = sum(one.restarts for one in pool.processes())
    seconds = time.monotonic() - began
    return [{"what": "kills", "gpus": count, "kills": len(killed), "restarts": restarts, "seconds": seconds, **done}]


def _outcome(runner: Any, feeds: Any, answer: Any) -> str:
    """Names what became of a request: right, wrong, or the error that it got."""
    try:
        found = answer.result(120)
    except msplit.MsplitError as problem:
        return type(problem).__name__
    expected = runner.step(feeds)
    right = all(np.allclose(found[name], value, rtol=2e-3, atol=2e-3) for name, value in expected.items())
    return "right" if right and found.keys() == expected.keys() else "wrong"


PARTS: dict[str, Callable[[argparse.Namespace], list[dict[str, Any]]]] = {"rates": rates, "kills": kills, "trip": trip}


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
    parser.add_argument("--model", default="ple:128", help="name, or file in the folder, and rows of its largest step")
    parser.add_argument("--out", type=Path, default=Path("processes-results"))
    parser.add_argument("--gpus", help="how many, such as 1,2,4 (default: 1, 2, 4, 8 as far as there are)")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--every", type=float, default=3.0, help="seconds between two kills")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args)
        return
    chosen = args.only.split(",") if args.only else [*PARTS] if args.folder else ["trip"]
    if args.folder is None and {*chosen} != {"trip"}:
        parser.error("rates and kills need the folder of models")
    if args.folder is not None:
        import torch

        there = torch.cuda.device_count() if args.device == "cuda" else 2
        asked_for = {*map(int, args.gpus.split(","))} if args.gpus else {1, 2, 4, 8}
        args.counts = sorted(count for count in asked_for if count <= there or args.gpus)
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
