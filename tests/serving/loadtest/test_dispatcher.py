"""Requests go to what answers them, answers come back, and what goes wrong is told."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from msplit.errors import Busy, EngineError, TimedOut
from msplit.serving.loadtest.dispatcher import Echo, Watch, call, drive
from msplit.serving.loadtest.generator import (
    ANSWERED,
    OVER,
    SENT,
    Level,
    LoadGenerator,
    RequestState,
    RequestTable,
    Sending,
)
from tests.serving.loadtest.fakes import ANSWERS, DISTINCT, FEEDS, FakePool, loaded, run_of, table

ASKED = Sending(Level(clients=4), 0.1, 0.0, DISTINCT, seed=1)


def waiting(count: int) -> RequestTable:
    """A table with requests that all are there."""
    made = table(max(count, 1))
    made.request[:count] = np.arange(count) % DISTINCT
    made.counters[SENT], made.counters[OVER] = count, 1
    return made


def nobody(made: RequestTable) -> Watch:
    return Watch(made, lambda: None)


def test_what_becomes_of_requests_is_told(shared: RequestTable, generator: LoadGenerator) -> None:
    outcomes = [Busy("full"), TimedOut("late"), EngineError("broken"), ValueError("odd")]
    kinds = [RequestState.REFUSED, RequestState.TIMED_OUT, RequestState.FAILED, RequestState.FAILED]

    def answer(number: int, count: int) -> Any:
        return outcomes[count % 5] if count % 5 < 4 else ANSWERS[number]

    sent, problems = loaded(shared, generator, FakePool(answer), ASKED)
    count = shared.counters[SENT]
    assert shared.status[: min(count, 10)].tolist() == ([*kinds, RequestState.DONE] * 2)[:count]
    assert set(problems) == {"broken", "ValueError: odd"}
    run = run_of(shared, sent, ASKED)
    parts = (run.refused, run.timed_out, run.failed, run.answered)
    assert 0 <= sum(parts) - run.requests <= 4  # what failed counts after the end, too
    assert abs(run.failed - 2 * run.refused) <= 4


def test_what_a_pool_does_not_take_is_no_end() -> None:
    class Full(FakePool):
        def submit(self, feeds: Mapping[str, Any], **how: Any) -> Future[Any]:
            raise Busy("full")

    made = waiting(40)
    assert drive(made, Full(), FEEDS, nobody(made)) == {}
    assert (made.status[:40] == RequestState.REFUSED).all()


@pytest.mark.parametrize(
    "outputs",
    [{"score": np.zeros(3, np.float32), "id": np.array(1)}, {"score": np.zeros(2, np.float32)}, {}],
)
def test_outputs_of_another_shape_are_noticed(outputs: Mapping[str, Any]) -> None:
    made = waiting(70)

    def answer(number: int, count: int) -> Any:
        return outputs if count % 3 == 1 else ANSWERS[number]

    problems = drive(made, FakePool(answer), FEEDS, nobody(made))
    status = made.status[:70]
    assert (status[1::3] == RequestState.MISSHAPEN).all()
    assert (np.delete(status, np.s_[1::3]) == RequestState.DONE).all()
    assert sum(problems.values()) == len(status[1::3]) * (2 if not outputs else 1)
    right = np.flatnonzero(status == RequestState.DONE)
    assert (made.outputs["id"][right] == made.request[right]).all()


def test_threads_answer_all_and_each_once() -> None:
    made, seen, lock = waiting(3000), list[int](), threading.Lock()

    def step(feeds: Mapping[str, Any]) -> Mapping[str, Any]:
        number = int(feeds["x"][0, 0])
        with lock:
            seen.append(number)
        return ANSWERS[number]

    assert call(made, [step] * 6, FEEDS, nobody(made)) == {}
    assert len(seen) == made.counters[ANSWERED] == 3000
    assert (made.outputs["id"][:3000] == made.request[:3000]).all()
    assert (made.status[:3000] == RequestState.DONE).all()


def test_as_many_calls_at_once_as_threads_and_no_more(shared: RequestTable, generator: LoadGenerator) -> None:
    state = {"now": 0, "most": 0}
    lock = threading.Lock()

    def step(feeds: Mapping[str, Any]) -> Mapping[str, Any]:
        with lock:
            state["now"] += 1
            state["most"] = max(state["most"], state["now"])
        threading.Event().wait(0.002)
        with lock:
            state["now"] -= 1
        return ANSWERS[int(feeds["x"][0, 0])]

    shared.clear()
    generator.send(Sending(Level(clients=8), 0.15, 0.0, DISTINCT, seed=1))
    call(shared, [step] * 3, FEEDS, Watch(shared, generator.alive))
    generator.receive()
    assert state["most"] == 3
    assert shared.counters[ANSWERED] == shared.counters[SENT]


def test_an_error_in_a_call_fails_one_request_and_a_bug_ends_the_run() -> None:
    made = waiting(50)

    def step(feeds: Mapping[str, Any]) -> Mapping[str, Any]:
        if feeds["x"][0, 0] == 3:
            raise EngineError("no three")
        return ANSWERS[int(feeds["x"][0, 0])]

    assert call(made, [step, step], FEEDS, nobody(made)) == {"no three": 3}

    def bug(feeds: Mapping[str, Any]) -> Mapping[str, Any]:
        raise ZeroDivisionError

    other = waiting(50)
    with pytest.raises(ZeroDivisionError):
        call(other, [bug] * 3, FEEDS, nobody(other))


def test_echoes_answer_what_was_prepared_and_keep_up() -> None:
    made = waiting(50_000)
    echo = Echo(FEEDS, ANSWERS)
    drive(made, echo, FEEDS, nobody(made))
    assert (made.outputs["id"] == made.request).all()
    taken = (made.answered[-1] - made.taken[0]) / 50_000
    assert taken < 50_000  # ns; 5,000 alone on a core, and cores are shared here
    other = waiting(1000)
    call(other, [echo.step] * 4, FEEDS, nobody(other))
    assert (other.outputs["score"] == made.outputs["score"][:1000]).all()


def test_what_still_waits_long_after_the_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """More came than could be answered: to answer all of it would take many times the run."""
    monkeypatch.setattr("msplit.serving.loadtest.dispatcher._GRACE", 0.1)
    made = waiting(1000)
    pool = FakePool(seconds=0.0, stall=(0.0, 1e9))
    started = time.monotonic()
    assert drive(made, pool, FEEDS, nobody(made)) == {}
    assert time.monotonic() - started < 10
    assert (made.status[:1000] == RequestState.GIVEN_UP).all()
    other = waiting(1000)

    def step(feeds: Mapping[str, Any]) -> Mapping[str, Any]:
        time.sleep(0.01)
        return ANSWERS[int(feeds["x"][0, 0])]

    assert call(other, [step] * 2, FEEDS, nobody(other)) == {}
    status = other.status[:1000]
    done = int((status == RequestState.DONE).sum())
    assert 2 <= done < 500
    assert (status[:done] == RequestState.DONE).all()
    assert (status[done:] == RequestState.GIVEN_UP).all()
    assert other.counters[ANSWERED] == 1000
