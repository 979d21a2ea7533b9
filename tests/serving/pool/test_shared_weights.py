"""Processes that answer by one build on one device have its weights there once, and never those of another version."""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import msplit
from msplit.engines.process import WEIGHTS, shared_weights
from msplit.serving.pool.pool import Pool
from tests import forked
from tests.serving.pool.remote import alive, kill, wait, whole
from tests.updating import check, saved, values_of

torch = pytest.importorskip("torch")
from msplit.engines.cuda.device import shared_memory  # noqa: E402
from msplit.engines.cuda.device.shared_memory import held_once  # noqa: E402

CPU = torch.device("cpu")
DATA = np.arange(5000, dtype=np.uint8)
SIMULATED: dict[str, Any] = {"streams": (2,), "engine": "cuda", "device": "cpu", "effort": "fast"}


def held(ends: tuple[socket.socket, ...] | None, name: str = "one") -> tuple[Any, str]:
    """As a process has it that was given these ends."""
    given = None if ends is None else tuple(socket.socket(fileno=os.dup(one.fileno())) for one in ends)
    WEIGHTS.set(given)  # type: ignore[arg-type]
    try:
        return held_once(DATA.copy(), CPU, name)
    finally:
        assert WEIGHTS.get() is None


def test_the_first_one_makes_the_memory_and_the_others_map_it() -> None:
    ends = shared_weights()
    found = [held(ends) for _ in range(3)]
    assert [why for _, why in found] == ["", "", ""]
    for tensor, _ in found:
        np.testing.assert_array_equal(tensor.numpy(), DATA)
    found[1][0][7] = 99  # so it is seen to be one
    assert found[0][0][7] == found[2][0][7] == 99
    del found
    assert held(ends)[0][7] == 99  # the message keeps it
    for one in ends:
        one.close()


def test_many_begin_at_once() -> None:
    ends, found = shared_weights(), list[Any]()
    threads = [threading.Thread(target=lambda: found.append(held(ends))) for _ in range(16)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert [why for _, why in found] == [""] * 16
    found[0][0][0] = 5
    assert {int(tensor[0]) for tensor, _ in found} == {5}


def test_who_was_given_no_socket_has_memory_of_its_own() -> None:
    first, second = held(None)[0], held(None)[0]
    first[0] = 5
    assert second[0] == 0


def test_weights_of_another_build_are_not_taken() -> None:
    ends = shared_weights()
    held(ends)[0][:] = 3
    tensor, why = held(ends, "another")
    assert why == "the build was replaced since the others opened it"
    np.testing.assert_array_equal(tensor.numpy(), DATA)
    assert held(ends)[1] == ""


def test_where_it_can_not_be_made_each_has_its_own_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = shared_weights()

    def fails(place: Any, size: int) -> int:
        raise OSError("no such function")

    with monkeypatch.context() as patch:
        patch.setattr(shared_memory, "_made", fails)
        tensor, why = held(ends)
    assert why == "no such function"
    np.testing.assert_array_equal(tensor.numpy(), DATA)
    assert held(ends)[1] == ""  # the next one may


def test_one_that_dies_while_it_fills_the_memory_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = shared_weights()
    ends[0].recv(8)  # by one that has gone with it
    monkeypatch.setattr(shared_memory, "_PATIENCE", 0.05)
    tensor, why = held(ends)
    assert "timed out" in why
    np.testing.assert_array_equal(tensor.numpy(), DATA)


def memory(pid: int) -> set[str]:
    """Numbers of the files of shared weights that a process maps."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    return set(re.findall(r"(\d+) +/memfd:msplit-weights", maps))


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Path]]:
    folder = tmp_path_factory.mktemp("builds")
    found = {}
    for number in (1, 2):
        model = saved(folder / f"model{number}", number)
        found[number] = folder / str(number)
        msplit.build(model, found[number], **SIMULATED, batches=[1, 4])
    with forked.instead(forked.ENGINE):
        yield found


def pids(pool: Pool) -> list[int]:
    return [one.pid for one in pool.processes() if one.pid]


@pytest.mark.tf
def test_processes_of_a_build_have_its_weights_once(builds: dict[int, Path]) -> None:
    with msplit.pool(builds[1], groups=1, workers=3) as pool:
        files = {one for pid in pids(pool) for one in memory(pid)}
        assert len(files) == 1
        assert all(memory(pid) == files for pid in pids(pool))
        check(pool.step, values_of(1), 40)
        pid = kill(pool)
        wait(lambda: not alive(pid) and whole(pool))
        assert all(memory(pid) == files for pid in pids(pool))
        check(pool.step, values_of(1), 40)
        assert not any("weights of their own" in note for note in pool.about.notes)


@pytest.mark.tf
def test_one_that_starts_after_an_update_has_weights_of_its_own(builds: dict[int, Path]) -> None:
    with msplit.pool(builds[1], groups=1, workers=2) as pool:
        pool.update(builds[2])
        for _ in range(4):
            check(pool.step, values_of(2), 40)
        pid = kill(pool)
        wait(lambda: not alive(pid) and whole(pool))
        assert sorted(len(memory(pid)) for pid in pids(pool)) == [0, 1]
        for _ in range(4):
            check(pool.step, values_of(2), 40)
        pool.update(builds[1])
        for _ in range(4):
            check(pool.step, values_of(1), 40)


@pytest.mark.tf
def test_one_process_alone_shares_nothing(builds: dict[int, Path]) -> None:
    with msplit.pool(builds[1], groups=1, workers=1) as pool:
        assert [memory(pid) for pid in pids(pool)] == [set()]


@pytest.mark.tf
def test_one_that_starts_after_the_build_was_replaced_has_not_the_weights_of_before(tmp_path: Path) -> None:
    for number in (1, 2):
        msplit.build(saved(tmp_path / f"m{number}", number), tmp_path / str(number), **SIMULATED, batches=[1, 4])
    with forked.instead(forked.ENGINE), msplit.pool(tmp_path / "1", groups=1, workers=2) as pool:
        (tmp_path / "1").rename(tmp_path / "old")
        (tmp_path / "2").rename(tmp_path / "1")
        for number in (0, 1):
            gone = kill(pool, number)
            wait(partial(lambda pid: not alive(pid) and whole(pool), gone))
        assert [memory(pid) for pid in pids(pool)] == [set(), set()]
        for _ in range(4):
            check(pool.step, values_of(2), 40)
