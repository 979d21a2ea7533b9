"""Embedding tables and where they are looked up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources

import yaml

from msplit.core.graph import CONTROL, Graph, TensorValue
from msplit.core.memory import memoize
from msplit.errors import LoadError
from msplit.flatten.flat import FlatGraph
from msplit.shapes.registry import plain_shape

_MAX_STEPS = 1000
"""Nodes between a lookup and its tables; more is not a lookup."""

_WHOLE = frozenset({"int32", "int64", "uint32", "uint64", "int16", "uint16", "bool", "string"})
_SIZES = {"float64": 8, "float16": 2, "bfloat16": 2, "half": 2, "int8": 1, "uint8": 1, "qint8": 1, "quint8": 1}
_HANDLES = frozenset({"VarHandleOp", "KvVarHandleOp"})


@dataclass(frozen=True)
class EmbeddingOps:
    """What an embedding lookup is made of; see ``data/embedding_ops.yaml``.

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
class Table:
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
class Lookup:
    """A gather-like node and its table. Where it takes the variable's handle itself (`by_handle`) it must run where the variable is."""

    node: int
    table: Table
    by_handle: bool


@cache
def default_ops() -> EmbeddingOps:
    """The ops that msplit knows."""
    text = resources.files("msplit").joinpath("data/embedding_ops.yaml").read_text("utf-8")
    data = yaml.safe_load(text)
    return EmbeddingOps(data["lookups"], frozenset(data["tables"]), frozenset(data["through"]), tuple(data["updates"]))


def lookups(flat: FlatGraph, ops: EmbeddingOps | None = None) -> tuple[Lookup, ...]:
    """All embedding lookups by some ops (those of `default_ops`), ascending by node.

    A lookup is a gather-like op along axis 0 whose table is a variable, a variable's handle or a constant with two dimensions and no whole
    numbers in it, directly or through reads, casts and the concatenation of a partitioned variable.
    """
    ops = ops or default_ops()
    return memoize(flat, "lookups", (ops,), lambda: _lookups(flat, ops))


def _lookups(flat: FlatGraph, ops: EmbeddingOps) -> tuple[Lookup, ...]:
    graph = flat.graph
    tables: dict[tuple[int, ...], Table] = {}
    found = []
    for node in [node for node, op in enumerate(graph.ops) if op in ops.lookups]:
        inputs = graph.inputs(node)
        slot = ops.lookups[graph.ops[node]]
        if slot >= len(inputs) or not _first_axis(graph, node, inputs):
            continue
        parts, read = _parts(graph, inputs[slot][0], ops)
        if parts:
            table = tables.setdefault(parts, _table(graph, parts))
            found.append(Lookup(node, table, not read and graph.ops[parts[0]] in _HANDLES))
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


def _table(graph: Graph, parts: tuple[int, ...]) -> Table:
    rows = columns = size = 0
    for part in parts:
        shape, dtype = _type(graph, part)
        if shape is None or None in shape:
            rows = columns = size = 0
            break
        height, width = (int(length or 0) for length in shape)
        rows, columns = rows + height, width
        size += height * width * _SIZES.get(dtype.removesuffix("_ref"), 4)
    return Table(graph.names[parts[0]], parts, rows, columns, size)


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


def updates(graph: Graph, table: Table, ops: EmbeddingOps) -> list[int]:
    """The nodes that write a table: optimizer steps, scatters, assignments; ascending."""
    found = set()
    for part in table.parts:
        for edge in graph.out_edges(part).tolist():
            user = int(graph.edges.dst[edge])
            writes = graph.ops[user].startswith(ops.updates) and graph.ops[user] not in ops.lookups
            if graph.edges.port[edge] != CONTROL and writes:
                found.add(user)
    return sorted(found)
