"""Packs the programs of a build, one for each batch, opens them again, and runs them in slots."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from msplit.engines.base import STEPS, Arrays, Executable, Feeds, Job
from msplit.engines.cuda.device.capture import empty_cache
from msplit.engines.cuda.device.device import Device, precision, priorities
from msplit.engines.cuda.device.shared_memory import held_once
from msplit.engines.cuda.ir.dtypes import torch_dtype
from msplit.engines.cuda.ir.node import Unsupported
from msplit.engines.cuda.kernels import store
from msplit.engines.cuda.kernels.host_tables import HostTables
from msplit.engines.cuda.kernels.store import Store, file_of
from msplit.engines.cuda.options import EngineOptions
from msplit.engines.cuda.runtime.executable import CudaExecutable, Shared
from msplit.engines.cuda.runtime.executables import Compiled, executable_for, executable_of, untimed_plan
from msplit.engines.cuda.runtime.host import HostPart, StepCounter, Wrapped
from msplit.engines.cuda.runtime.memcpy import HostMemory
from msplit.engines.cuda.runtime.stream_program import arrange
from msplit.engines.cuda.stored import renewal
from msplit.engines.cuda.stored.program import Restored, StoredTables, Weights, pack, unpack
from msplit.engines.table_rows import LookupCounts
from msplit.schedule.plan import Plan

_KERNEL_BYTES = 10 << 10
"""Bytes that CUDA keeps on the device for each kernel of an instantiated graph; measured on an H200."""
_SEGMENT = 2 << 20
"""PyTorch takes memory from the device in multiples of that."""


@dataclass(frozen=True, eq=False)
class Packed:
    """A bucket as files hold it.

    Attributes:
        program: JSON.
        kernels: Name of a file -> its bytes.
        feeds: Example inputs of what the device runs.
        host: What the host runs around it; None for most models.
    """

    program: bytes
    kernels: Mapping[str, bytes]
    feeds: Arrays
    host: HostPart | None

    def host_files(self) -> dict[str, bytes]:
        """Files of what the host runs: the first one, without a name, names the others. None where it runs nothing.

        Raises:
            EngineError: No file can hold it.
        """
        if self.host is None:
            return {}
        data, files = self.host.packed()
        return {"": json.dumps(data, separators=(",", ":")).encode(), **files}


class Opened:
    """A build on its device: its weights, and what makes its buckets run.

    Args:
        weights: The bytes of the weights that the device has.
        kernels: The folder of compiled kernels. Its files are verified. None: this process has made them.
        options: Device, whether to capture, and whether kernels are chosen by measuring.
        ieee: See `Job`.
        fits: See `program.unpack`.
        tables: Bytes of tables that stay in the host's memory; see `StoredTables`.
        name: Hash of the weights.

    Attributes:
        notes: Remarks for the user.
    """

    def __init__(
        self,
        weights: np.ndarray[Any, Any],
        kernels: Path | None,
        options: EngineOptions,
        *,
        ieee: bool,
        fits: bool,
        tables: Mapping[int, np.ndarray[Any, Any]] = MappingProxyType({}),
        name: str = "",
    ) -> None:
        self._options, self._ieee, self._fits = options, ieee, fits
        place = torch.device(options.device)
        if options.on_gpu:
            place = Device.of(place).place
            if fits and kernels is not None:
                Store.of(place).add(kernels)
        self._place, self.steps = place, StepCounter()
        empty = torch.empty(0, dtype=torch.uint8, device=place)
        self._memory, why = held_once(weights, place, name) if len(weights) else (empty, "")
        self.notes = (f"processes of this GPU have weights of their own, and do not share them: {why}",) if why else ()
        self._tables = StoredTables(tables, place)
        self._pool: Any = torch.cuda.graph_pool_handle() if options.on_gpu else None

    def restore(self, program: bytes, feeds: Arrays, host: HostPart | None = None) -> Restored:
        """A bucket, not yet running, with inputs for it and what the host runs around it."""
        try:
            with Device.of(self._place).entered(), precision(self._ieee):
                found = unpack(program, self._memory, self._tables, feeds, fits=self._fits)
        except Unsupported as problem:
            raise ValueError(str(problem)) from None
        if host is None:
            return found
        host.shared.hold_to(feeds)
        compiled = replace(found.compiled, optimized=replace(found.compiled.optimized, host=host))
        return replace(found, compiled=compiled)

    def run(self, bucket: Restored, *, alone: bool = False, one_stream: bool = False) -> Executable:
        """Makes a bucket run. All of a build's graphs share one memory, since one of them runs at a time, but for one that is `alone`."""
        plan = _on_one(bucket) if one_stream else bucket.plan
        pool = None if alone else self._pool
        steps = self.steps if alone else None
        return executable_of(bucket.compiled, plan, self._options, ieee=self._ieee, shared=Shared(pool), steps=steps)

    def rewind(self, step: int = 0) -> None:
        """Has the next step of all that run alone, and of slots, draw the numbers of a step: of the first one, as a reference does."""
        self.steps.count = step

    def is_asynchronous(self, buckets: Iterable[Restored]) -> bool:
        """True if the device part of a step of these is begun and looked after, rather than run from beginning to end: it is a captured
        graph."""
        static = all(not bucket.compiled.dynamic for bucket in buckets)
        return self._options.on_gpu and self._options.capture and static

    def lookups(self, buckets: Iterable[Restored]) -> LookupCounts:
        """What counts rows that steps of these look up in tables of the host's memory."""
        every = [one for bucket in buckets for one in bucket.compiled.program.constants.values()]
        return Device.of(self._place).owned(HostTables).counter(every)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights, which all slots share."""
        return int(self._memory.numel())

    def free_bytes(self) -> int | None:
        """Memory of the device that nobody has; None where there is no GPU."""
        if self._options.on_gpu:
            empty_cache()
        return Device.of(self._place).free_bytes()

    def reserved_bytes(self) -> int:
        """Memory of the device that PyTorch holds for what this process uses. It keeps none besides."""
        if not self._options.on_gpu:
            return 0
        empty_cache()
        return int(torch.cuda.memory_reserved(self._place))

    def slot_bytes(self, buckets: Iterable[Restored]) -> int:
        """Bytes that a slot for these buckets takes at least: what the largest computes, inputs and outputs of all, and what CUDA
        keeps for each kernel of a graph. Workspaces of libraries, 32 MiB a stream, come to that, and what PyTorch can
        not use of its segments."""
        largest = kernels = ends = 0
        for bucket in buckets:
            program = bucket.compiled.program
            largest = max(largest, arrange(program, bucket.plan).peak_bytes)
            kernels += sum(step.launches for step in program.steps)
            ends += sum(math.prod(shape) * torch_dtype(dtype).itemsize for shape, dtype in program.fed.values())
        return largest + -largest % _SEGMENT + ends + kernels * _KERNEL_BYTES

    def urgencies(self) -> int | None:
        """Levels of priority that streams of the device have; None where there is no GPU."""
        return priorities(self._place) if self._options.on_gpu else None

    def slot(
        self,
        buckets: Mapping[Any, Restored],
        entries: Mapping[str, int],
        *,
        urgency: int = 0,
        one_stream: bool = False,
    ) -> CudaSlot:
        """Makes a slot for the device part of buckets that are asynchronous; see `CudaSlot`.

        Args:
            buckets: By batch, or by length and batch.
            urgency: Priority of its streams, 0 or more, the higher the more urgent; see `StreamPool.lease`.
        """
        plans = {batch: _on_one(bucket) if one_stream else bucket.plan for batch, bucket in buckets.items()}
        device = Device.of(self._place)
        streams = device.streams.lease(max(max(plan.streams, 1) for plan in plans.values()), -urgency)
        shared = Shared(torch.cuda.graph_pool_handle(), streams)
        executables = dict[Any, CudaExecutable]()
        try:
            # The largest is captured first: the others find room in its memory.
            for batch, bucket in sorted(buckets.items(), reverse=True):
                one = executable_for(bucket.compiled, plans[batch], self._options, ieee=self._ieee, shared=shared)
                assert isinstance(one, CudaExecutable)
                executables[batch] = one
        except BaseException:
            for one in executables.values():
                one.close()
            device.streams.give_back(streams)
            raise
        return CudaSlot(executables, entries, device, streams, self.steps)


class Builds:
    """Builds for one device: what they depend on, packing, and opening.

    Args:
        device: As PyTorch names it, such as "cuda:1".

    Attributes:
        weights: Weights of all that was packed.
    """

    harmless = ("driver", "triton", "memory")
    """Names of facts that a build was made for and that may differ: machine code and captured graphs do not depend on it."""
    open = Opened
    """Brings a build's weights and kernels to the device."""
    renewal = renewal
    """Has programs that run take over other values."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self.weights = Weights()

    @cached_property
    def made_for(self) -> Mapping[str, str]:
        """Describes what a build for the device depends on: it fits where all of it is equal, but for what is `harmless`."""
        return store.made_for(Device.of(self._device))

    def host_part(self, data: bytes, read: Callable[[str], bytes], where: str) -> HostPart:
        """The host part of a bucket as a build holds it, with a function that reads one of its files.

        Raises:
            EngineError: Some of its ops need TensorFlow, which is not installed.
            ValueError, TypeError, KeyError: That is no such data.
        """
        return HostPart.unpacked(json.loads(data), read, where)

    def fits(self, made_for: Mapping[str, str]) -> bool:
        """True if the device runs what was compiled and measured for another one."""
        return all(
            made_for.get(name, "") == self.made_for.get(name, "")
            for name in {*made_for, *self.made_for}.difference(self.harmless)
        )

    def pack(self, compiled: Compiled, job: Job, executable: Executable) -> Packed:
        """Packs what a job runs: what it was compiled to, and the kernels of its executable.

        Raises:
            EngineError: Something in it can not be stored.
        """
        program = pack(compiled, compiled.plan(job), self.weights)
        while isinstance(executable, Wrapped):
            executable = executable.device
        kernels = {}
        if isinstance(executable, CudaExecutable):
            kept = Store.of(torch.device(job.options.device))
            found = {key: kept.read(key) for key in sorted(executable.kernels)}
            kernels = {file_of(key): data for key, data in found.items() if data is not None}
        return Packed(program, kernels, compiled.optimized.feeds, compiled.optimized.host)


def _on_one(bucket: Restored) -> Plan:
    """The plan of a bucket with all of it on one stream."""
    return untimed_plan(bucket.compiled.program, np.minimum(bucket.plan.stream, 0))


class CudaSlot:
    """Runs one step at a time, on streams of its own. The graphs share memory for what they compute.

    Args:
        executables: By batch, or by length and batch.
        entries: Of each input, how many entries of its first axis belong to a row; 0 where it has none.
        streams: What the executables share; given back at the end.
        numbers: Of steps, where a model has random ops: all of its slots count together.

    Attributes:
        host_memory: Memory of the host that the GPU reads where it lies.
    """

    def __init__(
        self,
        executables: Mapping[Any, CudaExecutable],
        entries: Mapping[str, int],
        device: Device,
        streams: list[torch.cuda.Stream],
        numbers: Iterator[int],
    ) -> None:
        self._executables, self._entries = executables, {**entries, STEPS: 0}
        self._device, self._streams, self._numbers = device, streams, numbers
        self.host_memory = device.owned(HostMemory)
        self._counts = any(STEPS in one.program.feeds for one in executables.values())
        self._current = next(iter(executables.values()))

    def start(self, bucket: Any, feeds: Sequence[Feeds]) -> None:
        """Begins a step of a size on the rows of all these requests, one behind the other."""
        if self._counts:
            feeds = [{**feeds[0], STEPS: np.asarray(next(self._numbers), np.int64)}, *feeds[1:]]
        self._current = self._executables[bucket]
        self._current.start(feeds, self._entries)

    def over(self) -> bool:
        """Tell whether it is over. A fault of the device is raised as PyTorch has it."""
        return self._current.over()

    def wait(self) -> None:
        """Returns when it is over, without the interpreter's lock. See `over`."""
        self._current.wait()

    def outputs(self, into: Arrays | None = None) -> dict[str, NDArray[Any]]:
        """Outputs of the step that is over, of the caller's own; those that fit in these arrays."""
        return self._current.outputs(into)

    def outputs_on_device(self) -> dict[str, Any]:
        """Outputs as tensors on the device."""
        return self._current.outputs_on_device()

    def facts(self) -> Mapping[str, Any]:
        """Facts of the largest batch, and the bytes of all."""
        every = [one.facts() for one in self._executables.values()]
        return {**every[0], "pool_bytes": sum(int(one["pool_bytes"]) for one in every)}

    def close(self) -> None:
        """Frees graphs and memory, all at once: one that is destroyed may take with it what another one on its streams still uses."""
        # Of a device that failed nothing can be given back.
        with contextlib.suppress(torch.AcceleratorError, torch.cuda.CudaError):
            for one in self._executables.values():
                one.close()
        self._device.streams.give_back(self._streams)
        self._streams = []
