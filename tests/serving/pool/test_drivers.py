"""The event loop as a pool's driver: what it does itself, and what other threads bring it."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from typing import Any

import pytest

from msplit.serving.pool.drivers import LoopDriver
from tests.serving.pool.scripted import BOTH, SOON, Script, feeds, is_right, opened


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
