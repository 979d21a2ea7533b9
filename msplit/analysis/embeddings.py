"""Embedding tables and columns of a model: which nodes belong to which lookup.

Embedding tables and where they are looked up.

Embedding columns: a lookup with what only feeds it, what only works on its result, and its gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources

import numpy as np
import yaml

from msplit.analysis.branches import finish_times
from msplit.core.graph import CONTROL, Floats, Graph, Ints, TensorValue, memoize
from msplit.cost.costs import Costs
from msplit.errors import LoadError
from msplit.flatten.flat import FlatGraph
from msplit.formats.tensors import itemsize
from msplit.shapes.registry import plain_shape

_MAX_STEPS = 1000
"""Nodes between a lookup and its tables; more is not a lookup."""

_WHOLE = frozenset({"int32", "int64", "uint32", "uint64", "int16", "uint16", "bool", "string"})
_HANDLES = frozenset({"VarHandleOp", "KvVarHandleOp"})


@dataclass(frozen=True)
class EmbeddingOps:
    """Ops that an embedding lookup is made of; see ``data/embedding_ops.yaml``.

    Attributes:
        lookups: Ops that gather rows, with the slot of their table.
        tables: Ops that hold a table.
        through: Ops that may stand between the two.
        updates: How ops that write a table start.
    """

    lookups: Mapping[str, int]
    tables: frozenset[str]
    through: frozenset[str]
    updates: tuple[str, ...]

    def extended(self, lookups: Mapping[str, int]) -> EmbeddingOps:
        """With more lookup ops."""
        return replace(self, lookups={**self.lookups, **lookups})


@dataclass(frozen=True)
class EmbeddingTable:
    """An embedding table.

    Attributes:
        name: Its node, or that of its first part.
        parts: The nodes that hold it, in order; more than one for a partitioned variable.
        rows: Rows of all parts, 0 where a shape is not known.
        columns: Width, 0 where it is not known.
        bytes: Size of all parts, 0 where it is not known.
    """

    name: str
    parts: tuple[int, ...]
    rows: int
    columns: int
    bytes: int


@dataclass(frozen=True)
class EmbeddingLookup:
    """A gather-like node and its table. Where it takes the variable's handle itself (`by_handle`) it must run where the variable is."""

    node: int
    table: EmbeddingTable
    by_handle: bool


@cache
def default_ops() -> EmbeddingOps:
    """The ops that msplit knows."""
    text = resources.files("msplit").joinpath("data/embedding_ops.yaml").read_text("utf-8")
    data = yaml.safe_load(text)
    return EmbeddingOps(data["lookups"], frozenset(data["tables"]), frozenset(data["through"]), tuple(data["updates"]))


def lookups(flat: FlatGraph, ops: EmbeddingOps | None = None) -> tuple[EmbeddingLookup, ...]:
    """All embedding lookups by some ops (those of `default_ops`), ascending by node.

    A lookup is a gather-like op along axis 0 whose table is a variable, a variable's handle or a constant with two dimensions and no whole
    numbers in it, directly or through reads, casts and the concatenation of a partitioned variable.
    """
    ops = ops or default_ops()
    return memoize(flat, "lookups", (ops,), lambda: _lookups(flat, ops))


def _lookups(flat: FlatGraph, ops: EmbeddingOps) -> tuple[EmbeddingLookup, ...]:
    graph = flat.graph
    tables: dict[tuple[int, ...], EmbeddingTable] = {}
    found = []
    for node in [node for node, op in enumerate(graph.ops) if op in ops.lookups]:
        inputs = graph.inputs(node)
        slot = ops.lookups[graph.ops[node]]
        if slot >= len(inputs) or not _first_axis(graph, node, inputs):
            continue
        parts, read = _parts(graph, inputs[slot][0], ops)
        if parts:
            table = tables.setdefault(parts, _table(graph, parts))
            found.append(EmbeddingLookup(node, table, not read and graph.ops[parts[0]] in _HANDLES))
    return tuple(found)


def _parts(graph: Graph, node: int, ops: EmbeddingOps) -> tuple[tuple[int, ...], bool]:
    """The nodes that hold the table that a node passes on, none if it is no table, and whether its value is read on the way."""
    parts: dict[int, None] = {}
    read = False
    waiting = [node]
    for _ in range(_MAX_STEPS):
        node = waiting.pop()
        op = graph.ops[node]
        if op in ops.tables:
            if not _is_table(graph, node):
                return (), read
            parts[node] = None
        elif op in ops.through:
            read = read or op == "ReadVariableOp"
            inputs = [producer for producer, _ in graph.inputs(node)]
            if op == "ConcatV2":
                inputs = inputs[:-1]
            elif op == "Concat":
                inputs = inputs[1:]
            else:
                inputs = inputs[:1]
            waiting += reversed(inputs)
        else:
            return (), read
        if not waiting:
            return tuple(parts), read
    return (), read


def _is_table(graph: Graph, node: int) -> bool:
    shape, dtype = _type(graph, node)
    if graph.ops[node] == "Const" and (shape is None or len(shape) != 2):
        return False
    return (shape is None or len(shape) == 2) and dtype.removesuffix("_ref") not in _WHOLE


def _type(graph: Graph, node: int) -> tuple[tuple[int | None, ...] | None, str]:
    attrs = graph.attrs[node]
    if graph.ops[node] == "Const":
        value = attrs.get("value")
        return (value.shape, value.dtype) if isinstance(value, TensorValue) else (None, "")
    dtype = attrs.get("dtype")
    return plain_shape(attrs.get("shape")), (dtype if isinstance(dtype, str) else "")


def _table(graph: Graph, parts: tuple[int, ...]) -> EmbeddingTable:
    rows = columns = size = 0
    for part in parts:
        shape, dtype = _type(graph, part)
        if shape is None or None in shape:
            rows = columns = size = 0
            break
        height, width = (int(length or 0) for length in shape)
        rows, columns = rows + height, width
        size += height * width * (itemsize(dtype) or 4)
    return EmbeddingTable(graph.names[parts[0]], parts, rows, columns, size)


def _first_axis(graph: Graph, node: int, inputs: list[tuple[int, int]]) -> bool:
    if graph.ops[node] != "GatherV2" or len(inputs) < 3:
        return True
    value = graph.attrs[inputs[2][0]].get("value")
    if not isinstance(value, TensorValue) or value.shape not in ((), (1,)):
        return True
    try:
        return int(value.load().reshape(-1)[0]) == 0
    except (LoadError, ValueError, TypeError):
        return True  # a damaged file may have anything in its place


def updates(graph: Graph, table: EmbeddingTable, ops: EmbeddingOps) -> list[int]:
    """The nodes that write a table: optimizer steps, scatters, assignments; ascending."""
    found = set()
    for part in table.parts:
        for edge in graph.out_edges(part).tolist():
            user = int(graph.edges.dst[edge])
            writes = graph.ops[user].startswith(ops.updates) and graph.ops[user] not in ops.lookups
            if graph.edges.port[edge] != CONTROL and writes:
                found.add(user)
    return sorted(found)


NONE = -1
MANY = -2

_MAX_SCOPES = 64
_MAX_SHARED = 8
_DOMINANT = 0.5


@dataclass(frozen=True, eq=False)
class Column:
    """A column: the work around one or more embedding lookups that one stream can do on its own.

    Attributes:
        lookups: Its lookups; several where they must share a stream because they use one variable's handle.
        bytes: Device memory traffic of its kernels.
        dominant: Whether what works on the result is left out, because it is most of the model.
    """

    lookups: tuple[EmbeddingLookup, ...]
    nodes: Ints
    time_us: float
    bytes: float
    dominant: bool = False


def columns(
    flat: FlatGraph, costs: Costs, ops: EmbeddingOps | None = None, *, side_us: float = 5.0
) -> tuple[Column, ...]:
    """Finds the embedding columns, in the order of their first lookups. Near-linear: a few passes over the edges.

    By the graph: a node is of a column if it depends on that column's lookups alone, up to where it joins with others: with another
    column, or with something that takes more than `side_us` to compute and is used elsewhere too. What feeds only nodes of the
    column is of the column. Name scopes decide only which column an input shared by several belongs to, and which forward node a
    gradient is of.
    """
    ops = ops or default_ops()
    return memoize(flat, "columns", (costs, ops, side_us), lambda: _columns(flat, costs, ops, side_us))


def _columns(flat: FlatGraph, costs: Costs, ops: EmbeddingOps, side_us: float) -> tuple[Column, ...]:
    found = lookups(flat, ops)
    if not found:
        return ()
    group_of = _groups(found)
    owner = _Owners(flat, found, group_of, finish_times(flat.graph, costs.time_us), side_us)
    dominant = owner.release_dominant(np.where(flat.host, 0.0, costs.time_us))
    owner.take_gradients(ops)
    of = np.asarray(owner.of, dtype=np.int32)
    order = np.argsort(of, kind="stable")
    count = max(group_of) + 1
    start = np.searchsorted(of[order], np.arange(count + 1))
    members: list[list[EmbeddingLookup]] = [[] for _ in range(count)]
    for lookup, group in zip(found, group_of, strict=True):
        members[group].append(lookup)
    result = []
    for group in range(count):
        nodes = order[start[group] : start[group + 1]].astype(np.int32)
        device = nodes[~flat.host[nodes]]
        result.append(
            Column(
                tuple(members[group]),
                nodes,
                float(costs.time_us[device].sum()),
                float(costs.bytes[device].sum()),
                group in dominant,
            )
        )
    return tuple(result)


def _groups(found: tuple[EmbeddingLookup, ...]) -> list[int]:
    """Per lookup its column: lookups by the same handle share one. Numbered by their first lookups."""
    leader: dict[int, int] = {}
    groups: list[int] = []
    count = 0
    for lookup in found:
        shared = [leader[part] for part in lookup.table.parts if part in leader] if lookup.by_handle else []
        if shared:
            groups.append(shared[0])
        else:
            groups.append(count)
            count += 1
        if lookup.by_handle:
            for part in lookup.table.parts:
                leader.setdefault(part, groups[-1])
    return groups


class _Owners:
    """The column of each node (`of`, or NONE) while columns are searched."""

    def __init__(
        self, flat: FlatGraph, found: tuple[EmbeddingLookup, ...], group_of: list[int], finish: Floats, side_us: float
    ) -> None:
        graph = flat.graph
        self._graph = graph
        self._lookups = found
        self._group_of = group_of
        self._scope: dict[int, list[str]] = {}
        for lookup, group in zip(found, group_of, strict=True):
            self._scope.setdefault(group, _scopes(graph.names[lookup.node]))
        self._anchor = {lookup.node: group for lookup, group in zip(found, group_of, strict=True)}
        self._in_start, self._sources = graph.in_start.tolist(), graph.edges.src.tolist()
        self._out_start, self._targets = graph.out_start.tolist(), graph.out_dst.tolist()
        self._order: list[int] = graph.topological.tolist()
        self._depends = self._dependencies()
        self._ready = (finish <= side_us).tolist()
        # The largest set first; what turns out to mix with others is then taken away, with all that hangs on it.
        self.of = [group if group >= 0 else NONE for group in self._depends]
        self._own_side_inputs()
        self._cut([node for node in range(len(graph)) if self._is_mixed(node)])

    def _dependencies(self) -> list[int]:
        """Per node the column whose lookups it depends on: NONE, one, or MANY."""
        depends = [NONE] * len(self._graph)
        for node in self._order:
            own = self._anchor.get(node)
            if own is None:
                own = NONE
                for source in self._sources[self._in_start[node] : self._in_start[node + 1]]:
                    if depends[source] != NONE and depends[source] != own:
                        own = depends[source] if own == NONE else MANY
            depends[node] = own
        return depends

    def _own_side_inputs(self) -> None:
        for node in reversed(self._order):
            if self._depends[node] != NONE:
                continue
            owners = {self.of[target] for target in self._targets[self._out_start[node] : self._out_start[node + 1]]}
            if len(owners) == 1:
                self.of[node] = owners.pop()
            elif 1 < len(owners) <= _MAX_SHARED and NONE not in owners:
                self.of[node] = self._nearest(node, owners)

    def _nearest(self, node: int, owners: set[int]) -> int:
        """The column, among several, whose lookup stands in the scope closest to a node, if there is one."""
        scope = _scopes(self._graph.names[node])
        shared = {group: _common(scope, self._scope[group]) for group in sorted(owners)}
        best = max(shared.values())
        closest = [group for group, common in shared.items() if common == best]
        return closest[0] if best and len(closest) == 1 else NONE

    def _is_mixed(self, node: int) -> bool:
        """True if a node of a column has an input that is not of it and matters."""
        group = self.of[node]
        if group == NONE or self._depends[node] == NONE or node in self._anchor:
            return False
        for source in self._sources[self._in_start[node] : self._in_start[node + 1]]:
            if self.of[source] != group and not (self._depends[source] == NONE and self._ready[source]):
                return True
        return False

    def _cut(self, waiting: list[int]) -> None:
        """Take nodes from their columns, and whatever that leaves mixed or shared."""
        while waiting:
            node = waiting.pop()
            if self.of[node] == NONE or node in self._anchor:
                continue
            self.of[node] = NONE
            waiting += filter(self._is_mixed, self._targets[self._out_start[node] : self._out_start[node + 1]])
            sources = self._sources[self._in_start[node] : self._in_start[node + 1]]
            waiting += [one for one in sources if self.of[one] != NONE and self._depends[one] == NONE]

    def release_dominant(self, time_us: Floats) -> set[int]:
        """Leave what works on a lookup's result to other rules where that is most of the model."""
        owned = np.asarray(self.of, dtype=np.int64)
        mine = owned >= 0
        share = np.bincount(owned[mine], time_us[mine], max(self._group_of) + 1)
        dominant = set(np.flatnonzero(share > _DOMINANT * time_us.sum()).tolist())
        if dominant:
            self._cut([node for node, group in enumerate(self.of) if group in dominant and self._depends[node] >= 0])
        return dominant

    def take_gradients(self, ops: EmbeddingOps) -> None:
        """Add what only serves a table's gradient, and by their names the gradients of the column's nodes."""
        names = self._graph.names
        for node in [node for node, name in enumerate(names) if "gradient" in name]:
            if self.of[node] == NONE and self._depends[node] != NONE:
                self.of[node] = self._forward_column(names[node])
        written: dict[int, int] = {}
        for lookup, group in zip(self._lookups, self._group_of, strict=True):
            for node in updates(self._graph, lookup.table, ops):
                written[node] = group if written.get(node, group) == group else NONE
        if not written:
            return
        for node in reversed(self._order):
            if self.of[node] != NONE:
                continue
            if node in written:
                self.of[node] = written[node]
            elif self._depends[node] == MANY:
                owners = {
                    self.of[target] for target in self._targets[self._out_start[node] : self._out_start[node + 1]]
                }
                if len(owners) == 1:
                    self.of[node] = owners.pop()

    def _forward_column(self, name: str) -> int:
        """The column of the node that a gradient node is named after."""
        index = self._graph.index
        call, word, rest = _cut_at(name, "gradients")
        if word:
            forward, found, _ = rest.partition("_grad/")
            node = index.get(call + forward) if found else None
            return NONE if node is None else self.of[node]
        call, word, rest = _cut_at(name, "gradient_tape")
        for _ in range(_MAX_SCOPES if word else 0):
            node = index.get(call + rest)
            if node is not None:
                return self.of[node]
            rest = rest.rpartition("/")[0]
        return NONE


def _scopes(name: str) -> list[str]:
    return name.split("/", _MAX_SCOPES)[:-1]


def _common(one: list[str], other: list[str]) -> int:
    """Count the leading scopes that two names share."""
    common = 0
    for mine, its in zip(one, other, strict=False):
        if mine != its:
            break
        common += 1
    return common


def _cut_at(name: str, word: str) -> tuple[str, str, str]:
    """A name before, at and behind its first scope that is a word, with or without a number: ``call/gradients_1/rest``."""
    at = 0 if name.startswith(word) else name.find(f"/{word}") + 1
    scope, _, rest = name[at:].partition("/")
    if scope == word or (scope.startswith(f"{word}_") and scope[len(word) + 1 :].isdigit()):
        return name[:at], scope, rest
    return name, "", ""
