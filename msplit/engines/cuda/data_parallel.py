"""From a job for several devices to one that is compiled once and runs on each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from msplit.analysis.rows.proof import independent_rows
from msplit.engines.base import Executable, Job
from msplit.engines.cuda.compile import compile_job
from msplit.engines.cuda.device.device import Device
from msplit.engines.cuda.kernels.store import made_for
from msplit.engines.cuda.runtime.data_parallel import Batch, DataParallel
from msplit.engines.cuda.runtime.executables import executable_of
from msplit.engines.cuda.stored.program import pack
from msplit.engines.cuda.stored.rung import HARMLESS, Opened
from msplit.engines.cuda.stored.weights import Weights
from msplit.errors import EngineError, MsplitError


def build(job: Job) -> Executable:
    """Makes a job ready to run on all of its devices. Kernels are chosen on the first one; where another is of the same kind, it runs the
    very same ones.

    Raises:
        EngineError: Its rows can not be shared, or see `compile_job`.
    """
    first, *others = job.options.devices
    batch = shared_batch(job)
    part = replace(job, feeds=batch.cut(job.feeds)[0], options=job.options.on(first))
    compiled = compile_job(part)
    plan = compiled.plan(part)
    replicas = [executable_of(compiled, plan, part.options, ieee=job.precision.ieee)]
    try:
        weights = Weights()
        packed = pack(compiled, plan, weights)
        memory, host = weights.memory(), compiled.optimized.host
        for device in others:
            options = job.options.on(device)
            opened = Opened(memory, None, options, ieee=job.precision.ieee, fits=are_alike(first, device))
            replicas.append(opened.run(opened.restore(packed, compiled.optimized.feeds, host), alone=True))
    except BaseException:
        for one in replicas:
            one.close()
        raise
    return DataParallel(replicas, batch, job.feeds, job.options.devices)


def shared_batch(job: Job) -> Batch:
    """How the job's devices share its rows, which are proved to be independent.

    Raises:
        EngineError: They can not; it says what stands in the way.
    """
    count = len(job.options.devices)
    try:
        found = independent_rows(job.flat, shapes={name: value.shape for name, value in job.feeds.items()})
        found.check()
    except MsplitError as problem:
        raise EngineError(
            f"{count} devices can not share a step: {problem.what}",
            details=problem.details,
            fix="run it on one; a pool on several answers each request on one of them (`msplit serve --gpus`)",
        ) from problem
    rows = min(job.feeds[name].shape[0] // entries for name, entries in found.inputs.items() if entries)
    if rows < count:
        raise EngineError(f"{count} devices can not share a batch of {rows}", fix="give a larger batch, or fewer GPUs")
    return Batch(rows, count, found.inputs, found.outputs)


def are_alike(first: str, other: str) -> bool:
    """Whether a device runs what was compiled and measured for another one."""
    one, two = (made_for(Device.of(torch.device(device))) for device in (first, other))
    return all(one[name] == two[name] for name in one if name not in HARMLESS)


def missing(devices: Sequence[str]) -> str | None:
    """What there is in place of devices that are not there; None where all are. CPUs stand in for as many GPUs as are asked for."""
    asked = [torch.device(device) for device in devices]
    there = torch.cuda.device_count()
    lost = [device for device in asked if device.type == "cuda" and not 0 <= (device.index or 0) < there]
    if not lost:
        return None
    known = ", ".join(map(str, range(there)))
    return f"there is no GPU {lost[0].index}: PyTorch sees {there} ({known})" if there else "PyTorch sees no GPU"
