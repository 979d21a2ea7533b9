"""A step with dozens of small inputs as tensors on the GPU: gathered by one kernel (after), by `_foreach_copy_` (before), and as arrays.

PYTHONPATH=. python benchmarks/notes/probes/small_tensors.py [cpu]

The model is made here: neither TensorFlow nor a file is needed. Each answer is held against what NumPy makes of the inputs, tensors being
new in each step, changed where they are, or others in the same memory. It ends with exit code 1 where one is wrong, or where nothing was
gathered. Twenty seconds on a GPU.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import msplit
from msplit.engines.cuda.runtime.input_staging import InputStaging
from msplit.opset import schema

FLOAT, ROWS, WIDTH = 1, 128, 8


def model(path: Path, count: int) -> Path:
    """Writes a graph that adds its inputs, each times its number."""
    graph = schema.graph_pb2.GraphDef()
    products = []
    for n in range(count):
        x = graph.node.add(name=f"x{n}", op="Placeholder")
        x.attr["dtype"].type = FLOAT
        for size in (ROWS, WIDTH):
            x.attr["shape"].shape.dim.add(size=size)
        factor = graph.node.add(name=f"w{n}", op="Const")
        factor.attr["dtype"].type = factor.attr["value"].tensor.dtype = FLOAT
        factor.attr["value"].tensor.float_val.append(n + 1.0)
        product = graph.node.add(name=f"p{n}", op="Mul", input=[f"x{n}", f"w{n}"])
        product.attr["T"].type = FLOAT
        products.append(f"p{n}")
    total = graph.node.add(name="y", op="AddN", input=products)
    total.attr["T"].type, total.attr["N"].i = FLOAT, count
    path.write_bytes(graph.SerializeToString())
    return path


def drawn(count: int, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {f"x{n}": rng.integers(-9, 9, (ROWS, WIDTH)).astype(np.float32) for n in range(count)}


def expected(feeds: dict[str, Any]) -> Any:
    return sum(np.float32(n + 1) * value for n, value in enumerate(feeds.values()))


def median(step: Callable[[Any], Any], feeds: list[Any], answers: list[Any]) -> tuple[float, int]:
    """Microseconds of a step, and how many answers are wrong: of small whole numbers, sums are the same in any order."""
    times, wrong = list[float](), 0
    end = time.perf_counter() + 0.2
    while (start := time.perf_counter()) < end:
        number = len(times) % len(feeds)
        outputs = step(feeds[number])
        times.append(time.perf_counter() - start)
        wrong += not np.array_equal(outputs["y"], answers[number])
    return float(np.median(times)) * 1e6, wrong


def main() -> int:
    cpu, wrong = "cpu" in sys.argv[1:], 0
    place = torch.device("cpu" if cpu else "cuda")
    for count in (8, 40, 100):
        path = model(Path(tempfile.mkdtemp()) / "sum.pb", count)
        feeds = [drawn(count, seed) for seed in range(8)]
        answers = [expected(one) for one in feeds]
        how: dict[str, Any] = {"effort": "fast"} if cpu else {}  # which has no kernels of our own
        with msplit.prepare(path, engine="cuda", device=place.type, streams=4, **how) as runner:
            tensors = [{name: torch.from_numpy(value).to(place) for name, value in one.items()} for one in feeds]
            aim, seen = InputStaging.aim, list[bool]()

            def noted(self: InputStaging, fed: Any, aim: Any = aim, seen: list[bool] = seen) -> bool:
                seen.append(aim(self, fed))
                return seen[-1]

            InputStaging.aim = noted  # type: ignore[method-assign]
            same = {name: torch.zeros_like(value) for name, value in tensors[0].items()}
            for one, answer in zip(tensors, answers, strict=True):
                for name, value in one.items():
                    same[name].copy_(value)
                turned = same | {"x3": one["x3"].t().contiguous().t()}  # lies otherwise: not gathered
                for fed in (same, dict(one), {name: value.clone() for name, value in one.items()}, turned):
                    wrong += not np.array_equal(runner.step(fed)["y"], answer)
            if not cpu and seen.count(True) != 3 * len(feeds):
                print(
                    f"{count} inputs: {seen.count(True)} of {len(seen)} steps were gathered, {3 * len(feeds)} expected"
                )
                wrong += 1
            found: dict[str, list[float]] = {"arrays": [], "tensors, before": [], "tensors, after": []}
            for _ in range(5):
                for name, times in found.items():
                    InputStaging.aim = (lambda self, fed: False) if "before" in name else aim  # type: ignore[method-assign]
                    took, bad = median(runner.step, feeds if name == "arrays" else tensors, answers)
                    times.append(took)
                    wrong += bad
            InputStaging.aim = aim  # type: ignore[method-assign]
            told = "   ".join(f"{name} {np.median(times):7.1f} µs" for name, times in found.items())
            print(f"{count:3} inputs of {ROWS * WIDTH * 4 / 1e3:.1f} KB: {told}   wrong {wrong}", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(bool(main()))
