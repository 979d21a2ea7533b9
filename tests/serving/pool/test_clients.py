"""A pool of processes that other processes ask, too: its address is sent there, and each has memory of its own with each GPU's process."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from msplit.errors import Closed, DeviceLost, EngineError, ProcessLost
from msplit.serving.pool import processes
from msplit.serving.pool.pool import Pool
from tests import forked
from tests.campaign import examples
from tests.serving.pool.remote import POISON, SLOW, alive, kill, opened, shared, started, wait, whole
from tests.serving.pool.scripted import SOON, feeds, is_right

ASKS = """
import pickle, sys, time
import numpy as np
from tests.serving.pool.remote import SLOW
from tests.serving.pool.scripted import feeds, is_right
pool = pickle.loads(bytes.fromhex(sys.stdin.readline()))
"""
FLOODS = f"""{ASKS}
from msplit.errors import ProcessLost
first, count, lost = int(sys.argv[1]), int(sys.argv[2]), 0
print("ready", flush=True)
for start in range(0, count, 50):
    given = [feeds(float(first + start + number), 1 + number % 4) for number in range(50)]
    going = [pool.submit(one) for one in given]
    for one, answer in zip(given, going):
        try:
            assert is_right(answer.result(20.0), one)
        except ProcessLost:
            lost += 1
pool.close()
print("right", lost, flush=True)
"""


_forked = forked.always(forked.instead, forked.POOLED)


@pytest.fixture(scope="module")
def pool(_forked: None) -> Iterator[Pool]:
    with opened(groups=2) as pool:
        yield pool


def client(pool: Pool | str, code: str, *arguments: object) -> forked.Popen:
    """A process that was sent a pool, with its first line of output read."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    asks = forked.Popen(command, server=forked.POOLED, cwd=forked.ROOT, text=True, **pipes)
    sent = pool if isinstance(pool, str) else pickle.dumps(pool).hex()
    assert asks.stdin is not None
    asks.stdin.write(f"{sent}\n")
    asks.stdin.flush()
    assert asks.stdout is not None
    assert asks.stdout.readline() == "ready\n"
    return asks


def end(asks: forked.Popen) -> str:
    """What it says last."""
    with asks:
        out, _ = asks.communicate(timeout=SOON)
    return str(out)


def handles(pool: Pool) -> list[int]:
    """Descriptors of each process, once it is done with who has connected."""
    for one in [pool.submit(feeds(float(number))) for number in range(8)]:
        one.result(SOON)
    return [len(os.listdir(f"/proc/{one.pid}/fd")) for one in pool.processes()]


def test_other_processes_ask_with_this_one(pool: Pool) -> None:
    before, count = pool.stats(), examples(200, 20_000)
    held = handles(pool)
    asks = [client(pool, FLOODS, 10_000 * number, count) for number in (1, 2)]
    for number in range(count):
        assert is_right(pool.step(feeds(float(number))), feeds(float(number)))
    assert [end(one) for one in asks] == ["right 0\n"] * 2
    after = pool.stats()
    assert after.answered - before.answered == count + 8, "requests are the client's own"
    assert after.rows - before.rows >= 3 * count, "steps are those of all"
    wait(lambda: handles(pool) == held)


def test_a_client_that_is_killed_takes_its_own_requests_with_it(pool: Pool) -> None:
    """It has requests that run, that wait, that are half written, and answers that it has not taken."""
    held = handles(pool)
    code = f"""{ASKS}
going = [pool.submit(feeds(float(number))) for number in range(4)]
time.sleep(0.1)
going += [pool.submit(feeds(SLOW + 0.3, 4)) for _ in range(4)] + [pool.submit(feeds(float(number))) for number in range(20)]
line = pool._steps._members[0].line
line.memory.inputs.views(line.free[0].pop(), 4)["x"][:2] = 7.0
print("ready", flush=True)
time.sleep(60)
"""
    asks = client(pool, code)
    with asks:
        asks.kill()
        asks.wait(SOON)
    going = [pool.submit(feeds(float(number))) for number in range(50)]
    for number, one in enumerate(going):
        assert is_right(one.result(SOON), feeds(float(number)))
    wait(lambda: handles(pool) == held)
    wait(lambda: pool.processes()[0].stats.in_flight == 0 == pool.stats().waiting)
    assert whole(pool)


def test_who_else_connects_gets_nothing_and_hinders_nobody(pool: Pool) -> None:
    held, address = handles(pool), pool._steps._members[0].address  # type: ignore[attr-defined]
    for _ in range(5):
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(address)
            line.sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert is_right(pool.step(feeds(1.0)), feeds(1.0))
    wait(lambda: handles(pool) == held)


def test_requests_wait_where_all_slots_are_taken(pool: Pool) -> None:
    slots = 2 * pool._steps._members[0].line.hello.sizes.slots  # type: ignore[attr-defined]
    given = [feeds(float(number), 1 + number % 4) for number in range(4 * slots)]
    going = [pool.submit(one) for one in given]
    poisoned = pool.submit(feeds(POISON))
    for one, answer in zip(given, going, strict=True):
        assert is_right(answer.result(SOON), one)
    assert isinstance(poisoned.exception(SOON), EngineError)
    wait(lambda: [member.line.load() for member in pool._steps._members] == [0, 0])  # type: ignore[attr-defined]


def test_processes_and_clients_that_are_killed() -> None:
    """In a campaign, for longer."""
    rounds, rng = examples(3, 60), np.random.default_rng(0)
    with opened(groups=2, retries=1) as pool:
        held = handles(pool)
        for number in range(rounds):
            asks = [client(pool, FLOODS, 10_000 * each, 600) for each in range(3)]
            time.sleep(float(rng.uniform(0.0, 0.05)))
            asks[0].kill()
            kill(pool, number % 2)
            for one in asks[1:]:
                assert end(one).startswith("right ")
            with asks[0]:
                asks[0].wait(SOON)
            wait(lambda: whole(pool))
            assert is_right(pool.step(feeds(1.0)), feeds(1.0))
        wait(lambda: handles(pool) == held)


def test_a_client_outlives_the_process_that_has_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_PAUSE", 0.01)
    code = (
        "import pickle, time\nfrom tests.serving.pool.remote import started\npool = started(2)\n"
        "print(pickle.dumps(pool).hex(), *[one.pid for one in pool.processes()], flush=True)\ntime.sleep(60)"
    )
    before = shared()
    with subprocess.Popen([sys.executable, "-c", code], cwd=forked.ROOT, text=True, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        sent, *pids = parent.stdout.readline().split()
        pool: Pool = pickle.loads(bytes.fromhex(sent))
        assert is_right(pool.step(feeds(1.0)), feeds(1.0))
        going = pool.submit(feeds(SLOW + 20.0))
        wait(lambda: pool.stats().in_flight == 1)
        os.kill(parent.pid, signal.SIGKILL)
    assert isinstance(going.exception(SOON), DeviceLost | ProcessLost)
    wait(lambda: not any(alive(int(pid)) for pid in pids))
    with pytest.raises(DeviceLost, match="no process of the pool can be started"):
        pool.step(feeds(1.0))
    pool.close()
    with pytest.raises(Closed, match="the pool that was sent here is closed"):
        pickle.loads(bytes.fromhex(sent))
    assert shared() == before


def test_a_pool_that_has_no_processes_stays_where_it_is() -> None:
    from tests.serving.pool.remote import made

    with (
        made("/", 0, processes.PoolSettings(groups=1), lambda what, share: None) as pool,
        pytest.raises(TypeError, match="steps run in this process"),
    ):
        pickle.dumps(pool)


def test_closing_a_client_leaves_the_processes_to_others() -> None:
    with started(1) as pool:
        other: Pool = pickle.loads(pickle.dumps(pool))
        pid = pool.processes()[0].pid
        going = other.submit(feeds(SLOW + 0.1))
        other.close(finish=True)
        assert is_right(going.result(), feeds(SLOW + 0.1))
        with pytest.raises(Closed):
            other.submit(feeds(1.0))
        assert is_right(pool.step(feeds(1.0)), feeds(1.0))
        assert pool.processes()[0].pid == pid
        assert pool.processes()[0].restarts == 0
