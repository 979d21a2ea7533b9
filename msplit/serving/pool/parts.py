"""Requests of more rows than a step has: each is run in several steps, one for each part of it, and their outputs are joined.

Parts wait in the queue like requests of their own. Of one request only some are there at a time, and the next one takes its place at the
end of the queue when one is answered, so that small requests which came meanwhile go first.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from functools import partial
from typing import Any

from msplit.serving.pool.slots import Answer
from msplit.serving.pool.steps import PoolFuture


class PartedRequest:
    """Request that is run in parts. All of it fails, or is cancelled, with the first part that does; parts that wait are then taken back.

    Args:
        parts: What queues each part, in order: takes the time, and True for what is `admitted` (see `scheduler.Request`); gives its future.
        join: Makes the answer of the answers to the parts.
        whole: Future that gets the answer.
    """

    def __init__(
        self,
        parts: Sequence[Callable[[float, bool], PoolFuture]],
        join: Callable[[Sequence[Answer]], Answer],
        whole: PoolFuture,
    ) -> None:
        self._parts, self._join, self._whole = parts, join, whole
        self._lock = threading.Lock()
        self._answers: dict[int, Answer] = {}
        self._going: dict[int, PoolFuture] = {}
        self._values = set[int]()
        self._begun = self._tries = self._most = 0

    def begin(self, most: int) -> None:
        """Queues the first parts, so many at most. Raises what the queue does where it does not take the first one."""
        self._most = most
        Future.add_done_callback(self._whole, self._end)
        try:
            self._queue(admitted=False)
        except BaseException:
            self._whole.cancel()
            raise
        for _ in range(most - 1):
            self._go_on()

    def restart(self) -> None:
        """Runs all parts again, since the model has other values now: an answer is made of the old ones or of the new ones alone."""
        with self._lock:
            if self._whole.done():
                return
            going, self._going, self._answers, self._values = [*self._going.values()], {}, {}, set()
            self._begun, self._tries = 0, self._tries + 1
        for future in going:
            future.cancel()
        for _ in range(self._most):
            self._go_on()

    def _queue(self, *, admitted: bool = True) -> None:
        """Queues the next part, if there is one."""
        with self._lock:
            number, tries, parts = self._begun, self._tries, self._parts
            if number >= len(parts):
                return
            self._begun += 1
        future = parts[number](time.perf_counter(), admitted)
        with self._lock:
            gone = tries != self._tries
            if not gone:
                self._going[number] = future
        # `PoolFuture` would have a thread of the pool poll.
        Future.add_done_callback(future, partial(self._arrive, number, tries))
        if gone or self._whole.done():  # a part has failed meanwhile, or all of it was cancelled or begun again
            future.cancel()

    def _go_on(self) -> None:
        try:
            self._queue()
        except Exception as problem:  # noqa: BLE001  who waits for the whole gets it
            self._settle(problem)

    def _arrive(self, number: int, tries: int, future: PoolFuture) -> None:
        """Takes the answer to a part, in the thread that delivers it."""
        with self._lock:
            current = tries == self._tries
            if current:
                self._going.pop(number, None)
        if not current or self._whole.done() or future.cancelled():
            return
        if (problem := future.exception()) is not None:
            self._settle(problem)
            return
        with self._lock:
            if tries != self._tries:
                return
            self._answers[number] = future.result()
            mixed = len(self._values | {future.values}) > 1
            self._values = {future.values}
            answers = self._answers if len(self._answers) == len(self._parts) else None
        if mixed:
            self.restart()
            return
        if answers is None:
            self._go_on()
            return
        try:
            self._settle(self._join([answers[place] for place in range(len(answers))]))
        except Exception as broken:  # noqa: BLE001  who waits for the whole gets it
            self._settle(broken)

    def _settle(self, result: Answer | BaseException) -> None:
        with contextlib.suppress(InvalidStateError):  # another part has failed, or all of it was cancelled
            if isinstance(result, BaseException):
                self._whole.set_exception(result)
            else:
                self._whole.set_result(result)

    def _end(self, whole: Future[Any]) -> None:
        """Takes back what waits, once it is clear what the whole gets, and lets go of inputs and answers."""
        if whole.cancelled():
            whole.set_running_or_notify_cancel()  # for who waits for one of several futures
        with self._lock:
            going, self._parts, self._answers = [*self._going.values()], (), {}
        for future in going:
            future.cancel()
