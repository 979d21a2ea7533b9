"""The kernel that fills the outputs of all columns. Needs Triton; import it only where that is.

One program per segment and block of rows. All that differs from column to column comes from two tables in device memory,
one row per segment and one per term (`launch` makes them), so that one compiled kernel serves any mixture of columns. Tables are
found by their addresses; ids and copied rows lie in at most two blocks of memory, and are found by their distance from the block's
start, which is the same in every run while the block itself need not be.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def fill_columns(  # type: ignore[no-untyped-def]
    shared,
    extra,
    out,
    segments,
    terms,
    boundaries,
    blocks,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    SUM: tl.constexpr,
    EDGES: tl.constexpr,
    MODULO: tl.constexpr,
):
    """See the module and `spec`. ROWS by WIDTH elements at a time, summed in the type SUM; EDGES and MODULO: whether any term has some."""
    element = out.dtype.element_ty
    segment = segments + (tl.program_id(0) // blocks) * 8
    start = tl.load(segment)
    step = tl.load(segment + 1)
    rows = tl.load(segment + 2)
    width = tl.load(segment + 3)
    first_term = tl.load(segment + 4).to(tl.int32)
    last_term = tl.load(segment + 5).to(tl.int32)
    combiner = tl.load(segment + 6)
    row = (tl.program_id(0) % blocks) * ROWS + tl.arange(0, ROWS)
    here = row < rows
    row = row.to(tl.int64)
    for left in range(0, width.to(tl.int32), WIDTH):
        column = left + tl.arange(0, WIDTH)
        inside = here[:, None] & (column < width)[None, :]
        total = tl.zeros([ROWS, WIDTH], SUM)
        counted = tl.zeros([ROWS], tl.float32)
        for number in range(first_term, last_term):
            term = terms + number * 16
            kind = tl.load(term)
            distance = tl.load(term + 1)
            table = tl.load(term + 2)
            size = tl.load(term + 3)
            stride = tl.load(term + 4)
            count = tl.load(term + 5).to(tl.int32)
            edges = boundaries + tl.load(term + 6)
            edge_count = tl.load(term + 7).to(tl.int32)
            turns = tl.load(term + 8).to(tl.int32)
            narrow = tl.load(term + 9)
            modulo = tl.load(term + 10)
            low = tl.load(term + 11)
            high = tl.load(term + 12)
            offset = tl.load(term + 13)
            valid_from = tl.load(term + 14)
            if tl.load(term + 15) != 0:
                base = extra + distance
            else:
                base = shared + distance
            if kind == 0:
                copied = base.to(tl.pointer_type(element), bitcast=True)
                values = tl.load(copied + row[:, None] * stride + column[None, :], mask=inside, other=0)
                total += values.to(SUM)
                counted += 1
            else:
                for turn in range(count):
                    place = row * stride + turn
                    index = tl.zeros([ROWS], tl.int64)
                    value = tl.zeros([ROWS], tl.float64)
                    if kind == 1:
                        index = tl.load(base.to(tl.pointer_type(tl.int32), bitcast=True) + place, mask=here, other=0)
                        index = index.to(tl.int64)
                        value = index.to(tl.float32).to(tl.float64)
                    elif kind == 2:
                        index = tl.load(base.to(tl.pointer_type(tl.int64), bitcast=True) + place, mask=here, other=0)
                        if narrow != 0:
                            index = index.to(tl.int32).to(tl.int64)
                        value = index.to(tl.float32).to(tl.float64)
                    elif kind == 3:
                        value = tl.load(base.to(tl.pointer_type(tl.float32), bitcast=True) + place, mask=here, other=0)
                        value = value.to(tl.float64)
                    else:
                        value = tl.load(base.to(tl.pointer_type(tl.float64), bitcast=True) + place, mask=here, other=0)
                    if EDGES:
                        # How many boundaries are not above the value, by halves. A NaN is above them all, as in C++'s upper_bound.
                        lowest = tl.zeros([ROWS], tl.int32)
                        highest = tl.zeros([ROWS], tl.int32) + tl.maximum(edge_count, 0)
                        for _ in range(turns):
                            active = lowest < highest
                            middle = (lowest + highest) // 2
                            edge = tl.load(edges + middle, mask=active, other=0).to(tl.float64)
                            above = edge > value
                            lowest = tl.where(active & (above == 0), middle + 1, lowest)
                            highest = tl.where(active & above, middle, highest)
                        if edge_count >= 0:
                            index = lowest.to(tl.int64)
                    if MODULO:
                        rest = index % tl.maximum(modulo, 1)  # has the sign of the dividend
                        rest = tl.where(rest < 0, rest + modulo, rest)
                        index = tl.where(modulo > 0, rest, index)
                    index = tl.minimum(tl.maximum(index, low), high) + offset
                    valid = here & (index >= valid_from)
                    counted += valid.to(tl.float32)
                    known = valid & (index >= 0) & (index < size)
                    looked_up = table.to(tl.pointer_type(element)) + (index * width)[:, None] + column[None, :]
                    values = tl.load(looked_up, mask=inside & known[:, None], other=0)
                    total += values.to(SUM)
        if combiner != 0:
            divisor = tl.maximum(counted, 1.0)
            if combiner == 2:
                divisor = tl.sqrt(divisor)
            total = (total / divisor[:, None]).to(SUM)
        tl.store(out + start + row[:, None] * step + column[None, :], total.to(element), mask=inside)
