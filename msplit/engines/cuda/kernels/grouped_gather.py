"""A lookup in many tables of one width in one kernel. Needs Triton and a GPU; import it only when both are there.

As `gather`, with a table per member: an id outside of its own table gives zeros, though the next table's rows lie there.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from msplit.engines.cuda.ir.dtypes import as_words

_BLOCK = 256
_WIDE_FROM = 2**31 - _BLOCK


@triton.jit  # type: ignore[untyped-decorator]
def _lookup(  # type: ignore[no-untyped-def]
    table, ids, starts, sizes, out, total, count, inner, BLOCK: tl.constexpr, WIDE: tl.constexpr
):
    block = tl.program_id(0)
    if WIDE:
        block = block.to(tl.int64)
    place = block * BLOCK + tl.arange(0, BLOCK)
    exists = place < total
    row = place // inner
    member = row // count
    index = tl.load(ids + row, mask=exists, other=0).to(tl.int64)
    start = tl.load(starts + member, mask=exists, other=0)
    inside = (index >= 0) & (index < tl.load(sizes + member, mask=exists, other=0))
    values = tl.load(table + (start + index) * inner + (place - row * inner), mask=exists & inside, other=0)
    tl.store(out + place, values, mask=exists)


def lookup(table: Tensor, ids: Tensor, starts: Tensor, sizes: Tensor) -> Tensor:
    """out[n, m] = table[starts[n] + ids[n, m]], or zeros where the id is not in [0, sizes[n]).

    Args:
        table: Contiguous, of shape [rows, ...], on a GPU, with elements of at most 8 bytes.
        ids: Contiguous integers of shape [members, m].
        starts: First row of each member's table, int64.
        sizes: Number of rows of each member's table, int64.

    Returns:
        Contiguous, of shape [members, m, ...].
    """
    inner = math.prod(table.shape[1:])
    out = table.new_empty((*ids.shape, *table.shape[1:]))
    total = out.numel()
    if total:
        grid = (triton.cdiv(total, _BLOCK),)
        arguments = (as_words(table), ids, starts, sizes, as_words(out), total, ids.shape[1], inner)
        _lookup[grid](*arguments, BLOCK=_BLOCK, WIDE=total >= _WIDE_FROM)
    return out
