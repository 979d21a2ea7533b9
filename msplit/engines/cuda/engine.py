"""The cuda engine's door: what the rest of msplit may ask of it, beside `options` and `coverage`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from msplit.core.graph import Ints
from msplit.engines.base import Arrays, Engine, Executable, Job, starting_pytorch
from msplit.engines.cuda.options import MOST_GPUS, KernelMode
from msplit.errors import INSTALL_PYTORCH, EngineError
from msplit.flatten.flat import FlatGraph
from msplit.progress import Progress

if TYPE_CHECKING:
    from msplit.engines.cuda.runtime.executables import Compiled as Compiled
    from msplit.engines.cuda.runtime.executables import LoneStep as LoneStep
    from msplit.engines.cuda.search import CompiledVariant as CompiledVariant
    from msplit.engines.cuda.search import CompiledVariants as CompiledVariants
    from msplit.engines.cuda.search import SimulatedVariant as SimulatedVariant
    from msplit.engines.cuda.search import SimulatedVariants as SimulatedVariants
    from msplit.engines.cuda.stored.builds import Builds as Builds
    from msplit.engines.cuda.stored.builds import Opened as Opened
    from msplit.engines.cuda.stored.builds import Packed as Packed
    from msplit.engines.cuda.stored.program import Restored as Restored
    from msplit.engines.cuda.stored.program import Weights as Weights
    from msplit.engines.cuda.stored.renewal import Renewal as Renewal
    from msplit.engines.cuda.stored.renewal import RowRenewal as RowRenewal


@dataclass(frozen=True)
class Background:
    """Preparations in another thread, beside steps.

    Attributes:
        busy: Its value changes with every step. Choices that are measured meanwhile are not kept for other processes.
        gpu: Index of the GPU that is prepared for; None where there is none.
    """

    busy: Callable[[], object]
    gpu: int | None

    @contextmanager
    def block(self) -> Iterator[None]:
        """A block in which the thread prepares."""
        if "torch" not in sys.modules:
            yield
            return
        import torch

        from msplit.engines.cuda.autotune.tuner import disturbed

        with disturbed(self.busy), nullcontext() if self.gpu is None else torch.cuda.device(self.gpu):
            yield

    def aside(self) -> AbstractContextManager[None]:
        """A block in which the thread does nothing, and so holds up none that wants another precision."""
        if "torch" not in sys.modules:
            return nullcontext()
        from msplit.engines.cuda.device.device import aside

        return aside()


Apart = tuple[Executable, Callable[[], AbstractContextManager[object]]]
"""An executable, and the block in which its steps run."""


class CudaEngine(Engine):
    """Builds executables from our own kernels, captured as CUDA graphs. It keeps nothing: what is compiled is the device's."""

    name = "cuda"

    def unavailable(self, devices: Sequence[str] = ()) -> str | None:
        """None where the engine can run here, else why not.

        Args:
            devices: Those that must be there, such as "cuda:1". CPUs stand in for as many GPUs as are asked for.
        """
        if devices and not any(device.startswith("cuda") for device in devices):
            return None
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
        there = torch.cuda.device_count()
        for index in (torch.device(device).index or 0 for device in devices):
            if not 0 <= index < there:
                return f"there is no GPU {index}: PyTorch sees {there} ({', '.join(map(str, range(there)))})"
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
            from msplit.engines.cuda.coverage import shared_rows
            from msplit.engines.cuda.runtime.executables import executable_of

        if job.options.devices:
            return data_parallel.build(job, *shared_rows(job))
        compiled = self.compile(job)
        executable = executable_of(compiled, compiled.plan(job), job.options, ieee=job.precision.ieee)
        if job.state:  # the graph may have been compiled with other values
            executable.load_state(job.state)
        return executable

    def compile(self, job: Job) -> Compiled:
        """Compiles the job's graph, once per graph, shapes and options; see `compile.compile_job`."""
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

    def variants(
        self,
        job: Job,
        groups: Ints,
        names: Sequence[str] = tuple(KernelMode),
        *,
        seconds: float = 0.0,
        tell: Progress | None = None,
    ) -> CompiledVariants:
        """Compiles the job's graph in several kernel modes, to be simulated or measured; see `search.compile_variants`."""
        with starting_pytorch():
            from msplit.engines.cuda import search

        return search.compile_variants(job, groups, names, seconds=seconds, tell=tell)

    def device(self, job: Job) -> str:
        """Device that a job runs on, or is simulated for."""
        return "GPU" if job.options.on_gpu else "CPU"

    def in_half(self, job: Job) -> list[tuple[int, ...]]:
        """Lists the nodes of each op that runs in half precision, in topological order; none where the job's precision is another."""
        with starting_pytorch():
            from msplit.engines.cuda.compile import in_half

        return in_half(job)

    def try_out(self, job: Job, inputs: Sequence[Arrays]) -> list[Arrays]:
        """Runs a step on each of several inputs, each time from the job's own state. What is compiled for it is not kept.

        A job in IEEE precision that is to `emulate` reads what products read rounded to TF32.
        """
        with self._apart(job)() as (executable, rounding):
            found: list[Arrays] = []
            for feeds in inputs:
                if job.state:
                    executable.load_state(job.state)
                with rounding():
                    found.append({name: np.array(value) for name, value in executable.step(feeds).items()})
        return found

    def try_steps(
        self, job: Job, fed: Sequence[Arrays], state: Arrays, *seeds: int | None
    ) -> list[tuple[Arrays, Arrays]]:
        """Takes steps one behind the other, from the values of variables in `state`: gives the outputs of the last, and the variables after
        it; once for each seed, of `RoundedProducts` if the job is to `emulate`, else of `RoughFunctions`. None: as `try_out` has it."""
        apart, found = self._apart(job), []
        for seed in seeds:
            with apart(seed) as (executable, rounding):
                if state:
                    executable.load_state(state)
                outputs: Arrays = {}
                for feeds in fed:
                    with rounding():
                        outputs = {name: np.array(value) for name, value in executable.step(feeds).items()}
                found.append((outputs, executable.save_state() if state else {}))
        return found

    def _apart(self, job: Job) -> Callable[..., AbstractContextManager[Apart]]:
        """Compiles a job, and keeps nothing of that: gives what makes an executable, and the block in which its steps round, if it is to
        `emulate`, or are rough."""
        with starting_pytorch():
            from msplit.engines.cuda.compile import compile_apart
            from msplit.engines.cuda.runtime.executables import RoughFunctions, RoundedProducts, executable_of

        compiled = compile_apart(job)
        plan = compiled.plan(job)
        emulated = job.options.emulate and job.precision.ieee

        @contextmanager
        def made(seed: int | None = None) -> Iterator[Apart]:
            executable = executable_of(compiled, plan, job.options, ieee=job.precision.ieee)
            try:
                plain = nullcontext if seed is None else partial(RoughFunctions, seed)
                yield executable, partial(RoundedProducts, seed) if emulated else plain
            finally:
                executable.close()

        return made

    def beside(self, busy: Callable[[], object]) -> Background:
        """Lets another thread prepare beside steps, on the GPU that is the current one of this thread; see `Background`."""
        torch = sys.modules.get("torch")
        return Background(busy, torch.cuda.current_device() if torch and torch.cuda.is_initialized() else None)

    def builds(self, device: str) -> Builds:
        """Packs builds for a device, and opens them."""
        with starting_pytorch():
            from msplit.engines.cuda.stored.builds import Builds

        return Builds(device)

    def forget(self, flat: FlatGraph) -> None:
        """Lets go of what was compiled of a graph. Executables keep what they run."""
        if "msplit.engines.cuda.device" in sys.modules:  # PyTorch is loaded, and something may have been made
            from msplit.engines.cuda.device.device import forget

            forget(flat)


ENGINE = CudaEngine()
