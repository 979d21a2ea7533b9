"""From a job for several devices to one that is compiled once and runs on each of them."""

from __future__ import annotations

from dataclasses import replace

from msplit.engines.base import Executable, Job
from msplit.engines.cuda.compile import compile_job
from msplit.engines.cuda.coverage import shared_rows
from msplit.engines.cuda.runtime.data_parallel import Batch, DataParallel
from msplit.engines.cuda.runtime.executables import executable_of
from msplit.engines.cuda.stored.program import pack
from msplit.engines.cuda.stored.rung import Builds, Opened


def build(job: Job) -> Executable:
    """Makes a job ready to run on all of its devices. Kernels are chosen on the first one; where another is of the same kind, it runs the
    very same ones.

    Raises:
        EngineError: Its rows can not be shared, or see `compile_job`.
    """
    first, *others = job.options.devices
    count, rows = shared_rows(job)
    batch = Batch(count, len(job.options.devices), rows.inputs, rows.outputs)
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
