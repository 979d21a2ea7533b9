"""The answer to a request that is not there yet: a future whose owner works for it, rather than wait for a thread to be woken."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures._base import FINISHED, PENDING
from typing import Any, Protocol

_FIELDS = {"_condition", "_state", "_result", "_exception", "_waiters", "_done_callbacks"}
_KNOWN = set(vars(Future())) == _FIELDS
"""Whether futures are what they are in Python 3.11 and 3.12. To make a lock for each takes longer than all else that a request needs; and
nobody waits for one of those that a pool gives, which has its own way to wait."""


class Worker(Protocol):
    """Who answers requests."""

    condition: threading.Condition

    def work_for(self, pending: Pending, timeout: float | None) -> None:
        """Comes back when the answer is there, or after so many seconds; or at once, if others work for it."""

    def attend(self) -> None:
        """Somebody wants to be told of an answer, and does not wait for it."""


class Pending(Future[Any]):
    """See `Future`."""

    def __init__(self, worker: Worker) -> None:
        if _KNOWN:
            self._condition = worker.condition
            self._state = PENDING
            self._result: Any = None
            self._exception: BaseException | None = None
            self._waiters: list[Any] = []
            self._done_callbacks: list[Any] = []
        else:
            super().__init__()
        self._worker = worker
        self.waiters: list[threading.Lock] = []

    @property
    def is_there(self) -> bool:
        """Whether it is answered."""
        return self._state == FINISHED if _KNOWN else self.done()

    def result(self, timeout: float | None = None) -> Any:
        """See `Future.result`."""
        if self.is_there:
            return self._result if _KNOWN and self._exception is None else super().result()
        return super().result(self._waited(timeout))

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """See `Future.exception`."""
        return super().exception(timeout if self.is_there else self._waited(timeout))

    def _waited(self, timeout: float | None) -> float | None:
        """Works for the answer. Seconds that are left to wait for it."""
        start = time.perf_counter()
        self._worker.work_for(self, timeout)
        return None if timeout is None else max(timeout - (time.perf_counter() - start), 0.0)

    def set_result(self, result: Any) -> None:
        """See `Future.set_result`."""
        try:
            super().set_result(result)
        finally:
            self._wake()

    def set_exception(self, exception: BaseException | None) -> None:
        """See `Future.set_exception`."""
        try:
            super().set_exception(exception)
        finally:
            self._wake()

    def cancel(self) -> bool:
        """See `Future.cancel`."""
        try:
            return super().cancel()
        finally:
            self._wake()

    def _wake(self) -> None:
        """Wakes those who wait, also where a function raised what none should."""
        if self.waiters and self.done():
            for waiter in [*self.waiters]:  # those who wake go
                wake(waiter)

    def add_done_callback(self, fn: Callable[[Future[Any]], object]) -> None:
        """See `Future.add_done_callback`."""
        super().add_done_callback(fn)
        if not self.done():
            self._worker.attend()


def wake(waiter: threading.Lock) -> bool:
    """Wakes whoever waits for a lock; whether it was this call that did."""
    try:
        waiter.release()
    except RuntimeError:
        return False
    return True
