"""Starts kernels of our own: those that were compiled before by the driver alone, others through Triton, which compiles them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from msplit.engines.cuda.kernels.binary import PARAMETERS, POINTER, Binary
from msplit.engines.cuda.kernels.precompile import is_ahead, through_triton
from msplit.engines.cuda.kernels.store import Store
from msplit.engines.cuda.kernels.toolchain import can_compile
from msplit.errors import EngineError

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

    Constants that are types are given as PyTorch's. In `precompile.Ahead.noting` kernels are noted only.
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
        if not is_ahead():
            store.made(key, functools.partial(_packed, compiled))
    elif not is_ahead():
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
