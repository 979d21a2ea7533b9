"""Drivers of a pool: threads that wait for answers, or an event loop, start its steps and end them.

A thread that waits for an answer does the work of the pool meanwhile: to hand a request over to another thread and back takes 19 µs, and a
small step takes 46. The thread that brings a request starts its step if a slot is free. Of the threads that wait, one leads: it ends all
steps that are over and starts those that are due. A thread of the pool does so where no other waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from typing import Any

from msplit.engines.base import Feeds, device_lost
from msplit.errors import Closed
from msplit.serving.pool.scheduler import NEVER, Step
from msplit.serving.pool.slots import Answer, Slot
from msplit.serving.pool.steps import Condition, PoolFuture, PoolSteps, drain, outputs_for, wake

_POLLS = 8
"""Number of polls of a thread before it lets other threads run."""
_SPIN = 1e-3
"""Seconds for which a thread polls without sleeping. For longer steps, it sleeps `NAP` between two polls."""
NAP = 50e-6
_POLL_INTERVAL = 200e-6
"""Seconds between two polls of a thread that brings request after request and waits for none: fewer polls, fuller steps."""
_UNATTENDED = 1e-3
"""Seconds after which the pool's own thread looks after steps that no other thread waits for."""
_LINGER = 10e-3
"""Seconds without work after which that thread goes to sleep; to wake it takes long."""
_LOOP_SPIN = 0.02
"""Seconds after the last request for which an event loop polls in every turn. After that, it polls every `_LOOP_NAP` seconds."""
_LOOP_NAP = 1e-3


class ThreadDriver:
    """Driver of a pool by the threads that use it; see `Worker` for its side towards futures.

    One of the threads that wait leads. The others follow: they sleep until their answers are there, or until they are to lead. A thread
    that brings a request for which a slot is free runs that step alone.

    Args:
        polls: True where steps are over when somebody polls. False where the pool's threads run and end them; then nobody leads.
    """

    def __init__(self, steps: PoolSteps, *, polls: bool) -> None:
        self._steps, self._polls = steps, polls
        self.condition = Condition()
        self._leading = threading.Lock()
        self._leader: int | None = None
        self._waiters: deque[threading.Lock] = deque()
        self._alone: deque[tuple[Step, Feeds, PoolFuture]] = deque()
        self._eager = self._awake = False
        self._driven = -NEVER
        self._wake = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="msplit-pool", daemon=True)
        self._keeper.start()

    def poll_sometimes(self, now: float) -> None:
        """Polls if the last poll is a while ago; for a thread that has brought a request and waits for none."""
        if self._steps.flying and now - self._steps.polled > _POLL_INTERVAL:
            self._steps.poll()
        if not self._awake:
            self._wake_keeper()

    def _wake_keeper(self) -> None:
        self._awake = True
        self._wake.set()

    def run_alone(self, step: Step, feeds: Feeds) -> Answer:
        """Runs a step of `PoolSteps.take` from beginning to end. While other threads are at work, this one sleeps and lets them run."""
        steps = self._steps
        slot = steps.slots[step.slot]
        failed: BaseException | None = None
        try:
            steps.start(step, (feeds,))
            start = time.perf_counter()
            while not _is_over(slot):
                if steps.scheduler.alone > 1 or self._waiters:
                    slot.wait()
                elif time.perf_counter() - start < _SPIN:
                    _POLL.poll(0)
                else:
                    time.sleep(NAP)
            return slot.outputs()
        except BaseException as problem:
            failed = problem
            drain(slot)
            if (lost := device_lost(problem)) is not None:
                raise lost from problem
            raise
        finally:
            steps.end_alone(step, failed)
            if self._waiters and not self._leading.locked():
                self._promote()

    def start_alone(self, step: Step, feeds: Feeds, future: PoolFuture) -> None:
        """Starts a step of `PoolSteps.take` for one request, which nobody can cancel any more; `drive` ends it. It needs a fifth of the
        time that the queue takes."""
        try:
            self._steps.start(step, (feeds,))
        except Exception as problem:  # noqa: BLE001  who waits for the step gets it
            self._end_alone(step, feeds, future, problem)
        else:
            self._alone.append((step, feeds, future))

    def _poll_alone(self) -> None:
        """Ends those of these steps that are over."""
        for _ in range(len(self._alone)):
            try:
                step, feeds, future = self._alone.popleft()
            except IndexError:  # another thread was faster
                return
            slot = self._steps.slots[step.slot]
            try:
                if slot.over():
                    self._end_alone(step, feeds, future, outputs_for(future, slot))
                else:
                    self._alone.append((step, feeds, future))
            except Exception as problem:  # noqa: BLE001  who waits for the step gets it
                drain(slot)
                self._end_alone(step, feeds, future, problem)

    def _end_alone(self, step: Step, feeds: Feeds, future: PoolFuture, result: Answer | Exception) -> None:
        steps = self._steps
        steps.end_alone(step, result if isinstance(result, Exception) else None)
        if self._waiters and not self._leading.locked():
            self._promote()
        if isinstance(result, Exception):
            future.set_exception(steps.scheduler.lost or result)
        else:
            future.set_result(steps.cut(result, step.rows, feeds))

    def drive(self, seconds: float) -> bool:
        """Does the work of the pool for so many seconds, or until nothing is left; see `Pool.drive`."""
        steps = self._steps
        end = time.perf_counter() + seconds
        while True:
            now = self._driven = time.perf_counter()
            if self._alone:
                self._poll_alone()
            steps.poll()
            if steps.scheduler.queue.count:
                steps.start_due(now)
            if not steps.busy or now >= end:
                return steps.busy
            _POLL.poll(0)

    def work_for(self, future: PoolFuture, timeout: float | None) -> None:
        """Leads, or follows, until a future is done or the time is over."""
        end = NEVER if timeout is None else time.perf_counter() + timeout
        me, steps = get_ident(), self._steps
        while not future.done() and time.perf_counter() < end:
            if steps.orphaned:
                raise Closed("the request belongs to another process", fix="open a pool in this one")
            if steps.is_delivering:
                steps.deliver()  # this thread may have that answer to deliver, or that step to run
                if not self._polls:
                    if not future.done() and not steps.run_ready():
                        time.sleep(NAP)
                    continue
                if future.done():
                    return
            # A leader that waits inside of a function which an answer called leads on.
            nested = self._leader == me
            if self._polls and (
                nested or ((steps.flying or not steps.scheduler.alone) and self._leading.acquire(blocking=False))
            ):
                try:
                    self._leader = me
                    self._lead(lambda: future.done() or time.perf_counter() > end)
                finally:
                    if not nested:
                        self._stop_leading()
            else:
                steps.start_due(time.perf_counter(), join=False)
                self._follow(future, end)

    def _stop_leading(self) -> None:
        self._leader = None
        self._leading.release()
        self._promote()

    def _lead(self, enough: Callable[[], bool]) -> None:
        """Ends steps that are over and starts those that are due, until it is enough."""
        steps = self._steps
        start = time.perf_counter()
        while not enough():
            for _ in range(_POLLS):
                if steps.poll():
                    start = time.perf_counter()
                    break
            else:
                now = time.perf_counter()
                others = bool(steps.scheduler.alone or self._waiters)
                if steps.scheduler.queue.count:
                    steps.start_due(now, join=others)
                flying = steps.flying[:1]
                if not flying and steps.scheduler.alone:
                    return  # threads that run their steps alone promote one that waits when there is work
                spins = now - start < min(_SPIN, steps.spin)
                if flying and (others or (steps.sleeps and not spins)):
                    with contextlib.suppress(Exception):  # `poll` reports it
                        steps.slots[flying[0].slot].wait()
                elif spins:
                    _POLL.poll(0)
                else:
                    time.sleep(NAP)

    def _follow(self, future: PoolFuture, end: float) -> None:
        """Sleeps until a future is done, the time is over, or this thread is to lead."""
        steps = self._steps
        waiter = threading.Lock()
        waiter.acquire()
        future.waiters.append(waiter)
        self._waiters.append(waiter)
        woken = True
        try:
            if not future.done() and (
                self._leading.locked() or not self._polls or (steps.scheduler.alone and not steps.flying)
            ):
                woken = False
                woken = waiter.acquire(timeout=-1 if end == NEVER else max(end - time.perf_counter(), 0.0))
        finally:
            future.waiters.remove(waiter)
            try:
                self._waiters.remove(waiter)
            except ValueError:  # it was chosen to lead; if it has its answer by now, or no time left, another one is
                if future.done() or not woken:
                    self._promote()

    def _promote(self) -> None:
        """Wakes one of the threads that follow, to lead."""
        while self._waiters:
            try:
                waiter = self._waiters.popleft()
            except IndexError:  # another thread was faster
                return
            if wake(waiter):
                return

    def attend(self) -> None:
        """Has the pool's own thread lead, since somebody wants to be called with an answer and does not wait for it."""
        self._eager = True
        if not self._awake:
            self._wake_keeper()

    def cancelled(self, future: PoolFuture) -> None:
        """Takes note that a request was cancelled."""
        self._steps.cancelled(future)

    def _keep(self) -> None:
        """Body of the pool's own thread: does the work that no other thread does."""
        steps = self._steps
        idle_since = time.perf_counter()
        while not steps.scheduler.closed or steps.busy:
            now = time.perf_counter()
            if not steps.busy:
                if now - idle_since < _LINGER:
                    time.sleep(_UNATTENDED)
                    continue
                self._awake = self._eager = False
                if not steps.busy and not steps.scheduler.closed:
                    self._wake.wait()
                self._wake.clear()
                self._awake = True
                continue
            idle_since = now
            if self._eager and self._polls and now - self._driven > _LINGER and self._leading.acquire(blocking=False):
                driven = self._driven
                try:
                    self._leader = get_ident()
                    self._lead(lambda driven=driven: not steps.busy or self._driven != driven)  # type: ignore[misc]
                finally:
                    self._stop_leading()
                time.sleep(NAP)
                continue
            due = steps.scheduler.queue.next_time - now
            time.sleep(due if 0 < due < _UNATTENDED else _UNATTENDED)
            if self._polls and now > steps.polled:
                steps.poll()
            if steps.scheduler.queue.count:
                steps.start_due(time.perf_counter())

    def dismiss(self) -> None:
        """Has the pool's own thread end when nothing runs any more; for a pool that nobody can reach."""
        self._steps.scheduler.close()  # without the lock, which a thread may hold that collects garbage
        self._wake.set()

    def end(self) -> None:
        """Ends the pool's own thread; when nothing runs any more, and no more requests are taken."""
        self._wake.set()
        if threading.current_thread() is not self._keeper and not self._steps.orphaned:
            self._keeper.join()


def _is_over(slot: Slot) -> bool:
    """True if a step is over in one of the next polls."""
    for _ in range(_POLLS):  # noqa: SIM110  to make a generator takes as long as four polls
        if slot.over():
            return True
    return False


class _Poll(threading.local):
    """Empty poll object of each thread: `poll(0)` lets other threads of Python run, and returns at once."""

    def __init__(self) -> None:
        self.poll = select.poll().poll


_POLL = _Poll()


@dataclass(slots=True)
class LoopDriver:
    """Driver of a pool by the running event loop. No thread has to be woken for a request, and requests that are read between two polls
    share the next step.

    Args:
        drive: `Pool.drive`.
        polls: True where steps are over when somebody polls. Where threads of the pool run steps, the loop has nothing to do.
    """

    drive: Callable[[], bool]
    polls: bool
    _working: bool = False
    _since: float = 0.0

    def ask(self, future: Future[Any]) -> asyncio.Future[Any]:
        """Gives a future of the running loop that gets the result, the error or the cancellation of a pool's future. From now on the loop
        works for the pool until nothing is left to do."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[Any] = loop.create_future()
        arrive = partial(_arrive, loop, get_ident(), waiter)
        if self.polls:  # `PoolFuture` would have a thread of the pool do what the loop does
            Future.add_done_callback(future, arrive)
        else:
            future.add_done_callback(arrive)
        self._since = time.perf_counter()
        if self.polls and not self._working:
            self._working = True
            loop.call_soon(self._turn)
        return waiter

    def _turn(self) -> None:
        self._working = False  # if it fails, the next request tries again
        self._working = self.drive()
        if not self._working:
            return
        loop = asyncio.get_running_loop()
        if time.perf_counter() - self._since < _LOOP_SPIN:
            loop.call_soon(self._turn)
        else:
            loop.call_later(_LOOP_NAP, self._turn)


def _arrive(loop: asyncio.AbstractEventLoop, thread: int, waiter: asyncio.Future[Any], future: Future[Any]) -> None:
    """Takes an answer into its event loop, from the thread that delivers it."""
    if get_ident() == thread:
        _hand_over(waiter, future)
    elif not loop.is_closed():
        loop.call_soon_threadsafe(_hand_over, waiter, future)


def _hand_over(waiter: asyncio.Future[Any], future: Future[Any]) -> None:
    if waiter.done():  # the caller has gone
        return
    if future.cancelled():
        waiter.cancel()
    elif (problem := future.exception()) is not None:
        waiter.set_exception(problem)
    else:
        waiter.set_result(future.result())
