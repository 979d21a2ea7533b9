"""Requests that wait: which of them the next step answers. Plain data; whoever calls it holds the pool's lock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
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
        deadline: When it is too late to start it.
    """

    feeds: Feeds
    rows: int
    key: Hashable
    level: int
    since: float
    deadline: float
    answer: Future[Any]


class _Line:
    """Requests of one level and key, and how many rows they have."""

    def __init__(self) -> None:
        self.requests: deque[Request] = deque()
        self.rows = 0


class Queue:
    """Waiting requests, first come, first served within a level of priority and a key.

    Attributes:
        count: Requests that wait. It may be looked at without the lock, as may `next_time`.
        next_time: When something is due or too late, if nothing else happens, in seconds of the performance counter.
        taken: Requests that were put here.
        refused: That were not.
        timed_out: That were taken out since it was too late.
        cancelled: That somebody had cancelled when they were taken out.

    Levels share by stride scheduling: each has a position; the one furthest behind is served, and moves on by `SHARE` to the power of its
    number. So a less urgent level is served less often, and never forgotten.

    Args:
        levels: Of priority.
        batches: Rows of the steps that there are, ascending; empty where requests have no rows.
        delay: Seconds that a step that is not full waits for more.
        most: Most requests that may wait; 0: any number.
    """

    def __init__(self, levels: int, batches: Sequence[int], delay: float = 0.0, most: int = 0) -> None:
        self._levels: list[dict[Hashable, _Line]] = [{} for _ in range(levels)]
        self._positions = [0] * levels
        self._batches, self._largest = tuple(batches), max(batches, default=0)
        self._delay, self._most = delay, most
        self.count = 0
        self._earliest = self.next_time = NEVER
        self.taken = self.refused = self.timed_out = self.cancelled = 0

    def put(self, request: Request) -> None:
        """Adds one at the end.

        Raises:
            Busy: There are too many.
        """
        if self._most and self.count >= self._most:
            self.refused += 1
            raise Busy(
                f"{self.count} requests wait already, the most that may", fix="send it again later, or raise max_queue"
            )
        waiting = self._levels[request.level]
        if not waiting:  # it does not catch up on what it had no requests for
            ahead = [place for place, others in zip(self._positions, self._levels, strict=True) if others]
            self._positions[request.level] = max(self._positions[request.level], min(ahead, default=0))
        line = waiting.get(request.key)
        if line is None:
            waiting[request.key] = line = _Line()
        line.requests.append(request)
        line.rows += request.rows
        self.count += 1
        self.taken += 1
        if request.deadline < self._earliest:
            self._earliest = request.deadline
            self.next_time = min(self.next_time, request.deadline)
        if self.next_time == NEVER or self._delay:
            self.next_time = min(self.next_time, request.since + self._delay)

    def take(self, now: float, level: int | None = None, busy: bool = False) -> list[Request]:
        """The requests of the next step, out of this level or more urgent ones; none where nothing waits that is due.

        All are of one key, and of one level but for those for which the step has room besides. While others are in flight (`busy`), a step
        waits for `COMPANY`.
        """
        delay = max(self._delay, COMPANY) if busy else self._delay
        last = len(self._levels) if level is None else level + 1
        while self.count:
            found = self._first_due(now, last, delay)
            if not found:
                break
            wanted = [request for request in found if request.answer.set_running_or_notify_cancel()]
            self.cancelled += len(found) - len(wanted)
            if wanted:
                return wanted
        return []

    def _first_due(self, now: float, last: int, delay: float) -> list[Request]:
        levels: Sequence[int] = range(last)
        if last > 1:
            levels = [one for _, one in sorted((self._positions[one], one) for one in levels)]
        for one in levels:
            heads = self._levels[one]
            due = [key for key, line in heads.items() if not delay or self._due(key, line, now - delay)]
            if due:
                self._positions[one] += SHARE**one
                key = due[0] if len(due) == 1 else min(due, key=lambda key: heads[key].requests[0].since)
                return self._collect(key, one, last)
        return []

    def _due(self, key: Hashable, line: _Line, since: float) -> bool:
        """Whether a step of these is full, or has waited for as long as it may."""
        return key is None or line.rows >= self._largest or line.requests[0].since <= since

    def _collect(self, key: Hashable, level: int, last: int) -> list[Request]:
        """As many requests of a key as a step has room for."""
        found: list[Request] = []
        if key is None:
            self._move(level, key, found, 0)
        else:
            left = self._move(level, key, found, self._largest)
            rows = self._largest - left
            room = next((batch for batch in self._batches if batch >= rows), rows) - rows
            for other in range(last):
                room = self._move(other, key, found, room) if other != level and room else room
        self.count -= len(found)
        self._settle()
        return found

    def _move(self, level: int, key: Hashable, found: list[Request], room: int) -> int:
        """Moves requests for which there is room, or a first one for which there must be. The room that is left."""
        line = self._levels[level].get(key)
        if line is None:
            return room
        waiting = line.requests
        while waiting and ((room and waiting[0].rows <= room) or not found):
            request = waiting.popleft()
            room -= request.rows
            line.rows -= request.rows
            found.append(request)
        if not waiting:
            del self._levels[level][key]
        return room

    def _settle(self) -> None:
        """Sees when the next request is due."""
        heads = [line.requests[0].since for level in self._levels for line in level.values()]
        self.next_time = min(min(heads) + self._delay, self._earliest) if heads else NEVER

    def expired(self, now: float) -> list[Request]:
        """Takes out those that it is too late to start."""
        if self._earliest > now:
            return []
        late = self._take_out(lambda request: request.deadline <= now)
        self.timed_out += len(late)
        return late

    def clear(self) -> list[Request]:
        """Takes out all of them."""
        return self._take_out(lambda request: True)

    def _take_out(self, unwanted: Callable[[Request], bool]) -> list[Request]:
        gone: list[Request] = []
        self._earliest = NEVER
        for level in self._levels:
            for key, line in [*level.items()]:
                kept = deque(one for one in line.requests if not unwanted(one))
                gone += [one for one in line.requests if unwanted(one)]
                line.requests, line.rows = kept, sum(one.rows for one in kept)
                self._earliest = min(self._earliest, min((one.deadline for one in kept), default=NEVER))
                if not kept:
                    del level[key]
        self.count -= len(gone)
        self._settle()
        return gone
