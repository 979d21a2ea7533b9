"""Steps in flight: arenas, requests that wait for one, and how one becomes the other."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from msplit.engines.base import Feeds
from msplit.errors import Closed, DeviceLost, TimedOut
from msplit.serving.ports import Ports
from msplit.serving.queue import NEVER, Queue, Request
from msplit.serving.settings import PoolSettings

Answer = dict[str, NDArray[Any]]


class Arena(Protocol):
    """What runs one step at a time: streams, captured graphs of all batches, memory for what they compute, for inputs and for outputs."""

    def start(self, rung: int, feeds: Sequence[Feeds]) -> None:
        """Begins a step of the batch `rung` on the rows of all these requests, one behind the other."""

    def over(self) -> bool:
        """Whether it is over. What failed is raised."""

    def wait(self) -> None:
        """Returns when it is over, or sooner; without the interpreter's lock."""

    def outputs(self) -> Answer:
        """Outputs of the step that is over, of the caller's own."""

    def facts(self) -> Mapping[str, Any]:
        """Streams, bytes: whatever is known."""

    def close(self) -> None:
        """Gives memory and streams back."""


@dataclass(frozen=True)
class Stats:
    """What a pool has done so far.

    Attributes:
        requests: That it took.
        answered: That got an answer.
        failed: That got an error of the engine.
        timed_out: That waited too long, and were not run.
        cancelled: That were cancelled while they waited.
        refused: That it did not take, since too many waited.
        rows: Of the steps.
        filled: Rows of the steps that were nobody's.
        steps: That ran.
        waiting: Requests that wait now.
        in_flight: Steps that run now.
    """

    requests: int = 0
    answered: int = 0
    failed: int = 0
    timed_out: int = 0
    cancelled: int = 0
    refused: int = 0
    rows: int = 0
    filled: int = 0
    steps: int = 0
    waiting: int = 0
    in_flight: int = 0


@dataclass(eq=False, slots=True)
class Flight:
    """A step in flight.

    Attributes:
        level: Of priority, of its arena.
        rows: Of its requests.
        rung: Of the step.
        requests: None: one, of the thread that looks after it alone.
    """

    arena: Arena
    level: int
    rung: int
    rows: int
    requests: Sequence[Request] | None = None


class Flights:
    """Arenas of a pool, and requests that wait for one. Any thread may call it; none of its methods waits.

    Args:
        arenas: With their levels of priority: an arena is for requests of its level, and for more urgent ones.
        threads: Each step keeps one of so many threads busy until it is over; with 0, somebody has to `poll`.

    Attributes:
        flying: Steps that are looked after by whoever polls.
        running: Steps in all.
        alone: Steps that the thread that began them looks after itself.
        looked: When somebody polled last.
        closed: Whether no more requests are taken.
        lost: What the device said when it failed; no more requests are taken then.
    """

    def __init__(
        self, ports: Ports, arenas: Sequence[tuple[int, Arena]], settings: PoolSettings, threads: int = 0
    ) -> None:
        self.ports = ports
        self._free: list[list[Arena]] = [[] for _ in range(settings.priorities)]
        for level, arena in arenas:
            self._free[level].append(arena)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="msplit-step") if threads else None
        self._lock, self._polling = threading.Lock(), threading.Lock()
        self.queue = Queue(settings.priorities, ports.batches, settings.max_delay_us / 1e6, settings.max_queue)
        self.flying: list[Flight] = []
        self.running = self.alone = 0
        self._answered = self._failed = self._rows = self._filled = self._steps = self._direct = 0
        self.looked = -NEVER
        self.closed = False
        self.lost: DeviceLost | None = None

    @property
    def busy(self) -> bool:
        """Whether anything runs or waits."""
        return bool(self.running or self.queue.count)

    def put(self, request: Request) -> None:
        """Has a request wait. If there is an arena for it, its step is started, unless others are in flight and it has room for more: a
        thread that goes on brings more sooner than it could start a step, and one that waits will start it.

        Raises:
            Busy: As many wait as may.
            Closed: No more are taken.
        """
        with self._lock:
            self._refuse_closed()
            if not self.queue.put(request) and self.running and self._threads is None:
                return
            flight, late = self._next(request.since)
        if flight is not None or late:
            self._go_on(flight, late)

    def take(self, level: int, rows: int) -> Flight | None:
        """An arena for a step that the calling thread starts itself, looks after and lands; None where none is free, or others wait.

        Raises:
            Closed: No more requests are taken.
        """
        with self._lock:
            self._refuse_closed()
            number = next((number for number in range(level, len(self._free)) if self._free[number]), None)
            if number is None or self.queue.count:
                return None
            self.running += 1
            self.alone += 1
            self._direct += 1
            return Flight(self._free[number].pop(), number, self.ports.rung(rows), rows)

    def _refuse_closed(self) -> None:
        if self.lost is not None:
            raise DeviceLost(self.lost.what, fix=self.lost.fix)
        if self.closed:
            raise Closed("the pool is closed", fix="open another one")

    def start_due(self, now: float, *, patient: bool = True) -> None:
        """Starts a step that is due, where there is an arena for it, and tells those for which it is too late. Without patience it waits
        for no company."""
        with self._lock:
            flight, late = self._next(now, patient=patient)
        if flight is not None or late:
            self._go_on(flight, late)

    def _next(self, now: float, *, patient: bool = True) -> tuple[Flight | None, Sequence[Request]]:
        """The next step to start, and requests that are too late. The lock is held."""
        queue = self.queue
        if not queue.count or queue.next_time > now:
            return None, ()
        late = queue.expired(now)
        for level, free in enumerate(self._free):
            if free and (found := queue.take(now, level, patient and self.running > 0)):
                self.running += 1
                rows = sum([request.rows for request in found])
                return Flight(free.pop(), level, self.ports.rung(rows), rows, found), late
        return None, late

    def _go_on(self, flight: Flight | None, late: Sequence[Request]) -> None:
        """Starts a step, and tells those that are too late."""
        while True:
            for request in late:
                waited = time.perf_counter() - request.since
                said = f"the request was not run: it waited for {waited:.3f} s"
                request.answer.set_exception(TimedOut(said, fix="send fewer, or wait longer"))
            if flight is None:
                return
            if self._threads is not None:
                self._threads.submit(self._run, flight)
                return
            try:
                flight.arena.start(flight.rung, [request.feeds for request in flight.requests or ()])
            except Exception as problem:  # noqa: BLE001  whoever starts it, those that wait for it are told
                self._note(problem)
                following = self._landed(flight, failed=True)
                _tell(flight, problem)
                flight, late = following
            else:
                self.flying.append(flight)
                return

    def _run(self, flight: Flight) -> None:
        """A step, from beginning to end, in a thread of its own."""
        outputs: Answer | Exception
        try:
            flight.arena.start(flight.rung, [request.feeds for request in flight.requests or ()])
            outputs = flight.arena.outputs()
        except Exception as problem:  # noqa: BLE001  as above
            outputs = problem
        self._land(flight, outputs)

    def poll(self) -> bool:
        """Ends the steps that are over. Whether there were any. Only one thread does so at a time."""
        if not self._polling.acquire(blocking=False):
            return False
        landed: list[tuple[Flight, Answer | Exception]] = []
        try:
            self.looked = time.perf_counter()
            for flight in self.flying:
                try:
                    if flight.arena.over():
                        landed.append((flight, flight.arena.outputs()))
                except Exception as problem:  # noqa: BLE001  as above
                    landed.append((flight, problem))
            for flight, _ in landed:
                self.flying.remove(flight)
        finally:
            self._polling.release()
        for flight, outputs in landed:
            self._land(flight, outputs)
        return bool(landed)

    def _land(self, flight: Flight, outputs: Answer | Exception) -> None:
        """Gives the arena of a step that is over to the next one, and then its answers to those who wait for them."""
        if isinstance(outputs, Exception):
            self._note(outputs)
        following, late = self._landed(flight, failed=isinstance(outputs, Exception))
        if following is not None or late:
            self._go_on(following, late)
        if isinstance(outputs, Exception):
            _tell(flight, outputs)
            return
        requests = flight.requests or ()
        answers = self.ports.cut(outputs, [request.rows for request in requests])
        for request, answer in zip(requests, answers, strict=True):
            request.answer.set_result(answer)

    def _note(self, problem: BaseException) -> None:
        if isinstance(problem, DeviceLost):
            self.lost = problem

    def land(self, flight: Flight, problem: BaseException | None) -> None:
        """Gives back what `take` gave, when its step is over, or failed."""
        failed = problem is not None
        if problem is not None:
            self._note(problem)
        with self._lock:
            self.alone -= 1
        following, late = self._landed(flight, failed=failed)
        if following is not None or late:
            self._go_on(following, late)

    def _landed(self, flight: Flight, *, failed: bool) -> tuple[Flight | None, Sequence[Request]]:
        """Counts a step that is over, and gives what comes next."""
        count = 1 if flight.requests is None else len(flight.requests)
        with self._lock:
            self._free[flight.level].append(flight.arena)
            self.running -= 1
            self._steps += 1
            self._rows += flight.rung
            self._filled += flight.rung - flight.rows
            if failed:
                self._failed += count
            else:
                self._answered += count
            return self._next(time.perf_counter()) if self.queue.count else (None, ())

    def refuse(self) -> None:
        """Takes no more requests."""
        with self._lock:
            self.closed = True

    def clear(self) -> None:
        """Fails what waits."""
        with self._lock:
            left = self.queue.clear()
        for request in left:
            said = "the pool was closed before this request was run"
            request.answer.set_exception(Closed(said, fix="send it to another one"))

    def end(self) -> None:
        """Ends threads, when nothing runs any more."""
        if self._threads is not None:
            self._threads.shutdown()

    def stats(self) -> Stats:
        """What was done so far."""
        with self._lock:
            queue = self.queue
            return Stats(
                requests=queue.taken + self._direct,
                answered=self._answered,
                failed=self._failed,
                timed_out=queue.timed_out,
                cancelled=queue.cancelled,
                refused=queue.refused,
                rows=self._rows,
                filled=self._filled,
                steps=self._steps,
                waiting=queue.count,
                in_flight=self.running,
            )


def _tell(flight: Flight, problem: Exception) -> None:
    """Tells those who wait for a step that it failed."""
    for request in flight.requests or ():
        request.answer.set_exception(problem)
