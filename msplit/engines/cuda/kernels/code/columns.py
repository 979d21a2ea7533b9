"""The kernel that fills the outputs of all columns.

One launch, in which programs do one of three things, told apart by their number:

* of *plain* columns, one row of a table or of a tensor per row, some hundred elements each, whatever the column's width is: no lane is
  lost to a width that is no power of two, and where everything lies at multiples of 16 bytes so much moves at once;
* of columns that *sum*, or that find their ids by bisection or modulo, a tile of rows, of ids per row and of columns: all ids of a tile
  are loaded at once and then all their rows, in one chain of four or five loads. Columns of two shapes can have tiles of two shapes.

All that differs from column to column comes from tables in device memory (`embedding` makes them): one compiled kernel serves any mixture.
Lookup tables are found by their addresses; ids and copied rows lie in at most two blocks of memory, and are found by their distance from
the block's start, which is the same in every run while the block itself need not be.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _in_cache(entry, index, place, read, address, pitch):  # type: ignore[no-untyped-def]
    """Addresses of rows: those in a cache where they are there. It tells the cache which rows were read, and which it does not have.

    `entry` is eight numbers, 0 for tables without a cache: addresses of the places of the table's rows, of the cache's rows and of their
    ages; the number that the table's first row has for the cache; the address of the notes, or 0 where another column notes the same, and
    how many rows are noted; the address of the tallies; and where in a packed row its scale is. `pitch` is bytes from row to row. The
    second result is what each row adds to a tally.
    """
    places = tl.load(entry)
    kept = read & (places != 0)
    slot = tl.load((places + index * 4).to(tl.pointer_type(tl.int32)), mask=kept, other=-1).to(tl.int64)
    hit = slot >= 0
    tl.store((tl.load(entry + 2) + slot).to(tl.pointer_type(tl.int8)), tl.where(hit, 2, 0).to(tl.int8), mask=hit)
    notes = tl.load(entry + 4)
    noted = tl.where(hit, -1, tl.load(entry + 3) + index).to(tl.int32)
    tl.store((notes + place * 4).to(tl.pointer_type(tl.int32)), noted, mask=kept & (place < tl.load(entry + 5)))
    seen = tl.where(kept & (notes != 0), tl.where(hit, 1, 1 << 32), 0).to(tl.int64)
    return tl.where(hit, tl.load(entry + 1) + slot * pitch, address), seen


@triton.jit  # type: ignore[untyped-decorator]
def _widened(small, address, scale_at, packed, PACKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Numbers of packed rows, along a last axis, as float32: the bits of bf16 are its upper half, those of int8 have a scale for a row."""
    if PACKED == 2:
        return (small.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    factor = tl.load((address + scale_at).to(tl.pointer_type(tl.float32)), mask=packed, other=0)
    return small.to(tl.float32) * tl.expand_dims(factor, -1)


@triton.jit
def _count(entry, seen, lane):  # type: ignore[no-untyped-def]
    """Adds what rows of a program have come to, for each of its lanes, to one of the tallies (there are 1024)."""
    cell = (tl.program_id(0) + lane) & 1023
    tally = (tl.load(entry + 6) + cell * 8).to(tl.pointer_type(tl.int64))
    tl.atomic_add(tally, seen, mask=seen != 0, sem="relaxed")


@triton.jit  # type: ignore[untyped-decorator]
def _plain(  # type: ignore[no-untyped-def]
    shared,
    extra,
    out,
    work,
    plain,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    ELEMENT: tl.constexpr,
    BYTES: tl.constexpr,
    OUT_BYTES: tl.constexpr,
    SUM: tl.constexpr,
    LONG: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SCALED: tl.constexpr,
    CACHED: tl.constexpr,
    PACKED: tl.constexpr,
):
    # (Triton's interpreter can not mask by what is loaded as a scalar.)
    column = plain + (tl.load(work).to(tl.int64) * 32 + tl.zeros([1], tl.int64))
    first_row = tl.load(work + 1)
    start = tl.load(column)
    step = tl.load(column + 1)
    rows = tl.load(column + 2).to(tl.int32)
    pieces = tl.load(column + 3).to(tl.int32) // VECTOR
    kind = tl.load(column + 4)
    distance = tl.load(column + 5)
    table = tl.load(column + 6)
    size = tl.load(column + 7)
    stride = tl.load(column + 8)
    narrow = tl.load(column + 9)
    low = tl.load(column + 10)
    high = tl.load(column + 11)
    offset = tl.load(column + 12)
    valid_from = tl.load(column + 13)
    other = tl.load(column + 14)
    pitch = tl.load(column + 15)
    base = tl.where(other != 0, extra.to(tl.int64), shared.to(tl.int64)) + distance
    piece = tl.arange(0, BLOCK // VECTOR)
    within = piece // pieces
    left = (piece - within * pieces) * VECTOR
    here = (within < (BLOCK // VECTOR) // pieces) & (first_row + within < rows)
    row = (first_row + within).to(tl.int64)
    # Of a row that is copied, the address is known; of one that is looked up, the id says it.
    index = tl.load((base + row * stride * 4).to(tl.pointer_type(tl.int32)), mask=here & (kind == 1), other=0).to(
        tl.int64
    )
    if LONG:
        long = tl.load((base + row * stride * 8).to(tl.pointer_type(tl.int64)), mask=here & (kind == 2), other=0)
        long = tl.where(narrow != 0, long.to(tl.int32).to(tl.int64), long)
        index = tl.where(kind == 2, long, index)
    index = tl.minimum(tl.maximum(index, low), high) + offset
    known = (index >= valid_from) & (index >= 0) & (index < size)
    address = tl.where(kind == 0, base + row * stride * BYTES, table + index * pitch)
    read = here & (known | (kind == 0))
    if CACHED:
        address, seen = _in_cache(column + 18, index, row, read, address, pitch)
    side = tl.arange(0, VECTOR)
    place = (address + left * BYTES).to(tl.pointer_type(ELEMENT))[:, None] + side[None, :]
    target = (out + start + row * step + left)[:, None] + side[None, :]
    if VECTOR > 1:
        place = tl.max_contiguous(tl.multiple_of(place, [1, 16]), [1, VECTOR])
        target = tl.max_contiguous(tl.multiple_of(target, [1, 16 * OUT_BYTES // BYTES]), [1, VECTOR])
    if PACKED:
        scale_at = tl.load(column + 25)
        packed = read & (scale_at != 0)
        values = tl.load(place, mask=tl.broadcast_to((read & ~packed)[:, None], (BLOCK // VECTOR, VECTOR)), other=0)
        numbers = (address + left * PACKED).to(tl.pointer_type(tl.int8 if PACKED == 1 else tl.int16))
        numbers = numbers[:, None] + side[None, :]
        if VECTOR > 1:
            numbers = tl.max_contiguous(tl.multiple_of(numbers, [1, VECTOR * PACKED]), [1, VECTOR])
        small = tl.load(numbers, mask=tl.broadcast_to(packed[:, None], (BLOCK // VECTOR, VECTOR)), other=0)
        values = tl.where(packed[:, None], _widened(small, address, scale_at, packed, PACKED).to(ELEMENT), values)
    else:
        values = tl.load(place, mask=tl.broadcast_to(read[:, None], (BLOCK // VECTOR, VECTOR)), other=0)
    if WEIGHTED:
        given = (base + row * stride * BYTES).to(tl.pointer_type(ELEMENT))
        weight = tl.load(given, mask=here & (kind == 5), other=1).to(SUM)
        values = (values.to(SUM) * weight[:, None]).to(ELEMENT)
    if SCALED:
        scale = tl.load(column + 16).to(tl.float64, bitcast=True).to(SUM)
        values = (values.to(SUM) * scale[:, None]).to(ELEMENT)
    tl.store(target, values.to(out.dtype.element_ty), mask=tl.broadcast_to(here[:, None], (BLOCK // VECTOR, VECTOR)))
    if CACHED:  # behind what others wait for; of several lanes of a row one counts
        _count(column + 18, tl.zeros([1], tl.int64) + tl.sum(tl.where(left == 0, seen, 0), 0), 0)


@triton.jit
def _term(term):  # type: ignore[no-untyped-def]
    """Numbers of terms: kind, distance, table, size, stride, count, and where the source lies."""
    kind, distance, table, size = tl.load(term), tl.load(term + 1), tl.load(term + 2), tl.load(term + 3)
    return kind, distance, table, size, tl.load(term + 4), tl.load(term + 5), tl.load(term + 15)


@triton.jit  # type: ignore[untyped-decorator]
def _ids(  # type: ignore[no-untyped-def]
    term, kind, base, place, active, boundaries, halvings, SHORT: tl.constexpr, LONG: tl.constexpr, FLOAT: tl.constexpr,
    DOUBLE: tl.constexpr, EDGES: tl.constexpr, MODULO: tl.constexpr, LIMITED: tl.constexpr, MEANS: tl.constexpr,
):  # fmt: skip
    """Ids at places of sources, or 0, and which of them count."""
    index = tl.zeros(place.shape, tl.int64)
    if SHORT:
        short = tl.load((base + place * 4).to(tl.pointer_type(tl.int32)), mask=active & (kind == 1), other=0)
        index += short.to(tl.int64)
    if LONG:
        long = tl.load((base + place * 8).to(tl.pointer_type(tl.int64)), mask=active & (kind == 2), other=0)
        if LIMITED:
            long = tl.where(tl.load(term + 9) != 0, long.to(tl.int32).to(tl.int64), long)
        index += long  # one of the two is 0
    # All ids are on their way before the first is waited for: the compiler would load one after the other.
    tl.debug_barrier()
    if EDGES:
        value = index.to(tl.float32).to(tl.float64)
        if FLOAT:
            single = tl.load((base + place * 4).to(tl.pointer_type(tl.float32)), mask=active & (kind == 3), other=0)
            value = tl.where(kind == 3, single.to(tl.float64), value)
        if DOUBLE:
            double = tl.load((base + place * 8).to(tl.pointer_type(tl.float64)), mask=active & (kind == 4), other=0)
            value = tl.where(kind == 4, double, value)
        # How many boundaries are not above the value, by halves. A NaN is above them all, as in C++'s upper_bound.
        edges = boundaries + tl.load(term + 6)
        edge_count = tl.load(term + 7).to(tl.int32)
        lowest = tl.zeros(place.shape, tl.int32)
        highest = tl.zeros(place.shape, tl.int32) + tl.maximum(edge_count, 0)
        for _ in range(halvings):
            undecided = active & (lowest < highest)
            middle = (lowest + highest) // 2
            edge = tl.load(edges + middle, mask=undecided, other=0).to(tl.float64)
            above = edge > value
            lowest = tl.where(undecided & (above == 0), middle + 1, lowest)
            highest = tl.where(undecided & above, middle, highest)
        index = tl.where(edge_count >= 0, lowest.to(tl.int64), index)
    if MODULO:
        modulo = tl.load(term + 10)
        rest = index % tl.maximum(modulo, 1)  # has the sign of the dividend
        rest = tl.where(rest < 0, rest + modulo, rest)
        index = tl.where(modulo > 0, rest, index)
    if LIMITED:
        index = tl.minimum(tl.maximum(index, tl.load(term + 11)), tl.load(term + 12)) + tl.load(term + 13)
    if LIMITED or MEANS:
        active = active & (index >= tl.load(term + 14))
    return index, active


@triton.jit  # type: ignore[untyped-decorator]
def _summed(  # type: ignore[no-untyped-def]
    shared, extra, out, work, segments, terms, boundaries, ROWS: tl.constexpr, IDS: tl.constexpr, WIDTH: tl.constexpr,
    SINGLE: tl.constexpr, AT_ONCE: tl.constexpr, STORED: tl.constexpr, ELEMENT: tl.constexpr, BYTES: tl.constexpr,
    OUT_BYTES: tl.constexpr, SUM: tl.constexpr, SHORT: tl.constexpr, LONG: tl.constexpr, FLOAT: tl.constexpr,
    DOUBLE: tl.constexpr, EDGES: tl.constexpr, MODULO: tl.constexpr, LIMITED: tl.constexpr, MEANS: tl.constexpr,
    WEIGHTED: tl.constexpr, SCALED: tl.constexpr, CACHED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    segment = segments + tl.load(work).to(tl.int64) * 12
    row = tl.load(work + 1) + tl.arange(0, ROWS)
    start = tl.load(segment)
    step = tl.load(segment + 1)
    rows = tl.load(segment + 2)
    width = tl.load(segment + 3).to(tl.int32)
    first_term = tl.load(segment + 4)
    term_count = tl.load(segment + 5).to(tl.int32)
    most = tl.load(segment + 7).to(tl.int32)
    halvings = tl.load(segment + 8).to(tl.int32)
    pitch = tl.load(segment + 9)
    skipped = tl.load(segment + 10)
    here = row < rows
    row = row.to(tl.int64)
    column = tl.arange(0, WIDTH)
    total = tl.zeros([ROWS, WIDTH], SUM)
    counted = tl.zeros([ROWS, 1], tl.float32)
    seen = tl.zeros([ROWS, IDS], tl.int64)
    if SINGLE:  # its numbers are loaded once
        term = terms + (first_term * 24 + tl.zeros([1, 1], tl.int64))
        kind, distance, table, size, stride, count, other = _term(term)
    for begin in range(0, term_count * most, IDS):
        slot = begin + tl.arange(0, IDS)[None, :]
        if SINGLE:
            nth = slot.to(tl.int64)
            active = here[:, None] & (nth < count)
        else:
            number = slot // most
            nth = (slot - number * most).to(tl.int64)
            term = terms + (first_term + tl.minimum(number, term_count - 1)) * 24
            kind, distance, table, size, stride, count, other = _term(term)
            active = here[:, None] & (number < term_count) & (nth < count)
        base = tl.where(other != 0, extra.to(tl.int64), shared.to(tl.int64)) + distance
        place = row[:, None] * stride + nth
        index, valid = _ids(
            term, kind, base, place, active, boundaries, halvings, SHORT, LONG, FLOAT, DOUBLE, EDGES, MODULO, LIMITED, MEANS
        )  # fmt: skip
        if MEANS:
            counted += tl.sum(valid[:, :, None].to(tl.float32), 1)
        read = valid & (index.to(tl.uint64) < size.to(tl.uint64))
        bytes_of_row = pitch * BYTES + tl.zeros([1, IDS], tl.int64)
        if PACKED:
            scale_at = tl.load(term + 23)
            bytes_of_row = tl.where(scale_at != 0, scale_at + 4, bytes_of_row)
        address = table + index * bytes_of_row
        if not SINGLE:  # a row that is copied, and nothing else, is a plain column
            read = read | (valid & (kind == 0))
            address = tl.where(kind == 0, base + place * BYTES, address)
        if CACHED:
            address, new = _in_cache(term + 16, index, row[:, None] * count + nth, read, address, bytes_of_row)
            if SINGLE:
                seen += new
            else:
                _count(term + 16, tl.sum(new, 0)[None, :], tl.arange(0, IDS)[None, :])
        inside = tl.max_constancy((column < width)[None, None, :], [1, 1, AT_ONCE])
        rows_of_table = (address + skipped * BYTES).to(tl.pointer_type(ELEMENT))[:, :, None] + column[None, None, :]
        rows_of_table = tl.max_contiguous(tl.multiple_of(rows_of_table, [1, 1, AT_ONCE * BYTES]), [1, 1, WIDTH])
        if PACKED:
            packed = read & (scale_at != 0)
            numbers = (address + skipped * PACKED).to(tl.pointer_type(tl.int8 if PACKED == 1 else tl.int16))
            numbers = numbers[:, :, None] + column[None, None, :]
            numbers = tl.max_contiguous(tl.multiple_of(numbers, [1, 1, AT_ONCE * PACKED]), [1, 1, WIDTH])
            small = tl.load(numbers, mask=packed[:, :, None] & inside, other=0)
            small = _widened(small, address, scale_at, packed, PACKED)
            values = tl.load(rows_of_table, mask=(read & ~packed)[:, :, None] & inside, other=0)
            values = tl.where(packed[:, :, None], small.to(ELEMENT), values)
        else:
            values = tl.load(rows_of_table, mask=read[:, :, None] & inside, other=0)
        values = values.to(SUM)
        if WEIGHTED:
            given = (base + place * BYTES).to(tl.pointer_type(ELEMENT))
            weight = tl.load(given, mask=active & (kind == 5), other=1).to(SUM)
            values = (values * weight[:, :, None]).to(ELEMENT).to(SUM)
        total += tl.sum(values, 1)
    if MEANS:
        divisor = tl.maximum(counted, 1.0)
        combiner = tl.load(segment + 6)
        if combiner == 2:
            divisor = tl.sqrt(divisor)
        if combiner != 0:
            total = (total / divisor).to(SUM)
    if SCALED:
        scale = tl.load(segment + 11).to(tl.float64, bitcast=True).to(SUM)
        total = total.to(ELEMENT).to(SUM) * scale
    target = out + start + (row * step)[:, None] + column[None, :]
    inside = here[:, None] & (column < width)[None, :]
    if STORED > 1:
        target = tl.max_contiguous(tl.multiple_of(target, [1, STORED * OUT_BYTES]), [1, STORED])
        inside = tl.max_constancy(inside, [1, STORED])
    tl.store(target, total.to(ELEMENT).to(out.dtype.element_ty), mask=inside)
    if CACHED and SINGLE:
        entry = terms + (first_term * 24 + 16 + tl.zeros([1], tl.int64))
        _count(entry, tl.zeros([1], tl.int64) + tl.sum(tl.sum(seen, 1), 0), 0)


@triton.jit(do_not_specialize=["first_programs", "second_programs"])  # type: ignore[untyped-decorator]
def fill_columns(  # type: ignore[no-untyped-def]
    shared, extra, out, work, plain, segments, terms, boundaries, first_programs, second_programs, BLOCK: tl.constexpr,
    VECTOR: tl.constexpr, ROWS: tl.constexpr, IDS: tl.constexpr, WIDTH: tl.constexpr, SINGLE: tl.constexpr,
    AT_ONCE: tl.constexpr, STORED: tl.constexpr, ROWS2: tl.constexpr, IDS2: tl.constexpr, WIDTH2: tl.constexpr, SINGLE2: tl.constexpr,
    AT_ONCE2: tl.constexpr, STORED2: tl.constexpr, ELEMENT: tl.constexpr, BYTES: tl.constexpr, OUT_BYTES: tl.constexpr, SUM: tl.constexpr,
    SHORT: tl.constexpr, LONG: tl.constexpr, FLOAT: tl.constexpr, DOUBLE: tl.constexpr, EDGES: tl.constexpr,
    MODULO: tl.constexpr, LIMITED: tl.constexpr, MEANS: tl.constexpr, WEIGHTED: tl.constexpr, SCALED: tl.constexpr,
    CACHED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """See the module and `embedding.Tables`, whose fields the arguments are.

    The first programs do tiles of the first shape (ROWS is 0 where there are none), the second ones those of the second, and the rest
    plain columns (BLOCK is 0 where there are none). AT_ONCE: elements of 16 bytes where all rows of a tile begin at multiples of that, so
    that a load brings them; else 1. ELEMENT, BYTES: of what is read, and summed in the type SUM. OUT_BYTES: of an element
    of the outputs. STORED: AT_ONCE where sums lie at multiples of it in the outputs, too; else 1. SHORT, LONG, FLOAT, DOUBLE, EDGES,
    MODULO: whether any ids are int32 or int64, any values float32 or float64, and whether any term has boundaries or a modulo. LIMITED,
    MEANS: whether any ids are narrowed, clamped, moved or left out, and whether any combiner is not the sum. WEIGHTED, SCALED: whether
    anything is multiplied by values of its own, or by a number. CACHED, PACKED: whether any table has a cache, or rows that are packed: 1
    as int8, 2 as bf16.
    """
    program = tl.program_id(0)
    mine = work + program.to(tl.int64) * 2
    if program < first_programs:
        if ROWS > 0:
            _summed(
                shared, extra, out, mine, segments, terms, boundaries,
                ROWS, IDS, WIDTH, SINGLE, AT_ONCE, STORED, ELEMENT, BYTES, OUT_BYTES, SUM,
                SHORT, LONG, FLOAT, DOUBLE, EDGES, MODULO, LIMITED, MEANS, WEIGHTED, SCALED, CACHED, PACKED,
            )  # fmt: skip
    elif program < first_programs + second_programs:
        if ROWS2 > 0:
            _summed(
                shared, extra, out, mine, segments, terms, boundaries,
                ROWS2, IDS2, WIDTH2, SINGLE2, AT_ONCE2, STORED2, ELEMENT, BYTES, OUT_BYTES, SUM,
                SHORT, LONG, FLOAT, DOUBLE, EDGES, MODULO, LIMITED, MEANS, WEIGHTED, SCALED, CACHED, PACKED,
            )  # fmt: skip
    else:
        if BLOCK > 0:
            _plain(
                shared, extra, out, mine, plain, BLOCK, VECTOR, ELEMENT, BYTES, OUT_BYTES, SUM, LONG, WEIGHTED, SCALED, CACHED, PACKED,
            )  # fmt: skip
