"""The cuda engine's front door: all that the rest of msplit may ask of it, beside `options` and `coverage`."""

from __future__ import annotations

import importlib.util
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from msplit.engines.base import Executable, Job
from msplit.engines.cuda.kernels.toolchain import c_compiler, kernel_folder, refused_folders
from msplit.errors import INSTALL_PYTORCH, EngineError
from msplit.flatten.flat import FlatGraph
from msplit.progress import Progress, importing

if TYPE_CHECKING:
    from msplit.engines.cuda.profiling.kernel_profile import Measured
    from msplit.engines.cuda.runtime.executables import Compiled, one_stream_seconds
    from msplit.engines.cuda.search.kernel_modes import (
        SimulatedVariant,
        SimulatedVariants,
        predicted_us,
        simulate_variants,
    )
    from msplit.engines.cuda.search.measurement import CompiledVariant, compile_variants, make_runner

__all__ = [
    "ENGINE",
    "CompiledVariant",
    "CudaEngine",
    "SimulatedVariant",
    "SimulatedVariants",
    "c_compiler",
    "compile_variants",
    "kernel_folder",
    "make_runner",
    "one_stream_seconds",
    "predicted_us",
    "profile_kernels",
    "refused_folders",
    "runs_as_stored",
    "simulate_variants",
]

_LATER = {
    "CompiledVariant": "search.measurement",
    "SimulatedVariant": "search.kernel_modes",
    "SimulatedVariants": "search.kernel_modes",
    "compile_variants": "search.measurement",
    "make_runner": "search.measurement",
    "one_stream_seconds": "runtime.executables",
    "predicted_us": "search.kernel_modes",
    "simulate_variants": "search.kernel_modes",
}
"""Where what needs PyTorch is: it is loaded when it is asked for."""

if not TYPE_CHECKING:  # to mypy, a module with `__getattr__` has every name

    def __getattr__(name: str) -> Any:
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        with importing("torch", "PyTorch"):
            module = import_module(f"msplit.engines.cuda.{_LATER[name]}")
        return getattr(module, name)


class CudaEngine:
    """See `engines.base.Engine`. It keeps nothing: what is compiled is the device's."""

    name = "cuda"

    def unavailable(self) -> str | None:
        """Why the engine can not run here, or None."""
        if importlib.util.find_spec("torch") is None:
            return f"PyTorch, its kernel library, is not installed: {INSTALL_PYTORCH}"
        with importing("torch", "PyTorch"):
            import torch

        if torch.version.cuda is None:
            return f"PyTorch {torch.__version__} is a build without CUDA"
        if not torch.cuda.is_available():
            return "PyTorch sees no CUDA device (see `msplit doctor`)"
        return None

    def build(self, job: Job) -> Executable:
        """Compiles the graph (once per graph and shapes), plans it for the job's streams, proves the plan and makes it ready to run.

        Raises:
            EngineError: Something in the graph can not run; the message names it.
        """
        if job.options.on_gpu and (why := self.unavailable()):
            raise EngineError(f"the cuda engine can not run here: {why}", fix="use --engine tensorflow")
        with importing("torch", "PyTorch"):
            from msplit.engines.cuda.runtime.executables import executable_of

        compiled = self.compile(job)
        return executable_of(job, compiled, compiled.plan(job))

    def compile(self, job: Job) -> Compiled:
        """The job's graph as a program; see `compile.compile_job`."""
        with importing("torch", "PyTorch"):
            from msplit.engines.cuda.compile import compile_job

        return compile_job(job)

    def forget(self, flat: FlatGraph) -> None:
        """Lets go of what was compiled of a graph. Executables keep what they run."""
        if "msplit.engines.cuda.device" in sys.modules:  # PyTorch is loaded, and something may have been made
            from msplit.engines.cuda.device.device import forget

            forget(flat)


ENGINE = CudaEngine()


def profile_kernels(
    job: Job, compiled: Compiled, *, seconds: float, grids: bool, progress: Progress | None = None
) -> Measured:
    """Times every kind of step of a compiled graph alone, in the job's precision; see `kernel_profile.measure`."""
    import torch

    from msplit.engines.cuda.device.device import precision
    from msplit.engines.cuda.profiling.kernel_profile import measure

    device, feeds = torch.device(job.options.device), compiled.optimized.feeds
    with precision(job.ieee):
        return measure(compiled.program, feeds, device, seconds=seconds, grids=grids, progress=progress)


def runs_as_stored(job: Job) -> bool:
    """Whether a job can be run by the order that its stored plan holds: not where its kernels have become others."""
    from msplit.engines.cuda.runtime.plan_binding import restore

    stored = job.options.plan
    return stored is not None and restore(ENGINE.compile(job).program, stored) is not None
