"""Elementwise ops that do not simply broadcast, and reductions over axes."""

from __future__ import annotations

import math
from functools import reduce

from msplit.shapes.registry import Node, Outputs, Shape, axis_of, merge, shape_function, unsized


@shape_function("Select")
def select(node: Node) -> Outputs:
    """The branches have the same shape; the condition has it too, or is a scalar, or a vector that chooses rows."""
    shape, condition = merge(node.shape(1), node.shape(2)), node.shape(0)
    if shape is None:
        return (condition if condition is not None and len(condition) > 1 else None,)
    if condition:
        rows = merge(shape[:1], condition[:1]) or ()
        return (merge(shape, condition) if len(condition) == len(shape) else (*rows, *shape[1:]),)
    return (shape,)


@shape_function("StringJoin")
def string_join(node: Node) -> Outputs:
    """Scalars join with every element of the others."""
    return (reduce(merge, [shape for shape in node.inputs if shape != ()], None),) if any(node.inputs) else ((),)


def reduced(shape: Shape, axes: list[int | None] | None, keep: bool) -> Shape:
    """Shape after a reduction; unknown axes leave the rank known only where dimensions are kept."""
    if shape is None:
        return None
    if axes is None or None in axes:
        return unsized(len(shape)) if keep else None
    gone = {axis_of(axis, len(shape)) for axis in axes if axis is not None}
    if keep:
        return tuple(1 if axis in gone else size for axis, size in enumerate(shape))
    return tuple(size for axis, size in enumerate(shape) if axis not in gone)


@shape_function("Sum", "Mean", "Prod", "Max", "Min", "All", "Any", "EuclideanNorm", "ReduceJoin")
def reduction(node: Node) -> Outputs:
    """Reduces over the axes of the second input. Where only their number is known, so is the rank."""
    shape, axes, vector = node.ranked(0), node.ints(1), node.shape(1)
    keep = bool(node.attr("keep_dims", False))
    if axes is None and vector is not None and not keep:
        count = None if None in vector else math.prod(size or 0 for size in vector)  # old graphs have axes of any rank
        if count is not None and count <= len(shape):
            return (unsized(len(shape) - count),)
    return (reduced(shape, axes, keep),)


@shape_function("ArgMax", "ArgMin")
def arg_max(node: Node) -> Outputs:
    """Drops one axis."""
    shape, axis = node.ranked(0), node.scalar(1)
    return (unsized(len(shape) - 1) if axis is None else reduced(shape, [axis], False),)


@shape_function("ApproxTopK")
def approx_top_k(node: Node) -> Outputs:
    """k along one axis, and their positions; how many there are before they are aggregated is up to the device."""
    shape = node.shape(0)
    if shape is None:
        return (None, None)
    axis = axis_of(int(node.attr("reduction_dimension", -1)), len(shape))
    count = int(node.attr("k")) if node.attr("aggregate_to_topk", True) else None
    result = (*shape[:axis], count, *shape[axis + 1 :])
    return (result, result)
