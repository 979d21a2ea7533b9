"""The event loop as a pool's driver: what it does itself, and what other threads bring it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import pytest

from msplit.serving.pool.drivers import LoopDriver, ThreadDriver
from tests.serving.pool.scripted import BOTH, SOON, Script, Scripted, feeds, is_right, opened


def drivers_of(pool: Any) -> LoopDriver:
    return LoopDriver(pool.drive, pool.polls)


@BOTH
def test_a_loop_gets_the_answers_of_many_requests(threads: int) -> None:
    async def ask(pool: Any) -> list[bool]:
        driver = drivers_of(pool)
        given = [feeds(number) for number in range(20)]
        answers = [driver.ask(pool.submit(one)) for one in given]
        return [is_right(await asyncio.wait_for(answer, SOON), one) for answer, one in zip(answers, given, strict=True)]

    with opened(Script(seconds=(1e-3,)), threads=threads) as (pool, _):
        assert asyncio.run(ask(pool)) == [True] * 20


def driven(pool: Any, given: list[Any], seconds: float = SOON, **how: Any) -> list[Future[Any]]:
    """Futures of requests whose caller drives the pool, all done."""
    done: list[Future[Any]] = []
    futures = [pool.submit_driven(one, done.append, **how) for one in given]
    end = time.monotonic() + seconds
    while pool.drive():
        assert time.monotonic() < end
    if not pool.polls:
        wait(futures, seconds)
    assert len(done) == len(futures)
    assert set(map(id, done)) == set(map(id, futures))
    return futures


@BOTH
def test_who_drives_a_pool_gets_the_answers_and_wakes_no_thread(threads: int) -> None:
    script = Script(seconds=(1e-3,))
    with opened(script, threads=threads, groups=2) as (pool, _):
        for count in (1, 2, 20):
            given = [feeds(number, rows=1 + number % 3) for number in range(count)]
            for one, future in zip(given, driven(pool, given), strict=True):
                assert is_right(future.result(0), one)
        assert pool.stats().answered == 23
        assert pool.stats().steps < 23, "no two requests shared a step"
        if pool.polls:
            assert not pool._driver._awake
    assert not script.faults


@pytest.mark.parametrize("where", ["start", "over", "outputs"])
def test_a_step_that_fails_fails_its_own_request_only(where: str) -> None:
    script = Script(errors={0: where})
    with opened(script) as (pool, _):
        (failed,), given = driven(pool, [feeds(1)]), feeds(2)
        with pytest.raises(Scripted, match=f"step 0 failed in {where}"):
            failed.result(0)
        assert is_right(driven(pool, [given])[0].result(0), given)
        assert (pool.stats().failed, pool.stats().answered) == (1, 1)
    assert not script.faults


def test_threads_that_wait_and_one_that_drives_get_their_answers() -> None:
    script = Script(seconds=(2e-4, 1e-3))
    with opened(script, groups=2) as (pool, _), ThreadPoolExecutor(4) as waiting:
        given = [feeds(number) for number in range(200)]
        answers = [waiting.submit(pool.step, one) for one in given]
        for number in range(100):
            one = feeds(1000 + number)
            assert is_right(driven(pool, [one])[0].result(0), one)
        assert all(is_right(answer.result(SOON), one) for answer, one in zip(answers, given, strict=True))
    assert not script.faults


def test_a_pool_that_is_closed_ends_a_step_that_somebody_drove() -> None:
    script, done = Script(seconds=(0.05,)), []
    with opened(script) as (pool, _):
        future = pool.submit_driven(feeds(1), done.append)
    assert done == [future]
    assert is_right(future.result(0), feeds(1))
    assert not script.faults


def test_an_answer_that_another_thread_ends_reaches_the_loop() -> None:
    async def ask(future: Future[Any], end: Any) -> Any:
        waiter = LoopDriver(lambda: False, polls=False).ask(future)
        threading.Thread(target=end).start()
        return await asyncio.wait_for(waiter, SOON)

    answered, failed, cancelled = Future[Any](), Future[Any](), Future[Any]()
    assert asyncio.run(ask(answered, lambda: answered.set_result(3))) == 3
    with pytest.raises(KeyError):
        asyncio.run(ask(failed, lambda: failed.set_exception(KeyError())))
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(ask(cancelled, cancelled.cancel))


def test_a_loop_that_was_closed_harms_nobody() -> None:
    future = Future[Any]()

    async def ask() -> None:
        LoopDriver(lambda: False, polls=False).ask(future)

    asyncio.run(ask())
    called: list[Future[Any]] = []
    future.add_done_callback(called.append)
    future.set_result(1)  # a callback that failed would be logged, which fails a test
    assert called == [future]


def test_a_drive_that_fails_is_tried_again_with_the_next_request() -> None:
    driven: list[int] = []

    def drive() -> bool:
        driven.append(1)
        if len(driven) == 1:
            raise ValueError
        return False

    async def ask() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        driver = LoopDriver(drive, polls=True)
        for count in (1, 2):
            driver.ask(Future())
            await asyncio.sleep(0.01)
            assert len(driven) == count

    asyncio.run(ask())


def test_two_threads_that_look_for_one_to_lead_take_none_twice() -> None:
    """Between the look and the taking another thread may have taken the only one: its own answer was an IndexError then."""

    class Taken(deque[Any]):
        def __bool__(self) -> bool:
            there = len(self) > 0
            self.clear()  # as the other thread does
            return there

    with opened(Script()) as (pool, _):
        driver: ThreadDriver = pool._driver
        driver._waiters = Taken([threading.Lock()])
        driver._promote()
        assert is_right(pool.step(feeds(1)), feeds(1))
