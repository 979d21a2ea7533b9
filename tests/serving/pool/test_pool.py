"""A pool: every request is answered once, with its own answer, whatever else happens."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, as_completed, wait
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msplit.errors import Busy, Closed, EngineError, MsplitError, TimedOut
from msplit.serving.pool.pool import Pool
from tests.campaign import examples
from tests.leftovers import Leftovers
from tests.serving.pool.scripted import (
    BOTH,
    SOON,
    Script,
    Scripted,
    feeds,
    is_right,
    opened,
    ports,
    scripted,
    together,
    until,
)


def in_a_loop(coroutine: Coroutine[Any, Any, None]) -> None:
    """Runs it in a thread of its own: a browser's tests leave a loop running in theirs."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, coroutine).result(60)


# Answers

ROWS = st.sampled_from([1, 2, 3, 4, 1, 2, 3, 4, 0, 5, 9, 13])
"""Rows of a request; the largest step has 4."""
ACTS = st.lists(
    st.one_of(
        st.tuples(
            st.just("submit"),
            ROWS,
            st.integers(0, 1),
            st.integers(0, 1),
            st.sampled_from([None, None, 0.0, 3e-4]),
        ),
        st.tuples(st.just("step"), ROWS, st.integers(0, 1)),
        st.tuples(st.just("poisoned"), st.sampled_from([1, 2, 4, 9])),
        st.tuples(st.just("cancel"), st.integers(0, 30)),
        st.tuples(st.just("result"), st.integers(0, 30)),
        st.tuples(st.just("drive"), st.sampled_from([0.0, 1e-4])),
        st.tuples(st.just("sleep"), st.sampled_from([1e-5, 3e-4])),
    ),
    max_size=25,
)
POISON = -64.0


@settings(max_examples=examples(60, 5000))
@given(
    acts=ACTS,
    seconds=st.sampled_from([(0.0,), (1e-4,), (5e-4, 0.0, 1e-4)]),
    errors=st.dictionaries(st.integers(0, 8), st.sampled_from(["start", "over", "wait", "outputs"]), max_size=3),
    delay=st.sampled_from([0.0, 200.0]),
    threads=st.sampled_from([0, 2]),
    priorities=st.integers(1, 2),
    finish=st.booleans(),
    clients=st.integers(1, 3),
)
def test_every_request_gets_its_own_answer(
    acts: list[tuple[Any, ...]],
    seconds: tuple[float, ...],
    errors: dict[int, str],
    delay: float,
    threads: int,
    priorities: int,
    finish: bool,
    clients: int,
) -> None:
    script = Script(seconds=seconds, errors=errors, poison=POISON)
    made: list[tuple[Future[Any], dict[str, Any], float | None]] = []
    told: list[Future[Any]] = []
    cancelled: set[int] = set()
    numbers = iter(range(1 << 30))

    def client(pool: Pool, mine: list[tuple[Any, ...]]) -> None:
        for name, *values in mine:
            if name == "submit":
                rows, k, level, patience = values
                one = feeds(next(numbers), rows, k)
                future = pool.submit(one, priority=level % priorities, timeout=patience)
                future.add_done_callback(told.append)
                made.append((future, one, patience))
            elif name == "poisoned":
                one = feeds(POISON, values[0])
                future = pool.submit(one)
                future.add_done_callback(told.append)
                made.append((future, one, None))
            elif name == "step":
                one = feeds(next(numbers), values[0], values[1])
                try:
                    assert is_right(pool.step(one), one)
                except Scripted:
                    assert errors
            elif name == "cancel" and made:
                future = made[values[0] % len(made)][0]
                if future.cancel():
                    cancelled.add(id(future))
            elif name == "result" and made:
                with contextlib.suppress(EngineError, CancelledError):
                    made[values[0] % len(made)][0].result()
            elif name == "drive":
                pool.drive(values[0])
            elif name == "sleep":
                time.sleep(values[0])

    leftovers = Leftovers()
    pool = scripted(script, threads=threads, priorities=priorities, max_delay_us=delay)
    problems = together(*[lambda part=acts[number::clients]: client(pool, part) for number in range(clients)])
    assert problems == []
    assert together(lambda: pool.close(finish)) == []
    assert script.faults == []
    assert (script.closed, leftovers.threads()) == (2, [])
    for future, one, patience in made:
        assert future.done()
        if future.cancelled():
            assert id(future) in cancelled
        elif (problem := future.exception()) is None:
            assert is_right(future.result(), one)
        elif isinstance(problem, TimedOut):
            assert patience is not None
        elif isinstance(problem, Closed):
            assert not finish
        else:
            assert isinstance(problem, Scripted)
            assert errors or one["x"].flat[0] == POISON  # what is wrong with one request is no other's trouble
    assert len(told) == len(made)
    stats = pool.stats()
    assert stats.requests == stats.answered + stats.failed + stats.timed_out + stats.cancelled
    assert (stats.waiting, stats.in_flight, stats.steps, stats.rows) == (0, 0, len(script.steps), sum(script.steps))


@BOTH
def test_many_threads_get_their_own_answers(threads: int) -> None:
    with opened(Script(seconds=(1e-4, 0.0)), threads=threads, groups=3) as (pool, _):

        def client(number: int) -> None:
            for turn in range(40):
                one = feeds(number * 1000 + turn, 1 + turn % 4, turn % 2)
                assert is_right(pool.step(one) if turn % 3 else pool.submit(one).result(), one)

        assert together(*[lambda number=number: client(number) for number in range(6)]) == []
        assert pool.stats().answered == 240


@BOTH
def test_requests_that_wait_share_a_step(threads: int) -> None:
    with opened(Script(held=threading.Event()), threads=threads, groups=1) as (pool, script):
        first = pool.submit(feeds(0))
        until(lambda: script.steps)
        rest = [pool.submit(feeds(number)) for number in range(1, 9)]
        script.held.set()  # type: ignore[union-attr]
        for number, future in enumerate([first, *rest]):
            assert is_right(future.result(SOON), feeds(number))
        assert script.steps == [1, 4, 4]
        assert script.order == list(range(9))
        stats = pool.stats()
        assert (stats.rows, stats.filled, stats.steps) == (9, 0, 3)


@BOTH
def test_a_step_that_is_not_full_waits_for_more_and_a_full_one_does_not(threads: int) -> None:
    with opened(threads=threads, groups=1, max_delay_us=500_000.0) as (pool, script):
        start = time.perf_counter()
        whole = [pool.submit(feeds(number)) for number in range(4)]
        for future in whole:
            future.result(SOON)
        assert time.perf_counter() - start < 0.4
        start = time.perf_counter()
        assert is_right(pool.step(feeds(7, 3)), feeds(7, 3))
        assert time.perf_counter() - start >= 0.5
        assert script.steps == [4, 4]
        assert pool.stats().filled == 1


@BOTH
def test_a_mapping_may_be_used_again_at_once(threads: int) -> None:
    with opened(Script(seconds=(1e-3,)), threads=threads, groups=1) as (pool, _):
        one, futures = feeds(0), []
        for number in range(8):
            one["x"] = feeds(number)["x"]
            futures.append(pool.submit(one))
        for number, future in enumerate(futures):
            assert is_right(future.result(SOON), feeds(number))


def test_answers_are_the_callers_own() -> None:
    with opened(groups=1, max_delay_us=5000.0) as (pool, _):
        futures = [pool.submit(feeds(number)) for number in range(4)]
        for future in futures:
            answer = future.result(SOON)
            for value in answer.values():
                value[...] = -1
        kept = [future.result() for future in futures]
        for answer in kept:
            np.testing.assert_array_equal(answer["y"], -1)
        assert is_right(pool.step(feeds(9, 4)), feeds(9, 4))


# Failures


@BOTH
@pytest.mark.parametrize("where", ["start", "over", "outputs"])
def test_a_step_that_fails_fails_its_requests_and_no_others(threads: int, where: str) -> None:
    if threads and where == "over":
        pytest.skip("nobody asks")
    with opened(Script(errors={1: where}), threads=threads, groups=1) as (pool, _script):
        for turn in range(4):
            if turn == 1:
                with pytest.raises(Scripted, match=f"step 1 failed in {where}"):
                    pool.step(feeds(turn))
            else:
                assert is_right(pool.submit(feeds(turn)).result(SOON), feeds(turn))
        assert pool.stats().failed == 1


@BOTH
def test_one_request_does_not_harm_those_that_share_its_step(threads: int) -> None:
    """What is wrong with its values shows in the step only, which fails as a whole."""
    with opened(Script(poison=POISON), threads=threads, groups=1, max_delay_us=5000.0) as (pool, _script):
        futures = [pool.submit(feeds(value)) for value in (1.0, POISON, 2.0, 3.0)]
        for value, future in zip((1.0, POISON, 2.0, 3.0), futures, strict=True):
            if value == POISON:
                with pytest.raises(Scripted, match="poison"):
                    future.result(SOON)
            else:
                assert is_right(future.result(SOON), feeds(value))
        stats = pool.stats()
        assert (stats.answered, stats.failed) == (3, 1)
        assert is_right(pool.step(feeds(5.0)), feeds(5.0))


def test_what_fails_while_somebody_waits_for_it_is_told_to_those_it_concerns() -> None:
    """The thread that looks after all waits for a step that is not its own, and that fails."""
    with opened(Script(seconds=(2e-3,), errors={0: "wait", 3: "wait", 4: "wait"}), groups=2) as (pool, _):
        outcomes: list[bool] = []

        def client(number: int) -> None:
            for turn in range(5):
                one = feeds(100 * number + turn, 4)
                try:
                    outcomes.append(is_right(pool.submit(one).result(SOON), one))
                except Scripted:
                    outcomes.append(False)

        assert together(*[lambda number=number: client(number) for number in range(3)]) == []
        assert outcomes.count(False) == pool.stats().failed == 3


@BOTH
def test_outputs_that_can_not_be_cut_are_an_error(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(threads=threads, groups=1) as (pool, _):
        monkeypatch.setattr(pool.ports, "cut", lambda outputs, rows: [][1])
        with pytest.raises(IndexError):
            pool.submit(feeds(0, 3)).result(SOON)
        monkeypatch.undo()
        assert is_right(pool.step(feeds(1)), feeds(1))
        assert pool.stats().failed == 1


# Futures


@BOTH
def test_who_waits_for_some_or_all(threads: int) -> None:
    with opened(Script(seconds=(1e-3,)), threads=threads) as (pool, _):
        futures = {pool.submit(feeds(number)): number for number in range(12)}
        for future in as_completed(futures, SOON):
            assert is_right(future.result(), feeds(futures[future]))
        more = [pool.submit(feeds(number)) for number in range(6)]
        done, left = wait(more, SOON)
        assert (len(done), len(left)) == (6, 0)
        pool.submit(feeds(1)).cancel()


@BOTH
def test_several_threads_wait_for_one_answer(threads: int) -> None:
    with opened(Script(held=threading.Event()), threads=threads) as (pool, script):
        future = pool.submit(feeds(1))

        def client() -> None:
            assert is_right(future.result(SOON), feeds(1))

        def release() -> None:
            time.sleep(0.02)
            script.held.set()  # type: ignore[union-attr]

        start = time.perf_counter()
        assert together(client, client, client, client, release) == []
        assert time.perf_counter() - start < SOON / 2


@BOTH
def test_who_waits_so_long_and_no_longer(threads: int) -> None:
    with opened(Script(held=threading.Event()), threads=threads) as (pool, script):
        futures = [pool.submit(feeds(number, 4)) for number in range(3)]

        def client(future: Future[Any]) -> None:
            start = time.perf_counter()
            with pytest.raises(TimeoutError):
                future.result(0.02)
            with pytest.raises(TimeoutError):
                future.exception(0)
            with pytest.raises(TimeoutError):
                future.result(-1)
            assert 0.02 <= time.perf_counter() - start < 1

        assert together(*[lambda future=future: client(future) for future in futures for _ in range(2)]) == []
        script.held.set()  # type: ignore[union-attr]
        for number, future in enumerate(futures):
            assert is_right(future.result(SOON), feeds(number, 4))
            assert future.exception(0) is None


@BOTH
def test_an_answer_calls_functions_that_ask_for_others(threads: int) -> None:
    """Of the same step, of one that is over too, of one that is still to be run, and of a new one."""
    with opened(Script(held=threading.Event()), threads=threads, groups=2) as (pool, script):
        seen: list[bool] = []

        def ask(number: int, other: Future[Any]) -> Callable[[Future[Any]], None]:
            def called(mine: Future[Any]) -> None:
                seen.append(is_right(other.result(SOON / 2), feeds(number)))
                seen.append(is_right(pool.step(feeds(99)), feeds(99)))

            return called

        first = [pool.submit(feeds(number, 4)) for number in (100, 101)]
        until(lambda: len(script.steps) == 2)
        rest = [pool.submit(feeds(number)) for number in range(4)]
        first[0].add_done_callback(lambda _: seen.append(is_right(first[1].result(SOON / 2), feeds(101, 4))))
        first[1].add_done_callback(lambda _: seen.append(is_right(first[0].result(SOON / 2), feeds(100, 4))))
        for number, future in enumerate(rest[:-1]):
            future.add_done_callback(ask(number + 1, rest[number + 1]))
        script.held.set()  # type: ignore[union-attr]
        assert together(*[lambda future=future: future.result(SOON) for future in [*first, *rest]]) == []
        until(lambda: len(seen) == 8)
        assert all(seen)


@BOTH
def test_functions_that_fail_harm_nobody(threads: int, caplog: pytest.LogCaptureFixture) -> None:
    """Not even what no function should raise."""

    def fails(future: Future[Any]) -> None:
        raise RuntimeError("a mistake of the caller's")

    def ends(future: Future[Any]) -> None:
        raise SystemExit(3)

    with opened(Script(seconds=(5e-3,)), threads=threads, groups=1, max_delay_us=2000.0) as (pool, _):
        for function in (fails, ends, fails, ends):
            futures = [pool.submit(feeds(number)) for number in range(4)]
            futures[0].add_done_callback(function)
            futures[2].add_done_callback(function)
            until(lambda futures=futures: all(future.done() for future in futures))
            for number, future in enumerate(futures):
                with contextlib.suppress(SystemExit):
                    future.result(SOON)
                assert is_right(future.result(SOON), feeds(number))
        assert is_right(pool.step(feeds(1)), feeds(1))
    assert "a mistake of the caller's" in caplog.text


@BOTH
def test_an_event_loop_waits_for_answers(threads: int) -> None:
    with opened(Script(seconds=(1e-3,)), threads=threads) as (pool, _):

        async def client(number: int) -> bool:
            return is_right(await asyncio.wrap_future(pool.submit(feeds(number))), feeds(number))

        async def given_up() -> None:
            waiting = [asyncio.wrap_future(pool.submit(feeds(number, 4))) for number in range(4)]
            waiting[-1].cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting[-1]
            for number, one in enumerate(waiting[:-1]):
                assert is_right(await one, feeds(number, 4))

        async def main() -> None:
            assert all(await asyncio.wait_for(asyncio.gather(*[client(number) for number in range(20)]), SOON))
            await asyncio.wait_for(given_up(), SOON)

        in_a_loop(main())


def test_an_event_loop_does_the_work_itself() -> None:
    with opened(Script(seconds=(1e-3,))) as (pool, _):

        async def main() -> None:
            loop = asyncio.get_running_loop()
            done = asyncio.Event()

            def drive() -> None:
                loop.call_soon(drive) if pool.drive() else done.set()

            futures = [pool.submit(feeds(number)) for number in range(20)]
            drive()
            await asyncio.wait_for(done.wait(), SOON)
            assert all(future.done() for future in futures)

        in_a_loop(main())
        assert pool.drive() is False


def test_the_pools_own_thread_makes_way_for_one_that_drives() -> None:
    """Two that look again and again would take the interpreter's lock from each other, 5 ms at a time."""
    with opened(Script(seconds=(1e-3,))) as (pool, _):
        by: list[str] = []

        def put() -> None:
            pool.submit(feeds(1.0)).add_done_callback(lambda future: by.append(threading.current_thread().name))

        put()
        time.sleep(0.05)  # nobody drives: the pool's own thread does
        assert by == ["msplit-pool"]
        for _ in range(3):
            put()
        time.sleep(0.02)
        put()  # always something to do from here on
        own, end = [threading.current_thread().name] * 50, time.perf_counter() + SOON
        while (
            by[-50:] != own and time.perf_counter() < end
        ):  # one that is not given a processor for a while does not drive
            put()
            pool.drive(1e-3)
        assert by[-50:] == own
        while pool.drive():
            pass


@BOTH
def test_what_is_cancelled_in_time_is_not_run(threads: int) -> None:
    with opened(Script(held=threading.Event()), threads=threads, groups=1) as (pool, script):
        running = pool.submit(feeds(0, 4))
        until(lambda: script.steps)
        waiting = [pool.submit(feeds(number)) for number in range(1, 5)]
        assert not running.cancel()
        assert waiting[1].cancel()
        assert waiting[1].cancelled()
        script.held.set()  # type: ignore[union-attr]
        with pytest.raises(CancelledError):
            waiting[1].result(SOON)
        for number in (1, 3, 4):
            assert is_right(waiting[number - 1].result(SOON), feeds(number))
        assert 2.0 not in script.order
        assert pool.stats().cancelled == 1


@BOTH
def test_who_waits_for_what_another_thread_cancels_is_told(threads: int) -> None:
    with opened(Script(held=threading.Event()), threads=threads, groups=1) as (pool, script):
        pool.submit(feeds(0, 4))
        until(lambda: script.steps)
        waiting = pool.submit(feeds(1))

        def client() -> None:
            with pytest.raises(CancelledError):
                waiting.result(SOON)

        assert together(client, client, lambda: (time.sleep(0.01), waiting.cancel())) == []


# Limits


@BOTH
def test_a_request_that_waited_too_long_is_not_run(threads: int) -> None:
    with opened(Script(held=threading.Event()), threads=threads, groups=1) as (pool, script):
        pool.submit(feeds(0, 4))
        until(lambda: script.steps)
        late = pool.submit(feeds(1), timeout=0.01)
        patient = pool.submit(feeds(2), timeout=60)
        with pytest.raises(TimedOut, match=r"the request was not run: it waited for 0\.0\d\d s"):
            late.result(SOON)  # while the other one runs
        script.held.set()  # type: ignore[union-attr]
        assert is_right(patient.result(SOON), feeds(2))
        assert 1.0 not in script.order
        assert pool.stats().timed_out == 1


@BOTH
def test_now_or_never(threads: int) -> None:
    with opened(Script(held=threading.Event()), threads=threads, groups=1) as (pool, script):
        first = pool.submit(feeds(0), timeout=0)
        until(lambda: script.steps)
        with pytest.raises(TimedOut):
            pool.submit(feeds(1), timeout=0).result(SOON)
        script.held.set()  # type: ignore[union-attr]
        assert is_right(first.result(SOON), feeds(0))


@BOTH
def test_too_many_are_refused_and_may_come_again(threads: int) -> None:
    with opened(Script(held=threading.Event()), threads=threads, groups=1, max_queue=2) as (pool, script):
        futures = [pool.submit(feeds(0, 4))]
        until(lambda: script.steps)
        futures += [pool.submit(feeds(number)) for number in (1, 2)]
        for ask in (pool.submit, pool.step):
            with pytest.raises(Busy, match="2 requests wait already, the most that may"):
                ask(feeds(3))
        script.held.set()  # type: ignore[union-attr]
        assert is_right(futures[2].result(SOON), feeds(2))
        assert is_right(pool.step(feeds(3)), feeds(3))
        assert pool.stats().refused == 2


def test_the_less_urgent_leave_a_slot_to_the_urgent() -> None:
    with opened(Script(held=threading.Event()), priorities=2, groups=2) as (pool, script):
        idle = [pool.submit(feeds(number, 4), priority=1) for number in range(3)]
        assert len(script.steps) == 1
        urgent = pool.submit(feeds(9, 4))
        assert script.order == [0.0, 9.0]
        script.held.set()  # type: ignore[union-attr]
        for number, future in [(9, urgent), *enumerate(idle)]:
            assert is_right(future.result(SOON), feeds(number, 4))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"priority": 1}, "the priority is 1"),
        ({"priority": -1}, "the priority is -1"),
        ({"priority": 1.0}, "no integer"),
        ({"priority": 0.0}, "no integer"),
        ({"priority": None}, "no integer"),
        ({"priority": False}, "no integer"),
        ({"priority": [0]}, "no integer"),
        ({"priority": np.array([0, 1])}, "no integer"),
        ({"priority": "0"}, "no integer"),
        ({"timeout": -1}, "the timeout is -1"),
        ({"timeout": float("nan")}, "the timeout is nan"),
        ({"timeout": "1"}, "the timeout is '1'"),
    ],
)
def test_what_is_out_of_range_is_refused(more: dict[str, Any], said: str) -> None:
    with opened() as (pool, _script):
        for ask in (pool.submit, pool.step):
            with pytest.raises(MsplitError, match=said):
                ask(feeds(0), **more)
        assert pool.stats().requests == 0


def test_what_is_wrong_with_a_request_is_said_at_once() -> None:
    with opened() as (pool, script):
        for ask in (pool.submit, pool.step):
            with pytest.raises(EngineError, match="no value for input k"):
                ask({"x": feeds(0)["x"]})
            for value in (5, None, [1], "x", np.ma.array(feeds(0)["x"], mask=True)):
                with pytest.raises(EngineError, match=r"input x (is given|has masked values)"):
                    ask({**feeds(0), "x": value})
            for given in (5, None, [feeds(0)]):
                with pytest.raises(EngineError, match="a mapping from names"):
                    ask(given)
        assert script.steps == []
        with pytest.raises(MsplitError, match="the seconds is None"):
            pool.drive(None)  # type: ignore[arg-type]
        assert ask({**feeds(0), "x": np.ma.array(feeds(0)["x"])})  # nothing is masked


def test_steps_of_fixed_shapes() -> None:
    with opened(of=ports(fixed=True)) as (pool, _):
        futures = [pool.submit(feeds(number, 3)) for number in range(5)]
        for number, future in enumerate(futures):
            assert is_right(future.result(SOON), feeds(number, 3))
        assert pool.batches == ()


@pytest.mark.parametrize("registers", [True, False, None])
def test_memory_that_can_not_be_registered_is_told_in_a_note(registers: bool | None) -> None:
    """And is not tried again."""
    asked = []
    memory = SimpleNamespace(register=lambda *what: asked.append(what) or registers, release=lambda address: None)
    with opened() as (pool, _):
        if registers is not None:
            pool._steps.slots[0].host_memory = memory  # type: ignore[attr-defined]
        assert all(pool.host_memory is (memory if registers else None) for _ in range(2))
        assert len(asked) == (registers is not None)
        assert any("large inputs are copied once more" in note for note in pool.about.notes) == (registers is False)
