"""Launches of our own kernels, and their compilation, many at once, before they are timed.

Starts kernels of our own: those that were compiled before by the driver alone, others through Triton, which compiles them.

Kernels that are going to be timed, compiled all at once before any of them is.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from msplit.engines.cuda.device.device import cores
from msplit.engines.cuda.kernels.store import PARAMETERS, POINTER, Binary, Store
from msplit.engines.cuda.kernels.toolchain import can_compile
from msplit.errors import EngineError

MOST_WORKERS = 16
"""Threads that compile at once."""

_PRECOMPILING: ContextVar[bool] = ContextVar("precompiling", default=False)


def is_precompiling() -> bool:
    """True inside of `Precompiler.noting`."""
    return _PRECOMPILING.get()


def through_triton(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """Function that starts a kernel of Triton's on a grid of programs and gives it as it was compiled; in `Precompiler.noting` it is noted
    only."""
    return functools.partial(kernel.warmup, grid=grid) if _PRECOMPILING.get() else kernel[grid]


@functools.cache
def can_precompile() -> bool:
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
        """Result, also of a kernel that is started before `Precompiler.compile`, too."""
        self.begin()
        return super().result(timeout)


class Precompiler(Executor):
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
        ahead, active = _PRECOMPILING.set(True), self._active.set(self._mode)
        try:
            yield
        finally:
            self._active.reset(active)
            _PRECOMPILING.reset(ahead)
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
def precompiling(seconds: float = math.inf, *, meanwhile: Callable[[], None] | None = None) -> Iterator[Precompiler]:
    """Block at whose end all kernels that were noted in it, to be timed, are compiled at once.

    Most of a compilation is done without Python's lock, and one after the other, 0.3 s each, they make a model's first start take half a
    minute. See `can_precompile`.
    """
    ahead = Precompiler()
    yield ahead
    ahead.compile(seconds, meanwhile)


_CODE = "msplit.engines.cuda.kernels.code"


@dataclass(frozen=True)
class Code:
    """A kernel in Triton's language.

    Attributes:
        module: Of `kernels.code`. It is imported when the kernel is to be compiled.
        name: Of the function.
        specialized: Whether Triton compiles it anew for numbers that are one or multiples of 16.
    """

    module: str
    name: str
    specialized: bool = True

    def function(self) -> Any:
        """The function. Imports Triton."""
        return getattr(import_module(f"{_CODE}.{self.module}"), self.name)


def launch(code: Code, grid: tuple[int, ...]) -> Callable[..., None]:
    """Function that starts a kernel on a grid of programs, given its tensors and numbers by place and its constants by name.

    Constants that are types are given as PyTorch's. In `Precompiler.noting` kernels are noted only.
    """
    return functools.partial(_launch, code, grid)


def _launch(code: Code, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    place = next(one.device for one in arguments if isinstance(one, torch.Tensor))
    if place.type != "cuda":  # Triton's interpreter
        through_triton(code.function(), grid)(*arguments, **_types(constants))
        return
    store, key = Store.of(place), key_of(code, arguments, constants)
    kernel = store.kernel(key)
    if kernel is None:
        if not can_compile():
            raise EngineError(
                f"kernel {code.name} is not among those of the build, and nothing here can compile it",
                fix="install Triton and a C compiler, or build the model anew",
            )
        compiled = through_triton(code.function(), grid)(*arguments, **_types(constants))
        if not is_precompiling():
            store.made(key, functools.partial(_packed, compiled))
    elif not is_precompiling():
        kernel.launch(grid, [arguments[one] for one in kernel.binary.takes])


def input_precision(data: torch.Tensor, *, tf32: bool) -> str:
    """Precision in which Triton's products take numbers of the data's type: TF32 where float32 may be rounded to it, on a GPU."""
    return "tf32" if tf32 and data.dtype == torch.float32 and data.is_cuda else "ieee"


def can_launch(place: torch.device) -> bool:
    """True if kernels of our own run on a device: they can be compiled, or a build has brought them."""
    return place.type == "cuda" and (can_compile() or bool(Store.of(place).given))


def key_of(code: Code, arguments: tuple[Any, ...], constants: dict[str, Any]) -> str:
    """Key of all that a kernel is compiled from: equal for launches that the same machine code can do."""
    kinds = ",".join(_kind(one, code.specialized) for one in arguments)
    return f"{code.module}.{code.name}({kinds}) {sorted(constants.items())}"


def _kind(value: Any, specialized: bool) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{'' if value.data_ptr() % 16 else ' aligned'}"
    wide = "i32" if -(1 << 31) <= value < 1 << 31 else "i64" if value < 1 << 63 else "u64"
    if not specialized or (value != 1 and value % 16):
        return wide
    return "1" if value == 1 else f"{wide} x16"


def _types(constants: dict[str, Any]) -> dict[str, Any]:
    if not any(isinstance(value, torch.dtype) for value in constants.values()):
        return constants
    from triton import language

    return {
        name: getattr(language, str(value).removeprefix("torch.")) if isinstance(value, torch.dtype) else value
        for name, value in constants.items()
    }


def _packed(compiled: Any) -> bytes | None:
    binary = binary_of(compiled)
    return None if binary is None else binary.pack()


def binary_of(compiled: Any) -> Binary | None:
    """A kernel that Triton has compiled, without Triton; None for one that only Triton can launch."""
    compiled = compiled.result() if hasattr(compiled, "result") else compiled
    about = compiled.metadata
    scratch = [getattr(about, f"{kind}_scratch_size", None) for kind in ("global", "profile")]
    if any(scratch) or getattr(about, "num_ctas", 1) != 1:
        return None
    if getattr(about, "launch_cooperative_grid", False):
        return None
    kinds = [POINTER if kind.startswith(POINTER) else kind for kind in compiled.src.signature.values()]
    takes = tuple(place for place, kind in enumerate(kinds) if kind != "constexpr")
    parameters = (*(kinds[place] for place in takes), *[POINTER for size in scratch if size is not None])
    if not set(parameters) <= set(PARAMETERS):
        return None
    early = bool(getattr(about, "launch_pdl", False))
    return Binary(about.name, about.num_warps, about.shared, parameters, takes, compiled.asm["cubin"], early)
