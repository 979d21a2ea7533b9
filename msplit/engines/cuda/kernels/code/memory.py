"""Kernels that move data and compute little: gathers and copies (`kernels.memory`), pooling (`kernels.channelwise`)."""

from __future__ import annotations

import triton
import triton.language as tl

from msplit.engines.cuda.kernels.code.epilogue import for_products


@triton.jit  # type: ignore[untyped-decorator]
def gather(  # type: ignore[no-untyped-def]
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


@triton.jit  # type: ignore[untyped-decorator]
def lookup(  # type: ignore[no-untyped-def]
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


_POOLED = (  # noqa: SIM905 (a line for each is too many to read)
    "total height width channels step_n step_h step_w out_n out_h out_w rows columns before_h before_w"
).split()


# What matters of these is constant: the compiler would compile anew for nearly every pool.
@triton.jit(do_not_specialize=_POOLED)  # type: ignore[untyped-decorator]
def pool(  # type: ignore[no-untyped-def]
    data, out, total, height, width, channels, step_n, step_h, step_w, out_n, out_h, out_w, rows, columns, before_h, before_w,
    KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    MEAN: tl.constexpr, ROUNDS: tl.constexpr, VECTOR: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Windows of some vectors of channels, in which all places and steps are counted. Some lines of a window are loaded at once."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    lane = tl.arange(0, VECTOR)
    exists = place < total
    channel = place % channels
    rest = place // channels
    column = rest % columns
    rest = rest // columns
    row = rest % rows
    image = rest // rows
    top = row * STRIDE_H - before_h
    left = column * STRIDE_W - before_w
    at = image * step_n + top * step_h + left * step_w + channel
    count = tl.zeros([BLOCK], tl.float32)
    if MEAN:
        found = tl.zeros([BLOCK, VECTOR], tl.float32)
    else:
        found = tl.full([BLOCK, VECTOR], float("-inf"), data.dtype.element_ty)
    for first in tl.static_range(0, KERNEL_H, LINES):
        seen = ()
        for y in tl.static_range(first, min(first + LINES, KERNEL_H)):
            for x in tl.static_range(KERNEL_W):
                inside = (top + y >= 0) & (top + y < height) & (left + x >= 0) & (left + x < width) & exists
                count += inside.to(tl.float32)
                element = (at + y * step_h + x * step_w) * VECTOR
                nothing = 0.0 if MEAN else float("-inf")
                seen += (tl.load(data + element[:, None] + lane[None, :], mask=inside[:, None], other=nothing),)  # type: ignore[assignment]
        tl.debug_barrier()  # see `code.depthwise._convolved`
        for number in tl.static_range(len(seen)):
            if MEAN:
                found += seen[number].to(tl.float32)
            else:
                found = tl.maximum(found, seen[number], propagate_nan=tl.PropagateNan.ALL)
    if MEAN:
        found = for_products((found / count[:, None]).to(data.dtype.element_ty), ROUNDS)
    element = (image * out_n + row * out_h + column * out_w + channel) * VECTOR
    tl.store(out + element[:, None] + lane[None, :], found, mask=exists[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def copy_to(target, source, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = place < count
    tl.store(target + place, tl.load(source + place, mask=exists), mask=exists)


@triton.jit(do_not_specialize=["nobody", "width"])  # type: ignore[untyped-decorator]
def copy_rows(addresses, slots, rows, nobody, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copies the row at each address to a place among `rows`, but for those whose place is nobody's."""
    slot = tl.load(slots + tl.program_id(0))
    if slot < nobody:
        source = tl.load(addresses + tl.program_id(0)).to(tl.pointer_type(rows.dtype.element_ty))
        for begin in range(0, width, BLOCK):
            column = begin + tl.arange(0, BLOCK)
            tl.store(rows + slot * width + column, tl.load(source + column, mask=column < width), mask=column < width)


_PLACES = ("words", "s0", "t0", "f1", "s1", "t1", "f2", "s2", "t2", "f3", "s3", "t3")


# One compiled kernel serves all places: none is looked at for what it is a multiple of.
@triton.jit(do_not_specialize=_PLACES)  # type: ignore[untyped-decorator]
def deliver(  # type: ignore[no-untyped-def]
    table, finished, number, words, s0, t0, f1, s1, t1, f2, s2, t2, f3, s3, t3,
    DIRECT: tl.constexpr, BLOCK: tl.constexpr, ALONE: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    """Moves the words of up to four tensors, one behind the other, or what a row of the table says. `OutputCopy` has the arguments."""
    if ALONE:
        count = tl.load(finished) + 1  # on its way while the tensors are read
    place = tl.arange(0, BLOCK)
    if DIRECT:
        place += tl.program_id(0) * BLOCK
        source = tl.where(place >= f3, s3, tl.where(place >= f2, s2, tl.where(place >= f1, s1, s0)))
        target = tl.where(place >= f3, t3, tl.where(place >= f2, t2, tl.where(place >= f1, t1, t0)))
        exists = place < words
    else:
        row = table + tl.program_id(0) * 3
        source, target = tl.load(row), tl.load(row + 1)
        exists = place < tl.load(row + 2)
    source = (source.to(tl.int64) + 4 * place.to(tl.int64)).to(tl.pointer_type(tl.int32))
    target = (target.to(tl.int64) + 4 * place.to(tl.int64)).to(tl.pointer_type(tl.int32))
    tl.store(target, tl.load(source, mask=exists), mask=exists)
    if ALONE:
        tl.store(finished, count)
    # All threads of the program have written; who sees the number that is then released to the whole system sees that, too.
    tl.debug_barrier()
    if ALONE:
        _release(number, count, STORE)
    else:
        programs = tl.num_programs(0)
        count = tl.atomic_add(finished, 1, sem="acq_rel", scope="sys") + 1
        if count % programs == 0:
            _release(number, count // programs, STORE)


@triton.jit  # type: ignore[untyped-decorator]
def _release(number, count, STORE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Writes the number after all that the program knows to be written, as the host sees it.

    Triton has no such store. An exchange is one as well, but waits for the number that was there: 1.2 µs more on an H200. Triton's
    interpreter knows the exchange alone.
    """
    if STORE:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; @p st.release.sys.global.b64 [$1], $2; mov.u32 $0, 0; }",
            "=r,l,l",
            [number.to(tl.int64), count],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.atomic_xchg(number, count, sem="release", scope="sys")
