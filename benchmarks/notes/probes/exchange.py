"""Traces of a training step on two GPUs, and of its collectives.

    python benchmarks/training_models.py GRAPHS mmoe:Adam towers:Adagrad         # where TensorFlow is
    PYTHONPATH=. python benchmarks/notes/probes/exchange.py GRAPHS --out OUT     # on a machine with two GPUs
    PYTHONPATH=. python benchmarks/notes/probes/exchange.py GRAPHS --device cpu  # shows that it works

Two parts, each in processes of its own, which start nothing more after `--limit` seconds:

- `steps`: of each model a step of one GPU alone and one of all together, in turns, by the host's and the device's clock, of the mixture of
  experts also PyTorch's by hand, one captured graph with `DistributedDataParallel`'s collectives in it; then the kernels of one step of
  each from a trace: sums by name, what of the time NCCL's kernels have to themselves, and what is idle.
- `micro`: collectives and packed copies, captured alone, by the device's clock.

NVLink multicast stays off.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
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
    parser.add_argument("--parts", default="micro,steps")
    parser.add_argument("--limit", type=float, default=75, help="seconds after which a part starts nothing more")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        rank(args)
    else:
        for part in args.parts.split(","):
            began = time.monotonic()
            with tempfile.TemporaryDirectory() as folder:
                own = [sys.executable, __file__, *sys.argv[1:], "--part", part, "--store", f"{folder}/store"]
                try:
                    launch(own, Hosts(), [str(number) for number in range(args.gpus)])
                except msplit.MsplitError as problem:
                    print(f"{part}: {problem}", flush=True)
            print(f"=== {part} took {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
