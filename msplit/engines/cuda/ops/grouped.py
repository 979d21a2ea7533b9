"""Products and lookups of several alike ops at once: what `--group` makes of them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from msplit.engines.cuda.autotune import batched_matmul
from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node, Unsupported
from msplit.engines.cuda.kernels.toolchain import can_compile


@lowering("_GroupedMatMul", own=True)
def grouped_matmul(node: Node, x: Tensor, weights: Tensor, *args: Tensor) -> Tensor:
    """Products of alike dense layers, each with its bias and activation: what `--group` makes of MatMul and _FusedMatMul."""
    _own(node)
    result = batched_matmul.run(batched_matmul.grouped(node.attrs, x, weights, *args), node.attrs)
    return result[0] if node.get("single") else result


@lowering("_GroupedLookup", own=True)
def grouped_lookup(node: Node, table: Tensor, ids: Tensor, starts: Tensor, sizes: Tensor) -> Tensor:
    """Rows of several tables below each other: what `--group` makes of lookups. An id outside of its own table is out of range."""
    _own(node)
    count = int(node.attrs["count"])
    shape = (*(ids.shape if node.get("single") else (count, *ids.shape[1:])), *table.shape[1:])
    flat = ids.reshape(count, -1)
    kernel = _kernel() if table.is_cuda and table.element_size() <= 8 else None
    if kernel is not None:
        return kernel(table, flat.contiguous(), starts, sizes).reshape(shape)
    inside = (flat >= 0) & (flat < sizes.unsqueeze(1))
    if table.device.type == "cpu" and not bool(inside.all()):
        raise IndexError("index out of range in a lookup")
    rows = torch.where(inside, flat.to(torch.int64) + starts.unsqueeze(1), 0).reshape(-1)
    taken = table.index_select(0, rows)
    if table.device.type != "cpu":
        taken = torch.where(inside.reshape(-1, *[1] * (table.dim() - 1)), taken, 0)
    return taken.reshape(shape)


def _own(node: Node) -> None:
    if "count" not in node.attrs:
        raise Unsupported("it is an op of the engine's own, which no graph can hold")


@functools.cache
def _kernel() -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None:
    if not can_compile():
        return None
    from msplit.engines.cuda.kernels.grouped_gather import lookup

    return lookup
