"""Ops that rearrange, cut, join and make arrays."""

from __future__ import annotations

import math

from msplit.shapes.registry import (
    MAX_RANK,
    Node,
    Outputs,
    Shape,
    Value,
    as_ints,
    axis_of,
    broadcast,
    known,
    merge,
    product,
    shape_from,
    shape_function,
    total,
)


def sized(node: Node, index: int) -> Shape:
    """The shape that an input's value gives; where the value is not known, its length still gives the rank."""
    sizes = node.ints(index)
    if sizes is not None:
        return shape_from(sizes)
    vector = node.shape(index)
    return (None,) * vector[0] if vector and vector[0] is not None and vector[0] <= MAX_RANK else None


@shape_function("Reshape")
def reshape(node: Node) -> Outputs:
    """A new shape, in which one -1 stands for what is left."""
    sizes = node.ints(1)
    if sizes is None:
        return (sized(node, 1),)
    # -1 asks for the rest; None (an element whose value is not known) may be anything, but alone it is the rest as well.
    free = [axis for axis, size in enumerate(sizes) if size is None or size < 0]
    data = node.shape(0)
    if len(free) != 1 or data is None:
        return (shape_from(sizes),)
    others = product(size for axis, size in enumerate(sizes) if axis != free[0])
    result = list(sizes)
    count = product(data)
    if count is not None and others:
        result[free[0]] = count // others
    else:
        result[free[0]] = None
    return (tuple(result),)


@shape_function("ExpandDims")
def expand_dims(node: Node) -> Outputs:
    """A new axis of size 1."""
    shape, axis = node.shape(0), node.scalar(1)
    if shape is None:
        return (None,)
    if axis is None:
        return ((None,) * (len(shape) + 1),)
    place = axis_of(axis, len(shape) + 1)
    return ((*shape[:place], 1, *shape[place:]),)


@shape_function("Squeeze")
def squeeze(node: Node) -> Outputs:
    """Drops axes of size 1."""
    shape = node.shape(0)
    axes = node.attr("squeeze_dims", ()) or node.attr("axis", ()) or ()
    if shape is None:
        return (None,)
    if axes:
        gone = {axis_of(int(axis), len(shape)) for axis in axes}
        return (tuple(size for axis, size in enumerate(shape) if axis not in gone),)
    return (None if None in shape else tuple(size for size in shape if size != 1),)


@shape_function("Bitcast")
def bitcast(node: Node) -> Outputs:
    """A last axis appears or disappears where the element sizes differ."""
    from msplit.shapes.dtypes import itemsize

    shape = node.shape(0)
    old, new = itemsize(str(node.attr("T", ""))), itemsize(str(node.attr("type", "")))
    if shape is None or not old or not new:
        return (None,)
    if old == new:
        return (shape,)
    return ((*shape, old // new) if old > new else shape[:-1],)


@shape_function("Shape", "ShapeN")
def shape_of(node: Node) -> Outputs:
    """One vector per input, as long as its rank."""
    return tuple((None if shape is None else len(shape),) for shape in node.inputs)


@shape_function("Size", "Rank")
def scalar(node: Node) -> Outputs:
    """A scalar."""
    return ((),)


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
    first, second = sized(node, 0), sized(node, 1)
    if not known(first) or not known(second):
        return ((None,), (None,))
    assert first is not None
    assert second is not None
    axes = broadcast_axes(first, second)
    return ((len(axes[0]),), (len(axes[1]),))


def broadcast_axes(first: tuple[int | None, ...], second: tuple[int | None, ...]) -> tuple[list[int], list[int]]:
    """The axes of the result over which each operand was broadcast. An axis where both are 1 counts for both, as in TensorFlow's kernel."""
    rank = max(len(first), len(second))
    a, b = (1,) * (rank - len(first)) + first, (1,) * (rank - len(second)) + second
    sides: tuple[list[int], list[int]] = ([], [])
    if first == second:
        return sides
    for axis, (x, y) in enumerate(zip(a, b, strict=True)):
        if x == 1 and (y == 1 or x != y):
            sides[0].append(axis)
        if y == 1:
            sides[1].append(axis)
    return sides


@shape_function("BroadcastTo")
def broadcast_to(node: Node) -> Outputs:
    """A larger shape, given as a value."""
    target = sized(node, 1)
    return (target if target is None or node.shape(0) is None or known(target) else broadcast(node.shape(0), target),)


@shape_function("Fill", "Empty")
def fill(node: Node) -> Outputs:
    """A shape given as a value."""
    return (sized(node, 0),)


@shape_function("Range")
def arange(node: Node) -> Outputs:
    """Start, limit, step."""
    items = [node.value(index) for index in range(3)]
    numbers = [float(item.reshape(-1)[0]) for item in items if item is not None and None not in as_ints(item)]
    if len(numbers) < 3 or numbers[2] == 0:
        return ((None,),)
    start, limit, step = numbers
    return ((max(0, math.ceil((limit - start) / step)),),)


@shape_function("LinSpace")
def linspace(node: Node) -> Outputs:
    """As many values as the third input says."""
    return ((node.scalar(2),),)


@shape_function("Concat", "ConcatV2")
def concat(node: Node) -> Outputs:
    """Joins along an axis: its input is the first one in the old op, the last one in the new."""
    first = node.op == "Concat"
    axis = node.scalar(0 if first else -1)
    parts = node.inputs[1:] if first else node.inputs[:-1]
    ranks = {len(part) for part in parts if part is not None}
    if not ranks:
        return (None,)
    rank = min(ranks)
    if axis is None:
        return ((None,) * rank,)
    place = axis_of(axis, rank)
    result: Shape = None
    for part in parts:
        if part is not None:
            result = merge(result, (*part[:place], None, *part[place + 1 :]))
    assert result is not None
    length = total(None if part is None else part[place] for part in parts)
    return ((*result[:place], length, *result[place + 1 :]),)


@shape_function("ConcatOffset")
def concat_offset(node: Node) -> Outputs:
    """One offset vector per part."""
    return tuple(node.inputs[1:])


@shape_function("Split", "SplitV")
def split(node: Node) -> Outputs:
    """Cuts along an axis, evenly or into given sizes."""
    even = node.op == "Split"
    shape = node.shape(1 if even else 0)
    axis = node.scalar(0 if even else 2)
    count = node.count("num_split")
    if shape is None or axis is None:
        return (None if shape is None else (None,) * len(shape),) * count
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


@shape_function("Pack", "ParallelConcat")
def pack(node: Node) -> Outputs:
    """Stacks equal shapes along a new axis."""
    if node.op == "ParallelConcat":
        return (node.attr("shape"),)
    part: Shape = None
    for shape in node.inputs:
        part = merge(part, shape)
    if part is None:
        return (None,)
    place = axis_of(int(node.attr("axis", 0)), len(part) + 1)
    return ((*part[:place], len(node.inputs), *part[place:]),)


@shape_function("Unpack")
def unpack(node: Node) -> Outputs:
    """Takes an axis apart."""
    shape, count = node.shape(0), node.count("num")
    if shape is None:
        return (None,) * count
    place = axis_of(int(node.attr("axis", 0)), len(shape))
    return ((*shape[:place], *shape[place + 1 :]),) * count


@shape_function("Slice")
def cut(node: Node) -> Outputs:
    """Begin and size, where -1 is the rest."""
    shape, begin, size = node.shape(0), node.ints(1), node.ints(2)
    if size is None:
        rank = len(shape) if shape is not None else len(sized(node, 2) or ()) or None
        return (None if rank is None else (None,) * rank,)
    result: list[int | None] = []
    for axis, length in enumerate(size):
        if length != -1:
            result.append(length)
            continue
        full = shape[axis] if shape is not None else None
        start = begin[axis] if begin is not None else None
        result.append(None if full is None or start is None else full - start)
    return (tuple(result),)


def strided_spec(
    shape: Shape,
    begin: list[int | None] | None,
    end: list[int | None] | None,
    strides: list[int | None] | None,
    node: Node,
    count: int,
) -> tuple[Shape, list[slice | int | None] | None]:
    """Shape of a strided slice and, where all is known, the same as a NumPy index (None for a new axis).

    Args:
        shape: Shape of the data, of known rank.
        begin: First positions, one per entry of the specification; None where not known.
        end: Last positions, likewise.
        strides: Steps, likewise.
        node: Holds the masks.
        count: Entries of the specification.

    Raises:
        ValueError: More axes than the data has.
    """
    masks = {
        name: int(node.attr(f"{name}_mask", 0)) for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    }
    assert shape is not None
    taken = sum(1 for i in range(count) if not (masks["ellipsis"] >> i & 1) and not (masks["new_axis"] >> i & 1))
    spread = len(shape) - taken
    if spread < 0:
        raise ValueError("more axes than the data has")
    result: list[int | None] = []
    index: list[slice | int | None] | None = []
    axis = 0
    seen_ellipsis = False
    for i in range(count):
        if masks["ellipsis"] >> i & 1:
            result.extend(shape[axis : axis + spread])
            if index is not None:
                index.extend([slice(None)] * spread)
            axis += spread
            seen_ellipsis = True
            continue
        if masks["new_axis"] >> i & 1:
            result.append(1)
            if index is not None:
                index.append(None)
            continue
        start = begin[i] if begin is not None else None
        if masks["shrink_axis"] >> i & 1:
            index = None if index is None or start is None else [*index, start]
        else:
            step = strides[i] if strides is not None else None
            stop = end[i] if end is not None else None
            free = masks["begin"] >> i & 1, masks["end"] >> i & 1
            size, where = _strided_size(shape[axis], start, stop, step, free)
            result.append(size)
            index = None if index is None or where is None else [*index, where]
        axis += 1
    if not seen_ellipsis:
        result.extend(shape[axis:])
    return tuple(result), index


def _strided_size(
    size: int | None, start: int | None, stop: int | None, step: int | None, free: tuple[int, int]
) -> tuple[int | None, slice | None]:
    if step is None:
        return None, None
    first = None if free[0] else start
    last = None if free[1] else stop
    if (first is None and not free[0]) or (last is None and not free[1]):
        return None, None
    where = slice(first, last, step)
    if size is None:
        # Without the size, only what counts from one end and stays on one side of it is known, and only where it is long enough.
        return None, where
    return len(range(*where.indices(size))), where


@shape_function("StridedSlice")
def strided_slice(node: Node) -> Outputs:
    """NumPy's basic indexing, with masks."""
    shape, vector = node.shape(0), node.shape(1)
    begin, end, strides = node.ints(1), node.ints(2), node.ints(3)
    count = len(begin) if begin is not None else (vector[0] if vector else None)
    if shape is None or count is None or count > MAX_RANK:
        return (None,)
    return (strided_spec(shape, begin, end, strides, node, count)[0],)


@shape_function("StridedSliceGrad")
def strided_slice_gradient(node: Node) -> Outputs:
    """The shape of the data that was sliced."""
    return (sized(node, 0),)


@shape_function("Transpose", "ConjugateTranspose")
def transpose(node: Node) -> Outputs:
    """Permutes axes."""
    shape, order = node.shape(0), node.ints(1)
    if shape is None:
        return (sized(node, 1) if order is None else (None,) * len(order),)
    if order is None or None in order:
        return ((None,) * len(shape),)
    return (tuple(shape[axis_of(axis, len(shape))] for axis in order if axis is not None),)


@shape_function("Tile")
def tile(node: Node) -> Outputs:
    """Repeats along every axis."""
    shape, times = node.shape(0), node.ints(1)
    if shape is None or times is None:
        return ((None,) * len(shape if shape is not None else times or ()) if shape is not None or times else None,)
    return (tuple(product(pair) for pair in zip(shape, times, strict=True)),)


@shape_function("Pad", "PadV2", "MirrorPad")
def pad(node: Node) -> Outputs:
    """Adds to both ends of every axis."""
    shape, pads = node.shape(0), node.ints(1)
    if shape is None:
        return (None,)
    if pads is None:
        return ((None,) * len(shape),)
    return (tuple(total((size, pads[2 * axis], pads[2 * axis + 1])) for axis, size in enumerate(shape)),)


@shape_function("OneHot")
def one_hot(node: Node) -> Outputs:
    """A new axis as long as the depth."""
    shape, axis = node.shape(0), int(node.attr("axis", -1))
    if shape is None:
        return (None,)
    place = axis_of(axis, len(shape) + 1)
    return ((*shape[:place], node.scalar(1), *shape[place:]),)


@shape_function("Const", "HostConst", "_HostConst")
def constant(node: Node) -> Outputs:
    """The shape of its value."""
    return (node.attr("value").shape,)


@shape_function("ListDiff")
def list_diff(node: Node) -> Outputs:
    """As many elements as are left."""
    return ((None,), (None,))


def slice_value(node: Node) -> Value | None:
    """Value of a strided slice of a known value; None where the slice is not known."""
    data = node.value(0)
    begin = node.ints(1)
    if data is None or begin is None:
        return None
    _, index = strided_spec(data.shape, begin, node.ints(2), node.ints(3), node, len(begin))
    return None if index is None else data[tuple(index)]
