"""Pool whose steps run in processes, one or several for each GPU: each has an engine, slots and a scheduler of its own (`worker`).

A client of them, which is the process that started them or one that the pool was sent to, checks a request and writes it where the process
with the fewest rows under way reads it (`ring`); whoever waits for an answer takes it from there. Nothing stands in between. Requests are
joined in the worker. Here they wait only while it has no slot for them.

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

from msplit.engines.process import LOST
from msplit.errors import Busy, Closed, DeviceLost, EngineError, ProcessLost, TimedOut
from msplit.serving.pool.given_values import GivenValues
from msplit.serving.pool.members import Member, ProcessLine, go_on, readable
from msplit.serving.pool.pool import About, Pool
from msplit.serving.pool.scheduler import NEVER, Request, Scheduler, Step
from msplit.serving.pool.settings import PoolSettings, Stats
from msplit.serving.pool.slots import Answer
from msplit.serving.pool.steps import OF_PROCESSES, PoolFuture, PoolSteps, ProcessState, settle
from msplit.serving.pool.worker import Hello
from msplit.verify.results import NewRows, NewValues, ValueUpdate

_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
"""Seconds before a process that can not be started is started once more: at first, and at most."""
_MOST_STARTS = 3
"""Attempts without success, one after the other, after which a pool without any process is given up."""
_TOGETHER = 8
"""Most requests of which a process is told together."""
_NAP = 1e-3
"""Seconds that a thread waits for an answer before it looks for anything else that it may wait for."""
_SPIN = 250e-6
"""Seconds for which a thread that waits looks for its answer without sleeping, where there is a core for it: a step of a small model and
the way there and back take 150 µs, to be woken up to 50."""


class ProcessSteps(PoolSteps):
    """Requests under way between this process and those that run the steps. Used as `PoolSteps`.

    Args:
        members: The processes.
        settings: Settings; of them, priorities, retries and max_queue matter here.
        given: Values that the processes were given.
    """

    def __init__(self, members: Sequence[Member], settings: PoolSettings, given: GivenValues) -> None:
        assert members[0].line is not None
        self._members, self._settings, hello = [*members], settings, members[0].line.hello
        self._given = given
        self._few = 2 * int(hello.settings.groups)
        self._bell = bell = select.epoll()
        waits = SimpleNamespace(over=lambda: True, wait=partial(bell.poll, _NAP))  # stands for all slots
        self._direct = self._answered = self._failed = self._late = self._dropped = 0
        here = replace(settings, max_delay_us=0.0, max_queue=0)
        super().__init__(hello.ports, [waits], Scheduler((), (), int, here))  # of which the queue is used
        self.on_device, self.sleeps, self.most_parts = False, True, int(hello.settings.groups) * len(members)
        self.spin = _SPIN if len(os.sched_getaffinity(0)) > len(members) else 0.0
        self.flying = [Step(0, 0, 0)]  # whoever leads waits for the bell
        self._handles: dict[int, Member] = {}
        self._closing, self._watchers = threading.Event(), list[threading.Thread]()
        for number, member in enumerate(self._members):
            self._listen(member)
            watcher = threading.Thread(target=_watch, args=(ref(self), number), name="msplit-watch", daemon=True)
            self._watchers.append(watcher)
            watcher.start()

    @property
    def ready(self) -> bool:
        """True while a process can answer."""
        return any(member.line is not None for member in self._members)

    def reduce(self) -> tuple[Callable[..., Pool], tuple[object, ...]]:
        """Pickled form of a pool for another process."""
        return attach, ([(member.place, member.address) for member in self._members], self._settings)

    def _listen(self, member: Member) -> None:
        assert member.line is not None
        self._handles[member.line.bell] = member
        self._bell.register(member.line.bell, select.EPOLLIN)

    def take(self, level: int, rows: int, length: int = 0) -> None:
        """Reserves nothing: no step runs here."""

    def put(self, request: Request) -> None:
        """Takes a request, and writes it to a process if one has room. Raises what `Scheduler.put` does."""
        queue = self.scheduler.queue
        with self._lock:
            self.scheduler.check_open(request.admitted)
            if self._settings.max_queue and not request.admitted:
                self._refuse_more()
            line = None if queue.count else self._freest(request.level)
            if line is None:
                request.key, request.claim = None, partial(_is_wanted, request.future)
                queue.put(request)
                return
            self._direct += 1
            slot = self._take(line, request)
        self._send(line, slot, request)
        if self._answers:
            self.deliver()

    def _refuse_more(self) -> None:
        """Refuses a request where as many wait as may, here and in the processes."""
        queue = self.scheduler.queue
        count = queue.count + sum(line.waiting() for member in self._members if (line := member.line) is not None)
        if count >= (most := self._settings.max_queue):
            queue.refused += 1
            raise Busy(
                f"{most} requests wait already, the most that may", fix="send it again later, or raise max_queue"
            )

    def _freest(self, level: int) -> ProcessLine | None:
        """The connection with the fewest rows under way, of those with a free slot for a level."""
        found, least = None, NEVER
        for member in self._members:
            line = member.line
            if line is not None and any(line.free[level:]) and (load := line.load()) < least:
                found, least = line, load
        return found

    def _take(self, line: ProcessLine, request: Request) -> int:
        """Reserves a slot for a request, which goes there now."""
        self.scheduler.running += 1
        line.rows += request.rows or 1
        return next(free for free in line.free[request.level :] if free).pop()

    def _send(self, line: ProcessLine, slot: int, request: Request) -> None:
        """Writes a request into its slot, and tells the process: at once, or of several together where it has enough to do until somebody
        polls, which the pool's own thread does after a millisecond."""
        problem: Exception
        try:
            length = self._ports.positions(request.feeds)
            line.memory.ask(slot, request.feeds, request.rows, request.level, request.since, request.deadline, length)
        except Exception as wrong:  # noqa: BLE001  it is the request's
            problem = wrong
        else:
            with self._lock:
                if not line.lost:
                    requests = line.memory.requests
                    line.trips[slot], line.memory.flags[slot] = request, 0
                    line.sent += 1
                    requests.push(slot)
                    if requests.untold >= _TOGETHER or len(line.trips) <= self._few:
                        requests.ring()
                    return
            problem = _lost(line.place, "")
        with self._lock:
            line.give(slot, request)
        self._end_of(request, problem)

    def _tell(self) -> None:
        """Tells the processes of requests that they were not told of yet."""
        for member in self._members:
            line = member.line
            if line is not None and line.memory.requests.untold:
                with self._lock:
                    if not line.lost:  # else its bell may be somebody else's by now
                        line.memory.requests.ring()

    def start_due(self, now: float, *, join: bool = True) -> None:
        """Writes what waits to processes with room, and fails requests that are too late; called by threads that are about to wait."""
        del now, join
        self._tell()
        self._send_waiting()
        self.deliver()

    def _send_waiting(self) -> None:
        queue, now = self.scheduler.queue, time.perf_counter()
        while queue.count:
            going = list[tuple[ProcessLine, int, Request]]()
            with self._lock:
                late = queue.expired(now)
                for level in range(self._settings.priorities):
                    if not going and (line := self._freest(level)) is not None:
                        going = [(line, self._take(line, one), one) for one in queue.take(now, level)]
            for request in late:
                what = f"the request was not run: it waited for {now - request.since:.3f} s"
                self._answers.append((request, TimedOut(what, fix="send fewer, or wait longer")))
            for each in going:
                self._send(*each)
            if not going:
                break

    def poll(self) -> bool:
        """Takes what has come from the processes, one thread at a time. True if there was anything."""
        self._tell()
        if not self._polling.acquire(blocking=False):
            return False
        try:
            self.polled = time.perf_counter()
            heard = self._bell.poll(0)
            for handle, _ in heard:
                member = self._handles.get(handle)
                if member is not None:
                    self._hear(member.line)
        finally:
            self._polling.release()
        self.deliver()
        return bool(heard)

    def _hear(self, line: ProcessLine | None) -> None:
        """Takes what a process has answered. Most answers are taken together: one at a time they need twice as long."""
        if line is None or not (slots := line.memory.answers.take()):
            return
        came, length = list[tuple[Request, Answer | Exception]](), self._ports.positions
        for slot in slots:
            request = line.trips.pop(slot)
            came.append((request, line.memory.told(slot, request.rows, length(request.feeds))))
        for slot, (request, _) in zip(slots, came, strict=True):
            request.future.values = line.memory.values(slot)
        usual = settle([(request.future, result) for request, result in came])
        with self._lock:
            for slot, (request, _) in zip(slots, came, strict=True):
                line.give(slot, request)
            self.scheduler.running -= sum(usual)
            self._answered += sum(usual)
        for each, done in zip(came, usual, strict=True):
            if not done:
                self._end_of(*each)
        self._send_waiting()

    def _end_of(self, request: Request, result: Answer | Exception) -> None:
        """Notes the answer to a request, or has it run again."""
        wanted = not request.future.cancelled()
        with self._lock:
            self.scheduler.running -= 1
            again = isinstance(result, ProcessLost) and wanted and self.scheduler.lost is None
            if again and request.runs < self._settings.retries:
                claim = partial(_is_wanted, request.future)
                self.scheduler.queue.put(replace(request, runs=request.runs + 1, key=None, claim=claim), again=True)
                return
            self._answers.append((request, result))
            if not wanted:
                self._dropped += 1
            elif isinstance(result, TimedOut):
                self._late += 1
            elif isinstance(result, Exception):
                self._failed += 1
            else:
                self._answered += 1

    def revive(self, number: int) -> bool:
        """Has another process take the place of one that has ended; called in a thread for that. False if there will not be one."""
        member, pause, failures = self._members[number], _PAUSE, 0
        known = self._retire(member)
        self.start_due(time.perf_counter())
        while known is not None and not self._is_over():
            try:
                self._renew(member, known)
            except Closed:
                break
            except Exception as problem:  # noqa: BLE001  it is told to those who wait, if it stays so
                failures += 1
                if failures >= _MOST_STARTS and not self.ready:
                    self._give_up(problem)
                    return False
                self._closing.wait(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
            else:
                self.start_due(time.perf_counter())
                return True
        return False

    def _retire(self, member: Member) -> Hello | None:
        """Takes note that a process has ended, and what it had. Returns what it said of itself; None where it was ended here."""
        with self._polling:
            self._hear(member.line)
            with self._lock:
                if (line := member.line) is None:
                    return None
                taken, _, steps, _, rows, filled, *looked_up, _, _ = member.counts()  # of memory nothing is left
                before = (taken, 0, steps, 0, rows, filled, *looked_up, 0, 0)
                member.before, member.line, line.lost = before, None, True
            del self._handles[line.bell]
            self._bell.unregister(line.bell)
        line.close()
        problem = _lost(member.place, member.process.last_words() if member.process is not None else "")
        for request in line.trips.values():
            self._end_of(request, problem)
        return line.hello

    def _renew(self, member: Member, known: Hello) -> None:
        """Starts another process, where this one is to, and connects to it. Raises what hinders it; `Closed` where nobody needs it."""
        if member.process is not None:
            with self.updating:  # it is asked meanwhile, and told that it has ended
                member.process.process.close()
            member.process.begin()
            member.process.ready(lambda what, share: None, self._is_over)
        with self.updating:
            if member.process is not None:
                self._given.bring(member.process, self._is_over)
            line = ProcessLine(member.place, member.address, self._is_over)
            ports, before = line.hello.ports, known.ports
            if (line.hello.sizes, ports.inputs, ports.before) != (known.sizes, before.inputs, before.before):
                raise EngineError("the model has changed since the pool was opened", fix="open another pool")
            with self._lock:
                go_on(self._is_over)
                member.line, member.restarts = line, member.restarts + 1
                self._listen(member)

    def update(self, source: NewValues | None, rows: NewRows | None) -> ValueUpdate:
        """Gives the model other values in all processes. Raises what `GivenValues.give` does."""
        ready = [member.process for member in self._members if member.line is not None]
        processes = [process for process in ready if process is not None]
        if len(processes) < len(ready):
            raise EngineError("this pool was opened by another process", fix="give other values to it there")
        if not processes:
            self.scheduler.check_open()
            raise EngineError("no process of the pool is there", fix="try it again when one is")
        return self._given.give((source, rows), processes, self._closing.is_set)

    def _is_over(self) -> bool:
        """True where nothing is left to be done by a process that would be started."""
        return (
            self._closing.is_set() or self.scheduler.lost is not None or bool(self.scheduler.closed and not self.busy)
        )

    def _give_up(self, problem: Exception) -> None:
        """Fails all requests, since no process can be started."""
        why = DeviceLost(f"no process of the pool can be started: {getattr(problem, 'what', problem)}")
        with self._lock:
            self.scheduler.lost = why
            left = self.scheduler.clear()
        self._answers.extend((request, why) for request in left)
        self.deliver()

    def cancelled(self, future: PoolFuture) -> None:
        """Tells the process that has a request that nobody waits for it any more."""
        self._drop(future)

    def _drop(self, future: PoolFuture | None = None) -> None:
        with self._lock:  # so that the slot is not the next request's by now
            for member in self._members:
                if member.line is not None:
                    member.line.drop(future)

    def close(self, *, finish: bool = True) -> None:
        """Takes no more requests. Those that wait, here or in a process, fail, unless they are to be finished."""
        super().close(finish=finish)
        if not finish:
            self._drop()

    def end(self) -> None:
        """Lets go of the processes, and ends those that were started here."""
        self._closing.set()
        self._given = GivenValues()
        with self._lock:
            lines = [member.line for member in self._members if member.line is not None]
            for member in self._members:
                member.before, member.line = (*member.counts(),), None
            for line in lines:
                line.lost = True
        for member in self._members:
            if member.process is not None:
                member.process.process.hang_up()
        for line in lines:
            line.close()
        for watcher in self._watchers:
            watcher.join()
        for member in self._members:
            if member.process is not None:
                member.process.close()

    def after_fork(self) -> None:
        """Forgets everything, in a forked child: the processes are the parent's, and so is what comes from them."""
        self._members, self._watchers, self._handles, self._bell = [], [], {}, select.epoll()
        super().after_fork()

    def stats(self) -> Stats:
        """Counts so far: of this client's requests, and of the steps of all processes together."""
        each = [member.state().stats for member in self._members]
        with self._lock:
            found = self.scheduler.stats()
            return replace(
                found,
                requests=found.requests + self._direct,
                answered=self._answered,
                failed=found.failed + self._failed,
                timed_out=found.timed_out + self._late,
                cancelled=found.cancelled + self._dropped,
                waiting=found.waiting + sum(one.waiting for one in each),
                **{name: sum(getattr(one, name) for one in each) for name in OF_PROCESSES},
            )

    def processes(self) -> tuple[ProcessState, ...]:
        """State of each process."""
        return tuple(member.state() for member in self._members)


def _watch(steps: ref[ProcessSteps], number: int) -> None:
    """Waits until a process ends, and has it replaced, again and again. It keeps nothing alive: a pool that nobody can reach goes."""
    while (pool := steps()) is not None:
        try:
            line = pool._members[number].line
            handle = os.dup(-1 if line is None else line.socket.fileno())
        except (OSError, IndexError):  # the pool is being closed
            return
        del pool, line
        readable(handle, None)
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


def _lost(place: str, why: str) -> ProcessLost:
    """Error of the requests that a process had."""
    what = f"the process of {place} ended while it had the request{why}"
    return ProcessLost(what, fix="send it again, unless such requests end it each time")


def attach(places: Sequence[tuple[str, bytes]], settings: PoolSettings) -> Pool:
    """Makes a pool of the processes of another one, which was sent here.

    Raises:
        Closed: That one is closed.
    """
    try:
        return of_members([Member(place, address, None, bool) for place, address in places], settings, GivenValues())
    except LOST as problem:
        raise Closed("the pool that was sent here is closed", fix="send one that is open") from problem


def of_members(members: Sequence[Member], settings: PoolSettings, given: GivenValues) -> Pool:
    """Makes a pool of processes that are ready."""
    hellos = [member.line.hello for member in members if member.line is not None]
    about = _about([hello.about for hello in hellos], len({member.place for member in members}))
    return Pool(hellos[0].ports, (), settings, about, steps=ProcessSteps(members, settings, given))


def _about(every: Sequence[About], gpus: int) -> About:
    """Description of a pool by those of its processes."""
    first = every[0]
    facts = {**first.facts, "processes": len(every), "gpus": gpus}
    if "bytes" in facts:
        facts["bytes"] = sum(about.facts["bytes"] for about in every)
    checks = tuple(check for about in every for check in about.checks)
    notes = tuple(dict.fromkeys(note for about in every for note in about.notes))
    return replace(first, checks=checks, notes=notes, facts=facts)
