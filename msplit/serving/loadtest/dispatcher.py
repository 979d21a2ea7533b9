"""Hands requests from the table to what answers them, and answers back: by one thread that drives, or by threads that each make calls.

Both are what an application would do; what they cost by themselves is measured with a target that has its answers ready (`echo`).
"""

from __future__ import annotations

import gc
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from msplit.engines.base import Arrays
from msplit.errors import Busy, EngineError, MsplitError, TimedOut
from msplit.serving.loadtest.generator import ANSWERED, LINE, OVER, SENT, RequestState, RequestTable, digest

_now = time.perf_counter_ns

_look_up = select.poll().poll
"""Lets go of Python's lock, and is back at once."""

_AT_ONCE = 16
"""Requests that are submitted before the pool gets its turn."""

_COPIED = 32
"""Answers that are copied at once."""

_GRACE = 1.0
"""Seconds after the end of a run in which what waits may still be answered. Where more comes than can be answered, it would take long."""

_LOOK = 0.05
"""Seconds between two looks at whether the other process lives and anything moves."""

_STUCK = 60.0
"""Seconds without an answer after which a run is given up."""

_SPINS = 20
_NAP = 20e-6
_SWITCH = 5e-5
"""Seconds that a thread may keep Python's lock from one that wants it, while threads answer: the usual 5 ms are longer than most steps."""

Step = Callable[[Arrays], Mapping[str, Any]]


@dataclass(frozen=True)
class RowShare:
    """Share of a table's rows that one process answers: every `of`-th row, from `number` on."""

    number: int
    of: int


WHOLE = RowShare(0, 1)


@contextmanager
def settled() -> Iterator[None]:
    """Sets apart what is there, as a service does once it is ready: to look through a million objects of TensorFlow takes half a second."""
    before = gc.get_freeze_count()
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not before:  # otherwise somebody else's would come back, too
            gc.unfreeze()


class Driven(Protocol):
    """Pool, as far as a load test uses it."""

    def submit(self, feeds: Arrays, *, priority: int = 0, timeout: float | None = None) -> Future[Any]:
        """Takes a request."""

    def drive(self, seconds: float = 0.0) -> bool:
        """Does what there is to do; whether there is more."""


class Writer:
    """Writes answers into a table, whatever thread brings them. What they hold is copied some at a time, which takes a third of the time;
    `finish` copies the rest.

    Attributes:
        problems: Each error message with its count.
    """

    def __init__(self, table: RequestTable, number: int = 0) -> None:
        self._counters, self._counter = table.counters, ANSWERED + LINE * number
        self._at, self._status = table.answered.data, table.status.data
        self._outputs = table.outputs
        self._kept = table.layout.outputs
        self.problems: dict[str, int] = {}
        self._lock = threading.Lock()
        self._left: list[tuple[int, Mapping[str, Any]]] = []
        self._waiting: dict[int, Future[Any]] = {}

    def wait(self, row: int, future: Future[Any]) -> None:
        """A request will have its answer in a future."""
        self._waiting[row] = future
        future.add_done_callback(partial(self._resolved, row))

    def give_up(self) -> None:
        """Has nothing run that still waits to be."""
        for future in list(self._waiting.values()):
            future.cancel()

    def _resolved(self, row: int, future: Future[Any]) -> None:
        """A future has what it has."""
        now = _now()
        self._waiting.pop(row, None)
        try:
            outputs = future.result()
        except Exception as problem:  # noqa: BLE001  what it is, is told at the end
            self.failed(row, problem)
        else:
            self.done(row, outputs, now)

    def done(self, row: int, outputs: Mapping[str, Any], when: int | None = None) -> None:
        """A request has its answer, and had it at that time, if it is given."""
        self._at[row] = _now() if when is None else when
        with self._lock:
            self._left.append((row, outputs))
            if len(self._left) >= _COPIED:
                self._copy()
            self._counters[self._counter] += 1

    def failed(self, row: int, problem: BaseException) -> None:
        """A request has none."""
        self._at[row] = _now()
        with self._lock:
            if isinstance(problem, Busy | TimedOut):
                self._status[row] = RequestState.REFUSED if isinstance(problem, Busy) else RequestState.TIMED_OUT
            elif isinstance(problem, CancelledError):
                self._status[row] = RequestState.GIVEN_UP
            else:
                self._status[row] = RequestState.FAILED
                self._tell(problem.what if isinstance(problem, MsplitError) else f"{type(problem).__name__}: {problem}")
            self._counters[self._counter] += 1

    def finish(self) -> Mapping[str, int]:
        """Copies what is left. What went wrong, with how often."""
        with self._lock:
            self._copy()
        return self.problems

    def _copy(self) -> None:
        """Copies answers that came. The lock is held."""
        left, self._left = self._left, []
        rows = [row for row, _ in left]
        state = [RequestState.DONE] * len(left)
        for name, kept in self._kept.items():
            values: list[Any] = [outputs.get(name) for _, outputs in left]
            good = [place for place, value in enumerate(values) if value is not None and value.shape == kept.shape]
            # An answer without this output, or with another shape, is told of; the others of its batch are kept.
            if len(good) < len(values):
                for place in [place for place in range(len(values)) if place not in good]:
                    value, state[place] = values[place], RequestState.MISSHAPEN
                    self._tell(f"output {name} is {'missing' if value is None else f'{value.shape}, not {kept.shape}'}")
                values = [values[place] for place in good]
            if not good:
                continue
            chosen = [rows[place] for place in good]
            # One copy for all answers: strings by what stands for them, arrays joined, scalars as a list.
            if kept.dtype == "object":
                self._outputs[name][chosen] = [digest(value) for value in values]
            elif kept.shape:
                self._outputs[name][chosen] = np.concatenate(values).reshape(len(good), *kept.shape)
            else:
                self._outputs[name][chosen] = values
        for row, one in zip(rows, state, strict=True):
            self._status[row] = one

    def _tell(self, text: str) -> None:
        self.problems[text] = self.problems.get(text, 0) + 1


class Watch:
    """Looks now and then whether a run goes on.

    Args:
        alive: Raises where the other process has ended.

    Raises:
        EngineError: Nothing was answered for a minute.
    """

    def __init__(self, table: RequestTable, alive: Callable[[], None]) -> None:
        self._table, self._counters, self._alive = table, table.counters, alive
        self._next = time.monotonic() + _LOOK
        self._answered, self._since = -1, time.monotonic()

    def look(self) -> None:
        """Looks, if it is time to."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _LOOK
        self._alive()
        answered = self._table.answers
        if answered != self._answered or answered == self._counters[SENT]:
            self._answered, self._since = answered, now
        elif now - self._since > _STUCK:
            left = self._counters[SENT] - answered
            raise EngineError(
                f"{left} requests were not answered in {_STUCK:.0f} seconds",
                fix="ask for less at once, or give requests a --measure timeout=",
            )


def drive(
    table: RequestTable,
    target: Driven,
    feeds: Sequence[Arrays],
    watch: Watch,
    *,
    timeout: float | None = None,
    nap: float = 0.0,
    part: RowShare = WHOLE,
) -> Mapping[str, int]:
    """Answers a run by one thread that takes arrivals, submits them, and drives the pool.

    Args:
        feeds: The prepared requests.
        timeout: Seconds that a request may wait.
        nap: Seconds to sleep when nothing happens; for what is answered by other threads.
        part: Rows that are answered here.

    Returns:
        What went wrong, with how often.
    """
    counters, request, priority, taken_at = table.counters, table.request.data, table.priority.data, table.taken.data
    writer, mine = Writer(table, part.number), ANSWERED + LINE * part.number
    taken, answered = part.number, 0
    end = 0.0
    while True:
        over = counters[OVER]  # before what is sent, which is all there is where this is set
        sent = counters[SENT]
        for row in range(taken, min(sent, taken + _AT_ONCE * part.of), part.of):
            taken_at[row] = _now()
            try:
                future = target.submit(feeds[request[row]], priority=priority[row], timeout=timeout)
            except MsplitError as problem:
                writer.failed(row, problem)
            else:
                writer.wait(row, future)
            taken += part.of
        target.drive()
        now_answered = counters[mine]
        if now_answered == answered:
            if over and taken >= sent and answered == taken // part.of:
                return writer.finish()
            watch.look()
            if taken >= sent:
                _rest(nap)
        answered = now_answered
        if over:
            end = end or time.monotonic() + _GRACE
            if time.monotonic() > end:
                writer.give_up()


def _rest(nap: float) -> None:
    """Lets others have Python's lock, and the core where it has to be shared."""
    if nap:
        time.sleep(nap)
    else:
        _look_up(0)
        os.sched_yield()


class _Arrivals:
    """Rows of a table, each to one of several threads. One of them at a time waits for the next; the others are in calls, or wait for their
    turn to wait.

    Attributes:
        next: The first row that nobody has taken.
        failed: Errors that ended a thread; then no rows are given out.
    """

    def __init__(self, table: RequestTable, watch: Watch) -> None:
        self._counters, self._taken_at, self._watch = table.counters, table.taken.data, watch
        self._turn, self._end = threading.Lock(), 0.0
        self.next = 0
        self.failed: list[BaseException] = []

    def take(self) -> int | None:
        """The next one, when it is there; None when there is no more."""
        with self._turn:
            spins, row = 0, self.next
            while not self.failed:
                over = self._counters[OVER]
                if over:
                    self._end = self._end or time.monotonic() + _GRACE
                    if row == self._counters[SENT] or time.monotonic() > self._end:
                        return None
                if row < self._counters[SENT]:
                    self._taken_at[row] = _now()
                    self.next = row + 1
                    return row
                spins += 1
                time.sleep(0 if spins < _SPINS else _NAP)
                if not spins % _SPINS:
                    self._watch.look()
            return None


def call(table: RequestTable, steps: Sequence[Step], feeds: Sequence[Arrays], watch: Watch) -> Mapping[str, int]:
    """Answers a run by a thread for each of some steps, as callers of a session do: each takes a request, makes its call, writes the
    answer."""
    request, writer, arrivals = table.request.data, Writer(table), _Arrivals(table, watch)

    def serve(step: Step) -> None:
        try:
            while (row := arrivals.take()) is not None:
                try:
                    outputs = step(feeds[request[row]])
                except MsplitError as problem:
                    writer.failed(row, problem)
                else:
                    writer.done(row, outputs)
        except BaseException as problem:  # noqa: BLE001  raised by the caller's thread
            arrivals.failed.append(problem)

    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH)
    threads = [threading.Thread(target=serve, args=(step,), daemon=True) for step in steps]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(_LOOK)
                watch.look()
    except BaseException as problem:
        arrivals.failed.append(problem)
        raise
    finally:
        sys.setswitchinterval(before)
    if arrivals.failed:
        raise arrivals.failed[0]
    for row in range(arrivals.next, table.counters[SENT]):
        writer.failed(row, CancelledError())
    return writer.finish()


class Echo:
    """Answers at once what was prepared, without running anything: what handing over costs."""

    def __init__(self, feeds: Sequence[Arrays], answers: Sequence[Mapping[str, NDArray[Any]]]) -> None:
        self._answers = {id(one): answer for one, answer in zip(feeds, answers, strict=True)}
        self._futures = {key: Future[Any]() for key in self._answers}
        for key, future in self._futures.items():
            future.set_result(self._answers[key])

    def submit(self, feeds: Arrays, *, priority: int = 0, timeout: float | None = None) -> Future[Any]:
        """Future with the answer to one of the prepared requests."""
        return self._futures[id(feeds)]

    def drive(self, seconds: float = 0.0) -> bool:
        """Nothing is left to do."""
        return False

    def step(self, feeds: Arrays) -> Mapping[str, NDArray[Any]]:
        """Answers one of the prepared requests in a call."""
        return self._answers[id(feeds)]
