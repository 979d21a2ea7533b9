"""Joined lookups and grouped products against streams: µs per step, kernels, outputs; and the kernel of all columns by itself.

    python benchmarks/lookup_probe.py GRAPHS [--models deepfm:128,towers:128] [--device cpu] [--tiles]

GRAPHS is made by `benchmarks/models.py`. Needs no TensorFlow. Per model: 8 streams with the kernels as they are, 8 streams fused, then
fused and grouped on one stream and on 8. A cell is device / launch / host: medians in µs of a captured step by the GPU's clock, by the
host's with inputs on the device, and by the host's with feeding and fetching. "diff" is the largest difference from the outputs on one
stream as they are, over the largest output. Below are the kernels of the grouped step on one stream, in µs each by the profiler, and what
the model's products were decided to run with ("=>"), with the µs, alone, of everything that was measured for it. With
--tiles, the kernel of all columns alone, in a CUDA graph of ten, for several ways to cut it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import models

from msplit import api, rules
from msplit.decide.model import price
from msplit.engines.base import Job
from msplit.engines.cuda.engine import ENGINE
from msplit.inputs.make import make_inputs

MODELS = "deepfm:1,deepfm:128,deepfm:1024,dlrm:1,dlrm:128,dlrm:1024,towers:128,mmoe:128,columns_50:256,bert:1"
STREAMS = 8
MOST_LISTED = 8
"""Times of one contest that are printed."""
WAYS: tuple[tuple[str, int, dict[str, bool]], ...] = (
    ("1 stream", 1, {}),
    ("8 streams", STREAMS, {}),
    ("fused, 8", STREAMS, {"fuse": True}),
    ("grouped, 1", 1, {"fuse": True, "group": True}),
    ("grouped, 8", STREAMS, {"fuse": True, "group": True}),
)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", type=Path)
    parser.add_argument("--models", default=MODELS, help="name:batch, with commas between")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--no-kernels", action="store_true", help="do not list the grouped step's kernels")
    arguments = parser.parse_args()
    began = time.perf_counter()
    for wanted in arguments.models.split(","):
        name, _, batch = wanted.partition(":")
        try:
            probe(arguments, name, int(batch or 1))
        except Exception as problem:
            print(f"{wanted}: {type(problem).__name__}: {str(problem)[:400]}", flush=True)
    print(f"{time.perf_counter() - began:.0f} s in all")


def choices() -> dict[Any, str]:
    """All that was decided about products so far: what it is about, and a line about it."""
    from msplit.engines.cuda.autotune import batched_matmul, matmul

    found: dict[Any, str] = {}
    for key, choice in matmul.chosen().items():
        taken = f"{choice.tile or 'library'}{', turned' * choice.turned}"
        found[key] = f"{key[0]} {key[1] or ''} {key[2]} x {key[3]} => {taken}: {listed(choice.times)}"
    for key, (taken, times) in batched_matmul.chosen().items():
        found[key] = f"{1 << key[0]} of {key[4]}, {key[3]} => {taken}: {listed(times)}"
    return found


def listed(times: Any) -> str:
    """Times in µs, the shortest first."""
    return ", ".join(
        f"{name} {time:.1f}" for name, time in sorted(times.items(), key=lambda item: item[1])[:MOST_LISTED]
    )


def probe(arguments: argparse.Namespace, name: str, batch: int) -> None:
    """Prints what is found about one model."""
    before = choices()
    path = models.fill(arguments.graphs, Path(tempfile.gettempdir()) / "msplit-models", name, batch)
    flat = api.load(path)
    feeds = make_inputs(flat, {}, batch=batch, seed=0)
    priced = price(flat, batch=batch)
    ids = api.assign(flat, rules.load(models.RULES[name]), streams=STREAMS, priced=priced).ids
    first: dict[str, Any] = {}
    worst, cells, seconds, grouped = 0.0, [], [], None
    for label, streams, options in WAYS:
        began = time.perf_counter()
        lanes = ids if streams > 1 else np.zeros_like(ids)
        job = Job(flat, lanes, streams, feeds, costs=priced[1], options={"device": arguments.device, **options})
        executable = ENGINE.build(job)
        seconds.append(time.perf_counter() - began)
        for factor in (0.5, 1.0):  # other inputs between: what is captured must read its inputs
            outputs = executable.step({key: (value * factor).astype(value.dtype) for key, value in feeds.items()})
        first = first or outputs
        for key, value in outputs.items():
            scale = max(float(np.abs(first[key]).max()), 1e-30)
            worst = max(worst, float(np.abs(value.astype(np.float64) - first[key]).max()) / scale)
        times = [executable.device_times(arguments.runs)] if arguments.device == "cuda" else []
        for call in (executable.launch, lambda step=executable.step: step(feeds)) if times else ():
            times.append(clock(call, arguments.runs))
        micros = " / ".join(f"{np.median(found) * 1e6:.1f}" for found in times if found)
        cells.append(f"  {label:12} {executable.facts()['kernels']:4} kernels  {micros}")
        if label == "grouped, 1":
            grouped = job
            if times and not arguments.no_kernels:
                cells += list_kernels(executable.launch)
        executable.close()
    built = "/".join(f"{value:.1f}" for value in seconds)
    print(f"{name} batch {batch}: diff {worst:.0e}, built in {built} s", *cells, sep="\n", flush=True)
    for key, line in choices().items():
        if key not in before:
            print(f"      {line}", flush=True)
    if arguments.tiles and grouped is not None and arguments.device == "cuda":
        try_tiles(replace(grouped, options={"device": arguments.device, "group": True}), feeds)


def clock(call: Any, runs: int) -> list[float]:
    """Seconds of each call by the host's clock."""
    found = []
    for _ in range(runs):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return found


def list_kernels(embedding_launch: Any) -> list[str]:
    """Kernels of a step, those that take the longest first: how many, µs each."""
    from torch.profiler import ProfilerActivity, profile

    steps = 10
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(steps):
            embedding_launch()
    times: dict[str, list[float]] = defaultdict(list)
    for event in found.events():
        if event.device_time > 0:
            times[event.name].append(event.device_time)
    lines = sorted(times.items(), key=lambda item: -sum(item[1]))
    return [f"      {sum(each) / steps:6.1f} us in {len(each) / steps:3.0f}: {name[:110]}" for name, each in lines]


def try_tiles(job: Job, feeds: dict[str, Any]) -> None:
    """The kernel of all columns alone."""
    import torch

    from msplit.engines.cuda.autotune import tuner
    from msplit.engines.cuda.kernels import embedding_launch, embedding_tables
    from msplit.engines.cuda.ops.columns import empty_outputs

    program = ENGINE.prepared(job, torch.device("cuda")).program
    given = {key: torch.from_numpy(np.array(feeds[name])).cuda() for name, key in program.feeds.items()}
    shapes = ENGINE.prepared(job, torch.device("cuda")).lowered.source.shapes
    for step in program.steps:
        if step.op.op != "_Columns":
            continue
        spec = step.op.attrs["columns"]
        inputs = tuple(
            program.constants[key] if key in program.constants else given[key] if key in given else
            torch.randn(shapes[key], device="cuda")
            for key in step.inputs
        )  # fmt: skip

        def call(spec: Any = spec, inputs: Any = inputs) -> None:
            outputs = empty_outputs(spec, inputs[0].device)
            embedding_launch.fill(spec, inputs, outputs)

        before = (
            embedding_tables.PROGRAMS,
            embedding_tables.TILE,
            embedding_tables.MOST_BLOCK,
            embedding_tables.LEAST_BLOCK,
        )
        for programs in (66, 132, 264, 528, 1056):
            for tile, block in ((512, 512), (1024, 1024), (2048, 2048)):
                embedding_tables.PROGRAMS, embedding_tables.TILE, embedding_tables.MOST_BLOCK = programs, tile, block
                embedding_launch.forget()
                call()
                tables = embedding_launch.made(spec)[-1]
                micros = tuner.milliseconds(call) * 1e3 / tuner.CALLS
                beside = tuner.milliseconds(call, tuner.LANES) * 1e3 / tuner.CALLS / tuner.LANES
                shape = [f"{one.rows}x{one.ids}x{one.width}" for one in tables.tiles if one.rows]
                what = f"block {tables.block} of {tables.vector}, tiles {' '.join(shape)}, programs {tables.programs}"
                print(
                    f"      at least {programs:4}, tile {tile:4}: {micros:5.2f} us, side by side {beside:5.2f}: {what}"
                )
        embedding_tables.PROGRAMS, embedding_tables.TILE, embedding_tables.MOST_BLOCK, embedding_tables.LEAST_BLOCK = (
            before
        )
        embedding_launch.forget()


if __name__ == "__main__":
    main()
