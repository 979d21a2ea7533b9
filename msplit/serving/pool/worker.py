"""Process of a pool: has a GPU, or a part of one, with a pool of its own, and answers what its caller writes into their shared memory.

It ends when the process that started it does, however that ends, or when its GPU fails, so that another one takes its place.
"""

from __future__ import annotations

import gc
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from threading import get_ident
from typing import Any

from msplit.errors import DeviceLost, EngineError
from msplit.progress import Progress
from msplit.serving.pool.pool import About, Pool
from msplit.serving.pool.ports import Ports
from msplit.serving.pool.ring import DROPPED, ERROR, OUTPUTS, Memory, MemorySizes, bytes_of, packed_error
from msplit.serving.pool.settings import PoolSettings

_SPIN = 1e-3
"""Seconds for which it looks for what is over without sleeping, where there is a core for it. Then it sleeps `_NAP` between two looks."""
_NAP = 50e-6
_WATCH = 1.0
"""Seconds between two looks whether the process that started it is there, in case that another one holds the end of its pipe."""
_GRACE = 0.8
"""Seconds to close the pool in."""
_FEWEST, _MOST = 16, 1024
"""Slots of the memory."""
_ROOM = 1 << 30
"""Bytes that slots may take, where more than `_FEWEST` are."""


@dataclass(frozen=True, eq=False)
class Start:
    """What a process is to do.

    Attributes:
        make: Makes its pool; called with a function that is told of progress.
        handle: Descriptor of the memory's file, which has no size yet.
        bells: Descriptors of the eventfds of requests and of answers.
        spins: True where there is a core for it to look for what is over without sleeping.
    """

    make: Callable[[Progress], Pool]
    handle: int
    bells: tuple[int, int]
    spins: bool


@dataclass(frozen=True, eq=False)
class Hello:
    """What a process says when it is ready: the description of its pool, and the sizes of the memory."""

    ports: Ports
    about: About
    settings: PoolSettings
    sizes: MemorySizes


def sizes_of(ports: Ports, about: About, settings: PoolSettings) -> MemorySizes:
    """Sizes of the memory: slots for all rows of two steps in each group, so that steps that are full wait behind those that run."""
    rows = ports.batches[-1] if ports.batches else 0
    inputs, outputs = ports.input_layout(rows), ports.output_layout(about.outputs, rows)
    sizes = [0 if layout is None else bytes_of(layout) for layout in (inputs, outputs)]
    wanted = 2 * int(settings.groups) * (rows if ports.joins else 1)
    slots = max(min(wanted, _MOST, _ROOM // max(sum(sizes), 1)), _FEWEST, 2 * settings.priorities)
    return MemorySizes(slots, sizes[0], sizes[1], inputs is None)


def memory_of(hello: Hello, handle: int, bells: tuple[int, int]) -> Memory:
    """The memory that a process and its caller share, as either sees it."""
    ports, outputs = hello.ports, hello.about.outputs
    return Memory(handle, bells, hello.sizes, ports.input_layout, partial(ports.output_layout, outputs))


class _Serving:
    """The main loop, and what its callbacks share."""

    def __init__(self, pool: Pool, memory: Memory, bell: int, stop: int, spins: bool) -> None:
        self.pool, self.memory = pool, memory
        self._bell, self._stop, self._spins = bell, stop, spins
        self._main, self._lock = get_ident(), threading.Lock()
        self._answered = False
        self.lost: DeviceLost | None = None

    def run(self) -> None:
        """Answers requests until it is to stop, or the GPU fails."""
        pool, requests, polls = self.pool, self.memory.requests, self.pool.polls
        waits: Sequence[int] = (self._bell, self._stop)
        poller = select.epoll()
        for handle in waits:
            poller.register(handle, select.EPOLLIN)
        busy, since = False, 0.0
        while self.lost is None:
            if not busy:
                ready = [handle for handle, _ in poller.poll()]
            elif self._spins and time.perf_counter() - since < _SPIN:
                ready = [handle for handle, _ in poller.poll(0)]
            else:
                ready = select.select(waits, (), (), _NAP)[0]
            if self._stop in ready:
                return
            for slot in requests.take() if ready else ():
                self._accept(slot)
            busy = pool.drive() if polls else False
            if ready or self._answered:
                since = time.perf_counter()
            if self._answered or ready:
                self._tell()

    def _accept(self, slot: int) -> None:
        reply = SlotReply(self, slot)
        try:
            feeds, reply.rows, level, since, deadline = self.memory.asked(slot)
            self.pool.accept(feeds, level, since, deadline, reply.claim, reply)
        except Exception as problem:  # noqa: BLE001  the caller gets it
            reply.set_exception(problem)

    def tell(self, slot: int, kind: int, size: int) -> None:
        """Puts an answer into the ring. What the main loop brings is told at its end, what another thread brings at once."""
        with self._lock:
            self.memory.tell(slot, kind, size)
            self.memory.answers.push(slot)
        if get_ident() == self._main:
            self._answered = True
        else:
            self._tell()

    def _tell(self) -> None:
        stats = self.pool.scheduler.stats()  # without its lock, which is held where a request is claimed
        with self._lock:
            self._answered = False
            self.memory.count(stats.requests, stats.waiting, stats.steps, stats.in_flight, stats.rows, stats.filled)
            self.memory.answers.ring()

    def fail(self, problem: DeviceLost) -> None:
        """Ends the loop, since the GPU has failed."""
        self.lost = problem
        os.eventfd_write(self._stop, 1)


class SlotReply:
    """Place of the answer to a request: what a pool knows as its future.

    Attributes:
        rows: Rows of the request.
    """

    __slots__ = ("_serving", "_slot", "rows")

    def __init__(self, serving: _Serving, slot: int) -> None:
        self._serving, self._slot, self.rows = serving, slot, 0

    def claim(self) -> bool:
        """Takes the request for a step; False where nobody waits for it, which the caller is told."""
        if not self._serving.memory.flags[self._slot]:
            return True
        self._serving.tell(self._slot, DROPPED, 0)
        return False

    def set_result(self, outputs: Mapping[str, Any]) -> None:
        """Writes outputs."""
        try:
            size = self._serving.memory.outputs.write(self._slot, self.rows, outputs)
        except Exception as problem:  # noqa: BLE001  the caller gets it
            self.set_exception(problem)
        else:
            self._serving.tell(self._slot, OUTPUTS, size)

    def set_exception(self, problem: Exception) -> None:
        """Writes an error. That of a GPU ends the process, and its requests are run in another one."""
        if isinstance(problem, DeviceLost):
            self._serving.fail(problem)
            return
        area, data = self._serving.memory.outputs, packed_error(problem)
        try:
            size = area.spill(self._slot, data)
        except EngineError:  # a message of 64 MB
            size = area.spill(self._slot, packed_error(EngineError(str(problem)[:1000])))
        self._serving.tell(self._slot, ERROR, size)


def _watch(pipe: Connection, parent: int, stop: int) -> None:
    """Ends this process when the other one is gone or wants it to, whatever the main thread does."""
    with suppress(OSError, EOFError):
        while not pipe.poll(_WATCH) and os.getppid() == parent:
            pass
    os.eventfd_write(stop, 1)
    time.sleep(_GRACE)
    os._exit(1)


def main(arguments: Sequence[str]) -> None:
    """The process."""
    pipe, parent = Connection(int(arguments[0])), int(arguments[1])
    start: Start = pipe.recv()
    stop = os.eventfd(0)
    threading.Thread(target=_watch, args=(pipe, parent, stop), daemon=True).start()
    try:
        pool = start.make(lambda what, share: pipe.send((what, share)))
        ports = pool.ports.on_host()
        hello = Hello(ports, pool.about, pool.settings, sizes_of(ports, pool.about, pool.settings))
        os.ftruncate(start.handle, hello.sizes.parts()[-1])
        memory = memory_of(hello, start.handle, start.bells)
    except Exception as problem:  # noqa: BLE001  the other process raises it
        pipe.send(packed_error(problem))
        return
    gc.collect()
    gc.freeze()
    pipe.send(hello)
    # A number as low as can be: `select` knows those below 1,024 only.
    serving = _Serving(pool, memory, os.dup(start.bells[0]), stop, start.spins)
    serving.run()
    if serving.lost is not None:
        pipe.send(packed_error(serving.lost))
        os._exit(1)
    pool.close(finish=False)
    os._exit(0)  # what is left in memory needs no tidying up


if __name__ == "__main__":
    from msplit.serving.pool import worker  # so that classes of what is sent are those of the module

    worker.main(sys.argv[1:])
