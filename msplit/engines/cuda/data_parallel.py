"""From a job for several devices to one that is compiled once and runs on each of them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from msplit.analysis.rows.walk import Rows
from msplit.engines.base import Arrays, Executable, Feeds, Job, is_array, is_tensor, refuse_fed
from msplit.engines.cuda.compile import compile_job
from msplit.engines.cuda.runtime.executables import executable_of
from msplit.engines.cuda.runtime.input_staging import taken
from msplit.engines.cuda.stored.builds import Builds, Opened
from msplit.engines.cuda.stored.program import pack
from msplit.errors import EngineError


def build(job: Job, count: int, rows: Rows) -> Executable:
    """Makes a job ready to run on all of its devices. Kernels are chosen on the first one; where another is of the same kind, it runs the
    very same ones.

    Args:
        count: Rows of the batch that they share.
        rows: Inputs and outputs that carry them, proved to be independent (`coverage.shared_rows`).

    Raises:
        EngineError: See `compile_job`.
    """
    first, *others = job.options.devices
    batch = SharedBatch(count, len(job.options.devices), rows.inputs, rows.outputs)
    part = replace(job, feeds=batch.cut(job.feeds)[0], options=job.options.on(first))
    compiled = compile_job(part)
    plan = compiled.plan(part)
    replicas = [executable_of(compiled, plan, part.options, ieee=job.precision.ieee)]
    try:
        builds = Builds(first)
        packed = pack(compiled, plan, builds.weights)
        memory, host = builds.weights.memory(), compiled.optimized.host
        for device in others:
            fits = Builds(device).fits(builds.made_for)
            opened = Opened(memory, None, job.options.on(device), ieee=job.precision.ieee, fits=fits)
            replicas.append(opened.run(opened.restore(packed, compiled.optimized.feeds, host), alone=True))
    except BaseException:
        for one in replicas:
            one.close()
        raise
    return DataParallel(replicas, batch, job.feeds, job.options.devices)


T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class SharedBatch:
    """A batch whose rows are independent, and how many devices share it.

    Shares differ by one row at most. All devices run steps of as many rows as the largest has: others are filled up with their own first
    row, for what is legal in a row is legal there, too.

    Attributes:
        rows: Of the whole batch; at least one for each device.
        devices: How many.
        inputs: By name, how many entries of the first axis belong to a row; 0: none, every device gets all of it.
        outputs: Likewise of outputs; 0: it depends on no row, and the first device's is taken.
    """

    rows: int
    devices: int
    inputs: Mapping[str, int]
    outputs: Mapping[str, int]

    @functools.cached_property
    def shares(self) -> tuple[range, ...]:
        """The rows of each device, in order."""
        ends = [self.rows * number // self.devices for number in range(self.devices + 1)]
        return tuple(map(range, ends, ends[1:]))

    @functools.cached_property
    def step_rows(self) -> int:
        """Rows of each device's step."""
        return -(-self.rows // self.devices)

    def cut(self, feeds: Feeds) -> list[dict[str, Any]]:
        """The inputs of each device: views where its share is a whole step."""
        parts: list[dict[str, Any]] = [{} for _ in range(self.devices)]
        for name, value in feeds.items():
            count = self.inputs[name]
            if count and is_tensor(value):
                value = taken(name, value)
            for part, share in zip(parts, self.shares, strict=True):
                part[name] = self._part(value, share, count) if count else value
        return parts

    def _part(self, value: Any, share: range, count: int) -> Any:
        first, missing = share.start * count, self.step_rows - len(share)
        if not missing:
            return value[first : share.stop * count]
        return value[[*range(first, share.stop * count), *[*range(first, first + count)] * missing]]

    def join(self, outputs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The outputs of the whole batch: arrays, or tensors on the device of the first."""
        return {
            name: self._whole([one[name] for one in outputs], self.outputs[name]) if self.outputs[name] else value
            for name, value in outputs[0].items()
        }

    def _whole(self, values: Sequence[Any], count: int) -> Any:
        shares = [value[: len(share) * count] for value, share in zip(values, self.shares, strict=True)]
        if is_array(shares[0]):
            return np.concatenate(shares)
        return torch.cat([one.to(shares[0].device) for one in shares])


class DataParallel(Executable):
    """Executable that shares each batch among devices. One thread begins the steps of all devices, and then waits for all.

    What can not be begun (launched kernel by kernel, or with a part that runs on the host) has a thread for each device instead.

    Args:
        replicas: What runs a share, one for each device.
        feeds: Example inputs of the whole batch: they fix shapes and dtypes.
        devices: Their names.
    """

    def __init__(
        self, replicas: Sequence[Executable], batch: SharedBatch, feeds: Arrays, devices: Sequence[str]
    ) -> None:
        self._replicas, self._batch, self._devices = tuple(replicas), batch, tuple(devices)
        self._like = {name: (value.dtype, value.shape) for name, value in feeds.items()}
        self._threads = ThreadPoolExecutor(len(self._replicas), thread_name_prefix="msplit-device")

    def step(self, feeds: Feeds) -> dict[str, Any]:
        """A step of the whole batch."""
        parts = self._parts(feeds)
        outputs = self._begun(parts)
        if outputs is None:
            outputs = self._each(lambda replica, part: replica.step(part), parts)
        return self._batch.join(outputs)

    def _begun(self, parts: Sequence[Feeds]) -> list[Mapping[str, NDArray[Any]]] | None:
        """Outputs of all devices; None where one of them can not begin."""
        running: list[Executable] = []
        try:
            for replica, part in zip(self._replicas, parts, strict=True):
                if not replica.begin(part):
                    return None
                running.append(replica)
            return [running.pop(0).end() for _ in parts]
        finally:  # the next step must not meet one that is left
            for one in running:
                with contextlib.suppress(EngineError, RuntimeError):
                    one.end()

    def step_on_device(self, feeds: Feeds) -> dict[str, Any]:
        """A step whose outputs are joined on the first device: see `engines.base.Executable`."""
        outputs = self._each(lambda replica, part: replica.step_on_device(part), self._parts(feeds))
        return self._batch.join(outputs)

    def _parts(self, feeds: Feeds) -> Sequence[Feeds]:
        """The inputs of each device.

        Raises:
            EngineError: An input is missing, or has another shape or type than the one that was prepared.
        """
        for name, (dtype, shape) in self._like.items():
            value: Any = feeds.get(name)
            if not (is_array(value) and value.shape == shape and value.dtype == dtype):
                # Or it is a tensor, or text.
                refuse_fed(feeds, {key: (kind.name, size) for key, (kind, size) in self._like.items()})
                break
        return self._batch.cut({name: feeds[name] for name in self._like})

    def _each(self, do: Callable[[Executable, Feeds], T], parts: Sequence[Feeds]) -> list[T]:
        """Does something on all devices at once. What failed on one is raised when all are done."""
        going = [self._threads.submit(do, replica, part) for replica, part in zip(self._replicas, parts, strict=True)]
        problems = [one.exception() for one in going]
        for problem in problems:
            if problem is not None:
                raise problem
        return [one.result() for one in going]

    def launch(self) -> None:
        """Runs one step on all devices, on the inputs of the last one."""
        self._each(lambda replica, _: replica.launch(), [{}] * len(self._replicas))

    def device_times(self, count: int) -> list[float] | None:
        """Seconds of each step that the slowest device took, by its own clock."""
        every = self._each(lambda replica, _: replica.device_times(count), [{}] * len(self._replicas))
        known = [times for times in every if times is not None]
        return [max(times) for times in zip(*known, strict=True)] if len(known) == len(every) else None

    def facts(self) -> Mapping[str, Any]:
        """Those of the first device, and what is shared how."""
        return {**self._replicas[0].facts(), "devices": list(self._devices), "step_rows": self._batch.step_rows}

    def close(self) -> None:
        """Closes what runs on every device."""
        self._threads.shutdown()
        for replica in self._replicas:
            replica.close()
