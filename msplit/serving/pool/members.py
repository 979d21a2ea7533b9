"""Processes of a pool as their clients see them: how one is started, the connection to it, and what was asked there (see `processes`)."""

from __future__ import annotations

import mmap
import os
import pickle
import secrets
import select
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from weakref import finalize

from msplit.engines.process import Process, is_ours
from msplit.engines.table_rows import LOOKUPS
from msplit.errors import Closed, EngineError
from msplit.progress import Progress
from msplit.serving.pool.pool import Pool
from msplit.serving.pool.ring import COUNTS, unpacked_error
from msplit.serving.pool.scheduler import Request
from msplit.serving.pool.settings import Stats
from msplit.serving.pool.steps import PoolFuture, ProcessState
from msplit.serving.pool.worker import Hello, Start, memory_of

_LOOK = 0.05
"""Seconds between two looks whether the pool is closed, while a process is started."""


class PoolProcess:
    """Process of a pool, which is started again and again, and the socket that its clients connect to, which stays.

    Args:
        place: What it is called in messages.
        make: Gives what makes the pool there, anew for each start.
        cores: See `Start`.
        weights: Both ends of the socket through which it shares weights; none: it has its own.
        shares: False where it has its own from now on: shared ones are no longer those of the build.
    """

    def __init__(
        self,
        place: str,
        make: Callable[[], Callable[[Progress], Pool]],
        cores: int,
        weights: Sequence[socket.socket] = (),
        shares: Callable[[], bool] = lambda: True,
    ) -> None:
        self._place, self._make, self._cores = place, make, cores
        self._weights, self._shares = weights, shares
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(f"\0msplit-{secrets.token_hex(8)}")  # a name that no file has, so that nothing is left of it
        self.listener.listen(64)
        self.begin()

    def begin(self) -> None:
        """Starts it, and has it make its pool. Another one must have ended.

        Raises:
            EngineError: It has ended.
        """
        listens, weights = self.listener.fileno(), [one.fileno() for one in self._weights if self._shares()]
        self.process = Process("msplit.serving.pool.worker", self._place, [listens, *weights])
        self.process.send(Start(self._make(), listens, self._cores, weights))

    def ready(self, tell: Progress, over: Callable[[], bool]) -> None:
        """Waits until it can answer requests, which it begins to do when it is told to (`given_values`).

        Raises:
            EngineError: It has ended.
            Exception: What it raised.
        """
        while isinstance(said := self.answer(over), tuple):
            tell(*said)
        if said is not None:
            raise unpacked_error(said)

    def answer(self, over: Callable[[], bool]) -> Any:
        """Next message of the process; waits for it.

        Raises:
            EngineError: It has ended.
            Closed: The pool is closed.
        """
        while not self.process.said(_LOOK):
            go_on(over)
        return self.process.receive()

    def last_words(self) -> str:
        """The error of its GPU, if that is why it has ended."""
        with suppress(EngineError):
            if self.process.said(0) and isinstance(said := self.process.receive(), bytes):
                return f": {getattr(unpacked_error(said), 'what', '')}"
        return ""

    def close(self) -> None:
        """Ends it for good."""
        self.process.close()
        for one in (self.listener, *self._weights):
            one.close()


def go_on(over: Callable[[], bool]) -> None:
    """Raises `Closed` where nobody needs the process any more."""
    if over():
        raise Closed("the pool is closed", fix="open another one")


class ProcessLine:
    """Connection to a process, and what this one has asked there.

    Args:
        place: What the process is called in messages.
        address: Name of the socket.
        over: True when nobody needs it any more.

    Attributes:
        lost: True when the process has ended, or is not asked any more.
        socket: Can be read when the process has ended, and not before.
        bell: Descriptor that can be read when there are answers.
        trips: Requests on their way, by slot.
        free: Slots that are free, by priority level.
        rows: Rows on their way.
        sent: Number of requests that were sent.

    Raises:
        OSError, EOFError: There is no process, or it has ended.
        Closed: It was not needed any more.
    """

    def __init__(self, place: str, address: bytes, over: Callable[[], bool]) -> None:
        self.place, self.lost, self.socket = place, False, socket.socket(socket.AF_UNIX)
        handles: list[int] = []
        self._release = finalize(self, _hang_up, self.socket, handles, os.getpid())
        self._release.atexit = False
        self.socket.connect(address)
        if not is_ours(self.socket):
            raise ConnectionRefusedError("another user's")
        while not readable(self.socket.fileno(), _LOOK):
            go_on(over)
        _, given, _, _ = socket.recv_fds(self.socket, 1, 4, socket.MSG_CMSG_CLOEXEC)
        handles += given
        with self.socket.makefile("rb") as file:
            self.hello: Hello = pickle.load(file)
        memory, *bells, counts = handles
        self.bell, self.memory = bells[1], memory_of(self.hello, memory, bells)
        self._counts = mmap.mmap(counts, mmap.PAGESIZE)
        self._under_way = memoryview(self._counts)[:8].cast("q")
        settings, slots = self.hello.settings, self.hello.sizes.slots
        self._levels = [settings.level_of(slot, slots) for slot in range(slots)]
        self.free: list[list[int]] = [[] for _ in range(settings.priorities)]
        for slot, level in enumerate(self._levels):
            self.free[level].append(slot)
        self.trips: dict[int, Request] = {}
        self.rows = self.sent = 0

    def load(self) -> int:
        """Rows that are under way in the process, as far as is known here."""
        return max(self.rows, self._under_way[0])

    def counts(self) -> tuple[int, ...]:
        """Requests of this client that the process has taken, and further ones as `COUNTS` has them."""
        taken, found = self.memory.taken[0], COUNTS.unpack_from(self._counts)
        while found != (again := COUNTS.unpack_from(self._counts)):  # they were just being written
            found = again
        return (taken, *found[1:])

    def waiting(self) -> int:
        """Requests that the process has and has not begun."""
        taken, waiting, *_ = self.counts()
        return max(self.sent - taken + waiting, 0)

    def give(self, slot: int, request: Request) -> None:
        """Takes note that a slot is free again."""
        self.free[self._levels[slot]].append(slot)
        self.rows -= request.rows or 1

    def drop(self, future: PoolFuture | None = None) -> None:
        """Tells the process that nobody waits for a request any more; None: for any."""
        for slot, request in [*self.trips.items()]:
            if future in (None, request.future):
                self.memory.flags[slot] = 1

    def close(self) -> None:
        """Gives back what is shared, but for memory that somebody still looks at."""
        self._release()


def _hang_up(line: socket.socket, handles: Sequence[int], process: int) -> None:
    with suppress(OSError):
        if os.getpid() == process:  # in a forked child, the connection is the parent's
            line.shutdown(socket.SHUT_RDWR)
    line.close()
    for handle in handles:
        os.close(handle)


def readable(handle: int, seconds: float | None) -> bool:
    """True as soon as a descriptor can be read; False after so many seconds (None: never)."""
    poller = select.poll()
    poller.register(handle, select.POLLIN)
    return bool(poller.poll(None if seconds is None else seconds * 1e3))


class Member:
    """One process of a pool as a client sees it. There is always one, or one that is being started.

    Attributes:
        place: What it is called in messages.
        address: Name of its socket.
        process: It, where it is this process that starts it.
        line: Connection to it; None while it is started.
        before: Counts of those that it had before.
    """

    def __init__(self, place: str, address: bytes, process: PoolProcess | None, over: Callable[[], bool]) -> None:
        self.place, self.address, self.process = place, address, process
        self.line: ProcessLine | None = ProcessLine(place, address, over)
        self.restarts, self.before = 0, (0,) * len(self.line.counts())

    def counts(self) -> Sequence[int]:
        """As `ProcessLine` has them, since the pool was opened."""
        line = self.line
        return self.before if line is None else [sum(each) for each in zip(self.before, line.counts(), strict=True)]

    def state(self) -> ProcessState:
        """State and counts, as a pool tells them."""
        taken, _, steps, running, rows, filled, *looked_up = self.counts()
        line = self.line
        waiting = line.waiting() if line else 0
        own = {"rows": rows, "filled": filled, "steps": steps, "in_flight": running, "waiting": waiting}
        stats = Stats(taken, **own, **dict(zip(LOOKUPS, looked_up, strict=True)))
        return ProcessState(self.place, line.hello.pid if line else 0, self.restarts, stats)
