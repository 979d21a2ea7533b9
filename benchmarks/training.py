"""Training steps side by side: TensorFlow, TensorFlow with XLA, msplit in each of its ways, and PyTorch by hand for the mixture of experts.

    python benchmarks/training_models.py GRAPHS                                   # where TensorFlow is
    python benchmarks/training.py GRAPHS --out OUT [--models mmoe,towers:1024]    # on the machine with the GPU
    python benchmarks/training.py --table OUT/training.json                       # the page's table once more

All variants of a model begin with the same values, are held against each other (losses and variables, after steps on fresh data), and then
run interleaved. An inference step of the same model is measured after them in the same process. Writes OUT/training.json, every raw time in
it, after each model, and prints the table last. `--device cpu` shows that it works; its times say nothing about a GPU, and are called so.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import training_models
from gpu_suite import Log
from training_models import MODELS, Training, file_name
from training_torch import ByHand
from training_xla import WholeXla

from msplit import api, samples
from msplit.assignment.model import price
from msplit.benchmark.timing import bench
from msplit.core.arguments import Precision
from msplit.cost.profile import Workload
from msplit.engines.base import Engine, Job, TensorFlowOptions
from msplit.engines.cuda.engine import CudaEngine
from msplit.engines.cuda.options import EngineOptions, KernelMode
from msplit.engines.tensorflow.engine import ENGINE as TENSORFLOW
from msplit.opset import schema
from msplit.report import document
from msplit.run.request import RunRequest
from msplit.run.tensorflow_rows import assignments_for
from msplit.verify.results import BenchResult, Settings, Variant

PLAIN, XLA, CLUSTERS = "TensorFlow", "TensorFlow, XLA (jit_compile)", "TensorFlow, XLA (auto_jit)"
ONE = "msplit, 1 stream"
EAGER, CAPTURED = "PyTorch by hand, eager", "PyTorch by hand, captured"
MODES = (KernelMode.FUSED, KernelMode.GROUPED, KernelMode.FUSED_AND_GROUPED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", type=Path, nargs="?")
    parser.add_argument("--out", type=Path, default=Path("training-results"))
    parser.add_argument("--models", default=",".join(MODELS), help="mmoe,towers:1024,lstm")
    parser.add_argument("--optimizer", help="in place of each model's own; its graph must have been built")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--streams", default="4,16")
    parser.add_argument(
        "--duration", type=float, default=2.0, help="seconds that all variants of a model are measured for"
    )
    parser.add_argument(
        "--without",
        default="",
        help="what to leave out: tensorflow, xla, msplit, torch, inference, or words of rows: jit_compile",
    )
    parser.add_argument("--ieee", action="store_true", help="IEEE float32 in place of TF32")
    parser.add_argument("--seconds", type=float, default=540, help="start no further model after this")
    parser.add_argument("--table", type=Path, help="only print the table of these results")
    arguments = parser.parse_args()
    if arguments.table:
        print(table(read(arguments.table)))
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    rows: list[dict[str, Any]] = []
    for item in arguments.models.split(","):
        name, _, batch = item.partition(":")
        if time.monotonic() - began > arguments.seconds:
            print(f"--- out of time before {item}", flush=True)
            continue
        print(f"--- {item} at {time.monotonic() - began:.0f} s", flush=True)
        row: dict[str, Any] = {"model": name, "batch": int(batch) if batch else MODELS[name].batch}
        rows.append(row)
        for part in measure(arguments, row):
            row.update(part)
            (arguments.out / "training.json").write_text(
                json.dumps(document.plain({"schema_version": 1, "rows": rows}))
            )
        gc.collect()
    print(table(rows))


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of results, packed or not."""
    data = path.read_bytes()
    rows: list[dict[str, Any]] = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)["rows"]
    return rows


def measure(arguments: argparse.Namespace, row: dict[str, Any]) -> Any:
    """What is to be known of a model at a batch, part by part, so that what comes later may fail."""
    name, batch = row["model"], row["batch"]
    key = file_name(name, arguments.optimizer)
    training = training_models.read(arguments.graphs / f"{key}.json")
    flat = api.load(arguments.graphs / f"{key}.meta", outputs=list(training_models.FETCHES))
    yield {"optimizer": training.optimizer, "device": arguments.device, "nodes": len(flat)}
    variants: list[Variant] = []
    try:
        variants = variants_of(arguments, flat, training, batch)
        yield {"step": document.plain(run(arguments, variants, lambda seed: training.feeds(batch, seed)))}
    except Exception as problem:
        traceback.print_exc()
        yield {"error": str(problem)}
    if "inference" not in arguments.without:
        try:
            yield {"inference": document.plain(inference(arguments, training, batch))}
        except Exception as problem:
            traceback.print_exc()
            yield {"inference_error": str(problem)}
    if arguments.device == "cuda":
        yield {
            "memory": {
                one.label: memory(one) for one in variants if one.label.endswith(("fused and grouped", "captured"))
            }
        }


def run(arguments: argparse.Namespace, variants: Sequence[Variant], fresh: Any) -> BenchResult:
    quick = arguments.device == "cpu"
    few = {"min_rounds": 3, "verify_inputs": 1, "warmup": 0.02} if quick else {"min_rounds": 5, "warmup": 0.1}
    settings = Settings(duration=arguments.duration, builds=1, **few)
    return bench(variants, fresh=fresh, settings=settings, command=sys.argv, progress=Log())


def variants_of(arguments: argparse.Namespace, flat: Any, training: Training, batch: int) -> list[Variant]:
    """Every way to run a training step that is asked for."""
    left_out = arguments.without.split(",")
    zeros = np.zeros(len(flat), np.int32)
    job = Job(
        flat,
        zeros,
        1,
        training.feeds(batch),
        precision=Precision.IEEE if arguments.ieee else Precision.TF32,
        state=training.state(),
    )
    own = replace(job, options=EngineOptions(arguments.device))
    found = []
    if "tensorflow" not in left_out and sees(arguments.device):
        found.append(Variant(PLAIN, TENSORFLOW, job, optional=True))
        if "xla" not in left_out:
            found.append(Variant(XLA, WholeXla(), job, PLAIN, optional=True))
            clusters = replace(job, tensorflow=TensorFlowOptions(xla=True))
            found.append(Variant(CLUSTERS, TENSORFLOW, clusters, PLAIN, optional=True))
    if "msplit" not in left_out:
        found += ours(arguments, own, batch)
    if "torch" not in left_out and training.name == "mmoe" and training.optimizer == "Adam":
        ways = (False, True) if arguments.device == "cuda" else (False,)
        first = found[0].label if found else None
        for captured in ways:
            label = CAPTURED if captured else EAGER
            found.append(Variant(label, ByHand(captured, arguments.device), job, first, optional=True))
    return [one for one in found if not any(word and word in one.label for word in left_out)]


def ours(arguments: argparse.Namespace, job: Job, batch: int) -> list[Variant]:
    """One stream launched op by op and captured, streams with plain kernels, and larger kernels on the most streams and on one."""
    engine = CudaEngine()
    name = training_of(job)
    request = {"streams": [int(one) for one in arguments.streams.split(",")], "ruleset": MODELS[name].rules}
    sizes, costs = price(job.flat, Workload(batch=batch))
    assigned, _ = assignments_for(job.flat, sizes, costs, RunRequest.of(**request))
    job = replace(job, costs=costs)
    found = [Variant(ONE, engine, job)]
    if arguments.device == "cuda":
        eager = replace(job, options=replace(job.options, capture=False))
        found.append(Variant(f"{ONE}, eager", engine, eager, ONE))
    on_most = job
    for streams, ids, _ in assigned:
        on_most = replace(job, ids=ids, streams=streams)
        found.append(Variant(f"msplit, {streams} streams", engine, on_most, ONE, optional=True))
    for mode in MODES:
        larger = replace(on_most, options=replace(on_most.options, mode=mode))
        found.append(Variant(f"msplit, {on_most.streams} streams, {mode}", engine, larger, ONE, optional=True))
    alone = replace(job, options=replace(job.options, mode=MODES[-1]))
    found.append(Variant(f"{ONE}, {MODES[-1]}", engine, alone, ONE, optional=True))
    return found


def training_of(job: Job) -> str:
    """The model's name, from its file's."""
    return job.flat.model.path.name.partition(".")[0]


def sees(device: str) -> bool:
    """Whether TensorFlow is there and runs on that device."""
    if TENSORFLOW.unavailable():
        return False
    from msplit.engines.tensorflow import runtime

    return device == "cpu" or runtime.has_gpu()


def inference(arguments: argparse.Namespace, training: Training, batch: int) -> BenchResult:
    """The model's own step, without a label and without a change."""
    graph = schema.graph_pb2.GraphDef.FromString((arguments.graphs / f"{training.name}.inference.pb").read_bytes())
    path = arguments.out / f"{training.name}.filled.pb"
    path.write_bytes(samples.fill(graph).SerializeToString())
    flat = api.load(path)
    path.unlink()

    def fresh(seed: int) -> dict[str, np.ndarray]:
        return {name: value for name, value in training.feeds(batch, seed).items() if name != training_models.LABEL}

    job = Job(
        flat, np.zeros(len(flat), np.int32), 1, fresh(0), precision=Precision.IEEE if arguments.ieee else Precision.TF32
    )
    found = [Variant(PLAIN, TENSORFLOW, job, optional=True)] if sees(arguments.device) else []
    if "msplit" not in arguments.without:
        asked = argparse.Namespace(**{**vars(arguments), "duration": arguments.duration / 2})
        found += ours(asked, replace(job, options=EngineOptions(arguments.device)), batch)
    return run(arguments, found, fresh)


def memory(variant: Variant) -> int | None:
    """Bytes that PyTorch's allocator holds at most while a variant is built anew and makes two steps."""
    import torch

    engine: Engine = CudaEngine() if isinstance(variant.engine, CudaEngine) else variant.engine
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    try:
        built = engine.build(variant.job)
        for _ in range(2):
            built.step(variant.job.feeds)
        peak = torch.cuda.max_memory_allocated() - before
        built.close()
    except Exception:
        traceback.print_exc()
        return None
    return peak


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Per model a table of its variants, and one over all of them."""
    parts = [summary(rows)]
    for row in rows:
        parts.append(f"### {row['model']}, batch {row['batch']}, {row.get('optimizer', '')}\n")
        if "error" in row:
            parts.append(f"It failed: {row['error'].splitlines()[0]}\n")
        for kind in ("step", "inference"):
            if kind in row:
                parts.append(lines_of(row, kind))
    return "\n".join(parts)


def lines_of(row: dict[str, Any], kind: str) -> str:
    """The variants of a model, a line each."""
    times = by_label(row[kind])
    plain, xla = times.get(PLAIN), best_xla(times)
    what = "training step" if kind == "step" else "inference step"
    clock = "" if row["device"] == "cuda" else " on the CPU, which tells nothing about a GPU"
    lines = [
        f"| {what}{clock} | µs, median (p10 to p90) | device, µs | samples/s | over TensorFlow | over XLA | kernels | streams | peak MB |",
        "| --- |" + " ---: |" * 8,
    ]
    for one in row[kind]["variants"]:
        if one["label"] not in times:
            lines.append(f"| {one['label']} | {'wrong' if one['failed'] else one['skipped'] or '-'} |" + " |" * 7)
            continue
        mid = times[one["label"]]
        low, high = np.quantile(one["host_times_us"], [0.1, 0.9])
        device = f"{one['device']['median_us']:.0f}" if one["device"] else "-"
        facts = one["facts"]
        cells = [
            f"{mid:.0f} ({low:.0f} to {high:.0f})", device, f"{row['batch'] / mid * 1e6:,.0f}", over(plain, mid), over(xla, mid),
            str(facts.get("kernels", "-")), str(one["streams"]), megabytes(row.get("memory", {}).get(one["label"])),
        ]  # fmt: skip
        lines.append(f"| {one['label']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """The best of each model beside the others."""
    lines = [
        "| model | batch | optimizer | TensorFlow | XLA | PyTorch, captured | msplit, 1 stream | streams alone gain | msplit's best |"
        " samples/s | over TensorFlow | over XLA | inference steps | memory over PyTorch's |",
        "| --- | ---: | --- |" + " ---: |" * 11,
    ]
    for row in rows:
        if "step" not in row:
            continue
        times = by_label(row["step"])
        mine = {label: value for label, value in times.items() if label.startswith("msplit")}
        best = min(mine.values(), default=None)
        streams = [value for label, value in mine.items() if label.endswith("streams")]
        plain, xla = times.get(PLAIN), best_xla(times)
        inferred = [value for label, value in by_label(row.get("inference")).items() if label.startswith("msplit")]
        held = row.get("memory", {})
        ours = [value for label, value in held.items() if label.startswith("msplit") and value]
        cells = [
            row["model"], str(row["batch"]), row["optimizer"], micros(plain), micros(xla), micros(times.get(CAPTURED)),
            micros(mine.get(ONE)), over(mine.get(ONE), min(streams, default=None)), micros(best),
            f"{row['batch'] / best * 1e6:,.0f}" if best else "-", over(plain, best), over(xla, best),
            over(best, min(inferred, default=None)), over(min(ours, default=None), held.get(CAPTURED)),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def by_label(result: dict[str, Any] | None) -> dict[str, float]:
    """Median µs of a user's step by label, of what ran."""
    return {one["label"]: one["host"]["median_us"] for one in (result or {}).get("variants", ()) if one["host"]}


def best_xla(times: dict[str, float]) -> float | None:
    """XLA by whichever way is faster."""
    return min((times[label] for label in (XLA, CLUSTERS) if label in times), default=None)


def over(theirs: float | None, ours: float | None) -> str:
    return f"{theirs / ours:.2f}" if theirs and ours else "-"


def micros(value: float | None) -> str:
    return f"{value:.0f}" if value else "-"


def megabytes(value: float | None) -> str:
    return f"{value / 1e6:.1f}" if value else "-"


if __name__ == "__main__":
    main()
