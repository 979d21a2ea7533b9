"""What is in a graph: ops, parameters, functions, regions, tables and branches, counted and sorted."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np

from msplit.analysis.branches import Branches
from msplit.analysis.colocation import Groups
from msplit.analysis.embedding_columns import Column
from msplit.analysis.embeddings import Table
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

    table: Table
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


def group_sizes(groups: Groups) -> Ints:
    """Nodes per group that must share a stream, the largest first."""
    return np.sort(np.bincount(groups.of[groups.of >= 0], minlength=groups.count))[::-1].astype(np.int32)


def table_uses(columns: tuple[Column, ...]) -> tuple[TableUse, ...]:
    """The embedding tables, the largest first, then in the order of their lookups."""
    lookups = Counter(lookup.table for column in columns for lookup in column.lookups)
    times: dict[Table, float] = defaultdict(float)
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
