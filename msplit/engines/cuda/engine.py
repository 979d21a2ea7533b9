"""The cuda engine's front door: all that the rest of msplit may ask of it, beside `options` and `coverage`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from msplit.engines.base import Arrays, Engine, Executable, Feeds, Job
from msplit.engines.cuda.kernels.toolchain import c_compiler, kernel_folder, refused_folders
from msplit.engines.cuda.options import MOST_GPUS
from msplit.errors import INSTALL_PYTORCH, DeviceLost, EngineError
from msplit.flatten.flat import FlatGraph
from msplit.progress import Progress, importing

if TYPE_CHECKING:
    from msplit.engines.cuda.compile import in_half
    from msplit.engines.cuda.data_parallel import are_alike, missing, shared_batch
    from msplit.engines.cuda.ir.dtypes import to_numpy, to_torch
    from msplit.engines.cuda.profiling.kernel_profile import Measured
    from msplit.engines.cuda.runtime.executables import Compiled, one_stream_seconds
    from msplit.engines.cuda.runtime.host import Steps
    from msplit.engines.cuda.runtime.input_staging import settled, taken
    from msplit.engines.cuda.search.kernel_modes import (
        SimulatedVariant,
        SimulatedVariants,
        predicted_us,
        simulate_variants,
    )
    from msplit.engines.cuda.search.measurement import CompiledVariant, compile_variants, make_runner, side_by_side
    from msplit.engines.cuda.stored.program import Restored
    from msplit.engines.cuda.stored.rung import HARMLESS, Opened, Packed, made_for, pack_rung
    from msplit.engines.cuda.stored.weights import Weights

__all__ = [
    "ENGINE",
    "HARMLESS",
    "CompiledVariant",
    "CudaEngine",
    "Opened",
    "Packed",
    "Restored",
    "SimulatedVariant",
    "SimulatedVariants",
    "Steps",
    "Weights",
    "are_alike",
    "c_compiler",
    "compile_variants",
    "device_lost",
    "in_half",
    "kernel_folder",
    "made_for",
    "make_runner",
    "missing",
    "one_stream_seconds",
    "pack_rung",
    "predicted_us",
    "profile_kernels",
    "refused_folders",
    "runs_as_stored",
    "settled",
    "shared_batch",
    "side_by_side",
    "simulate_variants",
    "taken",
    "to_numpy",
    "to_torch",
]

_LATER = {
    "are_alike": "data_parallel",
    "in_half": "compile",
    "missing": "data_parallel",
    "shared_batch": "data_parallel",
    "Steps": "runtime.host",
    "HARMLESS": "stored.rung",
    "Opened": "stored.rung",
    "Packed": "stored.rung",
    "Restored": "stored.program",
    "Weights": "stored.weights",
    "made_for": "stored.rung",
    "pack_rung": "stored.rung",
    "CompiledVariant": "search.measurement",
    "SimulatedVariant": "search.kernel_modes",
    "SimulatedVariants": "search.kernel_modes",
    "compile_variants": "search.measurement",
    "make_runner": "search.measurement",
    "one_stream_seconds": "runtime.executables",
    "predicted_us": "search.kernel_modes",
    "simulate_variants": "search.kernel_modes",
    "settled": "runtime.input_staging",
    "side_by_side": "search.measurement",
    "taken": "runtime.input_staging",
    "to_numpy": "ir.dtypes",
    "to_torch": "ir.dtypes",
}
"""Where what needs PyTorch is: it is loaded when it is asked for."""

if not TYPE_CHECKING:  # to mypy, a module with `__getattr__` has every name

    def __getattr__(name: str) -> Any:
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        with starting_pytorch():
            module = import_module(f"msplit.engines.cuda.{_LATER[name]}")
        return getattr(module, name)


def device_lost(problem: BaseException | None) -> DeviceLost | None:
    """Error for a fault of the GPU's, which every later call reports again; None where an error neither is one nor comes from one."""
    torch = sys.modules.get("torch")
    while problem is not None:
        if isinstance(problem, DeviceLost):
            return problem
        if torch is not None and isinstance(problem, (torch.AcceleratorError, torch.cuda.CudaError)):
            said = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
            fix = "restart the process; a device that fails again is not healthy"
            return DeviceLost(f"the GPU failed: {said}", fix=fix)
        problem = problem.__cause__
    return None


@contextmanager
def starting_pytorch() -> Iterator[None]:
    """A phase for the import of what needs PyTorch.

    Raises:
        EngineError: PyTorch is not installed.
    """
    try:
        with importing("torch", "PyTorch"):
            yield
    except ModuleNotFoundError as problem:
        if (problem.name or "").partition(".")[0] != "torch":
            raise
        raise EngineError("PyTorch is not installed, and this needs it", fix=INSTALL_PYTORCH) from None


class CudaEngine(Engine):
    """See `engines.base.Engine`. It keeps nothing: what is compiled is the device's."""

    name = "cuda"

    def unavailable(self) -> str | None:
        """Why the engine can not run here, or None."""
        if importlib.util.find_spec("torch") is None:
            return f"PyTorch, its kernel library, is not installed: {INSTALL_PYTORCH}"
        with starting_pytorch():
            import torch

        if torch.version.cuda is None:
            return f"PyTorch {torch.__version__} is a build without CUDA"
        if not torch.cuda.is_available():
            return "PyTorch sees no CUDA device (see `msplit doctor`)"
        try:
            torch.backends.cudnn.version()
        except RuntimeError as problem:  # all that follows would fail, or end the process
            said = " ".join(str(problem).split()).partition(". ")[0]
            return f"{said}; where TensorFlow brings another cuDNN, import torch before tensorflow"
        return None

    def free_memory(self) -> None:
        """Gives the memory of a GPU that PyTorch keeps for what is built next back to it: TensorFlow can not have it otherwise."""
        from msplit.engines.cuda.device.capture import empty_cache

        empty_cache()

    def build(self, job: Job) -> Executable:
        """Compiles the graph (once per graph and shapes), plans it for the job's streams, proves the plan and makes it ready to run.

        Raises:
            EngineError: Something in the graph can not run; the message names it.
        """
        if job.options.on_gpu and (why := self.unavailable()):
            raise EngineError(f"the cuda engine can not run here: {why}", fix="use --engine tensorflow")
        with starting_pytorch():
            from msplit.engines.cuda import data_parallel
            from msplit.engines.cuda.runtime.executables import executable_of

        if job.options.devices:
            return data_parallel.build(job)
        compiled = self.compile(job)
        executable = executable_of(compiled, compiled.plan(job), job.options, ieee=job.precision.ieee)
        if job.state:  # the graph may have been compiled with other values
            executable.load_state(job.state)
        return executable

    def compile(self, job: Job) -> Compiled:
        """The job's graph as a program; see `compile.compile_job`."""
        with starting_pytorch():
            import torch

            from msplit.engines.cuda.compile import compile_job

        here = torch.cuda.device_count() if job.options.on_gpu else MOST_GPUS
        if missing := [gpu for gpu in job.options.split if gpu >= here]:
            raise EngineError(
                f"there is no GPU {missing[0]} here: PyTorch sees {here}",
                fix="split over others, or see CUDA_VISIBLE_DEVICES",
            )
        return compile_job(job)

    def try_out(self, job: Job, inputs: Sequence[Arrays]) -> list[Arrays]:
        """What a step gives for each of several inputs, each time from the job's own state. What is compiled for it is not kept.

        A job in IEEE precision that is to `emulate` reads what products read rounded to TF32.
        """
        with starting_pytorch():
            from msplit.engines.cuda.compile import compile_apart
            from msplit.engines.cuda.runtime.executables import executable_of
            from msplit.engines.cuda.runtime.rounding import RoundedProducts

        compiled = compile_apart(job)
        executable = executable_of(compiled, compiled.plan(job), job.options, ieee=job.precision.ieee)
        found: list[Arrays] = []
        rounds = job.options.emulate and job.precision.ieee
        try:
            for feeds in inputs:
                if job.state:
                    executable.load_state(job.state)
                with RoundedProducts() if rounds else nullcontext():
                    found.append({name: np.array(value) for name, value in executable.step(feeds).items()})
        finally:
            executable.close()
        return found

    def beside(self, busy: Callable[[], object]) -> AbstractContextManager[None]:
        """A block for another thread that prepares beside steps, on the GPU that is the current one of this thread.

        Args:
            busy: Its value changes with every step. Choices that are measured meanwhile are not kept for other processes.
        """
        if "torch" not in sys.modules:
            return nullcontext()
        import torch

        from msplit.engines.cuda.autotune.tuner import disturbed

        place = torch.cuda.current_device() if torch.cuda.is_initialized() else None

        @contextmanager
        def block() -> Iterator[None]:
            with disturbed(busy), nullcontext() if place is None else torch.cuda.device(place):
                yield

        return block()

    def as_tensors(self, feeds: Arrays) -> Feeds:
        """Inputs as tensors in the host's memory, strings left as they are: a step takes them without writing to its `buffers`."""
        if "torch" not in sys.modules:
            return feeds
        from msplit.engines.cuda.ir.dtypes import to_torch

        return {
            name: value if value.dtype.kind in "OSU" else to_torch(np.array(value)) for name, value in feeds.items()
        }

    def aside(self) -> AbstractContextManager[None]:
        """A block in which a thread that prepares does nothing, and so holds up none that wants another precision."""
        if "torch" not in sys.modules:
            return nullcontext()
        from msplit.engines.cuda.device.device import aside

        return aside()

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

    from msplit.engines.cuda.device.device import Device, precision
    from msplit.engines.cuda.profiling.kernel_profile import measure

    device, feeds = torch.device(job.options.device), compiled.optimized.feeds
    with Device.of(device).entered(), precision(job.precision.ieee):
        return measure(compiled.program, feeds, device, seconds=seconds, grids=grids, progress=progress)


def runs_as_stored(job: Job) -> bool:
    """Whether a job can be run by the order that its stored plan holds: not where its kernels have become others."""
    from msplit.engines.cuda.runtime.plan_binding import restore

    stored = job.options.plan
    return stored is not None and restore(ENGINE.compile(job).program, stored) is not None
