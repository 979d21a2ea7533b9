"""What a user's step costs beyond the device's work, and what each way to spare some of it gains.

    python benchmarks/step_probe.py GRAPHS [--models towers:128,inception_v3:1:8] [--rounds 12] [--micro-only]

GRAPHS is made by `benchmarks/models.py`. Needs no TensorFlow; run it on a quiet machine. All ways run in one process and take turns; times
are medians in µs. A model is fused and grouped, on one stream or as many as its third part says; Inception, which takes a minute to build,
only if it is asked for. "before" copies each output by a kernel of its own, checks and joins inputs by NumPy, launches and waits through
PyTorch; each following way changes one thing more, and the last one is what ships.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
import models

from msplit import api, rules
from msplit.decide.model import price
from msplit.engines.base import Job
from msplit.engines.cuda.engine import CudaEngine, executable_for, plan_for
from msplit.engines.cuda.kernels import copy
from msplit.engines.cuda.runtime import executable, memcpy, output_staging
from msplit.engines.cuda.runtime.graph_exec import GraphExec
from msplit.inputs.make import make_inputs

MODELS = "towers:128:1,mmoe:128:1,deepfm:1:8"
GPU = torch.device("cuda")

Step = Callable[[], Any]


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", type=Path)
    parser.add_argument("--models", default=MODELS, help="name:batch:streams, with commas between")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--micro-only", action="store_true")
    arguments = parser.parse_args()
    began = time.perf_counter()
    for part in (launches, numbers, host_copies):
        attempt(part.__name__, part)
    for wanted in () if arguments.micro_only else arguments.models.split(","):
        name, batch, streams = (*wanted.split(":"), "1", "1")[:3]
        attempt(wanted, lambda n=name, b=int(batch), s=int(streams): model(arguments, n, b, s))
        print(f"  at {time.perf_counter() - began:.0f} s", flush=True)


def attempt(label: str, part: Callable[[], None]) -> None:
    """Runs a part; if it fails, the others still run."""
    try:
        part()
    except Exception:
        print(f"{label} failed\n{traceback.format_exc()[-1500:]}", flush=True)


def race(ways: Mapping[str, Step], rounds: int, steps: int = 60) -> dict[str, float]:
    """Median µs of each way. They take turns, in another order each round; the first steps of a turn do not count."""
    times: dict[str, list[float]] = {label: [] for label in ways}
    chance = np.random.default_rng(0)
    for _ in range(rounds):
        for label in chance.permutation(list(ways)):
            way = ways[label]
            for number in range(steps + 10):
                start = time.perf_counter()
                way()
                if number >= 10:
                    times[label].append(time.perf_counter() - start)
    return {label: float(np.median(values)) * 1e6 for label, values in times.items()}


def show(title: str, found: Mapping[str, float]) -> None:
    """One line."""
    print(f"{title}: " + ", ".join(f"{label} {value:.1f}" for label, value in found.items()), flush=True)


# Parts of a step by themselves


def captured(body: Callable[[], object]) -> GraphExec:
    """A graph of what the body issues."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="relaxed"):
        body()
    return GraphExec(graph, GPU)


def launches() -> None:
    """One kernel: PyTorch's replay and synchronize against CUDA's own."""
    some = torch.zeros(1024, device=GPU)
    graph = captured(lambda: some.add_(1))
    print(f"direct launches: {'yes' if graph._executable is not None else 'no'}")
    stream = torch.cuda.current_stream()
    ways: dict[str, Step] = {
        "PyTorch": lambda: (graph._graph.replay(), torch.cuda.current_stream(GPU).synchronize()),
        "PyTorch, stream known": lambda: (graph._graph.replay(), stream.synchronize()),
        "CUDA": lambda: (graph.start(), graph.finish()),
    }
    show("one kernel", race(ways, 8))
    torch.cuda.synchronize()
    found = {}
    for label, call in (("replay", graph._graph.replay), ("start", graph.start)):
        times = []
        for _ in range(300):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
            torch.cuda.synchronize()
        found[label] = float(np.median(times)) * 1e6
    show("  the call that launches alone", found)


def numbers() -> None:
    """A kernel and outputs of some bytes: how the host learns that they are there. Up to four go by arguments, more by a table."""
    some = torch.zeros(1024, device=GPU)
    for count, size in ((1, 4), (1, 4000), (2, 512), (4, 512), (5, 512), (1, 400_000), (2, 400_000)):
        sources = [torch.zeros(size // 4, device=GPU) for _ in range(count)]
        hosts = [torch.zeros(size // 4).pin_memory() for _ in range(count)]
        seen = [copy.seen_by(GPU, host) for host in hosts]
        addresses = [source.data_ptr() for source in sources]

        def copied(sources: Any = sources, seen: Any = seen) -> None:
            some.add_(1)
            for source, host in zip(sources, seen, strict=True):
                copy.copy(source, host)

        plain = captured(copied)
        given = copy.OutputCopy([size] * count, [host.data_ptr() for host in hosts], GPU)
        graph = captured(lambda given=given, addresses=addresses: (some.add_(1), given.issue(addresses)))
        given.aim(addresses)
        torch.cuda.synchronize()
        ways: dict[str, Step] = {
            "copied one by one, CUDA waits": lambda plain=plain: (plain.start(), plain.finish()),
            "one kernel, CUDA waits": lambda graph=graph: (graph.start(), graph.finish()),
            "one kernel and its number": watcher(graph, given),
        }
        show(f"kernel and {count} x {size} B out", race(ways, 6))


def watcher(graph: GraphExec, given: copy.OutputCopy) -> Step:
    """Replays and looks until the number rises."""

    def step() -> None:
        torch_number = given.number
        was = torch_number[0]
        graph.start()
        for _ in range(1_000_000):
            if torch_number[0] != was:
                return
        raise RuntimeError("the number did not rise")

    return step


def host_copies() -> None:
    """Large arrays on the host: one thread, and what ships."""
    for megabytes in (1, 4, 16, 64):
        source, target = np.ones(megabytes << 20, np.uint8), np.zeros(megabytes << 20, np.uint8)
        ways: dict[str, Step] = {
            "one thread": lambda source=source, target=target: np.copyto(target, source),
            "ours": lambda source=source, target=target: memcpy.copy(source, target),
            "read": lambda source=source: memcpy.copy_of(source),
        }
        show(f"{megabytes} MB on the host", race(ways, 3, 10))


# Whole steps


class OldInputs(executable.Inputs):
    """Inputs as they were filled before."""

    def __init__(self, like: Mapping[str, torch.Tensor], device: torch.device) -> None:
        super().__init__(like, device)
        self.plans = []
        for group in self._groups:
            arrays = [self.block.arrays[name] for name in group.names]
            flat = np.frombuffer(group.memory, arrays[0].dtype)
            alike = all(array.ndim and array.shape[1:] == arrays[0].shape[1:] for array in arrays)
            rows = flat.reshape(-1, *arrays[0].shape[1:]) if alike and flat.size else None
            self.plans.append((group, flat, rows))
        self.old = False
        self.rest = self.block.host.numel()

    def send(self, arrays: Any) -> None:
        """Both ways, no input ahead of the others."""
        if not self.old:
            self.fill(arrays)
            return
        for group, flat, rows in self.plans:
            sources = [arrays[name] for name in group.names]
            shapes, dtypes = [source.shape for source in sources], [source.dtype for source in sources]
            if shapes != group.shapes or dtypes != group.dtypes:
                raise ValueError("wrong inputs")
            if len(sources) > 1 and rows is not None:
                np.concatenate(sources, out=rows)
            elif len(sources) > 1:
                np.concatenate([source.ravel() for source in sources], out=flat)
            else:
                self.fill(arrays)
                return


class OldOutputs(output_staging.Outputs):
    """A kernel per output, and CUDA waits."""

    def to_host(self, tensors: Mapping[str, torch.Tensor]) -> None:
        memory = self._block.host
        for name, place in self._block.arrays.items():
            start = self._block.starts[name]
            if place.nbytes:
                target = memory[start : start + place.nbytes].view(tensors[name].dtype)
                copy.copy(tensors[name].contiguous(), copy.seen_by(GPU, target))

    def aim(self) -> None:
        """Nothing to aim."""

    def arrived(self) -> bool:
        return False


def step_of(made: Any, feeds: Any, *, direct: bool = True, poll: bool = True, old_fill: bool = False) -> Step:
    """A step with some ways switched off."""
    graph = made._graphs[True]
    handle = graph._executable

    def step() -> Any:
        graph._executable = handle if direct else None
        output_staging._CAN_POLL = poll
        made._inputs.old = old_fill
        return made.step(feeds)

    return step


def model(arguments: argparse.Namespace, name: str, batch: int, streams: int) -> None:
    """One model, all ways."""
    began = time.perf_counter()
    flat = api.load(models.fill(arguments.graphs, Path(tempfile.gettempdir()) / "msplit-models", name, batch))
    feeds = {key: np.array(value) for key, value in make_inputs(flat, {}, batch=batch, seed=0).items()}
    sizes, costs = price(flat, batch=batch)
    ids = np.zeros(len(flat), np.int32)
    if streams > 1:
        ids = api.assign(flat, rules.load(models.RULES[name], streams=streams), priced=(sizes, costs)).ids
    options = {"device": "cuda", "group": True, "fuse": True}
    job = Job(flat, ids, streams, feeds, costs=costs, options=options)
    prepared = CudaEngine().prepared(job, GPU)
    plan = plan_for(prepared.program, job.ids, job.costs)
    plain = executable.Inputs, executable.Outputs
    built: dict[str, Any] = {}
    kinds: dict[str, tuple[type, type]] = {
        "old": (OldInputs, OldOutputs),
        "new": (OldInputs, output_staging.Outputs),
        "ahead": (executable.Inputs, output_staging.Outputs),
    }
    wanted: dict[str, Any] = {}
    for kind, pair in kinds.items():
        try:
            executable.Inputs, executable.Outputs = pair  # type: ignore[misc]
            made = executable_for(job, prepared, plan)
            for _ in range(3):
                found = made.step(feeds)
            wanted = wanted or found
            bad = [key for key in wanted if not np.array_equal(wanted[key], found[key])]
            print(f"  {kind}: outputs {'differ: ' + ', '.join(bad[:3]) if bad else 'agree'}", flush=True)
            built[kind] = made
        except Exception:
            print(f"  {kind} failed\n{traceback.format_exc()[-1500:]}", flush=True)
        finally:
            executable.Inputs, executable.Outputs = plain  # type: ignore[misc]
    old, new, ahead = built["old"], built["new"], built["ahead"]
    ways: dict[str, Step] = {
        "before": step_of(old, feeds, direct=False, old_fill=True),
        "+ CUDA's launch": step_of(old, feeds, old_fill=True),
        "+ joined inputs": step_of(old, feeds),
        "+ one kernel out": step_of(new, feeds, poll=False),
        "+ number": step_of(new, feeds),
        "+ large inputs ahead": step_of(ahead, feeds),
        "launch": new.launch,
    }
    inputs, outputs = sum(value.nbytes for value in feeds.values()), sum(value.nbytes for value in wanted.values())
    print(
        f"{name} batch {batch}, {streams} streams: {len(feeds)} inputs {inputs} B, {len(wanted)} outputs {outputs} B, "
        f"{new.facts()['kernels']} kernels; built in {time.perf_counter() - began:.0f} s; "
        f"device {np.median(new.device_times(300)) * 1e6:.1f}"
    )
    show(" host", race(ways, arguments.rounds))
    show(" beside busy processes", busy(lambda: ahead.step(feeds)))
    show(" parts before", parts(old, feeds, direct=False, old_fill=True))
    show(" parts now", parts(ahead, feeds))
    for made in built.values():
        made.close()


def busy(step: Step, seconds: float = 1.5) -> dict[str, float]:
    """µs of a step while as many other processes as there are processors never stop."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    output_staging._CAN_POLL = True
    times = []
    try:
        time.sleep(0.5)
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
    finally:
        for other in others:
            other.kill()
            other.wait()
    return {f"{share} %": float(np.percentile(times, share)) * 1e6 for share in (50, 90, 99)}


def parts(made: Any, feeds: Any, *, direct: bool = True, old_fill: bool = False) -> dict[str, float]:
    """Median µs of the parts of a step."""
    graph, outputs = made._graphs[True], made._outputs
    made._inputs.old = old_fill
    handle, graph._executable = graph._executable, graph._executable if direct else None
    output_staging._CAN_POLL = True
    marks = []
    for _ in range(300):
        times = [time.perf_counter()]
        made._inputs.send(feeds)
        times.append(time.perf_counter())
        outputs.expect()
        graph.start()
        times.append(time.perf_counter())
        if not outputs.arrived():
            graph.finish()
            outputs.settle()
        times.append(time.perf_counter())
        outputs.read()
        times.append(time.perf_counter())
        marks.append([second - first for first, second in itertools.pairwise(times)])
    graph._executable = handle
    medians = np.median(np.array(marks)[20:], axis=0) * 1e6
    return dict(zip(("fill", "launch", "wait", "read"), medians.tolist(), strict=True))


if __name__ == "__main__":
    main()
