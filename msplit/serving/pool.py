"""A pool: several steps of one model in flight at once, over one set of weights, for requests from any number of threads.

Who waits does the work. There is no thread that requests are handed to: to hand one over and back takes 19 µs, and a small step takes 46.
The thread that brings a request starts its step if an arena is free; the one that waits for an answer looks after all that is in flight,
ends what is over, and starts what waits. Where nobody waits, a thread of the pool does so.
"""

from __future__ import annotations

import select
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import get_ident
from types import TracebackType
from typing import Any, Protocol

from numpy.typing import NDArray

from msplit.core.arguments import number, whole
from msplit.decide.shown import Facts, Shown
from msplit.engines.base import Executable, Feeds
from msplit.errors import Closed, TimedOut
from msplit.measure.results import Check
from msplit.serving.pending import Pending, wake
from msplit.serving.ports import Port, Ports
from msplit.serving.queue import NEVER, Queue, Request
from msplit.serving.settings import PoolSettings

Answer = dict[str, NDArray[Any]]

_LOOKS = 8
"""How often a thread looks at all that is in flight before it lets go of the interpreter's lock."""
_PATIENCE = 1e-3
"""Seconds that a thread looks for. Longer steps are waited for with naps."""
_NAP = 50e-6
_GLANCE = 200e-6
"""Seconds between two looks at what is in flight of a thread that brings request after request, and waits for none: the more come together,
the fewer steps they need."""
_UNATTENDED = 1e-3
"""Seconds after which the pool's own thread looks after steps for which nobody waits."""
_LINGER = 10e-3
"""Seconds without work after which that thread goes to sleep, from which to wake it takes long."""


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


@dataclass(frozen=True, eq=False)
class About:
    """What a pool runs.

    Attributes:
        label: What it is called in a bench.
        outputs: Type and shape of every output by name. A first dimension of None has the rows of a request.
        checks: What outputs were held against, for each arena and batch.
        notes: What is worth knowing.
        facts: Streams of an arena, bytes: whatever is known.
    """

    label: str
    outputs: Mapping[str, Port]
    checks: tuple[Check, ...]
    notes: tuple[str, ...]
    facts: Mapping[str, Any]


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
class _Flight:
    """A step in flight."""

    arena: Arena
    level: int
    requests: list[Request]
    rung: int


class Pool(Shown):
    """Several steps of one model in flight at once. See `msplit.pool`. Close it, or use it in a ``with`` statement.

    Any thread may call it.

    Attributes:
        about: What runs.
        inputs: Type and shape of every input by name. A first dimension of None has the rows of a request.
        outputs: Likewise.
        batches: Rows of the steps that there are, ascending; empty where the shapes of a model are fixed.
        joins: Whether requests that wait share a step, and a step is filled up: where rows are independent. Otherwise each request is one
            of `batches`.
        settings: How it answers requests; `groups` is a number, also where it was ``auto``.
        polls: Whether steps are over when somebody looks, as those of a GPU are, and `drive` is of use.
    """

    def __init__(
        self,
        ports: Ports,
        arenas: Sequence[tuple[int, Arena]],
        settings: PoolSettings,
        about: About,
        *,
        threads: int = 0,
        owned: Sequence[Executable] = (),
    ) -> None:
        """Arenas come with their levels of priority. With `threads`, each step keeps one of so many threads busy until it is over. What is
        `owned` is closed when they are."""
        self.about, self.inputs, self.outputs, self.settings = about, ports.inputs, about.outputs, settings
        self.batches, self.joins, self.polls = ports.batches, ports.joins, not threads
        self._ports = ports
        self._owned: list[Arena | Executable] = [*(arena for _, arena in arenas), *owned]
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="msplit-step") if threads else None
        self._free: list[list[Arena]] = [[] for _ in range(settings.priorities)]
        for level, arena in arenas:
            self._free[level].append(arena)
        self._queue = Queue(settings.priorities, ports.batches, settings.max_delay_us / 1e6, settings.max_queue)
        self._lock, self._polling, self._leading = threading.Lock(), threading.Lock(), threading.Lock()
        self.condition = threading.Condition()
        self._leader: int | None = None
        self._waiters: deque[threading.Lock] = deque()
        self._flying: list[_Flight] = []
        self._running = self._alone = 0
        self._answered = self._failed = self._rows = self._filled = self._steps = self._direct = 0
        self._closed = self._eager = self._awake = False
        self._looked = self._driven = -NEVER
        self._wake = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="msplit-pool", daemon=True)
        self._keeper.start()

    def _facts(self) -> Facts:
        ends = [(f"input {name}", f"{port.dtype} {list(port.shape)}") for name, port in self.inputs.items()]
        batches = ", ".join(map(str, self.batches)) or "as the model says"
        return [("runs", self.about.label), ("groups", str(self.settings.groups)), ("batches", batches), *ends]

    def step(self, feeds: Feeds, *, priority: int = 0, timeout: float | None = None) -> Answer:
        """The answer to a request. See `submit`, which does not wait for it."""
        if self.polls and timeout is None and not self._queue.count and not self.settings.max_delay_us:
            answer = self._at_once(feeds, priority)
            if answer is not None:
                return answer
        found: Answer = self.submit(feeds, priority=priority, timeout=timeout).result()
        return found

    def submit(self, feeds: Feeds, *, priority: int = 0, timeout: float | None = None) -> Future[Answer]:
        """Takes a request. Its arrays must stay as they are until it is answered.

        Args:
            feeds: Inputs by name: arrays, or tensors that speak DLPack, which are brought to the host.
            priority: 0 is the most urgent, `settings.priorities` - 1 the least.
            timeout: Seconds after which it is too late to start it.

        Returns:
            Gives outputs by name, the caller's own. `cancel` it to have it not run, as long as it waits. Functions that it is to call when
            it is done are called by whatever thread ends the step, and must be short.

        Raises:
            EngineError: An input is missing, or has another type or shape than it must.
            Busy: As many requests wait as may.
            Closed: The pool is closed.
        """
        if priority:
            whole("the priority", priority, 0, self.settings.priorities - 1)
        arrays, rows, key = self._ports.check(feeds)
        now = time.perf_counter()
        deadline = NEVER if timeout is None else now + number("the timeout", timeout)
        pending = Pending(self)
        with self._lock:
            self._refuse_closed()
            self._queue.put(Request(arrays, rows, key, priority, now, deadline, pending))
            flight, late = self._next(now)
        if flight is not None or late:
            self._go_on(flight, late)
        if self._flying and now - self._looked > _GLANCE:
            self._poll()
        if not self._awake:
            self._awake = True
            self._wake.set()
        return pending

    def _refuse_closed(self) -> None:
        if self._closed:
            raise Closed("the pool is closed", fix="open another one")

    def _at_once(self, feeds: Feeds, priority: int) -> Answer | None:
        """The answer, by this thread from beginning to end; None where no arena is free."""
        if priority:
            whole("the priority", priority, 0, self.settings.priorities - 1)
        arrays, rows, _ = self._ports.check(feeds)
        with self._lock:
            self._refuse_closed()
            free = next((free for free in self._free[priority:] if free), None)
            if free is None or self._queue.count:
                return None
            arena = free.pop()
            self._running += 1
            self._alone += 1
            self._direct += 1
        rung = self._ports.rung(rows)
        outputs = None
        try:
            arena.start(rung, (arrays,))
            self._until(arena)
            outputs = arena.outputs()
        finally:
            with self._lock:
                self._alone -= 1
                flight, late = self._landed(arena, free, rung, rows, 1, outputs is None)
            if flight is not None or late:
                self._go_on(flight, late)
            if self._waiters and not self._leading.locked():
                self._promote()
        return self._ports.cut(outputs, (rows,))[0]

    def _until(self, arena: Arena) -> None:
        """Waits for one step. Where other threads are at work, without the interpreter's lock, which all of them need."""
        start = time.perf_counter()
        look_up = _look_up()
        while True:
            for _ in range(_LOOKS):
                if arena.over():
                    return
            if self._alone > 1 or self._waiters:
                arena.wait()
            elif time.perf_counter() - start < _PATIENCE:
                look_up(0)
            else:
                time.sleep(_NAP)

    def drive(self, seconds: float = 0.0) -> bool:
        """Does what there is to do: ends steps that are over, and starts what waits. An event loop calls it again and again, so that no
        thread has to be woken.

        Args:
            seconds: How long to go on, while there is anything to do.

        Returns:
            Whether there is.
        """
        end = time.perf_counter() + seconds
        look_up = _look_up() if seconds else None
        while True:
            now = self._driven = time.perf_counter()
            self._poll()
            if self._queue.count:
                self._start_due(now)
            if not self._is_busy or now >= end:
                return self._is_busy
            if look_up is not None:
                look_up(0)

    def stats(self) -> Stats:
        """What it has done so far."""
        with self._lock:
            queue = self._queue
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
                in_flight=self._running,
            )

    def close(self, finish: bool = True) -> None:
        """Takes no more requests, and gives streams and memory back. Steps in flight are waited for.

        Args:
            finish: Answer requests that wait first; otherwise they fail with `Closed`.
        """
        self.stop(finish)
        with self._lock:
            owned, self._owned = self._owned, []
        for one in owned:
            one.close()

    def stop(self, finish: bool = True) -> None:
        """What `close` does first; arenas stay as they are."""
        with self._lock:
            again, self._closed = self._closed, True
            left = [] if finish else self._queue.clear()
        for request in left:
            _fail(request, Closed("the pool was closed before this request was run", fix="send it to another one"))
        while self._is_busy:
            self.drive()
            time.sleep(_NAP)
        if again:
            return
        self._wake.set()
        if threading.current_thread() is not self._keeper:
            self._keeper.join()
        if self._threads is not None:
            self._threads.shutdown()

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(finish=kind is None)

    @property
    def _is_busy(self) -> bool:
        return bool(self._running or self._queue.count)

    def _next(self, now: float) -> tuple[_Flight | None, Sequence[Request]]:
        """The next step to start, where there is an arena for it, and requests that are too late. The lock is held."""
        queue = self._queue
        if not queue.count or queue.next_time > now:
            return None, ()
        late = queue.expired(now)
        for level, free in enumerate(self._free):
            if free and (found := queue.take(now, level, self._running > 0)):
                self._running += 1
                return _Flight(free.pop(), level, found, self._ports.rung(sum([one.rows for one in found]))), late
        return None, late

    def _start_due(self, now: float) -> None:
        """Starts the next step, where there is an arena for it."""
        with self._lock:
            flight, late = self._next(now)
        if flight is not None or late:
            self._go_on(flight, late)

    def _go_on(self, flight: _Flight | None, late: Sequence[Request]) -> None:
        """Starts a step, and tells those that are too late."""
        for request in late:
            waited = time.perf_counter() - request.since
            said = f"the request was not run: it waited for {waited:.3f} s"
            if request.answer.set_running_or_notify_cancel():
                _fail(request, TimedOut(said, fix="send fewer, or wait longer"))
        if flight is None:
            return
        if self._threads is not None:
            self._threads.submit(self._run, flight)
            return
        try:
            flight.arena.start(flight.rung, [request.feeds for request in flight.requests])
        except Exception as problem:  # noqa: BLE001  whoever starts it, those that wait for it are told
            self._land(flight, problem)
        else:
            self._flying.append(flight)

    def _run(self, flight: _Flight) -> None:
        """A step, from beginning to end, in a thread of its own."""
        try:
            flight.arena.start(flight.rung, [request.feeds for request in flight.requests])
            outputs = flight.arena.outputs()
        except Exception as problem:  # noqa: BLE001  as above
            self._land(flight, problem)
        else:
            self._land(flight, outputs)

    def _poll(self) -> bool:
        """Ends the steps that are over. Whether there were any. Only one thread does so at a time."""
        if not self._polling.acquire(blocking=False):
            return False
        landed: list[tuple[_Flight, Answer | Exception]] = []
        try:
            self._looked = time.perf_counter()
            for flight in self._flying:
                try:
                    if flight.arena.over():
                        landed.append((flight, flight.arena.outputs()))
                except Exception as problem:  # noqa: BLE001  as above
                    landed.append((flight, problem))
            for flight, _ in landed:
                self._flying.remove(flight)
        finally:
            self._polling.release()
        for flight, outputs in landed:
            self._land(flight, outputs)
        return bool(landed)

    def _land(self, flight: _Flight, outputs: Answer | Exception) -> None:
        """Gives the arena of a step that is over to the next one, and then its answers to those who wait for them."""
        requests = flight.requests
        rows = [request.rows for request in requests]
        failed = isinstance(outputs, Exception)
        with self._lock:
            following, late = self._landed(
                flight.arena, self._free[flight.level], flight.rung, sum(rows), len(requests), failed
            )
        if following is not None or late:
            self._go_on(following, late)
        if isinstance(outputs, Exception):
            for request in requests:
                _fail(request, outputs)
            return
        for request, answer in zip(requests, self._ports.cut(outputs, rows), strict=True):
            request.answer.set_result(answer)

    def _landed(
        self, arena: Arena, free: list[Arena], rung: int, rows: int, requests: int, failed: bool
    ) -> tuple[_Flight | None, Sequence[Request]]:
        """Counts a step that is over, and gives what comes next. The lock is held."""
        free.append(arena)
        self._running -= 1
        self._steps += 1
        self._rows += rung
        self._filled += rung - rows
        if failed:
            self._failed += requests
        else:
            self._answered += requests
        return self._next(time.perf_counter()) if self._queue.count else (None, ())

    def work_for(self, pending: Pending, timeout: float | None) -> None:
        """See `Worker`: looks after all that is in flight until an answer is there, or waits while another thread does."""
        end = NEVER if timeout is None else time.perf_counter() + timeout
        me = get_ident()
        while not pending.done() and time.perf_counter() < end:
            nested = self._leader == me  # a function that an answer called asks for another one
            if self.polls and (nested or ((self._flying or not self._alone) and self._leading.acquire(blocking=False))):
                try:
                    self._leader = me
                    self._lead(lambda: pending.done() or time.perf_counter() > end)
                finally:
                    if not nested:
                        self._leader = None
                        self._leading.release()
                        self._promote()
            else:
                self._follow(pending, end)

    def _lead(self, enough: Callable[[], bool]) -> None:
        """Looks after all that is in flight."""
        start = time.perf_counter()
        look_up = _look_up()
        while not enough():
            for _ in range(_LOOKS):
                if self._poll():
                    start = time.perf_counter()
                    break
            else:
                now = time.perf_counter()
                if self._queue.count:
                    self._start_due(now)
                flying = self._flying[:1]
                if not flying and self._alone:
                    return  # those who look after their own steps will say when there are others
                if flying and (self._alone or self._waiters):
                    flying[0].arena.wait()
                elif now - start < _PATIENCE:
                    look_up(0)
                else:
                    time.sleep(_NAP)

    def _follow(self, pending: Pending, end: float) -> None:
        """Waits for an answer, or to be the one who looks after all."""
        waiter = threading.Lock()
        waiter.acquire()
        pending.waiter = waiter
        self._waiters.append(waiter)
        if not pending.done() and (self._leading.locked() or not self.polls or (self._alone and not self._flying)):
            waiter.acquire(timeout=-1 if end == NEVER else max(end - time.perf_counter(), 0.0))
        try:
            self._waiters.remove(waiter)
        except ValueError:  # it was chosen, and may have its answer by now
            if pending.done():
                self._promote()

    def _promote(self) -> None:
        """Has one of those who wait look after all."""
        while self._waiters:
            if wake(self._waiters.popleft()):
                return

    def attend(self) -> None:
        """See `Worker`."""
        self._eager = True
        self._wake.set()

    def _keep(self) -> None:
        """The pool's own thread: looks after what nobody looks after, and after what is due or too late."""
        idle_since = time.perf_counter()
        while not self._closed or self._is_busy:
            now = time.perf_counter()
            if not self._is_busy:
                if now - idle_since < _LINGER:
                    time.sleep(_UNATTENDED)
                    continue
                self._awake = self._eager = False
                if not self._is_busy and not self._closed:
                    self._wake.wait()
                self._wake.clear()
                self._awake = True
                continue
            idle_since = now
            if self._eager and self.polls and now - self._driven > _LINGER and self._leading.acquire(blocking=False):
                try:
                    self._leader = get_ident()
                    self._lead(lambda: not self._is_busy)
                finally:
                    self._leader = None
                    self._leading.release()
                    self._promote()
                time.sleep(_NAP)
                continue
            due = self._queue.next_time - now
            time.sleep(due if 0 < due < _UNATTENDED else _UNATTENDED)
            if self.polls and now > self._looked:
                self._poll()
            if self._queue.count:
                self._start_due(time.perf_counter())


def _look_up() -> Callable[[int], object]:
    """A function that lets go of the interpreter's lock and is back at once. Each thread needs its own."""
    return select.poll().poll


def _fail(request: Request, problem: BaseException) -> None:
    request.answer.set_exception(problem)
