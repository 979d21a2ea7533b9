"""Counts of a graph: what it has of each kind, and how wide it is.

An inventory of a graph: ops, parameters, functions, regions, tables and branches, counted and sorted.

How many kernels could run at once: on one level, and at most.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter, defaultdict, deque
from dataclasses import dataclass

import numpy as np

from msplit.analysis.branches import Branches, KernelGraph
from msplit.analysis.colocation import ColocationGroups
from msplit.analysis.embeddings import Column, EmbeddingTable
from msplit.core.dag import longest
from msplit.core.graph import Graph, Ints, TensorValue
from msplit.cost.costs import Costs
from msplit.flatten.flat import FlatGraph, Region
from msplit.formats.model import Model
from msplit.opset.traits import VARIABLES, ops_with

_VARIABLES = VARIABLES | ops_with("handle")
_BITS = {"bool": 8, "half": 16, "bfloat16": 16, "resource": 0, "variant": 0, "string": 0}
_SIZE_OF_TYPE = re.compile(r"[a-z]+([0-9]{1,3})(?![0-9])")


@dataclass(frozen=True)
class OpCount:
    """Nodes of one op: how many may run on the GPU, run on the host, and launch a kernel, and the time of these kernels."""

    op: str
    gpu: int
    host: int
    kernels: int
    time_us: float


@dataclass(frozen=True)
class Parameter:
    """A weight: a constant that is not a scalar, or a variable. Where its sizes are not known its shape is None, and its bytes are 0."""

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...] | None
    bytes: int


@dataclass(frozen=True)
class FunctionSize:
    """A function of the library by its name, and how many nodes its body has: parameters do not count, and calls are not inlined."""

    name: str
    nodes: int


@dataclass(frozen=True, eq=False)
class RegionSize:
    """A region, its nodes in the flat graph, and the time of their kernels in a row, in µs."""

    region: Region
    nodes: Ints
    time_us: float


@dataclass(frozen=True)
class TableUse:
    """An embedding table, how many lookups look into it, and the time of the columns that do, in µs."""

    table: EmbeddingTable
    lookups: int
    time_us: float


@dataclass(frozen=True, eq=False)
class BranchSize:
    """A branch that is worth a stream.

    Attributes:
        nodes: Nodes that launch a kernel, ascending.
        time_us: Their time.
        useful_us: The part of it that can overlap with other work.
        fork: Node that the branch starts from, None where it starts from the inputs.
        join: Node where it ends, None where it ends at the outputs.
    """

    nodes: Ints
    time_us: float
    useful_us: float
    fork: int | None
    join: int | None


def op_counts(flat: FlatGraph, costs: Costs) -> tuple[OpCount, ...]:
    """Count nodes by op and side: the costliest first, then the most frequent, then by name."""
    ops = sorted(set(flat.graph.ops))
    number = {op: place for place, op in enumerate(ops)}
    which = np.fromiter((number[op] for op in flat.graph.ops), np.int64, len(flat))
    launches = (costs.time_us > 0) & ~flat.host
    gpu, host, kernels = (
        np.bincount(which[mask], minlength=len(ops)).tolist() for mask in (~flat.host, flat.host, launches)
    )
    times = np.bincount(which[launches], costs.time_us[launches], len(ops)).tolist()
    counts = [OpCount(*row) for row in zip(ops, gpu, host, kernels, times, strict=True)]
    return tuple(sorted(counts, key=lambda count: (-count.time_us, -count.gpu - count.host, count.op)))


_MAX_AXES = 254
_MAX_BYTES = 2**63 - 1


def parameters(graph: Graph) -> tuple[Parameter, ...]:
    """The weights of a graph, the largest first, then in the order of the graph."""
    found = []
    for node, op in enumerate(graph.ops):
        if op == "Const":
            value = graph.attrs[node].get("value")
            if isinstance(value, TensorValue) and value.shape:
                found.append(_parameter(graph.names[node], op, value.dtype, value.shape))
        elif op in _VARIABLES:
            attrs = graph.attrs[node]
            shape, said = attrs.get("shape"), attrs.get("dtype", "")
            dtype = said if isinstance(said, str) else ""
            known = None
            if isinstance(shape, tuple) and all(type(size) is int for size in shape):
                known = shape
            found.append(_parameter(graph.names[node], op, dtype.removesuffix("_ref"), known))
    return tuple(sorted(found, key=lambda parameter: -parameter.bytes))


def _parameter(name: str, kind: str, dtype: str, shape: tuple[int, ...] | None) -> Parameter:
    size_of_type = _SIZE_OF_TYPE.match(dtype)
    bits = _BITS.get(dtype, int(size_of_type[1]) if size_of_type else 32)
    # A damaged file may claim any number of axes of any length.
    size = 0 if shape is None or len(shape) > _MAX_AXES else min(math.prod(shape) * bits // 8, _MAX_BYTES)
    return Parameter(name, kind, dtype, shape, size)


def functions(model: Model) -> tuple[FunctionSize, ...]:
    """The functions of a model's library, the largest first, then by name."""
    sizes = [
        FunctionSize(name, len(function.body) - len(function.parameters))
        for name, function in model.graph.functions.items()
    ]
    return tuple(sorted(sizes, key=lambda size: (-size.nodes, size.name)))


def regions(flat: FlatGraph, costs: Costs) -> tuple[RegionSize, ...]:
    """The regions of a graph, in its order."""
    found = []
    inside = np.flatnonzero(flat.region >= 0)
    order = inside[np.argsort(flat.region[inside], kind="stable")].astype(np.int32)
    starts = np.searchsorted(flat.region[order], np.arange(len(flat.regions) + 1))
    for number, region in enumerate(flat.regions):
        nodes = order[starts[number] : starts[number + 1]]
        found.append(RegionSize(region, nodes, float(costs.time_us[nodes][~flat.host[nodes]].sum())))
    return tuple(found)


def group_sizes(groups: ColocationGroups) -> Ints:
    """Nodes per group that must share a stream, the largest first."""
    return np.sort(np.bincount(groups.of[groups.of >= 0], minlength=groups.count))[::-1].astype(np.int32)


def table_uses(columns: tuple[Column, ...]) -> tuple[TableUse, ...]:
    """The embedding tables, the largest first, then in the order of their lookups."""
    lookups = Counter(lookup.table for column in columns for lookup in column.lookups)
    times: dict[EmbeddingTable, float] = defaultdict(float)
    for column in columns:
        for table in {lookup.table for lookup in column.lookups}:
            times[table] += column.time_us
    uses = [TableUse(table, count, times[table]) for table, count in lookups.items()]
    return tuple(sorted(uses, key=lambda use: -use.table.bytes))


def branches_that_matter(branches: Branches, *, min_cost_us: float = 5.0, most: int = 100) -> tuple[BranchSize, ...]:
    """The branches that can overlap with others for long enough to be worth a stream, the largest first, as far as so many."""
    worth = np.flatnonzero(branches.useful_us >= min_cost_us)
    worth = worth[np.argsort(-branches.time_us[worth], kind="stable")][:most]
    blocks = branches.blocks
    found = []
    for branch in worth.tolist():
        fork, join = int(branches.fork[branch]), int(branches.join[branch])
        found.append(
            BranchSize(
                branches.nodes(branch),
                float(branches.time_us[branch]),
                float(branches.useful_us[branch]),
                int(blocks.kernels.node[blocks.last[fork]]) if fork >= 0 else None,
                int(blocks.kernels.node[blocks.first[join]]) if join >= 0 else None,
            )
        )
    return tuple(found)


MAX_BLOCKS = 50_000
"""Largest contracted graph, in blocks, for which the largest antichain is computed."""

_MAX_ARCS = 400_000
_UNLIMITED = 1 << 40


@dataclass(frozen=True, eq=False)
class LevelWidth:
    """The level with the most kernels; a level is all kernels with the same number of kernels on the longest path before them.

    Attributes:
        width: How many kernels it has.
        level: Its number, from 0.
        levels: How many levels there are.
        nodes: Its kernels, ascending.
    """

    width: int
    level: int
    levels: int
    nodes: Ints


@dataclass(frozen=True, eq=False)
class Antichain:
    """A largest set of kernels none of which waits for another, ascending. Where the graph is too large, its size is None, and why."""

    size: int | None
    nodes: Ints
    skipped: str = ""


def level_width(kernels: KernelGraph) -> LevelWidth:
    """Find the widest level, the first of equals. Linear."""
    launches = kernels.time_us > 0
    ends = longest(launches, np.arange(len(kernels), dtype=np.int32), *kernels.dag.consumers())
    levels = (ends - launches).astype(np.int64)[launches]
    if len(levels) == 0:
        return LevelWidth(0, 0, 0, np.zeros(0, np.int32))
    counts = np.bincount(levels)
    widest = int(counts.argmax())
    nodes = kernels.node[launches][levels == widest]
    return LevelWidth(int(counts[widest]), widest, len(counts), np.sort(nodes))


def max_antichain(branches: Branches, *, limit: int = MAX_BLOCKS) -> Antichain:
    """Find a largest antichain, exactly.

    By Dilworth's theorem it is as large as the fewest chains that cover the graph, which is a maximum matching of the transitive closure
    (Fulkerson, 1956). The closure is never built: in its stead, flow may pass through a block on the way from one to another. The flow
    starts from the branches, which are nearly the fewest chains, and is completed by Dinic's algorithm.

    Args:
        limit: Largest number of blocks.
    """
    blocks = branches.blocks
    count = len(blocks)
    if count > limit or len(blocks.dag.src) > _MAX_ARCS:
        reason = f"the contracted graph has {count} blocks and {len(blocks.dag.src)} edges, more than {limit} and {_MAX_ARCS}"
        return Antichain(None, np.zeros(0, np.int32), reason)
    real = blocks.time_us > 0
    network = _Network(2 * count + 2)
    source, sink = 2 * count, 2 * count + 1
    begins = {block: network.arc(source, block, 1) for block in np.flatnonzero(real).tolist()}
    ends = {block: network.arc(count + block, sink, 1) for block in np.flatnonzero(real).tolist()}
    for block in range(count):
        network.arc(count + block, block, _UNLIMITED)
    between = {}
    for producer, consumer in zip(blocks.dag.src.tolist(), blocks.dag.dst().tolist(), strict=True):
        between[producer, consumer] = network.arc(producer, count + consumer, _UNLIMITED)
    for branch in range(len(branches)):
        members = branches.members(branch).tolist()
        for producer, consumer in itertools.pairwise(members):
            if real[producer] and real[consumer]:
                network.push((begins[producer], between[producer, consumer], ends[consumer]))
    network.saturate(source, sink)
    reached = network.reachable(source)
    free = [block for block in np.flatnonzero(real).tolist() if reached[block] and not reached[count + block]]
    return Antichain(len(free), np.sort(blocks.kernels.node[_launching(branches, free)]))


def _launching(branches: Branches, chosen: list[int]) -> Ints:
    """The first kernel of each block that launches something."""
    kernels = branches.blocks.kernels
    launching = np.flatnonzero(kernels.time_us > 0)
    found, first = np.unique(branches.blocks.of[launching], return_index=True)
    return launching[first[np.searchsorted(found, chosen)]].astype(np.int32)


class _Network:
    """A flow network. Arc a and its reverse a ^ 1 stand side by side."""

    def __init__(self, nodes: int) -> None:
        self._arcs: list[list[int]] = [[] for _ in range(nodes)]
        self._to: list[int] = []
        self._left: list[int] = []

    def arc(self, start: int, end: int, capacity: int) -> int:
        """Add an arc and return its number."""
        number = len(self._to)
        self._to += (end, start)
        self._left += (capacity, 0)
        self._arcs[start].append(number)
        self._arcs[end].append(number + 1)
        return number

    def push(self, arcs: tuple[int, ...]) -> None:
        """Send one unit along arcs."""
        for number in arcs:
            self._left[number] -= 1
            self._left[number ^ 1] += 1

    def saturate(self, source: int, sink: int) -> None:
        """Send all that fits (Dinic, 1970), without recursion."""
        while True:
            level = self._levels(source)
            if level[sink] < 0:
                return
            place = [0] * len(self._arcs)
            path: list[int] = []
            node = source
            while True:
                if node == sink:
                    self.push(tuple(path))
                    path, node = [], source
                    continue
                arcs = self._arcs[node]
                while place[node] < len(arcs):
                    number = arcs[place[node]]
                    if self._left[number] > 0 and level[self._to[number]] == level[node] + 1:
                        break
                    place[node] += 1
                else:
                    if not path:
                        break
                    node = self._to[path.pop() ^ 1]
                    place[node] += 1
                    continue
                path.append(number)
                node = self._to[number]

    def reachable(self, source: int) -> list[bool]:
        """Per node whether more could flow there."""
        return [level >= 0 for level in self._levels(source)]

    def _levels(self, source: int) -> list[int]:
        level = [-1] * len(self._arcs)
        level[source] = 0
        waiting = deque([source])
        while waiting:
            node = waiting.popleft()
            for number in self._arcs[node]:
                if self._left[number] > 0 and level[self._to[number]] < 0:
                    level[self._to[number]] = level[node] + 1
                    waiting.append(self._to[number])
        return level
