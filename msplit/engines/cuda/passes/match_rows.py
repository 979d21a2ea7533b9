"""Functions of single rows, however they are spelled: what ops behind a value compute of each of its rows, found by evaluating them.

A *row* runs along the last axis. Elementwise ops with constants that are the same for all rows, and reductions over the last axis,
treat each row on its own, so that a few rows tell what the ops do to all of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from msplit.engines.cuda.ir.graph import Key, Op, OpGraph
from msplit.engines.cuda.ir.interpret import as_tuple
from msplit.engines.cuda.ir.lowering import table
from msplit.engines.cuda.ir.node import Node
from msplit.engines.cuda.passes.pattern import Readers, per_channel
from msplit.opset.traits import ops_with

REDUCTIONS = ops_with("row reduction")
_ELEMENTWISE = ops_with("row part")
LARGEST = 24
"""Ops that such a function is made of at most."""


def region(graph: OpGraph, readers: Readers, key: Key) -> list[Op]:
    """Ops that depend on a value row by row, and on constants alone, in topological order."""
    inside = {key}
    found: list[Op] = []
    taken: set[int] = set()
    waiting = list(dict.fromkeys(readers.of.get(key, [])))
    while waiting and len(found) < LARGEST:
        ready = next((number for number in waiting if _belongs(graph, graph.ops.get(number), key, inside)), None)
        if ready is None:
            break
        waiting.remove(ready)
        taken.add(ready)
        found.append(graph.ops[ready])
        inside.add((ready, 0))
        waiting += [n for n in dict.fromkeys(readers.of.get((ready, 0), [])) if n not in taken and n not in waiting]
    return found


def _belongs(graph: OpGraph, op: Op | None, key: Key, inside: set[Key]) -> bool:
    if op is None or (op.node, 0) not in graph.shapes:
        return False
    shape = graph.shapes[key]
    if op.op in REDUCTIONS:
        axes = graph.constants.get(op.inputs[1])
        last = axes is not None and [int(axis) % len(shape) for axis in axes.reshape(-1)] == [len(shape) - 1]
        return op.inputs[0] in inside and last and bool(op.attrs.get("keep_dims"))
    if op.op not in _ELEMENTWISE or graph.shapes[op.node, 0] not in (shape, (*shape[:-1], 1)):
        return False
    return all(name in inside or _same_for_all(graph, name, shape) for name in op.inputs)


def _same_for_all(graph: OpGraph, key: Key, shape: tuple[int, ...]) -> bool:
    value = graph.constants.get(key)
    return value is not None and per_channel(value, shape, (len(shape) - 1,)) is not None


def functions(graph: OpGraph, readers: Readers, key: Key, ops: list[Op]) -> Iterator[list[Op]]:
    """For each op of a region whose result has the rows' shape, the last first: the ops that it needs, if nothing else reads these."""
    made_by = {(op.node, 0): op for op in ops}
    for last in reversed(ops):
        if graph.shapes[last.node, 0] != graph.shapes[key]:
            continue
        needed: set[int] = set()
        stack = [last]
        while stack:
            op = stack.pop()
            if op.node not in needed:
                needed.add(op.node)
                stack += [made_by[name] for name in op.inputs if name in made_by]
        part = [op for op in ops if op.node in needed]
        inner = [(op.node, 0) for op in part if op is not last]
        if all(name not in readers.fetched and needed.issuperset(readers.of.get(name, ())) for name in inner):
            yield part


def evaluate(graph: OpGraph, key: Key, ops: list[Op], rows: torch.Tensor) -> torch.Tensor:
    """What ops make of rows, in float64.

    Args:
        source: Has their constants.
        key: The value that the rows stand for.
        ops: In topological order; the last one's result is given back.
        rows: Rows by columns.
    """
    rank = len(graph.shapes[key])
    values = {key: rows.reshape((1,) * (rank - 2) + tuple(rows.shape)) if rank > 1 else rows}
    for op in ops:
        arguments = []
        for slot, name in enumerate(op.inputs):
            if name in values:
                arguments.append(values[name])
            elif op.op in REDUCTIONS and slot == 1:
                arguments.append(graph.constants[name])
            else:
                arguments.append(torch.from_numpy(np.array(graph.constants[name], np.float64)))
        attrs = {name: value for name, value in op.attrs.items() if name == "keep_dims"}
        values[op.node, 0] = as_tuple(table()[op.op].function(Node(op.name, op.op, attrs), *arguments))[0]
    return values[ops[-1].node, 0].reshape(rows.shape)


def replace(graph: OpGraph, part: list[Op], op: str, inputs: list[Key], attrs: dict[str, object]) -> None:
    """Puts one op in the place of a function's ops."""
    last = part[-1]
    source_nodes = [node for one in part for node in one.source_nodes]
    for one in part[:-1]:
        del graph.ops[one.node]
    last.op, last.inputs, last.attrs = op, inputs, attrs
    last.source_nodes = [*last.source_nodes, *(node for node in source_nodes if node not in last.source_nodes)]
