"""What writing Concats' parts in place, prologues, small layers and the ends of classifiers in one kernel are worth: a model with and
without, on the GPU, TF32.

    python benchmarks/copies.py GRAPHS [MODEL:BATCH …] [--variant "with all" --variant "layers apart" …]

GRAPHS is made by `benchmarks/models.py` or `benchmarks/foreign.py`.

Per variant: kernels, convolutions of ours, Concats left, µs of a step by the host's clock and by the device's on one stream, and
how far outputs are from those in IEEE precision (root of the mean square, relative).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import models

from msplit.core.arguments import Precision
from msplit.cost.profile import Workload
from msplit.engines.base import Job
from msplit.engines.cuda.engine import ENGINE, CudaEngine
from msplit.engines.cuda.ir.windows import TILES
from msplit.engines.cuda.options import EngineOptions, KernelMode
from msplit.engines.cuda.passes import pipeline
from msplit.flatten.build import flatten
from msplit.formats import read
from msplit.inputs.make import feeds_for

NEVER = {
    "writes_on": lambda device, measure: lambda graph, op: False,
    "prologues_on": lambda device, measure: lambda graph, found: (False, None),
    "mlps_on": lambda device, measure: lambda graph, found: (False, None),
    "squeezes_on": lambda device, measure: lambda graph, convolution, layers: (False, None),
}
"""What decides in `pipeline`, and what decides against it."""
VARIANTS = {
    "with all": (),
    "layers apart": ("squeezes_on",),
    "no small layers": ("mlps_on", "squeezes_on"),
    "tail apart": ("tails",),
    "no prologues": ("prologues_on",),
    "not in place": ("writes_on",),
    "with none": tuple(NEVER),
}
"""What is left out."""
STEPS = 200
OPTIONS = EngineOptions(mode=KernelMode.FUSED_AND_GROUPED, layout="nhwc")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", type=Path)
    parser.add_argument("rows", nargs="*", default=["densenet121:1", "efficientnet_b0:1", "inception_v3:1"])
    parser.add_argument("--variant", action="append", choices=VARIANTS, help="only these; all by default")
    arguments = parser.parse_args()
    decides = {name: getattr(pipeline, name) for name in NEVER}
    for row in arguments.rows:
        name, _, batch = row.partition(":")
        path = models.fill(arguments.graphs, Path(tempfile.gettempdir()) / "filled", name, int(batch))
        expected: dict[str, Any] = {}
        for variant in arguments.variant or VARIANTS:
            for what, decide in decides.items():
                setattr(pipeline, what, NEVER[what] if what in VARIANTS[variant] else decide)
            if "tails" in VARIANTS[variant]:
                pipeline.mlps_on = tail_apart(decides["mlps_on"])
            flat = flatten(read(path))  # what is compiled belongs to it
            feeds = feeds_for(flat, Workload(int(batch)))
            job = Job(flat, np.zeros(len(flat), np.int32), 1, feeds, options=OPTIONS)
            expected = expected or step(replace(job, precision=Precision.IEEE))[0]
            found, host, device = step(replace(job, precision=Precision.TF32))
            ops = [
                one.op
                for one in CudaEngine().compile(replace(job, precision=Precision.TF32)).program.steps
                if one.launches
            ]
            ours, left = sum(TILES in op.attrs for op in ops), sum(op.op == "ConcatV2" for op in ops)
            off = max(float(np.sqrt(((found[n] - e) ** 2).mean() / (e**2).mean())) for n, e in expected.items())
            print(f"{row:18} {variant:15} {len(ops):4} kernels, {ours:3} ours, {left:2} Concats, "
                  f"host {host:6.1f}, device {device:6.1f} µs, off {off:.4f}", flush=True)  # fmt: skip


def tail_apart(decides: Any) -> Any:
    """What decides on small layers, but for the mean, one dense layer and the softmax behind it: against these."""

    def decide_on(device: Any, measure: bool) -> Any:
        decide = decides(device, measure=measure)
        return lambda graph, found: (False, None) if len(found.layers) == 1 else decide(graph, found)

    return decide_on


def step(job: Job) -> tuple[dict[str, Any], float, float]:
    """Outputs, and µs of a step by the host and by the device."""
    executable = ENGINE.build(job)
    outputs = executable.step(job.feeds)
    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        executable.step(job.feeds)
        times.append(time.perf_counter() - start)
    device = executable.device_times(STEPS)
    executable.close()
    return outputs, 1e6 * float(np.median(times)), 1e6 * float(np.median(device)) if device else float("nan")


if __name__ == "__main__":
    main()
