"""Requests that wait: which of them the next step answers. Plain data; whoever calls it holds the pool's lock."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from msplit.engines.base import Feeds
from msplit.errors import Busy

NEVER = float("inf")

SHARE = 4
"""Of five steps that start while two neighbouring levels of priority wait, the more urgent one gets four."""


@dataclass(slots=True, eq=False)
class Request:
    """One that waits, or is being answered.

    Attributes:
        rows: How many it has; 0 where the model has none.
        key: Requests of one key may share a step; those of None share none.
        level: Of priority, 0 is the most urgent.
        since: When it came, in seconds of `time.perf_counter`.
        deadline: When it is too late to start it.
    """

    feeds: Feeds
    rows: int
    key: Hashable
    level: int
    since: float
    deadline: float
    answer: Future[Any]


class Queue:
    """Waiting requests, first come, first served within a level of priority and a key.

    Levels share by stride scheduling: each has a position; the one furthest behind is served, and moves on by `SHARE` to the power of its
    number. So a less urgent level is served less often, and never forgotten.

    Args:
        levels: Of priority.
        batches: Rows of the steps that there are, ascending; empty where requests have no rows.
        delay: Seconds that a step that is not full waits for more.
        most: Most requests that may wait; 0: any number.
    """

    def __init__(self, levels: int, batches: Sequence[int], delay: float = 0.0, most: int = 0) -> None:
        self._levels: list[dict[Hashable, deque[Request]]] = [{} for _ in range(levels)]
        self._positions = [0] * levels
        self._batches, self._largest = tuple(batches), max(batches, default=0)
        self._delay, self._most = delay, most
        self._count = 0
        self._earliest = NEVER

    def __len__(self) -> int:
        return self._count

    def put(self, request: Request) -> None:
        """Adds one at the end.

        Raises:
            Busy: There are too many.
        """
        if self._most and self._count >= self._most:
            raise Busy(
                f"{self._count} requests wait already, the most that may", fix="send it again later, or raise max_queue"
            )
        waiting = self._levels[request.level]
        if not waiting:  # it does not catch up on what it had no requests for
            ahead = [place for place, others in zip(self._positions, self._levels, strict=True) if others]
            self._positions[request.level] = max(self._positions[request.level], min(ahead, default=0))
        waiting.setdefault(request.key, deque()).append(request)
        self._count += 1
        self._earliest = min(self._earliest, request.deadline)

    def take(self, now: float, level: int | None = None) -> list[Request]:
        """The requests of the next step, out of this level or more urgent ones; none where nothing waits that is due.

        All are of one key, and of one level but for those for which the step has room besides.
        """
        if not self._count:
            return []
        last = len(self._levels) if level is None else level + 1
        for position, one in sorted((self._positions[one], one) for one in range(last) if self._levels[one]):
            heads = self._levels[one]
            due = [key for key, waiting in heads.items() if not self._delay or self._due(key, waiting, now)]
            if due:
                self._positions[one] = position + SHARE**one
                return self._collect(min(due, key=lambda key: heads[key][0].since), one, last)
        return []

    def _due(self, key: Hashable, waiting: Sequence[Request], now: float) -> bool:
        """Whether a step of these is full, or has waited for as long as it may."""
        if key is None or now - waiting[0].since >= self._delay:
            return True
        rows = itertools.accumulate(request.rows for request in waiting)
        return any(count >= self._largest for count in rows)

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
        self._count -= len(found)
        return found

    def _move(self, level: int, key: Hashable, found: list[Request], room: int) -> int:
        """Moves requests for which there is room, or a first one for which there must be. The room that is left."""
        waiting = self._levels[level].get(key)
        if waiting is None:
            return room
        while waiting and ((room and waiting[0].rows <= room) or not found):
            room -= waiting[0].rows
            found.append(waiting.popleft())
        if not waiting:
            del self._levels[level][key]
        return room

    def next_time(self) -> float:
        """When something is due or too late, if nothing else happens, in seconds of `time.perf_counter`."""
        if not self._count:
            return NEVER
        heads = (waiting[0].since for level in self._levels for waiting in level.values())
        return min(min(heads) + self._delay, self._earliest)

    def expired(self, now: float) -> list[Request]:
        """Takes out those that it is too late to start."""
        if self._earliest > now:
            return []
        return self._take_out(lambda request: request.deadline <= now)

    def clear(self) -> list[Request]:
        """Takes out all of them."""
        return self._take_out(lambda request: True)

    def _take_out(self, unwanted: Callable[[Request], bool]) -> list[Request]:
        gone = []
        self._earliest = NEVER
        for number, level in enumerate(self._levels):
            gone += [request for waiting in level.values() for request in waiting if unwanted(request)]
            kept = {key: deque(one for one in waiting if not unwanted(one)) for key, waiting in level.items()}
            self._levels[number] = {key: waiting for key, waiting in kept.items() if waiting}
            deadlines = (one.deadline for waiting in kept.values() for one in waiting)
            self._earliest = min(self._earliest, min(deadlines, default=NEVER))
        self._count -= len(gone)
        return gone
