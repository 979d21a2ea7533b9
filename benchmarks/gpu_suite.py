"""The whole GPU suite in one visit: every benchmark model on the cuda engine, TensorFlow and XLA beside it, one table last.

    python benchmarks/gpu_suite.py GRAPHS --out OUT [--models mmoe,towers:128] [--streams 1,2,4,8,16] [--duration 2]

GRAPHS is made by `benchmarks/models.py` where TensorFlow is. Writes OUT/suite.json (every raw time) and OUT/suite.md.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import models
import training_models

from msplit import api
from msplit.report import benchmark, document, render
from msplit.verify.results import Settings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", type=Path)
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--models", default=",".join(models.BATCHES))
    parser.add_argument("--streams", default="1,2,4,8,16")
    parser.add_argument("--duration", type=float, default=2.0)
    parser.add_argument("--builds", type=int, default=1)
    parser.add_argument("--rules", help="one rule set for all models (default: the one that fits each)")
    parser.add_argument("--no-tensorflow", action="store_true")
    parser.add_argument("--no-xla", default="", help="models whose XLA compilation is left out")
    parser.add_argument("--precision", choices=["tf32", "ieee", "bf16", "fp16"], default="tf32")
    parser.add_argument("--training", action="store_true", help="their training steps, of training_models.py")
    parser.add_argument("--seconds", type=float, default=540, help="start no further model after this")
    parser.add_argument("--name", default="suite")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    start = time.time()
    rows: list[dict[str, Any]] = []
    raw = []
    for name, batch in models.rows(arguments.models):
        if time.time() - start > arguments.seconds:
            print(f"--- out of time before {name} batch {batch}", flush=True)
            continue
        print(f"--- {name} batch {batch} at {time.time() - start:.0f} s", flush=True)
        began = time.time()
        try:
            found, flat = run(arguments, name, batch)
        except Exception as problem:
            traceback.print_exc()
            rows.append({"model": name, "batch": batch, "error": str(problem).splitlines()[0]})
            continue
        rows.append(row(name, batch, found))
        raw.append({"model": name, "batch": batch, **benchmark.payload(flat, found)})
        print(render.to_markdown(benchmark.document(flat, found)), flush=True)
        print(f"--- took {time.time() - began:.0f} s", flush=True)
        gc.collect()
        save(arguments, rows, raw)
    save(arguments, rows, raw)
    print(markdown(rows))


def save(arguments: argparse.Namespace, rows: list[dict[str, Any]], raw: list[dict[str, Any]]) -> None:
    """Writes what is known so far: a run that is cut off keeps the models it finished."""
    (arguments.out / f"{arguments.name}.json").write_text(
        json.dumps(document.plain({"schema_version": 1, "runs": raw}))
    )
    (arguments.out / f"{arguments.name}.md").write_text(markdown(rows))


def run(arguments: argparse.Namespace, name: str, batch: int) -> tuple[Any, Any]:
    if arguments.training:
        path = arguments.graphs / f"{training_models.file_name(name)}.meta"
        flat = api.load(path, outputs=list(training_models.FETCHES))
    else:
        flat = api.load(models.fill(arguments.graphs, Path("/tmp/msplit-models"), name, batch))
    request = {
        "streams": tuple(int(number) for number in arguments.streams.split(",")),
        "ruleset": arguments.rules or models.RULES[name],
        "engine": "cuda",
        "batch": batch,
        "precision": arguments.precision,
        "compare_tensorflow": not arguments.no_tensorflow,
        "compare_xla": name not in arguments.no_xla.split(","),
        "settings": Settings(duration=arguments.duration, warmup=0.1, min_rounds=5, builds=arguments.builds),
        "command": tuple(sys.argv),
    }
    return api.bench(flat, **request, progress=Log()), flat


class Log:
    """Prints what is being done, and when it began: a visit that runs out of time says what took it."""

    def __init__(self) -> None:
        self._began, self._last = time.time(), ""

    def __call__(self, what: str, share: float) -> None:
        """Prints the progress of a bench, a line for each new step; see `msplit.progress.Progress`."""
        del share
        if what != self._last:
            self._last = what
            print(f"  {time.time() - self._began:6.1f} s: {what}", flush=True)


def row(name: str, batch: int, found: Any) -> dict[str, Any]:
    result: dict[str, Any] = {"model": name, "batch": batch}
    for variant in found.result.variants:
        label = variant.label
        if label.startswith("msplit, "):  # ONNX Runtime has two rows, with its graph and without
            label = label.removeprefix("msplit, ").replace(", CUDA graph", "")
        if variant.host is None:
            result[label] = "wrong" if variant.failed else "-"
            continue
        clocks = [clock for clock in (variant.host, variant.launch, variant.device) if clock]
        result[label] = " / ".join(f"{clock.median * 1e6:.0f}" for clock in clocks)
    return result


def markdown(rows: list[dict[str, Any]]) -> str:
    columns = list(dict.fromkeys(key for entry in rows for key in entry))
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    lines += ["| " + " | ".join(str(entry.get(column, "")) for column in columns) + " |" for entry in rows]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
