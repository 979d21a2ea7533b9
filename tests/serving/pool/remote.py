"""Pools of processes that start in half a second: what a step does is said by the values of its requests."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from msplit.errors import DeviceLost, EngineError, InvalidInput
from msplit.progress import Progress, silent
from msplit.serving.pool import making
from msplit.serving.pool.pool import About, Pool
from msplit.serving.pool.ports import Port, Ports
from msplit.serving.pool.settings import PoolSettings
from msplit.serving.pool.slots import SimulatedSlot, StepSlot
from tests.serving.pool.scripted import placed

FLOAT, SOON = np.dtype(np.float64), 20.0

POISON, DEADLY, LOST = -64.0, -65.0, -66.0
"""Values of a request whose step fails, ends its process, or loses its GPU."""
SLOW = 1e6
"""A step with a value above takes so many seconds as the value is above."""


class PlacedSlot(SimulatedSlot):
    """Leaves outputs where a client reads them, if they fit there."""

    def outputs(self, into: Any = None) -> dict[str, Any]:
        """Outputs of the step."""
        return placed(super().outputs(), into)


def step(feeds: Any) -> dict[str, Any]:
    """3 x + k of each row, and 2 k."""
    x, k = feeds["x"], feeds["k"]
    if (x == POISON).any():
        raise InvalidInput("poison", where="x", fix="give another", details=["of many"])
    if (x == LOST).any():
        raise DeviceLost("CUDA error: an illegal address")
    if (x == DEADLY).any():
        os.kill(os.getpid(), signal.SIGKILL)
    if x.max() >= SLOW:
        time.sleep(x.max() - SLOW)
    return {"y": 3 * x + k, "twice": 2 * k}


def made(folder: str, threads: int, settings: PoolSettings, tell: Progress) -> Pool:
    """The pool of one process. In the folder, a file named fail has it fail, and die has it end."""
    tell("making arenas", 0.5)
    if Path(folder, "fail").exists():
        raise EngineError("it fails", where="here", fix="mend it")
    if Path(folder, "die").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    shapes = {batch: {"x": (batch, 2), "k": ()} for batch in (1, 4)}
    counts = ({"x": 1, "k": 0}, {"y": 1, "twice": 0})
    ports = Ports({"x": FLOAT, "k": FLOAT}, shapes, counts, max_rows=settings.max_rows)
    groups = int(settings.groups)
    slots = [(n * settings.priorities // groups, StepSlot({0: step}, ports)) for n in range(groups)]
    outputs = {"y": Port("float64", (None, 2)), "twice": Port("float64", ())}
    ready = [(level, slot if threads else PlacedSlot(slot)) for level, slot in slots]
    return Pool(ports, ready, settings, About("by value", outputs, (), (), {"bytes": 5}), threads=threads)


class Version:
    """What the steps of a process multiply by: they read it when they begin and when they end.

    In the folder, a file named after a moment (prepare, take over) ends the process with that number then; it is taken away before.
    """

    def __init__(self, folder: Path, number: int) -> None:
        self.now, self._folder, self._number, self.bytes = 1.0, folder, number, 8

    def step(self, feeds: Any) -> dict[str, Any]:
        began = self.now
        time.sleep(2e-4)
        return {"y": feeds["x"] * 0 + np.array([began, self.now]), "twice": np.array(float(os.getpid()))}

    def renews(self, source: Any, rows: Any) -> tuple[Any, tuple[()], Any]:
        if isinstance(source, str):
            source = {"v": float(Path(source).read_text())}
        if (rows or {}).get("v"):
            source = {"v": rows["v"][1][-1]}
        if source["v"] < (0 if self._number else -1):
            raise EngineError("it gives other outputs", fix="give right ones", details=["of many"])
        self._end("prepare")
        time.sleep(5e-3 * self._number)
        self._wanted = float(source["v"])
        return self, (), lambda: None

    def take_over(self, agree: Any) -> None:
        agree()
        self._end("take over")
        time.sleep(1e-3 * self._number)
        self.now = self._wanted

    def _end(self, moment: str) -> None:
        file = self._folder / moment
        with suppress(FileNotFoundError):  # another process has taken it away
            if int(file.read_text() or -1) == self._number:
                file.unlink()
                os.kill(os.getpid(), signal.SIGKILL)


def versioned(folder: str, number: int, threads: int, settings: PoolSettings, tell: Progress) -> Pool:
    """The pool of one process whose values can be changed."""
    one = Version(Path(folder), number)
    ports = Ports({"x": FLOAT}, {n: {"x": (n, 2)} for n in (1, 4)}, ({"x": 1}, {"y": 1, "twice": 0}), max_rows=1000)
    slots = [StepSlot({0: one.step}, ports) for _ in range(int(settings.groups))]
    ready = [(0, slot if threads else PlacedSlot(slot)) for slot in slots]
    outputs = {"y": Port("float64", (None, 2)), "twice": Port("float64", ())}
    return Pool(ports, ready, settings, About("versions", outputs, (), (), {}), threads=threads, renews=one.renews)


def started(
    count: int = 2, folder: str | Path = "/", threads: int = 0, versions: bool = False, **settings: Any
) -> Pool:
    """A pool of so many processes."""

    def of(number: int, own: PoolSettings) -> Callable[[Progress], Pool]:
        return (
            partial(versioned, str(folder), number, threads, own)
            if versions
            else partial(made, str(folder), threads, own)
        )

    chosen = PoolSettings(**{"groups": 1, **settings})
    return making.make_processes(of, [f"cpu:{number}" for number in range(count)], chosen, silent, together=True)


def shared() -> set[str]:
    """What has a name in the memory of all processes."""
    return {path.name for path in Path("/dev/shm").iterdir()}


def held() -> list[str]:
    """Descriptors that a pool of processes has."""
    links = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/self/fd/{number}"))
    return sorted(link for link in links if any(kind in link for kind in ("msplit", "eventfd", "pidfd")))


@contextmanager
def opened(*args: Any, **options: Any) -> Iterator[Pool]:
    """A pool of processes. In the end none is there any more, nor anything of theirs, and all adds up."""
    before, handles = shared(), held()
    pool = started(*args, **options)
    try:
        yield pool
    finally:
        pids = [one.pid for one in pool.processes() if one.pid]
        pool.close()
    stats = pool.stats()
    assert (stats.waiting, stats.in_flight) == (0, 0)
    assert stats.requests == stats.answered + stats.failed + stats.timed_out + stats.cancelled
    assert not any(alive(pid) for pid in pids)
    assert shared() == before
    more = Counter(held()) - Counter(handles)  # what earlier tests have left may have gone meanwhile
    assert not more


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def kill(pool: Pool, number: int = 0) -> int:
    """Ends a process of a pool as the system does where memory is short. Returns its number."""
    pid = pool.processes()[number].pid
    assert pid
    with suppress(ProcessLookupError):  # it has ended by itself
        os.kill(pid, signal.SIGKILL)
    return pid


def resident() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def whole(pool: Pool) -> bool:
    """Whether all processes are there."""
    pool.drive()
    return all(one.pid and alive(one.pid) for one in pool.processes())


def wait(true: Callable[[], object]) -> None:
    end = time.perf_counter() + SOON
    while not true():
        assert time.perf_counter() < end, "it never came"
        time.sleep(5e-3)
