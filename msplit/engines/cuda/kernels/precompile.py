"""Kernels that are going to be timed, compiled all at once before any of them is."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
import os
import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextvars import ContextVar
from typing import Any

from msplit.engines.cuda.kernels.toolchain import can_compile

MOST_WORKERS = 16
"""Threads that compile at once."""

_AHEAD: ContextVar[bool] = ContextVar("compiling_ahead", default=False)


def is_ahead() -> bool:
    """True inside of `Ahead.noting`."""
    return _AHEAD.get()


def through_triton(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """Function that starts a kernel of Triton's on a grid of programs and gives it as it was compiled; in `Ahead.noting` it is noted
    only."""
    return functools.partial(kernel.warmup, grid=grid) if _AHEAD.get() else kernel[grid]


@functools.cache
def can_compile_ahead() -> bool:
    """Whether Triton knows how to, as it does from version 3.5 on."""
    return can_compile() and importlib.util.find_spec("triton.runtime._async_compile") is not None


class _Compilation(Future[Any]):
    """One that is done when it is begun, or when its result is asked for."""

    def __init__(self, note: Hashable, task: Callable[[], Any]) -> None:
        super().__init__()
        self.note = note
        self._task: Callable[[], Any] | None = task

    def begin(self, stop: float = math.inf) -> None:
        """Does it, unless the time is over, or it was begun before."""
        task, self._task = self._task, None
        if task is None:
            return
        try:
            if time.perf_counter() > stop:
                raise TimeoutError
            self.set_result(task())
        except Exception as problem:  # noqa: BLE001  it is told who asks for the result
            self.set_exception(problem)

    def result(self, timeout: float | None = None) -> Any:
        """Result, also of a kernel that is started before `Ahead.compile`, too."""
        self.begin()
        return super().result(timeout)


class Ahead(Executor):
    """Kernels that are noted to be compiled. Equal ones are compiled once.

    Attributes:
        weights: How much each note matters: the kernels of the largest are compiled first.
    """

    def __init__(self) -> None:
        from triton.runtime import _async_compile  # private, and the only way

        self._active = _async_compile.active_mode
        self._mode = _async_compile.AsyncCompileMode(self, ignore_errors=True)
        self._noted: list[_Compilation] = []
        self._note: Hashable = None
        self.weights: dict[Hashable, float] = {}

    @contextlib.contextmanager
    def noting(self, note: Hashable = None) -> Iterator[None]:
        """Kernels that `through_triton` would start inside are not started, and compiled later."""
        before, self._note = self._note, note
        ahead, active = _AHEAD.set(True), self._active.set(self._mode)
        try:
            yield
        finally:
            self._active.reset(active)
            _AHEAD.reset(ahead)
            self._note = before

    def submit(self, task: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        """Takes a compilation from Triton, for later."""
        self._noted.append(_Compilation(self._note, functools.partial(task, *arguments, **options)))
        return self._noted[-1]

    def compile(self, seconds: float, meanwhile: Callable[[], None] | None = None) -> None:
        """Compiles what was noted, on as many cores as there are. `meanwhile` runs in this thread, which has nothing else to do.

        What can not be compiled, or not begun in time, is told or done when it is launched.
        """
        stop = time.perf_counter() + seconds
        tasks = sorted(self._noted, key=lambda one: -self.weights.get(one.note, 0.0))
        with ThreadPoolExecutor(max(min(cores(), MOST_WORKERS, len(tasks)), 1)) as pool:
            try:
                for one in tasks:
                    pool.submit(one.begin, stop)
                if meanwhile is not None:
                    meanwhile()
                wait(tasks)
            finally:
                pool.shutdown(wait=False, cancel_futures=True)  # as after Ctrl-C
        self._mode.__exit__(None, None, None)


@contextlib.contextmanager
def compiling_ahead(seconds: float = math.inf, *, meanwhile: Callable[[], None] | None = None) -> Iterator[Ahead]:
    """Block at whose end all kernels that were noted in it, to be timed, are compiled at once.

    Most of a compilation is done without Python's lock, and one after the other, 0.3 s each, they make a model's first start take half a
    minute. See `can_compile_ahead`.
    """
    ahead = Ahead()
    yield ahead
    ahead.compile(seconds, meanwhile)


@functools.cache
def cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
