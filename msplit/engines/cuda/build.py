"""From a flat graph to ops with their constants: keeps what the outputs need, evaluates what depends on constants only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from msplit import formats
from msplit.engines.cuda import coverage
from msplit.engines.cuda.program import Key, Op, Source
from msplit.engines.cuda.registry import Lowering, Node, Unsupported, table
from msplit.engines.cuda.tensors import to_numpy, to_torch
from msplit.errors import EngineError
from msplit.flatten.flat import FlatGraph
from msplit.graph import FunctionRef, TensorValue

HANDLES = ("VarHandleOp", "VariableV2", "Variable", "VarHandle")
PASS_THROUGH = ("ReadVariableOp",)
"""Reads a variable: in a graph without assignments its value is the variable's."""
LARGEST_FOLDED = 1 << 28
"""Bytes: a constant expression that would grow beyond this (a Fill, a Tile) is computed in the run instead."""


def build(flat: FlatGraph, fed: Mapping[str, Key]) -> Source:
    """The ops that the outputs need.

    Args:
        flat: The graph.
        fed: Values that come from outside: the model's inputs, and what the host part hands over.

    Raises:
        EngineError: Ops that have no lowering, all of them, with their nodes.
    """
    if flat.targets:
        names = ", ".join(flat.graph.names[node] for node in flat.targets[:3])
        raise EngineError(
            f"the graph has steps that are run for their effect ({names}): the cuda engine runs inference only",
            fix="use --engine tensorflow, or name the tensors to compute with --outputs",
        )
    fetches = {tensor.name: (tensor.node, tensor.port) for tensor in flat.outputs}
    needed = coverage.needed(flat, set(fed.values()))
    coverage.refuse(flat, needed)
    source = Source(ops={}, constants={}, feeds=dict(fed), fetches=fetches)
    outside = set(fed.values())
    variables: list[int] = []
    for node in needed:
        op = flat.graph.ops[node]
        if op in HANDLES:
            variables.append(node)
        elif op == "Const":
            source.constants[node, 0] = _constant(flat, node)
        elif not all((node, port) in outside for port in (0,)):
            attrs = {
                key: value
                for key, value in flat.graph.attrs[node].items()
                if not isinstance(value, TensorValue | FunctionRef) and not key.startswith("_output_shapes")
            }
            inputs = flat.graph.inputs(node)
            source.ops[node] = Op(node, flat.graph.names[node], op, attrs, inputs, [node])
    if variables:
        values = formats.variables(flat.model, [flat.graph.names[node] for node in variables])
        source.constants |= {(node, 0): values[flat.graph.names[node]] for node in variables}
    fold(source)
    source.prune()
    return source


def _constant(flat: FlatGraph, node: int) -> NDArray[Any]:
    value = flat.graph.attrs[node].get("value")
    if not isinstance(value, TensorValue):
        raise EngineError("a Const without a value", where=flat.graph.names[node], fix="export the model again")
    return value.load()


def fold(source: Source) -> None:
    """Evaluates on the CPU, once, every op whose inputs are all constants."""
    for number, op in list(source.ops.items()):
        if op.op in PASS_THROUGH and op.inputs[0] in source.constants:
            source.constants[number, 0] = source.constants[op.inputs[0]]
            del source.ops[number]
            continue
        if not all(key in source.constants for key in op.inputs):
            continue
        lowering = table()[op.op]
        if lowering.dynamic and not op.inputs:
            continue
        results = evaluate(lowering, op, [source.constants[key] for key in op.inputs])
        if (
            sum(result.nbytes for result in results)
            > LARGEST_FOLDED
            > sum(source.constants[key].nbytes for key in op.inputs)
        ):
            continue
        source.constants |= {(number, port): result for port, result in enumerate(results)}
        del source.ops[number]


def evaluate(lowering: Lowering, op: Op, inputs: list[NDArray[Any]]) -> list[NDArray[Any]]:
    """Runs one lowering on the CPU, on values that are known."""
    static = positions(lowering, len(inputs))
    arguments = [
        value if slot in static else to_torch(np.asarray(value), torch.device("cpu"))
        for slot, value in enumerate(inputs)
    ]
    with torch.no_grad():
        return [to_numpy(result) for result in as_tuple(call(lowering, op, arguments))]


def call(lowering: Lowering, op: Op, arguments: list[Any], *, nchw: bool = False) -> Any:
    """Calls a lowering and turns what it refuses into an error that names the node."""
    try:
        return lowering.function(Node(op.name, op.op, op.attrs, nchw), *arguments)
    except Unsupported as problem:
        raise EngineError(
            f"{op.op}: {problem}", where=f"node {op.name}", fix="use --engine tensorflow for this model"
        ) from problem
    except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError) as problem:
        raise EngineError(
            f"{op.op} failed: {str(problem).splitlines()[0]}",
            where=f"node {op.name}",
            fix="check the shapes of the inputs (--shape, --batch); if TensorFlow runs it with the same inputs, report a bug in msplit",
        ) from problem


def positions(lowering: Lowering, count: int) -> set[int]:
    """The static positions of a lowering, negative ones resolved."""
    return {slot % count for slot in lowering.static if -count <= slot < count}


def as_tuple(result: Any) -> tuple[Any, ...]:
    """A lowering's result as a tuple."""
    return tuple(result) if isinstance(result, tuple | list) else (result,)
