"""Layer normalization in one kernel.

It is spelled in many ways: with a square or a squared difference, with gamma multiplied into the factor or behind it, as
``x * inv + (beta - mean * inv)``. All are the same function of a row x with mean m and variance v: ``(x - m) / sqrt(v + epsilon) * gamma +
beta``. Gamma, beta and (nearly) epsilon are read off from what the ops make of three rows; epsilon itself must be one of
their constants; and other rows prove them.
"""

from __future__ import annotations

import numpy as np
import torch

from msplit.engines.cuda.ir.graph import Key, Op, OpGraph
from msplit.engines.cuda.passes import match_rows
from msplit.engines.cuda.passes.pattern import Readers
from msplit.opset.traits import ops_with

_FLOATS = ("float32", "float64")
_OF_SOFTMAX = ops_with("softmax part")
_TOLERANCE = 1e-6
_NEAR = 1e-3
_WIDEST = 1 << 16
"""Columns: wider rows are no layer norm worth the search."""


def fuse_layer_norm(graph: OpGraph) -> bool:
    """Turns every layer norm over the last axis into one op."""
    readers = Readers(graph)
    done: set[Key] = set()
    changed = False
    for op in list(graph.ops.values()):
        key = op.inputs[0] if op.op == "Mean" and op.node in graph.ops else None
        shape = graph.shapes.get(key) if key is not None else None
        if key is None or shape is None or len(shape) < 1 or key in done or op.attrs.get("T") not in _FLOATS:
            continue
        done.add(key)
        changed |= 1 < shape[-1] <= _WIDEST and _fuse(graph, readers, key, str(op.attrs["T"]))
    return changed


def _fuse(graph: OpGraph, readers: Readers, key: Key, dtype: str) -> bool:
    found = match_rows.region(graph, readers, key)
    for part in match_rows.functions(graph, readers, key, found):
        if sum(op.op == "Mean" for op in part) != 2 or any(op.op in _OF_SOFTMAX for op in part):
            continue
        made = _parameters(graph, key, part)
        if made is not None:
            gamma, beta, epsilon = made
            inputs = [key, graph.constant(gamma.astype(dtype)), graph.constant(beta.astype(dtype))]
            match_rows.replace(graph, part, "_LayerNorm", inputs, {"T": dtype, "epsilon": epsilon})
            return True
    return False


def _parameters(graph: OpGraph, key: Key, part: list[Op]) -> tuple[np.ndarray, np.ndarray, float] | None:
    """Gamma, beta and epsilon, if the ops are a layer norm."""
    columns = graph.shapes[key][-1]
    chance = torch.Generator().manual_seed(0)
    unit = 0.5 + torch.rand(columns, generator=chance, dtype=torch.float64)
    unit[::2] *= -1
    unit = (unit - unit.mean()) / unit.std(correction=0)
    small = 1e-3
    probes = torch.stack([torch.zeros(columns, dtype=torch.float64), 1e6 * unit, small * unit])
    zero, far, near = match_rows.evaluate(graph, key, part, probes)
    gamma = (far - zero) / unit
    widest = int(gamma.abs().argmax())
    part_of = float((near[widest] - zero[widest]) / (gamma[widest] * unit[widest])) if gamma[widest] != 0 else 0.0
    if not 0 < part_of <= 1:
        return None
    epsilon = _constant_near(graph, part, small**2 * (1 / part_of**2 - 1))
    if epsilon is None:
        return None
    scales = torch.tensor([[1e-4], [1e-2], [1.0], [1.0], [30.0], [1e3]], dtype=torch.float64)
    tried = torch.randn(len(scales), columns, generator=chance, dtype=torch.float64) * scales + scales
    wanted = torch.layer_norm(tried, (columns,), gamma, zero, epsilon)
    found = match_rows.evaluate(graph, key, part, tried)
    if not torch.allclose(found, wanted, rtol=_TOLERANCE, atol=_TOLERANCE * float(wanted.abs().max())):
        return None
    return gamma.numpy(), zero.numpy(), epsilon


def _constant_near(graph: OpGraph, part: list[Op], wanted: float) -> float | None:
    """The number among the ops' constants that is nearest to one that was measured, if it is near."""
    found = [graph.constants[key] for op in part for key in op.inputs if key in graph.constants]
    numbers = [float(value.reshape(-1)[0]) for value in found if value.size == 1 and value.dtype.kind == "f"]
    best = min(numbers, key=lambda number: abs(number - wanted), default=None)
    return best if best is not None and best > 0 and abs(best - wanted) <= _NEAR * best else None
