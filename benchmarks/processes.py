"""Processes behind one pool, asked from other processes: requests per second on 1, 2 and 4 GPUs, beside one process in itself, and kills.

    python benchmarks/foreign.py GRAPHS ple                                # where TensorFlow is: the model without its weights
    python benchmarks/processes.py GRAPHS --out OUT [--gpus 1,2,4]         # without it: two minutes, and one more to build the model
    python benchmarks/processes.py GRAPHS --out OUT --only kills --kills 50
    python benchmarks/processes.py GRAPHS --out OUT --soak 1000000 --kill-every 10    # an hour on simulated GPUs
    python benchmarks/processes.py --only trip                             # needs no GPU and no model

Parts, chosen by `--only`:

- *rates*: a model asked with requests of as many rows as its largest step has, of single rows, which share steps, and one at a time: by a
  thread of the process in which the steps run; then, with a process for each of n GPUs, by the process that has the pool, and by some
  that it was sent to, so many for each GPU. Efficiency is over n times the first. Every eighth answer is held against an earlier one.
- *kills*: requests that are all different, while a process is killed as soon as all are there. Each answer is held against a plain step.
  Clients flood the pool meanwhile.
- *soak*: so many requests, by `--soak`, in all, no two of them alike, from this process and from others, while every so many seconds a
  process is killed. A request is a choice of rows whose answers are known, so that each answer is looked at; a client that gets an error
  tries once more. Memory may not grow.
- *trip*: a model that does nothing, in this process and in others: what a request costs here.

The table comes last. The build is made once and kept in OUT. `--device cpu` shows that it works; its times say nothing about a GPU.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

import msplit
from msplit.progress import Progress, silent
from msplit.serving.loadtest.corpus import of_build, of_ports
from msplit.serving.pool import making
from msplit.serving.pool.pool import About, Pool
from msplit.serving.pool.ports import Port, Ports
from msplit.serving.pool.settings import PoolSettings
from msplit.serving.pool.slots import StepSlot

GROUPS, WINDOW = 4, 4
"""Slots on each GPU, and full requests on their way for each slot."""
SINGLE = 512
"""Single rows on their way for each GPU."""
DISTINCT = 64
ONES = 300
"""Requests of one client that has one at a time."""


def used() -> float:
    """Processor seconds of this process."""
    now = resource.getrusage(resource.RUSAGE_SELF)
    return now.ru_utime + now.ru_stime


def flooded(
    pool: Pool, feeds: Sequence[Any], window: int, seconds: float, expected: Sequence[Any] | None = None
) -> dict[str, float]:
    """Keeps so many requests on their way. Tells requests per second, p50 and p99 in µs, processor µs of each here, and how many answers
    are wrong, and lost with an error."""
    going: deque[tuple[int, float, Any]] = deque()
    times, found = list[float](), Counter[str](wrong=0, lost=0)
    before, start, number = used(), time.perf_counter(), 0
    while (now := time.perf_counter()) < start + seconds or going:
        if now < start + seconds and len(going) < window:
            going.append((number % len(feeds), now, pool.submit(feeds[number % len(feeds)])))
            number += 1
            continue
        which, since, answer = going.popleft()
        try:
            outputs = answer.result(60)
        except msplit.MsplitError:
            found["lost"] += 1
            continue
        times.append(time.perf_counter() - since)
        if expected is not None and not len(times) % 8:  # to compare takes longer than to ask
            found["wrong"] += not same(outputs, expected[which])
    took = time.perf_counter() - start
    p50, p99 = np.quantile(times, (0.5, 0.99)) * 1e6 if times else (0.0, 0.0)
    return {
        "rate": len(times) / took,
        "p50": p50,
        "p99": p99,
        "used": (used() - before) / max(number, 1) * 1e6,
        **found,
    }


def one_by_one(pool: Pool, feeds: Sequence[Any], count: int = ONES) -> float:
    """p50 in µs of a client that has one request at a time."""
    times = []
    for number in range(count):
        start = time.perf_counter()
        pool.step(feeds[number % len(feeds)])
        times.append(time.perf_counter() - start)
    return float(np.median(times)) * 1e6


def same(outputs: Any, expected: Any) -> bool:
    """True where an answer is that of its request, but for what other kernels and other rows of a step make of it."""
    return outputs.keys() == expected.keys() and all(
        np.allclose(outputs[name], value, rtol=2e-3, atol=2e-3) for name, value in expected.items()
    )


# Requests that are choices of rows whose answers are known

ROWS = 256
"""Most rows to choose from. The first rows of a request spell its number, so that no two are alike."""


def known_rows(path: Path, pool: Pool) -> dict[str, Any]:
    """Rows of a model and their answers, by name: stacked, or, where rows share it, as it is. And the names of what is stacked."""
    ports = {**pool.inputs, **pool.outputs}
    rowed = {name for name, port in ports.items() if port.shape[:1] == (None,)}
    drawn = of_ports(of_build(path), pool.inputs, 1, ROWS, 1)
    found = [*{tuple(value.tobytes() for name, value in one.items() if name in rowed): one for one in drawn}.values()]
    shared = {name: value for name, value in found[0].items() if name not in rowed}
    answers = [pool.step({**one, **shared}) for one in found]
    if len({tuple(value.tobytes() for value in one.values()) for one in answers}) < 0.9 * len(found):
        raise SystemExit("rows have the same answers, so that a wrong one could not be told")

    def stacked(every: Sequence[Any]) -> dict[str, Any]:
        return {
            name: np.stack([one[name] for one in every]) if name in rowed else value for name, value in every[0].items()
        }

    return {"count": len(found), "rowed": rowed, "inputs": stacked(found), "answers": stacked(answers)}


def chosen_rows(known: dict[str, Any], number: int, digits: int, most: int, rng: Any) -> tuple[Any, Any]:
    """Request of a number, of up to so many rows, and its answer."""
    count = known["count"]
    rows = rng.integers(0, count, int(rng.integers(digits, most + 1)))
    rows[:digits] = [number // count**digit % count for digit in range(digits)]
    inputs, answers = (
        {name: np.concatenate(value[rows]) if name in known["rowed"] else value for name, value in known[kind].items()}
        for kind in ("inputs", "answers")
    )
    return inputs, answers


def soaked(
    pool: Pool, path: str, first: int, count: int, digits: int, most: int, window: int, end: float
) -> dict[str, int]:
    """Asks so many requests, so many at a time. Tells how many were right, wrong, without an answer, and which errors there were."""
    known, rng = pickle.loads(Path(path).read_bytes()), np.random.default_rng(first)
    going: deque[tuple[Any, Any, Any]] = deque()
    found = Counter[str]()

    def over() -> None:
        feeds, expected, answer = going.popleft()
        for again in (False, True):
            try:
                outputs = (pool.submit(feeds) if again else answer).result(120)
            except TimeoutError:
                found["without an answer"] += 1
                return
            except msplit.MsplitError as problem:
                found[f"{type(problem).__name__}{', again' if again else ''}"] += 1
                continue
            found["right" if same(outputs, expected) else "wrong"] += 1
            return

    for number in range(first, first + count):
        if time.monotonic() > end:
            break
        found["requests"] += 1
        feeds, expected = chosen_rows(known, number, digits, most, rng)
        try:
            going.append((feeds, expected, pool.submit(feeds)))
        except msplit.MsplitError as problem:
            found[f"{type(problem).__name__}, not taken"] += 1
        if len(going) >= window:
            over()
    while going:
        over()
    return found


# Clients: processes that the pool is sent to


def client(path: Path) -> None:
    """One of them: does what each line of its input says, and answers with a line."""
    with path.open("rb") as file:
        feeds = pickle.load(file)
    pool, expected = None, {}
    print("ready", flush=True)
    for line in sys.stdin:
        what, *values = json.loads(line)
        reply: Any = None
        if what == "attach":
            pool = pickle.loads(bytes.fromhex(values[0]))
            expected = {kind: [pool.step(one) for one in each] for kind, each in feeds.items()}
        elif what == "leave":
            pool, expected = pool.close(), {}
        elif what == "flood":
            kind, window, seconds = values
            reply = flooded(pool, feeds[kind], window, seconds, expected[kind])
        elif what == "soak":
            reply = soaked(pool, *values)
        elif what == "one":
            reply = one_by_one(pool, feeds[values[0]])
        print(json.dumps(reply), flush=True)


class Clients:
    """So many of them."""

    def __init__(self, path: Path, count: int) -> None:
        command = [sys.executable, __file__, str(path), "--client"]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.every = [
            subprocess.Popen(command, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, **pipes) for _ in range(count)
        ]
        for one in self.every:
            if one.stdout.readline() != "ready\n":
                raise RuntimeError("a client did not get ready: what it says is above")

    def ask(self, number: int, *what: Any) -> Callable[[], Any]:
        """Has one of them do something. Returns what gives its answer."""
        one = self.every[number]
        one.stdin.write(json.dumps(what) + "\n")
        one.stdin.flush()
        return lambda: json.loads(one.stdout.readline())

    def tell(self, count: int, *what: Any) -> Callable[[], list[Any]]:
        """Has the first ones do something at once. Returns what gives their answers."""
        asked = [self.ask(number, *what) for number in range(count)]
        return lambda: [one() for one in asked]

    def close(self) -> None:
        for one in self.every:
            one.stdin.close()
        for one in self.every:
            one.wait(20)


# A model on GPUs


def built(args: argparse.Namespace) -> Path:
    """The model's build, made once."""
    name, _, size = args.model.partition(":")
    made: Path = args.out / f"{name}-{size}-{args.device}.build"
    if not made.is_dir():
        path = args.folder / name
        if not path.is_file():
            import models

            path = models.fill(args.folder, args.out, name, int(size))
        start = time.perf_counter()
        fast = {"effort": "fast"} if args.device == "cpu" else {}
        batches = tuple(sorted({1, max(int(size) // 8, 1), int(size)}))
        msplit.build(path, made, streams=(args.streams,), engine="cuda", device=args.device, batches=batches, **fast)
        print(f"built in {time.perf_counter() - start:.0f} s", flush=True)
    return made


def opened(args: argparse.Namespace, path: Path, count: int = 0) -> Pool:
    """A pool in this process, or one of a process for each of so many GPUs."""
    start = time.perf_counter()
    gpus = {"devices": tuple(range(count)), "workers": 1} if count else {}
    pool = msplit.pool(path, engine="cuda", device=args.device, groups=GROUPS, **gpus)
    print(f"{count or 'no'} processes ready in {time.perf_counter() - start:.1f} s", flush=True)
    return pool


@contextmanager
def prepared(args: argparse.Namespace) -> Iterator[tuple[Path, Clients]]:
    """The build, and clients that have their requests, which are the same for all."""
    path = built(args)
    with opened(args, path) as pool:
        size, file = int(args.model.partition(":")[2]), args.out / "requests.pickle"
        made = {
            kind: of_ports(of_build(path), pool.inputs, rows, DISTINCT, 0)
            for kind, rows in (("full", size), ("row", 1))
        }
        file.write_bytes(pickle.dumps(made))
        if not args.soak:
            args.alone = measured(args, "in this process", 1, lambda kind, window: [flooded(pool, made[kind], window, args.seconds)],
                                  lambda kind: one_by_one(pool, made[kind]))  # fmt: skip
    clients = Clients(file, args.clients * max(args.counts))
    try:
        yield path, clients
    finally:
        clients.close()


def measured(
    args: argparse.Namespace, what: str, gpus: int, flood: Callable[[str, int], list[Any]], one: Callable[[str], float]
) -> dict[str, Any]:
    """A row of the table."""
    found: dict[str, Any] = {"what": what, "GPUs": gpus}
    for kind, label, window in (
        ("full", f"{args.model.partition(':')[2]} rows", GROUPS * WINDOW),
        ("row", "1 row", SINGLE),
    ):
        p50, told = one(kind), flood(kind, window)
        rate = sum(each["rate"] for each in told)
        alone = getattr(args, "alone", None)
        found |= {
            f"{label}: requests/s": rate,
            f"{label}: efficiency": rate / (gpus * (alone[f"{label}: requests/s"] if alone else rate)),
            f"{label}: p50 of one, µs": p50,
            f"{label}: p99 of many": max(each["p99"] for each in told),
            f"{label}: processor of a client": max(each["used"] for each in told),
        }
        found["wrong"] = found.get("wrong", 0) + sum(each["wrong"] + each["lost"] for each in told)
    print(found, flush=True)
    return found


def rates(args: argparse.Namespace, path: Path, clients: Clients) -> list[dict[str, Any]]:
    """Rows of the table."""
    rows = [args.alone]
    made = pickle.loads((args.out / "requests.pickle").read_bytes())
    for count in args.counts:
        with opened(args, path, count) as pool:
            sent = pickle.dumps(pool).hex()
            for kind in made:
                flooded(pool, made[kind], GROUPS * WINDOW * count, 0.2)  # graphs and memory are warm from here on
            rows.append(
                measured(args, "by the process that has the pool", count,
                         lambda kind, window, count=count: [flooded(pool, made[kind], window * count, args.seconds)],
                         lambda kind: one_by_one(pool, made[kind]))
            )  # fmt: skip
            for each in sorted({1, args.clients}):
                most = each * count
                clients.tell(most, "attach", sent)()
                rows.append(
                    measured(args, f"by {each} other process{'es' if each > 1 else ''} for each GPU", count,
                             partial(_flood, clients, most, each, args.seconds),
                             lambda kind: clients.tell(1, "one", kind)()[0])
                )  # fmt: skip
                clients.tell(most, "leave")()
    return rows


def _flood(clients: Clients, most: int, each: int, seconds: float, kind: str, window: int) -> list[Any]:
    return clients.tell(most, "flood", kind, -(-window // each), seconds)()


def kills(args: argparse.Namespace, path: Path, clients: Clients) -> list[dict[str, Any]]:
    """Distinct requests while processes are killed: how many were right, wrong, and not answered."""
    size, count = int(args.model.partition(":")[2]), max(args.counts)
    done, over, killed = Counter[str](right=0, wrong=0), threading.Event(), list[int]()
    began = time.monotonic()
    with msplit.open(path) as runner, opened(args, path, count) as pool:
        clients.tell(count, "attach", pickle.dumps(pool).hex())()

        def kill() -> None:
            while len(killed) < args.kills and time.monotonic() < began + args.limit and not over.wait(args.every):
                alive = [one.pid for one in pool.processes()]
                if any(alive):  # as soon as one is there, so that at times none is
                    alive = [pid for pid in alive if pid]
                    killed.append(alive[len(killed) % len(alive)])
                    os.kill(killed[-1], signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        told = clients.tell(count, "flood", "full", GROUPS, args.every * 4)
        try:
            seed, base = 0, of_build(path)
            while killer.is_alive() or not all(one.pid for one in pool.processes()):
                going: deque[Any] = deque()
                seed += 1
                for one in of_ports(base, pool.inputs, size, DISTINCT, seed):
                    going.append((one, pool.submit(one)))
                    if len(going) >= GROUPS * count:
                        done[_outcome(runner, *going.popleft())] += 1
                for one, answer in going:
                    done[_outcome(runner, one, answer)] += 1
        finally:
            over.set()
            killer.join()
            theirs = told()
            clients.tell(count, "leave")()
        restarts = sum(one.restarts for one in pool.processes())
    done["wrong"] += sum(one["wrong"] for one in theirs)
    lost = sum(one["lost"] for one in theirs)
    seconds = time.monotonic() - began
    return [
        {
            "what": "kills",
            "GPUs": count,
            "kills": len(killed),
            "restarts": restarts,
            "seconds": seconds,
            "lost of clients": lost,
            **done,
        }
    ]


def pss(pids: Sequence[int]) -> float:
    """MB of memory of processes; what they share counts in parts."""
    total = 0
    for pid in pids:
        with suppress(OSError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1e3


def soak(args: argparse.Namespace, path: Path, clients: Clients) -> list[dict[str, Any]]:
    """Requests by the hundred thousand while processes are killed: what became of them, and of memory."""
    size, count, file = int(args.model.partition(":")[2]), max(args.counts), args.out / "rows.pickle"
    asking = 1 + args.clients * count
    each, over, killed, memory = -(-args.soak // asking), threading.Event(), list[int](), list[float]()
    with opened(args, path, count) as pool:
        known = known_rows(path, pool)
        digits = next((digit for digit in range(1, size + 1) if known["count"] ** digit >= asking * each), 0)
        if not digits:
            raise SystemExit(f"{known['count']} rows make fewer than {asking * each:,} requests of up to {size}")
        file.write_bytes(pickle.dumps(known))
        clients.tell(asking - 1, "attach", pickle.dumps(pool).hex())()
        began = time.monotonic()
        end = began + args.soak_seconds if args.soak_seconds else began + 1e6

        def kill() -> None:
            due = began + args.kill_every
            while not over.wait(0.5):
                alive = [one.pid for one in pool.processes() if one.pid]
                memory.append(pss([os.getpid(), *alive]))
                if time.monotonic() >= due and alive:
                    killed.append(alive[len(killed) % len(alive)])
                    os.kill(killed[-1], signal.SIGKILL)
                    due += args.kill_every

        killer = threading.Thread(target=kill)
        killer.start()
        try:
            waiting = [
                clients.ask(number, "soak", str(file), (number + 1) * each, each, digits, size, GROUPS, end)
                for number in range(asking - 1)
            ]
            done = Counter(soaked(pool, str(file), 0, each, digits, size, GROUPS, end))
            for one in waiting:
                done.update(one())
        finally:
            over.set()
            killer.join()
        seconds, restarts = time.monotonic() - began, sum(one.restarts for one in pool.processes())
        clients.tell(asking - 1, "leave")()
    third = len(memory) // 3
    before, after = (min(part, default=0.0) for part in (memory[third : 2 * third], memory[2 * third :]))
    row = {
        "what": "soak",
        "GPUs": count,
        "clients": asking,
        "kills": len(killed),
        "restarts": restarts,
        "seconds": seconds,
    }
    row |= {"MB": before, "MB at the end": after, "requests": 0, "right": 0, "without an answer": 0, "wrong": 0, **done}
    twice = sum(count for name, count in done.items() if name.endswith((", again", "not taken")))
    lost = row["requests"] - done["right"] - done["wrong"] - done["without an answer"]
    row["failed"] = bool(
        done["wrong"] or done["without an answer"] or lost != twice or (third > 20 and after > 1.05 * before + 10)
    )
    return [row]


def _outcome(runner: Any, feeds: Any, answer: Any) -> str:
    """Names what became of a request: right, wrong, or the error that it got."""
    try:
        found = answer.result(120)
    except msplit.MsplitError as problem:
        return type(problem).__name__
    return "right" if same(found, runner.step(feeds)) else "wrong"


# A model that does nothing


def empty(width: int, settings: PoolSettings, tell: Progress) -> Pool:
    """A pool whose steps are over at once."""
    del tell
    ports = Ports(
        {"x": np.dtype(np.float32)}, {rows: {"x": (rows, width)} for rows in (1, 16, 128)}, ({"x": 1}, {"y": 1})
    )
    slots = [
        (0, StepSlot({0: lambda feeds: {"y": feeds["x"][:, :4].copy()}}, ports)) for _ in range(int(settings.groups))
    ]
    return Pool(ports, slots, settings, About("empty", {"y": Port("float32", (None, 4))}, (), (), {}))


def _makes(make: Any, number: int, settings: PoolSettings) -> Any:
    del number
    return partial(make, settings)


def trip(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One request at a time, and many: in this process, and in one and two others. The least of many times: cores may have other work."""
    own = importlib.import_module("processes")  # what is sent to a process is found by the module's name
    settings, rows = PoolSettings(groups=GROUPS), list[dict[str, Any]]()
    for width, size in ((64, 1), (499, 128)):
        feeds = [{"x": np.full((size, width), number, np.float32)} for number in range(DISTINCT)]
        for count in (0, 1, 2):
            make = partial(own.empty, width)
            places = [f"cpu:{number}" for number in range(count)]
            with (
                making.make_processes(partial(_makes, make), places, settings, silent, together=True)
                if count
                else empty(width, settings, silent)
            ) as pool:
                expected = [pool.step(one) for one in feeds]
                times = sorted(one_by_one(pool, feeds, 20) for _ in range(100))
                told = [flooded(pool, feeds, 32 if size > 1 else 256, args.seconds / 4, expected) for _ in range(4)]
            rows.append(
                {
                    "what": f"{size} rows of {width}, {f'{count} processes' if count else 'in this process'}",
                    "one, µs": times[0], "p50 of one, µs": times[50], "processor of a client, µs": min(one["used"] for one in told),
                    "requests/s": max(one["rate"] for one in told), "wrong": sum(one["wrong"] for one in told),
                }
            )  # fmt: skip
    return rows


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
    parser.add_argument("--only", help="parts, such as rates,kills (default: all for which there is a folder)")
    parser.add_argument("--model", default="ple:128", help="name, or file in the folder, and rows of its largest step")
    parser.add_argument("--out", type=Path, default=Path("processes-results"))
    parser.add_argument("--gpus", help="how many, such as 1,2,4 (default: 1, 2, 4 as far as there are)")
    parser.add_argument("--clients", type=int, default=3, help="processes that ask, for each GPU")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--every", type=float, default=1.0, help="seconds from one kill to the next, at least")
    parser.add_argument("--limit", type=float, default=45.0, help="seconds after which none is killed any more")
    parser.add_argument("--soak", type=int, default=0, help="so many requests in all; nothing else is measured then")
    parser.add_argument(
        "--soak-seconds", type=float, default=0.0, help="seconds after which a soak asks no more; 0: any"
    )
    parser.add_argument("--kill-every", type=float, default=10.0, help="of a soak: seconds from one kill to the next")
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client:
        client(args.folder)
        return
    chosen = (
        args.only.split(",")
        if args.only
        else ["soak"]
        if args.soak
        else ["kills", "rates"]
        if args.folder
        else ["trip"]
    )
    if args.folder is None and {*chosen} != {"trip"}:
        parser.error("rates and kills need the folder of models")
    args.out.mkdir(parents=True, exist_ok=True)
    known: dict[str, Any] = {"argv": sys.argv, "device": args.device, "cores": len(os.sched_getaffinity(0))}
    if "trip" in chosen:
        known["trip"] = trip(args)
    if args.folder is not None:
        import torch

        there = torch.cuda.device_count() if args.device == "cuda" else 2
        asked_for = {*map(int, args.gpus.split(","))} if args.gpus else {1, 2, 4}
        args.counts = sorted(count for count in asked_for if count <= there or args.gpus)
        with prepared(args) as (path, clients):
            for name, part in (("kills", kills), ("soak", soak), ("rates", rates)):
                if name in chosen:
                    start = time.perf_counter()
                    known[name] = part(args, path, clients)
                    print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
    (args.out / "processes.json").write_text(json.dumps(known, indent=1))
    for name in ("trip", "kills", "soak", "rates"):
        if name in known:
            print(f"\n{name}\n\n{table(known[name])}", flush=True)
    if args.device == "cpu":
        print("\nOf simulated GPUs: these times say nothing about any GPU.")
    if any(row.get("wrong") or row.get("failed") for name in ("kills", "soak", "rates") for row in known.get(name, ())):
        sys.exit(1)


if __name__ == "__main__":
    main()
