"""Pools that are nothing but their behaviour under load."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np

from msplit.core.arguments import Precision
from msplit.serving.loadtest.corpus import Prepared, Verdict
from msplit.serving.loadtest.dispatcher import Watch, drive
from msplit.serving.loadtest.generator import Layout, LoadGenerator, OutputLayout, RequestTable, Sending, Sent
from msplit.serving.loadtest.results import LoadRun, measured
from msplit.serving.pool.pool import About, Stats
from msplit.serving.pool.ports import Port
from msplit.serving.pool.settings import PoolSettings

DISTINCT = 16
KEPT = {"score": OutputLayout("float32", (2,)), "id": OutputLayout("int64", ())}
FEEDS: Sequence[Mapping[str, Any]] = [{"x": np.full((1, 2), number, np.float32)} for number in range(DISTINCT)]
ANSWERS: Sequence[Mapping[str, Any]] = [
    {"score": np.array([number, number + 0.5], np.float32), "id": np.array(number, np.int64)}
    for number in range(DISTINCT)
]
PREPARED = Prepared(FEEDS, ANSWERS, "by hand", precision=Precision.IEEE, computed={})


class FakePool:
    """Answers what `answer` says of the number of a request, `seconds` later, so many at a time. `stall` is (from, to) in seconds since the
    first request: nothing is answered then."""

    def __init__(
        self,
        answer: Callable[[int, int], Any] = lambda number, count: ANSWERS[number],
        seconds: float = 0.0,
        stall: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        self._answer, self._seconds, self._stall = answer, seconds, stall
        self._waiting: deque[tuple[float, int, int, Future[Any]]] = deque()
        self._first: float | None = None
        self.count = self.most = 0

    def submit(self, feeds: Mapping[str, Any], *, priority: int = 0, timeout: float | None = None) -> Future[Any]:
        future: Future[Any] = Future()
        now = time.perf_counter()
        self._first = self._first or now
        self._waiting.append((now, int(feeds["x"][0, 0]), self.count, future))
        self.count += 1
        self.most = max(self.most, len(self._waiting))
        return future

    def drive(self, seconds: float = 0.0) -> bool:
        now = time.perf_counter()
        begin, end = (self._first + one if self._first else 0.0 for one in self._stall)
        while self._waiting and not begin <= now < end and now - self._waiting[0][0] >= self._seconds:
            _, number, count, future = self._waiting.popleft()
            found = self._answer(number, count)
            if isinstance(found, Exception):
                future.set_exception(found)
            else:
                future.set_result(dict(found))
        return bool(self._waiting)


class FakeModel(FakePool):
    """A pool with all that `load` asks of one."""

    def __init__(self, *arguments: Any, groups: int = 4, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.settings = PoolSettings(groups=groups)
        self.about = About("a fake", {}, (), (), {})
        self.inputs = {"x": Port("float32", (None, 2))}
        self.lengths, self.polls = (), True
        self.closed = False

    def step(self, feeds: Mapping[str, Any], **how: Any) -> Mapping[str, Any]:
        return ANSWERS[int(feeds["x"][0, 0])]

    def stats(self) -> Stats:
        return Stats(requests=self.count, steps=self.count, rows=self.count)

    def close(self, finish: bool = True) -> None:
        self.closed = True


@contextmanager
def instead(pool: Any) -> Iterator[None]:
    """`load` finds this pool, the prepared requests and their answers, whatever it is asked to load."""
    with (
        mock.patch("msplit.serving.loadtest.run.make_pool", return_value=pool),
        mock.patch("msplit.serving.loadtest.corpus.from_model", lambda flat, request, count, _: FEEDS[:count]),
        mock.patch("msplit.serving.loadtest.corpus.by_tensorflow", lambda flat, feeds, request: ANSWERS[: len(feeds)]),
        mock.patch("msplit.serving.loadtest.run.computed_in", return_value={}),
        mock.patch("msplit.serving.loadtest.run._sees_gpu", return_value=False),
    ):
        yield


def table(rows: int = 100_000) -> RequestTable:
    return RequestTable(Layout(rows, KEPT))


def loaded(shared: RequestTable, generator: LoadGenerator, pool: Any, asked: Sending) -> tuple[Sent, Mapping[str, int]]:
    """One run of a pool."""
    shared.clear()
    generator.send(asked)
    problems = drive(shared, pool, FEEDS, Watch(shared, generator.alive))
    return generator.receive(), problems


def run_of(shared: RequestTable, sent: Sent, asked: Sending) -> LoadRun:
    return measured(shared, sent, Verdict(0, 0, ""), is_open=asked.level.is_open)
