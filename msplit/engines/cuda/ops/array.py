"""Ops that join, cut and pad tensors, and that move their elements.

Joining, taking apart, slicing and padding tensors along axes.

Moving elements to other places: transposes, repeats, reversals, blocks of space.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node, Unsupported
from msplit.engines.cuda.ops.shape import axis_within, integer, integers, lies_nchw

_TO_NCHW, _TO_NHWC = (0, 3, 1, 2), (0, 2, 3, 1)


@lowering("Concat", static=(0,))
def concat(node: Node, axis: np.ndarray, *inputs: Tensor) -> Tensor:
    """The inputs one after the other along an axis (the older form, which names the axis first)."""
    return concat_v2(node, *inputs, axis)


@lowering("ConcatV2", static=(-1,))
def concat_v2(node: Node, *inputs: Tensor | np.ndarray) -> Tensor:
    """The inputs one after the other along an axis, the last input."""
    tensors: tuple[Tensor, ...] = inputs[:-1]
    dim = axis_within(node, integer(inputs[-1]), tensors[0].dim())
    if len(tensors) == 1:
        return tensors[0]
    if all(lies_nchw(tensor) for tensor in tensors):
        # In NCHW order of axes the inputs are contiguous: one copy each, and the result keeps the layout that the
        # convolutions behind it read without a conversion.
        return torch.cat([tensor.permute(_TO_NCHW) for tensor in tensors], _TO_NHWC[dim]).permute(_TO_NHWC)
    return torch.cat(tensors, dim)


@lowering("Pack")
def pack(node: Node, *inputs: Tensor) -> Tensor:
    """The inputs, all of one shape, along a new axis."""
    dim = axis_within(node, node.get("axis", 0), inputs[0].dim() + 1)
    return inputs[0].unsqueeze(dim) if len(inputs) == 1 else torch.stack(inputs, dim)


@lowering("Unpack")
def unpack(node: Node, x: Tensor) -> tuple[Tensor, ...]:
    """Views of every position along an axis, which they lack."""
    dim = axis_within(node, node.get("axis", 0), x.dim())
    if x.shape[dim] != node.attrs["num"]:
        raise Unsupported(f"{node.name}: axis {dim} of shape {tuple(x.shape)} has not {node.attrs['num']} parts")
    return tuple(x.unbind(dim))


@lowering("Split", static=(0,))
def split(node: Node, axis: np.ndarray, x: Tensor) -> tuple[Tensor, ...]:
    """Views of `num_split` equal parts along an axis."""
    dim = axis_within(node, integer(axis), x.dim())
    parts = int(node.attrs["num_split"])
    size, rest = divmod(x.shape[dim], parts)
    if rest:
        raise Unsupported(f"{node.name}: axis {dim} of shape {tuple(x.shape)} has not {parts} equal parts")
    return tuple(x.split((size,) * parts, dim))


@lowering("SplitV", static=(1, 2))
def split_v(node: Node, x: Tensor, sizes: np.ndarray, axis: np.ndarray) -> tuple[Tensor, ...]:
    """Views of parts of the given sizes along an axis; one size may be -1 for what is left."""
    dim = axis_within(node, integer(axis), x.dim())
    wanted = integers(sizes)
    known = sum(size for size in wanted if size != -1)
    if -1 in wanted:
        wanted = tuple(x.shape[dim] - known if size == -1 else size for size in wanted)
    if sum(wanted) != x.shape[dim] or min(wanted) < 0:
        raise Unsupported(f"{node.name}: axis {dim} of shape {tuple(x.shape)} can not be split into {integers(sizes)}")
    return tuple(x.split(wanted, dim))


@lowering("ParallelConcat")
def parallel_concat(node: Node, *inputs: Tensor) -> Tensor:
    """The inputs, each with a first axis of size one, one after the other along it."""
    return torch.cat(inputs, 0)


@lowering("Slice", static=(1, 2))
def slice_(node: Node, x: Tensor, begin: np.ndarray, size: np.ndarray) -> Tensor:
    """A view of `size` elements from `begin` on, on every axis; size -1 means up to the end."""
    for dim, (start, length) in enumerate(zip(integers(begin), integers(size), strict=True)):
        available = x.shape[dim] - start
        length = available if length == -1 else length
        if start < 0 or not 0 <= length <= available:
            raise Unsupported(
                f"{node.name}: {length} elements from {start} on are outside of axis {dim} of shape {tuple(x.shape)}"
            )
        x = x.narrow(dim, start, length)
    return x


class _Plan(NamedTuple):
    """A StridedSlice on an input of known shape.

    Attributes:
        ranges: The places that are taken of every axis of the input.
        shape: Shape of the result, new axes put in and shrunk ones left out.
    """

    ranges: tuple[range, ...]
    shape: tuple[int, ...]


@lowering("StridedSlice", static=(1, 2, 3))
def strided_slice(node: Node, x: Tensor, begin: np.ndarray, end: np.ndarray, strides: np.ndarray) -> Tensor:
    """x[begin:end:strides] with Python's rules, and masks for omitted bounds, ellipsis, new and dropped axes.

    A view, except that axes with a negative stride are copied: PyTorch has no negative strides.
    """
    plan = _planned(node, tuple(x.shape), begin, end, strides)
    window, backwards = _window(x, plan), _backwards(plan)
    return (window.flip(backwards) if backwards else window).reshape(plan.shape)


@lowering("TensorStridedSliceUpdate", static=(1, 2, 3))
def tensor_strided_slice_update(
    node: Node, x: Tensor, begin: np.ndarray, end: np.ndarray, strides: np.ndarray, value: Tensor
) -> Tensor:
    """A copy of x with the slice, addressed as for StridedSlice, replaced by the value."""
    return replace_slice(node, x.clone(), begin, end, strides, value)


@lowering("StridedSliceGrad", static=(0, 1, 2, 3))
def strided_slice_grad(
    node: Node, shape: np.ndarray, begin: np.ndarray, end: np.ndarray, strides: np.ndarray, dy: Tensor
) -> Tensor:
    """Zeros of the given shape with dy in the place of the slice."""
    sizes = integers(shape)
    return _replaced(dy.new_zeros(sizes), _planned(node, sizes, begin, end, strides), dy)


def replace_slice(
    node: Node, x: Tensor, begin: np.ndarray, end: np.ndarray, strides: np.ndarray, value: Tensor
) -> Tensor:
    """x, in which the slice, addressed as for StridedSlice, was replaced in place by the value."""
    plan = _planned(node, tuple(x.shape), begin, end, strides)
    return _replaced(x, plan, value.expand(plan.shape))


def _replaced(x: Tensor, plan: _Plan, value: Tensor) -> Tensor:
    """x, in which what the plan takes was replaced in place."""
    value, backwards = value.reshape([len(taken) for taken in plan.ranges]), _backwards(plan)
    _window(x, plan).copy_(value.flip(backwards) if backwards else value)
    return x


def _window(x: Tensor, plan: _Plan) -> Tensor:
    """View of what the plan takes, with axes of negative stride in rising order."""
    for dim, taken in enumerate(plan.ranges):
        if not taken:
            x = x.narrow(dim, 0, 0)
        elif (taken.start, len(taken), taken.step) != (0, x.shape[dim], 1):
            low, high = sorted((taken[0], taken[-1]))
            x = x[(slice(None),) * dim + (slice(low, high + 1, abs(taken.step)),)]
    return x


def _backwards(plan: _Plan) -> list[int]:
    return [dim for dim, taken in enumerate(plan.ranges) if taken.step < 0 and len(taken) > 1]


def _planned(node: Node, shape: tuple[int, ...], begins: np.ndarray, ends: np.ndarray, steps: np.ndarray) -> _Plan:
    """Resolves the masks. Bit i of each belongs to entry i of begin, end and strides, not to an axis."""
    begin, end, strides = integers(begins), integers(ends), integers(steps)
    begin_mask, end_mask = int(node.get("begin_mask", 0)), int(node.get("end_mask", 0))
    ellipsis_mask = int(node.get("ellipsis_mask", 0))
    new_axis_mask, shrink_mask = int(node.get("new_axis_mask", 0)), int(node.get("shrink_axis_mask", 0))
    if ellipsis_mask & (ellipsis_mask - 1):
        raise Unsupported(f"{node.name}: a slice has more than one ellipsis")
    count = len(strides)
    is_new = [bool(new_axis_mask >> entry & 1) and not ellipsis_mask >> entry & 1 for entry in range(count)]
    # Entries that take an axis of the input: all but the ellipsis and new axes.
    taking = sum(not (ellipsis_mask >> entry & 1) and not is_new[entry] for entry in range(count))
    if taking > len(shape):
        raise Unsupported(f"{node.name}: a slice of {taking} axes of shape {shape}")

    ranges: list[range] = []
    result: list[int] = []
    for entry in range(count + (not ellipsis_mask)):
        # Without an ellipsis there is one after the last entry.
        if entry == count or ellipsis_mask >> entry & 1:
            for _ in range(len(shape) - taking):
                result.append(shape[len(ranges)])
                ranges.append(range(result[-1]))
            continue
        if is_new[entry]:
            result.append(1)
            continue
        size, step = shape[len(ranges)], strides[entry]
        if step == 0:
            raise Unsupported(f"{node.name}: stride 0 in a slice")
        if shrink_mask >> entry & 1:
            place = begin[entry] + size if begin[entry] < 0 else begin[entry]
            if not 0 <= place < size or step < 0:
                raise Unsupported(f"{node.name}: index {begin[entry]} is outside of axis {len(ranges)} of {shape}")
            ranges.append(range(place, place + 1))
            continue
        start = None if begin_mask >> entry & 1 else begin[entry]
        stop = None if end_mask >> entry & 1 else end[entry]
        ranges.append(range(size)[start:stop:step])
        result.append(len(ranges[-1]))
    return _Plan(tuple(ranges), tuple(result))


@lowering("Pad", "PadV2", static=(1,))
def pad(node: Node, x: Tensor, paddings: np.ndarray, *constant: Tensor) -> Tensor:
    """The tensor with zeros (PadV2: a constant) put before and after it along every axis."""
    pairs = _pairs(node, x, paddings)
    if not any(map(any, pairs)):
        return x
    if lies_nchw(x):
        # Padding makes a fresh tensor whose last axis is the densest: in NCHW order it keeps the input's layout.
        return _padded(x.permute(_TO_NCHW), [pairs[dim] for dim in _TO_NCHW], *constant).permute(_TO_NHWC)
    return _padded(x, pairs, *constant)


@lowering("MirrorPad", static=(1,))
def mirror_pad(node: Node, x: Tensor, paddings: np.ndarray) -> Tensor:
    """The tensor with its elements mirrored at its borders, the border repeated (SYMMETRIC) or not (REFLECT)."""
    pairs = _pairs(node, x, paddings)
    skipped = {"REFLECT": 1, "SYMMETRIC": 0}[node.attrs["mode"]]
    for dim, (low, high) in enumerate(pairs):
        if max(low, high) > x.shape[dim] - skipped:
            raise Unsupported(f"{node.name}: padding {low}, {high} is wider than axis {dim} of shape {tuple(x.shape)}")
    is_image = x.dim() == 4 and x.is_floating_point() and x.numel() > 0
    if skipped and is_image and pairs[0] == pairs[3] == (0, 0) and any(pairs[1] + pairs[2]):
        # One kernel for the usual case, images padded in height and width.
        return F.pad(x.permute(_TO_NCHW), (*pairs[2], *pairs[1]), mode="reflect").permute(_TO_NHWC)
    for dim, (low, high) in enumerate(pairs):
        if low or high:
            size = x.shape[dim]
            before = x.narrow(dim, skipped, low).flip(dim)
            after = x.narrow(dim, size - skipped - high, high).flip(dim)
            x = torch.cat([before, x, after], dim)
    return x


def _pairs(node: Node, x: Tensor, paddings: np.ndarray) -> list[tuple[int, int]]:
    pairs = [(int(low), int(high)) for low, high in np.asarray(paddings).reshape(-1, 2)]
    if len(pairs) != x.dim() or any(low < 0 or high < 0 for low, high in pairs):
        raise Unsupported(f"{node.name}: paddings {pairs} do not fit a tensor of shape {tuple(x.shape)}")
    return pairs


def _padded(x: Tensor, pairs: list[tuple[int, int]], constant: Tensor | None = None) -> Tensor:
    """Padded with zeros, or with a constant that only the device knows."""
    if constant is None:  # `pad` counts axes from the last one back
        return F.pad(x, [width for pair in reversed(pairs) for width in pair])
    shape = [low + size + high for size, (low, high) in zip(x.shape, pairs, strict=True)]
    result = constant.reshape(()).expand(shape).clone(memory_format=torch.contiguous_format)
    inside = result
    for dim, (low, _) in enumerate(pairs):
        inside = inside.narrow(dim, low, x.shape[dim])
    inside.copy_(x)
    return result


@lowering("Transpose", "ConjugateTranspose", static=(1,))
def transpose(node: Node, x: Tensor, perm: np.ndarray) -> Tensor:
    """A view with the axes in another order; Conjugate: of the complex conjugate."""
    return (torch.conj_physical(x) if node.op.startswith("Conjugate") else x).permute(integers(perm))


@lowering("Tile", static=(1,))
def tile(node: Node, x: Tensor, multiples: np.ndarray) -> Tensor:
    """The tensor repeated along every axis; a view where only axes of size one are repeated."""
    repeats = integers(multiples)
    if all(size == 1 or repeat == 1 for size, repeat in zip(x.shape, repeats, strict=True)):
        return x.expand([size * repeat for size, repeat in zip(x.shape, repeats, strict=True)])
    return x.repeat(repeats)


@lowering("Reverse", "ReverseV2", static=(1,))
def reverse(node: Node, x: Tensor, dims: np.ndarray) -> Tensor:
    """The order of the elements turned around along the axes whose flag is set; V2: along those that are named."""
    given = integers(dims)
    if node.op.endswith("V2"):
        axes = [axis_within(node, dim, x.dim()) for dim in given]
    else:
        axes = [dim for dim, flag in enumerate(given) if flag]
    return x.flip(axes) if axes else x


@lowering("ReverseSequence")
def reverse_sequence(node: Node, x: Tensor, lengths: Tensor) -> Tensor:
    """For every entry of the batch axis, its first `lengths` elements along the sequence axis turned around."""
    sequence = axis_within(node, node.attrs["seq_dim"], x.dim())
    batch = axis_within(node, node.get("batch_dim", 0), x.dim())
    steps = torch.arange(x.shape[sequence], device=x.device)
    lengths = lengths.to(torch.int64).unsqueeze(1)
    source = torch.where(steps < lengths, lengths - 1 - steps, steps)
    # A length beyond the axis is the caller's error; clamped, it can not read outside of the tensor.
    source = source.clamp(0, max(x.shape[sequence] - 1, 0))
    if batch > sequence:
        source = source.t()
    source = source.reshape([size if dim in (batch, sequence) else 1 for dim, size in enumerate(x.shape)])
    return x.gather(sequence, source.expand(x.shape))


@lowering("Roll", static=(1, 2))
def roll(node: Node, x: Tensor, shift: np.ndarray, axis: np.ndarray) -> Tensor:
    """Elements moved along the axes by the shifts, those that leave at one end entering at the other."""
    axes = [axis_within(node, dim, x.dim()) for dim in integers(axis)]
    return torch.roll(x, integers(shift), axes) if axes else x


@lowering("SpaceToDepth")
def space_to_depth(node: Node, x: Tensor) -> Tensor:
    """Every block of `block_size`² positions becomes one position with that many times the channels."""
    block = int(node.attrs["block_size"])
    if _channels_first(node):
        n, c, h, w = x.shape
        blocks = x.reshape(n, c, h // block, block, w // block, block).permute(0, 3, 5, 1, 2, 4)
        return blocks.reshape(n, block * block * c, h // block, w // block)
    n, h, w, c = x.shape
    blocks = x.reshape(n, h // block, block, w // block, block, c).permute(0, 1, 3, 2, 4, 5)
    return blocks.reshape(n, h // block, w // block, block * block * c)


@lowering("DepthToSpace")
def depth_to_space(node: Node, x: Tensor) -> Tensor:
    """Every position becomes a block of `block_size`² positions, with that much fewer channels."""
    block = int(node.attrs["block_size"])
    if _channels_first(node):
        n, c, h, w = x.shape
        depth = c // (block * block)
        blocks = x.reshape(n, block, block, depth, h, w).permute(0, 3, 4, 1, 5, 2)
        return blocks.reshape(n, depth, h * block, w * block)
    n, h, w, c = x.shape
    depth = c // (block * block)
    blocks = x.reshape(n, h, w, block, block, depth).permute(0, 1, 3, 2, 4, 5)
    return blocks.reshape(n, h * block, w * block, depth)


def _channels_first(node: Node) -> bool:
    data_format = node.get("data_format", "NHWC")
    if data_format not in ("NHWC", "NCHW"):
        raise Unsupported(f"{node.name}: {node.op} with data format {data_format}; NHWC and NCHW are possible")
    return bool(data_format == "NCHW")


@lowering("SpaceToBatch", static=(1,))
@lowering("SpaceToBatchND", static=(1, 2))
def space_to_batch(node: Node, x: Tensor, *given: np.ndarray) -> Tensor:
    """Blocks of the padded axes behind the first moved into the batch axis; square ones of height and width without ND."""
    block, pairs = _blocks(node, given)
    if any(low or high for low, high in pairs):
        # `pad` counts axes from the last one back.
        widths = [0, 0] * (x.dim() - 1 - len(pairs)) + [width for low, high in reversed(pairs) for width in (low, high)]
        x = torch.nn.functional.pad(x, widths)
    count = len(block)
    for axis, width in reversed([*enumerate(block, 1)]):  # each axis becomes two, the blocks and what lies in one
        x = x.unflatten(axis, (x.shape[axis] // width, width))
    inside, blocks = range(2, 2 * count + 1, 2), range(1, 2 * count, 2)
    return x.permute(*inside, 0, *blocks, *range(2 * count + 1, x.dim())).flatten(0, count)


@lowering("BatchToSpace", static=(1,))
@lowering("BatchToSpaceND", static=(1, 2))
def batch_to_space(node: Node, x: Tensor, *given: np.ndarray) -> Tensor:
    """Undoes SpaceToBatch: parts of the batch axis become blocks, of which the crops are cut off."""
    block, pairs = _blocks(node, given)
    count = len(block)
    x = x.unflatten(0, (*block, x.shape[0] // math.prod(block)))
    pairs_of_axes = [axis for place in range(count) for axis in (count + 1 + place, place)]
    x = x.permute(count, *pairs_of_axes, *range(2 * count + 1, x.dim()))
    for axis in range(1, count + 1):
        x = x.flatten(axis, axis + 1)
    for axis, (low, high) in enumerate(pairs, start=1):
        x = x.narrow(axis, low, x.shape[axis] - low - high)
    return x


def _blocks(node: Node, given: tuple[np.ndarray, ...]) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
    """The sizes of a block, an input or an attribute, and the paddings or crops at both ends of its axes."""
    *shape, pairs = given
    block = integers(shape[0]) if shape else (int(node.attrs["block_size"]),) * 2
    return block, [(int(low), int(high)) for low, high in pairs.reshape(-1, 2)]
