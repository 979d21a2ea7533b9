"""A softmax that is spelled out (exponentials of what is above the row's maximum, over their sum) in one kernel."""

from __future__ import annotations

import torch

from msplit.engines.cuda.ir.graph import Key, Op, OpGraph
from msplit.engines.cuda.passes import match_rows
from msplit.engines.cuda.passes.pattern import Readers

_FLOATS = ("float32", "float64")
_TOLERANCE = 1e-9


def fuse_softmax(graph: OpGraph) -> bool:
    """Turns every softmax over the last axis into one op."""
    readers = Readers(graph)
    done: set[Key] = set()
    changed = False
    for op in list(graph.ops.values()):
        key = op.inputs[0] if op.op == "Max" and op.node in graph.ops else None
        if key is None or key in done or not graph.shapes.get(key) or op.attrs.get("T") not in _FLOATS:
            continue
        done.add(key)
        found = match_rows.region(graph, readers, key)
        for part in match_rows.functions(graph, readers, key, found):
            kinds = [one.op for one in part]
            if kinds.count("Max") == kinds.count("Exp") == kinds.count("Sum") == 1 and _is_softmax(graph, key, part):
                match_rows.replace(graph, part, "Softmax", [key], {"T": op.attrs["T"]})
                changed = True
                break
    return changed


def _is_softmax(graph: OpGraph, key: Key, part: list[Op]) -> bool:
    """Also of rows whose exponentials would overflow: that they do not is what the maximum is for."""
    chance = torch.Generator().manual_seed(0)
    scales = torch.tensor([[1e-3], [1.0], [10.0], [1e4]], dtype=torch.float64)
    tried = torch.randn(len(scales), graph.shapes[key][-1], generator=chance, dtype=torch.float64) * scales + scales
    found = match_rows.evaluate(graph, key, part, tried)
    return bool(torch.allclose(found, torch.softmax(tried, -1), rtol=_TOLERANCE, atol=_TOLERANCE))
