"""Colours of nodes: equal for nodes that stand in like places of like graphs, whatever they are called and wherever the file has them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from msplit.analysis.colocation import groups
from msplit.core.graph import Floats
from msplit.flatten.flat import FlatGraph


def colours(flat: FlatGraph, weights: Floats | None = None) -> list[int]:
    """A number per node, made of what the node is and of everything in front of it and behind it.

    Three passes of colour refinement (Weisfeiler and Leman, 1968) along the edges instead of as many as there are nodes: to the outputs,
    back, and to the outputs again. Nodes that an automorphism maps onto each other have equal colours, and almost only those: two that
    differ in how their surroundings share nodes several forks away may be taken for equal. Data inputs count by slot, control inputs
    and consumers as sets.

    Near-linear. The numbers hang on no hash seed, and on no stream ids: an annotated graph is like the one it was made of.

    Args:
        flat: The graph.
        weights: What else tells nodes apart, such as their time.
    """
    graph = flat.graph
    number = {op: place for place, op in enumerate(sorted(set(graph.ops)))}
    own = [
        hash(one)
        for one in zip(
            (number[op] for op in graph.ops),
            flat.host.tolist(),
            (flat.region >= 0).tolist(),
            np.zeros(len(graph)).tolist() if weights is None else weights.tolist(),
            strict=True,
        )
    ]
    order = graph.topological.tolist()
    of = groups(flat).of.tolist()
    forward = _refined(_tied(own, of), order, graph.in_start.tolist(), *_columns(flat, inputs=True))
    back = _refined(_tied(forward, of), order[::-1], graph.out_start.tolist(), *_columns(flat, inputs=False))
    return _refined(_tied(back, of), order, graph.in_start.tolist(), *_columns(flat, inputs=True))


def _tied(own: Sequence[int], of: Sequence[int]) -> list[int]:
    """Colours out of a node's own and those of the nodes that must share a stream with it."""
    together: dict[int, int] = {}
    for colour, group in zip(own, of, strict=True):
        if group >= 0:
            together[group] = together.get(group, 0) + hash((colour, 0))
    return [hash((colour, together[group])) if group >= 0 else colour for colour, group in zip(own, of, strict=True)]


def _columns(flat: FlatGraph, *, inputs: bool) -> tuple[list[int], list[tuple[int, int]]]:
    """Per edge, by consumer or by producer, the node at its other end and what kind of edge it is."""
    edges = flat.graph.edges
    if inputs:
        return edges.src.tolist(), list(zip(edges.port.tolist(), edges.slot.tolist(), strict=True))
    order = flat.graph.out_order
    return flat.graph.out_dst.tolist(), list(zip(edges.port[order].tolist(), edges.slot[order].tolist(), strict=True))


def _refined(
    own: Sequence[int],
    order: Sequence[int],
    starts: Sequence[int],
    others: Sequence[int],
    kinds: Sequence[tuple[int, int]],
) -> list[int]:
    """Colours of nodes out of their own and the new ones of their neighbours on one side, which come earlier in the order."""
    colour = list(own)
    for node in order:
        first, last = starts[node], starts[node + 1]
        # The slot of an edge says where it belongs, so that a sum loses nothing and the order of control inputs does not count.
        colour[node] = hash(
            (own[node], sum([hash((colour[others[edge]], kinds[edge])) for edge in range(first, last)]))
        )
    return colour
