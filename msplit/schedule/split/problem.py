"""A scheduling problem with what matters once there are several GPUs: links, memory, and how many bytes each block hands on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from msplit.analysis.embeddings import Column, columns
from msplit.analysis.inventory import parameters
from msplit.core.graph import CONTROL, Floats, Ints
from msplit.core.union_find import DisjointSets
from msplit.cost.costs import Costs
from msplit.cost.gpus import Gpu, data_sheet
from msplit.flatten.flat import FlatGraph
from msplit.schedule.problem import Problem

MEMORY_FOR_WEIGHTS = 0.9
"""Share of a GPU's memory that weights may take; the rest is for what a step makes, the libraries' workspaces and the driver."""

SMALL = 4096
"""Bytes below which a weight is wherever it is read, and counts for nothing."""


@dataclass(frozen=True)
class Link:
    """What joins two GPUs of a host.

    Attributes:
        bytes_per_us: Of a copy, one way.
        copy_us: What a copy takes beyond its bytes.
        launch_us: By how much later each further GPU starts: one thread launches a step on all of them.
    """

    bytes_per_us: float = 385e3
    copy_us: float = 18.0
    launch_us: float = 28.0

    @staticmethod
    def of(gpu: Gpu) -> Link:
        """That of a data sheet."""
        return Link(gpu.link_gbs * 1e3, gpu.link_us, gpu.other_gpu_us)

    def takes_us(self, bytes: float) -> float:
        """How long a copy takes."""
        return self.copy_us + bytes / self.bytes_per_us


@dataclass(frozen=True)
class Held:
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
    link: Link
    memory: float
    sent: Floats
    fetched: Floats
    weights: tuple[Held, ...] = ()
    inputs: tuple[Held, ...] = ()
    tables: tuple[Held, ...] = ()

    @property
    def weight_bytes(self) -> float:
        """Of all weights."""
        return sum(weight.bytes for weight in self.weights)

    @property
    def fits_one(self) -> bool:
        """Whether one GPU holds all weights."""
        return self.weight_bytes <= self.memory

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
            Held(weight.name, float(weight.bytes), _readers(flat, block, graph.index[weight.name]))
            for weight in parameters(graph)
            if weight.bytes >= SMALL
        ]
        fed = dict.fromkeys(tensor.node for tensor in flat.inputs)
        return SplitProblem(
            problem,
            gpus,
            Link.of(sheet),
            MEMORY_FOR_WEIGHTS * (memory_gb or sheet.memory_gb) * 1e9,
            sums(leaving | fetched),
            sums(fetched),
            tuple(weight for weight in weights if weight.blocks),
            tuple(Held(graph.names[node], float(costs.out_bytes[node]), _readers(flat, block, node)) for node in fed),
            _tables(columns(flat, costs), block),
        )


def _readers(flat: FlatGraph, block: Ints, node: int) -> tuple[int, ...]:
    """The blocks that read what a node makes, also through nodes that launch nothing."""
    edges = flat.graph.edges

    def users(node: int) -> Iterable[int]:
        out = flat.graph.out_edges(node)
        users: list[int] = edges.dst[out[edges.port[out] != CONTROL]].tolist()
        return users

    found, seen, waiting = set[int](), {node}, [node]
    while waiting:
        for user in users(waiting.pop()):
            if block[user] >= 0:
                found.add(int(block[user]))
            elif user not in seen:
                seen.add(user)
                waiting.append(user)
    return tuple(sorted(found))


def _makers(flat: FlatGraph, block: Ints, node: int) -> list[int]:
    """The nodes with a kernel whose results an output is, also through nodes that launch nothing."""
    found, seen, waiting = [], {node}, [node]
    while waiting:
        node = waiting.pop()
        if block[node] >= 0:
            found.append(node)
            continue
        for producer, _ in flat.graph.inputs(node):
            if producer not in seen:
                seen.add(producer)
                waiting.append(producer)
    return found


def _tables(found: tuple[Column, ...], block: Ints) -> tuple[Held, ...]:
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
            Held(
                next(iter(held.values())).name,
                float(sum(table.bytes for table in held.values())),
                tuple(np.unique(block[nodes][block[nodes] >= 0]).tolist()),
                sum(column.time_us for column in members),
            )
        )
    return tuple(tables)
