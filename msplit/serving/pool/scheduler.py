"""Scheduler of a pool: decides which requests share a step, in which slot the step runs, and when.

To change how requests are batched, change this file and no other. It is plain data: queue, slots and times go in, decisions come out. It
starts nothing, waits for nothing and reads no clock, so equal calls give equal decisions. Times are seconds of one clock, which the caller
chooses. The caller holds a lock around each call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple

from msplit.errors import Busy, Closed, DeviceLost
from msplit.serving.pool.settings import PoolSettings, Stats

NEVER = float("inf")

JOIN_WINDOW = 20e-6
"""Seconds that a step which is not full waits for further requests while the GPU is busy: the host needs about as long to start and to end
a step."""

SHARE = 4
"""Steps of a priority level for each step of the next, less urgent level, while requests of both wait."""

STRETCH = 2
"""Most times its own length that a row may be computed at, in place of padding in a step of longer rows."""

Bucket = int | tuple[int, int]
"""Size of a step that was prepared: its rows; where rows have lengths, their length and how many."""


@dataclass(slots=True, eq=False)
class Request:
    """Request that waits for a step, or is part of one.

    Attributes:
        rows: Number of rows; 0 where the model's inputs have none.
        key: Requests of one key may share a step. Those of None share none.
        level: Priority level; 0 is the most urgent.
        since: Time at which it came.
        deadline: Time after which it is too late to start it.
        claim: Takes the request for a step; False where somebody has cancelled it.
        feeds: Inputs. The scheduler does not look at them, nor at the next two.
        future: Future that gets the answer.
        on_device: True to leave the answer on the GPU. Requests of one key agree in it.
        admitted: True for a further part of a request that was taken already: it is taken although the queue is full, or the pool about to
            close.
        waits: True while it is in the queue.
        runs: Processes that ended while they had it.
        user: Name of its user, where steps have room for several; else None.
        length: Length that its rows need, of those that were prepared; 0 where they have none.
    """

    rows: int
    key: Hashable
    level: int
    since: float
    deadline: float
    claim: Callable[[], bool]
    feeds: Any = None
    future: Any = None
    on_device: bool = False
    admitted: bool = False
    waits: bool = False
    runs: int = 0
    user: Hashable = None
    length: int = 0


class Step(NamedTuple):
    """One execution of the model on the rows of one or several requests.

    Attributes:
        slot: Index of the slot in which it runs.
        bucket: Rows that the step computes; those that no request brought are padding.
        rows: Rows of its requests.
        requests: Requests that it answers; none for a step that the calling thread runs itself (`Scheduler.take`).
        again: Further requests of a step that failed. Each is run alone after this one, so that a bad request fails no other.
        length: Length of its rows: the greatest that its requests need.
    """

    slot: int
    bucket: int
    rows: int
    requests: tuple[Request, ...] = ()
    again: tuple[Request, ...] = ()
    length: int = 0

    @property
    def size(self) -> Bucket:
        """Size that was prepared for it."""
        return (self.length, self.bucket) if self.length else self.bucket


def rows_in(bucket: Bucket) -> int:
    """Rows of a step of a size."""
    return bucket if isinstance(bucket, int) else bucket[1]


class Decision(NamedTuple):
    """Work for the caller of the scheduler.

    Attributes:
        start: Step to start now.
        late: Requests that waited too long and are not run.
        answer: Requests that get the result, or the error, of the step that ended.
    """

    start: Step | None = None
    late: tuple[Request, ...] = ()
    answer: tuple[Request, ...] = ()


NOTHING = Decision()


class Scheduler:
    """Queue and slots of a pool, and the decisions which request goes where.

    Args:
        slots: Priority level of each slot. A slot runs one step at a time, of requests of its level or more urgent ones.
        buckets: Rows of the steps that were prepared, ascending; empty where requests have no rows.
        bucket_of: Gives the bucket for a number of rows.
        settings: Number of priority levels, time to wait for further requests, most requests that may wait.
        holds_thread: True where a step keeps a thread busy from beginning to end; a request is then started as soon as a slot is free.
        users: Most users of a step, of requests that name theirs.
        lengths: Lengths of rows that were prepared; empty where rows have none.

    Attributes:
        queue: Requests that wait. `queue.count` and `queue.next_time` may be read without the lock, as may the next three.
        running: Steps that run.
        alone: Those among them that the thread which brought the request runs itself.
        steps_of: Size -> number of its steps that ran in this process.
        lost: Error of the device, set by the caller when it fails; no more requests are taken then.
        paused: True while no step is started; requests wait.
        closed: Reason why no more requests are taken; empty while they are.
    """

    def __init__(
        self,
        slots: Sequence[int],
        buckets: Sequence[int],
        bucket_of: Callable[[int], int],
        settings: PoolSettings,
        *,
        holds_thread: bool = False,
        users: int = 1,
        lengths: Sequence[int] = (),
    ) -> None:
        self._slots, self._bucket_of, self._holds_thread = tuple(slots), bucket_of, holds_thread
        self._free: list[list[int]] = [[] for _ in range(settings.priorities)]
        for index, level in enumerate(slots):
            self._free[level].append(index)
        self.queue = Queue(
            settings.priorities, buckets, settings.max_delay_us / 1e6, settings.max_queue, users, lengths
        )
        self.running = self.alone = 0
        self._answered = self._failed = self._rows = self._filled = self._steps = self._direct = 0
        sizes: Sequence[Bucket] = [(length, rows) for length in lengths for rows in buckets] if lengths else buckets
        self.steps_of = dict.fromkeys(sizes, 0)
        self.closed, self._cleared, self.paused = "", False, False
        self.lost: DeviceLost | None = None

    def put(self, request: Request) -> Decision:
        """Adds a request to the queue, at the time `request.since`.

        Its step starts at once if a slot is free and either the step is full or the GPU is idle. Otherwise it waits for further requests: a
        thread that goes on brings more sooner than it could start a step, and a thread that waits for an answer starts it (`due`).

        Raises:
            Busy: As many requests wait as may.
            Closed: No more are taken.
            DeviceLost: The device failed.
        """
        self.check_open(request.admitted)
        if not self.queue.put(request) and self.running and not self._holds_thread:
            return NOTHING
        return self.due(request.since)

    def take(self, level: int, rows: int, length: int = 0) -> Step | None:
        """Reserves a slot for a step that the calling thread starts itself, waits for, and reports with `ended`.

        Returns:
            The step; None where no slot is free, requests wait that came before, or none is started now.

        Raises:
            Closed: No more requests are taken.
            DeviceLost: The device failed.
        """
        self.check_open()
        if not (self.queue.count or self.paused):
            for number in range(level, len(self._free)):
                if self._free[number]:
                    self.alone += 1
                    self._direct += 1
                    return self._start(number, rows, length)
        return None

    def due(self, now: float, *, join: bool = True) -> Decision:
        """The step that is due now, if a slot is free, and the requests that are too late.

        Args:
            now: The time.
            join: False to start a step that is not full without waiting `JOIN_WINDOW`.
        """
        queue = self.queue
        if not queue.count or queue.next_time > now or self.paused:
            return NOTHING
        late = tuple(expired) if (expired := queue.expired(now)) else ()
        for level, free in enumerate(self._free):
            # A GPU with nothing to do waits for no further requests.
            if free and (requests := queue.take(now, level, join and self.running > 0)):
                rows, length = (
                    sum([request.rows for request in requests]),
                    max([request.length for request in requests]),
                )
                return Decision(self._start(level, rows, length, tuple(requests)), late)
        return Decision(None, late) if late else NOTHING

    def ended(self, step: Step, now: float, *, failed: bool = False) -> Decision:
        """Takes note that a step is over, and decides who gets its result and what runs next in its slot.

        If a step of several requests failed, nobody is answered: each of them is run again alone. If the device failed (`lost`), all of
        them get the error.
        """
        slot, bucket, rows, requests, again, length = step
        if failed and requests:
            if self.lost is not None:
                requests, again = (*requests, *again), ()
            elif len(requests) > 1:
                requests, again = (), requests
        self._steps += 1
        size = (length, bucket) if length else bucket
        self.steps_of[size] = self.steps_of.get(size, 0) + 1
        self._rows += bucket
        self._filled += bucket - rows
        alone = not step.requests
        self.alone -= alone
        if failed:
            self._failed += len(requests) + alone
        else:
            self._answered += len(requests) + alone
        if again:
            rows, length = again[0].rows, again[0].length
            return Decision(Step(slot, self._bucket_of(rows), rows, again[:1], again[1:], length), (), requests)
        self._free[self._slots[slot]].append(slot)
        self.running -= 1
        following = self.due(now) if self.queue.count else NOTHING
        return Decision(following.start, following.late, requests) if requests else following

    def count_failed(self, count: int) -> None:
        """Corrects the statistics: so many requests that were counted as answered got an error, since the outputs could not be split."""
        self._answered -= count
        self._failed += count

    def close(self, reason: str = "the pool is closed") -> None:
        """Takes no more requests. Those that wait are still run."""
        self.closed = self.closed or reason

    def clear(self) -> tuple[Request, ...]:
        """Takes all requests out of the queue that nobody has cancelled, to be failed."""
        self._cleared = True
        left = tuple(self.queue.clear())
        self._failed += len(left)
        return left

    def stats(self) -> Stats:
        """Counts so far."""
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

    def check_open(self, admitted: bool = False) -> None:
        """Raises what hinders further requests, or further parts of one (`admitted`): `Closed`, or `DeviceLost`."""
        if self.lost is not None:
            raise DeviceLost(self.lost.what, fix=self.lost.fix)
        if self.closed and (self._cleared or not admitted):
            raise Closed(self.closed, fix="open another one")

    def _start(self, level: int, rows: int, length: int, requests: tuple[Request, ...] = ()) -> Step:
        """Puts a step into a free slot."""
        self.running += 1
        return Step(self._free[level].pop(), self._bucket_of(rows), rows, requests, (), length)


class _Line:
    """Requests of one level, key and length, in the order in which they came.

    Attributes:
        requests: Those that wait, and `gone` others that were taken out of the middle and are skipped later. The first one waits.
        rows: Rows of those that wait.
        users: Users that those which wait name, each with how many do.
    """

    __slots__ = ("gone", "key", "length", "level", "requests", "rows", "users")

    def __init__(self, level: int, key: Hashable, length: int) -> None:
        self.level, self.key, self.length = level, key, length
        self.requests: deque[Request] = deque()
        self.rows = self.gone = 0
        self.users: dict[Hashable, int] = {}

    def count(self, request: Request, sign: int) -> None:
        """Counts a request that begins to wait (1), or ends (-1)."""
        self.rows += sign * request.rows
        if (user := request.user) is not None:
            self.users[user] = self.users.get(user, 0) + sign
            if not self.users[user]:
                del self.users[user]


class Queue:
    """Requests that wait. Within a priority level, a key and a length, the first to come is the first to be served.

    Levels share steps by stride scheduling: each level has a position; the one with the lowest position is served, and its position grows
    by `SHARE` to the power of its number. A less urgent level is served less often, but always again.

    Each call takes logarithmic time in the number of requests and keys that wait.

    Args:
        levels: Number of priority levels.
        buckets: Rows of the steps that were prepared, ascending; empty where requests have no rows.
        delay: Seconds that a step which is not full waits for further requests.
        most: Most requests that may wait; 0: any number.
        users: Most users of a step, of requests that name theirs.
        lengths: Lengths of rows that were prepared.

    Attributes:
        count: Requests that wait.
        next_time: Earliest time at which a request may become due or too late if no other comes; `NEVER` where none waits.
        taken: Requests that were put into the queue.
        refused: Requests that found it full.
        timed_out: Requests that were too late.
        cancelled: Requests that had been cancelled when they were to be taken out.
    """

    def __init__(
        self,
        levels: int,
        buckets: Sequence[int],
        delay: float = 0.0,
        most: int = 0,
        users: int = 1,
        lengths: Sequence[int] = (),
    ) -> None:
        self._lines: list[dict[tuple[Hashable, int], _Line]] = [{} for _ in range(levels)]
        # For each length those of requests that may be in a step of it, itself first.
        down = sorted(lengths, reverse=True)
        self._fitting = {most: [one for one in down if one <= most <= STRETCH * one] for most in down}
        self._positions = [0] * levels
        self._buckets, self._largest = tuple(buckets), max(buckets, default=0)
        self._delay, self._most, self._users = delay, most, users
        self._join_window = max(delay, JOIN_WINDOW)
        # Heaps. Entries that are out of date stay until they reach the top: lines by the time at which they are due while the GPU is busy,
        # with the request that was their first one then; and requests by their deadlines.
        self._due: list[list[tuple[float, int, _Line, Request]]] = [[] for _ in range(levels)]
        self._late: list[tuple[float, int, Request]] = []
        self._entries = self.count = 0
        self.next_time = NEVER
        self.taken = self.refused = self.timed_out = self.cancelled = 0

    def put(self, request: Request, *, again: bool = False) -> bool:
        """Adds a request at the end. True if its step is full now, so that waiting for further requests is of no use.

        Args:
            again: True for one that was taken before, which is neither refused nor counted.

        Raises:
            Busy: As many wait as may.
        """
        if self._most and self.count >= self._most and not (again or request.admitted):
            self.refused += 1
            raise Busy(
                f"{self._most} requests wait already, the most that may", fix="send it again later, or raise max_queue"
            )
        lines = self._lines[request.level]
        if not lines:
            self._catch_up(request.level)
        place = request.key, request.length
        line = lines.get(place)
        if line is None:
            lines[place] = line = _Line(request.level, *place)
        was_full = self._is_full(line)
        line.requests.append(request)
        line.count(request, 1)
        request.waits = True
        self.count += 1
        self.taken += not again
        full = self._is_full(line)
        if len(line.requests) == 1 or (full and not was_full):
            self.next_time = min(self.next_time, self._enter(line, full))
        if request.deadline != NEVER:
            self._entries += 1  # no two entries have the same first numbers: requests can not be compared
            heappush(self._late, (request.deadline, self._entries, request))
            self.next_time = min(self.next_time, request.deadline)
        return full

    def _catch_up(self, level: int) -> None:
        """Sets the position of a level that had no requests: it gets no extra share for the time it was empty, and does not pay for steps
        that it had while the others were empty."""
        positions = [position for position, lines in zip(self._positions, self._lines, strict=True) if lines]
        if not positions:
            self._positions = [0] * len(self._positions)
        else:
            first = min(positions)
            self._positions[level] = min(max(self._positions[level], first), first + SHARE**level)

    def take(self, now: float, level: int | None = None, busy: bool = False) -> list[Request]:
        """Takes out the requests of the next step; none where none is due.

        All have one key. They are of one level and one length; where the bucket has room left, requests of other levels fill it, and then
        shorter ones, the longest first, which need at least half of that length (`STRETCH`). A longer one never joins shorter ones.

        Args:
            now: The time.
            level: Takes requests of this level and more urgent ones; None: of all.
            busy: True while other steps run: a step that is not full then waits for at least `JOIN_WINDOW`.
        """
        last = len(self._lines) if level is None else level + 1
        due = now if busy else now + (self._join_window - self._delay)
        while self.count:
            line = self._first_due(due, last)
            if line is None:
                break
            if wanted := self._collect(line, last):
                return wanted
        return []

    def _first_due(self, due: float, last: int) -> _Line | None:
        """The line to serve next, out of the first `last` levels: the level with the lowest position that has one due by then."""
        levels: Sequence[int] = range(last)
        if last > 1:
            levels = sorted(levels, key=lambda level: (self._positions[level], level))
        for level in levels:
            entry = self._top(level)
            if entry is not None and entry[0] <= due:
                self._positions[level] += SHARE**level
                return entry[2]
        return None

    def _is_full(self, line: _Line) -> bool:
        """True if further requests could not join the step of these."""
        return line.key is None or line.rows >= self._largest or len(line.users) >= self._users

    def _enter(self, line: _Line, full: bool) -> float:
        """Notes when a line is due while the GPU is busy. Returns the time at which it is due on an idle GPU."""
        first = line.requests[0]
        self._entries += 1
        due = first.since if full else first.since + self._join_window
        heappush(self._due[line.level], (due, self._entries, line, first))
        return first.since if full else first.since + self._delay

    def _top(self, level: int) -> tuple[float, int, _Line, Request] | None:
        """Entry of the line of a level that is due first. Entries that are out of date are dropped."""
        heap = self._due[level]
        while heap:
            due, _, line, first = heap[0]
            if first.waits and line.requests[0] is first and (due > first.since or self._is_full(line)):
                return heap[0]
            heappop(heap)
        return None

    def _collect(self, line: _Line, last: int) -> list[Request]:
        """Takes out as many requests of a line's key as a step has room for. Cancelled ones are left out of the result, so it may be
        empty."""
        found: list[Request] = []
        users = set[Hashable]()
        left = self._move(line, found, users, 0 if line.key is None else self._largest)
        wanted = self._claim(found)
        if wanted and line.key is not None:
            rows = self._largest - left
            room = next((bucket for bucket in self._buckets if bucket >= rows), rows) - rows
            for length in self._fitting.get(line.length, (line.length,)) if room else ():
                for lines in self._lines[:last]:
                    other = lines.get((line.key, length))
                    if other is not None and other is not line:
                        before = len(found)
                        room = self._move(other, found, users, room)
                        wanted += self._claim(found[before:])
        self._update_next_time()
        return wanted

    def _move(self, line: _Line, found: list[Request], users: set[Hashable], room: int) -> int:
        """Moves requests from a line to `found`, and their users to `users`, while they fit into the room. The first one is moved in any
        case. Returns the room that is left."""
        waiting = line.requests
        before = len(found)
        while waiting:
            request = waiting[0]
            if request.waits:
                if found and not (room and request.rows <= room):
                    break
                if found and request.user not in users and len(users) >= self._users:
                    break
                request.waits = False
                room -= request.rows
                line.count(request, -1)
                users.add(request.user)
                found.append(request)
            else:
                line.gone -= 1
            waiting.popleft()
        self.count -= len(found) - before
        self._close_up(line, len(found) > before)
        return room

    def _close_up(self, line: _Line, changed: bool) -> None:
        """Removes a line that is empty; notes when one that has changed is due."""
        if not line.requests:
            del self._lines[line.level][line.key, line.length]
        elif changed:
            self._enter(line, self._is_full(line))

    def _update_next_time(self) -> None:
        """Sets `next_time` anew."""
        self.next_time = NEVER
        for level in range(len(self._due)):
            entry = self._top(level)
            if entry is not None:
                first = entry[3].since
                self.next_time = min(self.next_time, first + self._delay if entry[0] > first else first)
        if len(self._late) > 2 * self.count + 64:  # most of them no longer wait
            self._late = [entry for entry in self._late if entry[2].waits]
            heapify(self._late)
        while self._late and not self._late[0][2].waits:
            heappop(self._late)
        if self._late:
            self.next_time = min(self.next_time, self._late[0][0])

    def expired(self, now: float) -> list[Request]:
        """Takes out the requests whose deadline has passed. Cancelled ones are left out of the result."""
        if not self._late or self._late[0][0] >= now:
            return []
        late = []
        while self._late and self._late[0][0] < now:
            request = heappop(self._late)[2]
            if request.waits:
                late.append(request)
        found = self._take_out(late)
        self.timed_out += len(found)
        return found

    def clear(self) -> list[Request]:
        """Takes out all requests. Cancelled ones are left out of the result."""
        return self._take_out(
            [request for lines in self._lines for line in lines.values() for request in line.requests if request.waits]
        )

    def _take_out(self, unwanted: Sequence[Request]) -> list[Request]:
        lines: dict[_Line, None] = {}
        found = self._claim(unwanted)
        for request in unwanted:
            line = self._lines[request.level][request.key, request.length]
            request.waits = False
            line.count(request, -1)
            line.gone += 1
            lines[line] = None
        self.count -= len(unwanted)
        for line in lines:
            while line.requests and not line.requests[0].waits:
                line.requests.popleft()
                line.gone -= 1
            if line.gone * 2 > len(line.requests):
                line.requests, line.gone = deque(request for request in line.requests if request.waits), 0
            self._close_up(line, True)
        self._update_next_time()
        return found

    def _claim(self, requests: Sequence[Request]) -> list[Request]:
        """Claims requests. Returns those that nobody had cancelled; from now on nobody can."""
        wanted = [request for request in requests if request.claim()]
        self.cancelled += len(requests) - len(wanted)
        return wanted
