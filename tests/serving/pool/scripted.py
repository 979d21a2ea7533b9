"""Slots that do what a script says, and pools of them: what a pool does shows, and how long a step takes is known."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from msplit.errors import EngineError
from msplit.serving.pool.pool import About, Pool
from msplit.serving.pool.ports import Port, Ports
from msplit.serving.pool.settings import PoolSettings

Answer = dict[str, NDArray[Any]]

FLOAT = np.dtype(np.float64)


class Scripted(EngineError):
    """What a script has fail."""


@dataclass
class Script:
    """What slots do, and what they saw.

    Attributes:
        seconds: How long steps take, one after the other, again and again.
        errors: Number of a step -> where it fails: in `start`, `over`, `wait` or `outputs`; `interrupt`: at the start.
        poison: A request with this value in `x` has its whole step fail, as an index out of range has.
        held: Steps are not over before it is set.
        steps: Buckets of the steps so far.
        order: The first number of each request, as they were started.
        faults: What a pool must not do, and did.
        closed: How many slots were.
    """

    seconds: Sequence[float] = (0.0,)
    errors: Mapping[int, str] = field(default_factory=dict)
    poison: float | None = None
    held: threading.Event | None = None
    steps: list[int] = field(default_factory=list)
    order: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    closed: int = 0


class ScriptedSlot:
    """Computes 3 x + k of each row, and 2 k of a step, from what its inputs were at the start."""

    def __init__(self, script: Script, ports: Ports) -> None:
        self._script, self._ports = script, ports
        self._number: int | None = None
        self._end = 0.0
        self._outputs: Answer = {}
        self._entered = threading.Lock()
        self._seen = True
        self._is_closed = False

    @contextmanager
    def _alone(self, what: str, *, flying: bool) -> Iterator[None]:
        if not self._entered.acquire(blocking=False):
            self._fault(f"{what} while another thread is in the slot")
            yield
            return
        try:
            if self._is_closed:
                self._fault(f"{what} of a closed slot")
            if flying != (self._number is not None) and not self._seen:
                self._fault(f"{what} while {'nothing' if flying else 'a step'} is in flight")
            yield
        finally:
            self._entered.release()

    def _fault(self, said: str) -> None:
        self._script.faults.append(said)

    def _fail(self, where: str) -> None:
        if self._number is not None and self._script.errors.get(self._number) == where:
            number, self._number, self._seen = self._number, None, True
            raise Scripted(f"step {number} failed in {where}")

    def start(self, bucket: int, feeds: Sequence[Mapping[str, Any]]) -> None:
        with self._alone("start", flying=False):
            script = self._script
            self._number, self._seen = len(script.steps), False
            script.steps.append(bucket)
            joined = self._ports.join(feeds, bucket)
            x, k = np.array(joined["x"]), np.array(joined["k"])
            if self._ports.batches and len(x) != bucket:
                self._fault(f"{len(x)} rows in a step of {bucket}")
            script.order.extend(float(one["x"].flat[0]) for one in feeds)
            self._outputs = {"y": 3 * x + k, "twice": np.asarray(2 * k)}
            self._end = time.perf_counter() + script.seconds[self._number % len(script.seconds)]
            if script.poison is not None and (x == script.poison).any():
                self._number, self._seen = None, True
                raise Scripted("poison")
            if script.errors.get(self._number) == "interrupt":
                self._number, self._seen = None, True
                raise KeyboardInterrupt
            self._fail("start")

    def over(self) -> bool:
        with self._alone("over", flying=True):
            self._fail("over")
            self._fail("wait")  # what failed on a device fails for whoever asks
            if self._number is None:
                return True
            held = self._script.held
            self._seen = time.perf_counter() >= self._end and (held is None or held.is_set())
            return self._seen

    def wait(self) -> None:
        if self._number is not None and self._script.errors.get(self._number) == "wait":
            raise Scripted(f"step {self._number} failed in wait")
        time.sleep(min(max(self._end - time.perf_counter(), 0.0), 1e-3))

    def outputs(self, into: Mapping[str, Any] | None = None) -> Answer:
        with self._alone("outputs", flying=True):
            time.sleep(max(self._end - time.perf_counter(), 0.0))  # with threads, nobody asks whether it is over
            held = self._script.held
            if held is not None:
                held.wait(10)
            self._fail("wait")
            self._fail("outputs")
            self._number, self._seen = None, True
            return placed(self._outputs, into)

    def facts(self) -> Mapping[str, Any]:
        return {}

    def close(self) -> None:
        if not self._seen:
            self._fault("closed while a step is in flight")
        if self._is_closed:
            self._fault("closed twice")
        self._is_closed = True
        self._script.closed += 1


def placed(outputs: Answer, into: Mapping[str, Any] | None) -> Answer:
    """Outputs, of which those that fit lie in arrays of the caller's, as a GPU's do."""
    found = dict(outputs)
    for name, place in (into or {}).items():
        if (place.shape, place.dtype) == (outputs[name].shape, outputs[name].dtype):
            place[...] = outputs[name]
            found[name] = place
    return found


def ports(batches: Sequence[int] = (1, 4), *, joins: bool = True, fixed: bool = False) -> Ports:
    """Of `x`, two numbers to a row, and `k`, which has no rows."""
    shapes = {batch: {"x": (batch, 2), "k": ()} for batch in batches}
    if fixed:
        shapes = {0: {"x": (3, 2), "k": ()}}
    rows = ({"x": 1, "k": 0}, {"y": 1, "twice": 0}) if joins and not fixed else None
    return Ports({"x": FLOAT, "k": FLOAT}, shapes, rows, "Softmax mixes rows")


def scripted(
    script: Script | None = None,
    *,
    groups: int = 2,
    threads: int = 0,
    of: Ports | None = None,
    **settings: Any,
) -> Pool:
    """A pool of slots that follow a script."""
    of = of or ports()
    settings = {"priorities": 1, **settings}
    chosen = PoolSettings(groups=groups, **settings)
    slots = [(number * chosen.priorities // groups, ScriptedSlot(script or Script(), of)) for number in range(groups)]
    outputs = {"y": Port("float64", (None, 2)), "twice": Port("float64", ())}
    return Pool(of, slots, chosen, About("by script", outputs, (), (), {}), threads=threads)


def feeds(value: float, rows: int = 1, k: float = 0.0) -> dict[str, NDArray[Any]]:
    """A request that no other one has the answer of."""
    return {"x": np.arange(rows * 2, dtype=FLOAT).reshape(rows, 2) / 16 + value, "k": np.array(k, FLOAT)}


def is_right(answer: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
    """Whether an answer is that of a request."""
    return (
        set(answer) == {"y", "twice"}
        and np.array_equal(answer["y"], 3 * given["x"] + given["k"])
        and np.array_equal(answer["twice"], 2 * given["k"])
    )


BOTH = pytest.mark.parametrize("threads", [0, 2], ids=["polled", "threads"])
SOON = 20.0
"""Seconds after which something hangs."""


@contextmanager
def opened(script: Script | None = None, **more: Any) -> Iterator[tuple[Pool, Script]]:
    """A pool, and the script of its slots. In the end everything is closed once, nobody waits, and all adds up."""
    script = script or Script()
    before = set(threading.enumerate())
    pool = scripted(script, **more)
    try:
        yield pool, script
    finally:
        if script.held is not None:
            script.held.set()
        pool.close()
    stats = pool.stats()
    assert script.faults == []
    assert script.closed == pool.settings.groups
    assert (stats.waiting, stats.in_flight) == (0, 0)
    assert stats.requests == stats.answered + stats.failed + stats.timed_out + stats.cancelled
    assert (stats.steps, stats.rows) == (len(script.steps), sum(script.steps))
    assert {one.name for one in set(threading.enumerate()) - before if one.name.startswith("msplit")} == set()


def together(*work: Callable[[], object]) -> list[BaseException]:
    """Runs all of it at once, each in a thread of its own. What it raised."""
    problems: list[BaseException] = []

    def run(one: Callable[[], object]) -> None:
        try:
            one()
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=run, args=(one,), daemon=True) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    assert not any(thread.is_alive() for thread in threads), "something hangs"
    return problems


def until(true: Callable[[], object]) -> None:
    end = time.perf_counter() + SOON
    while not true():
        assert time.perf_counter() < end, "it never came"
        time.sleep(1e-4)
