"""How long a kernel takes: from its work, its grid and what it waits for.

    launches x launch                     what a tiny kernel takes inside a CUDA graph, of the data sheet
    + waiting                             clock cycles in which nothing flows: see below
    + max(chain, flops / (peak x share))  one block's steps, one after the other, or the arithmetic of all
    + bytes / min(bandwidth, blocks x 64 B x clock)

The first two are what small kernels consist of, the last two what large ones come to. `share` is blocks / SMs, at most 1; 64 bytes per
clock is what one SM takes from the L2 cache, so that a few blocks can not draw the whole bandwidth.

The cycles below are no vendor's figures. They were fitted to kernels that were timed alone on an H200 and to steps on one stream of 27
models (float32 as TF32), by `benchmarks/fit_costs.py`. Fitted to one half of the families of 18 models that nothing else was fitted to,
they predict a step of the other half with a median error of 7 %, at most 20 % (`benchmarks/notes`). They are clock cycles because
that is how they carry over to other GPUs: dependent loads, barriers and products take about as many on all of them.
"""

from __future__ import annotations

import numpy as np

from msplit.core.graph import Floats
from msplit.cost.gpus import SM_BYTES_PER_CYCLE, Gpu

ACCESS = 430.0
"""What a grid of at least one full block waits for memory: one load, one store. A tiny kernel's are part of its launch."""

HALVING = 240.0
"""A reduction halves what is left: exchange among threads, with a barrier."""

WINDOW_STEP = 210.0
"""One element of the window of a depthwise convolution, in a loop with its address and the load."""

ROW_SETUP = 1200.0
"""Of a product with one row or column: sums of threads are put together, bias and activation follow."""

ROW_STEP = 46.0
"""32 summands of it."""

TILE_SETUP = 950.0
"""Of a product in tiles: the pipeline of loads fills, the tile is written."""

TILE_STEP = 205.0
"""32 summands of a tile of 64 x 64. An H200's tensor cores take 138 for them in TF32 at their peak."""

SUMMANDS = 200
"""A sum that is split among blocks leaves each at least so many."""

JOINING = 4700.0
"""To join them."""

GATHERING = 2700.0
"""What a convolution with a window takes more than a product of its size."""

NARROW = 0.2
"""Part of the plain peak that a convolution of fewer channels than a tensor core takes at a time reaches."""

COLUMN_STEP = 170.0
"""A reduction over other axes than the last one: one element of a column, up to `COLUMN` of them one after the other."""

COLUMN = 64

COLUMN_HALVING = 1450.0
"""Longer columns are shared by threads and blocks, which put their parts together."""

BROADCAST = 700.0
"""What an elementwise kernel with a smaller operand waits longer: it reads single elements, not vectors of them."""

REORDERING = 4800.0
"""A batched product's operand is copied first where its matrices do not lie at equal distances."""

REACHED = 0.42
"""Part of the tensor cores' peak that products reach where that is what limits them, with full tiles: more for the largest."""


def halvings(counts: Floats) -> Floats:
    """Cycles of reductions of so many elements to one."""
    result: Floats = HALVING * np.log2(np.maximum(counts, 1.0))
    return result


def kernel_times(
    sheet: Gpu,
    *,
    peak: Floats,
    flops: Floats,
    nbytes: Floats,
    share: Floats,
    waiting: Floats,
    chain: Floats,
    launches: Floats,
) -> Floats:
    """Times of kernels in µs.

    Args:
        sheet: The device.
        peak: Operations per µs that each can reach on the whole device.
        flops: Operations.
        nbytes: Bytes read and written.
        share: Blocks per multiprocessor, at most 1.
        waiting: Clock cycles before and behind the work.
        chain: Clock cycles that one block takes for its part.
        launches: How many kernels it is.
    """
    drawn = np.minimum(sheet.bytes_per_us, share * sheet.sms * SM_BYTES_PER_CYCLE * sheet.clock_mhz)
    steps = np.maximum(chain / sheet.clock_mhz, flops / (peak * share))
    result: Floats = launches * sheet.launch_us + waiting / sheet.clock_mhz + steps + nbytes / drawn
    return result
