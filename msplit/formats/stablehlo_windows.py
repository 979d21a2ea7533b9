"""Readers of StableHLO's products, convolutions, reductions, windows, gathers and sorts; see `stablehlo_ops`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from msplit.formats.stablehlo import (
    Body,
    Shape,
    Step,
    Value,
    constant,
    ints,
    is_float,
    known,
    numpy_type,
    padded,
    position,
    transposed,
    word,
)
from msplit.formats.stablehlo_ops import BINARY, Made, Reader


def _dot(step: Step) -> Made:
    """A product. Axes of the result: those of batches, those left of the first operand, those left of the second."""
    from jaxlib.mlir.dialects import stablehlo

    body, (dtype, shape) = step.body, step.type
    dims = stablehlo.DotDimensionNumbers(step.op.attributes["dot_dimension_numbers"])
    batch = [list(dims.lhs_batching_dimensions), list(dims.rhs_batching_dimensions)]
    summed = [list(dims.lhs_contracting_dimensions), list(dims.rhs_contracting_dimensions)]
    if dtype == "bool":
        return None
    x, y = (one if one.dtype == dtype else body.each("Cast", one, DstT=dtype) for one in step.args)
    ranks, count = (len(x.shape), len(y.shape)), len(batch[0])
    leads = batch == [list(range(count))] * 2 and len(summed[0]) == 1
    if leads and ranks == (count + 2, count + 2):
        turned = summed[0][0] == count, summed[1][0] == count + 1
        if not count:
            return body.add("MatMul", [x, y], shape, transpose_a=turned[0], transpose_b=turned[1])
        return body.add("BatchMatMulV2", [x, y], shape, adj_x=turned[0], adj_y=turned[1])
    if sum(ranks) > 26:
        return None
    letters = "abcdefghijklmnopqrstuvwxyz"
    left, right = list(letters[: ranks[0]]), list(letters[ranks[0] : sum(ranks)])
    for mine, its in ((batch[0], batch[1]), (summed[0], summed[1])):
        for a, b in zip(mine, its, strict=True):
            right[b] = left[a]
    gone = {left[axis] for axis in summed[0]}
    result = [left[axis] for axis in batch[0]] + [
        one for axis, one in enumerate(left) if axis not in batch[0] and one not in gone
    ]
    result += [one for one in right if one not in left]
    return body.add("Einsum", [[x, y]], shape, equation=f"{''.join(left)},{''.join(right)}->{''.join(result)}")


def _convolution(step: Step) -> Made:
    """A convolution over one or two axes, with the channels last; its operands are turned, and the result back."""
    from jaxlib.mlir.dialects import stablehlo

    x, kernel, *_ = step.args
    body, (dtype, shape) = step.body, step.type
    dims = stablehlo.ConvDimensionNumbers(step.op.attributes["dimension_numbers"])
    axes = list(dims.input_spatial_dimensions)
    count = len(axes)
    strides, spread, dilation = (
        step.numbers(key, [1] * count) for key in ("window_strides", "lhs_dilation", "rhs_dilation")
    )
    padding = step.numbers("padding", [0] * 2 * count)
    groups = step.number("feature_group_count", 1)
    turns = any(step.numbers("window_reversal")) or step.number("batch_group_count", 1) != 1
    if count not in (1, 2) or turns or len(step.args) > 2 or not is_float(dtype):
        return None
    x, kernel = (one if one.dtype == dtype else body.each("Cast", one, DstT=dtype) for one in (x, kernel))
    x = transposed(body, x, [dims.input_batch_dimension, *axes, dims.input_feature_dimension])
    kernel = transposed(
        body,
        kernel,
        [*dims.kernel_spatial_dimensions, dims.kernel_input_feature_dimension, dims.kernel_output_feature_dimension],
    )
    turned = [dims.output_batch_dimension, *dims.output_spatial_dimensions, dims.output_feature_dimension]
    if count == 1:
        x = body.add("ExpandDims", [x, position(1)], (x.shape[0], 1, *x.shape[1:]))
        kernel = body.add("ExpandDims", [kernel, position(0)], (1, *kernel.shape))
        strides, spread, dilation, padding = [1, *strides], [1, *spread], [1, *dilation], [0, 0, *padding]
    low, high = padding[::2], padding[1::2]
    result: Shape = tuple(shape[axis] for axis in turned)
    result = result if count == 2 else (result[0], 1, *result[1:])
    if any(one != 1 for one in spread) or min(padding) < 0:
        wider = [
            None if size is None else (size - 1) * by + 1 + a + b
            for size, by, a, b in zip(x.shape[1:3], spread, low, high, strict=True)
        ]
        inside = [0, *(by - 1 for by in spread), 0]
        x = padded(body, x, body.like(0, x), [0, *low, 0], [0, *high, 0], inside, (x.shape[0], *wider, x.shape[3]))
        low, high = [0, 0], [0, 0]
    made = _image_convolution(body, x, kernel, groups, result, (strides, dilation, low, high))
    if count == 1:
        made = body.add("Squeeze", [made], (made.shape[0], *made.shape[2:]), squeeze_dims=(1,))
    return transposed(body, made, [turned.index(axis) for axis in range(count + 2)])


def _image_convolution(body: Body, x: Value, kernel: Value, groups: int, result: Shape, window: Sequence[Any]) -> Value:
    """A convolution of an image: by channel where each has a kernel of its own, which TensorFlow takes for equal strides only."""
    strides, dilation, low, high = window
    edges = (0, 0, *(edge for pair in zip(low, high, strict=True) for edge in pair), 0, 0)
    attrs: dict[str, Any] = {"strides": (1, *strides, 1), "dilations": (1, *dilation, 1), "data_format": "NHWC"}
    attrs |= {"padding": "EXPLICIT", "explicit_paddings": edges} if any(edges) else {"padding": "VALID"}
    channels = x.shape[3]
    if groups > 1 and groups == channels and kernel.shape[2] == 1 and strides[0] == strides[1]:
        size = (*kernel.shape[:2], channels, (kernel.shape[3] or 0) // groups)
        kernel = body.add("Reshape", [kernel, ints(*map(known, size))], size)
        return body.add("DepthwiseConv2dNative", [x, kernel], result, **attrs)
    return body.add("Conv2D", [x, kernel], result, **attrs)


REDUCED = {"add": "Sum", "multiply": "Prod", "maximum": "Max", "minimum": "Min", "and": "All", "or": "Any"}


def _kind(region: Any) -> str:
    """The operation that a region is, which takes its two arguments; "" for another one."""
    block = region.blocks[0]
    operations = list(block.operations)
    if len(operations) != 2 or len(block.arguments) != 2:
        return ""
    op, end = operations
    same = set(op.operands) == set(block.arguments) and list(end.operands) == list(op.results)
    return str(op.operation.name.removeprefix("stablehlo.")) if same else ""


def _identity(kind: str, start: Value) -> bool:
    """True if a start of a reduction changes nothing."""
    if start.array is None or start.array.size != 1:
        return False
    number, dtype = start.array.reshape(()), start.dtype
    if kind in ("maximum", "minimum") and dtype != "bool":
        info = None if is_float(dtype) else np.iinfo(numpy_type(dtype))
        low, high = (-np.inf, np.inf) if info is None else (info.min, info.max)
        return bool(number == (low if kind == "maximum" else high))
    return bool(number == {"add": 0, "or": 0, "maximum": 0, "multiply": 1, "and": 1, "minimum": 1}.get(kind, np.nan))


def _reduce(step: Step) -> Made:
    """A reduction over axes; with two operands, the place of the largest or least of a row."""
    axes, body = step.numbers("dimensions"), step.body
    if len(step.args) == 4:
        return _arg_extreme(step, axes)
    kind = _kind(step.op.regions[0])
    if len(step.args) != 2 or kind not in REDUCED:
        return None
    x, start = step.args
    op = REDUCED[kind]
    if x.dtype == "bool":
        op = {"maximum": "Any", "add": "Any", "minimum": "All", "multiply": "All"}.get(kind, op)
    elif kind in ("and", "or"):
        return None
    made = body.add(op, [x, ints(*axes)], step.shape, keep_dims=False)
    if _identity(kind, start):
        return made
    return body.each(BINARY[kind][x.dtype == "bool"], made, start, shape=step.shape)


def _arg_extreme(step: Step, axes: Sequence[int]) -> Made:
    """The largest or least of an axis, and its first place; NaN comes before all else, as JAX has it."""
    body = step.body
    x, places, start, first = step.args
    block = step.op.regions[0].blocks[0]
    said = [one.operation.name.removeprefix("stablehlo.") for one in block.operations][:-1]
    ways = [way for one in block.operations if (way := word(one, "comparison_direction"))]
    owner = step.op.operands[1].owner
    counts = (
        getattr(owner, "name", "") in ("stablehlo.iota", "stablehlo.dynamic_iota")
        and int(owner.attributes["iota_dimension"].value) == axes[0]
    )
    wanted = ["compare", "compare", "or", "compare", "compare", "and", "or", "select", "select"]
    largest = ways[:1] == ["GT"]
    ends = _identity("maximum" if largest else "minimum", start) and first.array is not None and not first.array.any()
    if (
        len(axes) != 1
        or said != wanted
        or ways[1:] != ["NE", "EQ", "LT"]
        or ways[0] not in ("GT", "LT")
        or not counts
        or not ends
    ):
        return None
    if not _same_extreme(block):
        return None
    value = body.add("Max" if largest else "Min", [x, ints(*axes)], step.shape, keep_dims=False)
    at = position(axes[0])
    place = body.add("ArgMax" if largest else "ArgMin", [x, at], step.shape, output_type="int64")
    if is_float(x.dtype):
        nan = body.each("IsNan", x)
        odd = body.add("ArgMax", [body.each("Cast", nan, DstT="float32"), at], step.shape, output_type="int64")
        place = body.each("SelectV2", body.add("Any", [nan, ints(*axes)], step.shape, keep_dims=False), odd, place)
    return [value, body.each("Cast", place, DstT=places.dtype) if places.dtype != "int64" else place]


def _same_extreme(block: Any) -> bool:
    """True if the operations of a region are wired as JAX wires those of `argmax` and `argmin`."""
    a, i, b, j = (block.arguments[n] for n in (0, 1, 2, 3))
    ops = list(block.operations)
    beyond, odd, either, level, before, tie, take, value, place, end = ops
    r = [one.results[0] for one in ops[:-1]]
    wired = [
        (beyond, [a, b]), (odd, [a, a]), (either, [r[0], r[1]]), (level, [a, b]), (before, [i, j]), (tie, [r[3], r[4]]),
        (take, [r[2], r[5]]), (value, [r[2], a, b]), (place, [r[6], i, j]), (end, [r[7], r[8]]),
    ]  # fmt: skip
    return all(list(one.operands) == operands for one, operands in wired)


def _cumulative(
    step: Step, kind: str, window: Sequence[int], strides: Sequence[int], padding: Sequence[int]
) -> Value | None:
    """A cumulative sum or product, whose windows are as long as the one axis that they are of; None where they are others."""
    x, rank = step.args[0], len(window)
    (moved, *more) = [axis for axis in range(rank) if window[axis] != 1] or [0]
    size, edges = x.shape[moved], tuple(padding[2 * moved : 2 * moved + 2])
    op = {"add": "Cumsum", "multiply": "Cumprod"}.get(kind)
    if more or op is None or any(one != 1 for one in strides) or size is None or window[moved] != size:
        return None
    if edges not in ((size - 1, 0), (0, size - 1)) or sum(padding) != sum(edges) or min(padding) < 0:
        return None
    # A reversed sum would be (0, size - 1); both are the same for one element.
    return step.body.add(op, [x, position(moved)], step.shape, reverse=bool(edges[1]) and size > 1)


def _reduce_window(step: Step) -> Made:
    """Pooling over windows of an image, and cumulative sums, which JAX writes as windows as long as the axis."""
    if len(step.args) != 2:
        return None
    (x, start), body, shape = step.args, step.body, step.shape
    kind, rank = _kind(step.op.regions[0]), len(x.shape)
    ones = [1] * rank
    window, strides = step.numbers("window_dimensions"), step.numbers("window_strides", ones)
    dilated = step.numbers("base_dilations", ones) != ones or step.numbers("window_dilations", ones) != ones
    padding = step.numbers("padding", [0] * 2 * rank)
    low, high = padding[::2], padding[1::2]
    if dilated or not _identity(kind, start):
        return None
    if not any(padding) and window == strides == ones:  # a cumulative sum of one element
        return body.each(BINARY[kind][x.dtype == "bool"], x, start)
    made = _cumulative(step, kind, window, strides, padding)
    if made is not None:
        return made
    outside = [axis for axis in (0, rank - 1) if window[axis] != 1 or strides[axis] != 1 or low[axis] or high[axis]]
    if kind not in ("maximum", "add") or rank not in (3, 4) or outside or not is_float(x.dtype) or min(padding) < 0:
        return None
    fill, wider = body.like(0, x) if start.shape else start, (x.shape[0], *[None] * (rank - 2), x.shape[-1])
    x = padded(body, x, fill, low, high, [0] * rank, wider)
    return _pooled(body, x, kind, window, strides, shape)


def _pooled(body: Body, x: Value, kind: str, window: list[int], strides: list[int], shape: Shape) -> Value:
    """The largest or the sum of each window of an image, or of a row as an image of one row."""
    rank = len(shape)
    if rank == 3:
        x = body.add("ExpandDims", [x, position(1)], (x.shape[0], 1, *x.shape[1:]))
        window, strides = [1, 1, *window[1:]], [1, 1, *strides[1:]]
    result = shape if rank == 4 else (shape[0], 1, *shape[1:])
    attrs: dict[str, Any] = {"strides": tuple(strides), "padding": "VALID", "data_format": "NHWC"}
    made = body.add("MaxPool" if kind == "maximum" else "AvgPool", [x], result, ksize=tuple(window), **attrs)
    if kind == "add":
        made = body.each("Mul", made, body.like(int(np.prod(window)), made))
    return made if rank == 4 else body.add("Squeeze", [made], shape, squeeze_dims=(1,))


def _gather(step: Step) -> Made:
    """Rows of a table, elements along an axis, or slices at positions along the first axes. Positions out of range are moved into it."""
    from jaxlib.mlir.dialects import stablehlo

    x, at = step.args[:2]
    body, shape = step.body, step.shape
    dims = stablehlo.GatherDimensionNumbers(step.op.attributes["dimension_numbers"])
    sizes = _slice_sizes(step, dims)
    offset, gone, axes = list(dims.offset_dims), list(dims.collapsed_slice_dims), list(dims.start_index_map)
    batch = [list(dims.operand_batching_dims), list(dims.start_indices_batching_dims)]
    rank, inner = len(x.shape), len(at.shape)
    vector = dims.index_vector_dim
    kept = [axis for axis in range(rank) if axis not in gone and axis not in batch[0]]
    last = at.shape[-1] if vector == inner - 1 else 1
    if vector not in (inner - 1, inner) or last != len(axes) or not _takes_single(x, sizes, kept, gone, axes):
        return None
    ends = [(x.shape[axis] or 0) - 1 for axis in axes]
    if at.dtype not in ("int32", "int64") or min(ends) < 0:
        return None
    top = constant(np.array(ends if len(ends) > 1 else ends[0], numpy_type(at.dtype)))
    lead = list(range(len(batch[0])))
    places = body.whole(at)
    places = body.each("Minimum", body.each("Maximum", places, body.like(0, at)), replace(top, shape=()))
    x = _front(step, sizes)
    if len(axes) > 1:
        if batch[0] or vector == inner:
            return None
        made = body.add("GatherNd", [transposed(body, x, [*axes, *kept]), places], (None,) * len(shape))
        return replace(transposed(body, made, _gathered_axes([], kept, inner - 1, -1, offset)), shape=shape)
    if batch != [lead, lead]:
        return None
    if vector == inner - 1:
        places = body.add("Squeeze", [places], at.shape[:-1], squeeze_dims=(inner - 1,))
    made = body.add("GatherV2", [x, places, position(axes[0])], (None,) * len(shape), batch_dims=len(lead))
    turned = _gathered_axes(lead, kept, len(places.shape) - len(lead), axes[0], offset)
    return replace(transposed(body, made, turned), shape=shape)


def _takes_single(
    x: Value, sizes: Sequence[int], kept: Sequence[int], gone: Sequence[int], axes: Sequence[int]
) -> bool:
    """True if a gather takes single positions of the axes that it indexes, and all of those that it keeps."""
    full = all(sizes[axis] == x.shape[axis] or sizes[axis] < 0 for axis in kept)
    return bool(axes) and full and sorted(gone) == sorted(axes) and all(sizes[axis] == 1 for axis in axes)


def _slice_sizes(step: Step, dims: Any) -> list[int]:
    """Sizes of the slices of a gather, -1 for those that only the run knows: of what the result keeps it has them."""
    if len(step.args) < 3:
        return step.numbers("slice_sizes")
    gone = [*dims.collapsed_slice_dims, *dims.operand_batching_dims]
    kept = iter(dims.offset_dims)
    return [1 if axis in gone else known(step.shape[next(kept)]) for axis in range(len(step.args[0].shape))]


def _front(step: Step, sizes: Sequence[int]) -> Value:
    """The operand of a gather up to the sizes of its slices, along axes where only the run knows these."""
    x, rank = step.args[0], len(sizes)
    whole = sum(1 << axis for axis in range(rank) if sizes[axis] >= 0)
    if whole == (1 << rank) - 1:
        return x
    first, step_by = (constant(np.full(rank, number, numpy_type(step.args[2].dtype))) for number in (0, 1))
    return step.body.add("StridedSlice", [x, first, step.args[2], step_by], x.shape, end_mask=whole)


def _gathered_axes(lead: Sequence[int], kept: Sequence[int], count: int, axis: int, offset: Sequence[int]) -> list[int]:
    """Per axis of the gather's result that of GatherV2, which puts the axes of positions where the axis was; `offset`: of slices."""
    slices = [("slice", a) for a in kept]
    places = [("at", n) for n in range(count)]
    made = [*lead, *(one for one in slices if one[1] < axis), *places, *(one for one in slices if one[1] > axis)]
    next_slice, others = iter(slices), iter([*lead, *places])
    wanted = [next(next_slice) if number in offset else next(others) for number in range(len(made))]
    return [made.index(one) for one in wanted]


def _sort(step: Step) -> Made:
    """Sorting along an axis, rising, of what has no NaN and -0 behind: numbers that are integers."""
    dims = step.number("dimension", len(step.shape) - 1)
    kind = step.op.regions[0].blocks[0]
    ops = list(kind.operations)
    simple = (
        len(ops) == 2
        and list(ops[0].operands) == [kind.arguments[0], kind.arguments[1]]
        and list(ops[1].operands) == list(ops[0].results)
    )
    if not simple or len(step.args) > 2 or dims != len(step.shape) - 1 or is_float(step.args[0].dtype):
        return None
    if word(ops[0], "comparison_direction") != "LT":
        return None
    if len(step.args) == 1:
        return step.body.add("XlaSort", [step.args[0]], step.shape)
    keys = step.body.add("XlaKeyValueSort", list(step.args), step.shape)
    return [keys, Value(step.args[1].dtype, step.args[1].shape, ((keys.source or (0, 0))[0], 1))]


WINDOWS: Mapping[str, Reader] = {
    "dot_general": _dot, "convolution": _convolution, "reduce": _reduce, "reduce_window": _reduce_window, "gather": _gather,
    "dynamic_gather": _gather, "sort": _sort,
}  # fmt: skip
"""By operation, as in `stablehlo_ops.ELEMENTS`."""
