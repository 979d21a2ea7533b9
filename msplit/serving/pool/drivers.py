"""Who looks after steps in flight: a thread that waits for an answer, one that waits for its own step, or the pool's own."""

from __future__ import annotations

import contextlib
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from threading import get_ident

from msplit.engines.base import Feeds, device_lost
from msplit.errors import Closed
from msplit.serving.pool.future import Pending, wake
from msplit.serving.pool.queue import NEVER
from msplit.serving.pool.scheduler import Answer, Arena, Flight, Flights, settle

_LOOKS = 8
"""How often a thread looks at all that is in flight before it lets go of the interpreter's lock."""
_PATIENCE = 1e-3
"""Seconds that a thread looks for. Longer steps are waited for with naps."""
NAP = 50e-6
_GLANCE = 200e-6
"""Seconds between two looks at what is in flight of a thread that brings request after request, and waits for none: the more come together,
the fewer steps they need."""
_UNATTENDED = 1e-3
"""Seconds after which the pool's own thread looks after steps for which nobody waits."""
_LINGER = 10e-3
"""Seconds without work after which that thread goes to sleep, from which to wake it takes long."""


class Attendance:
    """See `Worker`. One of the threads that wait leads: it looks after all steps in flight; the others follow, and are woken when their
    answers are there, or to lead. A thread that brings a request for which an arena is free looks after that step alone.

    Args:
        polls: Whether steps are over when somebody looks. Otherwise those that run them end them, and everybody follows.
    """

    def __init__(self, flights: Flights, *, polls: bool) -> None:
        self._flights, self._polls = flights, polls
        self.condition = threading.Condition()
        self._leading = threading.Lock()
        self._leader: int | None = None
        self._waiters: deque[threading.Lock] = deque()
        self._eager = self._awake = False
        self._driven = -NEVER
        self._wake = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="msplit-pool", daemon=True)
        self._keeper.start()

    def glance(self, now: float) -> None:
        """Looks after what is in flight once in a while, for a thread that has brought a request and waits for none."""
        if self._flights.flying and now - self._flights.looked > _GLANCE:
            self._flights.poll()
        if not self._awake:
            self._awake = True
            self._wake.set()

    def alone(self, flight: Flight, feeds: Feeds) -> Answer:
        """Runs a step from beginning to end. Where other threads are at work, it waits without the interpreter's lock, which they need."""
        arena, flights = flight.arena, self._flights
        failed: BaseException | None = None
        try:
            arena.start(flight.rung, (feeds,))
            start, look_up = time.perf_counter(), _look_up()
            while not _seen(arena):
                if flights.alone > 1 or self._waiters:
                    arena.wait()
                elif time.perf_counter() - start < _PATIENCE:
                    look_up(0)
                else:
                    time.sleep(NAP)
            return arena.outputs()
        except BaseException as problem:
            failed = problem
            settle(flight)
            if (lost := device_lost(problem)) is not None:
                raise lost from problem
            raise
        finally:
            flights.land(flight, failed)
            if self._waiters and not self._leading.locked():
                self._promote()

    def drive(self, seconds: float) -> bool:
        """See `Pool.drive`."""
        flights = self._flights
        end = time.perf_counter() + seconds
        look_up = _look_up() if seconds else None
        while True:
            now = self._driven = time.perf_counter()
            flights.poll()
            if flights.queue.count:
                flights.start_due(now)
            if not flights.busy or now >= end:
                return flights.busy
            if look_up is not None:
                look_up(0)

    def work_for(self, pending: Pending, timeout: float | None) -> None:
        """See `Worker`: looks after all that is in flight until an answer is there, or waits while another thread does."""
        end = NEVER if timeout is None else time.perf_counter() + timeout
        me = get_ident()
        while not pending.done() and time.perf_counter() < end:
            if self._flights.orphaned:
                raise Closed("the request belongs to another process", fix="open a pool in this one")
            if self._flights.tells:
                self._flights.tell()  # it may be one that this thread has still to tell, or to run
                if not self._polls:
                    if not pending.done() and not self._flights.run():
                        time.sleep(NAP)
                    continue
                if pending.done():
                    return
            nested = self._leader == me  # a function that an answer called asks for another one
            if self._polls and (
                nested or ((self._flights.flying or not self._flights.alone) and self._leading.acquire(blocking=False))
            ):
                try:
                    self._leader = me
                    self._lead(lambda: pending.done() or time.perf_counter() > end)
                finally:
                    if not nested:
                        self._leader = None
                        self._leading.release()
                        self._promote()
            else:
                self._flights.start_due(time.perf_counter(), patient=False)
                self._follow(pending, end)

    def _lead(self, enough: Callable[[], bool]) -> None:
        """Looks after all that is in flight."""
        start = time.perf_counter()
        look_up = _look_up()
        while not enough():
            for _ in range(_LOOKS):
                if self._flights.poll():
                    start = time.perf_counter()
                    break
            else:
                now = time.perf_counter()
                others = bool(self._flights.alone or self._waiters)
                if self._flights.queue.count:
                    self._flights.start_due(now, patient=not others)
                flying = self._flights.flying[:1]
                if not flying and self._flights.alone:
                    return  # those who look after their own steps will say when there are others
                if flying and others:
                    with contextlib.suppress(Exception):  # whoever looks whether it is over is told of it
                        flying[0].arena.wait()
                elif now - start < _PATIENCE:
                    look_up(0)
                else:
                    time.sleep(NAP)

    def _follow(self, pending: Pending, end: float) -> None:
        """Waits for an answer, or to be the one who looks after all."""
        waiter = threading.Lock()
        waiter.acquire()
        pending.waiters.append(waiter)
        self._waiters.append(waiter)
        woken = True
        try:
            if not pending.done() and (
                self._leading.locked() or not self._polls or (self._flights.alone and not self._flights.flying)
            ):
                woken = False
                woken = waiter.acquire(timeout=-1 if end == NEVER else max(end - time.perf_counter(), 0.0))
        finally:
            pending.waiters.remove(waiter)
            try:
                self._waiters.remove(waiter)
            except ValueError:  # it was chosen, and may have its answer by now, or no time
                if pending.done() or not woken:
                    self._promote()

    def _promote(self) -> None:
        """Has one of those who wait look after all."""
        while self._waiters:
            if wake(self._waiters.popleft()):
                return

    def attend(self) -> None:
        """See `Worker`."""
        self._eager = True
        if not self._awake:
            self._awake = True
            self._wake.set()

    def _keep(self) -> None:
        """The pool's own thread: looks after what nobody looks after, and after what is due or too late."""
        idle_since = time.perf_counter()
        while not self._flights.closed or self._flights.busy:
            now = time.perf_counter()
            if not self._flights.busy:
                if now - idle_since < _LINGER:
                    time.sleep(_UNATTENDED)
                    continue
                self._awake = self._eager = False
                if not self._flights.busy and not self._flights.closed:
                    self._wake.wait()
                self._wake.clear()
                self._awake = True
                continue
            idle_since = now
            if self._eager and self._polls and now - self._driven > _LINGER and self._leading.acquire(blocking=False):
                driven = self._driven
                try:
                    self._leader = get_ident()
                    self._lead(lambda driven=driven: not self._flights.busy or self._driven != driven)  # type: ignore[misc]
                finally:
                    self._leader = None
                    self._leading.release()
                    self._promote()
                time.sleep(NAP)
                continue
            due = self._flights.queue.next_time - now
            time.sleep(due if 0 < due < _UNATTENDED else _UNATTENDED)
            if self._polls and now > self._flights.looked:
                self._flights.poll()
            if self._flights.queue.count:
                self._flights.start_due(time.perf_counter())

    def dismiss(self) -> None:
        """Has the pool's own thread end when nothing is in flight any more. Nobody can bring requests."""
        self._flights.refuse()
        self._wake.set()

    def end(self) -> None:
        """Ends the pool's own thread, when nothing is in flight and no more is taken."""
        self._wake.set()
        if threading.current_thread() is not self._keeper and not self._flights.orphaned:
            self._keeper.join()


def _seen(arena: Arena) -> bool:
    """Whether a step is over by one of the next looks."""
    for _ in range(_LOOKS):  # noqa: SIM110  to make a generator takes as long as to look four times
        if arena.over():
            return True
    return False


def _look_up() -> Callable[[int], object]:
    """A function that lets go of the interpreter's lock and is back at once. Each thread needs its own."""
    return select.poll().poll
