"""Members of a pool of processes: each process, how it is started and ended, and what it has of the pool's requests."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from weakref import finalize

from msplit.engines.process import Process
from msplit.errors import EngineError, ProcessLost
from msplit.progress import Progress
from msplit.serving.pool.pool import Pool
from msplit.serving.pool.ring import Memory, unpacked_error
from msplit.serving.pool.scheduler import Stats, Step
from msplit.serving.pool.steps import PoolFuture
from msplit.serving.pool.worker import Hello, Start, memory_of

MODULE = "msplit.serving.pool.worker"


class PoolProcess:
    """A process that was started, and what it shares with this one. Its pipe, its files and its memory are given back with `close`.

    Args:
        place: What it is called in messages.
        make: Makes the pool there.
        spins: See `Start`.
    """

    def __init__(self, place: str, make: Callable[[Progress], Pool], spins: bool) -> None:
        flags = os.EFD_NONBLOCK | os.EFD_CLOEXEC
        self._handle = os.memfd_create("msplit-pool")
        self._bells = os.eventfd(0, flags), os.eventfd(0, flags)
        self.bell = self._bells[1]
        self.process = Process(MODULE, place, [self._handle, *self._bells])
        self._start = Start(make, self._handle, self._bells, spins)
        self.ended = os.pidfd_open(self.process.pid)
        self._release = finalize(self, _close, (self._handle, *self._bells, self.ended))
        self._release.atexit = False

    def ready(self, tell: Progress) -> tuple[Hello, Memory]:
        """Waits until it can answer.

        Raises:
            EngineError: It has ended.
            Exception: What it raised.
        """
        self.process.send(self._start)
        while isinstance(said := self.process.receive(), tuple):
            tell(*said)
        if isinstance(said, bytes):
            raise unpacked_error(said)
        return said, memory_of(said, self._handle, self._bells)

    def last_words(self) -> str:
        """The error of its GPU, if that is why it has ended."""
        with suppress(EngineError):
            if self.process.said(0) and isinstance(said := self.process.receive(), bytes):
                return f": {getattr(unpacked_error(said), 'what', '')}"
        return ""

    def kill(self) -> None:
        """Ends it at once; whoever waits for it is told, and closes it."""
        with suppress(OSError):
            signal.pidfd_send_signal(self.ended, signal.SIGKILL)  # the number may be another process's by now

    def close(self) -> None:
        """Ends it."""
        self.process.close()
        self.ended = -1
        self._release()


def _close(handles: Sequence[int]) -> None:
    for handle in handles:
        os.close(handle)


class Member:
    """One process of a pool, of which there is always one or one that is being started.

    Attributes:
        memory: What it shares; None while it is started.
        lock: Held while numbers of slots go into the ring.
        trips: Requests that it has, by slot.
        before: Counts of the processes that it had before.
    """

    def __init__(self, place: str, running: PoolProcess, memory: Memory) -> None:
        self.place = place
        self.running, self.lock = running, threading.Lock()
        self.memory: Memory | None = memory
        self.trips: dict[int, Step] = {}
        self.restarts = 0
        self.before: tuple[int, ...] = (0,) * len(memory.counts())
        self.sent = 0

    def counts(self) -> list[int]:
        """As `COUNTS` has them, since the pool was opened."""
        memory = self.memory
        now = (0,) * len(self.before) if memory is None else memory.counts()
        return [one + other for one, other in zip(self.before, now, strict=True)]

    def stats(self) -> Stats:
        """The same, as a pool tells them."""
        came, _, steps, running, rows, filled = self.counts()
        return Stats(came, rows=rows, filled=filled, steps=steps, waiting=self.waiting(), in_flight=running)

    def retire(self) -> Sequence[Step]:
        """Takes note that its process has ended. Returns the requests that it had."""
        came, _, steps, _, rows, filled = self.counts()
        with self.lock:
            self.before, self.memory = (came, 0, steps, 0, rows, filled), None  # nothing waits or runs any more
            trips, self.trips, self.sent = [*self.trips.values()], {}, 0
        return trips

    def drop(self, future: PoolFuture | None = None) -> None:
        """Tells the process that nobody waits for a request any more; None: for any."""
        with self.lock:  # so that the slot is not the next request's by now
            for slot, step in [*self.trips.items()]:
                if self.memory is not None and future in (None, step.requests[0].future):
                    self.memory.flags[slot] = 1

    def waiting(self) -> int:
        """Requests that it has and has not begun."""
        if self.memory is None:
            return 0
        came, waiting, *_ = self.memory.counts()
        return max(self.sent - came + waiting, 0)


def lost(place: str, why: str) -> ProcessLost:
    """Error of the requests that a process had."""
    what = f"the process of {place} ended while it had the request{why}"
    return ProcessLost(what, fix="send it again, unless such requests end it each time")
