"""Layer normalization, softmax, GELU and Swish, however they are spelled: each in one kernel.

What ops behind a value compute of each of its rows is found by evaluating them. A *row* runs along the last axis. Elementwise ops with
constants that are the same for all rows, and reductions over the last axis, treat each row on its own, so that a few rows tell what the
ops do to all of them.

Layer normalization is spelled in many ways: with a square or a squared difference, with gamma multiplied into the factor or behind it,
as ``x * inv + (beta - mean * inv)``. All are the same function of a row x with mean m and variance v: ``(x - m) / sqrt(v + epsilon) *
gamma + beta``. Gamma, beta and (nearly) epsilon are read off from what the ops make of three rows; epsilon itself must be one of their
constants; and other rows prove them.

GELU comes as ``0.5 * x * (1 + erf(x / sqrt(2)))``, as ``x * (0.5 + 0.5 * erf(...))``, with `tanh`, with `Pow` or with products, in any
order; Swish as ``x * sigmoid(x)``, with factors of one or without. Instead of a pattern for each, the elementwise ops behind a value
are evaluated on a grid of points: what agrees with GELU on all of them is GELU.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator

import numpy as np
import torch

from msplit.core.dag import reached
from msplit.engines.cuda.ir.graph import Key, Op, OpGraph, known, proved, require
from msplit.engines.cuda.ir.interpret import as_tuple
from msplit.engines.cuda.ir.lowering import table
from msplit.engines.cuda.ir.node import Node
from msplit.engines.cuda.kernels.activations import ACTIVATIONS
from msplit.engines.cuda.passes.pattern import Readers, per_channel
from msplit.opset.traits import ops_with

REDUCTIONS = ops_with("row reduction")
_ELEMENTWISE = ops_with("row part")
LARGEST = 24
"""Ops that such a function is made of at most."""


def region(graph: OpGraph, readers: Readers, key: Key, belongs: Callable[[Op, set[Key]], bool], most: int) -> list[Op]:
    """Ops that depend on a value, in topological order.

    `belongs` says whether to take an op, told the value and those of the ops taken before; at most so many are taken.
    """
    inside = {key}
    found: list[Op] = []
    waiting = list(dict.fromkeys(readers.of.get(key, [])))
    while waiting and len(found) < most:
        near = (graph.ops[number] for number in waiting if number in graph.ops)
        ready = next((op for op in near if belongs(op, inside)), None)
        if ready is None:
            break
        waiting.remove(ready.node)
        found.append(ready)
        inside.add(ready.out)
        waiting += [one for one in dict.fromkeys(readers.of.get(ready.out, [])) if one not in waiting]
    return found


def _is_by_row(graph: OpGraph, key: Key, op: Op, inside: set[Key]) -> bool:
    """Returns whether an op depends row by row on the rows of `key` and on constants alone."""
    if op.out not in graph.shapes:
        return False
    shape = graph.shapes[key]
    if op.op in REDUCTIONS:
        axes = graph.constants.get(op.inputs[1])
        last = axes is not None and [int(axis) % len(shape) for axis in axes.reshape(-1)] == [len(shape) - 1]
        return op.inputs[0] in inside and last and bool(op.attrs.get("keep_dims"))
    if op.op not in _ELEMENTWISE or graph.shapes[op.out] not in (shape, (*shape[:-1], 1)):
        return False
    return all(name in inside or _same_for_all(graph, name, shape) for name in op.inputs)


def _same_for_all(graph: OpGraph, key: Key, shape: tuple[int, ...]) -> bool:
    value = graph.constants.get(key)
    return value is not None and per_channel(value, shape, (len(shape) - 1,)) is not None


def functions(graph: OpGraph, readers: Readers, key: Key, ops: list[Op]) -> Iterator[list[Op]]:
    """For each op of a region whose result has the rows' shape, the last first: the ops that it needs, if nothing else reads these."""
    made_by = {op.out: op for op in ops}
    for last in reversed(ops):
        if graph.shapes[last.out] == graph.shapes[key]:
            needed = reached([last.out], lambda name: made_by.keys() & {*made_by[name].inputs})
            part = [op for op in ops if op.out in needed]
            if _is_closed(readers, [op.out for op in part if op is not last], part):
                yield part


def evaluate(graph: OpGraph, key: Key, ops: list[Op], rows: torch.Tensor) -> torch.Tensor:
    """The result of the last of some ops, in topological order, for rows (rows by columns, float64) in the place of a value."""
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
        values[op.out] = as_tuple(table()[op.op].function(Node(op.name, op.op, attrs), *arguments))[0]
    return values[ops[-1].out].reshape(rows.shape)


def replace(graph: OpGraph, part: list[Op], op: str, inputs: list[Key], attrs: dict[str, object]) -> None:
    """Puts one op in the place of a function's ops."""
    last = part[-1]
    source_nodes = [node for one in part for node in one.source_nodes]
    graph.drop(part[:-1])
    last.op, last.inputs, last.attrs = op, inputs, attrs
    last.source_nodes = [*last.source_nodes, *(node for node in source_nodes if node not in last.source_nodes)]


_FLOATS = ("float32", "float64")
_OF_SOFTMAX = ops_with("softmax part")
_TOLERANCE = 1e-9
_NEAR = 1e-4
_WIDEST = 1 << 16
"""Columns: wider rows are no layer norm worth the search."""


def _fuse(graph: OpGraph, reduction: str, widest: float, match: Callable[[Key, list[Op], str], bool]) -> bool:
    """Offers the functions of each value that such reductions read, of rows up to a width, until one is taken and replaced."""
    readers = Readers(graph)
    done: set[Key] = set()
    changed = False
    for op in list(graph.ops.values()):
        if op.op != reduction or op.node not in graph.ops or op.attrs.get("T") not in _FLOATS:
            continue
        key = op.inputs[0]
        shape = graph.shapes.get(key)
        if not shape or key in done:
            continue
        done.add(key)
        if shape[-1] <= widest:
            found = region(graph, readers, key, functools.partial(_is_by_row, graph, key), LARGEST)
            changed |= any(proved(match, key, part, op.attrs["T"]) for part in functions(graph, readers, key, found))
    return changed


def fuse_layer_norm(graph: OpGraph) -> bool:
    """Turns every layer norm over the last axis into one op."""

    def match(key: Key, part: list[Op], dtype: str) -> bool:
        require(sum(op.op == "Mean" for op in part) == 2 and all(op.op not in _OF_SOFTMAX for op in part))
        gamma, beta, epsilon = _parameters(graph, key, part)
        inputs = [key, graph.constant(gamma.astype(dtype)), graph.constant(beta.astype(dtype))]
        replace(graph, part, "_LayerNorm", inputs, {"T": dtype, "epsilon": epsilon})
        return True

    return _fuse(graph, "Mean", _WIDEST, match)


def _parameters(graph: OpGraph, key: Key, part: list[Op]) -> tuple[np.ndarray, np.ndarray, float]:
    """Gamma, beta and epsilon, if the ops are a layer norm."""
    columns = graph.shapes[key][-1]
    require(columns > 1)
    chance = torch.Generator().manual_seed(0)
    unit = 0.5 + torch.rand(columns, generator=chance, dtype=torch.float64)
    unit[::2] *= -1
    unit = (unit - unit.mean()) / unit.std(correction=0)
    small = 1e-3
    probes = torch.stack([torch.zeros(columns, dtype=torch.float64), 1e6 * unit, small * unit])
    zero, far, near = evaluate(graph, key, part, probes)
    gamma = (far - zero) / unit
    widest = int(gamma.abs().argmax())
    part_of = float((near[widest] - zero[widest]) / (gamma[widest] * unit[widest])) if gamma[widest] != 0 else 0.0
    require(0 < part_of <= 1)
    epsilon = _constant_near(graph, part, small**2 * (1 / part_of**2 - 1))
    scales = torch.tensor([[1e-4], [1e-2], [1.0], [1.0], [30.0], [1e3]], dtype=torch.float64)
    tried = torch.randn(len(scales), columns, generator=chance, dtype=torch.float64) * scales + scales
    wanted = torch.layer_norm(tried, (columns,), gamma, zero, epsilon)
    found = evaluate(graph, key, part, tried)
    require(torch.allclose(found, wanted, rtol=_TOLERANCE, atol=_TOLERANCE * float(wanted.abs().max())))
    return gamma.numpy(), zero.numpy(), epsilon


def _constant_near(graph: OpGraph, part: list[Op], wanted: float) -> float:
    """The number among the ops' constants that is nearest to one that was measured, if it is near."""
    found = [graph.constants[key] for op in part for key in op.inputs if key in graph.constants]
    numbers = [float(value.reshape(-1)[0]) for value in found if value.size == 1 and value.dtype.kind == "f"]
    best = known(min(numbers, key=lambda number: abs(number - wanted), default=None))
    require(best > 0 and abs(best - wanted) <= _NEAR * best)
    return best


_SOFTMAX_TOLERANCE = 1e-13


def fuse_softmax(graph: OpGraph) -> bool:
    """Turns every softmax over the last axis into one op."""

    def match(key: Key, part: list[Op], dtype: str) -> bool:
        kinds = [op.op for op in part]
        require(kinds.count("Max") == kinds.count("Exp") == kinds.count("Sum") == 1 and _is_softmax(graph, key, part))
        replace(graph, part, "Softmax", [key], {"T": dtype})
        return True

    return _fuse(graph, "Max", math.inf, match)


def _is_softmax(graph: OpGraph, key: Key, part: list[Op]) -> bool:
    """Compares with softmax, also for rows whose exponentials would overflow: that they do not is what the maximum is for."""
    chance = torch.Generator().manual_seed(0)
    scales = torch.tensor([[1e-3], [1.0], [10.0], [1e4]], dtype=torch.float64)
    tried = torch.randn(len(scales), graph.shapes[key][-1], generator=chance, dtype=torch.float64) * scales + scales
    found = evaluate(graph, key, part, tried)
    return bool(torch.allclose(found, torch.softmax(tried, -1), rtol=_SOFTMAX_TOLERANCE, atol=_SOFTMAX_TOLERANCE))


_CURVED = ops_with("gelu curve")
_GELU_ELEMENTWISE = ops_with("gelu part")
_GELU_LARGEST = 16
"""Ops that a GELU is made of at most."""

_GELU_TOLERANCE = {"float64": 1e-13, "float32": 1e-7, "float16": 2e-4, "bfloat16": 2e-4}
"""Largest difference from GELU, by dtype: that of constants rounded to it, since exact ones take their place. What has others stays
as it is. The two GELUs differ by 4.7e-4."""


def match_gelu(graph: OpGraph, readers: Readers, key: Key) -> tuple[str, list[Op]] | None:
    """The ops that compute GELU or Swish of a value, if they are all that reads it.

    Returns:
        ``GeluExact``, ``GeluApproximate`` or ``Swish``, and the ops, the one that gives the result last; None where there is neither.
    """
    if key in readers.fetched or key not in graph.shapes:
        return None
    ops = region(graph, readers, key, functools.partial(_is_by_element, graph, key), _GELU_LARGEST)
    if not _CURVED.intersection(op.op for op in ops):
        return None
    for count in range(2, len(ops) + 1):
        part = ops[:count]
        closed = _is_closed(readers, [key, *(op.out for op in part[:-1])], part)
        if closed and (name := _compare(graph, key, part)) is not None:
            return name, part
    return None


def _is_by_element(graph: OpGraph, key: Key, op: Op, inside: set[Key]) -> bool:
    """Returns whether an op depends element by element on the elements of `key` and on constant numbers alone."""
    if op.op not in _GELU_ELEMENTWISE or graph.shapes.get((op.node, 0)) != graph.shapes[key]:
        return False
    return all(name in inside or (name in graph.constants and graph.constants[name].size == 1) for name in op.inputs)


def _is_closed(readers: Readers, keys: list[Key], ops: list[Op]) -> bool:
    """Returns whether nothing but some ops wants some values."""
    inside = {op.node for op in ops}
    return all(key not in readers.fetched and inside.issuperset(readers.of.get(key, ())) for key in keys)


def _compare(graph: OpGraph, key: Key, ops: list[Op]) -> str | None:
    """Evaluates the ops, and every activation that is composed, on a grid in float64."""
    grid = torch.linspace(-9, 9, 1801, dtype=torch.float64)[None]
    result = evaluate(graph, key, ops, grid)
    allowed = _GELU_TOLERANCE.get(str(ops[-1].attrs.get("T", "float32")), 0.0)
    curves = {name: one.function(grid) for name, one in ACTIVATIONS.items() if one.composed}
    errors = {name: float((result - curve).abs().max()) for name, curve in curves.items()}
    name = min(errors, key=errors.__getitem__)
    return name if errors[name] <= allowed else None
