"""Steps of a pool: starts those that the scheduler decides on, ends those that are over, and delivers answers.

Future of a pool: a thread that waits for it works for the pool meanwhile, in place of sleeping until another thread wakes it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from _thread import RLock
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from concurrent.futures._base import FINISHED, PENDING
from dataclasses import dataclass
from threading import get_ident
from typing import Any, Protocol

from msplit.engines.base import Feeds, device_lost
from msplit.engines.table_rows import LOOKUPS
from msplit.errors import Closed, EngineError, TimedOut
from msplit.serving.pool.ports import Ports
from msplit.serving.pool.scheduler import NEVER, NOTHING, Decision, Request, Scheduler, Step
from msplit.serving.pool.settings import PoolSettings, Stats
from msplit.serving.pool.slots import Answer, Slot
from msplit.verify.results import NewRows, NewValues, ValueUpdate

OF_PROCESSES = ("rows", "filled", "steps", "in_flight", *LOOKUPS)
"""Fields of `Stats` that are counted where steps run, and not for each client of a process."""

_FIELDS = {"_condition", "_state", "_result", "_exception", "_waiters", "_done_callbacks"}
_KNOWN = set(vars(Future())) == _FIELDS
"""True if `Future` has the fields that it has in Python 3.11 and 3.12. Then all futures of a pool share one condition: to make one takes
longer than everything else that a request needs, and nobody waits for it, since `PoolFuture` waits in a way of its own."""


class Condition(RLock):  # type: ignore[misc]  # final in the stubs only; `threading.Condition` takes three times as long to enter
    """Condition that all futures of a pool share. No thread ever waits for it, so it is a lock that has nobody to notify."""

    def notify_all(self) -> None:
        """Does nothing."""

    def wait(self, timeout: float | None = None) -> bool:
        """Returns at once; for a future whose time to wait is over."""
        del timeout
        return False


class Worker(Protocol):
    """Driver of a pool, as its futures see it."""

    condition: Condition

    def work_for(self, future: PoolFuture, timeout: float | None) -> None:
        """Returns when the future is done, after so many seconds, or sooner."""

    def attend(self) -> None:
        """Has a thread of the pool end steps, since somebody wants to be called with an answer and does not wait for it."""

    def cancelled(self, future: PoolFuture) -> None:
        """Takes note that a request was cancelled."""


class PoolFuture(Future[Any]):
    """Answer to a request, which may not be there yet. Used as any other `Future`."""

    values = 0  # number of the model's values that it was made with, where a process told it

    def __init__(self, worker: Worker) -> None:
        if _KNOWN:
            self._condition: Any = worker.condition
            self._state = PENDING
            self._result: Any = None
            self._exception: BaseException | None = None
            self._waiters: list[Any] = []
            self._done_callbacks: list[Any] = []
        else:
            super().__init__()
        self._worker = worker
        self.waiters: list[threading.Lock] = []

    @property
    def is_there(self) -> bool:
        """True if it has a result or an error."""
        return self._state == FINISHED if _KNOWN else self.done()

    def result(self, timeout: float | None = None) -> Any:
        """Waits for the result; see `Future.result`."""
        if self.is_there:
            return self._result if _KNOWN and self._exception is None else super().result()
        return super().result(self._work(timeout))

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Waits for the error; see `Future.exception`."""
        return super().exception(timeout if self.is_there else self._work(timeout))

    def _work(self, timeout: float | None) -> float | None:
        """Works until the future is done. Returns the seconds of the timeout that are left."""
        start = time.perf_counter()
        self._worker.work_for(self, timeout)
        return None if timeout is None else max(timeout - (time.perf_counter() - start), 0.0)

    def set_result(self, result: Any) -> None:
        """Sets the result, and wakes the threads that wait."""
        try:
            super().set_result(result)
        finally:
            self._wake()

    def set_exception(self, exception: BaseException | None) -> None:
        """Sets an error, and wakes the threads that wait."""
        try:
            super().set_exception(exception)
        finally:
            self._wake()

    def cancel(self) -> bool:
        """Cancels the request if it still waits; see `Future.cancel`."""
        try:
            done = super().cancel()
        finally:
            self._wake()
        if done:
            self._worker.cancelled(self)
        return done

    def _wake(self) -> None:
        """Wakes the threads that wait, also where a callback raised an error that it must not."""
        if self.waiters and self.done():
            for waiter in [*self.waiters]:  # a copy: threads that wake take theirs out
                wake(waiter)

    def add_done_callback(self, fn: Callable[[Future[Any]], object]) -> None:
        """Has a function called when it is done; see `Future.add_done_callback`."""
        super().add_done_callback(fn)
        if not self.done():
            self._worker.attend()


def settle(answers: Sequence[tuple[PoolFuture, Answer | Exception]]) -> list[bool]:
    """Gives outputs to futures that wait for them and have nobody to call. Returns for each whether it has them; the others take longer."""
    done = [False] * len(answers)
    if _KNOWN:
        with answers[0][0]._condition:
            for index, (future, result) in enumerate(answers):
                if (
                    type(result) is dict
                    and future._state == PENDING
                    and not (future._done_callbacks or future._waiters)
                ):
                    future._result, future._state = result, FINISHED
                    done[index] = True
        for future, _ in answers:
            if future.waiters:
                future._wake()
    return done


def wake(waiter: threading.Lock) -> bool:
    """Wakes the thread that waits for a lock; False if another call did so before."""
    try:
        waiter.release()
    except RuntimeError:
        return False
    return True


_LOOK = 20e-6
"""Seconds between two looks whether all steps are over."""

_LOG = logging.getLogger("concurrent.futures")


@dataclass(frozen=True)
class ProcessState:
    """State of a process of a pool.

    Attributes:
        place: GPU that it has, such as ``cuda:0``.
        pid: Number of the process; 0 while it is started again.
        restarts: How often it was started again.
        stats: Counts, since the pool was opened. Those of time outs, cancelled and refused requests are the whole pool's only.
    """

    place: str
    pid: int
    restarts: int
    stats: Stats


class PoolSteps:
    """Steps of a pool, from start to answer. Any thread may call its methods; none of them waits.

    Args:
        ports: Joins requests and splits outputs.
        slots: Slots by the index that the scheduler has for them.
        scheduler: Decides what is started; called with a lock held.
        threads: Number of threads that run steps from beginning to end; 0: slots run them, and somebody has to `poll`.

    Attributes:
        flying: Steps that run and are looked after by the thread that polls.
        delivering: Threads that are delivering an answer right now.
        polled: Time of the last `poll`, in seconds of the performance counter.
        orphaned: True in a forked child, which has neither the threads nor the device of the pool.
        on_device: True where outputs can be left on the device.
        spin: Most seconds for which a thread that waits for an answer polls before it sleeps.
        sleeps: True where a thread that waits for a step sleeps until it is over, also if no other one waits.
        most_parts: Most parts of one request that are there at a time (`parts`): as many steps as run at once.
        updating: Held while the model gets other values.
    """

    def __init__(self, ports: Ports, slots: Sequence[Slot], scheduler: Scheduler, threads: int = 0) -> None:
        self._ports, self.slots, self.scheduler = ports, slots, scheduler
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="msplit-step") if threads else None
        self._lock, self._polling, self.updating = threading.Lock(), threading.Lock(), threading.Lock()
        self.flying: list[Step] = []
        self.polled = -NEVER
        self.orphaned = False
        self.on_device, self.spin = not threads, NEVER
        self.sleeps, self.most_parts = False, max(len(slots), 1)
        # Steps that are over, and answers to deliver. Each thread takes one answer at a time, so that a function that an answer calls may
        # wait for any other answer.
        self._over: deque[tuple[Step, Answer | Exception]] = deque()
        self._answers: deque[tuple[Request, Answer | Exception]] = deque()
        self.delivering: list[int] = []
        self._ready: deque[Step] = deque()

    @property
    def busy(self) -> bool:
        """True while anything runs, waits or is to be delivered."""
        return bool(self.scheduler.running or self.scheduler.queue.count or self._answers)

    @property
    def ready(self) -> bool:
        """True while it can answer."""
        return self.scheduler.lost is None

    @property
    def is_delivering(self) -> bool:
        """True if this thread is delivering an answer right now, that is, was called by a function which the answer called."""
        return get_ident() in self.delivering

    def put(self, request: Request) -> None:
        """Takes a request, and starts its step if it is due. Raises what `Scheduler.put` does."""
        with self._lock:
            decision = self.scheduler.put(request)
        if decision is not NOTHING:
            self._do(decision)

    def take(self, level: int, rows: int, length: int = 0) -> Step | None:
        """Reserves a slot for a step that the calling thread runs itself; see `Scheduler.take`."""
        with self._lock:
            return self.scheduler.take(level, rows, length)

    def start_due(self, now: float, *, join: bool = True) -> None:
        """Starts the step that is due, and fails requests that are too late; see `Scheduler.due`."""
        with self._lock:
            decision = self.scheduler.due(now, join=join)
        if decision is not NOTHING:
            self._do(decision)

    def cut(self, outputs: Answer, rows: int, feeds: Feeds) -> Answer:
        """Answer to the only request of a step, out of the step's outputs."""
        answer = self._ports.cut(outputs, (rows,))[0]
        return self._ports.of_length(answer, feeds) if self._ports.lengths else answer

    def end_alone(self, step: Step, problem: BaseException | None) -> None:
        """Gives back the slot of a step that this thread ran itself. `problem` is the error with which it failed."""
        if problem is not None:
            self.scheduler.lost = device_lost(problem) or self.scheduler.lost
        with self._lock:
            decision = self.scheduler.ended(step, time.perf_counter(), failed=problem is not None)
        if decision is not NOTHING:
            self._do(decision)

    def _do(self, decision: Decision) -> None:
        self._begin(decision)
        self.deliver()

    def _begin(self, decision: Decision) -> None:
        """Starts the step of a decision, and notes errors for the requests that are too late."""
        for request in decision.late:
            message = f"the request was not run: it waited for {time.perf_counter() - request.since:.3f} s"
            self._answers.append((request, TimedOut(message, fix="send fewer, or wait longer")))
        step = decision.start
        if step is None:
            return
        try:
            if self._threads is None:
                self._fly(step)
            else:
                self._ready.append(step)
                self._threads.submit(self.run_ready)
        except Exception as problem:  # noqa: BLE001  the thread that starts a step is not always the one that waits for it
            if self._threads is not None:
                with contextlib.suppress(ValueError):
                    self._ready.remove(step)
            self._over.append((step, problem))
        except BaseException:  # an interrupt: requests of this thread and of others fail, or are run again
            drain(self.slots[step.slot])
            self._over.append((step, EngineError("a step was interrupted as it began", fix="send it again")))
            raise

    def _fly(self, step: Step) -> None:
        self._start(step)
        self.flying.append(step)

    def _start(self, step: Step) -> None:
        self.start(step, [request.feeds for request in step.requests])

    def start(self, step: Step, feeds: Sequence[Feeds]) -> None:
        """Starts a step in its slot, on the inputs of its requests."""
        if step.length:
            self.slots[step.slot].start(step.size, self._ports.at_length(feeds, step.length))
        else:
            self.slots[step.slot].start(step.bucket, feeds)

    def run_ready(self) -> bool:
        """Runs a step from beginning to end. Threads of the pool call it, and a thread that waits for an answer inside of a function which
        another answer called, since no thread of the pool may be left. False if there was no step to run."""
        outputs: Answer | Exception
        try:
            step = self._ready.popleft()
        except IndexError:
            return False
        try:
            self._start(step)
            outputs = self.slots[step.slot].outputs()
        except Exception as problem:  # noqa: BLE001  those that wait for the step get it
            outputs = problem
        self._over.append((step, outputs))
        self.deliver()
        return True

    def poll(self) -> bool:
        """Ends the steps that are over, one thread at a time. True if there were any."""
        if not self._polling.acquire(blocking=False):
            return False
        over: list[tuple[Step, Answer | Exception]] = []
        try:
            self.polled = time.perf_counter()
            for step in self.flying:
                try:
                    slot = self.slots[step.slot]
                    if slot.over():
                        on_device = step.requests[0].on_device
                        future = step.requests[0].future if len(step.requests) == 1 else None
                        over.append((step, slot.outputs_on_device() if on_device else outputs_for(future, slot)))
                except Exception as problem:  # noqa: BLE001  those that wait for the step get it
                    over.append((step, problem))
            for entry in over:
                self.flying.remove(entry[0])
                self._over.append(entry)
        finally:
            self._polling.release()
        self.deliver()
        return bool(over)

    def deliver(self) -> None:
        """Gives the slots of steps that are over to the next ones, and then the answers to those who wait for them."""
        if not (self._over or self._answers):
            return
        interrupt: KeyboardInterrupt | None = None
        me = get_ident()
        self.delivering.append(me)
        try:
            while self._over or self._answers:
                try:
                    answer = self._answers.popleft() if self._answers else None
                    over = None if answer else self._over.popleft()
                except IndexError:  # another thread was faster
                    continue
                try:
                    if over is not None:
                        self._end(*over)
                    elif answer is not None:
                        _deliver(*answer)
                except KeyboardInterrupt as problem:  # the others get their answers all the same
                    interrupt = problem
        finally:
            self.delivering.remove(me)
        if interrupt is not None:
            raise interrupt

    def _end(self, step: Step, result: Answer | Exception) -> None:
        """Gives the slot of a step that is over to the next one, and notes the answers to its requests."""
        failed = isinstance(result, Exception)
        if isinstance(result, Exception):
            self.scheduler.lost = device_lost(result) or self.scheduler.lost
            result = self.scheduler.lost or result
        with self._lock:
            decision = self.scheduler.ended(step, time.perf_counter(), failed=failed)
        try:
            self._begin(decision)
        finally:  # also if that is interrupted
            if decision.answer:
                self._split(decision.answer, result)

    def _split(self, requests: Sequence[Request], result: Answer | Exception) -> None:
        """Notes the answer to each request of a step. The GPU has its next step by now, since splitting outputs takes a while."""
        answers: Sequence[Answer | Exception]
        if isinstance(result, Exception):
            answers = [result] * len(requests)
        else:
            try:
                answers = self._ports.cut(result, [request.rows for request in requests])
                if self._ports.lengths:
                    pairs = zip(answers, requests, strict=True)
                    answers = [self._ports.of_length(answer, request.feeds) for answer, request in pairs]
            except Exception as problem:  # noqa: BLE001  those that wait for the step get it
                answers = [problem] * len(requests)
                with self._lock:
                    self.scheduler.count_failed(len(requests))
        self._answers.extend(zip(requests, answers, strict=True))

    @contextlib.contextmanager
    def paused(self, drive: Callable[[float], object]) -> Iterator[None]:
        """A block in which no step runs; requests wait. `drive` ends those that run."""
        with self._lock:
            self.scheduler.paused = True
        try:
            while self.scheduler.running:
                drive(0.0)
                if not self.run_ready():
                    time.sleep(_LOOK)
            yield
        finally:
            with self._lock:
                self.scheduler.paused = False
            for _ in self.slots:
                self.start_due(time.perf_counter(), join=False)

    def update(self, source: NewValues | None, rows: NewRows | None) -> ValueUpdate | None:
        """Gives the model other values where it is, if that is not here; called with `updating` held."""

    def close(self, *, finish: bool = True) -> None:
        """Takes no more requests. Those that wait fail, unless they are to be finished."""
        with self._lock:
            self.scheduler.close()
            left = () if finish else self.scheduler.clear()
        message = "the pool was closed before this request was run"
        self._answers.extend((request, Closed(message, fix="send it to another one")) for request in left)
        self.deliver()

    def cancelled(self, future: PoolFuture) -> None:
        """Takes note that a request was cancelled, which is found out when its step is to start."""

    def end(self) -> None:
        """Ends the pool's threads when nothing runs any more. If one of them calls this, it does not wait for itself."""
        if self._threads is not None:
            self._threads.shutdown(wait=not self.is_delivering)

    def after_fork(self) -> None:
        """Forgets everything, in a forked child: locks, threads and the device are the parent's."""
        scheduler = Scheduler((), (), int, PoolSettings())
        scheduler.close("the pool belongs to another process")
        scheduler.lost = self.scheduler.lost
        vars(self).update(vars(PoolSteps(self._ports, (), scheduler)), orphaned=True)

    def reduce(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Pickled form of a pool for another process: its processes, where it has some.

        Raises:
            TypeError: It has none.
        """
        raise TypeError("a pool whose steps run in this process can not be sent to another one")

    def processes(self) -> tuple[ProcessState, ...]:
        """State of each process that runs steps; none where this one does."""
        return ()

    def stats(self) -> Stats:
        """Counts so far."""
        with self._lock:
            return self.scheduler.stats()


def outputs_for(future: Any, slot: Slot) -> Answer:
    """Outputs of a step that is over for the only one who gets them, if there is one: at their places, if that has memory for them."""
    places = getattr(future, "places", None)
    return slot.outputs() if places is None else slot.outputs(places())


def drain(slot: Slot) -> None:
    """Waits until a slot is free that was left in the middle of a step, so that the next step does not meet it."""
    with contextlib.suppress(Exception):
        while not slot.over():
            slot.wait()


def _deliver(request: Request, answer: Answer | Exception) -> None:
    """Gives an answer to a future. Errors of functions that the future calls are logged, as futures do with `Exception`."""
    try:
        if isinstance(answer, Exception):
            request.future.set_exception(answer)
        else:
            request.future.set_result(answer)
    except (
        InvalidStateError
    ):  # somebody else has answered it, or cancelled it, which those who wait for several are told
        if request.future.cancelled():
            request.future.set_running_or_notify_cancel()
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001
        _LOG.exception("exception calling callback for %r", request.future)
