"""Products and lookups of several alike ops at once: what `--group` makes of them."""

from __future__ import annotations

import torch
from torch import Tensor

from msplit.engines.cuda.ops.activation import activate
from msplit.engines.cuda.registry import Node, Unsupported, lowering

_ALPHA = 0.20000000298023224


@lowering("_GroupedMatMul")
def grouped_matmul(node: Node, x: Tensor, weights: Tensor, *args: Tensor) -> Tensor:
    """Products of alike dense layers, each with its bias and activation: [members, rows, columns].

    The rows are [members, rows, inner], or [rows, inner] for all members; `starts` and `lengths` say which part of the stacked weights
    and bias is meant.
    """
    steps = tuple(node.get("fused_ops", ()))
    if "count" not in node.attrs:
        raise Unsupported("it is an op of the engine's own, which no graph can hold")
    count = int(node.attrs["count"])
    starts, lengths = node.attrs["starts"], node.attrs["lengths"]
    chosen = weights.narrow(0, starts[0], lengths[0])
    chosen = (chosen.mT if node.get("transpose_b") else chosen).expand(count, -1, -1)
    rows = x.expand(count, -1, -1) if x.dim() == 2 else x
    if steps:
        bias = args[0].unsqueeze(0) if starts[1] < 0 else args[0].narrow(0, starts[1], lengths[1])
        result = torch.baddbmm(bias.unsqueeze(1), rows, chosen)
        for step in steps[1:]:
            result = activate(step, node.get("leakyrelu_alpha", _ALPHA))(result)
    else:
        result = torch.bmm(rows, chosen)
    return result[0] if node.get("single") else result


@lowering("_GroupedLookup")
def grouped_lookup(node: Node, table: Tensor, ids: Tensor, starts: Tensor, sizes: Tensor) -> Tensor:
    """Rows of several tables below each other: [members, *ids, width]. An id outside of its own table is one out of range."""
    if "count" not in node.attrs:
        raise Unsupported("it is an op of the engine's own, which no graph can hold")
    count = int(node.attrs["count"])
    flat = ids.reshape(count, -1)
    inside = (flat >= 0) & (flat < sizes.unsqueeze(1))
    if table.device.type == "cpu" and not bool(inside.all()):
        raise IndexError("index out of range in a lookup")
    rows = flat.to(torch.int64).clamp(min=0) + starts.unsqueeze(1)
    taken = table.index_select(0, torch.where(inside, rows, 0).reshape(-1))
    if table.device.type != "cpu":
        taken = torch.where(inside.reshape(-1, *[1] * (table.dim() - 1)), taken, 0)
    shape = ids.shape if node.get("single") else (count, *ids.shape[1:])
    return taken.reshape(*shape, *table.shape[1:])
