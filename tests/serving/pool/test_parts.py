"""Requests of more rows than a step has: one answer, or one error, whatever becomes of their parts, and nobody waits behind them."""

from __future__ import annotations

import threading
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msplit.errors import Busy, Closed, EngineError, TimedOut
from msplit.serving.pool.ports import Ports
from tests.campaign import examples
from tests.serving.pool.scripted import (
    BOTH,
    FLOAT,
    SOON,
    Script,
    Scripted,
    feeds,
    is_right,
    opened,
    ports,
    until,
)


@BOTH
@pytest.mark.parametrize("rows", [0, 1, 4, 5, 12, 13])
def test_any_number_of_rows_is_answered(threads: int, rows: int) -> None:
    with opened(threads=threads) as (pool, script):
        one = feeds(3.0, rows, 2.0)
        for answer in (pool.submit(one).result(SOON), pool.step(one), pool.step(one, timeout=SOON)):
            assert is_right(answer, one)
            assert (answer["y"].shape, answer["y"].dtype) == ((rows, 2), FLOAT)
        assert len(script.steps) == 3 * (rows // 4 + bool(rows % 4 or not rows))
        assert set(script.steps) <= {1, 4}
        futures: list[Future[Any]] = []
        pool.submit_driven(one, futures.append)
        until(lambda: not pool.drive() and futures)
        assert is_right(futures[0].result(), one)


@settings(max_examples=examples(20, 1000), deadline=None)
@given(
    rows=st.lists(st.integers(0, 13), min_size=1, max_size=8),
    threads=st.sampled_from([0, 2]),
    delay=st.sampled_from([0.0, 200.0]),
)
def test_requests_of_all_sizes_beside_each_other(rows: list[int], threads: int, delay: float) -> None:
    with opened(Script(seconds=(1e-4, 0.0)), threads=threads, max_delay_us=delay) as (pool, _):
        requests = [feeds(100 * number, count, number % 2) for number, count in enumerate(rows)]
        for future, one in [(pool.submit(one), one) for one in requests]:
            assert is_right(future.result(SOON), one)


@BOTH
def test_a_small_request_waits_for_few_parts_of_a_large_one(threads: int) -> None:
    """As many as there are slots wait at a time; those behind them come after what came meanwhile."""
    with opened(Script(held=threading.Event()), threads=threads, groups=1) as (pool, script):
        large = pool.submit(feeds(0.0, 400))
        until(lambda: script.steps)
        small = [pool.submit(feeds(1000.0 + number)) for number in range(3)]
        script.held.set()  # type: ignore[union-attr]
        assert is_right(small[2].result(SOON), feeds(1002.0))
        assert max(map(script.order.index, (1000.0, 1001.0, 1002.0))) <= 4
        assert is_right(large.result(SOON), feeds(0.0, 400))
        assert pool.stats().requests == 103


@BOTH
@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_part_that_fails_fails_all_of_it_once(threads: int, at: int) -> None:
    with opened(Script(errors={at: "outputs"}), threads=threads, groups=1) as (pool, script):
        told: list[Future[Any]] = []
        large = pool.submit(feeds(0.0, 400))
        large.add_done_callback(told.append)
        with pytest.raises(Scripted, match=f"step {at} failed"):
            large.result(SOON)
        assert is_right(pool.submit(feeds(7.0, 9)).result(SOON), feeds(7.0, 9))
        assert (told, pool.stats().failed) == ([large], 1)
        assert len(script.steps) <= at + 5, "parts behind the one that failed were run"


@BOTH
def test_a_large_request_is_cancelled_whole(threads: int) -> None:
    with opened(Script(held=threading.Event()), threads=threads, groups=1) as (pool, script):
        first = pool.submit(feeds(5.0))
        large = pool.submit(feeds(0.0, 400))
        until(lambda: script.steps)
        assert large.cancel()
        assert wait([large, first], 0.01, FIRST_COMPLETED).done == {large}
        with pytest.raises(CancelledError):
            large.result(0)
        script.held.set()  # type: ignore[union-attr]
        assert is_right(first.result(SOON), feeds(5.0))
        assert is_right(pool.step(feeds(7.0, 9)), feeds(7.0, 9))
        assert len(script.steps) == 4
        assert pool.stats().waiting == 0


@BOTH
def test_a_large_request_that_has_begun_can_be_cancelled(threads: int) -> None:
    with opened(Script(held=threading.Event()), threads=threads, groups=2) as (pool, script):
        large = pool.submit(feeds(0.0, 400))
        until(lambda: len(script.steps) == 2)
        assert large.cancel()
        script.held.set()  # type: ignore[union-attr]
        assert is_right(pool.step(feeds(7.0)), feeds(7.0))
        until(lambda: not pool.drive())
        assert sorted(script.steps) == [1, 4, 4]


@BOTH
def test_a_part_that_is_late_fails_all_of_it(threads: int) -> None:
    with opened(Script(seconds=(0.02,)), threads=threads, groups=1) as (pool, script):
        with pytest.raises(TimedOut):
            pool.submit(feeds(0.0, 400), timeout=0.05).result(SOON)
        assert 1 <= len(script.steps) < 20
        assert is_right(pool.step(feeds(7.0)), feeds(7.0))


@BOTH
def test_a_queue_that_is_full_refuses_a_large_request_before_it_begins_and_not_its_parts(threads: int) -> None:
    with opened(Script(held=threading.Event()), threads=threads, groups=1, max_queue=1) as (pool, script):
        large = pool.submit(feeds(0.0, 40))
        until(lambda: script.steps)
        waits = pool.submit(feeds(5.0, 4))
        with pytest.raises(Busy):
            pool.submit(feeds(6.0, 40))
        script.held.set()  # type: ignore[union-attr]
        assert is_right(large.result(SOON), feeds(0.0, 40))
        assert is_right(waits.result(SOON), feeds(5.0, 4))
        assert not pool._parted


@BOTH
@pytest.mark.parametrize("finish", [True, False])
def test_a_large_request_is_finished_or_failed_at_the_end(threads: int, finish: bool) -> None:
    with opened(Script(seconds=(1e-3,), held=threading.Event()), threads=threads, groups=1) as (pool, script):
        first = pool.submit(feeds(5.0))
        large = pool.submit(feeds(0.0, 40))
        until(lambda: script.steps)
        threading.Timer(0.02, script.held.set).start()  # type: ignore[union-attr]
        pool.close(finish)
        assert is_right(first.result(0), feeds(5.0))
        if finish:
            assert is_right(large.result(0), feeds(0.0, 40))
        else:
            with pytest.raises(Closed):
                large.result(0)
        with pytest.raises(Closed):
            pool.submit(feeds(0.0, 40))


def test_the_number_of_rows_is_bounded() -> None:
    with opened(of=ports()) as (pool, script):
        with pytest.raises(EngineError, match="a request of 1,025 rows has more than 1,024, the most that are taken"):
            pool.submit(feeds(0.0, 4 * 256 + 1))
        assert is_right(pool.step(feeds(0.0, 4 * 256)), feeds(0.0, 4 * 256))
        assert len(script.steps) == 256


def test_a_bound_of_its_own() -> None:
    shapes = {batch: {"x": (2 * batch, 3), "text": (batch,)} for batch in (2, 4)}
    dtypes = {"x": np.dtype(np.float32), "text": np.dtype(object)}
    made = Ports(dtypes, shapes, ({"x": 2, "text": 1}, {"y": 1}), max_rows=10)
    assert (made.inputs["x"].most, made.inputs["text"].most) == (60, 10)
    for rows in (0, 1, 10):
        one = {"x": np.zeros((2 * rows, 3), np.float32), "text": np.array([b"a"] * rows, object)}
        arrays, found, _ = made.check(one)
        parts = made.parts(arrays, found)
        assert [count for _, count in parts] == {0: [1], 1: [1], 10: [4, 4, 2]}[rows]
        assert all(part["x"].shape == (2 * count, 3) for part, count in parts)
    with pytest.raises(EngineError, match="more than 10"):
        made.check({"x": np.zeros((22, 3), np.float32), "text": np.array([b"a"] * 11, object)})
