"""A minute of the campaign. `python -m tests.fuzz --seconds 600` runs it for longer."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.fuzz import __main__ as fuzz
from tests.fuzz.case import Case, run
from tests.fuzz.limits import TooSlow, limited


@pytest.mark.slow
def test_a_minute_of_hostile_input() -> None:
    # As with Hypothesis, CI tries the same cases each time and everyone else others.
    seed = 0 if "CI" in os.environ else int(time.time()) % 10**8 * 100
    tally = fuzz.campaign(60.0, seed)
    assert tally.cases.total() >= 30, str(tally)
    assert not tally.problems, "\n".join(f"python -m tests.fuzz --case {n}: {p}" for n, p in tally.problems.items())


@pytest.mark.parametrize("kind", fuzz.KINDS)
def test_a_case_is_the_same_each_time(kind: str) -> None:
    name = f"{kind}:4"
    assert fuzz.case_named(name) == fuzz.case_named(name)
    assert fuzz.case_named(name) != fuzz.case_named(f"{kind}:5")


def spinning(*_: object, **__: object) -> None:
    while True:
        pass


def hoarding(*_: object, **__: object) -> list[bytearray]:
    return [bytearray(1 << 30) for _ in range(64)]


def surprised(*_: object, **__: object) -> None:
    raise KeyError("surprise")


@pytest.mark.parametrize(
    ("what", "told"), [(spinning, "stopped after"), (hoarding, "out of memory"), (surprised, "internal error")]
)
def test_what_must_not_happen_is_noticed(
    what: object, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("msplit.api.load", what)
    monkeypatch.setattr("tests.fuzz.case.SECONDS", 0.1)
    assert told in run(Case("x", b"\n\x0f\n\x01a\x12\x04NoOp"), tmp_path / "case").problem


def test_a_worker_that_dies_is_noticed_and_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = fuzz.Worker()
    try:
        assert worker.run("damage:1")["problem"] == ""
        assert worker.process is not None
        worker.process.kill()
        worker.process.wait()
        with pytest.raises(BrokenPipeError):
            worker.run("damage:1")
        worker.stop()
        assert worker.run("damage:1")["problem"] == ""
    finally:
        worker.stop()


def test_time_and_memory_are_measured_and_bounded() -> None:
    with limited(5.0, 200.0) as used:
        held = bytearray(64 << 20)
        held[::4096] = b"x" * (len(held) // 4096)
    assert 60 < used.megabytes < 100
    assert used.seconds < 2
    with pytest.raises(MemoryError), limited(5.0, 50.0):
        bytearray(1 << 30)
    with pytest.raises(TooSlow), limited(0.05, 50.0):
        spinning()
