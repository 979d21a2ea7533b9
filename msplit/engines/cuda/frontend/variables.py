"""Values of variables that each node of a training graph sees, and effects of a step beside its outputs.

TensorFlow orders reads and writes of variables by data and control edges. A read sees the last write that is ordered before it, and where
there is none the value that the variable has when the step begins: with a read and a write that nothing orders, TensorFlow may give
either value, and the engine always gives the old one. Writes that nothing orders come one after the other.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from numpy.typing import NDArray

from msplit import formats
from msplit.core.dag import reached
from msplit.core.graph import memoize
from msplit.engines.cuda.frontend.tensor_lists import LISTS
from msplit.engines.cuda.ir.functions import FUNCTIONAL, in_order, plain
from msplit.engines.cuda.ir.graph import Key, Op, OpGraph, mutated
from msplit.engines.table_rows import KeyedTable
from msplit.engines.variables import variable_names
from msplit.errors import EngineError, LoadError
from msplit.flatten.build import flatten
from msplit.flatten.flat import FlatGraph
from msplit.formats.endpoints import behind
from msplit.formats.model import Model
from msplit.formats.tensors import numpy_dtype
from msplit.opset.traits import DRAWS, FREE_OF_EFFECTS, on_values, ops_with, own_outputs, written

_SAME_MEMORY = ops_with("same memory")
_MOST_OUTPUTS = 4
"""Outputs of its own that an op may have that writes variables."""


@dataclass(frozen=True)
class Effects:
    """Nodes that a step runs, and those among them that have effects.

    Attributes:
        nodes: All that it runs, in topological order: what outputs and targets need by data and by control edges.
        writes: Those that write variables.
        stateful: Those that may do something else.
    """

    nodes: tuple[int, ...]
    writes: tuple[int, ...]
    stateful: tuple[int, ...]


def effects_of(flat: FlatGraph) -> Effects:
    """Effects of a graph's step, without those of functions that were not inlined."""
    ops = flat.graph.ops
    nodes = _ancestors(flat, [*(tensor.node for tensor in flat.outputs), *flat.targets])
    writes = tuple(node for node in nodes if written(ops[node]))
    others = (node for node in nodes if flat.stateful[node] and not written(ops[node]))
    return Effects(nodes, writes, tuple(node for node in others if ops[node] not in FREE_OF_EFFECTS | DRAWS))


def _ancestors(flat: FlatGraph, roots: Iterable[int]) -> tuple[int, ...]:
    """Nodes and all that they need, by data and control, in later turns of a loop, too; the walk stops at inputs."""
    fed = {tensor.node for tensor in flat.inputs}
    turned: dict[int, list[int]] = {}
    for producer, merge in zip(flat.back_edges.src.tolist(), flat.back_edges.dst.tolist(), strict=True):
        turned.setdefault(merge, []).append(producer)

    def before(node: int) -> list[int]:
        return [] if node in fed else [*flat.graph.predecessors(node).tolist(), *turned.get(node, ())]

    return tuple(in_order(flat.graph, reached(roots, before)))


def keyed_tables(flat: FlatGraph, effects: Effects) -> dict[int, int]:
    """Nodes that look keys up on the device -> the node of their table: one of rows of numbers under whole numbers, which comes whole from
    the checkpoint, and which no step changes."""
    graph, found = flat.graph, dict[int, int]()
    lookups = [node for node in effects.nodes if graph.ops[node] in ops_with("looks keys up in rows")]
    if effects.writes or not lookups:
        return found
    changed = {table_of(flat, node) for node in effects.stateful}
    for node in lookups:
        table = table_of(flat, node)
        if table not in changed and _holds_rows_by_key(flat, table) and _contents(flat, table) is not None:
            found[node] = table
    return found


def keyed_contents(flat: FlatGraph, keyed: Mapping[int, int]) -> dict[int, KeyedTable]:
    """Tables of nodes that look keys up, each once for a model."""
    found = dict[int, KeyedTable]()
    for node, table in keyed.items():

        def made(table: int = table) -> KeyedTable:
            contents = _contents(flat, table)
            assert contents is not None
            return KeyedTable(*contents)

        found[node] = memoize(flat.model, "rows by key", (flat.graph.names[table],), made)
    return found


def table_of(flat: FlatGraph, node: int) -> int:
    """The node that a node's first input comes from, through nodes that hand it on; -1 without an input."""
    inputs = flat.graph.inputs(node)
    return behind(flat.graph, inputs[0], ops_with("identity"))[0] if inputs else -1


def _holds_rows_by_key(flat: FlatGraph, node: int) -> bool:
    attrs = flat.graph.attrs[node]
    shape = attrs.get("value_shape")
    return (
        flat.graph.ops[node] in ops_with("rows by key")
        and attrs.get("key_dtype") in ("int32", "int64")
        and attrs.get("value_dtype") in ("float32", "float64", "bfloat16", "float16", "int32", "int64")
        and isinstance(shape, tuple)
        and bool(shape)
        and all(shape)
    )


def _contents(flat: FlatGraph, table: int) -> tuple[NDArray[Any], NDArray[Any]] | None:
    """Keys and rows of a table. None where the checkpoint does not have them, its keys are vectors, or other ops fill it at the start."""
    graph, name = flat.graph, flat.graph.names[table]
    held = memoize(flat.model, "contents of tables", (name,), lambda: _stored(flat.model, name))
    if held is None or name in _filled_at_start(flat.model):
        return None
    keys, rows = held
    attrs = graph.attrs[table]
    types = (keys.dtype, rows.dtype) == (attrs["key_dtype"], numpy_dtype(str(attrs["value_dtype"])))
    plain = keys.ndim == 1 and len(formats.unused_keys(graph, table)) == len(graph.inputs(table))
    shape = (len(keys), *attrs["value_shape"])
    return (keys, rows.reshape(shape)) if types and plain and rows.size == math.prod(shape) else None


def _stored(model: Model, name: str) -> tuple[NDArray[Any], NDArray[Any]] | None:
    try:
        return formats.tables(model, [name]).get(name)
    except LoadError:  # it stays with the host: TensorFlow says so where it is read
        return None


def _filled_at_start(model: Model) -> frozenset[str]:
    """Names of tables that an op of those that run at the start refers to."""

    def found() -> frozenset[str]:
        targets = tuple(name for name in model.init_ops if name in model.graph.index)
        flat = flatten(replace(model, inputs=(), outputs=(), targets=targets, left_out=None)) if targets else None
        nodes = range(len(flat.graph)) if flat is not None else ()
        return frozenset(flat.graph.names[table_of(flat, node)] for node in nodes if flat is not None)

    return memoize(model, "tables filled at the start", (), found)


class Variables:
    """The values that variables take in one step, as values of the engine's graph. Ask it of each node in topological order.

    Where none is `written`, a variable has one value, and reading it is the value: nothing is left to be told.

    Attributes:
        nodes: Flat nodes that refer to variables -> the variable.
    """

    def __init__(self, flat: FlatGraph, graph: OpGraph, names: dict[Key, Key], *, written: bool) -> None:
        self.nodes = variable_names(flat) if written else {}
        self._written = written
        self._flat, self._graph, self._names = flat, graph, names
        # Node -> variable -> number of the value that it sees, where that is not 0.
        self._seen: dict[int, Mapping[str, int]] = {}
        self._values: dict[str, list[Key]] = {}
        self._refers: dict[Key, str] = {}  # handles and references -> variable

    def visit(self, node: int) -> None:
        """Learns from the nodes in front of a node which values it sees."""
        if not self._written:
            return
        found: Mapping[str, int] = {}
        for producer in self._flat.graph.predecessors(node).tolist():
            other = self._seen.get(producer)
            if other is None or other is found:
                continue
            names = {**found, **other} if found else ()
            found = {name: max(found.get(name, 0), other.get(name, 0)) for name in names} or other
        if found:
            self._seen[node] = found

    def takes(self, node: int) -> bool:
        """Takes a node that is a variable, hands a handle on, or writes variables; returns whether it did. Then nothing is left to do."""
        if not self._written:
            return False
        graph = self._flat.graph
        op, attrs = graph.ops[node], graph.attrs[node]
        if node in self.nodes:
            self._refers[node, 0] = self.nodes[node]
            return True
        inputs = graph.inputs(node)
        # An Identity of a reference shares the variable's memory: who reads it sees what the variable is by then.
        if op in _SAME_MEMORY and inputs[0] in self._refers:
            self._refers[node, 0] = self._refers[inputs[0]]
            return True
        if not (slots := written(op)):
            return False
        for slot in slots:
            if slot >= len(inputs) or inputs[slot] not in self._refers:
                raise EngineError(
                    f"{op} writes what is no variable of the model",
                    where=f"node {graph.names[node]}",
                    fix="use --engine tensorflow for this model",
                )
        variables = [self._refers[inputs[slot]] for slot in slots]
        taken = self.inputs(node)
        for slot, variable in zip(slots, variables, strict=True):
            taken[slot] = self._all(variable)[-1]
        self._graph.ops[node] = Op(node, graph.names[node], on_values(op), plain(attrs), taken, [node])
        for port, variable in enumerate(variables):
            values = self._values[variable]
            values.append((node, port))
            self._seen[node] = {**self._seen.get(node, {}), variable: len(values) - 1}
        own = own_outputs(op)
        if own:
            self._names |= {(node, port): (node, port + own) for port in range(_MOST_OUTPUTS)}
        else:
            self._refers[node, 0] = variables[0]
        return True

    def inputs(self, node: int) -> list[Key]:
        """Values that a node reads: in place of handles and references those that it sees."""
        seen = self._seen.get(node, {})
        read = ((key, self._refers.get(key)) for key in self._flat.graph.inputs(node))
        return [self._names.get(key, key) if name is None else self._all(name)[seen.get(name, 0)] for key, name in read]

    def _all(self, variable: str) -> list[Key]:
        if variable not in self._values:
            key = self._graph.state[variable] = (self._graph.fresh(), 0)
            self._values[variable] = [key]
        return self._values[variable]

    def finish(self) -> None:
        """Notes what variables are in the end. An output that is a variable gives this."""
        self._graph.final = {name: keys[-1] for name, keys in self._values.items() if len(keys) > 1}
        for tensor in self._flat.outputs:
            variable = self._refers.get((tensor.node, tensor.port))
            if variable is not None:
                self._graph.fetches[tensor.name] = self._all(variable)[-1]


def keep_overwritten(graph: OpGraph) -> None:
    """Puts a graph that writes variables in an order in which it can do so in place. Outputs that are overwritten become copies."""
    if not graph.final:
        return
    lies_in, last = graph.aliases(), set(graph.final.values())
    overwritten = {op.inputs[slot]: op for op in graph.ops.values() for slot in mutated(op)}
    _keep_in_lists(graph, overwritten)
    for name, key in graph.fetches.items():
        writers = [overwritten[value] for value in lies_in(key) if value in overwritten and value not in last]
        if writers:
            graph.fetches[name] = graph.set_aside(key, writers[0])
    graph.sort()


def _keep_in_lists(graph: OpGraph, overwritten: Mapping[Key, Op]) -> None:
    """Has loops, conds and lists that are given a variable's value take a copy, where what reads it out of their lists may come behind the
    op that overwrites it: the gradient of a recurrent layer that begins with the state that the step before left. An order between the
    two shows only once loops are unrolled, and a few ops have run by then."""
    carriers = {number for number, op in graph.ops.items() if op.op in FUNCTIONAL or op.op in LISTS}
    lies_in = graph.aliases()
    readers: dict[int, set[int]] = {}
    for number in carriers:
        for producer, _ in graph.ops[number].inputs:
            readers.setdefault(producer, set()).add(number)

    @functools.cache
    def needed(writer: int) -> set[int]:
        return reached([writer], lambda number: {key[0] for key in graph.ops[number].inputs} & graph.ops.keys())

    for number in sorted(carriers):
        op, behind = graph.ops[number], reached([number], lambda one: readers.get(one, ())) - {number}
        for slot, key in enumerate(op.inputs):
            writers = [overwritten[value] for value in lies_in(key) if value in overwritten] if behind else []
            late = [writer for writer in writers if not behind <= needed(writer.node)]
            if late:
                op.inputs[slot] = graph.set_aside(key, late[0])
