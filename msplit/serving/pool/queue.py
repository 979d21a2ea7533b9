"""Requests that wait: which of them the next step answers. Plain data; whoever calls it holds the pool's lock."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Any

from msplit.engines.base import Feeds
from msplit.errors import Busy

NEVER = float("inf")

COMPANY = 20e-6
"""Seconds that the host takes to start a step and to end it: as long, while the device has work, a step waits for company."""

SHARE = 4
"""Of five steps that start while two neighbouring levels of priority wait, the more urgent one gets four."""


@dataclass(slots=True, eq=False)
class Request:
    """One that waits, or is being answered.

    Attributes:
        rows: How many it has; 0 where the model has none.
        key: Requests of one key may share a step; those of None share none.
        level: Of priority, 0 is the most urgent.
        since: When it came, in seconds of the performance counter.
        deadline: After that it is too late to start it.
        waits: Whether it is in a queue.
        on_device: Whether its answer stays on the device. All that share a step are of one mind.
    """

    feeds: Feeds
    rows: int
    key: Hashable
    level: int
    since: float
    deadline: float
    answer: Future[Any]
    waits: bool = False
    on_device: bool = False


class _Line:
    """Requests of one level and key in the order in which they came, and how many rows they have. The first one waits; others may have
    been taken out, and are passed over when they come up."""

    __slots__ = ("gone", "key", "level", "requests", "rows")

    def __init__(self, level: int, key: Hashable) -> None:
        self.level, self.key = level, key
        self.requests: deque[Request] = deque()
        self.rows = self.gone = 0


class Queue:
    """Waiting requests, first come, first served within a level of priority and a key.

    Attributes:
        count: Requests that wait. It may be looked at without the lock, as may `next_time`.
        next_time: When something is due or too late, if nothing else happens, in seconds of the performance counter; at times sooner.
        taken: Requests that were put here.
        refused: That were not.
        timed_out: That were taken out since it was too late.
        cancelled: That somebody had cancelled when they were taken out.

    What is taken out is running, as futures have it: nobody can cancel it any more.

    Levels share by stride scheduling: each has a position; the one furthest behind is served, and moves on by `SHARE` to the power of its
    number. So a less urgent level is served less often, and never forgotten.

    Nothing here takes longer because more requests wait, or more keys, but for the logarithm of their number.

    Args:
        levels: Of priority.
        batches: Rows of the steps that there are, ascending; empty where requests have no rows.
        delay: Seconds that a step that is not full waits for more.
        most: Most requests that may wait; 0: any number.
    """

    def __init__(self, levels: int, batches: Sequence[int], delay: float = 0.0, most: int = 0) -> None:
        self._lines: list[dict[Hashable, _Line]] = [{} for _ in range(levels)]
        self._positions = [0] * levels
        self._batches, self._largest = tuple(batches), max(batches, default=0)
        self._delay, self._most = delay, most
        self._patience = max(delay, COMPANY)
        # Heaps, in which what is no longer so stays until it comes up: lines by when they are due while others are in flight, with the
        # request that was their first one, and requests by when they are too late.
        self._due: list[list[tuple[float, int, _Line, Request]]] = [[] for _ in range(levels)]
        self._late: list[tuple[float, int, Request]] = []
        self._entries = self.count = 0
        self.next_time = NEVER
        self.taken = self.refused = self.timed_out = self.cancelled = 0

    def put(self, request: Request) -> bool:
        """Adds one at the end. Whether that makes a whole step, which would be no better for more.

        Raises:
            Busy: There are too many.
        """
        if self._most and self.count >= self._most:
            self.refused += 1
            raise Busy(
                f"{self.count} requests wait already, the most that may", fix="send it again later, or raise max_queue"
            )
        lines = self._lines[request.level]
        if not lines:
            self._line_up(request.level)
        line = lines.get(request.key)
        if line is None:
            lines[request.key] = line = _Line(request.level, request.key)
        before = line.rows
        line.requests.append(request)
        line.rows += request.rows
        request.waits = True
        self.count += 1
        self.taken += 1
        if len(line.requests) == 1 or (before < self._largest <= line.rows and request.key is not None):
            self.next_time = min(self.next_time, self._enter(line))
        if request.deadline != NEVER:
            heappush(self._late, (request.deadline, self.taken, request))
            self.next_time = min(self.next_time, request.deadline)
        return self._is_full(line)

    def _line_up(self, level: int) -> None:
        """A level that had no requests neither catches up on what it missed nor waits for what it had while others wanted nothing."""
        ahead = [place for place, lines in zip(self._positions, self._lines, strict=True) if lines]
        if not ahead:
            self._positions = [0] * len(self._positions)
        else:
            first = min(ahead)
            self._positions[level] = min(max(self._positions[level], first), first + SHARE**level)

    def take(self, now: float, level: int | None = None, busy: bool = False) -> list[Request]:
        """The requests of the next step, out of this level or more urgent ones; none where nothing waits that is due.

        All are of one key, and of one level but for those for which the step has room besides. While others are in flight (`busy`), a step
        waits for `COMPANY`.
        """
        last = len(self._lines) if level is None else level + 1
        due = now if busy else now + (self._patience - self._delay)
        while self.count:
            line = self._first_due(due, last)
            if line is None:
                break
            if wanted := self._collect(line, last):
                return wanted
        return []

    def _first_due(self, due: float, last: int) -> _Line | None:
        levels: Sequence[int] = range(last)
        if last > 1:
            levels = [one for _, one in sorted((self._positions[one], one) for one in levels)]
        for one in levels:
            entry = self._top(one)
            if entry is not None and entry[0] <= due:
                self._positions[one] += SHARE**one
                return entry[2]
        return None

    def _is_full(self, line: _Line) -> bool:
        """Whether more requests would not make a better step of these."""
        return line.key is None or line.rows >= self._largest

    def _enter(self, line: _Line) -> float:
        """Notes when a line is due. The time, if nothing is in flight."""
        first = line.requests[0]
        full = self._is_full(line)
        self._entries += 1
        due = first.since if full else first.since + self._patience
        heappush(self._due[line.level], (due, self._entries, line, first))
        return first.since if full else first.since + self._delay

    def _top(self, level: int) -> tuple[float, int, _Line, Request] | None:
        """The line of a level that is due first."""
        heap = self._due[level]
        while heap:
            due, _, line, first = heap[0]
            if first.waits and line.requests[0] is first and (due > first.since or self._is_full(line)):
                return heap[0]
            heappop(heap)
        return None

    def _collect(self, line: _Line, last: int) -> list[Request]:
        """As many requests of a key as a step has room for, but for cancelled ones; none where all that were due are."""
        found: list[Request] = []
        left = self._move(line, found, 0 if line.key is None else self._largest)
        wanted = self._running(found)
        if wanted and line.key is not None:
            rows = self._largest - left
            room = next((batch for batch in self._batches if batch >= rows), rows) - rows
            for lines in self._lines[:last] if room else ():
                other = lines.get(line.key)
                if other is not None and other is not line:
                    before = len(found)
                    room = self._move(other, found, room)
                    wanted += self._running(found[before:])
        self._settle()
        return wanted

    def _move(self, line: _Line, found: list[Request], room: int) -> int:
        """Moves requests for which there is room, or a first one for which there must be. The room that is left."""
        waiting = line.requests
        before = len(found)
        while waiting:
            request = waiting[0]
            if request.waits:
                if found and not (room and request.rows <= room):
                    break
                request.waits = False
                room -= request.rows
                line.rows -= request.rows
                found.append(request)
            else:
                line.gone -= 1
            waiting.popleft()
        self.count -= len(found) - before
        self._close_up(line, len(found) > before)
        return room

    def _close_up(self, line: _Line, changed: bool) -> None:
        """Forgets a line that is empty, and notes when another one is due."""
        if not line.requests:
            del self._lines[line.level][line.key]
        elif changed:
            self._enter(line)

    def _settle(self) -> None:
        """Sees when the next request is due, or too late."""
        self.next_time = NEVER
        for level in range(len(self._due)):
            entry = self._top(level)
            if entry is not None:
                first = entry[3].since
                self.next_time = min(self.next_time, first + self._delay if entry[0] > first else first)
        if len(self._late) > 2 * self.count + 64:  # most of them are answered already
            self._late = [one for one in self._late if one[2].waits]
            heapify(self._late)
        while self._late and not self._late[0][2].waits:
            heappop(self._late)
        if self._late:
            self.next_time = min(self.next_time, self._late[0][0])

    def expired(self, now: float) -> list[Request]:
        """Takes out those that it is too late to start, but for cancelled ones."""
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
        """Takes out all of them, but for cancelled ones."""
        return self._take_out(
            [one for lines in self._lines for line in lines.values() for one in line.requests if one.waits]
        )

    def _take_out(self, unwanted: Sequence[Request]) -> list[Request]:
        lines: dict[_Line, None] = {}
        found = self._running(unwanted)
        for request in unwanted:
            line = self._lines[request.level][request.key]
            request.waits = False
            line.rows -= request.rows
            line.gone += 1
            lines[line] = None
        self.count -= len(unwanted)
        for line in lines:
            while line.requests and not line.requests[0].waits:
                line.requests.popleft()
                line.gone -= 1
            if line.gone * 2 > len(line.requests):
                line.requests, line.gone = deque(one for one in line.requests if one.waits), 0
            self._close_up(line, True)
        self._settle()
        return found

    def _running(self, requests: Sequence[Request]) -> list[Request]:
        """Those that nobody has cancelled; nobody can any more."""
        wanted = [request for request in requests if request.answer.set_running_or_notify_cancel()]
        self.cancelled += len(requests) - len(wanted)
        return wanted
