"""Kernels that are to be timed are compiled at once, before the first is started."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import Executor, as_completed
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import pytest
import torch

from msplit.engines.cuda.autotune import tuner
from msplit.engines.cuda.autotune.tuner import Family, Tuner
from msplit.engines.cuda.device.device import Device
from msplit.engines.cuda.kernels import launch as launches
from msplit.engines.cuda.kernels.launch import precompiling, through_triton
from msplit.formats.files import JsonValue

active: ContextVar[Any] = ContextVar("active", default=None)


class Mode:
    """Triton's, as far as it is used."""

    def __init__(self, executor: Executor, *, ignore_errors: bool) -> None:
        assert ignore_errors, "what can not be compiled is told when it is launched"
        self.executor = executor
        self.made: dict[str, Any] = {}

    def submit(self, name: str, task: Any) -> Any:
        if name not in self.made:
            self.made[name] = self.executor.submit(task)
        return self.made[name]

    def __exit__(self, *problem: object) -> None:
        for made in as_completed(self.made.values(), timeout=10):
            made.exception()


class Kernel:
    """One of Triton's, as far as `launch` knows it."""

    def __init__(self, name: str, log: list[str], broken: bool = False) -> None:
        self.name, self.log, self.broken = name, log, broken

    def compile(self) -> None:
        self.log.append(f"compile {self.name}")
        if self.broken:
            raise RuntimeError("it needs more of an SM than there is")

    def warmup(self, *arguments: Any, grid: tuple[int, ...], **options: Any) -> Any:
        assert grid
        return active.get().submit(self.name, self.compile)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def start(*arguments: Any, **options: Any) -> None:
            if active.get() is not None:  # as Triton does it, for whoever starts a kernel meanwhile
                active.get().submit(self.name, self.compile).result()
            self.log.append(f"start {self.name} {arguments} {grid} {options}")

        return start


@pytest.fixture
def log(monkeypatch):
    made = ModuleType("triton.runtime._async_compile")
    made.AsyncCompileMode = Mode  # type: ignore[attr-defined]
    made.active_mode = active  # type: ignore[attr-defined]
    runtime = ModuleType("triton.runtime")
    runtime._async_compile = made  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton.runtime", runtime)
    monkeypatch.setitem(sys.modules, "triton.runtime._async_compile", made)
    monkeypatch.setattr(tuner, "can_precompile", lambda: True)
    monkeypatch.setattr(Device, "is_gpu", True)
    monkeypatch.setenv("MSPLIT_KEEP_CHOICES", "0")
    monkeypatch.setattr(launches, "cores", lambda: 1)
    return list[str]()


def test_a_kernel_is_compiled_only_inside_and_started_outside(log):
    kernel = Kernel("k", log)
    with precompiling() as ahead:
        with ahead.noting():
            through_triton(kernel, (2, 1))(7, BLOCK=8)
            through_triton(kernel, (4, 1))(7, BLOCK=8)
        assert not log
        through_triton(Kernel("other", log), (1,))()
    through_triton(kernel, (2, 1))(7, BLOCK=8)
    assert log == ["start other () (1,) {}", "compile k", "start k (7,) (2, 1) {'BLOCK': 8}"]


def test_what_must_run_while_kernels_are_noted_is_compiled_at_once(log):
    with precompiling() as ahead, ahead.noting():
        Kernel("library", log)[(1,)]()
        assert log == ["compile library", "start library () (1,) {}"]
    assert len(log) == 2


def test_what_matters_most_is_compiled_first_and_nothing_after_the_time(log):
    with precompiling() as ahead:
        for name, weight in [("a", 1.0), ("b", 3.0), ("c", 2.0)]:
            ahead.weights[name] = weight
            with ahead.noting(name):
                through_triton(Kernel(name, log), (1,))()
    assert log == ["compile b", "compile c", "compile a"]
    with precompiling(-1.0) as ahead, ahead.noting():
        through_triton(Kernel("late", log), (1,))()
    assert len(log) == 3


def test_this_thread_does_something_else_meanwhile(log):
    begun = threading.Event()

    class Long(Kernel):
        def compile(self) -> None:
            assert begun.wait(10)
            super().compile()

    with precompiling(meanwhile=begun.set) as ahead, ahead.noting():
        through_triton(Long("k", log), (1,))()
    assert log == ["compile k"]


def test_after_an_error_kernels_are_started_again(log):
    def fails() -> None:
        with precompiling() as ahead, ahead.noting():
            through_triton(Kernel("never", log), (1,))()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    through_triton(Kernel("k", log), (1,))()
    assert log == ["start k () (1,) {}"]


def test_ctrl_c_waits_for_what_was_begun_only(log):
    def interrupted() -> None:
        raise KeyboardInterrupt

    def compile_many() -> None:
        with precompiling(meanwhile=interrupted) as ahead, ahead.noting():
            for number in range(1000):
                through_triton(Kernel(str(number), log), (1,))()

    with pytest.raises(KeyboardInterrupt):
        compile_many()
    assert len(log) < 1000
    assert active.get() is None


def candidate(name: str, log: list[str], broken: bool = False) -> Any:
    kernel = Kernel(name, log, broken)

    def call() -> list[torch.Tensor]:
        through_triton(kernel, (1,))()
        if broken:
            raise RuntimeError("it needs more of an SM than there is")
        return [torch.zeros(1)]

    return name, call


def test_candidates_are_compiled_before_the_first_is_timed(log, monkeypatch):
    own = Tuner(Device(torch.device("cpu")))
    monkeypatch.setattr(Tuner, "milliseconds", lambda self, call, lanes=1, *, cold=False: (call(), 1.0)[1])
    ranked = own.ranked((candidate(name, log, name == "b") for name in "abc"), [torch.zeros(1)], forgiving=True)
    assert [one.choice for one in ranked] == ["a", "c"]
    assert [said.split()[:2] for said in log[:3]] == [["compile", name] for name in "abc"]
    assert not any(said.startswith("compile") for said in log[3:])


def test_one_candidate_is_not_compiled_ahead(log):
    Tuner(Device(torch.device("cpu"))).precompile([lambda: log.append("ran")])
    assert not log


NUMBERS: Family[int] = Family("numbers", int, JsonValue.whole, -1)


def test_while_choices_are_listed_none_is_made_and_each_is_compiled_once(log):
    own = Tuner(Device(torch.device("cpu")))
    assert own.choose(NUMBERS, ("known",), lambda: 5) == 5

    def choose(key: str, weight: float) -> int:
        return own.choose(
            NUMBERS,
            (key,),
            lambda: log.append(f"measure {key}") or 7,
            lambda: [candidate(f"{key}{number}", log, broken=number == 0)[1] for number in range(2)],
            weight,
        )

    assert own.can_list()
    with own.listing():
        assert [choose(key, weight) for key, weight in [("a", 1), ("b", 4), ("a", 2), ("known", 9)]] == [-1, -1, -1, 5]
        assert not log
    assert log == ["compile b0", "compile b1", "compile a0", "compile a1"]
    assert choose("a", 1) == 7
    assert log[4:] == ["measure a"]


def test_contests_whose_candidates_can_not_be_listed_are_made_later(log):
    own = Tuner(Device(torch.device("cpu")))

    def fails() -> list[Any]:
        raise RuntimeError("out of memory")

    with own.listing():
        assert own.choose(NUMBERS, ("a",), lambda: 7, fails) == -1
    assert own.choose(NUMBERS, ("a",), lambda: 7, fails) == 7


def test_where_time_is_short_what_weighs_most_is_measured(log, monkeypatch):
    own = Tuner(Device(torch.device("cpu")))
    weights = {"small": 1.0, "large": 5.0, "smaller": 0.5, "middle": 2.0}
    with own.listing():
        for key, weight in weights.items():
            own.choose(NUMBERS, (key,), lambda: 0, weight=weight)
    monkeypatch.setattr(tuner, "SECONDS", 10.0)
    measured = []

    def measure(key: str) -> int:
        if not own.is_spent:
            measured.append(key)
            with own.spending():
                pass
            own.spent += 4.0
        return 0

    own.spent, own._measured = 4.0, 1  # one of another graph took so long
    for key in weights:
        own.choose(NUMBERS, (key,), lambda key=key: measure(key), weight=weights[key])
    assert measured == ["large", "middle"]


def test_it_can_be_turned_off(log, monkeypatch):
    monkeypatch.setenv(tuner.OFF, "0")
    assert not Tuner(Device(torch.device("cpu"))).can_list()
