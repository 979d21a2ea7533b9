"""Steps in flight: arenas, requests that wait for one, and how one becomes the other."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import InvalidStateError, ThreadPoolExecutor
from dataclasses import dataclass, replace
from threading import get_ident
from typing import Any, Protocol

from msplit.engines.base import Feeds, device_lost
from msplit.errors import Closed, DeviceLost, EngineError, TimedOut
from msplit.serving.pool.ports import Ports
from msplit.serving.pool.queue import NEVER, Queue, Request
from msplit.serving.pool.settings import PoolSettings

_LOG = logging.getLogger("concurrent.futures")

Answer = dict[str, Any]
"""Outputs by name: arrays, or PyTorch tensors where they stay on the device."""


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

    def outputs_on_device(self) -> dict[str, Any]:
        """The same as PyTorch tensors on the device; of one that has none it is not asked."""

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
        failed: That got an error of the engine, or none since the pool was closed.
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
        gpu: Where that is.
        rows: Of its requests.
        rung: Of the step.
        requests: None: one, of the thread that looks after it alone.
        rest: Those of a step that failed which are to be run after these, each alone: what one of them brought is no other's trouble.
    """

    arena: Arena
    level: int
    gpu: int
    rung: int
    rows: int
    requests: Sequence[Request] | None = None
    rest: Sequence[Request] = ()


class Flights:
    """Arenas of a pool, and requests that wait for one. Any thread may call it; none of its methods waits.

    Args:
        arenas: With their levels of priority: an arena is for requests of its level, and for more urgent ones.
        threads: Each step keeps one of so many threads busy until it is over; with 0, somebody has to `poll`.
        gpus: Of each arena, where it is; none: all are in one place. A step goes where most of what it may have is free.

    Attributes:
        flying: Steps that are looked after by whoever polls.
        running: Steps in all.
        alone: Steps that the thread that began them looks after itself.
        looked: When somebody polled last.
        closed: Whether no more requests are taken.
        lost: What the device said when it failed; no more requests are taken then.
        orphaned: Whether this process is another one's child, and has neither its threads nor its device.
    """

    def __init__(
        self,
        ports: Ports,
        arenas: Sequence[tuple[int, Arena]],
        settings: PoolSettings,
        threads: int = 0,
        gpus: Sequence[int] = (),
    ) -> None:
        self.ports = ports
        places = range(max(gpus, default=0) + 1)
        self._free: list[list[list[Arena]]] = [[[] for _ in places] for _ in range(settings.priorities)]
        for (level, arena), gpu in zip(arenas, gpus or [0] * len(arenas), strict=True):
            self._free[level][gpu].append(arena)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="msplit-step") if threads else None
        self._lock, self._polling = threading.Lock(), threading.Lock()
        self.queue = Queue(settings.priorities, ports.batches, settings.max_delay_us / 1e6, settings.max_queue)
        self.flying: list[Flight] = []
        self.running = self.alone = 0
        self._running_on = [0 for _ in places]
        self._answered = self._failed = self._rows = self._filled = self._steps = self._direct = 0
        self.looked = -NEVER
        self.closed = self.orphaned = False
        self.lost: DeviceLost | None = None
        # What is over, what is to be told, and who tells it: each thread takes the next one, so that a function which an answer calls may
        # ask for any other answer.
        self._over: deque[tuple[Flight, Answer | Exception]] = deque()
        self._answers: deque[tuple[Request, Answer | Exception]] = deque()
        self._telling: list[int] = []
        self._ready: deque[Flight] = deque()

    @property
    def busy(self) -> bool:
        """Whether anything runs, waits or is to be told."""
        return bool(self.running or self.queue.count or self._answers)

    @property
    def tells(self) -> bool:
        """Whether this thread is telling an answer, which has called a function."""
        return get_ident() in self._telling

    @property
    def told(self) -> bool:
        """Whether all answers were told."""
        return not self._telling

    def put(self, request: Request) -> None:
        """Has a request wait. If there is an arena for it, its step is started, unless others are in flight and it has room for more: a
        thread that goes on brings more sooner than it could start a step, and one that waits will start it. A GPU with nothing to do
        waits for nobody.

        Raises:
            Busy: As many wait as may.
            Closed: No more are taken.
        """
        with self._lock:
            self._refuse_closed()
            if not self.queue.put(request) and all(self._running_on) and self._threads is None:
                return
            flight, late = self._next(request.since)
        if flight is not None or late:
            self._go_on(flight, late)
            self.tell()

    def take(self, level: int, rows: int) -> Flight | None:
        """An arena for a step that the calling thread starts itself, looks after and lands; None where none is free, or others wait.

        Raises:
            Closed: No more requests are taken.
        """
        with self._lock:
            self._refuse_closed()
            if self.queue.count:
                return None
            for number in range(level, len(self._free)):
                gpu = self._freest(number)
                if self._free[number][gpu]:
                    self.alone += 1
                    self._direct += 1
                    return self._flight(number, gpu, rows)
            return None

    def _flight(self, level: int, gpu: int, rows: int, requests: Sequence[Request] | None = None) -> Flight:
        """A step on an arena that is free. The lock is held."""
        self.running += 1
        self._running_on[gpu] += 1
        return Flight(self._free[level][gpu].pop(), level, gpu, self.ports.rung(rows), rows, requests)

    def _freest(self, level: int) -> int:
        """The GPU with most free arenas of a level, so that all have as much to do. The lock is held."""
        places = self._free[level]
        return 0 if len(places) == 1 else max(range(len(places)), key=lambda gpu: len(places[gpu]))

    def _refuse_closed(self) -> None:
        if self.lost is not None:
            raise DeviceLost(self.lost.what, fix=self.lost.fix)
        if self.closed:
            raise Closed(
                "the pool belongs to another process" if self.orphaned else "the pool is closed", fix="open another one"
            )

    def start_due(self, now: float, *, patient: bool = True) -> None:
        """Starts a step that is due, where there is an arena for it, and tells those for which it is too late. Without patience it waits
        for no company."""
        with self._lock:
            flight, late = self._next(now, patient=patient)
        if flight is not None or late:
            self._go_on(flight, late)
            self.tell()

    def _next(self, now: float, *, patient: bool = True) -> tuple[Flight | None, Sequence[Request]]:
        """The next step to start, and requests that are too late. The lock is held."""
        queue = self.queue
        if not queue.count or queue.next_time > now:
            return None, ()
        late = queue.expired(now)
        for level, places in enumerate(self._free):
            gpu = self._freest(level)
            if places[gpu] and (found := queue.take(now, level, patient and self._running_on[gpu] > 0)):
                return self._flight(level, gpu, sum([request.rows for request in found]), found), late
        return None, late

    def _go_on(self, flight: Flight | None, late: Sequence[Request]) -> None:
        """Starts a step, and has those told that are too late."""
        for request in late:
            said = f"the request was not run: it waited for {time.perf_counter() - request.since:.3f} s"
            self._answers.append((request, TimedOut(said, fix="send fewer, or wait longer")))
        if flight is None:
            return
        try:
            if self._threads is None:
                flight.arena.start(flight.rung, [request.feeds for request in flight.requests or ()])
                self.flying.append(flight)
            else:
                self._ready.append(flight)
                self._threads.submit(self.run)
        except Exception as problem:  # noqa: BLE001  whoever starts it, those that wait for it are told
            if self._threads is not None:
                with contextlib.suppress(ValueError):
                    self._ready.remove(flight)
            self._over.append((flight, problem))
        except BaseException:  # what it did not begin fails, and what others brought is begun again
            settle(flight)
            self._over.append((flight, EngineError("a step was interrupted as it began", fix="send it again")))
            raise

    def run(self) -> bool:
        """Runs a step from beginning to end: in a thread of its own, or in one that waits for an answer in a function that another one has
        called, so that no other thread may be left. Whether there was one."""
        outputs: Answer | Exception
        try:
            flight = self._ready.popleft()
        except IndexError:
            return False
        try:
            flight.arena.start(flight.rung, [request.feeds for request in flight.requests or ()])
            outputs = flight.arena.outputs()
        except Exception as problem:  # noqa: BLE001  as above
            outputs = problem
        self._over.append((flight, outputs))
        self.tell()
        return True

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
                        landed.append((flight, _outputs(flight)))
                except Exception as problem:  # noqa: BLE001  as above
                    landed.append((flight, problem))
            for one in landed:
                self.flying.remove(one[0])
                self._over.append(one)
        finally:
            self._polling.release()
        self.tell()
        return bool(landed)

    def tell(self) -> None:
        """Gives the arenas of steps that are over to the next ones, and then answers to those who wait for them."""
        if not (self._over or self._answers):
            return
        interrupt: KeyboardInterrupt | None = None
        me = get_ident()
        self._telling.append(me)
        try:
            while self._over or self._answers:
                try:
                    told = self._answers.popleft() if self._answers else None
                    landed = None if told else self._over.popleft()
                except IndexError:  # another thread was faster
                    continue
                try:
                    if landed is not None:
                        self._land(*landed)
                    elif told is not None:
                        _tell(*told)
                except KeyboardInterrupt as problem:  # the others are told all the same
                    interrupt = problem
        finally:
            self._telling.remove(me)
        if interrupt is not None:
            raise interrupt

    def _land(self, flight: Flight, outputs: Answer | Exception) -> None:
        """Gives the arena of a step that is over to the next one, and has its requests told."""
        requests, rest = flight.requests or (), flight.rest
        failed = isinstance(outputs, Exception)
        if isinstance(outputs, Exception) and (lost := device_lost(outputs)) is not None:
            self.lost = outputs = lost
            requests, rest = [*requests, *rest], ()
        elif failed and len(requests) > 1:
            requests, rest = (), requests
        with self._lock:
            following, late = self._landed(flight, len(requests), rest, failed=failed)
        try:
            if following is not None or late:
                self._go_on(following, late)
        finally:  # also where somebody interrupts that
            if requests:
                self._answer(requests, outputs)

    def _answer(self, requests: Sequence[Request], outputs: Answer | Exception) -> None:
        """Has requests told what a step gave."""
        answers: Sequence[Answer | Exception]
        if isinstance(outputs, Exception):
            answers = [outputs] * len(requests)
        else:
            try:
                answers = self.ports.cut(outputs, [request.rows for request in requests])
            except Exception as problem:  # noqa: BLE001  as above
                answers = [problem] * len(requests)
                with self._lock:
                    self._answered -= len(requests)
                    self._failed += len(requests)
        self._answers.extend(zip(requests, answers, strict=True))

    def land(self, flight: Flight, problem: BaseException | None) -> None:
        """Gives back what `take` gave, when its step is over, or failed."""
        self.lost = device_lost(problem) or self.lost
        with self._lock:
            self.alone -= 1
            following, late = self._landed(flight, 1, (), failed=problem is not None)
        if following is not None or late:
            self._go_on(following, late)
            self.tell()

    def _landed(
        self, flight: Flight, count: int, rest: Sequence[Request], *, failed: bool
    ) -> tuple[Flight | None, Sequence[Request]]:
        """Counts a step that is over, with so many requests that are done, and gives what comes next. The lock is held."""
        self._steps += 1
        self._rows += flight.rung
        self._filled += flight.rung - flight.rows
        if failed:
            self._failed += count
        else:
            self._answered += count
        if rest:
            rows = rest[0].rows
            return replace(flight, rung=self.ports.rung(rows), rows=rows, requests=rest[:1], rest=rest[1:]), ()
        self._free[flight.level][flight.gpu].append(flight.arena)
        self.running -= 1
        self._running_on[flight.gpu] -= 1
        return self._next(time.perf_counter()) if self.queue.count else (None, ())

    def refuse(self) -> None:
        """Takes no more requests."""
        with self._lock:
            self.closed = True

    def clear(self) -> None:
        """Fails what waits."""
        with self._lock:
            left = self.queue.clear()
            self._failed += len(left)
        said = "the pool was closed before this request was run"
        self._answers.extend((request, Closed(said, fix="send it to another one")) for request in left)
        self.tell()

    def end(self) -> None:
        """Ends threads, when nothing runs any more. One of them does not wait for itself."""
        if self._threads is not None:
            self._threads.shutdown(wait=not self.tells)

    def lose(self) -> None:
        """Forgets all, in the child of the process that it belongs to."""
        self._lock, self._polling = threading.Lock(), threading.Lock()
        self.queue = Queue(len(self._free), self.ports.batches)
        self.flying, self.running, self.alone, self._threads = [], 0, 0, None
        self._over.clear()
        self._ready.clear()
        self._answers.clear()
        self._telling.clear()
        self.closed = self.orphaned = True

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


def _outputs(flight: Flight) -> Answer:
    if flight.requests and flight.requests[0].on_device:
        return flight.arena.outputs_on_device()
    return flight.arena.outputs()


def settle(flight: Flight) -> None:
    """Waits for a step that somebody has stopped waiting for, or that was never begun: what comes next on its arena must not meet it."""
    with contextlib.suppress(Exception):
        while not flight.arena.over():
            flight.arena.wait()


def _tell(request: Request, answer: Answer | Exception) -> None:
    """Gives somebody an answer. What functions that it calls raise is logged, as futures do with what is no worse."""
    try:
        if isinstance(answer, Exception):
            request.answer.set_exception(answer)
        else:
            request.answer.set_result(answer)
    except InvalidStateError:  # somebody else has
        pass
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001
        _LOG.exception("exception calling callback for %r", request.answer)
