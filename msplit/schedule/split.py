"""Splits of a model over several GPUs: ways to make them, and the judgement whether one gains.

Ways to put a model on several GPUs, each simulated.

Embedding tables are packed by the time that their columns take, those of a large model by their size, each on the GPU with the least so
far that has room. What is left goes to the first GPU, or wherever it ends earliest, copies counted: list scheduling with the earliest
finish (HEFT: Topcuoglu, Hariri and Wu, 2002), on blocks or on whole branches.

Whether to split a model over several GPUs: one judgement, which every command tells in the same words.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np

from msplit.core.graph import Ints
from msplit.cost.gpus import gpu_title
from msplit.schedule.algorithms import LIST
from msplit.schedule.choose import STREAMS, WORTH, best, choose, coarsen
from msplit.schedule.split_problem import BlockMemory, SplitProblem, join, simulate

NOT_PLACED = -1


@dataclass(frozen=True, eq=False)
class GpuSplit:
    """One way to put a model on several GPUs, and what the simulator says of it.

    Attributes:
        name: How it was found.
        lane: Per block its stream; GPU g has `streams` of them, from ``g * streams`` on.
        gpu: Per block.
        makespan_us: Of a step.
        copies: How many copies between GPUs a step takes.
        copied: Their bytes.
        weights: Per GPU the bytes of weights that it holds.
        tables: Per GPU how many embedding tables or groups of them.
    """

    name: str
    lane: Ints
    gpu: Ints
    streams: int
    makespan_us: float
    copies: int
    copied: float
    weights: tuple[float, ...]
    tables: tuple[int, ...]

    @property
    def several(self) -> bool:
        """True if more than one GPU does something."""
        return len(np.unique(self.gpu)) > 1


def splits(split: SplitProblem, streams: int) -> list[GpuSplit]:
    """All ways that fit, the fastest first.

    Args:
        streams: How many each GPU may use.
    """
    found = []
    for name, gpu in _starts(split, streams):
        pinned = bool((split.blocks.pin >= 0).any())
        for width in [streams] if pinned else sorted({1, streams}):
            lane = _earliest(split, gpu, width)
            if lane is not None:
                spread = lane // width * streams + lane % width
                found.append(_simulated(split, name, spread.astype(np.int32), streams))
    return sorted(found, key=lambda one: one.makespan_us)


def _starts(split: SplitProblem, streams: int) -> list[tuple[str, Ints]]:
    """Per way the GPU of each block that is decided before list scheduling, or `NOT_PLACED`."""
    free = np.full(len(split.blocks), NOT_PLACED, np.int32)
    found = [("blocks", free)]
    packed = _packed(split)
    if packed is not None:
        found += [("tables", np.where(packed < 0, 0, packed).astype(np.int32)), ("tables and blocks", packed)]
    if len(split.blocks):
        group = coarsen(split.blocks, 2 * split.link.copy_us)
        whole = _earliest(_grouped(split, group, streams), np.full(group.max() + 1, NOT_PLACED, np.int32), 1)
        if whole is not None:
            found.append(("branches", whole[group]))
    return found


def _packed(split: SplitProblem) -> Ints | None:
    """Tables on GPUs, everything else free; None where there are no tables, or no room for them."""
    if not split.tables:
        return None
    others = split.weight_bytes - sum(table.bytes for table in split.tables)
    for weight in (attrgetter("time_us"), attrgetter("bytes")):
        room = [split.memory - (others if gpu == 0 else 0.0) for gpu in range(split.gpus)]
        load = [0.0] * split.gpus
        placed = np.full(len(split.blocks), NOT_PLACED, np.int32)
        for table in sorted(split.tables, key=weight, reverse=True):
            fits = [gpu for gpu in range(split.gpus) if table.bytes <= room[gpu]]
            if not fits:
                break
            gpu = min(fits, key=lambda gpu: (load[gpu], gpu))
            room[gpu] -= table.bytes
            load[gpu] += weight(table)
            mine = [block for block in table.blocks if placed[block] == NOT_PLACED]
            placed[mine] = gpu
        else:
            return placed
    return None


def _grouped(split: SplitProblem, group: Ints, streams: int) -> SplitProblem:
    """This problem with groups of blocks as its blocks, and one stream for each GPU in place of `streams`."""
    problem = split.blocks
    src, dst = problem.dag.src, problem.dag.dst()
    leaving = np.zeros(len(problem), np.bool_)
    leaving[src[group[src] != group[dst]]] = True

    def within(held: tuple[BlockMemory, ...]) -> tuple[BlockMemory, ...]:
        return tuple(replace(one, blocks=tuple(np.unique(group[list(one.blocks)]).tolist())) for one in held)

    grouped = problem.grouped(group)
    return replace(
        split,
        blocks=replace(grouped, pin=np.where(grouped.pin < 0, -1, grouped.pin // streams).astype(np.int32)),
        sent=np.bincount(group[leaving], split.sent[leaving], len(grouped)).astype(np.float64),
        fetched=np.bincount(group, split.fetched, len(grouped)).astype(np.float64),
        weights=within(split.weights),
        inputs=within(split.inputs),
        tables=within(split.tables),
    )


def _earliest(split: SplitProblem, gpu: Ints, streams: int) -> Ints | None:
    """Per block its stream, by earliest finish in the order of the longest path to the end; None where weights do not fit.

    Args:
        gpu: Per block where it has to be, or `NOT_PLACED`.
        streams: How many each GPU has.
    """
    problem, lanes = split.blocks, _Lanes(split, streams)
    tied: dict[int, int] = {}
    for block in problem.by_rank.tolist():
        if problem.joints[block]:
            lanes.pass_on(block)
            continue
        tie, must = int(problem.tie[block]), int(gpu[block])
        fixed = tied.get(tie, int(problem.pin[block]))
        candidates = range(split.gpus * streams) if must == NOT_PLACED else range(must * streams, (must + 1) * streams)
        ends = [
            (lanes.ends(block, lane), lane)
            for lane in (candidates if fixed < 0 else (fixed,))
            if lanes.has_room(block, lane // streams)
        ]
        if not ends:
            return None
        _, lane = min(ends)
        lanes.put(block, lane)
        if tie >= 0:
            tied.setdefault(tie, lane)
    return np.asarray(lanes.of, np.int32)


class _Lanes:
    """Streams of several GPUs as list scheduling fills them, one kernel after the other; nothing slows anything down."""

    def __init__(self, split: SplitProblem, streams: int) -> None:
        count, gpus = len(split.blocks), split.gpus
        self.split, self.streams = split, streams
        self.of = [0] * count
        self.weights: list[list[int]] = [[] for _ in range(count)]
        for number, weight in enumerate(split.weights):
            for block in weight.blocks:
                self.weights[block].append(number)
        self.fed = {block for one in split.inputs for block in one.blocks}
        self.held: list[set[int]] = [set() for _ in range(gpus)]
        self.room = [split.memory] * gpus
        self.free = [place * split.link.launch_us for place in range(gpus) for _ in range(streams)]
        self.link = dict.fromkeys(((one, other) for one in range(gpus) for other in range(gpus)), 0.0)
        self.there: dict[tuple[int, int], float] = {}  # (block, GPU) -> when a copy of its results is there
        self.finish = [0.0] * count
        dag = split.blocks.dag
        self.start: list[int] = dag.start.tolist()
        self.src: list[int] = dag.src.tolist()
        self.joints: list[bool] = split.blocks.joints.tolist()
        self.work: list[float] = split.blocks.work_us.tolist()

    def producers(self, block: int) -> list[int]:
        return self.src[self.start[block] : self.start[block + 1]]

    def has_room(self, block: int, gpu: int) -> bool:
        """True if a GPU holds the weights that a block reads, or can."""
        return self._more(block, gpu) <= self.room[gpu]

    def _more(self, block: int, gpu: int) -> float:
        return sum(self.split.weights[number].bytes for number in self.weights[block] if number not in self.held[gpu])

    def _arrives(self, block: int, gpu: int) -> float:
        """Time at which the output of a block is on a GPU."""
        own = self.of[block] // self.streams
        if own == gpu or self.joints[block]:
            return self.finish[block]
        known = self.there.get((block, gpu))
        if known is not None:
            return known
        return max(self.finish[block], self.link[own, gpu]) + self.split.link.takes_us(self.split.sent[block])

    def _ends(self, block: int, lane: int) -> float:
        gpu = lane // self.streams
        fed = self.split.link.copy_us if gpu and block in self.fed else 0.0
        return (
            max([fed, self.free[lane], *(self._arrives(one, gpu) for one in self.producers(block))]) + self.work[block]
        )

    def ends(self, block: int, lane: int) -> float:
        """Time at which a block would be over on a stream, and what is fetched of it on the first GPU."""
        fetched = self.split.fetched[block]
        return self._ends(block, lane) + (
            self.split.link.takes_us(fetched) if fetched > 0 and lane >= self.streams else 0.0
        )

    def put(self, block: int, lane: int) -> None:
        """Lets a block run on a stream."""
        gpu = lane // self.streams
        for one in self.producers(block):
            own = self.of[one] // self.streams
            if own != gpu and not self.joints[one] and (one, gpu) not in self.there:
                self.there[one, gpu] = self.link[own, gpu] = self._arrives(one, gpu)
        self.finish[block] = self.free[lane] = self._ends(block, lane)
        self.of[block] = lane
        self.room[gpu] -= self._more(block, gpu)
        self.held[gpu].update(self.weights[block])

    def pass_on(self, block: int) -> None:
        """A joint is over when all is that it waits for."""
        self.finish[block] = max((self.finish[one] for one in self.producers(block)), default=0.0)


def _simulated(split: SplitProblem, name: str, lane: Ints, streams: int) -> GpuSplit:
    """A placement with what the simulator says of it."""
    gpu = np.where(split.blocks.joints, 0, lane // streams).astype(np.int32)
    joined = join(split, lane, streams)
    found = simulate(joined.problem, joined.plan, joined.device, joined.work_us, joined.earliest_us)

    joints = split.blocks.joints

    def on(held: BlockMemory, place: int) -> bool:
        """True if a GPU reads it. A joint runs nowhere, whatever stands for its GPU, and has no weights there."""
        return any(gpu[block] == place for block in held.blocks if not joints[block])

    return GpuSplit(
        name=name,
        lane=lane,
        gpu=gpu,
        streams=streams,
        makespan_us=found.makespan_us,
        copies=len(joined.copies),
        copied=sum(joined.copies.values()),
        weights=tuple(sum(one.bytes for one in split.weights if on(one, place)) for place in range(split.gpus)),
        tables=tuple(sum(on(table, place) for table in split.tables) for place in range(split.gpus)),
    )


_ALL = 20_000
"""Blocks up to which all algorithms are tried for the one GPU that a split is held against."""


@dataclass(frozen=True, eq=False)
class SplitJudgement:
    """Judgement of a split over GPUs: its simulated gain.

    Attributes:
        kind: ``nothing`` (no node launches a kernel), ``too large`` (the weights fit on no number of GPUs asked for), ``needed`` (they
            do not fit on one), ``pays`` (it is at least `WORTH` times as fast as one GPU), ``loses``.
        gpus: How many were asked for.
        one_us: Simulated step on one GPU, on the streams that are best there; None where its weights do not fit.
        best: The fastest split that uses several GPUs and fits; None where there is none.
        words: All this, in one to four sentences.
    """

    kind: str
    gpus: int
    one_us: float | None
    best: GpuSplit | None
    words: str

    @property
    def helps(self) -> bool:
        """True if the model should be split."""
        return self.kind in ("needed", "pays")

    @property
    def gain(self) -> float | None:
        """Speedup of the split over one GPU; None where one of the two is not to be had."""
        return None if self.one_us is None or self.best is None else self.one_us / self.best.makespan_us


def judge_split(split: SplitProblem, gpu: str, *, streams: int = STREAMS) -> SplitJudgement:
    """Simulates one GPU and all ways to use several.

    Args:
        gpu: Name of the data sheet, for the words.
        streams: Most streams of each GPU.
    """
    if not (split.blocks.kernels > 0).any():
        words = f"{split.gpus} GPUs can not help this model: no node launches a kernel."
        return SplitJudgement("nothing", split.gpus, None, None, words)
    one = _one(split, streams) if split.weight_bytes <= split.memory else None
    found = next((way for way in splits(split, streams) if way.several), None)
    if one is None and found is None:
        return SplitJudgement("too large", split.gpus, None, None, _too_large(split, gpu))
    if one is None:
        assert found is not None
        words = f"The weights, {_size(split.weight_bytes)}, do not fit on one {gpu_title(gpu)} ({_size(split.memory)} for weights). "
        return SplitJudgement(
            "needed", split.gpus, None, found, words + f"On {_told(found, split)}.{_one_with_host(split)}"
        )
    if found is None or one < WORTH * found.makespan_us:
        return SplitJudgement("loses", split.gpus, one, found, _loses(split, one, found))
    words = (
        f"{split.gpus} GPUs pay for a shorter step: {one / found.makespan_us:.2f}x predicted over one, {one:.0f} µs there. On "
        f"{_told(found, split)}. {_copies_instead(split)}"
    )
    return SplitJudgement("pays", split.gpus, one, found, words)


def _one(split: SplitProblem, streams: int) -> float:
    """A step on the first GPU, what was placed on others before included."""
    problem = split.blocks
    problem = replace(problem, pin=np.where(problem.pin < streams, problem.pin, -1).astype(np.int32))
    names = None if len(split.blocks) <= _ALL else (LIST,)
    return best(choose(problem, streams, names, refining=0)).makespan_us


def _told(found: GpuSplit, split: SplitProblem) -> str:
    """A text of what is on which GPU, and what crosses."""
    held = " and ".join(_size(bytes) for bytes in found.weights)
    tables = f" ({' and '.join(map(str, found.tables))} tables)" if split.tables else ""
    return f"{split.gpus} GPUs a step takes {found.makespan_us:.0f} µs, with {held} of weights{tables} and {_copies(found)} between them"


def _copies(found: GpuSplit) -> str:
    if found.copies == 1:
        return f"one copy of {_size(found.copied)}"
    return f"{found.copies} copies of {_size(found.copied)} in all"


def _loses(split: SplitProblem, one: float, found: GpuSplit | None) -> str:
    instead = _copies_instead(split)
    if found is None:
        return f"{split.gpus} GPUs do not pay: no way to use more than one was found. {instead}"
    link = split.link
    price = (
        f"{_copies(found)} between them, {link.copy_us:.0f} µs each beside their bytes, and {link.launch_us:.0f} µs until the next GPU "
        "starts cost more than what runs side by side saves"
    )
    return f"{split.gpus} GPUs do not pay: the best split takes {found.makespan_us:.0f} µs, one GPU {one:.0f}: {price}. {instead}"


def _copies_instead(split: SplitProblem) -> str:
    return f"For more requests per second, a copy of the model on each gives up to {split.gpus}x."


def _too_large(split: SplitProblem, gpu: str) -> str:
    largest = max(split.weights, key=lambda weight: weight.bytes)
    if largest.bytes > split.memory:
        why = f"'{largest.name}' alone takes {_size(largest.bytes)}: divide it by rows (a partitioned variable)"
    else:
        why = f"use {max(split.gpus + 1, -int(-split.weight_bytes // split.memory))} or more"
    return (
        f"{split.gpus} GPUs can not hold this model: its weights take {_size(split.weight_bytes)}, and each "
        f"{gpu_title(gpu)} has {_size(split.memory)} for them; {why}.{_one_with_host(split)}"
    )


def _one_with_host(split: SplitProblem) -> str:
    """The other way to run what does not fit, where lookup tables are what is large."""
    tables = sum(table.bytes for table in split.tables)
    fits = split.weight_bytes - tables <= split.memory
    return " One GPU runs it with lookup tables in the host's memory (--table-memory)." if fits and tables else ""


def _size(bytes: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if bytes >= scale:
            return f"{bytes / scale:.1f} {unit}"
    return f"{bytes / 1e3:.1f} kB"
