"""The process that sends requests: so many clients that each wait for their answer, or arrivals at a rate that wait for nobody.

A request is a row of the table: which of the prepared inputs, and when. Inputs themselves are where they are answered.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from msplit.engines.process import Process, serve
from msplit.errors import MsplitError
from msplit.serving.loadtest.table import ANSWERED, OVER, SENT, RequestTable

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
