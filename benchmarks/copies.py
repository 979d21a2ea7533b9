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
import torch

sys.path.insert(0, str(Path(__file__).parent))
import models

from msplit.core.arguments import Precision
from msplit.cost.profile import Workload
from msplit.engines.base import Job
from msplit.engines.cuda.engine import ENGINE, CudaEngine
from msplit.engines.cuda.ir.windows import TILES
from msplit.engines.cuda.options import EngineOptions, KernelMode
from msplit.engines.cuda.passes.convolution.concat_into import concat_into
from msplit.engines.cuda.passes.convolution.fuse_mlp import MLPS, SQUEEZES
from msplit.engines.cuda.passes.convolution.fuse_prologue import PROLOGUES
from msplit.engines.cuda.passes.measured import Decide, deciding
from msplit.flatten.build import flatten
from msplit.formats import read
from msplit.inputs.make import feeds_for


def never(graph: Any, found: Any) -> tuple[bool, None]:
    """Decides against a fusion."""
    return False, None


def tail_apart(graph: Any, found: Any) -> tuple[bool, Any]:
    """Decides on small layers, against the mean, one dense layer and the softmax behind it, and on others by measurement."""
    return never(graph, found) if len(found.layers) == 1 else replace(MLPS).decide(graph, found, torch.device("cuda"))


VARIANTS: dict[str, dict[Any, Decide]] = {
    "with all": {},
    "layers apart": {SQUEEZES: never},
    "no small layers": {MLPS: never, SQUEEZES: never},
    "tail apart": {MLPS: tail_apart},
    "no prologues": {PROLOGUES: never},
    "not in place": {concat_into: never},
    "with none": dict.fromkeys((concat_into, PROLOGUES, MLPS, SQUEEZES), never),
}
"""Fusions that are decided otherwise than by measurement."""
STEPS = 200
OPTIONS = EngineOptions(mode=KernelMode.FUSED_AND_GROUPED, layout="nhwc")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", type=Path)
    parser.add_argument("rows", nargs="*", default=["densenet121:1", "efficientnet_b0:1", "inception_v3:1"])
    parser.add_argument("--variant", action="append", choices=VARIANTS, help="only these; all by default")
    arguments = parser.parse_args()
    for row in arguments.rows:
        name, _, batch = row.partition(":")
        path = models.fill(arguments.graphs, Path(tempfile.gettempdir()) / "filled", name, int(batch))
        expected: dict[str, Any] = {}
        for variant in arguments.variant or VARIANTS:
            flat = flatten(read(path))  # what is compiled belongs to it
            feeds = feeds_for(flat, Workload(int(batch)))
            job = Job(flat, np.zeros(len(flat), np.int32), 1, feeds, options=OPTIONS)
            with deciding({**VARIANTS[variant]}):
                expected = expected or step(replace(job, precision=Precision.IEEE))[0]
                found, host, device = step(replace(job, precision=Precision.TF32))
                steps = CudaEngine().compile(replace(job, precision=Precision.TF32)).program.steps
            ops = [one.op for one in steps if one.launches]
            ours, left = sum(TILES in op.attrs for op in ops), sum(op.op == "ConcatV2" for op in ops)
            off = max(float(np.sqrt(((found[n] - e) ** 2).mean() / (e**2).mean())) for n, e in expected.items())
            print(f"{row:18} {variant:15} {len(ops):4} kernels, {ours:3} ours, {left:2} Concats, "
                  f"host {host:6.1f}, device {device:6.1f} µs, off {off:.4f}", flush=True)  # fmt: skip


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
