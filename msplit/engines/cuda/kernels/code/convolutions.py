"""The kernel of `kernels.conv`: a tile of a convolution of NHWC data.

The rows of the product are the result's pixels, its columns the output channels, and it sums over the window's elements and the input
channels (an implicit GEMM; Chetlur et al., cuDNN, 2014). Where that makes too few tiles to fill the GPU, several blocks share the summands
of a tile (split-K); the one that is done last adds all parts up, always in the same order.

The data may be scaled, shifted and cut off below zero on their way to the product (a prologue), as a normalization in front of the
convolution does it: padding stays zero.

The filters of siblings lie side by side. Every tile of columns belongs to one of them and is written to that one's own result, which for
one of them may be a part of a larger tensor.

An early kernel (see `code.products`) works out where its data lie, and its blocks of the first pixels fetch the filter, which no kernel
writes; then it waits.

The kernel of `kernels.conv`: a tile of a convolution of NHWC data with few channels.

The product is that of `code.convolutions`, but a tile's summands are the channels of several elements of the window, as they lie in
memory. So little is multiplied that nothing else may take long. The size of the window and the number of channels are constants, so that
nothing is divided to find a summand; a tile is a rectangle of one image's pixels, which only its first one has to be divided for. Where a
thread has a pixel to itself (32 for each warp), where its summands lie is known when the kernel is compiled, but for the first one of
each row.

The first block of an early kernel (see `code.products`) fetches the filter, which no kernel writes; then it waits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from msplit.engines.cuda.kernels.code.epilogue import activate_known, for_products
from msplit.engines.cuda.kernels.code.products import LINE, fetch, go_on, lifted, rounded

_FETCHED = tl.constexpr(8)
"""Tiles of summands whose filter is fetched ahead: the rest is loaded while these are added up."""

_SIZES = (  # noqa: SIM905 (a line for each is too many to read)
    "pixels height width channels results results_1 results_2 results_3 rows columns kernel_w taps stride_h stride_w "
    "dilation_h dilation_w before_h before_w step_n step_h step_w filter_tap filter_c filter_o share parts "
    "step_out step_room in_room rounds by_rows by_columns by_blocks by_kernel_w shift_rows shift_columns shift_blocks shift_kernel_w"
).split()
"""Numbers that the compiler must not look at: it would compile anew for nearly every convolution. What matters is constant."""


@triton.jit
def _quotient(number, by, shift):  # type: ignore[no-untyped-def]
    """A number from 0 to 2³¹ - 1, divided by what `tiles.reciprocal` made two numbers of."""
    high = tl.umulhi((2 * number).to(tl.uint32), by.to(tl.uint32, bitcast=True))
    return (high >> shift.to(tl.uint32)).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def _prepared(  # type: ignore[no-untyped-def]
    a, scale, shift, inside, image, channel, channels,
    SCALE: tl.constexpr, SHIFT: tl.constexpr, CUT: tl.constexpr, POINT: tl.constexpr,
):  # fmt: skip
    """Data with the prologue applied. SCALE 2: every image has factors of its own."""
    value = a.to(tl.float32)
    exists = channel < channels
    if SCALE == 2:
        value *= tl.load(scale + image[:, None] * channels + channel[None, :], mask=inside, other=0).to(tl.float32)
    elif SCALE == 1:
        value *= tl.load(scale + channel, mask=exists, other=0)[None, :].to(tl.float32)
    if SHIFT:
        value += tl.load(shift + channel, mask=exists, other=0)[None, :].to(tl.float32)
    if CUT:
        value = tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL)
    # With POINT nothing is padded, and what is made of pixels or channels that there are not is used for no result.
    if not POINT:
        value = tl.where(inside, value, 0.0)
    return value.to(a.dtype)


@triton.jit(do_not_specialize=_SIZES)  # type: ignore[untyped-decorator]
def convolve_tile(  # type: ignore[no-untyped-def]
    data,
    filter,
    scale,
    shift,
    bias,
    side,
    out,
    room,
    partial,
    counters,
    pixels,
    height,
    width,
    channels,
    results,
    results_1,
    results_2,
    results_3,
    rows,
    columns,
    kernel_w,
    taps,
    stride_h,
    stride_w,
    dilation_h,
    dilation_w,
    before_h,
    before_w,
    step_n,
    step_h,
    step_w,
    filter_tap,
    filter_c,
    filter_o,
    share,
    parts,
    step_out,
    step_room,
    in_room,
    rounds,
    by_rows,
    by_columns,
    by_blocks,
    by_kernel_w,
    shift_rows,
    shift_columns,
    shift_blocks,
    shift_kernel_w,
    PIXELS: tl.constexpr,
    RESULTS: tl.constexpr,
    SUMMANDS: tl.constexpr,
    ALIGNED: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    IN_FIRST: tl.constexpr,
    POINT: tl.constexpr,
    BIAS: tl.constexpr,
    SIDE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    ROUNDED: tl.constexpr,
    SPLIT: tl.constexpr,
    SIBLINGS: tl.constexpr,
    ROOM: tl.constexpr,
    PROLOGUE: tl.constexpr,
    SCALE: tl.constexpr,
    SHIFT: tl.constexpr,
    CUT: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A block's tile, or its part of the summands: see `conv.convolve_siblings`, which cuts and launches."""
    # Sizes come divided by what they are multiples of, so that the compiler knows and loads several elements at once.
    channels, step_n, step_h, step_w = channels * IN, step_n * IN, step_h * IN, step_w * IN
    results *= OUT
    step_out *= OUT
    if IN_FIRST:  # input channels lie side by side in the filter
        filter_c = 1
        filter_tap, filter_o = filter_tap * IN, filter_o * IN
    else:
        filter_o = 1
        filter_tap, filter_c = filter_tap * OUT, filter_c * OUT
    # The tile's own convolution: its number of output channels, its first tile and column, and where its result begins.
    tile = tl.program_id(1)
    first_tile = 0
    first_column = 0
    first_place = 0
    number_of_sibling = 0
    if SIBLINGS:  # a sibling that is not there has no output channels, and begins behind the last tile
        next_tile = tl.cdiv(results, RESULTS)
        next_column = results
        next_place = tl.cdiv(pixels * results, ALIGNED)
        for sibling in tl.static_range(3):
            size = (results_1 if sibling == 0 else (results_2 if sibling == 1 else results_3)) * OUT
            own = tile >= next_tile
            results = tl.where(own, size, results)
            first_tile = tl.where(own, next_tile, first_tile)
            first_column = tl.where(own, next_column, first_column)
            first_place = tl.where(own, next_place, first_place)
            number_of_sibling = tl.where(own, sibling + 1, number_of_sibling)
            next_tile += tl.cdiv(size, RESULTS)
            next_column += size
            next_place += tl.cdiv(pixels * size, ALIGNED)
        out += first_place * ALIGNED
        step_out = results
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    result = (tile - first_tile) * RESULTS + tl.arange(0, RESULTS)
    column_of_filter = first_column + result
    summand = tl.arange(0, SUMMANDS)
    rest = _quotient(pixel, by_columns, shift_columns)
    image = _quotient(rest, by_rows, shift_rows)
    top = (rest - image * rows) * stride_h - before_h
    left = (pixel - rest * columns) * stride_w - before_w
    start = image * step_n + top * step_h + left * step_w
    there = pixel < pixels
    wanted = result < results
    total = tl.zeros([PIXELS, RESULTS], tl.float32)
    blocks = tl.cdiv(channels, SUMMANDS)
    start_at = 0
    end = taps * blocks
    tap = 0
    channel = 0
    down = 0
    right = 0
    if SPLIT:
        start_at = tl.program_id(2) * share
        end = tl.minimum(end, start_at + share)
        tap = _quotient(start_at, by_blocks, shift_blocks)
        channel = (start_at - tap * blocks) * SUMMANDS
        line = _quotient(tap, by_kernel_w, shift_kernel_w)
        down = line * dilation_h
        right = (tap - line * kernel_w) * dilation_w
    from_data = data + start[:, None] + summand[None, :]
    from_filter = filter + (summand * filter_c)[:, None] + (column_of_filter * filter_o)[None, :]
    if EARLY:
        in_line: tl.constexpr = LINE * 8 // filter.dtype.element_ty.primitive_bitwidth
        channels_apart: tl.constexpr = min(in_line, SUMMANDS) if IN_FIRST else 1
        results_apart: tl.constexpr = 1 if IN_FIRST else min(in_line, RESULTS)
        of_channel = tl.arange(0, SUMMANDS // channels_apart) * channels_apart
        of_result = tl.arange(0, RESULTS // results_apart) * results_apart + (tile - first_tile) * RESULTS
        fetched = filter + (of_channel * filter_c)[:, None] + ((first_column + of_result) * filter_o)[None, :]
        next_tap = tap
        next_channel = channel
        ahead = tl.where(tl.program_id(0) == 0, tl.minimum(end - start_at, _FETCHED), 0)
        for _ in range(ahead):
            exists = (next_channel + of_channel < channels)[:, None] & (of_result < results)[None, :]
            fetch(fetched + (next_tap * filter_tap + next_channel * filter_c), exists)
            next_channel += SUMMANDS
            beyond = next_channel >= channels
            next_channel = tl.where(beyond, 0, next_channel)
            next_tap += tl.where(beyond, 1, 0)
        go_on()
    # Where the next summands lie is counted up: dividing to find it takes a tenth of the kernel's time.
    for _ in range(start_at, end):
        if POINT:
            inside = there
        else:
            y = top + down
            x = left + right
            inside = (y >= 0) & (y < height) & (x >= 0) & (x < width) & there
        of_data = from_data + (down * step_h + right * step_w + channel)
        of_filter = from_filter + (tap * filter_tap + channel * filter_c)
        exists = channel + summand < channels
        a = tl.load(of_data, mask=inside[:, None] & exists[None, :], other=0)
        if PROLOGUE:
            taken = inside[:, None] & exists[None, :]
            a = _prepared(a, scale, shift, taken, image, channel + summand, channels, SCALE, SHIFT, CUT, POINT)
        b = tl.load(of_filter, mask=exists[:, None] & wanted[None, :], other=0)
        if not ROUNDED:
            a = lifted(a, PRECISION)
        total = tl.dot(a, b, total, input_precision=PRECISION)
        channel += SUMMANDS
        if not POINT:
            last = channel >= channels
            channel = tl.where(last, 0, channel)
            tap += tl.where(last, 1, 0)
            right = tl.where(last, right + dilation_w, right)
            beyond = right >= kernel_w * dilation_w
            down = tl.where(beyond, down + dilation_h, down)
            right = tl.where(beyond, 0, right)
    if SPLIT:
        # What others added up must be there before this block counts itself, and be read only after the last one has.
        number = tile * tl.num_programs(0) + tl.program_id(0)
        inner = tl.arange(0, PIXELS)[:, None] * RESULTS + tl.arange(0, RESULTS)[None, :]
        start_of = partial + number * parts * (PIXELS * RESULTS)
        tl.store(start_of + tl.program_id(2) * (PIXELS * RESULTS) + inner, total)
        tl.debug_barrier()
        if tl.atomic_add(counters + number, 1, sem="acq_rel", scope="gpu") != parts - 1:
            return
        tl.store(counters + number, 0)  # for the next run of the same graph
        total = tl.zeros([PIXELS, RESULTS], tl.float32)
        for one in tl.range(0, parts, loop_unroll_factor=4):
            total += tl.load(start_of + one * (PIXELS * RESULTS) + inner, cache_modifier=".cg")
    if BIAS:
        total += tl.load(bias + column_of_filter, mask=wanted, other=0)[None, :].to(tl.float32)
    exists = there[:, None] & wanted[None, :]
    if SIDE:
        total += tl.load(side + pixel[:, None] * results + result[None, :], mask=exists, other=0).to(tl.float32)
    total = for_products(activate_known(total, ACTIVATION).to(out.dtype.element_ty), (rounds >> number_of_sibling) & 1)
    if ROOM:
        mine = number_of_sibling == in_room
        tl.store(room + pixel[:, None] * (step_room * OUT) + result[None, :], total, mask=exists & mine)
        exists = exists & (number_of_sibling != in_room)
    tl.store(out + pixel[:, None] * step_out + result[None, :], total, mask=exists)


_FEW_SIZES = (  # noqa: SIM905 (a line for each is too many to read)
    "height width results rows columns stride_h stride_w dilation_h before_h before_w step_n step_h step_out rounds "
    "across down by_across by_down shift_across shift_down"
).split()
"""Numbers that the compiler must not look at, as those of `code.convolutions`."""


@triton.jit
def _within(position, size):  # type: ignore[no-untyped-def]
    """Whether a position is from 0 to below a size: one comparison, as what is negative is large without its sign."""
    return position.to(tl.uint32, bitcast=True) < size.to(tl.uint32, bitcast=True)


@triton.jit(do_not_specialize=_FEW_SIZES)  # type: ignore[untyped-decorator]
def convolve_few_channels(  # type: ignore[no-untyped-def]
    data, filter, bias, side, out, height, width, results, rows, columns, stride_h, stride_w, dilation_h,
    before_h, before_w, step_n, step_h, step_out, rounds, across, down, by_across, by_down, shift_across, shift_down,
    PIXELS: tl.constexpr, COLUMNS: tl.constexpr, RESULTS: tl.constexpr, SUMMANDS: tl.constexpr, UNROLLED: tl.constexpr,
    KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr, CHANNELS: tl.constexpr, DILATION_W: tl.constexpr,
    STEP_W: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, IN_FIRST: tl.constexpr, PADDED: tl.constexpr,
    BIAS: tl.constexpr, SIDE: tl.constexpr, ACTIVATION: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
    LINES: tl.constexpr,
):  # fmt: skip
    """A block's tile: see `kernels.conv.convolve_few`, which cuts and launches."""
    # Sizes come divided by what they are multiples of, as in `code.convolutions`.
    step_n, step_h = step_n * IN, step_h * IN
    results, step_out = results * OUT, step_out * OUT
    summands: tl.constexpr = KERNEL_H * KERNEL_W * CHANNELS
    result = tl.program_id(1) * RESULTS + tl.arange(0, RESULTS)
    wanted = result < results
    tile = tl.program_id(0)
    line = _quotient(tile, by_across, shift_across)
    image = _quotient(line, by_down, shift_down)
    within = tl.arange(0, PIXELS)
    row = (line - image * down) * (PIXELS // COLUMNS) + within // COLUMNS
    column = (tile - line * across) * COLUMNS + within % COLUMNS
    there = (row < rows) & (column < columns)
    top = row * stride_h - before_h
    left = column * stride_w - before_w
    first = data + (image * step_n + top * step_h + left * STEP_W)[:, None]
    total = tl.zeros([PIXELS, RESULTS], tl.float32)
    if EARLY:
        if tile == 0:
            apart: tl.constexpr = LINE * 8 // filter.dtype.element_ty.primitive_bitwidth
            fetched = tl.arange(0, LINES) * apart
            fetch(filter + fetched, fetched < summands * results)
        go_on()
    for start in tl.range(0, summands, SUMMANDS, loop_unroll_factor=UNROLLED):
        place = start + tl.arange(0, SUMMANDS)
        exists = place < summands
        tap = place // CHANNELS
        below = tap // KERNEL_W * dilation_h
        right = tap % KERNEL_W * DILATION_W
        inside = there[:, None] & exists[None, :]
        if PADDED:
            inside &= _within(top[:, None] + below[None, :], height) & _within(left[:, None] + right[None, :], width)
        # Added one after the other, since the last offsets are constants, which the instruction itself adds.
        from_data = first + (below * step_h)[None, :] + (right * STEP_W + place % CHANNELS)[None, :]
        a = tl.load(from_data, mask=inside, other=0)
        if IN_FIRST:
            from_filter = filter + place[:, None] + (result * summands)[None, :]
        else:
            from_filter = filter + (place * results)[:, None] + result[None, :]
        b = tl.load(from_filter, mask=exists[:, None] & wanted[None, :], other=0)
        total = tl.dot(rounded(a.to(b.dtype), PRECISION), b, total, input_precision=PRECISION)
    if BIAS:
        total += tl.load(bias + result, mask=wanted, other=0)[None, :].to(tl.float32)
    pixel = (image * rows + row) * columns + column
    exists = there[:, None] & wanted[None, :]
    if SIDE:
        total += tl.load(side + pixel[:, None] * results + result[None, :], mask=exists, other=0).to(tl.float32)
    total = for_products(activate_known(total, ACTIVATION).to(out.dtype.element_ty), rounds)
    tl.store(out + pixel[:, None] * step_out + result[None, :], total, mask=exists)
