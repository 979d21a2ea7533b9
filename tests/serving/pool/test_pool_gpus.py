"""Pools on several GPUs: each step goes where there is least to do, and no GPU waits while another one is at work."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from msplit.serving.pool.pool import About, Pool
from msplit.serving.pool.ports import Port
from msplit.serving.pool.settings import PoolSettings
from tests.campaign import examples
from tests.serving.pool.scripted import SOON, Script, ScriptedSlot, feeds, is_right, ports, together


@contextmanager
def on_gpus(scripts: Sequence[Script], groups: int, *, threads: int = 0, priorities: int = 1) -> Iterator[Pool]:
    """A pool of so many slots on each GPU, one script for a GPU. In the end everything is closed once."""
    of, count = ports(), len(scripts)
    places = [gpu for _ in range(groups) for gpu in range(count)]
    slots = [
        (number // count * priorities // groups, ScriptedSlot(scripts[gpu], of)) for number, gpu in enumerate(places)
    ]
    outputs = {"y": Port("float64", (None, 2)), "twice": Port("float64", ())}
    settings = PoolSettings(groups=groups, priorities=priorities)
    pool = Pool(of, slots, settings, About("by script", outputs, (), (), {}), threads=threads, gpus=places)
    try:
        yield pool
    finally:
        for script in scripts:
            if script.held is not None:
                script.held.set()
        pool.close()
    for script in scripts:
        assert (script.faults, script.closed) == ([], groups)


def held(count: int) -> list[Script]:
    """GPUs whose steps go on until somebody lets them."""
    gate = threading.Event()
    return [Script(held=gate) for _ in range(count)]


@given(st.integers(1, 4), st.integers(1, 3), st.data())
def test_steps_in_flight_are_dealt_out_evenly(count: int, groups: int, data: st.DataObject) -> None:
    scripts = held(count)
    with on_gpus(scripts, groups) as pool:
        flying = data.draw(st.integers(0, count * groups))
        going = [pool.submit(feeds(float(number), rows=4)) for number in range(flying)]
        deadline = time.perf_counter() + SOON
        while sum(len(script.steps) for script in scripts) < flying and time.perf_counter() < deadline:
            pool.drive()
        found = [len(script.steps) for script in scripts]
        assert sum(found) == flying
        assert max(found) - min(found) <= 1
        scripts[0].held.set()  # type: ignore[union-attr]
        for number, one in enumerate(going):
            assert is_right(one.result(SOON), feeds(float(number), rows=4))


def test_a_gpu_with_nothing_to_do_waits_for_no_company() -> None:
    """On one GPU a second row waits for others while the first one runs: with another one it has no reason to."""
    scripts = held(2)
    with on_gpus(scripts, 2) as pool:
        going = [pool.submit(feeds(float(number))) for number in range(2)]
        assert [len(script.steps) for script in scripts] == [1, 1]
        going.append(pool.submit(feeds(2.0)))
        assert sum(len(script.steps) for script in scripts) == 2, "both have work, and the next one may have company"
        scripts[0].held.set()  # type: ignore[union-attr]
        for number, one in enumerate(going):
            assert is_right(one.result(SOON), feeds(float(number)))


def test_the_slower_gpu_gets_fewer() -> None:
    scripts = [Script(seconds=(0.02,)), Script(seconds=(0.002,))]
    with on_gpus(scripts, 1) as pool:
        going = [pool.submit(feeds(float(number), rows=4)) for number in range(60)]
        for number, one in enumerate(going):
            assert is_right(one.result(SOON), feeds(float(number), rows=4))
    slow, fast = (len(script.steps) for script in scripts)
    assert slow + fast == 60
    assert fast > 2 * slow > 0


@pytest.mark.parametrize("threads", [0, 4], ids=["polled", "threads"])
@pytest.mark.parametrize("priorities", [1, 2])
def test_everybody_gets_the_own_answer(threads: int, priorities: int) -> None:
    """From threads that wait, and some that bring many; steps fail on one of the GPUs at times."""
    scripts = [Script(seconds=(0.0, 3e-4, 1e-3)), Script(seconds=(2e-4,), poison=-7.0)]
    count = examples(60, 400)
    with on_gpus(scripts, 2, threads=threads, priorities=priorities) as pool:

        def client(first: float) -> None:
            rng = np.random.default_rng(int(first))
            for number in range(count):
                one = feeds(first + number, rows=int(rng.integers(1, 5)), k=float(number % 2))
                assert is_right(pool.step(one, priority=number % priorities), one)

        def many(first: float) -> None:
            given_ = [feeds(first + number, rows=1 + number % 4) for number in range(count)]
            going = [pool.submit(one, priority=number % priorities) for number, one in enumerate(given_)]
            for one, answer in zip(given_, going, strict=True):
                assert is_right(answer.result(SOON), one)

        assert together(*[lambda first=1e4 * each: client(first) for each in (1, 2)], lambda: many(3e4)) == []  # type: ignore[misc]
        stats = pool.stats()
        assert (stats.answered, stats.failed, stats.in_flight) == (3 * count, 0, 0)
    assert all(script.steps for script in scripts), "both GPUs answer"


def test_what_fails_on_one_gpu_is_run_again_there_one_by_one() -> None:
    scripts = [Script(poison=5.0), Script(poison=5.0)]
    with on_gpus(scripts, 1) as pool:
        going = [pool.submit(feeds(value)) for value in (4.0, 5.0, 6.0, 7.0, 8.0)]
        for value, one in zip((4.0, 5.0, 6.0, 7.0, 8.0), going, strict=True):
            if value == 5.0:
                assert "poison" in str(one.exception(SOON))
            else:
                assert is_right(one.result(SOON), feeds(value))
        assert pool.stats().failed == 1
