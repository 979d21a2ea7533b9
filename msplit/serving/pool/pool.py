"""Pool: runs several steps of one model at once, over one set of weights, for requests from any number of threads.

`scheduler` decides which requests share a step and where it runs, `steps` does what was decided, `drivers` have threads or an event loop do
so, and `slots` are what steps run in.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from msplit.assignment.model import DisplayMixin, Facts
from msplit.core.arguments import number, whole
from msplit.engines.base import Executable, Feeds, Registers, called_with, device_lost
from msplit.engines.table_rows import LOOKUPS, LookupCounts, no_lookups
from msplit.errors import Closed, DeviceLost, EngineError
from msplit.serving.pool.drivers import NAP, ThreadDriver
from msplit.serving.pool.parts import PartedRequest
from msplit.serving.pool.ports import Port, Ports
from msplit.serving.pool.scheduler import NEVER, Request, Scheduler
from msplit.serving.pool.settings import PoolSettings, Stats
from msplit.serving.pool.slots import Answer, Slot
from msplit.serving.pool.steps import PoolFuture, PoolSteps, ProcessState
from msplit.verify.results import NewRows, NewValues, OutputCheck, ValueUpdate


class TakesOver(Protocol):
    """Values that lie beside those that they are to take the place of; see `stored.renewal`."""

    @property
    def bytes(self) -> int:
        """Size of what changes."""

    def take_over(self, agree: Callable[[], object]) -> None:
        """Has them take it, while no step runs; nothing changes where `agree`, called before that is final, raises."""


Renews = Callable[[NewValues | None, NewRows | None], tuple[TakesOver, Sequence[OutputCheck], Callable[[], object]]]
"""Makes a pool's model again with other values, and verifies it; the last is called when they were taken over."""


@dataclass(frozen=True, eq=False)
class About:
    """Description of the model that a pool runs.

    Attributes:
        label: Name in the rows of a bench.
        outputs: Type and shape of every output by name. A first dimension of None stands for the rows of a request.
        checks: Results of the comparison of outputs with their reference, for each slot and bucket.
        notes: Remarks for the user.
        facts: Facts such as the number of streams of a slot, or bytes.
    """

    label: str
    outputs: Mapping[str, Port]
    checks: tuple[OutputCheck, ...]
    notes: tuple[str, ...]
    facts: Mapping[str, Any]


class Pool(DisplayMixin):
    """Pool of a model, made by `msplit.pool`: runs several steps at once. Close it, or use it in a ``with`` statement.

    Any thread may call it.

    Attributes:
        about: Description of the model.
        inputs: Type and shape of every input by name. A first dimension of None stands for the rows of a request, another one for the
            length of these.
        outputs: Type and shape of every output by name, likewise.
        batches: Rows of the steps that were prepared, ascending; empty where the shapes of a model are fixed.
        lengths: Lengths of rows that were prepared, each for each of these; empty where rows have one length, or none.
        joins: True where rows are independent: requests that wait share a step, and a step is padded. Otherwise each request has the rows
            of one of `batches`.
        settings: Settings; `groups` is a number, also where it was ``auto``.
        polls: True where a step is over when somebody polls, as on a GPU, so that `drive` is of use.
        ports: Inputs and outputs, which requests are checked against.
        lookups: Counts rows that steps in this process look up in tables of the host's memory.
    """

    def __init__(
        self,
        ports: Ports,
        slots: Sequence[tuple[int, Slot]],
        settings: PoolSettings,
        about: About,
        *,
        threads: int = 0,
        owned: Sequence[Executable] = (),
        steps: PoolSteps | None = None,
        renews: Renews | None = None,
    ) -> None:
        """Makes a pool out of its parts.

        Args:
            ports: Inputs and outputs.
            slots: Slots, each with its priority level.
            settings: Settings.
            about: Description of the model.
            threads: Number of threads that run steps from beginning to end; 0: slots run them by themselves.
            owned: Executables that are closed together with the slots.
            steps: Steps that run elsewhere, in place of slots.
            renews: Makes what takes other values over; None where nothing does.
        """
        self.about, self.inputs, self.outputs, self.settings = about, ports.inputs, about.outputs, settings
        self.batches, self.lengths, self.joins, self.polls = ports.batches, ports.lengths, ports.joins, not threads
        self._owned: list[Slot | Executable] = [*(slot for _, slot in slots), *owned]
        self.ports = ports
        if steps is None:
            levels = [level for level, _ in slots]
            scheduler = Scheduler(
                levels,
                ports.batches,
                ports.bucket,
                settings,
                holds_thread=bool(threads),
                users=ports.users,
                lengths=ports.lengths,
            )
            steps = PoolSteps(ports, [slot for _, slot in slots], scheduler, threads)
        self._steps = steps
        self._driver = ThreadDriver(self._steps, polls=self.polls)
        self._parted: dict[PartedRequest, None] = {}  # a list of it is made at once, whoever adds to it
        self.lookups: LookupCounts = no_lookups
        self._renews, self._ending = renews, threading.RLock()
        _OPEN.add(self)
        weakref.finalize(self, self._driver.dismiss).atexit = False

    def _facts(self) -> Facts:
        ends = [(f"input {name}", f"{port.dtype} {list(port.shape)}") for name, port in self.inputs.items()]
        batches = ", ".join(map(str, self.batches)) or "as the model says"
        lengths = [("lengths", ", ".join(map(str, self.lengths)))] if self.lengths else []
        return [
            ("runs", self.about.label),
            ("groups", str(self.settings.groups)),
            ("batches", batches),
            *lengths,
            *ends,
        ]

    def __call__(self, /, *values: Any, **named: Any) -> Answer:
        """Answer to a request with inputs by name or, where there is one, by position. See `step`."""
        return self.step(called_with(self.inputs, values, named))

    def step(self, feeds: Feeds, *, priority: int = 0, timeout: float | None = None, on_device: bool = False) -> Answer:
        """Answers a request; takes and returns what `submit` does, which does not wait for the answer."""
        if not self.polls or timeout is not None or self.settings.max_delay_us or on_device:
            answer: Answer = self.submit(feeds, priority=priority, timeout=timeout, on_device=on_device).result()
            return answer
        if type(priority) is not int or priority:
            priority = whole("the priority", priority, 0, self.settings.priorities - 1)
        arrays, rows, key = self.ports.check(feeds)
        length = self.ports.length(arrays) if self.lengths else 0
        step = self._steps.take(priority, rows, length) if self.ports.fits(arrays, rows) else None
        if step is not None:
            return self._steps.cut(self._driver.run_alone(step, arrays), rows, arrays)
        future = self._put(arrays, rows, key, priority, NEVER, now := time.perf_counter())
        self._driver.poll_sometimes(now)
        waited: Answer = future.result()
        return waited

    def submit(
        self, feeds: Feeds, *, priority: int = 0, timeout: float | None = None, on_device: bool = False
    ) -> Future[Answer]:
        """Takes a request and returns at once. Do not change its arrays until it is answered.

        Args:
            feeds: Inputs by name: arrays, or tensors that support DLPack. Tensors on the GPU are copied on the GPU, once the work that this
                thread's current stream has so far is done; other tensors, and inputs without rows, are copied to the host.
            priority: Priority level, from 0, the most urgent, to `settings.priorities` - 1.
            timeout: Seconds after which it is too late to start the request.
            on_device: True to leave outputs on the GPU.

        Returns:
            Future of the outputs by name, which belong to the caller: arrays or, `on_device`, PyTorch tensors. A request that waits can be
            cancelled. Callbacks of the future run in the thread that ends the step, and must be short.

        Raises:
            EngineError: An input is missing, or has another type or shape than it must.
            Busy: As many requests wait as may.
            Closed: The pool is closed.
            DeviceLost: The GPU failed.
        """
        if type(priority) is not int or priority:
            priority = whole("the priority", priority, 0, self.settings.priorities - 1)
        arrays, rows, key = self.ports.check(feeds)
        if on_device:
            if not self._steps.on_device:
                raise EngineError("this pool's outputs are on the host", fix="leave out on_device")
            key = None if key is None else ("on the device", key)
        patience = NEVER if timeout is None else number("the timeout", timeout)
        future = self._put(arrays, rows, key, priority, patience, now := time.perf_counter(), on_device=on_device)
        self._driver.poll_sometimes(now)
        return future

    def submit_driven(
        self, feeds: Feeds, done: Callable[[Future[Answer]], object], *, priority: int = 0, timeout: float | None = None
    ) -> Future[Answer]:
        """Takes a request as `submit` does, from a caller that calls `drive` until nothing runs or waits: no thread of the pool is woken.

        Args:
            feeds: Inputs by name.
            done: Called with the future when it is done, by the thread that drives the pool or runs the step.
            priority: Priority level.
            timeout: Seconds after which it is too late to start the request.
        """
        arrays, rows, key = self.ports.check(feeds)
        length = self.ports.length(arrays) if self.lengths else 0
        step = self._steps.take(priority, rows, length) if self._is_idle and self.ports.fits(arrays, rows) else None
        if step is not None:
            future = PoolFuture(self._driver)
            future.set_running_or_notify_cancel()
            Future.add_done_callback(future, done)  # `PoolFuture` has a thread of the pool poll
            self._driver.start_alone(step, arrays, future)
        else:
            patience = NEVER if timeout is None else timeout
            future = self._put(arrays, rows, key, priority, patience, time.perf_counter())
            Future.add_done_callback(future, done)
        return future

    def _put(
        self, feeds: Feeds, rows: int, key: Any, level: int, patience: float, now: float, *, on_device: bool = False
    ) -> PoolFuture:
        """Takes a request whose inputs were checked; one that fits into no step in parts."""
        ports, late = self.ports, now + patience
        if ports.fits(feeds, rows):
            return self._queue(feeds, rows, key, level, late, on_device, now)
        whole = PoolFuture(self._driver)
        parts = [partial(self._queue, *one, key, level, late, on_device) for one in ports.parts(feeds, rows)]
        request = PartedRequest(parts, lambda answers: ports.whole(answers, rows), whole)
        self._parted[request] = None
        Future.add_done_callback(whole, lambda _: self._parted.pop(request))
        request.begin(self._steps.most_parts * ports.users)
        return whole

    def _queue(
        self,
        feeds: Feeds,
        rows: int,
        key: Any,
        level: int,
        late: float,
        on_device: bool,
        now: float,
        admitted: bool = False,
    ) -> PoolFuture:
        future = PoolFuture(self._driver)
        claim = future.set_running_or_notify_cancel
        user, length = self.ports.user(feeds), self.ports.length(feeds) if self.lengths else 0
        self._steps.put(
            Request(
                rows, key, level, now, late, claim, {**feeds}, future, on_device, admitted, user=user, length=length
            )
        )
        return future

    @property
    def _is_idle(self) -> bool:
        """True where a request may go by the shortest way: nothing runs or waits here."""
        return self.polls and not (self.scheduler.running or self.settings.max_delay_us)

    def accept(self, feeds: Feeds, rows: int, level: int, since: float, deadline: float, reply: Any) -> None:
        """Takes a request of another process, which has checked it; somebody calls `drive`.

        Args:
            feeds: Inputs, which are right.
            rows: See `Request`, as for the next three.
            level: Priority level.
            since: Time of coming.
            deadline: Time by which it has to be started.
            reply: Object that gets the answer, with the methods of a future, and one that is called when a step has it.

        Raises:
            EngineError: As `submit`.
        """
        claim = reply.set_running_or_notify_cancel
        if self._is_idle and deadline == NEVER:
            if not claim():
                return
            if (step := self._steps.take(level, rows, self.ports.length(feeds))) is not None:
                reply.begun()
                self._driver.start_alone(step, feeds, reply)
                return
        key, user, length = self.ports.key(feeds), self.ports.user(feeds), self.ports.length(feeds)
        self._steps.put(Request(rows, key, level, since, deadline, claim, feeds, reply, user=user, length=length))

    def drive(self, seconds: float = 0.0) -> bool:
        """Does the work of the pool: ends steps that are over, and starts those that are due. An event loop calls it again and again, so
        that no thread has to be woken.

        Args:
            seconds: Seconds to go on for, as long as anything runs or waits.

        Returns:
            True if anything runs or waits.
        """
        return self._driver.drive(seconds if type(seconds) is float else number("the seconds", seconds))

    def __reduce__(self) -> tuple[Callable[..., Pool], tuple[Any, ...]]:
        """A pool of processes can be sent to other processes, pickled, and asked there."""
        return self._steps.reduce()

    def update(self, source: NewValues | None = None, *, rows: NewRows | None = None) -> ValueUpdate:
        """Gives the model other values while it answers requests: each answer is of the old ones or of the new ones, all of them.

        It is made again beside the steps, and verified, as `Runner.update` says. Then no step is started until those that run are over and
        what differs is copied to where it lies. Where the pool has processes, each does so, and all of them copy or none does.

        Args:
            source: The model with other values, a checkpoint, or arrays by the names of variables; of a build another build.
            rows: Rows of variables on top of that: their numbers, and their values.

        Raises:
            EngineError: They are of another model, give wrong outputs, or make another program; or this is a copy of the pool in another
                process. Nothing has changed then.
            LoadError: They can not be read.
        """
        if source is None and not rows:
            raise EngineError("there are no values", fix="give a model, a checkpoint, or rows")
        with self._steps.updating:
            return self._steps.update(source, rows) or self.take_values(source, rows, bool)

    def take_values(self, source: NewValues | None, rows: NewRows | None, agree: Callable[[], object]) -> ValueUpdate:
        """Gives the model other values where its steps run in this process; see `update`.

        Args:
            source: As for `update`.
            rows: Likewise.
            agree: Called when all is ready, and once more when no step runs. The old values stay where it raises.
        """
        if self._renews is None:
            raise EngineError("the model of this pool takes no other values", fix="make another pool")
        renewal, checks, keep = self._renews(source, rows)
        agree()
        with self._steps.paused(self._driver.drive):
            if self._steps.scheduler.closed:
                raise Closed("the pool is closed", fix="open another one")
            renewal.take_over(agree)
            for request in [*self._parted]:
                request.restart()
        keep()
        return ValueUpdate(renewal.bytes, False, tuple(checks))

    def stats(self) -> Stats:
        """Counts of requests and steps so far."""
        own = {} if self.lookups is no_lookups else dict(zip(LOOKUPS, self.lookups(), strict=True))
        return replace(self._steps.stats(), **own)

    def processes(self) -> tuple[ProcessState, ...]:
        """State of each process that runs steps; none where this one does."""
        return self._steps.processes()

    @property
    def ready(self) -> bool:
        """True while it can answer: its GPU, or one of its processes, works."""
        return self._steps.ready

    @property
    def lost(self) -> str | None:
        """Message of the GPU's failure; None while it works. After a failure, no pool of this process answers any more."""
        return None if self.failure is None else self.failure.what

    @cached_property
    def host_memory(self) -> Registers | None:
        """Has the GPU read memory of the host where it lies, where steps run on one in this process. None where that can not be, of which
        there is a note then."""
        found: Registers | None = next((getattr(slot, "host_memory", None) for slot in self._steps.slots), None)
        if found is None:
            return None
        page = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.uint8)
        if found.register(page.ctypes.data, page.nbytes):
            found.release(page.ctypes.data)
            return found
        note = "CUDA does not register memory that processes share, as where `ulimit -l` is low: large inputs are copied once more"
        self.about = replace(self.about, notes=(*self.about.notes, note))
        return None

    @property
    def scheduler(self) -> Scheduler:
        """Scheduler of its requests."""
        return self._steps.scheduler

    @property
    def failure(self) -> DeviceLost | None:
        """Error of the GPU's failure; None while it works."""
        return self.scheduler.lost

    def close(self, finish: bool = True) -> None:
        """Takes no more requests, waits for steps that run, and gives streams and memory back. Where another thread closes it, too, both
        wait until all is over.

        Args:
            finish: True to answer requests that wait; False to fail them with `Closed`.
        """
        self.stop(finish)
        with self._at_the_end() as alone:
            while alone and self._owned:
                try:
                    self._owned.pop(0).close()
                except Exception as problem:
                    if device_lost(problem) is None:  # a device that failed takes nothing back
                        raise
        _OPEN.discard(self)

    def stop(self, finish: bool = True) -> None:
        """Takes no more requests, and waits for steps that run; slots stay open. The first half of `close`."""
        steps = self._steps
        steps.close(finish=finish)
        while steps.busy or (steps.delivering and not steps.is_delivering):  # an answer may bring a further part
            self.drive()
            if not (steps.is_delivering and steps.run_ready()):
                time.sleep(NAP)
        with self._at_the_end() as alone:
            if alone:
                self._driver.end()
                steps.end()

    @contextmanager
    def _at_the_end(self) -> Iterator[bool]:
        """Block in which one thread is at a time. False, without waiting, where another one is and this one delivers an answer: that one
        may wait for it."""
        alone = self._ending.acquire(blocking=not self._steps.is_delivering)
        try:
            yield alone
        finally:
            if alone:
                self._ending.release()

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(finish=kind is None)

    def after_fork(self) -> None:
        """Forgets everything, in a forked child: threads, locks and the device are the parent's."""
        self._owned.clear()
        self.lookups = no_lookups
        self._ending = threading.RLock()
        self._steps.after_fork()


_OPEN: weakref.WeakSet[Pool] = weakref.WeakSet()


def _after_fork() -> None:
    for pool in [*_OPEN]:
        pool.after_fork()


os.register_at_fork(after_in_child=_after_fork)
