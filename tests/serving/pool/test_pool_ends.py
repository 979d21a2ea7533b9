"""How a pool ends, and what interrupts it: nobody is forgotten, and nothing is left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from msplit.errors import Closed
from tests import forked
from tests.campaign import examples
from tests.leftovers import Leftovers
from tests.serving.pool.scripted import (
    BOTH,
    SOON,
    Script,
    feeds,
    is_right,
    opened,
    scripted,
    together,
    until,
)


@pytest.fixture
def hears_interrupts() -> Iterator[None]:
    """Processes of pytest-xdist do not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@BOTH
def test_to_close_finishes_what_waits(threads: int) -> None:
    with opened(Script(seconds=(1e-3,)), threads=threads) as (pool, _):
        futures = [pool.submit(feeds(number, 3)) for number in range(10)]
        pool.close()
        assert all(future.done() for future in futures)
        for number, future in enumerate(futures):
            assert is_right(future.result(0), feeds(number, 3))
        for ask in (pool.submit, pool.step):
            with pytest.raises(Closed, match="the pool is closed"):
                ask(feeds(0))
        pool.close()


@BOTH
def test_to_close_fails_what_waits(threads: int) -> None:
    with opened(Script(held=threading.Event()), threads=threads, groups=1) as (pool, script):
        first = pool.submit(feeds(0, 4))
        until(lambda: script.steps)
        futures = [pool.submit(feeds(number)) for number in range(4)]
        assert futures[2].cancel()  # before it is closed
        problems: list[BaseException | None] = []

        def client(future: Future[Any]) -> None:
            problems.append(future.exception(SOON))

        def close() -> None:
            time.sleep(0.01)
            pool.close(finish=False)

        def release() -> None:
            until(lambda: len(problems) == 3)  # they are told before what is in flight is over
            script.held.set()  # type: ignore[union-attr]

        waiting = [lambda future=future: client(future) for future in (futures[0], futures[1], futures[3])]
        assert together(*waiting, close, release) == []
        assert [type(problem) for problem in problems] == [Closed] * 3
        assert is_right(first.result(SOON), feeds(0, 4))


@BOTH
def test_what_raises_in_a_with_statement_does_not_wait_for_all(threads: int) -> None:
    script = Script(seconds=(5e-3,))
    pool = scripted(script, threads=threads, groups=1)
    futures = []
    with contextlib.suppress(ZeroDivisionError), pool:
        futures += [pool.submit(feeds(number, 4)) for number in range(50)]
        1 / 0  # noqa: B018
    assert sum(isinstance(future.exception(SOON), Closed) for future in futures) >= 45


@BOTH
def test_an_answer_may_close_the_pool(threads: int) -> None:
    with opened(Script(seconds=(1e-3,)), threads=threads) as (pool, _):
        problems: list[BaseException] = []

        def close(future: Future[Any]) -> None:
            try:
                pool.close()
            except BaseException as problem:
                problems.append(problem)

        futures = [pool.submit(feeds(number, 3)) for number in range(6)]
        for future in futures[:3]:
            future.add_done_callback(close)
        assert together(*[lambda future=future: future.result(SOON) for future in futures]) == []
        assert problems == []


def test_several_threads_close_it() -> None:
    with opened(Script(seconds=(1e-3,))) as (pool, _):
        futures = [pool.submit(feeds(number, 3)) for number in range(6)]
        assert together(pool.close, pool.close, lambda: pool.close(False)) == []
        assert all(future.done() for future in futures)


def test_whoever_closes_it_finds_it_closed() -> None:
    """The second one came back while the first was still at it, and both could take the same slot to close."""
    ended: list[int] = []

    class Slow:
        def __init__(self, number: int) -> None:
            self.number = number

        def close(self) -> None:
            time.sleep(0.03)
            ended.append(self.number)

    with opened(Script()) as (pool, _):
        pool._owned.extend(Slow(number) for number in range(4))
        seen: list[int] = []

        def close() -> None:
            pool.close()
            seen.append(len(ended))

        assert together(*[close] * 4) == []
        assert (sorted(ended), seen) == ([0, 1, 2, 3], [4] * 4)


def interrupt(begun: threading.Event, then: Callable[[], None] = lambda: None) -> None:
    """Interrupts the main thread a moment after something has begun, which goes on for another moment, whatever else the machine does."""

    def send() -> None:
        begun.wait(SOON)
        time.sleep(0.03)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        time.sleep(0.03)
        then()

    threading.Thread(target=send, daemon=True).start()


@pytest.mark.usefixtures("hears_interrupts")
@BOTH
@pytest.mark.parametrize("how", ["step", "result", "follow", "close"])
def test_who_is_interrupted_leaves_all_in_order(threads: int, how: str) -> None:
    """A step that is in flight goes on, and its slot is nobody else's before it is over."""
    script = Script(held=threading.Event())
    with opened(script, threads=threads, groups=1) as (pool, _):
        other: threading.Thread | None = None
        if how == "follow":
            ahead = pool.submit(feeds(5))
            other = threading.Thread(target=lambda: ahead.result(SOON), daemon=True)
            other.start()
            until(lambda: script.steps)
        future = None if how == "step" else pool.submit(feeds(1))
        begun = threading.Event()
        interrupt(begun, script.held.set if how == "step" else lambda: None)  # type: ignore[union-attr]
        asked = {"step": lambda: pool.step(feeds(1)), "close": pool.close}.get(how, lambda: future.result(SOON))

        def ask() -> None:
            begun.set()
            asked()

        with pytest.raises(KeyboardInterrupt):
            ask()
        if how != "close":
            later = pool.submit(feeds(2))
            script.held.set()  # type: ignore[union-attr]
            assert is_right(later.result(SOON), feeds(2))
        script.held.set()  # type: ignore[union-attr]
        if future is not None:
            assert is_right(future.result(SOON), feeds(1))
        if other is not None:
            other.join(SOON)


def test_who_is_interrupted_as_a_step_begins_loses_nobody() -> None:
    """The step may be other people's."""
    with opened(Script(held=threading.Event(), errors={1: "interrupt"}), groups=1) as (pool, script):
        first = pool.submit(feeds(0, 4))
        rest = [pool.submit(feeds(number)) for number in range(1, 5)]
        script.held.set()  # type: ignore[union-attr]
        interrupted = 0
        for number, future in enumerate([first, *rest]):
            try:
                answer = future.result(SOON)
            except KeyboardInterrupt:
                interrupted += 1
                answer = future.result(SOON)
            assert is_right(answer, feeds(number, 1 if number else 4))
        assert interrupted == 1


# Threads, memory and processes


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def ours() -> int:
    """Objects of msplit's and of these tests that are alive."""
    return sum(str(type(one).__module__).startswith(("msplit", "tests")) for one in gc.get_objects())


def test_a_thousand_opens_and_closes_leave_nothing() -> None:
    def turn(number: int) -> None:
        with scripted(threads=number % 2) as pool:
            if number % 3:
                futures = [pool.submit(feeds(one, 4)) for one in range(number % 4)]
                assert is_right(pool.step(feeds(number)), feeds(number))
                for one, future in enumerate(futures):
                    assert is_right(future.result(SOON), feeds(one, 4))

    for number in range(50):
        turn(number)
    gc.collect()
    leftovers, objects, memory = Leftovers(), ours(), resident()
    for number in range(examples(300, 1000)):
        turn(number)
    gc.collect()
    assert (leftovers.threads(), leftovers.files()) == ([], [])
    assert ours() <= objects  # fewer where those of tests before went meanwhile
    assert resident() - memory < 8 << 20


def test_a_pool_that_is_dropped_leaves_no_thread_and_answers_what_it_took() -> None:
    leftovers = Leftovers()
    futures = [scripted(Script(seconds=(5e-3,)), threads=threads).submit(feeds(1)) for threads in (0, 1)]
    for future in futures:
        assert is_right(future.result(SOON), feeds(1))
    del future, futures
    gc.collect()
    until(lambda: not leftovers.threads())


def run(program: str) -> subprocess.CompletedProcess[str]:
    head = "import sys, threading, time\nfrom tests.serving.pool.scripted import *\n"
    root = Path(__file__).parents[3]
    return forked.run(
        [sys.executable, "-c", head + textwrap.dedent(program)],
        server=forked.POOLED,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_interpreter_ends_without_close() -> None:
    done = run("""
        pools = [scripted(Script(seconds=(0.01,)), threads=threads) for threads in (0, 2)]
        for pool in pools:
            assert is_right(pool.step(feeds(1)), feeds(1))
            pool.submit(feeds(2)).add_done_callback(lambda future: None)
            forgotten = [pool.submit(feeds(number, 4)) for number in range(8)]
        print("the end")
    """)
    assert (done.returncode, done.stdout) == (0, "the end\n"), done.stderr


def test_a_child_of_this_process_is_told_that_the_pool_is_not_its_own() -> None:
    """Its threads, and the device, are the parent's."""
    done = run("""
        import os, warnings
        from msplit.errors import Closed
        warnings.simplefilter("ignore")
        pools = [scripted(Script(seconds=(0.05,)), threads=threads) for threads in (0, 2)]
        going = [pool.submit(feeds(number, 4)) for pool in pools for number in range(6)]
        child = os.fork()
        if not child:
            for pool, future in zip(pools, (going[5], going[11])):
                for ask in (lambda: pool.step(feeds(2)), lambda: pool.submit(feeds(2)), lambda: future.result(5)):
                    try:
                        ask()
                    except Closed as problem:
                        print("another process" in str(problem), flush=True)
                pool.close()
            os._exit(0)
        end = time.time() + 20
        while time.time() < end:
            found, status = os.waitpid(child, os.WNOHANG)
            if found:
                break
            time.sleep(0.01)
        else:
            os.kill(child, 9)
            status = "it hangs"
        print(status, [is_right(future.result(20), feeds(number % 6, 4)) for number, future in enumerate(going)].count(True))
        for pool in pools:
            pool.close()
    """)
    assert done.stdout.splitlines() == ["True"] * 6 + ["0 12"], done.stderr
