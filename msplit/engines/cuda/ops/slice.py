"""Slices: Slice, and StridedSlice with all of its masks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node, Unsupported
from msplit.engines.cuda.ops.axes import integers


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


@dataclass(frozen=True)
class _Range:
    """What StridedSlice takes of one axis of its input: `count` elements from `start` on, `step` apart."""

    start: int
    count: int
    step: int


@dataclass(frozen=True)
class _Plan:
    """A StridedSlice on an input of known shape.

    Attributes:
        ranges: What is taken of every axis of the input.
        shape: Shape of the result, new axes put in and shrunk ones left out.
    """

    ranges: tuple[_Range, ...]
    shape: tuple[int, ...]


@lowering("StridedSlice", static=(1, 2, 3))
def strided_slice(node: Node, x: Tensor, begin: np.ndarray, end: np.ndarray, strides: np.ndarray) -> Tensor:
    """x[begin:end:strides] with Python's rules, and masks for omitted bounds, ellipsis, new and dropped axes.

    A view, except that axes with a negative stride are copied: PyTorch has no negative strides.
    """
    plan = _planned(node, tuple(x.shape), integers(begin), integers(end), integers(strides))
    return _taken(x, plan).reshape(plan.shape)


@lowering("TensorStridedSliceUpdate", static=(1, 2, 3))
def tensor_strided_slice_update(
    node: Node, x: Tensor, begin: np.ndarray, end: np.ndarray, strides: np.ndarray, value: Tensor
) -> Tensor:
    """A copy of x with the slice, addressed as for StridedSlice, replaced by the value."""
    plan = _planned(node, tuple(x.shape), integers(begin), integers(end), integers(strides))
    value = value.expand(plan.shape).reshape([taken.count for taken in plan.ranges])
    backwards = [dim for dim, taken in enumerate(plan.ranges) if taken.step < 0]
    result = x.clone()
    _window(result, plan).copy_(value.flip(backwards) if backwards else value)
    return result


@lowering("StridedSliceGrad", static=(0, 1, 2, 3))
def strided_slice_grad(
    node: Node, shape: np.ndarray, begin: np.ndarray, end: np.ndarray, strides: np.ndarray, dy: Tensor
) -> Tensor:
    """Zeros of the given shape with dy in the place of the slice."""
    plan = _planned(node, integers(shape), integers(begin), integers(end), integers(strides))
    value = dy.reshape([taken.count for taken in plan.ranges])
    backwards = [dim for dim, taken in enumerate(plan.ranges) if taken.step < 0]
    result = dy.new_zeros(integers(shape))
    _window(result, plan).copy_(value.flip(backwards) if backwards else value)
    return result


def _window(x: Tensor, plan: _Plan) -> Tensor:
    """View of what the plan takes, with axes of negative stride in rising order."""
    for dim, taken in enumerate(plan.ranges):
        if (taken.start, taken.count, taken.step) == (0, x.shape[dim], 1):
            continue
        if taken.count == 0:
            x = x.narrow(dim, 0, 0)
            continue
        last = taken.start + (taken.count - 1) * taken.step
        low, high = min(taken.start, last), max(taken.start, last)
        index = (slice(None),) * dim + (slice(low, high + 1, abs(taken.step)),)
        x = x[index]
    return x


def _taken(x: Tensor, plan: _Plan) -> Tensor:
    window = _window(x, plan)
    backwards = [dim for dim, taken in enumerate(plan.ranges) if taken.step < 0 and taken.count > 1]
    return torch.flip(window, backwards) if backwards else window


def _planned(
    node: Node, shape: tuple[int, ...], begin: tuple[int, ...], end: tuple[int, ...], strides: tuple[int, ...]
) -> _Plan:
    """Resolves the masks. Bit i of each belongs to entry i of begin, end and strides, not to an axis."""
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

    ranges: list[_Range] = []
    result: list[int] = []
    for entry in range(count + (not ellipsis_mask)):
        # Without an ellipsis there is one after the last entry.
        if entry == count or ellipsis_mask >> entry & 1:
            for _ in range(len(shape) - taking):
                size = shape[len(ranges)]
                ranges.append(_Range(0, size, 1))
                result.append(size)
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
            ranges.append(_Range(place, 1, 1))
            continue
        start = None if begin_mask >> entry & 1 else begin[entry]
        stop = None if end_mask >> entry & 1 else end[entry]
        resolved = range(size)[slice(start, stop, step)]
        ranges.append(_Range(resolved.start, len(resolved), step))
        result.append(len(resolved))
    return _Plan(tuple(ranges), tuple(result))
