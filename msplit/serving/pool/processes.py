"""Pool whose steps run in processes, one or several for each GPU: each has an engine, slots and a scheduler of its own (`worker`).

The caller's process checks a request, writes it into the memory that it shares with the process where the fewest rows are under way
(`ring`), and takes answers from there. Its `Scheduler` has a slot for each slot of that memory; requests are joined in the worker.

A process that ends is started again in the background. What it had is run once more in another one: a step changes nothing (`run.build`
refuses models whose steps do), so nobody can tell the difference, and most often a process ends for a reason that is not the request's.
Once only by default, since a request may be the reason.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from weakref import ref

from msplit.errors import Busy, DeviceLost, ProcessLost, TimedOut
from msplit.serving.pool.members import Member, PoolProcess, lost
from msplit.serving.pool.ring import Memory
from msplit.serving.pool.scheduler import NOTHING, Request, Scheduler, Stats, Step
from msplit.serving.pool.settings import PoolSettings
from msplit.serving.pool.steps import Answer, PoolFuture, PoolSteps, ProcessState, settle
from msplit.serving.pool.worker import Hello

_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
"""Seconds before a process that can not be started is started once more: at first, and at most."""
_MOST_STARTS = 3
"""Attempts without success, one after the other, after which a pool without any process is given up."""
_TOGETHER = 8
"""Most requests of which a process is told together."""
_NAP = 1e-3
"""Seconds that a thread waits for an answer before it looks for anything else that it may wait for."""


class ProcessSteps(PoolSteps):
    """Requests under way between this process and those that run the steps. Used as `PoolSteps`, of which a step here is one request.

    Args:
        members: Places, processes and memory.
        hello: What the first process says of its pool.
        start: Starts the process of a number again.
        check: Waits until it is ready, and gives its memory; raises what hinders it.
        settings: Settings; of them, priorities, retries and max_queue matter here.
        spins: True where a thread that waits may keep a core busy for a moment.
    """

    def __init__(
        self,
        members: Sequence[tuple[str, PoolProcess, Memory]],
        hello: Hello,
        start: Callable[[int], PoolProcess],
        check: Callable[[PoolProcess], Memory],
        settings: PoolSettings,
        spins: bool,
    ) -> None:
        self._members = [Member(*member) for member in members]
        self._each, self._few, self._settings = hello.sizes.slots, 2 * int(hello.settings.groups), settings
        self._start_again, self._check = start, check
        slots = [
            (settings.level_of(slot, self._each), number)
            for number in range(len(members))
            for slot in range(self._each)
        ]
        self._bell = bell = select.epoll()
        waits = SimpleNamespace(over=lambda: True, wait=partial(bell.poll, _NAP))  # stands for all slots
        here = replace(settings, max_delay_us=0.0)
        super().__init__(hello.ports, [waits] * len(slots), Scheduler(slots, (), int, here))
        self.on_device, self.spins, self.descriptor = False, spins, bell.fileno()
        self.flying = [Step(0, 0, 0)]  # whoever leads waits for the bell
        self._handles: dict[int, Member] = {}
        self._dropped = self._late = 0
        self._closing, self._watchers = threading.Event(), list[threading.Thread]()
        for number, member in enumerate(self._members):
            self._listen(member)
            watcher = threading.Thread(target=_watch, args=(ref(self), number), name="msplit-watch", daemon=True)
            self._watchers.append(watcher)
            watcher.start()

    @property
    def ready(self) -> bool:
        """True while a process can answer."""
        return any(member.memory is not None for member in self._members)

    def _listen(self, member: Member) -> None:
        for handle in (member.running.bell, member.running.ended):
            self._handles[handle] = member
            self._bell.register(handle, select.EPOLLIN)

    def put(self, request: Request) -> None:
        """Takes a request, and sends it to a process if one has room. Raises what `Scheduler.put` does."""
        request.key = None
        with self._lock:
            if self._settings.max_queue:
                self._refuse_more()
            step = self.scheduler.start_now(request)
            if step is None:
                request.claim = partial(_is_wanted, request.future)
                decision = self.scheduler.put(request)
        if step is None:
            self._begin(decision)
        else:
            try:
                self._fly(step)
            except Exception as problem:  # noqa: BLE001  it is the request's
                self._over.append((step, problem))
        if self._over or self._answers:
            self.deliver()

    def _refuse_more(self) -> None:
        """Refuses a request where as many wait as may, here and in the processes."""
        waiting = self.scheduler.queue.count + sum(member.waiting() for member in self._members)
        if waiting >= self._settings.max_queue:
            self.scheduler.queue.refused += 1
            what = f"{waiting} requests wait already, the most that may"
            raise Busy(what, fix="send it again later, or raise max_queue")

    def _fly(self, step: Step) -> None:
        """Writes a request into its slot, and tells the process: at once, or of several together where it has enough to do until somebody
        polls, which the pool's own thread does after a millisecond."""
        number, slot = divmod(step.slot, self._each)
        member, (request,) = self._members[number], step.requests
        memory = member.memory
        if memory is not None:
            memory.ask(slot, request.feeds, request.rows, request.level, request.since, request.deadline)
            with member.lock:
                if member.memory is memory:  # else it ended meanwhile
                    member.trips[slot], memory.flags[slot] = step, 0
                    member.sent += 1
                    requests = memory.requests
                    requests.push(slot)
                    if requests.untold >= _TOGETHER or len(member.trips) <= self._few:
                        requests.ring()
                    return
        self._over.append((step, lost(member.place, "")))

    def _tell(self) -> None:
        """Tells the processes of requests that they were not told of yet."""
        for member in self._members:
            memory = member.memory
            if memory is not None and memory.requests.untold:
                with member.lock:
                    memory.requests.ring()

    def start_due(self, now: float, *, join: bool = True) -> None:
        """As `PoolSteps.start_due`; called by threads that are about to wait."""
        self._tell()
        super().start_due(now, join=join)

    def poll(self) -> bool:
        """Takes what has come from the processes, one thread at a time. True if there was anything."""
        self._tell()
        if not self._polling.acquire(blocking=False):
            return False
        try:
            self.polled = time.perf_counter()
            # Whose they are is settled before any is closed: the next process may get the same numbers.
            heard = [(handle, self._handles.get(handle)) for handle, _ in self._bell.poll(0)]
            for _, member in heard:
                if member is not None:
                    self._hear(member)
            for handle, member in heard:
                if member is not None and handle == member.running.ended:
                    self._bury(member)
        finally:
            self._polling.release()
        if self._over or self._answers:
            self.deliver()
        return bool(heard)

    def _hang_up(self, running: PoolProcess) -> None:
        for handle in (running.bell, running.ended):
            del self._handles[handle]
            self._bell.unregister(handle)
        running.close()

    def _hear(self, member: Member) -> None:
        """Takes what a process has answered. Most answers are taken together: one at a time they need twice as long."""
        memory, trips = member.memory, member.trips
        if memory is None or not (slots := memory.answers.take()):
            return
        came = [(step := trips.pop(slot), memory.told(slot, step.rows)) for slot in slots]
        with self._lock:
            usual = settle([(step.requests[0].future, result) for step, result in came])
            for (step, _), done in zip(came, usual, strict=True):
                if done:
                    self.scheduler.answered(step)
        if not all(usual):
            self._over.extend(one for one, done in zip(came, usual, strict=True) if not done)
        for _ in range(min(len(came), self.scheduler.queue.count)):
            self.start_due(self.polled)

    def _bury(self, member: Member) -> None:
        """Takes note that a process has ended, and has another one started."""
        with self._lock:
            if member.memory is None:  # it was ended here
                return
            self.scheduler.withdraw(self._members.index(member))
            running, trips = member.running, member.retire()  # from here on there may be another one
        problem = lost(member.place, running.last_words())
        self._over.extend((step, problem) for step in trips)
        self._hang_up(running)

    def revive(self, number: int) -> bool:
        """Has another process take the place of one that has ended; called in a thread for that. False if there will not be one."""
        member, pause, failures = self._members[number], _PAUSE, 0
        while member.memory is not None and not self._is_over():
            if not self.poll():  # nobody may wait for an answer just then
                time.sleep(_NAP)
        while not self._is_over():
            try:
                member.running = self._start_again(number)
                memory = self._check(member.running)
            except Exception as problem:  # noqa: BLE001  it is told to those who wait, if it stays so
                failures += 1
                if failures >= _MOST_STARTS and not self.ready:
                    self._give_up(problem)
                    return False
                self._closing.wait(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
                continue
            with self._lock:
                if not (over := self._is_over()):
                    member.memory, member.restarts = memory, member.restarts + 1
                    self.scheduler.restore(number)
            if over:
                member.running.close()
                return False
            self._listen(member)
            for _ in range(min(self._each, self.scheduler.queue.count)):
                self.start_due(time.perf_counter())
            return True
        return False

    def _is_over(self) -> bool:
        """True where nothing is left to be done by a process that would be started."""
        return self.scheduler.lost is not None or bool(self.scheduler.closed and not self.busy)

    def _give_up(self, problem: Exception) -> None:
        """Fails all requests, since no process can be started."""
        why = DeviceLost(f"no process of the pool can be started: {getattr(problem, 'what', problem)}")
        with self._lock:
            self.scheduler.lost = why
            left = self.scheduler.clear()
        self._answers.extend((request, why) for request in left)
        self.deliver()

    def _end(self, step: Step, result: Answer | Exception) -> None:
        """Gives the slot of a request that is over to the next one, and notes its answer."""
        (request,) = step.requests
        now = time.perf_counter()
        wanted = not request.future.cancelled()
        again = isinstance(result, ProcessLost) and wanted and not self.scheduler.lost
        if again and request.runs < self._settings.retries:
            with self._lock:
                decision = self.scheduler.put_back(step, now)
            self._begin(decision)
            return
        failed = isinstance(result, Exception) or not wanted
        with self._lock:
            self._dropped += not wanted
            self._late += wanted and isinstance(result, TimedOut)
            decision = self.scheduler.ended(step, now, failed=failed)
        if decision is not NOTHING:
            self._begin(decision)
        self._answers.append((request, result))

    def cancelled(self, future: PoolFuture) -> None:
        """Tells the process that has a request that nobody waits for it any more."""
        for member in self._members:
            member.drop(future)

    def close(self, *, finish: bool = True) -> None:
        """Takes no more requests. Those that wait, here or in a process, fail, unless they are to be finished."""
        super().close(finish=finish)
        for member in self._members if not finish else ():
            member.drop()

    def end(self) -> None:
        """Ends the processes."""
        with self._lock:
            there = [member for member in self._members if member.memory is not None]
            for member in there:
                member.retire()
        for member in there:
            member.running.process.hang_up()
        for member in there:
            self._hang_up(member.running)
        self._closing.set()
        for member, watcher in zip(self._members, self._watchers, strict=True):
            while watcher.is_alive():
                member.running.kill()  # one that is being started
                watcher.join(_NAP)

    def after_fork(self) -> None:
        """Forgets everything, in a forked child: the processes are the parent's, and so is what comes from them."""
        self._members, self._watchers, self._handles, self._bell = [], [], {}, select.epoll()
        super().after_fork()

    def stats(self) -> Stats:
        """Counts so far, of all processes together."""
        each = [member.stats() for member in self._members]
        with self._lock:
            found = self.scheduler.stats()
        return replace(
            found,
            failed=found.failed - self._dropped - self._late,
            timed_out=found.timed_out + self._late,
            cancelled=found.cancelled + self._dropped,
            waiting=found.waiting + sum(one.waiting for one in each),
            **{name: sum(getattr(one, name) for one in each) for name in ("rows", "filled", "steps", "in_flight")},
        )

    def processes(self) -> tuple[ProcessState, ...]:
        """State of each process."""
        return tuple(
            ProcessState(one.place, one.running.process.pid if one.memory is not None else 0, one.restarts, one.stats())
            for one in self._members
        )


def _watch(steps: ref[ProcessSteps], number: int) -> None:
    """Waits until a process ends, and has it replaced, again and again. It keeps nothing alive: a pool that nobody can reach goes."""
    while (pool := steps()) is not None:
        try:
            handle = os.dup(pool._members[number].running.ended)
        except OSError:  # the pool is being closed
            return
        del pool
        poller = select.poll()
        poller.register(handle, select.POLLIN)
        poller.poll()
        os.close(handle)
        pool = steps()
        if pool is None or not pool.revive(number):
            return
        del pool


def _is_wanted(future: PoolFuture) -> bool:
    """True if a request that waits here was not cancelled. Its future never says that it runs: it can be cancelled until it is answered."""
    if not future.cancelled():
        return True
    future.set_running_or_notify_cancel()
    return False
