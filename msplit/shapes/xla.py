"""Ops that stand for one operation of XLA."""

from __future__ import annotations

from msplit.shapes.registry import Node, Outputs, shape_from, shape_function


@shape_function("XlaDynamicSlice")
def dynamic_slice(node: Node) -> Outputs:
    """The sizes, which are a value."""
    sizes, shape = node.ints(2), node.shape(0)
    if sizes is not None:
        return (shape_from(sizes),)
    return (None if shape is None else (None,) * len(shape),)


@shape_function("XlaKeyValueSort")
def key_value_sort(node: Node) -> Outputs:
    """As the inputs."""
    return (node.shape(0), node.shape(1))


@shape_function("XlaPad")
def pad(node: Node) -> Outputs:
    """Each axis with what is put before, behind and between its elements, which are values and may be negative."""
    shape = node.shape(0)
    if shape is None:
        return (None,)
    edges = [node.ints(index) for index in (2, 3, 4)]
    low, high, interior = (numbers or [None] * len(shape) for numbers in edges)
    return (
        tuple(
            None
            if size is None or before is None or behind is None or between is None
            else size + before + behind + max(0, size - 1) * between
            for size, before, behind, between in zip(shape, low, high, interior, strict=True)
        ),
    )
