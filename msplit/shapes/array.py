"""Ops that rearrange, cut, join and make arrays."""

from __future__ import annotations

import math
from functools import reduce

from msplit.formats.tensors import itemsize
from msplit.shapes.registry import (
    MAX_RANK,
    Node,
    Outputs,
    Shape,
    Sizes,
    as_ints,
    axis_of,
    broadcast,
    known,
    merge,
    product,
    rank,
    require,
    shape_from,
    shape_function,
    sure,
    total,
    unsized,
)


@shape_function("Reshape")
def reshape(node: Node) -> Outputs:
    """A new shape, in which one -1 stands for what is left."""
    sizes = node.ints(1)
    if sizes is None:
        return (node.sizes(1),)
    # -1 asks for the rest; None (an element whose value is not known) may be anything, but alone it is the rest as well.
    free = [axis for axis, size in enumerate(sizes) if size is None or size < 0]
    data = node.shape(0)
    if len(free) != 1 or data is None:
        return (shape_from(sizes),)
    others = product(size for axis, size in enumerate(sizes) if axis != free[0])
    count = product(data)
    sizes[free[0]] = count // others if count is not None and others else None
    return (tuple(sizes),)


@shape_function("ExpandDims")
def expand_dims(node: Node) -> Outputs:
    """A new axis of size 1."""
    shape, axis = node.ranked(0), node.scalar(1)
    if axis is None:
        return ((None,) * (len(shape) + 1),)
    place = axis_of(axis, len(shape) + 1)
    return ((*shape[:place], 1, *shape[place:]),)


@shape_function("Squeeze")
def squeeze(node: Node) -> Outputs:
    """Drops axes of size 1."""
    shape = node.ranked(0)
    axes = node.attr("squeeze_dims", ()) or node.attr("axis", ())
    if axes:
        gone = {axis_of(int(axis), len(shape)) for axis in axes}
        return (tuple(size for axis, size in enumerate(shape) if axis not in gone),)
    return (None if None in shape else tuple(size for size in shape if size != 1),)


@shape_function("Bitcast")
def bitcast(node: Node) -> Outputs:
    """A last axis appears or disappears where the element sizes differ."""
    shape = node.ranked(0)
    old, new = itemsize(str(node.attr("T", ""))), itemsize(str(node.attr("type", "")))
    require(old and new)
    if old == new:
        return (shape,)
    return ((*shape, old // new) if old > new else shape[:-1],)


@shape_function("BroadcastArgs")
def broadcast_args(node: Node) -> Outputs:
    """A shape as long as the longer one."""
    a, b = node.shape(0), node.shape(1)
    if not a or not b or a[0] is None or b[0] is None:
        return ((None,),)
    return ((max(a[0], b[0]),),)


@shape_function("BroadcastGradientArgs")
def broadcast_gradient_args(node: Node) -> Outputs:
    """The axes over which each operand was broadcast."""
    first, second = node.sizes(0), node.sizes(1)
    if not known(first) or not known(second):
        return ((None,), (None,))
    return tuple((len(axes),) for axes in broadcast_axes(first, second))


def broadcast_axes(first: Sizes, second: Sizes) -> tuple[list[int], list[int]]:
    """The axes of the result over which each operand was broadcast. An axis where both are 1 counts for both, as in TensorFlow's kernel."""
    if first == second:
        return [], []
    longer = max(len(first), len(second))
    sides = ((1,) * (longer - len(sizes)) + sizes for sizes in (first, second))
    left, right = ([axis for axis, size in enumerate(sizes) if size == 1] for sizes in sides)
    return left, right


@shape_function("BroadcastTo")
def broadcast_to(node: Node) -> Outputs:
    """A larger shape, given as a value."""
    target = node.sizes(1)
    return (target if target is None or node.shape(0) is None or known(target) else broadcast(node.shape(0), target),)


@shape_function("Range")
def arange(node: Node) -> Outputs:
    """Start, limit, step."""
    items = [node.value(index) for index in range(3)]
    numbers = [float(item.reshape(-1)[0]) for item in items if item is not None and None not in as_ints(item)]
    if len(numbers) < 3 or numbers[2] == 0:
        return ((None,),)
    start, limit, step = numbers
    return ((max(0, math.ceil((limit - start) / step)),),)


@shape_function("Concat", "ConcatV2")
def concat(node: Node) -> Outputs:
    """Joins along an axis: its input is the first one in the old op, the last one in the new."""
    first = node.op == "Concat"
    axis = node.scalar(0 if first else -1)
    parts = node.inputs[1:] if first else node.inputs[:-1]
    ranked = [part for part in parts if part is not None]
    least = min(map(len, ranked), default=None)
    if least is None or axis is None:
        return (unsized(least),)
    place = axis_of(axis, least)
    result = reduce(merge, [(*part[:place], None, *part[place + 1 :]) for part in ranked], None)
    assert result is not None
    length = total(None if part is None else part[place] for part in parts)
    return ((*result[:place], length, *result[place + 1 :]),)


@shape_function("Split", "SplitV")
def split(node: Node) -> Outputs:
    """Cuts along an axis, evenly or into given sizes."""
    even = node.op == "Split"
    shape = node.shape(1 if even else 0)
    axis = node.scalar(0 if even else 2)
    count = node.count("num_split")
    if shape is None or axis is None:
        return (unsized(rank(shape)),) * count
    place = axis_of(axis, len(shape))
    size = shape[place]
    if even:
        sizes: list[int | None] = [None if size is None else size // count] * count
    else:
        sizes = node.ints(1) or [None] * count
        if sizes.count(-1) == 1:
            rest = total(part for part in sizes if part != -1)
            sizes[sizes.index(-1)] = None if size is None or rest is None else size - rest
    return tuple((*shape[:place], part, *shape[place + 1 :]) for part in sizes)


@shape_function("Pack")
def pack(node: Node) -> Outputs:
    """Stacks equal shapes along a new axis."""
    part = sure(reduce(merge, node.inputs, None))
    place = axis_of(int(node.attr("axis", 0)), len(part) + 1)
    return ((*part[:place], len(node.inputs), *part[place:]),)


@shape_function("Unpack")
def unpack(node: Node) -> Outputs:
    """Takes an axis apart."""
    shape, count = node.ranked(0), node.count("num")
    place = axis_of(int(node.attr("axis", 0)), len(shape))
    return ((*shape[:place], *shape[place + 1 :]),) * count


@shape_function("Slice")
def cut(node: Node) -> Outputs:
    """Begin and size, where -1 is the rest."""
    shape, begin, size = node.shape(0), node.ints(1), node.ints(2)
    if size is None:
        return (unsized(len(shape) if shape is not None else len(node.sizes(2) or ()) or None),)
    for axis, length in enumerate(size):
        if length == -1:
            full = shape[axis] if shape is not None else None
            start = begin[axis] if begin is not None else None
            size[axis] = None if full is None or start is None else full - start
    return (tuple(size),)


Index = slice | int | None
"""An entry of an index of NumPy's: an axis cut, taken away, or new."""

_MASKS = ("begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask", "shrink_axis_mask")


def strided_spec(node: Node, shape: Sizes) -> tuple[Shape, list[Index] | None]:
    """Shape of a strided slice of data of a shape and, where all is known, the same as a NumPy index.

    Raises:
        ValueError: More axes than the data has, or nobody knows how many.
    """
    begin, end, strides = node.ints(1), node.ints(2), node.ints(3)
    count = len(begin) if begin is not None else node.ranked(1)[0]
    if count is None or count > MAX_RANK:
        raise ValueError("an unknown number of axes")
    unknown: list[int | None] = [None] * count
    # Masks are bits per entry of the index. An ellipsis stands for the axes that no other entry takes.
    starts, stops, steps = (unknown if numbers is None else numbers for numbers in (begin, end, strides))
    no_start, no_stop, ellipsis, new_axis, shrink = (int(node.attr(name, 0)) for name in _MASKS)
    spread = len(shape) - sum(not (ellipsis | new_axis) >> i & 1 for i in range(count))
    if spread < 0:
        raise ValueError("more axes than the data has")
    result: list[int | None] = []
    index: list[Index] = []
    complete, axis = True, 0
    for i in range(count):
        if ellipsis >> i & 1:
            result += shape[axis : axis + spread]
            index += [slice(None)] * spread
            axis += spread
            continue
        if new_axis >> i & 1:
            result.append(1)
            index.append(None)
            continue
        # An entry that takes an axis: a single place, which drops it, or a range.
        start, stop, step, size = starts[i], stops[i], steps[i], shape[axis]
        axis += 1
        if shrink >> i & 1:
            index.append(start)
            complete = complete and start is not None
            continue
        where = slice(None if no_start >> i & 1 else start, None if no_stop >> i & 1 else stop, step)
        index.append(where)
        said = (start is not None or no_start >> i & 1) and (stop is not None or no_stop >> i & 1)
        if step is None or size is None or not said:
            result.append(None)
            complete = False
        else:
            result.append(len(range(*where.indices(size))))
    return (*result, *shape[axis:]), index if complete else None


@shape_function("StridedSlice")
def strided_slice(node: Node) -> Outputs:
    """NumPy's basic indexing, with masks."""
    return (strided_spec(node, node.ranked(0))[0],)


@shape_function("Transpose", "ConjugateTranspose")
def transpose(node: Node) -> Outputs:
    """Permutes axes."""
    shape, order = node.shape(0), node.ints(1)
    if shape is None:
        return (node.sizes(1) if order is None else (None,) * len(order),)
    if order is None or None in order:
        return (unsized(len(shape)),)
    return (tuple(shape[axis_of(axis, len(shape))] for axis in order if axis is not None),)


@shape_function("Tile")
def tile(node: Node) -> Outputs:
    """Repeats along every axis."""
    shape, times = node.shape(0), node.ints(1)
    if shape is None or times is None:
        return (unsized(len(shape) if shape is not None else len(times or ()) or None),)
    return (tuple(product(pair) for pair in zip(shape, times, strict=True)),)


@shape_function("Pad", "PadV2", "MirrorPad", "MirrorPadGrad")
def pad(node: Node) -> Outputs:
    """Adds to both ends of every axis; the gradient takes it off again."""
    shape, pads = node.ranked(0), node.ints(1)
    if pads is None:
        return ((None,) * len(shape),)
    if node.op == "MirrorPadGrad":
        pads = [None if size is None else -size for size in pads]
    return (tuple(total((size, pads[2 * axis], pads[2 * axis + 1])) for axis, size in enumerate(shape)),)


@shape_function("XlaPad")
def xla_pad(node: Node) -> Outputs:
    """Each axis with what is put before, behind and between its elements, which are values and may be negative."""
    shape = node.ranked(0)
    low, high, interior = (node.ints(index) or [None] * len(shape) for index in (2, 3, 4))
    gaps = [None if size is None else max(0, size - 1) for size in shape]
    between = map(product, zip(gaps, interior, strict=True))
    return (tuple(map(total, zip(shape, low, high, between, strict=True))),)


@shape_function("XlaDynamicSlice")
def xla_dynamic_slice(node: Node) -> Outputs:
    """The sizes, which are a value."""
    sizes = node.ints(2)
    return ((None,) * len(node.ranked(0)) if sizes is None else shape_from(sizes),)


@shape_function("OneHot")
def one_hot(node: Node) -> Outputs:
    """A new axis as long as the depth."""
    shape = node.ranked(0)
    place = axis_of(int(node.attr("axis", -1)), len(shape) + 1)
    return ((*shape[:place], node.scalar(1), *shape[place:]),)
