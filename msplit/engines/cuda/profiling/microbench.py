"""What a GPU itself takes to replay a CUDA graph, measured with kernels that do next to nothing."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping

import torch

from msplit.cost.costs import DEEP, Constants
from msplit.engines.cuda.autotune.timer import Call, CudaTimer

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
    tiny = _tiny(device)
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


def _tiny(device: torch.device) -> list[Call]:
    """One tiny kernel per lane, on memory of its own."""

    def kernel() -> Call:
        source, target = torch.ones(1024, device=device), torch.empty(1024, device=device)
        return lambda: torch.add(source, 1.0, out=target)

    return [kernel() for _ in range(16)]


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
    """How much longer two kernels of some 10 µs take side by side than the longer of them alone, by class."""
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


def _pointwise(device: torch.device) -> Call:
    source = torch.rand(1 << 22, device=device)
    target = torch.empty_like(source)
    return lambda: torch.add(source, 1.0, out=target)


_CLASSES = {"gemm": _gemm, "gather": _gather, "pointwise": _pointwise}
