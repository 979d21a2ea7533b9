"""Any number of rows through a pool of processes: a request is cut where it is brought, and its parts run in several of them."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msplit.errors import Busy, Closed, EngineError, InvalidInput, ProcessLost
from msplit.serving.pool.pool import Pool
from tests import forked
from tests.campaign import examples
from tests.serving.pool.remote import DEADLY, POISON, SLOW, kill, opened, wait, whole
from tests.serving.pool.scripted import FLOAT, SOON, feeds, is_right, together

MOST = 20
"""Requests that may wait."""


_forked = forked.always(forked.instead, forked.POOLED)


@pytest.fixture(scope="module")
def pool(_forked: None) -> Iterator[Pool]:
    with opened(groups=1, max_queue=MOST) as pool:
        yield pool


@pytest.fixture(autouse=True)
def _whole(pool: Pool) -> None:
    wait(lambda: whole(pool))


def marked(value: float, rows: int, row: int) -> dict[str, Any]:
    """A request of which one row has a value that says what its step does."""
    one = feeds(0.0, rows)
    one["x"][row] = value
    return one


def slow(seconds: float, rows: int) -> dict[str, Any]:
    """A request each of whose steps takes so long."""
    return {"x": SLOW + seconds + np.arange(2.0 * rows).reshape(rows, 2) / 1e6, "k": np.array(0.0)}


def idle(pool: Pool) -> bool:
    """Whether nothing is left behind of a request, here or in a process."""
    pool.drive()
    stats, rows = pool.stats(), [member.line.load() for member in pool._steps._members]  # type: ignore[attr-defined]
    return (stats.waiting, stats.in_flight, rows, len(pool._parted)) == (0, 0, [0, 0], 0)


@pytest.mark.parametrize("rows", [0, 1, 4, 5, 12, 13])
def test_any_number_of_rows_is_answered(pool: Pool, rows: int) -> None:
    one, before = feeds(3.0, rows, 2.0), pool.stats()
    for answer in (pool.submit(one).result(SOON), pool.step(one), pool.step(one, timeout=SOON)):
        assert is_right(answer, one)
        assert (answer["y"].shape, answer["y"].dtype) == ((rows, 2), FLOAT)
    found = list[Future[Any]]()
    pool.submit_driven(one, found.append)
    wait(lambda: not pool.drive() and found)
    assert is_right(found[0].result(), one)
    wait(lambda: idle(pool))
    steps = rows // 4 + bool(rows % 4 or not rows)
    assert pool.stats().requests - before.requests == 4 * steps
    assert pool.stats().steps - before.steps == 4 * steps


@settings(max_examples=examples(20, 1000), deadline=None)
@given(rows=st.lists(st.integers(0, 13), min_size=1, max_size=8))
def test_requests_of_all_sizes_beside_each_other(pool: Pool, rows: Sequence[int]) -> None:
    requests = [feeds(100 * number, count, number % 2) for number, count in enumerate(rows)]
    for future, one in [(pool.submit(one), one) for one in requests]:
        assert is_right(future.result(SOON), one)


def test_parts_run_in_all_processes_at_once(pool: Pool) -> None:
    before = [one.stats.steps for one in pool.processes()]
    assert is_right(pool.step(slow(0.02, 40)), slow(0.02, 40))
    wait(lambda: idle(pool))
    found = [one.stats.steps - had for one, had in zip(pool.processes(), before, strict=True)]
    assert (sum(found), min(found) >= 3) == (10, True), "parts went where the fewest rows were"


def test_small_requests_are_not_held_back_by_a_large_one(pool: Pool) -> None:
    order = list[str]()
    large = pool.submit(slow(0.02, 80))
    large.add_done_callback(lambda _: order.append("large"))
    for number in range(3):
        assert is_right(pool.step(feeds(float(number))), feeds(float(number)))
        order.append("small")
    assert is_right(large.result(SOON), slow(0.02, 80))
    assert order == ["small"] * 3 + ["large"]


def test_as_many_wait_as_may_and_parts_of_what_was_taken_too(pool: Pool) -> None:
    """A queue that is full refuses no part of what was taken before."""
    large = pool.submit(slow(0.02, 60))
    wait(lambda: pool.stats().in_flight == 2)
    given, going = slow(0.05, 4), list[Future[Any]]()

    def fill() -> None:
        for _ in range(4 * MOST):  # on a busy machine some of them are run meanwhile
            going.append(pool.submit(given))

    with pytest.raises(Busy, match=f"{MOST} requests wait already"):
        fill()
    assert len(going) >= MOST - 2  # two parts of the large one may wait, too
    for answer in going:
        assert is_right(answer.result(SOON), given)
    assert is_right(large.result(SOON), slow(0.02, 60))


@pytest.mark.parametrize("row", [0, 6, 39])
def test_a_part_that_fails_fails_all_of_it_once(pool: Pool, row: int) -> None:
    told = list[Future[Any]]()
    large = pool.submit(marked(POISON, 40, row))
    large.add_done_callback(told.append)
    assert isinstance(large.exception(SOON), InvalidInput)
    wait(lambda: idle(pool))
    assert told == [large]
    assert is_right(pool.step(feeds(7.0, 9)), feeds(7.0, 9))


def test_a_large_request_is_cancelled_whole(pool: Pool) -> None:
    large = pool.submit(slow(0.1, 400))
    wait(lambda: pool.stats().in_flight)
    before = pool.stats().steps
    assert large.cancel()
    with pytest.raises(CancelledError):
        large.result(0)
    wait(lambda: idle(pool))
    assert pool.stats().steps - before <= 2, "parts were run that nobody waits for"
    assert is_right(pool.step(feeds(7.0, 9)), feeds(7.0, 9))


def test_only_the_parts_of_a_process_that_is_killed_are_run_again(pool: Pool) -> None:
    large = slow(0.05, 80)
    going = pool.submit(large)
    wait(lambda: pool.stats().in_flight == 2)
    kill(pool)
    assert is_right(going.result(SOON), large)
    wait(lambda: whole(pool) and idle(pool))


def test_a_part_that_ends_its_process_each_time_fails_all_of_it(pool: Pool) -> None:
    assert isinstance(pool.submit(marked(DEADLY, 40, 21)).exception(SOON), ProcessLost)
    wait(lambda: whole(pool) and idle(pool))
    assert is_right(pool.step(feeds(7.0, 9)), feeds(7.0, 9))


def test_processes_that_it_was_sent_to_cut_requests_too(pool: Pool) -> None:
    def client(other: Pool, first: float) -> None:
        for number in range(10):
            one = feeds(first + number, (0, 13, 1, 40)[number % 4])
            assert is_right(other.step(one), one)

    with pickle.loads(pickle.dumps(pool)) as other:
        assert together(lambda: client(pool, 0.0), lambda: client(other, 1e4)) == []


def test_a_pool_that_is_closed_finishes_what_was_taken() -> None:
    large = slow(0.02, 40)
    with opened(groups=1) as pool:
        going = pool.submit(large)
        threading.Timer(0.05, pool.close).start()
        assert is_right(going.result(SOON), large)


def test_as_many_rows_as_may() -> None:
    with opened(1, groups=1, max_rows=9) as pool:
        assert is_right(pool.step(feeds(1.0, 9)), feeds(1.0, 9))
        with pytest.raises(EngineError, match="a request of 10 rows has more than 9, the most that are taken"):
            pool.submit(feeds(1.0, 10))


def test_other_values_of_a_model_that_takes_none_are_refused(pool: Pool) -> None:
    with pytest.raises(EngineError, match="takes no other values"):
        pool.update({"b": np.zeros(8, np.float32)})
    assert is_right(pool.step(feeds(7.0, 9)), feeds(7.0, 9))


def test_a_pool_that_is_closed_at_once_fails_what_runs_in_parts() -> None:
    with opened(groups=1) as pool:
        going = pool.submit(slow(0.05, 400))
        wait(lambda: pool.stats().in_flight == 2)
        pool.close(finish=False)
        assert isinstance(going.exception(0), Closed)
        with pytest.raises(Closed):
            pool.submit(feeds(1.0, 9))


def test_a_pool_whose_processes_end_while_it_is_closed_finishes_what_was_taken() -> None:
    large = slow(0.05, 40)
    with opened(groups=1) as pool:
        going = pool.submit(large)
        wait(lambda: pool.stats().in_flight == 2)
        closing = threading.Thread(target=pool.close)
        closing.start()
        kill(pool, 1)
        assert is_right(going.result(SOON), large)
        closing.join(SOON)
