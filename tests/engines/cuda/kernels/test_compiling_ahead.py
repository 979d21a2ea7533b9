"""Kernels that are to be timed are compiled at once, before the first is started."""

from __future__ import annotations

import sys
from concurrent.futures import Executor
from types import ModuleType
from typing import Any

import pytest
import torch

from msplit.engines.cuda.autotune import tuner
from msplit.engines.cuda.autotune.tuner import Tuner
from msplit.engines.cuda.device import Device
from msplit.engines.cuda.kernels import toolchain


class Kernel:
    """One of Triton's, as far as `launch` knows it."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def warmup(self, *arguments: Any, grid: tuple[int, ...], **options: Any) -> None:
        self.log.append(f"compile {self.name} {arguments} {grid} {options}")

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **options: self.log.append(f"start {self.name} {arguments} {grid} {options}")


@pytest.fixture
def log(monkeypatch):
    said: list[str] = []

    class Mode:
        def __init__(self, executor: Executor, *, ignore_errors: bool) -> None:
            assert ignore_errors, "what can not be compiled is told when it is launched"

        def __enter__(self) -> None:
            said.append("begin")

        def __exit__(self, *problem: object) -> None:
            said.append("end")

    made = ModuleType("triton.runtime._async_compile")
    made.AsyncCompileMode = Mode  # type: ignore[attr-defined]
    runtime = ModuleType("triton.runtime")
    runtime._async_compile = made  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton.runtime", runtime)
    monkeypatch.setitem(sys.modules, "triton.runtime._async_compile", made)
    return said


def test_a_kernel_is_compiled_only_inside_and_started_outside(log):
    kernel = Kernel("k", log)
    with toolchain.compiling_ahead():
        toolchain.launch(kernel, (2, 1))(7, BLOCK=8)
    toolchain.launch(kernel, (2, 1))(7, BLOCK=8)
    assert log == [
        "begin",
        "compile k (7,) (2, 1) {'BLOCK': 8}",
        "end",
        "start k (7,) (2, 1) {'BLOCK': 8}",
    ]


def test_after_an_error_kernels_are_started_again(log):
    with pytest.raises(ZeroDivisionError), toolchain.compiling_ahead():
        1 / 0  # noqa: B018
    toolchain.launch(Kernel("k", log), (1,))()
    assert log == ["begin", "end", "start k () (1,) {}"]


def test_candidates_are_compiled_before_the_first_is_timed(log, monkeypatch):
    monkeypatch.setattr(tuner, "can_compile_ahead", lambda: True)
    monkeypatch.setattr(Device, "is_gpu", True)
    own = Tuner(Device(torch.device("cpu")))
    monkeypatch.setattr(Tuner, "milliseconds", lambda self, call, lanes=1, *, cold=False: (call(), 1.0)[1])

    def candidate(name: str, broken: bool = False) -> Any:
        kernel = Kernel(name, log)

        def call() -> list[torch.Tensor]:
            toolchain.launch(kernel, (1,))()
            if broken:
                raise RuntimeError("it needs more of an SM than there is")
            return [torch.zeros(1)]

        return name, call

    candidates = (candidate(name, name == "b") for name in "abc")
    ranked = own.ranked(candidates, [torch.zeros(1)], forgiving=True)
    assert [one.choice for one in ranked] == ["a", "c"]
    first_start = next(place for place, said in enumerate(log) if said.startswith("start"))
    assert [said.split()[1] for said in log[1 : first_start - 1]] == ["a", "b", "c"]
    assert (log[0], log[first_start - 1]) == ("begin", "end")


def test_one_candidate_is_not_compiled_ahead(log, monkeypatch):
    monkeypatch.setattr(tuner, "can_compile_ahead", lambda: True)
    monkeypatch.setattr(Device, "is_gpu", True)
    Tuner(Device(torch.device("cpu"))).compile_ahead([lambda: log.append("ran")])
    assert not log
