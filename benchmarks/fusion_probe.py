"""What pointwise fusion does to each benchmark model: kernels, device time on one and on eight streams, compile time, outputs.

    python benchmarks/fusion_probe.py GRAPHS [--models bert,lstm] [--batch small|large] [--device cpu]

GRAPHS is made by `benchmarks/models.py`. Needs no TensorFlow. "cold" compiles into an empty folder, "warm" is a second process' time on
the same folder. Kernels are counted by the profiler, in one step launched one by one; times are medians of the GPU's clock, in µs, of one
CUDA graph.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import models

from msplit import api, rules
from msplit.api.model import price
from msplit.engines.base import Job
from msplit.engines.cuda.engine import ENGINE
from msplit.measure.inputs import make_inputs

RUNS = 200
COLUMNS = ("model", "kernels", "1 str.", "fused", "8 str.", "fused", "groups", "ops", "cold s", "warm s", "max diff")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", type=Path)
    parser.add_argument("--models", default=",".join(models.BATCHES))
    parser.add_argument("--batch", choices=["small", "large"], default="small")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--ieee", action="store_true")
    parser.add_argument("--warm", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.warm:
        print(probe(arguments, arguments.models, time_it=False)["seconds"])
        return
    print("  ".join(f"{name:>9}" for name in COLUMNS), flush=True)
    notes: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        for name in arguments.models.split(","):
            try:
                found = probe(arguments, name, time_it=True)
                found["warm"] = warm(arguments, name)
            except Exception as problem:
                notes.append(f"{name}: {type(problem).__name__}: {str(problem)[:300]}")
                continue
            cells = [f"{found['before']}>{found['after']}", *(f"{value:.1f}" for value in found["times"])]
            cells += [str(found["groups"]), str(found["ops"]), f"{found['seconds']:.1f}", found["warm"]]
            print("  ".join(f"{cell:>9}" for cell in [name[:9], *cells, f"{found['difference']:.1e}"]), flush=True)
            notes += found["notes"]
    print("\n".join(notes))


def probe(arguments: argparse.Namespace, name: str, *, time_it: bool) -> dict[str, Any]:
    """One model, with and without fusion."""
    batch = models.BATCHES[name][0 if arguments.batch == "small" else -1]
    flat = api.load(models.fill(arguments.graphs, Path(tempfile.gettempdir()) / "msplit-models", name, batch))
    feeds = make_inputs(flat, {}, batch=batch, seed=0)
    sizes, costs = price(flat, batch=batch)
    options = {"device": arguments.device}
    one = Job(flat, np.zeros(len(flat), np.int32), 1, feeds, ieee=arguments.ieee, options=options, costs=costs)
    if not time_it:
        return {"seconds": compile_seconds(one)}
    ids = api.assign(flat, rules.load(models.RULES[name], streams=8), streams=8, priced=(sizes, costs)).ids
    eight = Job(flat, ids, 8, feeds, ieee=arguments.ieee, options=options, costs=costs)
    times, outputs, facts = [], [], {}
    for job in (one, eight):
        for fuse in (False, True):
            executable = ENGINE.build(with_options(job, fuse=fuse))
            outputs.append(executable.step(feeds))
            device = executable.device_times(RUNS)
            times.append(float(np.median(device)) * 1e6 if device else float("nan"))
            facts = executable.facts()
            executable.close()
    difference = max(
        (
            float(np.abs(value.astype(np.float64) - other[key]).max())
            for other in outputs[1:]
            for key, value in outputs[0].items()
        ),
        default=0.0,
    )
    counts = [launched(with_options(one, fuse=fuse), feeds) for fuse in (False, True)]
    refused = [f"{name}: {count} groups not fused: {why}" for why, count in facts.get("not_fused", {}).items()]
    most = ", ".join(f"{count} {kernel[:38]}" for kernel, count in counts[1].most_common(3))
    return {
        "before": sum(counts[0].values()),
        "after": sum(counts[1].values()),
        "times": times,
        "groups": facts["fused_groups"],
        "ops": facts["fused_ops"],
        "seconds": facts.get("compile_seconds", 0.0),
        "difference": difference,
        "notes": [f"{name}: left: {most}", *refused],
    }


def compile_seconds(job: Job) -> float:
    executable = ENGINE.build(with_options(job, fuse=True))
    try:
        return float(executable.facts().get("compile_seconds", 0.0))
    finally:
        executable.close()


def with_options(job: Job, **options: Any) -> Job:
    return replace(job, options={**job.options, **options})


def launched(job: Job, feeds: Any) -> Counter[str]:
    """The kernels of one step, copies of inputs and outputs left out."""
    import torch

    executable = ENGINE.build(with_options(job, capture=False))
    executable.step(feeds)
    found: Counter[str] = Counter()
    if job.options["device"] == "cuda":
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            executable.launch()
        for event in profile.events():
            if str(event.device_type).endswith("CUDA") and not event.name.startswith(("Memcpy", "Memset")):
                found[event.name] += 1
    else:
        found["steps"] = int(executable.facts()["kernels"])
    executable.close()
    return found


def warm(arguments: argparse.Namespace, name: str) -> str:
    flags = ["--models", name, "--batch", arguments.batch, "--device", arguments.device, "--warm"]
    command = [sys.executable, __file__, str(arguments.graphs), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "failed" if done.returncode else f"{float(done.stdout.split()[-1]):.1f}"


if __name__ == "__main__":
    main()
