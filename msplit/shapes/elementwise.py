"""Elementwise ops: unary ones keep the shape, binary ones broadcast."""

from __future__ import annotations

from functools import reduce

from msplit.opset.traits import ops_with
from msplit.shapes.registry import Node, Outputs, Shape, broadcast, merge, shape_function


@shape_function(*ops_with("operands agree"))
def gradient(node: Node) -> Outputs:
    """Both operands have the same shape."""
    return (merge(node.shape(0), node.shape(1)),)


@shape_function(*ops_with("broadcasts"))
def binary(node: Node) -> Outputs:
    """Broadcasts two operands."""
    return (broadcast(node.shape(0), node.shape(1)),)


@shape_function("Betainc", "SelectV2")
def ternary(node: Node) -> Outputs:
    """Broadcasts all operands."""
    lead: Shape = ()
    return (reduce(broadcast, node.inputs, lead),)


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


@shape_function("AddN", "AccumulateNV2")
def add_n(node: Node) -> Outputs:
    """All operands have the same shape."""
    return (reduce(merge, node.inputs, None),)


@shape_function("StringJoin")
def string_join(node: Node) -> Outputs:
    """Scalars join with every element of the others."""
    return (reduce(merge, [shape for shape in node.inputs if shape != ()], None),) if any(node.inputs) else ((),)
