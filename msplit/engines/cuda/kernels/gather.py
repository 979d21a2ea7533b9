"""Gathers in one kernel that a wrong index can not crash. On a GPU.

PyTorch's gathers assert on the device that every index is in range. A failing assertion ends the CUDA context and with it
the process's work on the GPU; clamping and masking around them takes several kernels. These kernels write zeros for an
index that is out of range, which is what TensorFlow's GPU kernel does.
"""

from __future__ import annotations

import math

from torch import Tensor

from msplit.engines.cuda.ir.dtypes import as_words
from msplit.engines.cuda.kernels.launch import Code, launch
from msplit.engines.cuda.kernels.tiles import shares

_GATHER, _LOOKUP = Code("memory", "gather"), Code("memory", "lookup")

_BLOCK = 256

# From this many elements on, positions are counted with 64 bits, whose divisions are several times slower.
_WIDE_FROM = 2**31 - _BLOCK


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
        grid = (shares(total, _BLOCK),)
        launch(_GATHER, grid)(as_words(table), indices, as_words(out), total, size, count, inner, outer, **flags)
    return out


def grouped_gather(table: Tensor, ids: Tensor, starts: Tensor, sizes: Tensor) -> Tensor:
    """out[n, m] = table[starts[n] + ids[n, m]], or zeros where the id is not in [0, sizes[n]), though the next member's table lies there.

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
        grid = (shares(total, _BLOCK),)
        arguments = (as_words(table), ids, starts, sizes, as_words(out), total, ids.shape[1], inner)
        launch(_LOOKUP, grid)(*arguments, BLOCK=_BLOCK, WIDE=total >= _WIDE_FROM)
    return out
