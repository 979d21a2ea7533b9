"""Scheduling problems over several GPUs: what crosses between them, and how long a step takes.

A scheduling problem with what matters once there are several GPUs: links, memory, and how many bytes each block hands on.

What crosses between GPUs, as blocks and streams of their own: a plan over all GPUs is then a plan like any other.

A block's results are copied once to each GPU that reads them, on the link between the two, one copy after the other. The inputs of the
model are on the first GPU, and its outputs are wanted there. Joints hand on no data: what waits through one waits for events alone.

How long a step on several GPUs takes.

Each GPU is the event-driven model of `schedule.simulate`, with a clock of its own: what runs on one slows nothing down on another. A
link is a device, too, on which one copy runs after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import inf

import numpy as np

from msplit.analysis.embeddings import Column, columns
from msplit.analysis.inventory import parameters
from msplit.core.dag import Dag, DisjointSets, reached
from msplit.core.graph import CONTROL, Floats, Ints
from msplit.cost.costs import Costs
from msplit.cost.gpus import Gpu, data_sheet
from msplit.flatten.flat import FlatGraph
from msplit.schedule.machine import Machine
from msplit.schedule.plan import Plan, make_plan, record_order
from msplit.schedule.problem import Problem
from msplit.schedule.simulate import Simulation

MEMORY_FOR_WEIGHTS = 0.9
"""Share of a GPU's memory that weights may take; the rest is for what a step makes, the libraries' workspaces and the driver."""

SMALL = 4096
"""Bytes below which a weight is wherever it is read, and counts for nothing."""


@dataclass(frozen=True)
class GpuLink:
    """The link between two GPUs of a host.

    Attributes:
        bytes_per_us: Of a copy, one way.
        copy_us: What a copy takes beyond its bytes.
        launch_us: By how much later each further GPU starts: one thread launches a step on all of them.
    """

    bytes_per_us: float = 385e3
    copy_us: float = 18.0
    launch_us: float = 28.0

    @staticmethod
    def of(gpu: Gpu) -> GpuLink:
        """The link that a data sheet describes."""
        return GpuLink(gpu.link_gbs * 1e3, gpu.link_us, gpu.other_gpu_us)

    def takes_us(self, bytes: float) -> float:
        """Time of a copy, µs."""
        return self.copy_us + bytes / self.bytes_per_us


@dataclass(frozen=True)
class BlockMemory:
    """Memory that blocks read: a weight, an input of the model, or the tables of an embedding column.

    Attributes:
        name: Its node, or that of its first table.
        bytes: Its size; 0 where that is not known.
        blocks: Those that read it, ascending.
        time_us: What they take, for a table.
    """

    name: str
    bytes: float
    blocks: tuple[int, ...]
    time_us: float = 0.0


@dataclass(frozen=True, eq=False)
class SplitProblem:
    """Blocks to be put on the streams of several GPUs. The first GPU gets the inputs of the model and gives its outputs.

    Attributes:
        blocks: The same for one GPU.
        gpus: How many there are, all alike.
        memory: Bytes that weights may take on each.
        sent: Per block the bytes that others read of it. A copy of a block's results to another GPU takes all of them.
        fetched: Per block the bytes of it that are outputs of the model.
        weights: Where a block runs, the weights that it reads must be; on several GPUs, where blocks of several read them.
        inputs: Of the model.
        tables: Embedding columns, those that share a table as one.
    """

    blocks: Problem
    gpus: int
    link: GpuLink
    memory: float
    sent: Floats
    fetched: Floats
    weights: tuple[BlockMemory, ...] = ()
    inputs: tuple[BlockMemory, ...] = ()
    tables: tuple[BlockMemory, ...] = ()

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights."""
        return sum(weight.bytes for weight in self.weights)

    @staticmethod
    def of(flat: FlatGraph, costs: Costs, problem: Problem, gpus: int, *, memory_gb: float = 0.0) -> SplitProblem:
        """From a model and its problem for one GPU (`Problem.from_flat`).

        Args:
            memory_gb: Memory of each GPU, 10^9 bytes; 0: that of the data sheet that priced the nodes.
        """
        sheet = data_sheet(costs.gpu)
        graph, block = flat.graph, problem.block
        crossing = graph.edges.port != CONTROL
        src, dst = graph.edges.src[crossing], graph.edges.dst[crossing]
        leaving = np.zeros(len(flat), np.bool_)
        leaving[src[block[src] != block[dst]]] = True
        fetched = np.zeros(len(flat), np.bool_)
        for output in flat.outputs:
            fetched[_makers(flat, block, output.node)] = True

        def sums(mask: np.ndarray) -> Floats:
            chosen = mask & (block >= 0)
            return np.bincount(block[chosen], costs.out_bytes[chosen], len(problem)).astype(np.float64)

        weights = [
            BlockMemory(weight.name, float(weight.bytes), _readers(flat, block, graph.index[weight.name]))
            for weight in parameters(graph)
            if weight.bytes >= SMALL
        ]
        fed = dict.fromkeys(tensor.node for tensor in flat.inputs)
        return SplitProblem(
            problem,
            gpus,
            GpuLink.of(sheet),
            MEMORY_FOR_WEIGHTS * (memory_gb or sheet.memory_gb) * 1e9,
            sums(leaving | fetched),
            sums(fetched),
            tuple(weight for weight in weights if weight.blocks),
            tuple(
                BlockMemory(graph.names[node], float(costs.out_bytes[node]), _readers(flat, block, node))
                for node in fed
            ),
            _tables(columns(flat, costs), block),
        )


def _readers(flat: FlatGraph, block: Ints, node: int) -> tuple[int, ...]:
    """The blocks that read what a node makes, also through nodes that launch nothing."""
    edges = flat.graph.edges

    def users(node: int) -> Iterable[int]:
        out = flat.graph.out_edges(node)
        users: list[int] = edges.dst[out[edges.port[out] != CONTROL]].tolist()
        return users

    through = reached([node], lambda one: (user for user in users(one) if block[user] < 0))
    return tuple(sorted({int(block[user]) for one in through for user in users(one) if block[user] >= 0}))


def _makers(flat: FlatGraph, block: Ints, node: int) -> list[int]:
    """The nodes with a kernel whose results an output is, also through nodes that launch nothing."""
    back = reached([node], lambda one: () if block[one] >= 0 else (producer for producer, _ in flat.graph.inputs(one)))
    return [one for one in back if block[one] >= 0]


def _tables(found: tuple[Column, ...], block: Ints) -> tuple[BlockMemory, ...]:
    """The columns' tables and blocks. A table is on one GPU, so that columns that share one are together."""
    first: dict[int, int] = {}
    together = DisjointSets(len(found))
    for number, column in enumerate(found):
        for part in {part for lookup in column.lookups for part in lookup.table.parts}:
            together.join(first.setdefault(part, number), number)
    groups: dict[int, list[Column]] = {}
    for number, column in enumerate(found):
        groups.setdefault(together.find(number), []).append(column)
    tables = []
    for members in groups.values():
        held = {lookup.table.parts: lookup.table for column in members for lookup in column.lookups}
        nodes = np.concatenate([column.nodes for column in members])
        tables.append(
            BlockMemory(
                next(iter(held.values())).name,
                float(sum(table.bytes for table in held.values())),
                tuple(np.unique(block[nodes][block[nodes] >= 0]).tolist()),
                sum(column.time_us for column in members),
            )
        )
    return tuple(tables)


INPUTS = -1
"""Stands for the inputs of the model where a copy says whose results it moves."""

Copies = dict[tuple[int, int], float]
"""(block, or `INPUTS`; GPU that it goes to) -> bytes."""


def copies_of(split: SplitProblem, gpu: Ints) -> Copies:
    """Copies between GPUs that a split needs.

    Args:
        gpu: Per block its GPU.
    """
    problem = split.blocks
    src, dst = problem.dag.src, problem.dag.dst()
    crossing = (gpu[src] != gpu[dst]) & ~problem.joints[src] & ~problem.joints[dst]
    found: Copies = {}
    for block, to in sorted(set(zip(src[crossing].tolist(), gpu[dst[crossing]].tolist(), strict=True))):
        found[block, to] = float(split.sent[block])
    for block in np.flatnonzero((split.fetched > 0) & (gpu != 0)).tolist():
        found.setdefault((block, 0), float(split.fetched[block]))
    for one in split.inputs:
        for to in {int(gpu[block]) for block in one.blocks} - {0}:
            found[INPUTS, to] = found.get((INPUTS, to), 0.0) + one.bytes
    return found


@dataclass(frozen=True, eq=False)
class Joined:
    """A split as one problem and one plan over all GPUs, copies included.

    Attributes:
        problem: Blocks and copies.
        plan: Over them.
        device: Per stream of the plan where it is: a GPU, or, from the number of GPUs on, a link.
        work_us: Per block and copy.
        earliest_us: When each may start at the earliest.
        copies: What is copied.
    """

    problem: Problem
    plan: Plan
    device: tuple[int, ...]
    work_us: Floats
    earliest_us: Floats
    copies: Copies


def join(split: SplitProblem, lane: Ints, streams: int) -> Joined:
    """Puts in the copies and plans.

    Args:
        lane: Per block its stream; GPU g has those from ``g * streams`` on.
        streams: How many each GPU has.
    """
    problem = split.blocks
    gpu: Ints = np.where(problem.joints, 0, lane // streams).astype(np.int32)
    copies = copies_of(split, gpu)
    whole = _with_copies(split, gpu, copies)
    ways = [(0 if block == INPUTS else int(gpu[block]), to) for block, to in copies]
    link = {way: place for place, way in enumerate(sorted(set(ways)))}
    own = [split.gpus * streams + link[way] for way in ways]
    lanes = np.concatenate([np.where(problem.joints, -1, lane), np.asarray(own, np.int32)]).astype(np.int32)
    device = [place // streams for place in range(split.gpus * streams)] + [
        split.gpus + place for place in range(len(link))
    ]
    used = np.unique(lanes[lanes >= 0])
    lanes[lanes >= 0] = np.searchsorted(used, lanes[lanes >= 0])
    work = np.concatenate([problem.work_us, [split.link.takes_us(bytes) for bytes in copies.values()]])
    starts = np.concatenate([gpu * split.link.launch_us, np.zeros(len(copies))])
    plan = make_plan(whole.dag, lanes, record_order(whole.dag, work))
    return Joined(whole, plan, tuple(device[one] for one in used.tolist()), work, starts, copies)


def _with_copies(split: SplitProblem, gpu: Ints, copies: Copies) -> Problem:
    """Blocks and, behind them, copies. Unlike those of other problems they are not numbered topologically."""
    problem, count = split.blocks, len(split.blocks)
    number = {copy: count + place for place, copy in enumerate(copies)}
    src, dst = problem.dag.src.tolist(), problem.dag.dst().tolist()
    to = gpu.tolist()
    edges = {
        (number.get((block, to[user]), block) if to[block] != to[user] else block, user)
        for block, user in zip(src, dst, strict=True)
    }
    edges |= {(block, place) for (block, _), place in number.items() if block != INPUTS}
    edges |= {(number[INPUTS, to[user]], user) for one in split.inputs for user in one.blocks if to[user]}
    more = len(copies)
    return replace(
        problem,
        dag=Dag.of(count + more, [first for first, _ in sorted(edges)], [second for _, second in sorted(edges)]),
        time_us=np.append(problem.time_us, np.ones(more)),
        share=np.append(problem.share, np.full(more, 1e-6)),
        bytes=np.append(problem.bytes, np.zeros(more)),
        kernels=np.append(problem.kernels, np.ones(more, np.int32)),
        tie=np.append(problem.tie, np.full(more, -1, np.int32)),
        pin=np.append(problem.pin, np.full(more, -1, np.int32)),
    )


class _Device:
    """A GPU or link and the work on it, which progresses at one rate, so that one virtual clock serves (see `schedule.simulate`)."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.running: list[tuple[float, int]] = []  # (virtual time, block): ends then
        self.used = (0.0, 0.0, 0.0)
        self.now = self.virtual = 0.0

    def rate(self) -> float:
        """Real time per virtual time of what runs now."""
        machine, many, (sms, bandwidth, issue) = self.machine, len(self.running), self.used
        others = 1 - 1 / many
        crowd = machine.crowd_us / machine.issue_us if machine.issue_us > 0 else 0.0
        slowest = max(
            1.0,
            sms,
            bandwidth,
            1.0 + machine.contention * sms * others,
            1.0 + crowd * issue * others,
            issue * max(many / machine.issue_lanes, 1.0),
        )
        return min(slowest, float(many)) if many > 1 else max(1.0, sms, bandwidth, issue)

    def ends(self) -> float:
        """Time at which the first of what runs ends."""
        return self.now + (self.running[0][0] - self.virtual) * self.rate() if self.running else inf

    def start(self, now: float, block: int, work: float, demand: tuple[float, ...]) -> None:
        """Lets a block run."""
        if self.running:
            self.virtual += (now - self.now) / self.rate()
        self.now = now
        self.used = (self.used[0] + demand[0], self.used[1] + demand[1], self.used[2] + demand[2])
        heappush(self.running, (self.virtual + work, block))

    def end(self, demands: Sequence[tuple[float, ...]]) -> tuple[float, int]:
        """Time at which the first block ends, and which."""
        self.now = self.ends()
        self.virtual, block = heappop(self.running)
        if self.running:
            gone = demands[block]
            self.used = (self.used[0] - gone[0], self.used[1] - gone[1], self.used[2] - gone[2])
        else:
            self.used, self.virtual = (0.0, 0.0, 0.0), 0.0
        return self.now, block


def simulate(problem: Problem, plan: Plan, device: Sequence[int], work_us: Floats, earliest_us: Floats) -> Simulation:
    """Plays a plan. O(n (log n + devices)) for n blocks and waits; with one device it says what `schedule.simulate` does.

    Args:
        device: Per stream of the plan.
        work_us: Per block.
        earliest_us: Per block, when it may start at the earliest.

    Raises:
        ValueError: The streams of the plan wait for each other in a circle.
    """
    count, machine = len(problem), problem.machine
    start, end = np.full(count, -1.0), np.full(count, -1.0)
    lanes, placed = plan.stream.tolist(), plan.order.tolist()
    following, needed, waits, waiters = plan.links
    more = [max(many - 1, 0) * machine.join_us for many in waits]
    work, ready, missing = work_us.tolist(), earliest_us.tolist(), needed.copy()
    demands = [tuple(row) for row in problem.demand.tolist()]
    devices = [_Device(machine) for _ in range(max(device, default=0) + 1)]
    upcoming: list[tuple[float, int]] = []
    now, left = 0.0, len(placed)
    for node in placed:
        if missing[node] == 0:
            heappush(upcoming, (ready[node], node))

    def over(node: int, wait: float) -> None:
        """One of the block's predecessors has ended, `wait` µs before it may start."""
        ready[node] = max(ready[node], now + wait)
        missing[node] -= 1
        if missing[node] == 0:
            heappush(upcoming, (max(ready[node] + more[node], now), node))

    while left:
        first = min(devices, key=_Device.ends)
        then = first.ends()
        if upcoming and upcoming[0][0] <= then:
            now, node = heappop(upcoming)
            start[node] = now
            devices[device[lanes[node]]].start(now, node, work[node], demands[node])
            continue
        if then == inf:
            raise ValueError("the streams of the plan wait for each other in a circle")
        now, ended = first.end(demands)
        end[ended] = now
        left -= 1
        for node in waiters.get(ended, ()):
            over(node, machine.wait_us)
        if following[ended] >= 0:
            over(following[ended], 0.0)
    return Simulation(now + machine.join_us * len(plan.join) + machine.step_us if placed else 0.0, start, end)
