"""Sizes of all tensors of a graph as arrays."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from msplit.core.graph import CONTROL, Floats, Ints
from msplit.shapes.dtypes import is_float, itemsize, output_dtypes
from msplit.shapes.infer import Shapes
from msplit.shapes.registry import Shape, known

UNNAMED_ITEMSIZE = 4
"""Bytes of an element of a type that the graph does not say (an output of a custom op)."""


@dataclass(frozen=True, eq=False)
class Tensors:
    """The tensors of a graph, those of one node next to each other; tensor t of node v is `start[v] + port`.

    Attributes:
        start: First tensor of each node, and the number of all at the end.
        elements: Elements, with unknown sizes counted as 1: at least that many.
        nbytes: Bytes, likewise; 0 for strings and handles.
        known: Whether the shape is known.
        floating: Whether the type is floating-point.
        dtype: Per node the index in `dtypes` of the type of its first output.
        dtypes: Names of types.
        used: Per data edge the tensor it carries, each (tensor, consumer) once.
        user: Per data edge its consumer, likewise.
        slot: Per data edge the first input slot it fills, likewise.
    """

    start: Ints
    elements: Floats
    nbytes: Floats
    known: NDArray[np.bool_]
    floating: NDArray[np.bool_]
    dtype: Ints
    dtypes: list[str]
    used: Ints
    user: Ints
    slot: Ints

    def per_node(self, values: Floats) -> Floats:
        """Sum over the outputs of each node."""
        total = np.concatenate(([0.0], np.cumsum(values)))
        result: Floats = total[self.start[1:]] - total[self.start[:-1]]
        return result

    def into(self, values: Floats) -> Floats:
        """Sum over the inputs of each node; a tensor that goes in twice counts once."""
        result: Floats = np.bincount(self.user, weights=values[self.used], minlength=len(self.start) - 1).astype(
            np.float64
        )
        return result


def elements(shape: Shape) -> int:
    """Number of elements, with unknown sizes counted as 1: at least that many. No more than fit in 64 bits."""
    return min(math.prod(1 if size is None else size for size in shape or ()), 2**62)


def tensors_of(shapes: Shapes) -> Tensors:
    """The tensors of a graph."""
    graph = shapes.graph
    counts, sizes, is_known = _elements(shapes)
    counted = np.array(sizes, dtype=np.float64)
    start = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    itemsizes, floating, dtype, dtypes = _types(shapes, counts)
    edges = graph.edges
    data = edges.port != CONTROL
    src, port, dst, slot = edges.src[data], edges.port[data], edges.dst[data], edges.slot[data]
    there = port < np.diff(start)[src]
    tensor = start[src] + port
    # Edges of one consumer lie next to each other, so that (consumer, tensor) is nearly sorted already.
    key = dst.astype(np.int64)[there] * (int(start[-1]) + 1) + tensor[there]
    _, first = np.unique(key, return_index=True)
    return Tensors(
        start=start,
        elements=counted,
        nbytes=counted * np.array(itemsizes, dtype=np.float64),
        known=np.array(is_known, dtype=np.bool_),
        floating=np.array(floating, dtype=np.bool_),
        dtype=np.array(dtype, dtype=np.int32),
        dtypes=dtypes,
        used=tensor[there][first],
        user=dst[there][first],
        slot=slot[there][first],
    )


def _elements(shapes: Shapes) -> tuple[list[int], list[int], list[bool]]:
    counts: list[int] = []
    sizes: list[int] = []
    is_known: list[bool] = []
    seen: dict[int, tuple[list[int], list[bool]]] = {}
    for outputs in shapes.outputs:
        found = seen.get(id(outputs))
        if found is None:
            found = seen[id(outputs)] = [elements(shape) for shape in outputs], [known(shape) for shape in outputs]
        counts.append(len(found[0]))
        sizes += found[0]
        is_known += found[1]
    return counts, sizes, is_known


def _types(shapes: Shapes, counts: list[int]) -> tuple[list[int], list[bool], list[int], list[str]]:
    graph = shapes.graph
    sizes: list[int] = []
    floating: list[bool] = []
    first: list[int] = []
    dtypes: dict[str, int] = {"": 0}
    facts: dict[tuple[int, int], tuple[list[int], list[bool], int]] = {}
    for node, key in enumerate(zip(graph.kind.tolist(), counts, strict=True)):
        fact = facts.get(key)
        if fact is None:
            count = key[1]
            given = output_dtypes(graph.ops[node], graph.attrs[node], count)
            padded = (*given[:count], *[given[-1] if given else ""] * (count - len(given)))
            fact = facts[key] = (
                [itemsize(dtype) if dtype else UNNAMED_ITEMSIZE for dtype in padded],
                [is_float(dtype) for dtype in padded],
                dtypes.setdefault(padded[0] if padded else "", len(dtypes)),
            )
        sizes += fact[0]
        floating += fact[1]
        first.append(fact[2])
    return sizes, floating, first, list(dtypes)
