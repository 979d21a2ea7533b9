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
from msplit.engines.base import Feeds
from msplit.errors import Closed, TimedOut
from msplit.measure.results import Check
from msplit.serving.ports import Port, Ports
from msplit.serving.queue import NEVER, Queue, Request
from msplit.serving.settings import PoolSettings

Answer = dict[str, NDArray[Any]]

_LOOKS = 8
"""How often a thread looks at all that is in flight before it lets go of the interpreter's lock."""
_PATIENCE = 1e-3
"""Seconds that a thread looks for. Longer steps are waited for with naps."""
_NAP = 50e-6
_UNATTENDED = 5e-4
"""Seconds after which the pool's own thread looks after steps for which nobody waits."""
_LINGER = 5e-3
"""Seconds without work after which that thread goes to sleep, from which to wake it takes long."""


class Arena(Protocol):
    """What runs one step at a time: streams, captured graphs of all batches, memory for what they compute, for inputs and for outputs."""

    def start(self, rung: int, feeds: Sequence[Feeds]) -> None:
        """Begins a step of the batch `rung` on the rows of all these requests, one behind the other."""

    def over(self) -> bool:
        """Whether it is over. What failed is raised."""

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


class _Pending(Future[Any]):
    """See `Pool.submit`. Whoever asks for its result works for it."""

    def __init__(self, pool: Pool) -> None:
        super().__init__()
        self._pool = pool
        self.waiter: threading.Lock | None = None

    def result(self, timeout: float | None = None) -> Any:
        """See `Future.result`."""
        if self.done():
            return super().result()
        start = time.perf_counter()
        self._pool._work_for(self, timeout)
        return super().result(None if timeout is None else max(timeout - (time.perf_counter() - start), 0.0))

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """See `Future.exception`."""
        start = time.perf_counter()
        self._pool._work_for(self, timeout)
        return super().exception(None if timeout is None else max(timeout - (time.perf_counter() - start), 0.0))

    def set_result(self, result: Any) -> None:
        """See `Future.set_result`."""
        super().set_result(result)
        _release(self.waiter)

    def set_exception(self, exception: BaseException | None) -> None:
        """See `Future.set_exception`."""
        super().set_exception(exception)
        _release(self.waiter)

    def add_done_callback(self, fn: Callable[[Future[Any]], object]) -> None:
        """See `Future.add_done_callback`."""
        super().add_done_callback(fn)
        if not self.done():
            self._pool._attend()


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
    ) -> None:
        """Arenas come with their levels of priority. With `threads`, each step keeps one of so many threads busy until it is over."""
        self.about, self.inputs, self.outputs, self.settings = about, ports.inputs, about.outputs, settings
        self.batches, self.joins, self.polls = ports.batches, ports.joins, not threads
        self._ports, self._arenas = ports, [arena for _, arena in arenas]
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="msplit-step") if threads else None
        self._free: list[list[Arena]] = [[] for _ in range(settings.priorities)]
        for level, arena in arenas:
            self._free[level].append(arena)
        self._queue = Queue(settings.priorities, ports.batches, settings.max_delay_us / 1e6, settings.max_queue)
        self._lock, self._polling, self._leading = threading.Lock(), threading.Lock(), threading.Lock()
        self._leader: int | None = None
        self._waiters: deque[threading.Lock] = deque()
        self._flying: list[_Flight] = []
        self._running = 0
        self._counts = dict.fromkeys(Stats.__dataclass_fields__, 0)
        self._closed = False
        self._polls_done, self._driven, self._eager, self._awake = 0, -NEVER, False, False
        self._wake = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="msplit-pool", daemon=True)
        self._keeper.start()

    def _facts(self) -> Facts:
        ends = [(f"input {name}", f"{port.dtype} {list(port.shape)}") for name, port in self.inputs.items()]
        batches = ", ".join(map(str, self.batches)) or "as the model says"
        return [("runs", self.about.label), ("groups", str(len(self._arenas))), ("batches", batches), *ends]

    def step(self, feeds: Feeds, *, priority: int = 0, timeout: float | None = None) -> Answer:
        """The answer to a request. See `submit`, which does not wait for it."""
        if self.polls and len(self._queue) == 0 and timeout is None and not self.settings.max_delay_us:
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
        level, arrays, rows, key = self._request(feeds, priority)
        now = time.perf_counter()
        deadline = NEVER if timeout is None else now + number("the timeout", timeout)
        pending = _Pending(self)
        request = Request(arrays, rows, key, level, now, deadline, pending)
        with self._lock:
            self._refuse_closed()
            try:
                self._queue.put(request)
            except Exception:
                self._count(refused=1)
                raise
            self._count(requests=1)
            flight, late = self._next(now)
        self._go_on(flight, late)
        if self._flying:
            self._poll()
        if not self._awake:
            self._awake = True
            self._wake.set()
        return pending

    def _request(self, feeds: Feeds, priority: int) -> tuple[int, Feeds, int, Any]:
        if priority:
            whole("the priority", priority, 0, self.settings.priorities - 1)
        return priority, *self._ports.check(feeds)

    def _refuse_closed(self) -> None:
        if self._closed:
            raise Closed("the pool is closed", fix="open another one")

    def _count(self, **more: int) -> None:
        """Adds to what is counted. The lock is held."""
        for name, value in more.items():
            self._counts[name] += value

    def _at_once(self, feeds: Feeds, priority: int) -> Answer | None:
        """The answer, by this thread from beginning to end; None where no arena is free."""
        level, arrays, rows, _ = self._request(feeds, priority)
        with self._lock:
            self._refuse_closed()
            free = next((free for free in self._free[level:] if free), None)
            if free is None or len(self._queue):
                return None
            arena = free.pop()
            self._running += 1
            self._counts["requests"] += 1
        rung = self._ports.rung(rows)
        ok = 0
        try:
            arena.start(rung, (arrays,))
            self._until(arena.over)
            outputs = arena.outputs()
            ok = 1
        finally:
            now = time.perf_counter()
            with self._lock:
                free.append(arena)
                self._running -= 1
                counts = self._counts
                counts["steps"] += 1
                counts["rows"] += rung
                counts["filled"] += rung - rows
                counts["answered" if ok else "failed"] += 1
                flight, late = self._next(now)
            if flight is not None or late:
                self._go_on(flight, late)
        return outputs if rows == rung else self._ports.cut(outputs, [rows])[0]

    def _until(self, over: Callable[[], bool]) -> None:
        """Looks again and again, and lets other threads work meanwhile."""
        start, look_up = time.perf_counter(), _look_up()
        while True:
            for _ in range(_LOOKS):
                if over():
                    return
            if time.perf_counter() - start < _PATIENCE:
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
        end, look_up = time.perf_counter() + seconds, _look_up()
        while True:
            now = self._driven = time.perf_counter()
            if not self._poll() and self._queue.next_time() <= now:
                with self._lock:
                    flight, late = self._next(now)
                self._go_on(flight, late)
            if not self._busy() or now >= end:
                return self._busy()
            look_up(0)

    def stats(self) -> Stats:
        """What it has done so far."""
        with self._lock:
            return Stats(**{**self._counts, "waiting": len(self._queue), "in_flight": self._running})

    def close(self, finish: bool = True) -> None:
        """Takes no more requests, and gives streams and memory back. Steps in flight are waited for.

        Args:
            finish: Answer requests that wait first; otherwise they fail with `Closed`.
        """
        with self._lock:
            again, self._closed = self._closed, True
            left = [] if finish else self._queue.clear()
        for request in left:
            _fail(request, Closed("the pool was closed before this request was run", fix="send it to another one"))
        while self._busy():
            if not self.drive(_NAP):
                break
            time.sleep(_NAP)
        if again:
            return
        self._wake.set()
        if threading.current_thread() is not self._keeper:
            self._keeper.join()
        if self._threads is not None:
            self._threads.shutdown()
        for arena in self._arenas:
            arena.close()

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(finish=kind is None)

    def _busy(self) -> bool:
        return bool(self._running or len(self._queue))

    def _next(self, now: float) -> tuple[_Flight | None, list[Request]]:
        """The next step to start, where there is an arena for it, and what is too late. The lock is held."""
        if not len(self._queue):
            return None, []
        late = self._queue.expired(now)
        self._count(timed_out=len(late))
        for level, free in enumerate(self._free):
            while free and (found := self._queue.take(now, level)):
                wanted = [request for request in found if request.answer.set_running_or_notify_cancel()]
                self._count(cancelled=len(found) - len(wanted))
                if wanted:
                    self._running += 1
                    rung = self._ports.rung(sum(request.rows for request in wanted))
                    return _Flight(free.pop(), level, wanted, rung), late
        return None, late

    def _go_on(self, flight: _Flight | None, late: Sequence[Request]) -> None:
        """Starts a step, and tells those that are too late."""
        for request in late:
            waited = time.perf_counter() - request.since
            if request.answer.set_running_or_notify_cancel():
                _fail(
                    request,
                    TimedOut(
                        f"the request was not run: it waited for {waited:.3f} s", fix="send fewer, or wait longer"
                    ),
                )
        if flight is None:
            return
        if self._threads is not None:
            self._threads.submit(self._run, flight)
            return
        try:
            flight.arena.start(flight.rung, [request.feeds for request in flight.requests])
        except Exception as problem:  # noqa: BLE001  whoever starts it, it is those that wait for it who are told
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
        landed: list[tuple[_Flight, Answer | BaseException]] = []
        try:
            self._polls_done += 1
            for flight in [*self._flying]:
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

    def _land(self, flight: _Flight, outputs: Answer | BaseException) -> None:
        """Gives the arena of a step that is over to the next one, and then its answers to those who wait for them."""
        requests = flight.requests
        rows = [request.rows for request in requests]
        failed = isinstance(outputs, BaseException)
        with self._lock:
            self._free[flight.level].append(flight.arena)
            self._running -= 1
            counts = self._counts
            counts["steps"] += 1
            counts["rows"] += flight.rung
            counts["filled"] += flight.rung - sum(rows)
            counts["failed" if failed else "answered"] += len(requests)
            following, late = self._next(time.perf_counter())
        self._go_on(following, late)
        if isinstance(outputs, BaseException):
            for request in requests:
                _fail(request, outputs)
            return
        for request, answer in zip(requests, self._ports.cut(outputs, rows), strict=True):
            request.answer.set_result(answer)

    def _work_for(self, pending: _Pending, timeout: float | None) -> None:
        """Looks after all that is in flight until an answer is there, or waits while another thread does."""
        if not self.polls:
            return
        end = NEVER if timeout is None else time.perf_counter() + timeout
        me = get_ident()
        while not pending.done() and time.perf_counter() < end:
            nested = self._leader == me  # a function that an answer called asks for another one
            if nested or self._leading.acquire(blocking=False):
                self._leader = me
                try:
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
        start, look_up = time.perf_counter(), _look_up()
        while not enough():
            for _ in range(_LOOKS):
                if self._poll():
                    start = time.perf_counter()
                    break
            else:
                now = time.perf_counter()
                if self._queue.next_time() <= now:
                    with self._lock:
                        flight, late = self._next(now)
                    self._go_on(flight, late)
                if now - start < _PATIENCE:
                    look_up(0)
                else:
                    time.sleep(_NAP)

    def _follow(self, pending: _Pending, end: float) -> None:
        """Waits for an answer, or to be the one who looks after all."""
        waiter = threading.Lock()
        waiter.acquire()
        pending.waiter = waiter
        self._waiters.append(waiter)
        if not pending.done() and self._leading.locked():
            waiter.acquire(timeout=-1 if end == NEVER else max(end - time.perf_counter(), 0.0))
        try:
            self._waiters.remove(waiter)
        except ValueError:  # it was chosen, and may be done by now
            if pending.done():
                self._promote()

    def _promote(self) -> None:
        """Has one of those who wait look after all."""
        while self._waiters:
            if _release(self._waiters.popleft()):
                return

    def _attend(self) -> None:
        """Somebody wants to be told, and waits for nothing."""
        self._eager = True
        self._wake.set()

    def _keep(self) -> None:
        """The pool's own thread: looks after what nobody looks after, and after what is due or too late."""
        idle_since = time.perf_counter()
        while not self._closed or self._busy():
            now = time.perf_counter()
            if not self._busy():
                if now - idle_since > _LINGER:
                    self._awake = self._eager = False
                    if not self._busy():
                        self._wake.wait()
                    self._wake.clear()
                    self._awake, idle_since = True, time.perf_counter()
                else:
                    time.sleep(_UNATTENDED)
                continue
            idle_since = now
            if self._eager and self.polls and now - self._driven > _LINGER and self._leading.acquire(blocking=False):
                self._leader = get_ident()
                try:
                    self._lead(lambda: not self._busy())
                finally:
                    self._leader = None
                    self._leading.release()
                    self._promote()
                continue
            before = self._polls_done
            due = self._queue.next_time() - now
            time.sleep(min(max(due, 0.0), _UNATTENDED) if self.polls else min(max(due, _NAP), _UNATTENDED))
            if self._polls_done == before or not self.polls:
                if self.polls:
                    self._poll()
                with self._lock:
                    flight, late = self._next(time.perf_counter())
                self._go_on(flight, late)


def _look_up() -> Callable[[int], object]:
    """A function that lets go of the interpreter's lock and is back at once. Each thread needs its own."""
    return select.poll().poll


def _fail(request: Request, problem: BaseException) -> None:
    request.answer.set_exception(problem)


def _release(waiter: threading.Lock | None) -> bool:
    """Wakes whoever waits for a lock; whether anybody did."""
    if waiter is None:
        return False
    try:
        waiter.release()
    except RuntimeError:  # somebody else woke them
        return False
    return True
