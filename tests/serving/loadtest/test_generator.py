"""Who sends, and when: clients that wait for their answer, and arrivals that wait for nobody."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from msplit.errors import EngineError, MsplitError
from msplit.serving.loadtest.dispatcher import Watch, drive
from msplit.serving.loadtest.generator import (
    ANSWERED,
    OVER,
    SENT,
    Level,
    LoadGenerator,
    RequestState,
    RequestTable,
    Sending,
    send,
)
from msplit.serving.loadtest.results import in_flight
from tests import forked
from tests.cli.runner import ROOT, heard
from tests.serving.loadtest.fakes import DISTINCT, FEEDS, FakePool, loaded, run_of, table


def closed(clients: int, seconds: float = 0.15, warmup: float = 0.0, most: int = 0) -> Sending:
    return Sending(Level(clients=clients), seconds, warmup, DISTINCT, seed=1, most=most)


def opened(rate: float, seconds: float = 0.4, warmup: float = 0.0, seed: int = 1) -> Sending:
    return Sending(Level(rate=rate), seconds, warmup, DISTINCT, seed=seed)


@pytest.mark.parametrize("clients", [1, 3, 8])
def test_a_closed_loop_has_as_many_in_flight_as_clients_and_never_more(
    clients: int, shared: RequestTable, generator: LoadGenerator
) -> None:
    pool = FakePool(seconds=0.001)
    sent, _ = loaded(shared, generator, pool, closed(clients))
    count = shared.counters[SENT]
    assert pool.most == clients
    assert in_flight(shared.sent[:count], shared.answered[:count]) <= clients
    assert count == shared.counters[ANSWERED] == pool.count > clients
    assert not sent.full


def test_every_request_is_answered_and_stands_in_the_table(shared: RequestTable, generator: LoadGenerator) -> None:
    loaded(shared, generator, FakePool(), closed(4))
    count = shared.counters[SENT]
    assert (shared.status[:count] == RequestState.DONE).all()
    assert (shared.outputs["id"][:count] == shared.request[:count]).all()
    assert (shared.outputs["score"][:count, 1] == shared.request[:count] + 0.5).all()
    assert (shared.sent[:count] <= shared.taken[:count]).all()
    assert (shared.taken[:count] <= shared.answered[:count]).all()
    assert len(set(shared.request[:count].tolist())) == DISTINCT


def test_arrivals_are_a_poisson_process_and_wait_for_nobody(shared: RequestTable, generator: LoadGenerator) -> None:
    rate = 5000.0
    sent, _ = loaded(shared, generator, FakePool(seconds=0.05), opened(rate))
    count = shared.counters[SENT]
    due = shared.scheduled[:count]
    gaps = np.diff(due) / 1e9
    assert (gaps >= 0).all()
    assert abs(count - rate * 0.4) < 6 * (rate * 0.4) ** 0.5
    assert 0.85 < gaps.std() / gaps.mean() < 1.15  # 1 of an exponential distribution
    assert (shared.sent[:count] >= due).all()
    assert in_flight(shared.sent[:count], shared.answered[:count]) > rate * 0.05 / 2
    assert (sent.end - sent.begin) / 1e9 == pytest.approx(0.4)


def test_a_stall_is_seen_by_all_that_were_due_in_it(shared: RequestTable, generator: LoadGenerator) -> None:
    """Coordinated omission: a generator that waits for answers would count one slow request where hundreds were due."""
    stall, rate = (0.1, 0.3), 2000.0
    asked = opened(rate)
    sent, _ = loaded(shared, generator, FakePool(stall=stall), asked)
    run = run_of(shared, sent, asked)
    count = shared.counters[SENT]
    latency = (shared.answered[:count] - shared.scheduled[:count]) / 1e9
    late = (latency > 0.1).sum()  # of those that were due in the first half of the stall
    assert 0.6 * rate * 0.1 < late < 1.4 * rate * 0.1
    assert run.latency is not None
    assert run.latency.p90 > 0.05 * 1e6
    assert run.latency.max > 0.19 * 1e6
    asked = closed(1, seconds=0.4)
    sent, _ = loaded(shared, generator, FakePool(stall=stall, seconds=0.0005), asked)
    assert (shared.answered[: shared.counters[SENT]] - shared.sent[: shared.counters[SENT]] > 1e8).sum() == 1


def test_latency_counts_from_when_a_request_was_due_even_if_it_was_sent_late() -> None:
    """Whatever keeps the generator itself, a request that was due is not excused."""
    shared = table(1000)
    asked = opened(1000.0, 0.05)
    taken = threading.Thread(target=lambda: drive(shared, FakePool(), FEEDS, Watch(shared, lambda: None)))
    taken.start()
    sent = send(shared, asked, lambda: True)
    taken.join()
    count = shared.counters[SENT]
    shared.scheduled[:count] -= 1_000_000  # as if each had been due 1 ms before
    run = run_of(shared, sent, asked)
    assert run.late_us >= 1000
    assert run.latency is not None
    assert run.latency.p50 >= 1000
    shared.close()


def test_warming_up_is_left_out(shared: RequestTable, generator: LoadGenerator) -> None:
    asked = closed(1, seconds=0.1, warmup=0.1)
    sent, _ = loaded(shared, generator, FakePool(seconds=0.001), asked)
    run = run_of(shared, sent, asked)
    count = shared.counters[SENT]
    assert run.seconds == pytest.approx(0.1, rel=0.5)
    assert run.requests == int((shared.sent[:count] >= sent.begin).sum())
    assert 0 < run.requests < count


def test_a_run_ends_after_so_many_requests(shared: RequestTable, generator: LoadGenerator) -> None:
    started = time.monotonic()
    asked = closed(2, seconds=60.0, warmup=0.02, most=50)
    sent, _ = loaded(shared, generator, FakePool(), asked)
    assert time.monotonic() - started < 10
    assert run_of(shared, sent, asked).requests == 50


def test_a_table_that_is_full_ends_the_run() -> None:
    small = table(100)
    generator = LoadGenerator(small)
    try:
        sent, _ = loaded(small, generator, FakePool(), closed(4, seconds=30.0))
        assert sent.full
        assert small.counters[SENT] == 100
        sent, _ = loaded(small, generator, FakePool(), opened(10_000.0, seconds=30.0))
        assert sent.full
        assert small.counters[SENT] == 100
        assert sent.end <= sent.begin + 1e9
    finally:
        generator.close()
        small.close()


def test_shares_of_priorities(shared: RequestTable, generator: LoadGenerator) -> None:
    asked = Sending(Level(clients=8), 0.2, 0.0, DISTINCT, seed=3, mix=((0, 1.0), (2, 3.0)))
    sent, _ = loaded(shared, generator, FakePool(), asked)
    count = shared.counters[SENT]
    priorities = shared.priority[:count]
    assert set(priorities.tolist()) == {0, 2}
    assert 0.65 < (priorities == 2).mean() < 0.85
    assert set(run_of(shared, sent, asked).by_priority) == {0, 2}


def test_a_generator_that_is_killed_is_told_and_leaves_nothing_behind() -> None:
    before = set(os.listdir("/dev/shm")) if Path("/dev/shm").is_dir() else set()
    shared = table(10_000)
    generator = LoadGenerator(shared)
    threading.Timer(0.2, lambda: os.kill(generator.pid, signal.SIGKILL)).start()
    with pytest.raises(EngineError, match="load generator was ended by signal 9"):
        loaded(shared, generator, FakePool(seconds=0.01), closed(1, seconds=60.0))
    generator.close()
    shared.close()
    assert set(os.listdir("/dev/shm")) <= before if before else True


SENDS = """
from msplit.serving.loadtest.generator import LoadGenerator
from tests.serving.loadtest.fakes import table
from tests.serving.loadtest.test_generator import closed
generator = LoadGenerator(table(10_000))
generator.send(closed(1, seconds=60.0))
print(generator.pid, flush=True)
generator.receive()
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_generator_ends_with_the_process_that_it_sends_to(how: signal.Signals) -> None:
    with heard():
        started = forked.Popen(
            [sys.executable, "-c", SENDS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, text=True
        )
    with started as sending:
        said = sending.stdout.readline()
        assert said, f"ended with {sending.wait()}: {sending.stderr.read()}"
        pid = int(said)
        os.kill(pid, 0)
        sending.send_signal(how)
        sending.wait()
    end = time.monotonic() + 5
    while _runs(pid):
        assert time.monotonic() < end, "the generator goes on"
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    """Whether a process is there, and is more than what is left of one until somebody asks for its end."""
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def test_what_answers_nothing_is_given_up(
    monkeypatch: pytest.MonkeyPatch, shared: RequestTable, generator: LoadGenerator
) -> None:
    monkeypatch.setattr("msplit.serving.loadtest.dispatcher._STUCK", 0.2)
    with pytest.raises(EngineError, match="2 requests were not answered"):
        loaded(shared, generator, FakePool(seconds=1e9), closed(2))
    generator.receive()


def test_a_load_is_one_of_both() -> None:
    for wrong in ({}, {"clients": 1, "rate": 2.0}, {"clients": 0}, {"rate": -1.0}):
        with pytest.raises(MsplitError):
            Level(**wrong)


def test_what_is_sent_is_over(shared: RequestTable, generator: LoadGenerator) -> None:
    loaded(shared, generator, FakePool(), closed(1, seconds=0.05))
    assert shared.counters[OVER] == 1
    shared.clear()
    assert [shared.counters[one] for one in (SENT, ANSWERED, OVER)] == [0, 0, 0]
    assert not shared.status.any()
