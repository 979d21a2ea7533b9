"""A pool of processes: every request is answered once, with its own answer or an error that says why, whichever process ends when."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, as_completed
from concurrent.futures import wait as futures_wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from msplit.errors import Busy, Closed, DeviceLost, EngineError, InvalidInput, ProcessLost, TimedOut
from msplit.serving.pool import processes
from msplit.serving.pool.drivers import LoopDriver
from msplit.serving.pool.pool import Pool
from tests import forked
from tests.campaign import campaign, examples
from tests.serving.pool.remote import (
    DEADLY,
    LOST,
    POISON,
    SLOW,
    alive,
    held,
    kill,
    opened,
    resident,
    shared,
    started,
    wait,
    whole,
)
from tests.serving.pool.scripted import SOON, feeds, is_right, together
from tests.serving.pool.test_pool import in_a_loop

ROOT = Path(__file__).parents[3]
MOST = 40
"""Requests that may wait."""


_forked = forked.always(forked.instead, forked.POOLED)


@pytest.fixture(scope="module")
def pool(_forked: None) -> Iterator[Pool]:
    """Two processes, with an arena for each of two levels."""
    with opened(groups=2, priorities=2, max_queue=MOST) as pool:
        yield pool


@pytest.fixture(autouse=True)
def _whole(request: pytest.FixtureRequest) -> None:
    if "pool" in request.fixturenames:
        pool: Pool = request.getfixturevalue("pool")
        wait(lambda: whole(pool))


def slow(seconds: float, rows: int = 4) -> dict[str, Any]:
    return feeds(SLOW + seconds, rows)


def busy(pool: Pool, seconds: float = 0.3) -> list[Future[Any]]:
    """Has all arenas run a step that takes so long."""
    before = pool.stats().in_flight
    going = [pool.submit(slow(seconds), priority=level) for level in (0, 0, 1, 1)]
    wait(lambda: pool.stats().in_flight == before + 4)
    return going


def test_it_is_described_as_one_pool(pool: Pool) -> None:
    assert (pool.batches, pool.joins, pool.polls, pool.ready) == ((1, 4), True, True, True)
    assert pool.about.label == "by value"
    assert pool.about.facts == {"bytes": 10, "processes": 2, "gpus": 2}
    assert pool.settings.groups == 2
    ours = os.getpgid(0)
    for one in pool.processes():
        assert one.pid not in (0, os.getpid())
        assert os.getpgid(one.pid) != ours, "a signal of the terminal is for this process, which ends the others"
    assert [one.place for one in pool.processes()] == ["cpu:0", "cpu:1"]


def test_each_thread_gets_its_own_answers(pool: Pool) -> None:
    before, count = pool.stats(), examples(40, 400)

    def client(first: float) -> None:
        rng = np.random.default_rng(int(first))
        for number in range(count):
            one = feeds(first + number, int(rng.integers(1, 5)), float(number % 2))
            assert is_right(pool.step(one, priority=number % 2), one)

    def many(first: float) -> None:
        for start in range(0, count, 20):
            # All slots have a step that takes a while, so that the others wait: a quick machine would run them one by one.
            given = [slow(0.005)] * 4 + [feeds(first + start + number, 1 + number % 4) for number in range(16)]
            going = [pool.submit(one) for one in given]
            for one, answer in zip(given, going, strict=True):
                assert is_right(answer.result(SOON), one)

    assert together(*[lambda first=1e4 * each: client(first) for each in (1, 2)], lambda: many(3e4)) == []
    after = pool.stats()
    assert (after.answered - before.answered, after.failed - before.failed) == (3 * count, 0)
    assert after.steps - before.steps < 3 * count, "some shared a step"
    assert after.rows - before.rows >= 3 * count
    assert sum(one.stats.steps for one in pool.processes()) == after.steps


def test_requests_go_where_the_fewest_rows_are(pool: Pool) -> None:
    before = [one.stats.requests for one in pool.processes()]
    going = [pool.submit(slow(0.2, rows=4))] + [pool.submit(feeds(float(n))) for n in range(3)]
    for one in going:
        one.result(SOON)
    found = sorted(one.stats.requests - had for one, had in zip(pool.processes(), before, strict=True))
    assert found == [1, 3]


def test_errors_are_the_same_as_in_this_process(pool: Pool) -> None:
    going = [pool.submit(feeds(value)) for value in (1.0, POISON, 2.0)]
    problem = going[1].exception(SOON)
    assert type(problem) is InvalidInput
    assert str(problem) == "x: poison\n  of many\n  fix: give another"
    assert is_right(going[2].result(), feeds(2.0))
    with pytest.raises(EngineError, match="no value for input k"):
        pool.step({"x": np.zeros((1, 2))})
    with pytest.raises(EngineError, match="outputs are on the host"):
        pool.submit(feeds(1.0), on_device=True)


def test_requests_that_wait_too_long(pool: Pool) -> None:
    before = pool.stats().timed_out
    going = busy(pool)
    late = [pool.submit(feeds(1.0), timeout=0.02) for _ in range(6)]
    for one in late:
        problem = one.exception(SOON)
        assert type(problem) is TimedOut
        assert "the request was not run: it waited for 0." in str(problem)
    for one in going:
        one.result(SOON)
    assert pool.stats().timed_out == before + 6


def test_requests_that_are_cancelled_are_not_run(pool: Pool) -> None:
    before = pool.stats()
    going = busy(pool)
    deadly = [pool.submit(feeds(DEADLY)) for _ in range(4)]
    assert all(one.cancel() for one in deadly)
    assert all(one.cancelled() for one in as_completed(deadly, SOON))
    with pytest.raises(CancelledError):
        deadly[0].result()
    for one in going:
        assert one.result(SOON)
    wait(lambda: (pool.drive(), pool.stats().cancelled == before.cancelled + 4)[1])
    assert whole(pool)


def test_as_many_wait_as_may(pool: Pool) -> None:
    going = busy(pool, 0.5)
    going += [pool.submit(feeds(float(number))) for number in range(MOST)]
    with pytest.raises(Busy, match=f"{MOST} requests wait already, the most that may"):
        pool.submit(feeds(1.0))
    assert pool.stats().waiting == MOST
    for one in going:
        one.result(SOON)
    assert pool.stats().refused >= 1


def test_who_is_called_with_an_answer_waits_for_none(pool: Pool) -> None:
    came, over = list[Any](), threading.Event()

    def done(future: Future[Any]) -> None:
        came.append(future.result())
        over.set()

    pool.submit(feeds(7.0)).add_done_callback(done)
    assert over.wait(SOON)
    assert is_right(came[0], feeds(7.0))


@pytest.mark.parametrize("driver", [True, False], ids=["driver", "wrap_future"])
def test_an_event_loop_is_woken(pool: Pool, driver: bool) -> None:
    async def ask() -> None:
        loop = LoopDriver(pool.drive, pool.polls)
        given = [feeds(float(number)) for number in range(20)]
        going = [pool.submit(one) for one in given]
        waits = [loop.ask(one) if driver else asyncio.wrap_future(one) for one in going]
        for one, answer in zip(given, await asyncio.gather(*waits), strict=True):
            assert is_right(answer, one)
        used = time.process_time()
        if driver:
            await loop.ask(pool.submit(slow(0.3)))
            assert time.process_time() - used < 0.15, "a loop that waits sleeps"

    in_a_loop(ask())


def test_the_request_of_a_process_that_is_killed_is_run_again(pool: Pool) -> None:
    before = pool.stats()
    going = busy(pool)
    pid = kill(pool)
    for one in going:
        assert is_right(one.result(SOON), slow(0.3))
    after = pool.stats()
    assert (after.answered - before.answered, after.failed) == (4, before.failed)
    wait(lambda: whole(pool))
    assert not alive(pid)
    assert pool.processes()[0].restarts >= 1


def test_a_request_that_ends_its_process_each_time_fails_alone(pool: Pool) -> None:
    before = sum(one.restarts for one in pool.processes())
    deadly = pool.submit(feeds(DEADLY, rows=4))
    problem = deadly.exception(SOON)
    assert type(problem) is ProcessLost
    assert "ended while it had the request" in str(problem)
    assert is_right(pool.step(feeds(1.0)), feeds(1.0))
    wait(lambda: whole(pool))
    assert sum(one.restarts for one in pool.processes()) == before + 2


def test_a_process_whose_gpu_fails_is_replaced_and_says_why(pool: Pool) -> None:
    problem = pool.submit(feeds(LOST, rows=4)).exception(SOON)
    assert type(problem) is ProcessLost
    assert "ended while it had the request: CUDA error: an illegal address" in str(problem)
    assert pool.failure is None
    assert is_right(pool.step(feeds(1.0)), feeds(1.0))


def test_a_forked_child_leaves_the_processes_alone(pool: Pool) -> None:
    before, going = sum(one.restarts for one in pool.processes()), busy(pool, 0.2)
    child = os.fork()
    if not child:
        try:
            code = 1
            try:
                pool.submit(feeds(1.0))
            except Closed:
                try:
                    going[0].result(1)
                except Closed:
                    code = 0
            gc.collect()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for one in going:
        assert is_right(one.result(SOON), slow(0.2))
    assert sum(one.restarts for one in pool.processes()) == before


def test_without_a_retry_the_request_fails_and_others_go_on() -> None:
    with opened(retries=0) as pool:
        going = [pool.submit(slow(SOON / 2)), pool.submit(slow(0.1))]  # the first goes to the first process
        wait(lambda: pool.processes()[0].stats.in_flight)
        kill(pool)
        problems = [one.exception(SOON) for one in going]
        assert [type(one) for one in problems if one is not None] == [ProcessLost]
        assert pool.ready
        assert is_right(pool.step(feeds(1.0)), feeds(1.0))
        kill(pool, 1)
        wait(lambda: (pool.drive(), not pool.processes()[1].pid)[1])
        pool.close(finish=True)  # while it is started


def test_requests_wait_while_the_only_process_is_started() -> None:
    with opened(1, threads=2) as pool:
        kill(pool)
        wait(lambda: (pool.drive(), not pool.ready)[1])
        going = [pool.submit(feeds(float(number))) for number in range(30)]
        late = pool.submit(feeds(1.0), timeout=0.01)
        assert pool.stats().waiting == 31
        assert isinstance(late.exception(SOON), TimedOut)
        for number, one in enumerate(going):
            assert is_right(one.result(SOON), feeds(float(number)))
        assert pool.ready
        one = pool.submit(slow(0.5))
        wait(lambda: pool.stats().in_flight)
        rest = [pool.submit(feeds(float(number))) for number in range(40)]
        pool.close(finish=False)
        assert one.exception() is None
        assert {type(each.exception()) for each in rest} <= {Closed, type(None)}
        assert sum(each.exception() is not None for each in rest) >= 30
        with pytest.raises(Closed):
            pool.submit(feeds(1.0))


@pytest.mark.parametrize(
    ("name", "said"), [("fail", "here: it fails"), ("die", "the process of cpu:[01] was ended by signal 9")]
)
def test_a_pool_that_can_not_be_started(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / name).touch()
    handles = held()
    with pytest.raises(EngineError, match=said):
        started(2, tmp_path)
    assert held() == handles


def test_a_pool_whose_processes_can_not_be_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_PAUSE", 0.01)
    with opened(1, tmp_path) as pool:
        (tmp_path / "fail").touch()
        kill(pool)
        problem = pool.submit(feeds(1.0)).exception(SOON)
        assert type(problem) is DeviceLost
        assert "no process of the pool can be started: it fails" in str(problem)
        assert not pool.ready
        assert pool.failure is problem
        with pytest.raises(DeviceLost):
            pool.step(feeds(1.0))


def test_processes_end_with_the_one_that_started_them() -> None:
    before = shared()
    text = (
        "from tests.serving.pool.remote import *\nfrom tests.serving.pool.scripted import feeds\nimport time\n"
        "pool = started(2)\npool.submit(feeds(SLOW + 20.0))\n"
        "print(*[one.pid for one in pool.processes()], flush=True)\ntime.sleep(60)"
    )
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", text], cwd=ROOT, text=True, **pipes) as parent:
        assert parent.stdout is not None
        assert parent.stderr is not None
        pids = [*map(int, parent.stdout.readline().split())]
        assert [alive(pid) for pid in pids] == [True, True]
        parent.kill()
        parent.wait(SOON)
        assert parent.stderr.read() == "", "it ends when its processes have, which have nothing to say"
    wait(lambda: not any(map(alive, pids)))
    assert shared() == before


def test_a_pool_that_nobody_can_reach_ends_its_processes() -> None:
    before = held()
    pool = started(1)
    pids = [one.pid for one in pool.processes()]
    assert is_right(pool.step(feeds(1.0)), feeds(1.0))
    del pool
    wait(lambda: (gc.collect(), not any(map(alive, pids)))[1])
    wait(lambda: (subprocess._cleanup(), held() == before)[1])  # type: ignore[attr-defined]  # as the next `Popen` does


def test_a_process_that_is_killed_while_nobody_asks_is_replaced() -> None:
    with opened(1) as pool:
        pid = kill(pool)
        wait(lambda: pool.processes()[0].pid not in (0, pid))


@pytest.mark.parametrize("retries", [1, pytest.param(0, marks=campaign)])
def test_ten_thousand_requests_while_processes_are_killed(retries: int) -> None:
    """None is wrong, and each comes to an end: with an answer, late, cancelled, or with an error that says why. Memory stays as it is. In
    a campaign there are 50 kills, and 200,000 requests."""
    count, least, wrong, ends = examples(2500, 50_000), examples(1, 50), list[float](), Counter[str]()
    kills = 0

    def client(pool: Pool, first: float) -> None:
        for start in itertools.count(0, 50):
            if start >= count and kills >= least:
                return
            given = [feeds(first + start + number, 1 + number % 4) for number in range(50)]
            going = [
                pool.submit(one, priority=number % 2, timeout=0.02 if number % 9 == 8 else None)
                for number, one in enumerate(given)
            ]
            for late in going[::10]:
                late.cancel()
            for one, answer in zip(given, going, strict=True):
                try:
                    if not is_right(answer.result(SOON), one):
                        wrong.append(one["x"].flat[0])
                    ends["answered"] += 1
                except (ProcessLost, TimedOut, CancelledError) as problem:
                    ends[type(problem).__name__] += 1

    with opened(groups=2, priorities=2, retries=retries) as pool, ThreadPoolExecutor(4) as threads:
        before = resident()
        clients = [threads.submit(client, pool, 1e6 / 8 * number) for number in range(4)]
        while futures_wait(clients, 0.5).not_done:
            if all(one.pid for one in pool.processes()):
                kill(pool, kills % 2)
                kills += 1
        assert [one.exception() for one in clients] == [None] * 4
        assert wrong == []
        assert ends["answered"] > ends.total() / 2 >= 2 * count
        assert pool.stats().failed == ends["ProcessLost"]
        assert kills >= least
        assert resident() - before < 30 << 20
        wait(lambda: whole(pool))
