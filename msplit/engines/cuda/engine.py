"""The cuda engine's front door: all that the rest of msplit may ask of it, beside `options` and `coverage`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from msplit.engines.cuda.build import (
    ENGINE,
    CudaEngine,
    one_stream_seconds,
    plan_of_job,
    profile_kernels,
    runs_as_stored,
)

if TYPE_CHECKING:
    from msplit.engines.cuda.kernels.cache import kernel_folder, refused_folders
    from msplit.engines.cuda.kernels.toolchain import c_compiler
    from msplit.engines.cuda.search.kernel_modes import Way, Ways, predicted_us, ways
    from msplit.engines.cuda.search.measurement import Arm, arms, make_runner

__all__ = [
    "ENGINE",
    "Arm",
    "CudaEngine",
    "Way",
    "Ways",
    "arms",
    "c_compiler",
    "kernel_folder",
    "make_runner",
    "one_stream_seconds",
    "plan_of_job",
    "predicted_us",
    "profile_kernels",
    "refused_folders",
    "runs_as_stored",
    "ways",
]

_LATER = {
    "Arm": "search.measurement",
    "Way": "search.kernel_modes",
    "Ways": "search.kernel_modes",
    "arms": "search.measurement",
    "c_compiler": "kernels.toolchain",
    "kernel_folder": "kernels.cache",
    "make_runner": "search.measurement",
    "predicted_us": "search.kernel_modes",
    "refused_folders": "kernels.cache",
    "ways": "search.kernel_modes",
}
"""Where what needs PyTorch is: it is loaded when it is asked for."""

if not TYPE_CHECKING:  # to mypy, a module with `__getattr__` has every name

    def __getattr__(name: str) -> Any:
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"msplit.engines.cuda.{_LATER[name]}"), name)
