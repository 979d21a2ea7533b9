"""Traces of a training step on two GPUs and of its collectives, and ways to capture one graph over both.

    python benchmarks/training_models.py GRAPHS mmoe:Adam towers:Adagrad         # where TensorFlow is
    PYTHONPATH=. python benchmarks/notes/probes/exchange.py GRAPHS --out OUT     # on a machine with two GPUs
    PYTHONPATH=. python benchmarks/notes/probes/exchange.py GRAPHS --device cpu  # shows that it works

Three parts, each in processes of its own, which start nothing more after `--limit` seconds:

- `split`: copies between two GPUs inside of one capture, each attempt in a process of its own, its numbers checked.
- `steps`: of each model a step of one GPU alone and one of all together, in turns, by the host's and the device's clock, of the mixture of
  experts also PyTorch's by hand, one captured graph with `DistributedDataParallel`'s collectives in it; then the kernels of one step of
  each from a trace: sums by name, what of the time NCCL's kernels have to themselves, and what is idle.
- `micro`: collectives and packed copies, captured alone, by the device's clock.

NVLink multicast stays off.
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ |= {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
}
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import training_models
from training_torch import ByHand

import msplit
from msplit.core.arguments import Precision
from msplit.training.hosts import Hosts, Rank, launch, rank_of
from msplit.training.rendezvous import ALONE, World, joined

try:
    import triton
    import triton.language as tl

    @triton.jit
    def _copy(source, to, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(to + at, tl.load(source + at, mask=at < count), mask=at < count)
except ImportError:  # the attempt says so
    triton = None

MODELS = "mmoe.Adam:128,towers.Adagrad:1024,mmoe.Adam:1024"
TURNS, BURST, TRACED = 7, 60, 6
PAUSE = 4e-3
"""Seconds between two pairs of steps that are traced, which tell them apart."""
MOST_NAMES = 14


def micros(values: Sequence[float]) -> str:
    """Median, lowest and highest of seconds, in µs."""
    return f"{statistics.median(values) * 1e6:.1f} ({min(values) * 1e6:.1f}-{max(values) * 1e6:.1f})"


# --- Steps


def steps(
    args: argparse.Namespace, world: World, say: Callable[[str], None], left: Callable[[], bool]
) -> dict[str, Any]:
    """Times and traces of a step of one GPU and of all."""
    found: dict[str, Any] = {}
    for item in args.models.split(","):
        if not left():
            say(f"{item}: left out, no time")
            continue
        key, _, rows = item.partition(":")
        training = training_models.read(args.graphs / f"{key}.json")
        feeds = training.feeds(int(rows), world.rank)
        trainers: list[Any] = []
        began = time.monotonic()
        for who in (ALONE, world):
            more = {"effort": "fast"} if args.device == "cpu" else {}
            trainer = msplit.Trainer(
                args.graphs / f"{key}.meta", fetches=["loss"], world=who, streams=8, engine="cuda", device=args.device, **more
            )  # fmt: skip
            trainer.load(training.state())
            trainer.prepare(feeds)
            trainers.append(trainer)
        labels = ["1 GPU", f"{world.size} GPUs"]
        if item.startswith("mmoe.Adam"):
            job: Any = SimpleNamespace(feeds=feeds, precision=Precision.TF32, state=training.state())
            hand = ByHand(captured=args.device == "cuda", place=args.device, together=True).build(job)
            trainers.append(SimpleNamespace(step=hand.step, runner=SimpleNamespace(executable=hand), close=hand.close))
            labels.append(f"{world.size} GPUs, DistributedDataParallel by hand, captured")
        say(f"--- {item}: ready after {time.monotonic() - began:.0f} s")
        host: dict[str, list[float]] = {label: [] for label in labels}
        device: dict[str, list[float]] = {label: [] for label in labels}
        turns, burst = (2, 2) if args.device == "cpu" else (TURNS, BURST)
        for _ in range(turns):
            for label, trainer in zip(labels, trainers, strict=True):
                trainer.step(feeds)
                together()
                start = time.perf_counter()
                for _ in range(burst):
                    trainer.step(feeds)
                host[label].append((time.perf_counter() - start) / burst)
                if args.device == "cuda":
                    together()
                    device[label].append(statistics.median(trainer.runner.executable.device_times(burst)))
        row: dict[str, Any] = {"host": host, "device": device}
        for label in labels:
            clock = f", device {micros(device[label])}" if device[label] else ""
            say(f"{item} on {label}: host {micros(host[label])} µs{clock}")
        traced = [trace(trainer) for trainer in trainers[:2]] if args.device == "cuda" else []
        for label, one in zip(labels, traced, strict=False):
            row[f"trace, {label}"] = one
            say(f"  trace of {label}: " + ", ".join(f"{name} {value:.0f}" for name, value in one["µs"].items()) + " µs")
            for at, end, name in one["nccl"]:
                say(f"    {name} from {at:.0f} to {end:.0f} µs of the step")
        if traced:
            say("  kernels by name, count and µs in all: alone -> together")
            one, two = (dict(each["names"]) for each in traced)
            gains = sorted({*one, *two}, key=lambda name: -abs(two.get(name, (0, 0))[1] - one.get(name, (0, 0))[1]))
            for name in gains[:MOST_NAMES]:
                (count, took), (later, then) = one.get(name, (0, 0.0)), two.get(name, (0, 0.0))
                say(f"    {count:4} {took:7.1f} -> {later:4} {then:7.1f}  {name[:90]}")
        for trainer in trainers:
            trainer.close()
        found[item] = row
    return found


def together() -> None:
    """Waits for all processes."""
    torch.distributed.all_reduce(torch.zeros(1))


def trace(trainer: Any) -> dict[str, Any]:
    """The kernels of a step: the second of two in a row, of the pair that took the median time."""
    executable = trainer.runner.executable
    executable.launch()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(TRACED):
            together()
            time.sleep(PAUSE)
            executable.launch()
            executable.launch()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    ran = sorted(
        (one["ts"], one["ts"] + one["dur"], one["name"])
        for one in events
        if one.get("ph") == "X" and one.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    )
    pairs: list[list[tuple[float, float, str]]] = []
    for one in ran:
        if not pairs or one[0] - max(end for _, end, _ in pairs[-1]) > PAUSE / 2 * 1e6:
            pairs.append([])
        pairs[-1].append(one)
    seconds = [pair[len(pair) // 2 :] for pair in pairs if len(pair) % 2 == 0]
    if not seconds:
        return {"µs": {"no pair of steps was found, kernels": float(len(ran))}, "nccl": [], "names": []}
    seconds.sort(key=lambda step: max(end for _, end, _ in step) - step[0][0])
    step = seconds[len(seconds) // 2]
    begin = step[0][0]
    talk = [(at, end) for at, end, name in step if "nccl" in name.lower()]
    work = [(at, end) for at, end, name in step if "nccl" not in name.lower()]
    span, busy = max(end for _, end, _ in step) - begin, covered(talk + work)
    names: dict[str, tuple[int, float]] = collections.defaultdict(lambda: (0, 0.0))
    for at, end, name in step:
        count, took = names[name]
        names[name] = count + 1, took + end - at
    told = {
        "step": span,
        "kernels": float(len(step)),
        "NCCL": covered(talk),
        "NCCL alone": busy - covered(work),
        "other kernels": covered(work),
        "sum of theirs": sum(end - at for at, end in work),
        "idle": span - busy,
    }
    nccl = [(at - begin, end - begin, name[:60]) for at, end, name in step if "nccl" in name.lower()]
    gantt = [(round(at - begin, 1), round(end - begin, 1), name[:60]) for at, end, name in step]
    return {"µs": told, "nccl": nccl, "names": sorted(names.items(), key=lambda one: -one[1][1]), "every": gantt}


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """Time in which at least one of some spans runs."""
    total, until = 0.0, float("-inf")
    for at, end in sorted(spans):
        total += max(0.0, end - max(at, until))
        until = max(until, end)
    return total


# --- Collectives alone


def captured(issue: Callable[[], None], count: int = 30) -> list[float]:
    """Seconds of one replay of what is issued, by the device's clock."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        issue()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="relaxed"):
            issue()
        together()
        for _ in range(5):
            graph.replay()
        stream.synchronize()
        together()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        marks[0].record(stream)
        for mark in marks[1:]:
            graph.replay()
            mark.record(stream)
        stream.synchronize()
    return [first.elapsed_time(second) / 1e3 for first, second in itertools.pairwise(marks)]


def micro(
    args: argparse.Namespace, world: World, say: Callable[[str], None], left: Callable[[], bool]
) -> dict[str, Any]:
    """Collectives and packed copies, each captured alone."""
    if args.device == "cpu":
        return {}
    distributed, size = torch.distributed, world.size
    training = training_models.read(args.graphs / "mmoe.Adam.json")
    shapes = [
        shape for name, (kind, shape, _) in training.variables.items() if kind == "float32" and "/Adam" not in name
    ]
    total = sum(-(-int(torch.Size(shape).numel()) // 4) * 4 for shape in shapes)
    flat = torch.zeros(total, device="cuda")
    values = [torch.zeros(shape, device="cuda") for shape in shapes]

    def packed(out: torch.Tensor) -> None:
        sizes = [-(-max(one.numel(), 1) // 4) * 4 for one in values]
        torch._foreach_copy_(
            [part[: one.numel()].view(one.shape) for part, one in zip(out.split(sizes), values, strict=True)], values
        )

    gap = torch.zeros(4, device="cuda")
    pieces = [piece for one in values for piece in (one.view(-1), gap[: -one.numel() % 4])]

    def reduced(pieces: int) -> Callable[[], None]:
        parts = flat.chunk(pieces)
        return lambda: [distributed.all_reduce(one, distributed.ReduceOp.AVG) for one in parts] and None

    own, every = torch.zeros(40, 2048, device="cuda"), torch.zeros(size, 40, 2048, device="cuda")
    rows = [torch.zeros(1024, 64 if number % 2 else 2, device="cuda") for number in range(80)]
    sizes = [one.numel() for one in rows]
    mine = torch.zeros(sum(sizes), device="cuda")
    theirs = torch.zeros(size, sum(sizes), device="cuda")

    def gathers() -> None:
        for number in range(40):
            distributed.all_gather_into_tensor(torch.empty(size * 2048, device="cuda"), own[number])

    def coalesced() -> None:
        outputs = [torch.empty(size * one.numel(), device="cuda") for one in rows]
        with distributed._coalescing_manager(device=torch.device("cuda"), async_ops=False):
            for out, one in zip(outputs, rows, strict=True):
                distributed.all_gather_into_tensor(out, one.view(-1))

    def unpack_today() -> None:
        for number, part in enumerate(theirs.split(sizes, 1)):
            one = part.contiguous().view(-1)
            if number % 2:
                one / size

    def unpack_at_once() -> None:
        whole = torch.empty_like(theirs).view(-1)
        outputs = [
            part.view(size, -1)[rank] for part in whole.split([size * one for one in sizes]) for rank in range(size)
        ]
        inputs = [part[rank] for part in theirs.split(sizes, 1) for rank in range(size)]
        torch._foreach_copy_(outputs, inputs)

    ways: dict[str, Callable[[], None]] = {
        "one all-gather of 320 KB": lambda: distributed.all_gather_into_tensor(every.view(-1), own.view(-1)),
        "40 all-gathers of 8 KB": gathers,
        f"one all-gather of {mine.numel() * 4 >> 20} MB": lambda: distributed.all_gather_into_tensor(
            theirs.view(-1), mine
        ),
        "80 all-gathers of as much, coalesced": coalesced,
        "80 values unpacked one by one, half of them divided": unpack_today,
        "80 values unpacked by _foreach_copy_": unpack_at_once,
        f"{len(values)} gradients packed into {total * 4 / 1e6:.1f} MB": lambda: packed(flat),
        "… by torch.cat": lambda: torch.cat(pieces, out=flat),
    }
    for pieces in (1, 2, 4):
        ways[f"all-reduce of {total * 4 / 1e6:.1f} MB in {pieces}"] = reduced(pieces)
    for kilobytes in (16, 64, 256, 1024, 4096):
        part = flat[: kilobytes * 256]
        ways[f"all-reduce of {kilobytes} KB"] = lambda part=part: distributed.all_reduce(part, distributed.ReduceOp.AVG)

    found: dict[str, Any] = {}
    for name, issue in {**ways, **symmetric(total, size, say)}.items():
        if not left():
            say(f"{name}: left out, no time")
            continue
        try:
            found[name] = captured(issue)
            say(f"{name}: {micros(found[name])} µs")
        except Exception as problem:  # the others are measured all the same
            say(f"{name}: failed: {str(problem).splitlines()[0][:160]}")
    return found


def symmetric(total: int, size: int, say: Callable[[str], None]) -> dict[str, Callable[[], None]]:
    """All-reduces by PyTorch's symmetric memory without multicast, and a plain copy of what the peer has."""
    try:
        from torch.distributed import _symmetric_memory as memory

        group = torch.distributed.group.WORLD.group_name
        block = memory.empty(total, dtype=torch.float32, device="cuda")
        handle = memory.rendezvous(block, group)
        peer = handle.get_buffer((handle.rank + 1) % size, (total,), torch.float32)
        out = torch.empty(total, device="cuda")
    except Exception as problem:
        say(f"symmetric memory: {str(problem).splitlines()[0][:160]}")
        return {}
    block.zero_()
    ops = torch.ops.symm_mem
    return {
        f"symmetric two-shot all-reduce of {total * 4 / 1e6:.1f} MB": lambda: ops.two_shot_all_reduce_(
            block, "sum", group
        ),
        "… of 1 MB": lambda: ops.two_shot_all_reduce_(block[: 1 << 18], "sum", group),
        "symmetric one-shot all-reduce of 256 KB": lambda: ops.one_shot_all_reduce_out(
            block[: 1 << 16], "sum", group, out[: 1 << 16]
        ),
        "a barrier of symmetric memory": lambda: handle.barrier(),
        f"the sum with the peer's {total * 4 / 1e6:.1f} MB, read where they lie": lambda: torch.add(
            block, peer, out=out
        ),
        "a copy of the peer's": lambda: out.copy_(peer),
    }


# --- One capture over two GPUs

ATTEMPTS = (
    "cudaMemcpyPeerAsync on the reader's stream",
    "cudaMemcpyPeerAsync on the writer's stream",
    "cudaMemcpyAsync (default) on the reader's stream",
    "cudaMemcpyAsync (default) on the writer's stream",
    "PyTorch's copy_",
    "an elementwise kernel of PyTorch that reads the peer",
    "a Triton kernel that reads the peer",
    "the engine as it is, captured",
)


def attempt(name: str) -> str:
    """One way to capture a product on GPU 0, a copy, a product on GPU 1, a copy back and a sum, replayed with changing inputs."""
    if name.startswith("the engine"):
        return engine_captured()
    runtime = ctypes.CDLL(next(iter(loaded_runtime())))
    for fun in ("cudaMemcpyPeerAsync", "cudaMemcpyAsync", "cudaDeviceEnablePeerAccess"):
        getattr(runtime, fun).restype = ctypes.c_int
    first, second = torch.device("cuda:0"), torch.device("cuda:1")
    for source, to in ((first, second), (second, first)):
        torch.zeros(1, device=source).to(to)
        with torch.cuda.device(source):
            code = runtime.cudaDeviceEnablePeerAccess(to.index, 0)
            assert code in (0, 704), f"no peer access: {code}"  # 704: it is enabled already
            runtime.cudaGetLastError()
    streams = {first: torch.cuda.Stream(first), second: torch.cuda.Stream(second)}
    size = 512
    x = torch.zeros(size, size, device=first)
    weights = {place: torch.eye(size, device=place) * (2 + place.index) for place in streams}
    pointer, whole, number = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t

    def copied(value: torch.Tensor, place: torch.device) -> torch.Tensor:
        """The value on a GPU. The current stream is one of that GPU's."""
        with torch.cuda.device(place):
            made = torch.empty(value.shape, device=place)
        reader, writer = streams[place].cuda_stream, streams[value.device].cuda_stream
        count = value.numel() * 4
        if "PyTorch's copy_" in name:
            made.copy_(value, non_blocking=True)
        elif "elementwise" in name:
            with torch.cuda.device(place), torch.cuda.stream(streams[place]):
                peer = seen_from(value, place)
                torch.add(peer, 0.0, out=made)
        elif "Triton" in name:
            triton_copy(value, made, place, streams[place])
        else:
            by_writer = "writer" in name
            device = value.device if by_writer else place
            stream = writer if by_writer else reader
            with torch.cuda.device(device):
                if "Peer" in name:
                    run = runtime.cudaMemcpyPeerAsync
                    run.argtypes = (pointer, whole, pointer, whole, number, pointer)
                    code = run(made.data_ptr(), place.index, value.data_ptr(), value.device.index, count, stream)
                else:
                    run = runtime.cudaMemcpyAsync
                    run.argtypes = (pointer, pointer, number, whole, pointer)
                    code = run(made.data_ptr(), value.data_ptr(), count, 4, stream)
            assert code == 0, f"CUDA error {code}"
            if by_writer:
                after(streams[value.device], streams[place])
        return made

    def after(one: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
        """Lets a stream wait for another one, on whichever GPU."""
        with torch.cuda.device(one.device):
            event = torch.cuda.Event()
            event.record(one)
        with torch.cuda.device(other.device):
            other.wait_event(event)

    def issue() -> torch.Tensor:
        after(streams[first], streams[second])
        with torch.cuda.device(first), torch.cuda.stream(streams[first]):
            here = x @ weights[first]
        after(streams[first], streams[second])
        with torch.cuda.device(second), torch.cuda.stream(streams[second]):
            there = copied(here, second) @ weights[second]
        after(streams[second], streams[first])
        with torch.cuda.device(first), torch.cuda.stream(streams[first]):
            return copied(there, first) + here

    pools = torch.cuda.MemPool()
    with torch.cuda.device(first):
        issue()
        for place in streams:
            torch.cuda.synchronize(place)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(streams[first]), torch.cuda.use_mem_pool(pools, device=second):
            graph.capture_begin(capture_error_mode="relaxed")
            result = issue()
            graph.capture_end()
        times = []
        for seed in range(20):
            x.copy_(torch.randn(size, size, generator=torch.Generator().manual_seed(seed)))
            torch.cuda.synchronize()
            start = time.perf_counter()
            graph.replay()
            torch.cuda.synchronize()
            torch.cuda.synchronize(second)
            times.append(time.perf_counter() - start)
            torch.testing.assert_close(result, x * 8, rtol=1e-3, atol=1e-3)
    return f"works, 20 replays right, {micros(times)} µs each"


def loaded_runtime() -> list[str]:
    """Paths of the CUDA runtime that PyTorch has loaded."""
    torch.zeros(1, device="cuda")
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted({line.split()[-1] for line in lines if "libcudart.so" in line})


def seen_from(value: torch.Tensor, place: torch.device) -> torch.Tensor:
    """A tensor of another GPU as one of this GPU's, whose kernels read it where it lies."""
    found = torch._C._construct_storage_from_data_pointer(value.data_ptr(), place, value.numel() * 4)
    return torch.empty(0, device=place).set_(found, 0, tuple(value.shape))


def triton_copy(value: torch.Tensor, made: torch.Tensor, place: torch.device, stream: torch.cuda.Stream) -> None:
    """Copies by a kernel of the reader's GPU. Triton knows neither of the pointers' GPUs."""
    with torch.cuda.device(place), torch.cuda.stream(stream):
        _copy[(triton.cdiv(value.numel(), 1024),)](value, made, value.numel(), BLOCK=1024)


def engine_captured() -> str:
    """A sample over two GPUs: the message, or that it is right."""
    import numpy as np

    from msplit.core.arguments import Precision
    from msplit.cost.profile import Workload
    from msplit.engines.base import Job
    from msplit.engines.cuda.engine import CudaEngine
    from msplit.engines.cuda.options import EngineOptions
    from msplit.inputs.make import feeds_for

    flat = msplit.load(Path(msplit.__file__).parents[1] / "sample_graphs" / "towers_small.pb")
    feeds = feeds_for(flat, Workload(64))
    ids = (np.arange(len(flat)) * 7 % 4).astype(np.int32)
    one = CudaEngine().build(Job(flat, ids, 4, feeds, precision=Precision.IEEE, options=EngineOptions("cuda")))
    two = CudaEngine().build(
        Job(flat, ids, 4, feeds, precision=Precision.IEEE, options=EngineOptions("cuda", split=(0, 1)))
    )
    for seed in range(4):
        fresh = feeds_for(flat, Workload(64), seed=seed)
        found, expected = two.step(fresh), one.step(fresh)
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5)
    return f"works: {micros(two.device_times(20))} µs a step on two, {micros(one.device_times(20))} on one"


def split(args: argparse.Namespace) -> None:
    """Every attempt in a process of its own: a capture that fails may leave CUDA unusable."""
    if args.device == "cpu" or torch.cuda.device_count() < 2:
        print("split: needs two GPUs")
        return

    def said_of(name: str) -> str:
        command = [sys.executable, __file__, str(args.graphs), "--attempt", name]
        try:
            ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            lines = (ran.stdout if ran.returncode == 0 else ran.stderr or ran.stdout).strip().splitlines()
            errors = [line for line in lines if "Error" in line or "error" in line]
            return lines[-1] if ran.returncode == 0 else f"failed: {(errors or lines or ['no word'])[-1][:220]}"
        except subprocess.TimeoutExpired:
            return "failed: not over after 60 s"

    with ThreadPoolExecutor(len(ATTEMPTS)) as pool:
        for name, said in zip(ATTEMPTS, pool.map(said_of, ATTEMPTS), strict=True):
            print(f"split: {name}: {said}", flush=True)


# --- The processes


@contextmanager
def met(told: Rank, args: argparse.Namespace) -> Iterator[World]:
    """Processes that see all GPUs each, as symmetric memory wants it."""
    if args.device == "cuda":
        torch.cuda.set_device(told.local)
    store = torch.distributed.FileStore(args.store, told.size)
    backend = "cpu:gloo,cuda:nccl" if args.device == "cuda" else "gloo"
    torch.distributed.init_process_group(
        backend, store=torch.distributed.PrefixStore("group", store), rank=told.number, world_size=told.size
    )
    yield World(told.number, told.size, store)
    together()
    os._exit(0)  # symmetric memory and captured collectives are not taken down in order


def rank(args: argparse.Namespace) -> None:
    """One of the processes that train together."""
    told = rank_of(os.environ)
    assert told is not None
    until = time.monotonic() + args.limit
    found: dict[str, Any] = {}
    meet = joined(told, on_gpu=args.device == "cuda", tell=print) if args.part == "steps" else met(told, args)
    with meet as world:

        def say(line: str) -> None:
            if world.rank == 0:
                print(line, flush=True)

        def left() -> bool:
            return bool(world.share(time.monotonic() < until))

        if args.device == "cuda":
            say(
                f"{world.size} of {torch.cuda.get_device_name()}, PyTorch {torch.__version__}, NCCL {torch.cuda.nccl.version()}"
            )
        part = {"steps": steps, "micro": micro}[args.part]
        try:
            found = part(args, world, say, left)
        except Exception:
            traceback.print_exc()
            raise
        if world.rank == 0:  # of the others nobody reads any
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / f"exchange_{args.part}.json").write_text(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", type=Path)
    parser.add_argument("--out", type=Path, default=Path("exchange-results"))
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--parts", default="split,micro,steps")
    parser.add_argument("--limit", type=float, default=75, help="seconds after which a part starts nothing more")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--attempt", help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.attempt:
        print(attempt(args.attempt))
    elif args.part:
        rank(args)
    else:
        for part in args.parts.split(","):
            began = time.monotonic()
            if part == "split":
                split(args)
            else:
                with tempfile.TemporaryDirectory() as folder:
                    own = [sys.executable, __file__, *sys.argv[1:], "--part", part, "--store", f"{folder}/store"]
                    try:
                        launch(own, Hosts(), [str(number) for number in range(args.gpus)])
                    except msplit.MsplitError as problem:
                        print(f"{part}: {problem}", flush=True)
            print(f"=== {part} took {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
