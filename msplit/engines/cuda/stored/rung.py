"""What a build holds of one batch: packed from what runs, and made to run again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from msplit.engines.base import Arrays, Executable, Job
from msplit.engines.cuda.compile import compile_job
from msplit.engines.cuda.device import Device
from msplit.engines.cuda.device.device import precision
from msplit.engines.cuda.kernels import store
from msplit.engines.cuda.kernels.store import Store, file_of
from msplit.engines.cuda.options import EngineOptions
from msplit.engines.cuda.runtime.executable import CudaExecutable
from msplit.engines.cuda.runtime.executables import executable_of
from msplit.engines.cuda.runtime.host import Wrapped
from msplit.engines.cuda.stored.program import Restored, pack, unpack
from msplit.engines.cuda.stored.weights import Weights
from msplit.schedule.plan.plan import make_plan, record_order

HARMLESS = ("driver", "triton", "memory")
"""Of what a build was made for, what may differ: machine code and captured graphs do not depend on it."""


@dataclass(frozen=True, eq=False)
class Packed:
    """A rung as files hold it.

    Attributes:
        program: JSON.
        kernels: Name of a file -> its bytes.
    """

    program: bytes
    kernels: Mapping[str, bytes]


def pack_rung(job: Job, executable: Executable, weights: Weights) -> Packed:
    """Packs what a job runs. It was just built, so that it is compiled already.

    Raises:
        EngineError: Something in it can not be stored. What the host runs can not be.
    """
    compiled = compile_job(job)
    assert compiled.optimized.host is None, "what the host runs is refused before anything is built"
    program = pack(compiled, compiled.plan(job), weights)
    while isinstance(executable, Wrapped):
        executable = executable.device
    kernels = {}
    if isinstance(executable, CudaExecutable):
        kept = Store.of(torch.device(job.options.device))
        found = {key: kept.read(key) for key in sorted(executable.kernels)}
        kernels = {file_of(key): data for key, data in found.items() if data is not None}
    return Packed(program, kernels)


def made_for(device: str) -> dict[str, str]:
    """What a build for a device depends on, in words: it fits where all of it is equal, but for what is `HARMLESS`."""
    return store.made_for(Device.of(torch.device(device)))


class Opened:
    """A build on its device: its weights, and what makes its rungs run.

    Args:
        weights: The bytes of the weights.
        kernels: The folder of compiled kernels. Its files are verified.
        options: Device, whether to capture, and whether kernels are chosen by measuring.
        ieee: See `Job`.
        fits: See `program.unpack`.
    """

    def __init__(
        self, weights: np.ndarray[Any, Any], kernels: Path, options: EngineOptions, *, ieee: bool, fits: bool
    ) -> None:
        self._options, self._ieee, self._fits = options, ieee, fits
        place = torch.device(options.device)
        if options.on_gpu:
            place = Device.of(place).place
            if fits:
                Store.of(place).add(kernels)
        empty = torch.empty(0, dtype=torch.uint8, device=place)
        self._memory = torch.from_numpy(weights).to(place) if len(weights) else empty
        self._pool: Any = torch.cuda.graph_pool_handle() if options.on_gpu else None

    def restore(self, program: bytes, feeds: Arrays) -> Restored:
        """A rung, not yet running, and inputs for it."""
        with precision(self._ieee):
            return unpack(program, self._memory, feeds, fits=self._fits)

    def run(self, rung: Restored, *, alone: bool = False, one_stream: bool = False) -> Executable:
        """Makes a rung run. All of a build's graphs share one memory, since one of them runs at a time, but for one that is `alone`."""
        plan, program = rung.plan, rung.compiled.program
        if one_stream:
            lanes = np.minimum(plan.stream, 0)
            plan = make_plan(program.dag, lanes, record_order(program.dag, (lanes >= 0).astype(np.float64)))
        pool = None if alone else self._pool
        return executable_of(rung.compiled, plan, self._options, ieee=self._ieee, pool=pool)
