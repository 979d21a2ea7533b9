"""Other values for a pool of processes: all of them take them over or none does, and each answer is of one version, whichever ends when."""

from __future__ import annotations

import os
import pickle
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from msplit.errors import Closed, EngineError, MsplitError, ProcessLost
from msplit.serving.pool import processes
from msplit.serving.pool.given_values import mapped, shared
from msplit.serving.pool.pool import Pool
from tests import forked
from tests.campaign import CAMPAIGN
from tests.serving.pool.remote import alive, kill, opened, wait, whole
from tests.serving.pool.scripted import SOON, together

_forked = forked.always(forked.instead, forked.POOLED)


@contextmanager
def versions(folder: Path, **settings: Any) -> Iterator[Pool]:
    with opened(folder=folder, versions=True, **settings) as pool:
        yield pool


def rows_of(count: int) -> dict[str, Any]:
    return {"x": np.zeros((count, 2))}


def version(answer: Any) -> float:
    """The only one that made an answer."""
    seen = np.unique(answer["y"])
    assert len(seen) == 1, f"a mixture of versions: {seen}"
    return float(seen[0])


def values(number: float) -> dict[str, Any]:
    return {"v": np.array(number)}


def each(pool: Pool) -> set[float]:
    """Versions of all processes."""
    seen, numbers = set[float](), set[float]()

    def asked() -> bool:
        wait(lambda: whole(pool))
        for future in [pool.submit(rows_of(4)) for _ in range(20)]:
            answer = future.result(SOON)
            seen.add(version(answer))
            numbers.add(float(answer["twice"]))
        return numbers >= {one.pid for one in pool.processes()}

    wait(asked)
    return seen


def ended(pool: Pool, number: int) -> None:
    pid = kill(pool, number)
    wait(lambda: not alive(pid))


def clients(stop: threading.Event, pools: list[Pool], known: list[float], count: list[int]) -> list[Callable[[], None]]:
    """Clients that see no version older than one that was there before they asked."""

    def client(number: int) -> None:
        asked, before = pools[number % len(pools)], 1.0
        while not stop.is_set():
            rows, least = (1, 3, 30, 60)[(number + count[0]) % 4], max(before, known[0])
            with suppress(ProcessLost):
                found = asked.step(rows_of(rows))
                assert len(found["y"]) == rows
                before = version(found)
                assert before >= least
                count[0] += 1

    return [lambda number=number: client(number) for number in range(3)]  # type: ignore[misc]


@pytest.mark.parametrize("threads", [0, 2])
def test_answers_beside_updates_are_of_one_version_each(tmp_path: Path, threads: int) -> None:
    """Those of a client in another process, too: its pool is this one, pickled."""
    with versions(tmp_path, threads=threads, groups=2) as pool:
        stop, known, count, sent = threading.Event(), [1.0], [0], pickle.loads(pickle.dumps(pool))

        def updates() -> None:
            try:
                for number in range(2, 7):
                    update = pool.update(values(number)) if number % 3 else pool.update(rows={"v": ([0], [number])})
                    assert (update.bytes, update.captured) == (16, False)
                    known[0] = float(number)
            finally:
                stop.set()

        with sent:
            with pytest.raises(EngineError, match="opened by another process"):
                sent.update(values(9))
            assert together(updates, *clients(stop, [pool, sent], known, count)) == []
        assert count[0]
        assert each(pool) == {6.0}
        with pytest.raises(EngineError, match="there are no values"):
            pool.update()
        with pytest.raises(MsplitError, match="int has no values"):
            pool.update(3)  # type: ignore[arg-type]
        assert each(pool) == {6.0}
    with pytest.raises(Closed):
        pool.update(values(2))


def test_where_one_refuses_none_has_them(tmp_path: Path) -> None:
    with versions(tmp_path) as pool:
        pool.update(values(3))
        for _ in range(2):
            with pytest.raises(EngineError, match=r"other outputs\n  of many\n  fix: give right ones"):
                pool.update(values(-1))
            assert each(pool) == {3.0}
        pool.update(values(4))
        assert each(pool) == {4.0}


@pytest.mark.parametrize("moment", ["prepare", "take over"])
@pytest.mark.parametrize("number", [0, 1])
def test_one_that_ends_meanwhile_is_started_again_with_them(tmp_path: Path, moment: str, number: int) -> None:
    with versions(tmp_path) as pool:
        pool.update(values(2))
        (tmp_path / moment).write_text(str(number))
        pool.update(rows={"v": ([0, 0], [7.0, 3.0])})
        assert version(pool.step(rows_of(9))) == 3.0
        assert each(pool) == {3.0}
        assert [one.restarts for one in pool.processes()] == [number == 0, number == 1]
        ended(pool, 1 - number)
        assert each(pool) == {3.0}
        pool.update(values(5))
        ended(pool, number)
        assert each(pool) == {5.0}


def test_one_that_starts_again_takes_no_files_that_were_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_PAUSE", 0.02)
    file = tmp_path / "model"
    file.write_text("5")
    with versions(tmp_path) as pool:
        pool.update(file)
        ended(pool, 0)
        assert each(pool) == {5.0}
        file.write_text("66")
        ended(pool, 1)
        time.sleep(0.1)
        assert {version(pool.step(rows_of(9))) for _ in range(5)} == {5.0}
        assert not whole(pool)
        pool.update(file)
        assert each(pool) == {66.0}


def test_where_all_end_the_old_ones_stay(tmp_path: Path) -> None:
    with versions(tmp_path, count=1) as pool:
        pool.update(values(2))
        (tmp_path / "prepare").write_text("0")
        with pytest.raises(EngineError, match="the process of cpu:0 was ended by signal 9"):
            pool.update(values(3))
        assert each(pool) == {2.0}


@pytest.mark.parametrize("seed", range(40 if CAMPAIGN else 2))
def test_kills_at_any_time_mix_nothing_and_lose_no_update(tmp_path: Path, seed: int) -> None:
    lot = random.Random(seed)
    with versions(tmp_path, groups=2, retries=3) as pool:
        stop, known, count, told = threading.Event(), [1.0], [0], list[tuple[bool, str]]()

        def updates() -> None:
            try:
                for number in range(2, 8):
                    wrong = lot.random() < 0.2
                    if lot.random() < 0.3:
                        (tmp_path / lot.choice(["prepare", "take over"])).write_text(str(lot.randrange(2)))
                    try:
                        pool.update(values(number if not wrong else -number))
                        known[0] = number
                    except EngineError as problem:
                        told.append((wrong, str(problem)))
                    time.sleep(lot.random() * 0.03)
            finally:
                stop.set()

        def kills() -> None:
            while not stop.is_set():
                time.sleep(0.02 + lot.random() * 0.2)
                pids = [one.pid for one in pool.processes() if one.pid]
                if len(pids) == 2:
                    with suppress(ProcessLookupError):
                        os.kill(lot.choice(pids), signal.SIGKILL)

        assert together(updates, kills, *clients(stop, [pool], known, count)) == []
        assert all(wrong or "ended by" in said or "no process" in said for wrong, said in told), told
        assert count[0]
        assert each(pool) == {known[0]}


def test_a_pool_that_is_closed_meanwhile_gives_the_update_up(tmp_path: Path) -> None:
    with versions(tmp_path) as pool:
        threading.Timer(0.02, pool.close).start()

        def updates() -> None:
            while True:
                pool.update(values(2))

        with pytest.raises(Closed):
            updates()


def test_values_are_there_once_for_all_processes() -> None:
    large = np.arange(1 << 20, dtype=np.float32).reshape(1 << 10, -1)
    names = np.array([b"a", b"bc"], object)
    rows = {"t": (np.array([3]), np.ones((1, 2)))}
    with shared(({"w": large, "n": names, "e": np.zeros((0, 3))}, rows)) as place:
        source, found = mapped(place)
    np.testing.assert_array_equal(source["w"], large)
    assert source["n"].tolist() == [b"a", b"bc"]
    assert source["e"].shape == (0, 3)
    assert found["t"][1].tolist() == [[1, 1]]
    assert not source["w"].flags.owndata
    assert not source["w"].flags.writeable
    assert source["w"].ctypes.data % 64 == 0
    with pytest.raises(OSError, match="No such file"):
        mapped(place)
