"""What inputs and outputs cost a step by the host's clock: from host memory, from the executable's own buffers, sent ahead while the step
before runs, and on the GPU already.

    python benchmarks/models.py GRAPHS; python benchmarks/training_models.py GRAPHS     # where TensorFlow is
    python benchmarks/inputs.py GRAPHS --out OUT [--models inception_v3:128,mmoe:128] [--training inception_v3,mmoe]

Each model is built once (fused and grouped, on its rule set's streams), and run on batches that differ, all ways in turns. Writes
OUT/inputs.json with every raw time, and prints the table last. `--device cpu` shows that it works; its times say nothing about a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import models
import training_models

from msplit import api
from msplit.engines.base import Feeds, Job
from msplit.engines.cuda.engine import CudaEngine
from msplit.engines.cuda.ir.dtypes import to_torch
from msplit.engines.cuda.options import EngineOptions, KernelMode
from msplit.inputs.make import make_inputs

HOST, BUFFERS, SENT = "host", "own buffers", "sent ahead"
FROM_GPU, ON_GPU = "inputs on the GPU", "outputs, too"
WAYS = (HOST, BUFFERS, SENT, FROM_GPU, ON_GPU)
BATCHES = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", type=Path)
    parser.add_argument("--out", type=Path, default=Path("inputs-results"))
    parser.add_argument(
        "--models", default="mmoe:128,towers:128,deepfm:1024,inception_v3:1,inception_v3:16,inception_v3:128"
    )
    parser.add_argument(
        "--training", default="mmoe,deepfm,inception_v3", help="models of training steps, or with a batch: mmoe:1024"
    )
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each model, all ways together")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for label, job, feeds in jobs(arguments):
        print(f"--- {label}", flush=True)
        rows.append({"model": label, **measure(job, feeds, arguments.seconds)})
        (arguments.out / "inputs.json").write_text(json.dumps({"schema_version": 1, "rows": rows}))
    print(table(rows))


def jobs(arguments: argparse.Namespace) -> Any:
    """What is asked for: what to call it, its job and some batches."""
    for item in filter(None, arguments.models.split(",")):
        name, batch = item.split(":")
        flat = api.load(models.fill(arguments.graphs, Path("/tmp/msplit-models"), name, int(batch)))
        feeds = [make_inputs(flat, {}, batch=int(batch), seed=seed) for seed in range(BATCHES)]
        yield f"{name}, batch {batch}", job_of(arguments, flat, feeds[0], models.RULES[name], int(batch)), feeds
    for item in filter(None, arguments.training.split(",")):
        name, _, asked = item.partition(":")
        batch = int(asked) if asked else training_models.MODELS[name].batch
        key = training_models.file_name(name, None)
        training = training_models.read(arguments.graphs / f"{key}.json")
        flat = api.load(arguments.graphs / f"{key}.meta", outputs=list(training_models.FETCHES))
        feeds = [training.feeds(batch, seed) for seed in range(BATCHES)]
        job = job_of(arguments, flat, feeds[0], training_models.MODELS[name].rules, batch)
        yield f"{name}, training, batch {batch}", replace(job, state=training.state()), feeds


def job_of(arguments: argparse.Namespace, flat: Any, feeds: Feeds, rules: str, batch: int) -> Job:
    assigned = api.assign(flat, rules, streams=arguments.streams, batch=batch)
    options = EngineOptions(arguments.device, mode=KernelMode.FUSED_AND_GROUPED)
    return Job(flat, assigned.ids, arguments.streams, feeds, options=options, costs=assigned.costs)


def measure(job: Job, feeds: Sequence[Feeds], seconds: float) -> dict[str, Any]:
    """Seconds of steps in every way, and of the device's."""
    engine = CudaEngine()
    made = engine.build(job)
    there = [{name: to_torch(np.array(value), job.options.device) for name, value in one.items()} for one in feeds]
    following, buffers = [*feeds[1:], feeds[0]], made.buffers()
    ways: dict[str, Callable[[int], Any]] = {
        HOST: lambda at: made.step(feeds[at]),
        BUFFERS: lambda at: made.step(buffers),
        SENT: lambda at: made.step_prefetching(feeds[at], lambda: following[at]),
        FROM_GPU: lambda at: made.step(there[at]),
        ON_GPU: lambda at: made.step_on_device(there[at]),
    }
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    stop = time.perf_counter() + seconds
    for way in itertools.cycle(WAYS):
        for at in range(BATCHES):  # the first one is warm-up: nothing was sent ahead
            ways[way](at)
        for _ in range(4):
            for at in range(BATCHES):
                began = time.perf_counter()
                ways[way](at)
                times[way].append(time.perf_counter() - began)
        if way == WAYS[-1] and time.perf_counter() > stop:
            break
    device = made.device_times(50)
    made.close()
    size = sum(np.asarray(value).nbytes for value in feeds[0].values())
    return {"bytes": size, "device_us": None if device is None else 1e6 * float(np.median(device)), "seconds": times}


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        f"| host, µs, median (p10 to p90) | input, KB | {' | '.join(WAYS)} | device |",
        "| --- |" + " ---: |" * (len(WAYS) + 2),
    ]
    for row in rows:
        cells = []
        for way in WAYS:
            low, mid, high = 1e6 * np.quantile(row["seconds"][way], [0.1, 0.5, 0.9])
            cells.append(f"{mid:.0f} ({low:.0f} to {high:.0f})")
        device = "-" if row["device_us"] is None else f"{row['device_us']:.0f}"
        lines.append(f"| {row['model']} | {row['bytes'] / 1000:,.0f} | {' | '.join(cells)} | {device} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
