"""Ops that reduce over axes."""

from __future__ import annotations

from msplit.shapes.registry import Node, Outputs, Shape, axis_of, shape_function


def reduced(shape: Shape, axes: list[int | None] | None, keep: bool) -> Shape:
    """Shape after a reduction; unknown axes leave the rank known only where dimensions are kept."""
    if shape is None:
        return None
    if axes is None or None in axes:
        return (None,) * len(shape) if keep else None
    gone = {axis_of(axis, len(shape)) for axis in axes if axis is not None}
    if keep:
        return tuple(1 if axis in gone else size for axis, size in enumerate(shape))
    return tuple(size for axis, size in enumerate(shape) if axis not in gone)


@shape_function("Sum", "Mean", "Prod", "Max", "Min", "All", "Any", "EuclideanNorm", "ReduceJoin")
def reduction(node: Node) -> Outputs:
    """Reduces over the axes of the second input."""
    axes = node.ints(1)
    if axes is None and node.shape(0) is not None and node.shape(1) is not None:
        axes_shape = node.shape(1)
        assert axes_shape is not None
        keep = bool(node.attr("keep_dims", False))
        count = 1 if axes_shape == () else axes_shape[0]
        rank = len(node.shape(0) or ())
        if not keep and count is not None and count <= rank:
            return ((None,) * (rank - count),)
    return (reduced(node.shape(0), axes, bool(node.attr("keep_dims", False))),)


@shape_function("ArgMax", "ArgMin")
def arg_max(node: Node) -> Outputs:
    """Drops one axis."""
    shape, axis = node.shape(0), node.scalar(1)
    if shape is None:
        return (None,)
    if axis is None:
        return ((None,) * (len(shape) - 1),)
    return (reduced(shape, [axis], False),)


@shape_function("L2Loss")
def scalar(node: Node) -> Outputs:
    """A scalar."""
    return ((),)


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
