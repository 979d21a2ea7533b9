"""What of a graph the cuda engine can run, known before anything runs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from msplit.engines.cuda.registry import table
from msplit.errors import EngineError
from msplit.flatten.flat import FlatGraph
from msplit.graph import CONTROL

BY_THE_ENGINE = ("Placeholder", "PlaceholderV2", "Const", "VarHandleOp", "VariableV2", "Variable", "ReadVariableOp")
"""Ops that need no lowering: they are inputs, constants or variables."""


@dataclass(frozen=True)
class Coverage:
    """What the engine can run.

    Attributes:
        covered: Op -> number of nodes.
        missing: Op -> names of its nodes, for ops without a lowering.
        dynamic: Op -> names of its nodes, for ops whose output shape depends on values: they run eagerly, not captured.
        host: Op -> names of nodes without a lowering that only depend on inputs, so that they run before, through TensorFlow on the CPU.
    """

    covered: dict[str, int]
    missing: dict[str, list[str]]
    dynamic: dict[str, list[str]]


def needed(flat: FlatGraph, outside: set[tuple[int, int]]) -> list[int]:
    """Nodes that the outputs need through data edges, in topological order; the walk stops at values from outside.

    Control edges order effects. Nothing that the engine runs has an effect, so a node needed only for control is left out.
    """
    graph = flat.graph
    seen = np.zeros(len(graph), dtype=bool)
    stack = [tensor.node for tensor in flat.outputs if (tensor.node, tensor.port) not in outside]
    seen[stack] = True
    edges = graph.edges
    while stack:
        for edge in graph.in_edges(stack.pop()):
            producer, port = int(edges.src[edge]), int(edges.port[edge])
            if port != CONTROL and not seen[producer] and (producer, port) not in outside:
                seen[producer] = True
                stack.append(producer)
    return [int(node) for node in graph.topological if seen[node]]


def cover(flat: FlatGraph, nodes: list[int] | None = None) -> Coverage:
    """Which ops of a graph have a lowering."""
    known = table()
    outside = {(tensor.node, tensor.port) for tensor in flat.inputs}
    covered: dict[str, int] = {}
    missing: dict[str, list[str]] = {}
    dynamic: dict[str, list[str]] = {}
    for node in nodes if nodes is not None else needed(flat, outside):
        op, name = flat.graph.ops[node], flat.graph.names[node]
        if op in BY_THE_ENGINE or op in known:
            covered[op] = covered.get(op, 0) + 1
            if op in known and known[op].dynamic:
                dynamic.setdefault(op, []).append(name)
        else:
            missing.setdefault(op, []).append(name)
    return Coverage(covered, missing, dynamic)


def refuse(flat: FlatGraph, nodes: list[int]) -> None:
    """Raises an EngineError that lists every op without a lowering, if there is one."""
    missing = cover(flat, nodes).missing
    if missing:
        lines = [
            f"  {op}: {len(names)} node{'s' if len(names) > 1 else ''}, such as {names[0]}"
            for op, names in sorted(missing.items())
        ]
        raise EngineError(
            "\n".join(["the cuda engine has no lowering for:", *lines]),
            fix="use --engine tensorflow, or cut the model with --inputs and --outputs so that these nodes are outside",
        )
