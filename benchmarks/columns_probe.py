"""Embedding columns on the GPU: what is captured, in how many kernels, how fast, and how far from TensorFlow's results.

    python benchmarks/columns_probe.py --write FOLDER [MODEL ...]  builds the graphs, inputs and TensorFlow's results (needs TensorFlow)
    python benchmarks/columns_probe.py FOLDER [cuda|cpu] [MODEL,...]    runs them on the cuda engine (needs no TensorFlow)

Per model: kernels as they are and with `group`, then for each µs per step by the device's clock and by the host's, the latter once with
feeding and fetching (as TensorFlow's session does it) and once on inputs that are there already.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

MODELS: dict[str, tuple[str, dict[str, int], int]] = {
    "columns_50": ("feature_columns", {"columns": 50}, 256),
    "columns_100": ("feature_columns", {"columns": 100}, 256),
    "columns_1000": ("feature_columns", {"columns": 1000}, 256),
    "dlrm_1": ("dlrm", {}, 1),
    "dlrm_128": ("dlrm", {}, 128),
    "deepfm_1": ("deepfm", {}, 1),
    "deepfm_128": ("deepfm", {}, 128),
    "towers_128": ("towers", {}, 128),
}
STEPS = 300


def write(folder: Path, names: list[str]) -> None:
    """Graphs without weights, inputs, and what TensorFlow makes of them on the CPU."""
    from msplit import api, samples
    from msplit.engines.tensorflow.engine import reference

    folder.mkdir(parents=True, exist_ok=True)
    for name in names or list(MODELS):
        builder, sizes, batch = MODELS[name]
        sample = samples.build(builder, **sizes)
        path = folder / f"{name}.pb"
        path.write_bytes(sample.graph_def.SerializeToString())
        feeds = samples.make_inputs(sample, batch)
        outputs = reference(api.load(path), feeds)
        np.savez(folder / f"{name}.npz", **{f"in {key}": value for key, value in feeds.items()}, **outputs)
        path.write_bytes(samples.strip(sample.graph_def).SerializeToString(deterministic=True))
        print(name, f"{path.stat().st_size / 1e6:.1f} MB", flush=True)


def load(folder: Path, name: str) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """The graph with its weights, the inputs, the expected outputs."""
    from msplit import api, proto, samples

    graph = proto.graph_pb2.GraphDef.FromString((folder / f"{name}.pb").read_bytes())
    whole = Path("/tmp") / f"msplit-{name}.pb"
    whole.write_bytes(samples.fill(graph).SerializeToString())
    stored = dict(np.load(folder / f"{name}.npz"))
    feeds = {key.removeprefix("in "): stored.pop(key) for key in list(stored) if key.startswith("in ")}
    return api.load(whole), feeds, stored


def measure(flat: Any, feeds: dict[str, Any], expected: dict[str, Any], device: str, group: bool) -> tuple[Any, ...]:
    """Kernels, µs (device, host, launch), largest difference."""
    from msplit.engines.base import Job
    from msplit.engines.cuda.engine import CudaEngine

    ids = np.zeros(len(flat), np.int32)
    began = time.perf_counter()
    executable = CudaEngine().build(Job(flat, ids, 1, feeds, ieee=True, options={"device": device, "group": group}))
    built = time.perf_counter() - began
    difference = 0.0
    for factor in (1.0, 0.5, 1.0):  # other inputs between: what is captured must read its inputs
        outputs = executable.step({key: (value * factor).astype(value.dtype) for key, value in feeds.items()})
    for key, value in expected.items():
        difference = max(difference, float(np.abs(outputs[key] - value).max()))
    steps = STEPS if device == "cuda" else 2
    times = executable.device_times(steps)
    clock = [float(np.median(times)) * 1e6 if times else float("nan")]
    for call in (lambda: executable.step(feeds), executable.launch):
        samples = []
        for _ in range(steps):
            start = time.perf_counter()
            call()
            samples.append(time.perf_counter() - start)
        clock.append(float(np.median(samples)) * 1e6)
    facts = executable.facts()
    executable.close()
    return facts["kernels"], facts["captured"], clock, difference, built


def main() -> None:
    """See the module."""
    if sys.argv[1] == "--write":
        write(Path(sys.argv[2]), sys.argv[3:])
        return
    device = sys.argv[2] if len(sys.argv) > 2 else "cuda"
    names = sys.argv[3].split(",") if len(sys.argv) > 3 else list(MODELS)
    print(
        "model          captured  kernels  device/step/launch us  max difference  built in s  (as it is, then grouped)"
    )
    wrong = False
    for name in names:
        flat, feeds, expected = load(Path(sys.argv[1]), name)
        for group in (False, True):
            try:
                kernels, captured, clock, difference, built = measure(flat, feeds, expected, device, group)
            except Exception as problem:
                print(
                    f"{name:14} {'grouped' if group else 'as is'}: {type(problem).__name__}: {str(problem)[:300]}",
                    flush=True,
                )
                wrong = True
                continue
            times = " / ".join(f"{value:7.1f}" for value in clock)
            wrong |= not difference < 1e-4
            print(f"{name:14} {captured!s:8} {kernels:6}  {times}  {difference:.1e}  {built:6.1f}", flush=True)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
