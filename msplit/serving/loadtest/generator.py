"""The process that sends requests: so many clients that each wait for their answer, or arrivals at a rate that wait for nobody.

A request is a row of the table: which of the prepared inputs, and when. Inputs themselves are where they are answered.

The memory that generator and target share: a table with a row per request, written without a lock.

Each column has one writer, and each counter says how many rows of its columns are there, so that what a reader has counted is written. (The
order of writes is that of x86; elsewhere a reader may see a counter a moment before its row.) The memory has no name: nothing of it is left
when its processes have ended, however they did.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.engines.process import Process, serve
from msplit.errors import MsplitError
from msplit.formats.tensors import numpy_dtype

SENT, OVER, ANSWERED = 0, 8, 16
"""Counters: rows that the generator has sent; whether no more will be sent; rows that have an answer, whatever it is. Each in a cache line
of its own. Where several processes answer, each has a counter of its own, `LINE` further on."""

LINE = 8
MOST_PARTS = 32
"""Processes that may answer."""

RequestState = IntEnum("RequestState", "WAITING DONE REFUSED TIMED_OUT FAILED MISSHAPEN GIVEN_UP", start=0)
"""States of a request: a misshapen one gave outputs of wrong shapes, a given up one still waited when the run
was over for some time."""

_COUNTERS = ANSWERED + LINE * MOST_PARTS
_ALIGNED = 4096

_COLUMNS = {
    "scheduled": np.int64,
    "sent": np.int64,
    "taken": np.int64,
    "answered": np.int64,
    "request": np.int32,
    "priority": np.uint8,
    "status": np.uint8,
}


@dataclass(frozen=True)
class OutputLayout:
    """Type and shape of an output of one answer. Strings (``object``) are kept as a number that stands for them; see `digest`."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def stored(self) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """Type and shape of what is kept of it."""
        return (np.dtype(np.uint64), ()) if self.dtype == "object" else (numpy_dtype(self.dtype), self.shape)

    @property
    def bytes(self) -> int:
        """Bytes that are kept of one answer."""
        dtype, shape = self.stored
        return int(np.prod(shape, dtype=np.int64)) * dtype.itemsize


def digest(value: NDArray[Any]) -> int:
    """A number of 64 bits that stands for an array of strings."""
    parts = [item.encode() if isinstance(item, str) else bytes(item) for item in value.reshape(-1).tolist()]
    text = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


@dataclass(frozen=True)
class Layout:
    """Size and outputs of a table.

    Attributes:
        rows: Most requests of a run.
        outputs: By name.
    """

    rows: int
    outputs: Mapping[str, OutputLayout]

    def places(self) -> tuple[dict[str, int], dict[str, int], int]:
        """Offsets of columns and of outputs, and the size of the memory."""
        end = _ALIGNED
        columns, outputs = dict[str, int](), dict[str, int]()
        for name, dtype in _COLUMNS.items():
            columns[name] = end
            end = _after(end, self.rows * np.dtype(dtype).itemsize)
        for name, kept in self.outputs.items():
            outputs[name] = end
            end = _after(end, self.rows * kept.bytes)
        return columns, outputs, end


def _after(start: int, size: int) -> int:
    return -(-(start + size) // _ALIGNED) * _ALIGNED


class RequestTable:
    """The table, in one of the processes that share it.

    Args:
        layout: Size and outputs.
        handle: The descriptor of the memory; None makes it.

    Attributes:
        counters: Counters of 64 bits; see `SENT`.
        scheduled, sent, taken, answered: Per row, in ns of ``time.perf_counter_ns``, which processes share: when the request was due (0
            where it is due when it is sent), when it was sent, when the target's process took it, and when its answer was there.
        request: Number of the prepared request.
        priority: 0 is the most urgent.
        status: State; see `RequestState`.
        outputs: By name, an answer per row.
    """

    def __init__(self, layout: Layout, handle: int | None = None) -> None:
        self.layout = layout
        columns, outputs, size = layout.places()
        self.handle = _memory(size) if handle is None else handle
        self._map = mmap.mmap(self.handle, size)
        self.counters = memoryview(self._map)[: _COUNTERS * 8].cast("q")
        arrays = {name: np.frombuffer(self._map, dtype, layout.rows, columns[name]) for name, dtype in _COLUMNS.items()}
        self.scheduled, self.sent = arrays["scheduled"], arrays["sent"]
        self.taken, self.answered = arrays["taken"], arrays["answered"]
        self.request, self.priority, self.status = arrays["request"], arrays["priority"], arrays["status"]
        self.outputs: dict[str, NDArray[Any]] = {}
        for name, kept in layout.outputs.items():
            dtype, shape = kept.stored
            part = memoryview(self._map)[outputs[name] : outputs[name] + layout.rows * kept.bytes]
            self.outputs[name] = np.frombuffer(part, np.uint8).view(dtype).reshape(layout.rows, *shape)

    @property
    def answers(self) -> int:
        """Rows that have an answer, from whatever process."""
        return sum(self.counters[ANSWERED::LINE])

    def clear(self) -> None:
        """Makes it ready for another run: what the last one has written is forgotten."""
        used = self.counters[SENT]
        self.status[:used] = RequestState.WAITING
        for place in range(0, _COUNTERS, LINE):
            self.counters[place] = 0

    def close(self) -> None:
        """Lets go of the memory. What was read from it must be a copy."""
        os.close(self.handle)


def _memory(size: int) -> int:
    """A descriptor of memory without a name."""
    handle = os.memfd_create("msplit-load")
    os.ftruncate(handle, size)
    return handle


_now = time.perf_counter_ns

_CHUNK = 1 << 16
"""Requests that are drawn at once."""

_LOOK = 1 << 12
"""Turns after which the generator looks whether anybody still waits for it."""

_PATIENT = 2_000_000
"""ns without news after which it lets go of its core between two looks."""

_NAP = 50e-6
_EARLY = 200_000
"""ns before a request is due that it wakes up: a sleep takes longer than it says."""


@dataclass(frozen=True)
class Level:
    """Load: a number of clients, each of which sends when it has its answer, or arrivals per second, by a Poisson process.

    Raises:
        MsplitError: It is neither, or both.
    """

    clients: int | None = None
    rate: float | None = None

    def __post_init__(self) -> None:
        if (self.clients is None) == (self.rate is None):
            raise MsplitError("a load is a number of clients or a rate", fix="give one of the two")
        if (self.clients or self.rate or 0) <= 0:
            raise MsplitError(f"there is no load of {self}", fix="give a number above 0")

    @property
    def is_open(self) -> bool:
        """True for an open loop: requests are sent when they are due, however many wait."""
        return self.rate is not None

    def __str__(self) -> str:
        return f"{self.rate:,.0f}/s" if self.rate is not None else f"{self.clients}"


@dataclass(frozen=True)
class Sending:
    """Task of the generator for one run.

    Attributes:
        seconds, warmup: Seconds of measuring, and before it.
        distinct: Prepared requests to draw from.
        mix: Share of requests by priority; none where there is one priority.
        most: Requests after warming up, after which it ends; 0: no limit.
        parts: Processes that answer.
    """

    level: Level
    seconds: float
    warmup: float
    distinct: int
    seed: int
    mix: tuple[tuple[int, float], ...] = ()
    most: int = 0
    parts: int = 1


@dataclass(frozen=True)
class Sent:
    """Time in which requests were measured, in ns of ``time.perf_counter_ns``; `full` if the table was full before its time."""

    begin: int
    end: int
    full: bool


class _Gone(Exception):
    """Nobody waits for this process any more."""


def send(table: RequestTable, asked: Sending, alive: Callable[[], bool]) -> Sent:
    """Sends requests until it is time, the table is full, or enough are sent; then says so in the table."""
    rng = np.random.default_rng(asked.seed)
    try:
        return (_open if asked.level.is_open else _closed)(table, asked, rng, alive)
    finally:
        table.counters[OVER] = 1


def _draw(table: RequestTable, asked: Sending, rng: np.random.Generator, start: int, end: int) -> None:
    """Draws the requests that are sent, from one row to another."""
    table.request[start:end] = rng.integers(0, asked.distinct, end - start, np.int32)
    if asked.mix:
        levels, shares = zip(*asked.mix, strict=True)
        table.priority[start:end] = rng.choice(levels, end - start, p=np.array(shares) / sum(shares))
    else:
        table.priority[start:end] = 0


def _closed(table: RequestTable, asked: Sending, rng: np.random.Generator, alive: Callable[[], bool]) -> Sent:
    clients, rows, counters, sent_at = asked.level.clients or 1, table.layout.rows, table.counters, table.sent.data
    drawn = min(rows, _CHUNK)
    _draw(table, asked, rng, 0, drawn)
    table.scheduled[:rows] = 0
    sent = turns = 0
    now = heard = _now()
    begin = now + int(asked.warmup * 1e9)
    end, limit, warm = begin + int(asked.seconds * 1e9), rows, False
    while now < end and sent < limit:
        if not warm and now >= begin:
            warm, begin = True, now
            limit = min(rows, sent + asked.most) if asked.most else rows
        free = clients - sent + (counters[ANSWERED] if asked.parts == 1 else table.answers)
        if free:
            for _ in range(min(free, limit - sent)):
                sent_at[sent] = _now()
                sent += 1
                counters[SENT] = sent
            heard = now
            if drawn - sent < _CHUNK // 2 and drawn < rows:
                _draw(table, asked, rng, drawn, min(rows, drawn + _CHUNK))
                drawn = min(rows, drawn + _CHUNK)
        elif now - heard > _PATIENT:
            time.sleep(_NAP)
        else:
            os.sched_yield()  # who answers may have to share this core
        turns += 1
        if not turns % _LOOK and not alive():
            raise _Gone
        now = _now()
    end = min(now, end)
    return Sent(min(begin, end), end, sent >= rows)


def _open(table: RequestTable, asked: Sending, rng: np.random.Generator, alive: Callable[[], bool]) -> Sent:
    rate, counters, sent_at = asked.level.rate or 1.0, table.counters, table.sent.data
    length = asked.warmup + asked.seconds
    count = min(table.layout.rows, int(rate * length + 6 * (rate * length) ** 0.5) + 10)
    after = np.cumsum(rng.exponential(1e9 / rate, count)).astype(np.int64)
    whole = after[-1] < length * 1e9
    after = after[after < length * 1e9]
    if asked.most:
        after = after[: int(np.searchsorted(after, asked.warmup * 1e9)) + asked.most]
    _draw(table, asked, rng, 0, len(after))
    start = _now() + 1_000_000
    table.scheduled[: len(after)] = after + start
    due = (after + start).tolist()
    sent = turns = 0
    while sent < len(due):
        now = _now()
        if due[sent] <= now:
            while sent < len(due) and due[sent] <= now:
                sent_at[sent] = now
                sent += 1
            counters[SENT] = sent
        elif due[sent] - now > 2 * _EARLY:
            time.sleep(min(due[sent] - now - _EARLY, 100_000_000) / 1e9)
        else:
            os.sched_yield()
        turns += 1
        if not turns % _LOOK and not alive():
            raise _Gone
    begin = start + int(asked.warmup * 1e9)
    stopped = whole or bool(asked.most)
    end = max(begin, due[-1]) if stopped and due else start + int(length * 1e9)
    return Sent(begin, end, bool(whole))


class LoadGenerator(Process):
    """The process, seen from the one that it sends to: is sent what to send, and says when all of it is sent."""

    def __init__(self, table: RequestTable) -> None:
        super().__init__(__name__, "the load generator", [table.handle])
        self.send((table.layout, table.handle))
        self.receive()


def _main(arguments: list[str]) -> None:
    import gc

    gc.disable()
    parent = int(arguments[1])
    tables: list[RequestTable] = []

    def answer(message: Any) -> Any:
        if isinstance(message, Sending):
            return send(tables[0], message, lambda: os.getppid() == parent)
        tables.append(RequestTable(*message))
        return None

    try:
        serve(arguments, answer)
    except _Gone:
        return


if __name__ == "__main__":
    # By its own name, so that what comes through the pipe is of the classes that are here.
    from msplit.serving.loadtest import generator

    generator._main(sys.argv[1:])
