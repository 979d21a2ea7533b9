"""Gather in one kernel that a wrong index can not crash. Needs Triton and a GPU; import it only when both are there.

PyTorch's gathers assert on the device that every index is in range. A failing assertion ends the CUDA context and with it
the process's work on the GPU; clamping and masking around them takes several kernels. This kernel writes zeros for an
index that is out of range, which is what TensorFlow's GPU kernel does.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from msplit.engines.cuda.ir.dtypes import as_words

_BLOCK = 256

# From this many elements on, positions are counted with 64 bits, whose divisions are several times slower.
_WIDE_FROM = 2**31 - _BLOCK


@triton.jit  # type: ignore[untyped-decorator]
def _gather(  # type: ignore[no-untyped-def]
    table, indices, out, total, size, count, inner, outer, BLOCK: tl.constexpr, WIDE: tl.constexpr, SINGLE: tl.constexpr
):
    block = tl.program_id(0)
    if WIDE:
        block = block.to(tl.int64)
    place = block * BLOCK + tl.arange(0, BLOCK)
    exists = place < total
    row = place // inner
    column = place - row * inner
    if SINGLE:
        index = tl.load(indices + row, mask=exists, other=0).to(tl.int64)
        start = tl.zeros([BLOCK], tl.int64)
    else:
        matrix = row // count
        index = tl.load(indices + matrix // outer * count + row % count, mask=exists, other=0).to(tl.int64)
        start = matrix.to(tl.int64) * size
    inside = (index >= 0) & (index < size)
    values = tl.load(table + (start + index) * inner + column, mask=exists & inside, other=0)
    tl.store(out + place, values, mask=exists)


def gather(table: Tensor, indices: Tensor) -> Tensor:
    """out[b, o, m, i] = table[b, o, indices[b, m], i], or 0 where the index is not in [0, n).

    Args:
        table: Contiguous, of shape [b, o, n, i], on a GPU, with elements of at most 8 bytes.
        indices: Contiguous integers of shape [b, m].

    Returns:
        Contiguous, of shape [b, o, m, i].
    """
    batch, outer, size, inner = table.shape
    count = indices.shape[1]
    out = table.new_empty((batch, outer, count, inner))
    total = out.numel()
    if total:
        flags = {"BLOCK": _BLOCK, "WIDE": total >= _WIDE_FROM, "SINGLE": batch * outer == 1}
        grid = (triton.cdiv(total, _BLOCK),)
        _gather[grid](as_words(table), indices, as_words(out), total, size, count, inner, outer, **flags)
    return out
