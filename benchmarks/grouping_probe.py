"""What merging alike branches does to each benchmark model: kernels, µs on one stream, outputs, and which kernels were chosen.

    python benchmarks/grouping_probe.py GRAPHS [--models mmoe,lstm] [--device cpu] [--ieee] [--no-fuse]

GRAPHS is made by `benchmarks/models.py`. Needs no TensorFlow. Each model runs as it is, fused, grouped, and both, on one stream as one CUDA
graph. Times are medians in µs: by the device's clock, and by the host's with inputs on the device already. "diff" is the largest
difference from the outputs as they are, over the largest output.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import models

from msplit import api
from msplit.engines.base import Job
from msplit.engines.cuda.engine import CudaEngine
from msplit.measure.inputs import make_inputs

MODELS = "mmoe:128,mmoe:1,towers:128,towers:1,dlrm:128,dlrm:1,deepfm:128,deepfm:1,lstm:1,lstm:16,bert:1"
RUNS = 200


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", type=Path)
    parser.add_argument("--models", default=MODELS, help="name:batch, with commas between")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--ieee", action="store_true")
    parser.add_argument("--no-fuse", action="store_true", help="leave out fusion, which takes time to compile")
    arguments = parser.parse_args()
    for wanted in arguments.models.split(","):
        name, _, batch = wanted.partition(":")
        try:
            print(probe(arguments, name, int(batch or 1)), flush=True)
        except Exception as problem:
            print(f"{wanted}: {type(problem).__name__}: {str(problem)[:300]}", flush=True)
    print("products: us as measured, the chosen one first")
    from msplit.engines.cuda import batched

    largest = {key[1:]: (key, made) for key, made in sorted(batched.chosen().items(), key=lambda item: item[0][0])}
    for key, (way, times) in largest.values():  # of the same layers in groups of several sizes, the largest group
        members, _, tf32, activation, layer, second, *_ = key
        what = f"{1 << members} x {layer[0]}x{layer[1]}x{layer[2]}{' shared' if layer[3] else ''}{' two' if second else ''} {activation}"
        others = sorted((value, other) for other, value in times.items() if other != way)
        measured = ", ".join(f"{other} {value:.1f}" for value, other in others[:2])
        library = f", library {times['library']:.1f}" if "library" not in measured and way != "library" else ""
        if times:
            print(f"  {what}{' tf32' if tf32 else ''}: {way} {times[way]:.1f} | {measured}{library}")


def probe(arguments: argparse.Namespace, name: str, batch: int) -> str:
    """One line: per way to make kernels their number, device and host µs."""
    path = models.fill(arguments.graphs, Path(tempfile.gettempdir()) / "msplit-models", name, batch)
    flat = api.load(path)
    feeds = make_inputs(flat, {}, batch=batch, seed=0)
    first: dict[str, Any] = {}
    cells, worst, seconds = [], 0.0, []
    facts: Any = {}
    ways = [("as is", {}), ("grouped", {"group": True})]
    if not arguments.no_fuse:
        ways[1:] = [("fused", {"fuse": True}), *ways[1:], ("both", {"group": True, "fuse": True})]
    for label, options in ways:
        began = time.perf_counter()
        job = Job(
            flat,
            np.zeros(len(flat), np.int32),
            1,
            feeds,
            ieee=arguments.ieee,
            options={"device": arguments.device, **options},
        )
        executable = CudaEngine().build(job)
        seconds.append(time.perf_counter() - began)
        for factor in (0.5, 1.0):
            outputs = executable.step({key: (value * factor).astype(value.dtype) for key, value in feeds.items()})
        first = first or outputs
        for key, value in outputs.items():
            scale = max(float(np.abs(first[key]).max()), 1e-30)
            worst = max(worst, float(np.abs(value.astype(np.float64) - first[key]).max()) / scale)
        device = executable.device_times(RUNS)
        host = []
        for _ in range(RUNS if device else 1):
            start = time.perf_counter()
            executable.launch()
            host.append(time.perf_counter() - start)
        facts = executable.facts()
        clock = f"{np.median(device) * 1e6:.1f}/{np.median(host) * 1e6:.1f}" if device else "-"
        cells.append(f"{label} {facts['kernels']} kernels {clock}")
        executable.close()
    sizes = ", ".join(f"{count} of {size}" for size, count in list(facts["group_sizes"].items())[:3])
    times = "/".join(f"{value:.1f}" for value in seconds)
    return f"{name} b{batch}: {'; '.join(cells)}; {facts['groups']} groups ({sizes}); diff {worst:.0e}; {times} s"


if __name__ == "__main__":
    main()
