"""msplit's best kernels for models in a precision, on one stream and on several: figures of a short visit, without another runtime.

    python benchmarks/best.py GRAPHS bert:128:bf16 inception_v3:16:fp16     # model:batch:precision; GRAPHS from models.py

Needs a GPU and no TensorFlow. Prints a row each: µs by the device's and by the host's clock (medians of 60 steps), kernels, and how far
outputs are from one stream of plain kernels in IEEE float32 (root mean square, relative).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import models

from msplit import api
from msplit.assignment.model import price
from msplit.core.arguments import Precision
from msplit.cost.profile import Workload
from msplit.engines.base import Job
from msplit.engines.cuda.autotune import conv
from msplit.engines.cuda.engine import ENGINE
from msplit.engines.cuda.options import EngineOptions, KernelMode
from msplit.inputs.make import feeds_for
from msplit.run.request import RunRequest
from msplit.run.tensorflow_rows import assignments_for
from msplit.verify.compare import compare

STEPS = 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", type=Path)
    parser.add_argument("items", nargs="+", help="model:batch:precision")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--late", action="store_true", help="no kernel starts before the one in front of it is over")
    arguments = parser.parse_args()
    conv.EARLY = not arguments.late
    os.environ["MSPLIT_KEEP_CHOICES"] = "0"  # what an earlier run chose is not asked
    print("| model | batch | precision | streams | device, µs | host, µs | kernels | distance | ready after, s |")
    print("| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for item in arguments.items:
        name, batch, precision = item.split(":")
        for row in rows(arguments.graphs, name, int(batch), Precision(precision), arguments.streams):
            print(f"| {name} | {batch} | {precision} | {row} |", flush=True)


def rows(graphs: Path, name: str, batch: int, precision: Precision, streams: int) -> Any:
    """A row for one stream and one for several."""
    flat = api.load(models.fill(graphs, Path("/tmp/msplit-models"), name, batch))
    work = Workload(batch=batch)
    job = Job(flat, np.zeros(len(flat), np.int32), 1, feeds_for(flat, work, seed=0), options=EngineOptions("cuda"))
    exact = ENGINE.build(replace(job, precision=Precision.IEEE, options=replace(job.options, measure=False)))
    expected = exact.step(job.feeds)
    exact.close()
    sizes, costs = price(flat, work)
    assigned, _ = assignments_for(flat, sizes, costs, RunRequest.of(streams=[streams], ruleset=models.RULES[name]))
    options = replace(job.options, mode=KernelMode.FUSED_AND_GROUPED)
    job = replace(job, costs=costs, options=options, precision=precision)
    for count, ids, _ in [(1, job.ids, None), *assigned]:
        yield measured(replace(job, ids=ids, streams=count), expected)


def measured(job: Job, expected: Mapping[str, Any]) -> str:
    """The cells of a job."""
    began = time.perf_counter()
    built = ENGINE.build(job)
    ready = time.perf_counter() - began
    found = compare(built.step(job.feeds), expected, precision=job.precision)
    host = []
    for _ in range(STEPS):
        start = time.perf_counter()
        built.step(job.feeds)
        host.append(time.perf_counter() - start)
    device = np.median(built.device_times(STEPS) or [np.nan])
    distance = max(one.distance for one in found.outputs)
    kernels = built.facts()["kernels"]
    built.close()
    times = f"{device * 1e6:.0f} | {np.median(host) * 1e6:.0f}"
    return f"{job.streams} | {times} | {kernels} | {distance:.2g} | {ready:.0f}"


if __name__ == "__main__":
    main()
