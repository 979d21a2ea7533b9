"""Gather in one kernel that a wrong index can not crash. Needs Triton and a GPU; import it only when both are there.

PyTorch's gathers assert on the device that every index is in range. A failing assertion ends the CUDA context and with it
the process's work on the GPU; clamping and masking around them takes several kernels. This kernel writes zeros for an
index that is out of range, which is what TensorFlow's GPU kernel does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 256


@triton.jit  # type: ignore[untyped-decorator]
def _gather(table, indices, out, total, size, count, inner, outer, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = place < total
    column = place % inner
    row = place // inner
    matrix = row // count
    index = tl.load(indices + matrix // outer * count + row % count, mask=exists, other=0).to(tl.int64)
    inside = (index >= 0) & (index < size)
    source = (matrix * size + index) * inner + column
    values = tl.load(table + source, mask=exists & inside, other=0)
    tl.store(out + place, values, mask=exists)


def gather(table: Tensor, indices: Tensor) -> Tensor:
    """out[b, o, m, i] = table[b, o, indices[b, m], i], or 0 where the index is not in [0, n).

    Args:
        table: Contiguous, of shape [b, o, n, i], on a GPU.
        indices: Contiguous integers of shape [b, m].

    Returns:
        Contiguous, of shape [b, o, m, i].
    """
    batch, outer, size, inner = table.shape
    count = indices.shape[1]
    out = table.new_empty((batch, outer, count, inner))
    total = out.numel()
    if total:
        carrier = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[table.element_size()]
        # The bits move, whatever they mean: one compiled kernel serves every dtype of a width.
        grid = (triton.cdiv(total, _BLOCK),)
        _gather[grid](table.view(carrier), indices, out.view(carrier), total, size, count, inner, outer, _BLOCK)
    return out
