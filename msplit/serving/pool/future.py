"""Future of a pool: a thread that waits for it works for the pool meanwhile, in place of sleeping until another thread wakes it."""

from __future__ import annotations

import threading
import time
from _thread import RLock
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures._base import FINISHED, PENDING
from typing import Any, Protocol

_FIELDS = {"_condition", "_state", "_result", "_exception", "_waiters", "_done_callbacks"}
_KNOWN = set(vars(Future())) == _FIELDS
"""True if `Future` has the fields that it has in Python 3.11 and 3.12. Then all futures of a pool share one condition: to make one takes
longer than everything else that a request needs, and nobody waits for it, since `PoolFuture` waits in a way of its own."""


class Condition(RLock):  # type: ignore[misc]  # final in the stubs only; `threading.Condition` takes three times as long to enter
    """Condition that all futures of a pool share. No thread ever waits for it, so it is a lock that has nobody to notify."""

    def notify_all(self) -> None:
        """Does nothing."""

    def wait(self, timeout: float | None = None) -> bool:
        """Returns at once; for a future whose time to wait is over."""
        del timeout
        return False


class Worker(Protocol):
    """Driver of a pool, as its futures see it."""

    condition: Condition

    def work_for(self, future: PoolFuture, timeout: float | None) -> None:
        """Returns when the future is done, after so many seconds, or sooner."""

    def attend(self) -> None:
        """Has a thread of the pool end steps, since somebody wants to be called with an answer and does not wait for it."""


class PoolFuture(Future[Any]):
    """Answer to a request, which may not be there yet. Used as any other `Future`."""

    def __init__(self, worker: Worker) -> None:
        if _KNOWN:
            self._condition: Any = worker.condition
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
        """True if it has a result or an error."""
        return self._state == FINISHED if _KNOWN else self.done()

    def result(self, timeout: float | None = None) -> Any:
        """Waits for the result; see `Future.result`."""
        if self.is_there:
            return self._result if _KNOWN and self._exception is None else super().result()
        return super().result(self._work(timeout))

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Waits for the error; see `Future.exception`."""
        return super().exception(timeout if self.is_there else self._work(timeout))

    def _work(self, timeout: float | None) -> float | None:
        """Works until the future is done. Returns the seconds of the timeout that are left."""
        start = time.perf_counter()
        self._worker.work_for(self, timeout)
        return None if timeout is None else max(timeout - (time.perf_counter() - start), 0.0)

    def set_result(self, result: Any) -> None:
        """Sets the result, and wakes the threads that wait."""
        try:
            super().set_result(result)
        finally:
            self._wake()

    def set_exception(self, exception: BaseException | None) -> None:
        """Sets an error, and wakes the threads that wait."""
        try:
            super().set_exception(exception)
        finally:
            self._wake()

    def cancel(self) -> bool:
        """Cancels the request if it still waits; see `Future.cancel`."""
        try:
            return super().cancel()
        finally:
            self._wake()

    def _wake(self) -> None:
        """Wakes the threads that wait, also where a callback raised an error that it must not."""
        if self.waiters and self.done():
            for waiter in [*self.waiters]:  # a copy: threads that wake take theirs out
                wake(waiter)

    def add_done_callback(self, fn: Callable[[Future[Any]], object]) -> None:
        """Has a function called when it is done; see `Future.add_done_callback`."""
        super().add_done_callback(fn)
        if not self.done():
            self._worker.attend()


def wake(waiter: threading.Lock) -> bool:
    """Wakes the thread that waits for a lock; False if another call did so before."""
    try:
        waiter.release()
    except RuntimeError:
        return False
    return True
