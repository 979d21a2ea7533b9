"""What merged siblings do for GoogLeNet and Inception-v3 on a GPU.

    python benchmarks/siblings_probe.py GRAPHS [--models googlenet,inception_v3]

GRAPHS is made by `benchmarks/models.py`. Needs no TensorFlow. Batch 1, plain, fused, and fused and grouped on 1 and 8 streams: kernels
and µs by the device's clock. Then each set of siblings with what was measured of it, and which kernels were chosen. The models run in
processes of their own first, side by side, which fill Triton's cache: nothing of theirs is printed.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

WAYS: tuple[tuple[str, dict[str, bool]], ...] = (
    ("plain", {}),
    ("fused", {"fuse": True}),
    ("fused and grouped", {"fuse": True, "group": True}),
)
STREAMS = (1, 8)
ROUNDS = 5
STEPS = 40


def build(graphs: Path, name: str) -> tuple[dict[tuple[str, int], Any], dict[str, np.ndarray]]:
    """Each way on each number of streams, and the inputs; what it is made of is printed."""
    import models

    from msplit import api, rules
    from msplit.decide.model import price
    from msplit.engines.base import Job
    from msplit.engines.cuda.engine import CudaEngine
    from msplit.inputs.make import make_inputs

    flat = api.load(models.fill(graphs, Path(tempfile.gettempdir()) / "msplit-models", name, 1))
    sizes, costs = price(flat, batch=1)
    feeds = make_inputs(flat, {}, batch=1, seed=0)
    ids = {
        streams: api.assign(flat, rules.load(models.RULES[name], streams=streams), priced=(sizes, costs)).ids
        for streams in STREAMS
    }
    expected: dict[str, np.ndarray] = {}
    engine = CudaEngine()
    runs: dict[tuple[str, int], Any] = {}
    for label, options in WAYS:
        began = time.perf_counter()
        for streams in STREAMS:
            job = Job(flat, ids[streams], streams, feeds, options=options, costs=costs)
            runs[label, streams] = engine.build(job)
            outputs = runs[label, streams].step(feeds)
            expected = expected or {key: value.copy() for key, value in outputs.items()}
            worst = max(
                float(np.abs(value - expected[key]).max() / np.abs(expected[key]).max())
                for key, value in outputs.items()
            )
            assert worst < 2e-2, f"{name} {label} {streams}: outputs differ by {worst}"
        facts = runs[label, 1].facts()
        print(
            f"{name} {label}: {facts['kernels']} kernels, layout {facts['layout']}, groups {facts.get('group_sizes')}, "
            f"peak {facts['peak_bytes'] / 1e6:.1f} MB, diff {worst:.0e}, {time.perf_counter() - began:.1f} s",
            flush=True,
        )
    return runs, feeds


def clock(name: str, runs: dict[tuple[str, int], Any]) -> None:
    """Steps by the device's clock, ways taking turns."""
    times: dict[tuple[str, int], list[float]] = {key: [] for key in runs}
    for _ in range(ROUNDS):
        for key, executable in runs.items():
            times[key] += list(executable.device_times(STEPS))[5:]
    for (label, streams), found in times.items():
        print(f"{name} {label}, {streams} streams: {1e6 * statistics.median(found):.1f} µs", flush=True)


def kernels() -> None:
    """What was measured and chosen in this process."""
    from msplit.engines.cuda.autotune import conv
    from msplit.engines.cuda.passes import merged_conv

    for key, times in merged_conv.measured().items():
        shape, window, widths = key[:3]
        if times is None:
            print(f"siblings {shape} {window} {widths}: none right")
            continue
        print(
            f"siblings {shape} {window} {widths}: {tuple(times.tiles)} {times.merged:.1f}/{times.loaded:.1f}, one by one "
            f"{times.one_by_one:.1f}/{times.one_by_one_loaded:.1f}, beside {times.beside:.1f}{' MERGED' if times.wins() else ''}"
        )
    chosen = Counter(tuple(tiles) if tiles else "library" for tiles in conv._chosen.values())
    print("chosen:", chosen.most_common())


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", type=Path)
    parser.add_argument("--models", default="googlenet,inception_v3")
    parser.add_argument("--warm", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.warm:
        build(arguments.graphs, arguments.warm)
        return
    began = time.perf_counter()
    names = arguments.models.split(",")
    command = [sys.executable, __file__, str(arguments.graphs), "--warm"]
    helpers = [subprocess.Popen([*command, name], stdout=subprocess.DEVNULL) for name in names]
    for helper in helpers:
        helper.wait()
    print(f"compiled after {time.perf_counter() - began:.1f} s", flush=True)
    for name in names:
        runs, _ = build(arguments.graphs, name)
        clock(name, runs)
        for executable in runs.values():
            executable.close()
    kernels()
    print(f"done after {time.perf_counter() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
