"""GELU, however it is written down.

It comes as ``0.5 * x * (1 + erf(x / sqrt(2)))``, as ``x * (0.5 + 0.5 * erf(...))``, with `tanh`, with `Pow` or with products, in any
order. Instead of a pattern for each, the elementwise ops behind a value are evaluated on a grid of points: what agrees with GELU
on all of them is GELU.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from numpy.typing import NDArray

from msplit.engines.cuda.ir.graph import Key, Op, OpGraph
from msplit.engines.cuda.ir.lowering import table
from msplit.engines.cuda.ir.node import Node
from msplit.engines.cuda.passes.pattern import Readers
from msplit.opset.traits import ops_with

_CURVED = ops_with("gelu curve")
_ELEMENTWISE = ops_with("gelu part")
_LARGEST = 16
"""Ops that a GELU is made of at most."""

_TOLERANCE = {"float64": 1e-7, "float32": 1e-6, "float16": 2e-4, "bfloat16": 2e-4}
"""Largest difference from GELU, by dtype: constants are rounded. The two GELUs differ by 4.7e-4."""


def match_gelu(graph: OpGraph, readers: Readers, key: Key) -> tuple[str, list[Op]] | None:
    """The ops that compute GELU of a value, if they are all that reads it.

    Returns:
        ``GeluExact`` or ``GeluApproximate``, and the ops, the one that gives the result last; None where there is no GELU.
    """
    if key in readers.fetched or key not in graph.shapes:
        return None
    region = _region(graph, readers, key)
    if not _CURVED.intersection(op.op for op in region):
        return None
    for count in range(2, len(region) + 1):
        if _is_closed(readers, key, region[:count]):
            name = _compare(graph, key, region[:count])
            if name is not None:
                return name, region[:count]
    return None


def _region(graph: OpGraph, readers: Readers, key: Key) -> list[Op]:
    """Elementwise ops that depend on a value and on constant numbers alone, in topological order."""
    shape = graph.shapes[key]
    inside = {key}
    region: list[Op] = []
    waiting = list(dict.fromkeys(readers.of.get(key, [])))
    while waiting and len(region) < _LARGEST:
        ready = [
            number for number in waiting if number in graph.ops and _belongs(graph, graph.ops[number], inside, shape)
        ]
        if not ready:
            break
        op = graph.ops[ready[0]]
        waiting.remove(op.node)
        region.append(op)
        inside.add((op.node, 0))
        waiting += [number for number in readers.of.get((op.node, 0), []) if number not in waiting]
    return region


def _belongs(graph: OpGraph, op: Op, inside: set[Key], shape: tuple[int, ...]) -> bool:
    if op.op not in _ELEMENTWISE or graph.shapes.get((op.node, 0)) != shape:
        return False
    return all(key in inside or _number(graph, key) is not None for key in op.inputs)


def _number(graph: OpGraph, key: Key) -> float | None:
    value = graph.constants.get(key)
    return float(value.reshape(-1)[0]) if value is not None and value.size == 1 else None


def _is_closed(readers: Readers, key: Key, ops: list[Op]) -> bool:
    """Whether only the last op's result is wanted outside."""
    inside = {op.node for op in ops}
    for value in [key, *((op.node, 0) for op in ops[:-1])]:
        users = readers.of.get(value, [])
        if not users or value in readers.fetched or not inside.issuperset(users):
            return False
    return True


def _compare(graph: OpGraph, key: Key, ops: list[Op]) -> str | None:
    """Evaluates the ops on a grid, in float64."""
    points = torch.linspace(-9, 9, 1801, dtype=torch.float64)
    values = {key: points}
    for op in ops:
        arguments = [
            values[name] if name in values else torch.tensor(_number(graph, name), dtype=torch.float64)
            for name in op.inputs
        ]
        values[op.node, 0] = table()[op.op].function(Node(op.name, op.op, {}), *arguments)
    result = values[ops[-1].node, 0].numpy()
    allowed = _TOLERANCE.get(str(ops[-1].attrs.get("T", "float32")), 0.0)
    errors = {name: float(np.abs(result - curve).max()) for name, curve in _curves().items()}
    name = min(errors, key=errors.__getitem__)
    return name if errors[name] <= allowed else None


@functools.cache
def _curves() -> dict[str, NDArray[np.float64]]:
    x = np.linspace(-9, 9, 1801)
    erf = np.asarray([math.erf(value / math.sqrt(2)) for value in x])
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return {"GeluExact": 0.5 * x * (1 + erf), "GeluApproximate": 0.5 * x * (1 + np.tanh(inner))}
