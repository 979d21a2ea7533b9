"""Profile of a lowered graph on the GPU: times of steps, and records of their kernels.

Times every kind of step of a lowered graph alone on the device: what `msplit profile` runs.

Reads CUPTI's records of kernels: their grids, and how many of their blocks an SM holds. Read from PyTorch's profiler.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import json
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from msplit.cost.costs import DEEP, Constants
from msplit.cost.profile import ProfiledKernel
from msplit.engines.base import Arrays
from msplit.engines.cuda.autotune.timer import Call, CpuTimer, CudaTimer, Timer
from msplit.engines.cuda.autotune.tuner import MOST_SIDE_BY_SIDE
from msplit.engines.cuda.device.device import Device
from msplit.engines.cuda.ir.dtypes import dtype_name
from msplit.engines.cuda.ir.graph import attrs_key
from msplit.engines.cuda.ir.interpret import walk
from msplit.engines.cuda.ir.program import KernelCall, Program
from msplit.errors import EngineError
from msplit.progress import Progress, silent

MARK = "msplit-step-"
_LAUNCHES = ("cuda_runtime", "cuda_driver")


@dataclass(frozen=True)
class KernelRecord:
    """One kernel as it ran.

    Attributes:
        occupancy: Share of the threads that an SM can hold that this kernel's blocks fill, 0 to 1, by CUPTI's estimate; None: not given.
        time_us: How long this one run took.
    """

    name: str
    blocks: int
    threads: int
    registers: int
    shared_bytes: int
    occupancy: float | None
    time_us: float


def record(run: Callable[[], None]) -> dict[int, list[KernelRecord]]:
    """Runs something under the profiler. What it runs inside of ``torch.profiler.record_function(f"{MARK}{number}")`` is told by number.

    Raises:
        RuntimeError: The profiler can not record kernels here.
    """
    from torch.profiler import ProfilerActivity, profile

    with tempfile.TemporaryDirectory(prefix="msplit-") as folder:
        path = Path(folder) / "trace.json"
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiler:
            run()
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
    return parse(events)


def parse(events: Sequence[Mapping[str, Any]]) -> dict[int, list[KernelRecord]]:
    """Kernels by the number of the mark that they were launched in, from the events of a Chrome trace.

    A launch on the host lies between the ends of its mark; the kernel on the device has the launch's correlation id.
    """
    marks = sorted(
        (event["ts"], event["ts"] + event["dur"], int(event["name"].removeprefix(MARK)))
        for event in events
        if event.get("cat") == "user_annotation" and str(event.get("name", "")).startswith(MARK)
    )
    starts = [mark[0] for mark in marks]
    launched: dict[int, int] = {}
    for event in events:
        if event.get("cat") not in _LAUNCHES or "correlation" not in event.get("args", {}):
            continue
        place = bisect.bisect_right(starts, event["ts"]) - 1
        if place >= 0 and event["ts"] <= marks[place][1]:
            launched[int(event["args"]["correlation"])] = marks[place][2]
    found: dict[int, list[KernelRecord]] = {}
    kernels = (event for event in events if event.get("cat") == "kernel")
    for event in sorted(kernels, key=lambda event: float(event["ts"])):
        arguments = event.get("args", {})
        number = launched.get(int(arguments.get("correlation", -1)))
        if number is not None:
            found.setdefault(number, []).append(_read(event, arguments))
    return found


def _read(event: Mapping[str, Any], arguments: Mapping[str, Any]) -> KernelRecord:
    occupancy = arguments.get("est. achieved occupancy %")
    return KernelRecord(
        name=str(event.get("name", "")),
        blocks=_volume(arguments.get("grid")),
        threads=_volume(arguments.get("block")),
        registers=int(arguments.get("registers per thread", 0)),
        shared_bytes=int(arguments.get("shared memory", 0)),
        occupancy=None if occupancy is None else float(occupancy) / 100,
        time_us=float(event.get("dur", 0.0)),
    )


def _volume(sizes: object) -> int:
    return math.prod(map(int, sizes)) if isinstance(sizes, list) else 1


LONG_US = 150.0
"""A chain of copies of a step takes about so long; the time that a graph takes to begin is 2 % of it."""

MOST_COPIES = 100

LANE_US = 20.0
"""Side by side, a chain of copies takes about so long on each lane."""

TINY = 1.2
"""Kernels that take up to so many times the tiniest one are not run side by side: the device could not start enough of them to tell."""

PROFILER_SHARE = 0.2
"""Share of the seconds that measuring may take that is kept for the grids."""

DYNAMIC = "its shapes depend on values, so it can not be captured"
LATE = "there was no time left"


@dataclass(frozen=True, eq=False)
class Measured:
    """Times of a measured program.

    Attributes:
        kernels: Each kind of step once.
        kernel: Per step of the program the index of its kind in `kernels`, or -1.
        nodes: Per step the flat nodes that it does the work of; empty for one that launches nothing.
        constants: Of the device.
        unmeasured: Why -> number of steps that launch kernels and have no time.
        recorded: Empty if grids were recorded; else why not.
    """

    kernels: tuple[ProfiledKernel, ...]
    kernel: tuple[int, ...]
    nodes: tuple[tuple[int, ...], ...]
    constants: Constants
    unmeasured: Mapping[str, int]
    recorded: str


def measure(
    program: Program,
    feeds: Arrays,
    device: torch.device,
    *,
    seconds: float = 20.0,
    grids: bool = True,
    progress: Progress | None = None,
) -> Measured:
    """Times the steps of a program.

    A step runs with the inputs that it has in the model, over and over, as nodes of a CUDA graph, so what fits in the L2 cache is there.
    Steps of the same op, attributes, constant arguments, shapes, types and strides count as one.

    Args:
        device: Where it was traced; on a CPU the times are the CPU's and nothing else is measured.
        seconds: How long it may take; what is not reached has no time.
        grids: True to record grids and occupancy too.
        progress: Told what is done and how much of it.
    """
    tell = progress or silent
    start = time.perf_counter()
    on_gpu = device.type == "cuda"
    timer: Timer = Device.of(device).owned(CudaTimer) if on_gpu else CpuTimer()
    tell("the device itself", 0.0)
    if isinstance(timer, CudaTimer):
        timer.warm()
        found = constants(timer, device)
    else:
        found = Constants()
    stop = start + seconds * (1 - PROFILER_SHARE if grids and on_gpu else 1.0)
    run = _Steps(program, timer, found, stop)
    for number, done in enumerate(walk(program, feeds, device)):
        run.see(number, *done)
        tell("steps", (number + 1) / len(program.steps))
    kernels, recorded = run.kernels, "there is no GPU"
    if on_gpu and grids:
        tell("grids", 0.0)
        kernels, recorded = _with_grids(program, feeds, device, run.first, kernels)
    nodes = tuple(tuple(step.op.source_nodes) if step.launches else () for step in program.steps)
    return Measured(tuple(kernels), tuple(run.kernel), nodes, found, run.unmeasured, recorded)


class _Steps:
    """Measures each kind of step when it first comes by."""

    def __init__(self, program: Program, timer: Timer, device: Constants, stop: float) -> None:
        self.timer, self.device, self.stop = timer, device, stop
        self.dynamic = frozenset(program.dynamic)
        self.kernels: list[ProfiledKernel] = []
        self.kernel: list[int] = []
        self.first: dict[int, int] = {}  # step -> kind, for the first of each kind
        self.unmeasured: dict[str, int] = {}
        self._kinds: dict[tuple[Any, ...], int | str] = {}

    def see(self, number: int, step: KernelCall, arguments: Sequence[torch.Tensor], call: Callable[[], Any]) -> None:
        """Takes the next step."""
        if not step.launches:
            self.kernel.append(-1)
            return
        kind = kind_of(step, arguments)
        if kind not in self._kinds:
            self._kinds[kind] = self._measure(number, step, arguments, call)
        found = self._kinds[kind]
        if isinstance(found, str):
            self.unmeasured[found] = self.unmeasured.get(found, 0) + 1
            if found == LATE:
                del self._kinds[kind]
        self.kernel.append(found if isinstance(found, int) else -1)

    def _measure(
        self, number: int, step: KernelCall, arguments: Sequence[torch.Tensor], call: Callable[[], Any]
    ) -> int | str:
        if number in self.dynamic:
            return DYNAMIC
        if time.perf_counter() > self.stop:
            return LATE
        try:
            time_us, share = _time(self.timer, call, self.device, step.bytes)
        except (EngineError, RuntimeError) as problem:
            if torch.cuda.is_available():  # what a failed measurement left comes to an end, its memory is free again
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            if isinstance(problem, EngineError):
                return problem.what[:140]
            return f"{step.op.op} can not be captured: {str(problem).splitlines()[0][:120]}"
        inputs = tuple((dtype_name(one.dtype), tuple(one.shape), tuple(one.stride())) for one in arguments)
        moved = float(sum(one.nbytes for one in arguments) + step.bytes)
        self.first[number] = len(self.kernels)
        self.kernels.append(ProfiledKernel(step.op.op, inputs, time_us, share, moved))
        return len(self.kernels) - 1


def kind_of(step: KernelCall, arguments: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Equal for steps that run the same kernels on other memory."""
    bound = tuple((slot, value.dtype.str, value.shape, value.tobytes()) for slot, value in sorted(step.bound.items()))
    tensors = tuple((one.dtype, tuple(one.shape), one.stride()) for one in arguments)
    return step.op.op, attrs_key(step.op.attrs), bound, tensors


def _time(timer: Timer, call: Callable[[], Any], device: Constants, size: int) -> tuple[float, float | None]:
    """µs of a call alone, and the share of the device that it takes in the company of its like. A call makes `size` bytes."""
    if isinstance(timer, CpuTimer):
        return timer.graph_us([[call]]), None
    launch = device.launch_us or 0.0
    rough = max((timer.graph_us([[call] * 5]) - launch) / 5, 0.5)
    copies = min(max(round(LONG_US / rough), 3), MOST_COPIES)
    alone = max((timer.graph_us([[call] * copies]) - launch) / copies, 0.1)
    if device.node_us is not None and alone < TINY * device.node_us:
        return alone, None
    if size * timer.lanes > MOST_SIDE_BY_SIDE:
        return alone, 1.0
    # The lanes of a graph do not begin at once: what twice as long ones take longer is free of that.
    deep = min(max(round(LANE_US / alone), 2), 16)
    short, long = (timer.graph_us([[call] * count] * timer.lanes) for count in (deep, 2 * deep))
    return alone, share_of(alone, (long - short) / (deep * timer.lanes), timer.lanes, device.issue_us or 0.0)


def share_of(alone_us: float, each_us: float, lanes: int, issue_us: float) -> float | None:
    """Share of the device that a kernel fills; None where the device could not start enough of its like to tell.

    Args:
        alone_us: Its time alone.
        each_us: Time per kernel when many of its like run side by side.
        issue_us: The least that `each_us` can be: the device does not start kernels faster.
    """
    if each_us <= 1.2 * issue_us:
        return None
    return float(min(max(each_us / alone_us, 1 / (16 * lanes)), 1.0))


def _with_grids(
    program: Program, feeds: Arrays, device: torch.device, first: Mapping[int, int], kernels: Sequence[ProfiledKernel]
) -> tuple[list[ProfiledKernel], str]:
    """The kernels with what the profiler records of them, and whether it did."""
    end = max(first, default=-1)

    def run() -> None:
        for number, (_, _, call) in enumerate(walk(program, feeds, device)):
            if number in first:
                with torch.profiler.record_function(f"{MARK}{first[number]}"):
                    call()
            if number >= end:
                break
        torch.cuda.synchronize(device)

    try:
        found = record(run)
    except (RuntimeError, OSError, KeyError, ValueError) as problem:
        return list(kernels), f"the profiler recorded no kernels: {problem}"
    if not found:
        return list(kernels), "the profiler recorded no kernels"
    limits = torch.cuda.get_device_properties(device)
    return [_with_grid(kernel, found.get(kind, []), limits) for kind, kernel in enumerate(kernels)], ""


def _with_grid(kernel: ProfiledKernel, found: Sequence[KernelRecord], limits: Any) -> ProfiledKernel:
    if not found:
        return kernel
    main = max(found, key=lambda one: one.time_us)
    return replace(
        kernel,
        launches=len(found),
        kernel=main.name[:200],
        blocks=main.blocks,
        threads=main.threads,
        registers=main.registers,
        shared_bytes=main.shared_bytes,
        resident=limits.multi_processor_count * resident(main, limits),
        occupancy=main.occupancy,
    )


def resident(kernel: KernelRecord, limits: Any) -> int:
    """Blocks that one multiprocessor holds, by threads, registers and shared memory (CUDA programming guide, multiprocessor level)."""
    warps = -(-kernel.threads // 32)
    by = [32, limits.max_threads_per_multi_processor // max(32 * warps, 1)]
    if kernel.registers:
        by.append(getattr(limits, "regs_per_multiprocessor", 65536) // (-(-kernel.registers * 32 // 256) * 256 * warps))
    if kernel.shared_bytes and hasattr(limits, "shared_memory_per_multiprocessor"):
        by.append(limits.shared_memory_per_multiprocessor // kernel.shared_bytes)
    return max(min(int(most) for most in by), 1)


WIDTHS = (2, 4, 8, 16)
"""Streams of the fork-joins."""

MORE_WIDTHS = (1, 2, 3, 4, 6, 8, 10, 12, 16)
"""Streams of the chains side by side."""

REPEATS = 20
"""Fork-joins in a row in one graph."""

SPINS = 20
"""Kernels of a chain of kernels that only let time pass."""

SPIN_CYCLES = 5_000
COPY_BYTES = 1 << 28
L2_BYTES = 1 << 23
"""Twice that fits in the L2 cache of any GPU that there is a data sheet of but the smallest."""


def constants(timer: CudaTimer, device: torch.device) -> Constants:
    """Measures the device with at least 16 lanes of its timer; a second or so."""
    tiny = [_pointwise(device, 1024) for _ in range(16)]  # one for each lane, on memory of its own
    chain = {length: timer.graph_us([[tiny[0]] * length]) for length in (100, 1000)}
    node = (chain[1000] - chain[100]) / 900
    launch = max(timer.graph_us([[tiny[0]]]) - node, 0.0)
    alone = timer.graph_us([[tiny[0]]], repeat=REPEATS, before=[tiny[0]]) / REPEATS
    fork_join = {width: _fork_join(timer, tiny, width) - alone for width in WIDTHS}
    deep = {width: _chains(timer, tiny[:width], DEEP) for width in MORE_WIDTHS}
    spin = {width: _chains(timer, [_spin] * width, SPINS) for width in MORE_WIDTHS}
    roots = {width: timer.graph_us([[tiny[lane]] for lane in range(width)]) - launch - node for width in WIDTHS}
    return Constants(
        launch_us=launch,
        node_us=node,
        wait_us=max(fork_join[2] / 2, 0.0),
        join_us=max((fork_join[16] - fork_join[2]) / 14, 0.0),
        root_us=max(roots[16] / 15, 0.0),
        issue_us=deep[16] / (16 * DEEP),
        copy_bytes_per_us=_copy(timer, device, launch, COPY_BYTES),
        l2_bytes_per_us=_copy(timer, device, launch, L2_BYTES),
        fork_join_us=fork_join,
        roots_us=roots,
        deep_us=deep,
        spin_us=spin,
        crossing_us=_crossing(timer, tiny) - node,
        concurrency=_concurrency(timer, device, launch),
    )


def _fork_join(timer: CudaTimer, tiny: list[Call], width: int) -> float:
    """µs of a kernel, `width` kernels that follow it side by side, in a row with the next such group that all of them precede."""
    lanes = [[tiny[lane]] for lane in range(width)]
    return timer.graph_us(lanes, repeat=REPEATS, before=[tiny[0]]) / REPEATS


def _chains(timer: CudaTimer, calls: list[Call], length: int) -> float:
    """µs that chains of a length take side by side, without their beginning and end: 10 kernels more, less 10 kernels."""
    long, short = (timer.graph_us([[call] * count for call in calls], before=[calls[0]]) for count in (length + 10, 10))
    return long - short


def _crossing(timer: CudaTimer, tiny: list[Call]) -> float:
    """µs per kernel of a chain that changes streams at every step."""
    return timer.graph_us([[], [tiny[0]]], repeat=4 * REPEATS, before=[tiny[1]]) / (8 * REPEATS)


def _spin() -> None:
    torch.cuda._sleep(SPIN_CYCLES)


def _copy(timer: CudaTimer, device: torch.device, launch: float, size: int) -> float:
    """Bytes read and written per µs by copies of a size. (A kernel: a copy of the driver's may take another way.)"""
    source = torch.zeros(size // 4, device=device)
    target = torch.empty_like(source)
    call = functools.partial(torch.mul, source, 1.0, out=target)
    return 10 * 2 * size / max(timer.graph_us([[call] * 10]) - launch, 0.1)


def _concurrency(timer: CudaTimer, device: torch.device, launch: float) -> Mapping[str, float]:
    """Ratio of the time of two kernels of some 10 µs side by side to that of the longer one alone, by class."""
    made = {name: _sized(timer, maker, device, launch) for name, maker in _CLASSES.items()}
    result: dict[str, float] = {}
    for first, second in itertools.combinations_with_replacement(made, 2):
        both = timer.graph_us([made[first][0][0], made[second][0][1]]) - launch
        result[f"{first}+{second}"] = both / max(made[first][1], made[second][1])
    return result


def _sized(
    timer: CudaTimer, maker: Callable[[torch.device], Call], device: torch.device, launch: float
) -> tuple[list[list[Call]], float]:
    """Two chains of a class, of about 100 µs each, and the time of one alone."""
    calls = [maker(device), maker(device)]
    one = max((timer.graph_us([[calls[0]] * 10]) - launch) / 10, 0.5)
    length = max(1, round(100 / one))
    chains = [[call] * length for call in calls]
    return chains, timer.graph_us([chains[0]]) - launch


def _gemm(device: torch.device) -> Call:
    """A product that fills an eighth of a large GPU: 128 x 512 by 512 x 512."""
    a, b = torch.rand(128, 512, device=device), torch.rand(512, 512, device=device)
    out = torch.empty(128, 512, device=device)
    return lambda: torch.mm(a, b, out=out)


def _gather(device: torch.device) -> Call:
    table = torch.rand(1 << 18, 64, device=device)
    rows = torch.randint(0, 1 << 18, (1 << 14,), device=device)
    out = torch.empty(1 << 14, 64, device=device)
    return lambda: torch.index_select(table, 0, rows, out=out)


def _pointwise(device: torch.device, size: int = 1 << 22) -> Call:
    source = torch.rand(size, device=device)
    target = torch.empty_like(source)
    return lambda: torch.add(source, 1.0, out=target)


_CLASSES = {"gemm": _gemm, "gather": _gather, "pointwise": _pointwise}
