"""Whether a path leads from one node to another, for a few nodes of a large graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from msplit.core.graph import CONTROL, Edges, Graph, Ints
from msplit.flatten.control_flow import Frames, all_frames
from msplit.opset.traits import EXIT, ops_with

_AT_ONCE = 512
"""Nodes whose ancestors are found in one pass over the graph: a set of them is an integer of so many bits."""

_SWITCHES = ops_with("switch")


class Paths:
    """Reachability between some nodes. Each pass over the graph answers for `_AT_ONCE` of them.

    A path out of a while loop of TensorFlow 1 may lead through its back edges. Every turn of the loop is then over before what the path
    leads to, if the variable that it leaves by is handed on from turn to turn: what a turn made of it waits for the turn before. A path
    never leads through the back edge of a loop from outside of it, for the loop may have no turns, and none ends inside of the loop
    whose back edge it takes, for the first turn does not wait for it.

    Back edges, NextIteration -> Merge, are those that were cut out of the loops of the graph.
    """

    def __init__(self, graph: Graph, nodes: Sequence[int], back_edges: Edges | None = None) -> None:
        self._behind: dict[int, set[int]] = {}
        wanted = list(dict.fromkeys(nodes))
        if not wanted:
            return
        leaving, frames = _leaving(graph, back_edges) if back_edges is not None and len(back_edges) else ([], None)
        self._behind = _above(graph, wanted, wanted, leaving, frames)

    def between(self, first: int, last: int) -> bool:
        """Whether a path leads from the first to the last."""
        return first in self._behind[last]


def _above(
    graph: Graph,
    sources: Sequence[int],
    asked: Sequence[int],
    leaving: Sequence[tuple[int, int, int]] = (),
    frames: Frames | None = None,
) -> dict[int, set[int]]:
    """Per node asked for the sources from which a path leads to it.

    `leaving` are (NextIteration, Exit, frame): what is in the frame and before the first is before the second, too.
    """
    start, src = graph.in_start.tolist(), graph.edges.src.tolist()
    order = _order(graph, leaving)
    ends: dict[int, list[tuple[int, int]]] = {}
    if len(order) == len(graph):
        for last, end, frame in leaving:
            ends.setdefault(end, []).append((last, frame))
    else:  # such loops are no while loops: only what their edges say holds
        order = graph.topological.tolist()
    behind: dict[int, set[int]] = {node: set() for node in asked}
    for low in range(0, len(sources), _AT_ONCE):
        part = sources[low : low + _AT_ONCE]
        bit = {node: 1 << place for place, node in enumerate(part)}
        inside = _inside(frames, bit) if frames is not None and ends else []
        above = [0] * len(graph)
        for node in order:
            found = 0
            for producer in src[start[node] : start[node + 1]]:
                found |= above[producer]
            for last, frame in ends.get(node, ()):
                found |= above[last] & inside[frame]
            if found and node in behind:
                behind[node].update(other for other in part if found & bit[other])
            above[node] = found | bit.get(node, 0)
    return behind


def _order(graph: Graph, leaving: Sequence[tuple[int, int, int]]) -> list[int]:
    """A topological order in which each Exit is behind the NextIteration that it waits for."""
    order: list[int] = graph.topological.tolist()
    if not leaving:
        return order
    edges = graph.edges
    none = np.full(len(leaving), CONTROL, np.int32)
    last, end = (np.asarray([entry[place] for entry in leaving], np.int32) for place in (0, 1))
    joined = Edges.of(
        np.append(edges.src, last), np.append(edges.port, none), np.append(edges.dst, end), np.append(edges.slot, none)
    )
    wider: list[int] = Graph(graph.names, graph.ops, graph.devices, graph.attrs, joined).topological.tolist()
    return wider


def _inside(frames: Frames, bit: Mapping[int, int]) -> list[int]:
    """Per frame the bits of the nodes in it, those in frames within it included."""
    bits = [0] * len(frames.parent)
    for node, one in bit.items():
        bits[frames.inside.get(node, 0)] |= one
    for frame in range(len(bits) - 1, 0, -1):  # the frame around has a lower number
        bits[frames.parent[frame]] |= bits[frame]
    return bits


def _leaving(graph: Graph, back_edges: Edges) -> tuple[list[tuple[int, int, int]], Frames]:
    """(NextIteration, Exit, frame) of the loop variables whose value in one turn is made of that of the turn before; the frames."""
    frames = all_frames(graph)
    pairs = [
        (last, merge, frames.inside[merge])
        for last, merge in zip(back_edges.src.tolist(), back_edges.dst.tolist(), strict=True)
        if merge in frames.inside
    ]
    merges = list(dict.fromkeys(merge for _, merge, _ in pairs))
    made_of = _above(graph, merges, list(dict.fromkeys(last for last, _, _ in pairs)))
    carried = [
        (last, end, frame)
        for last, merge, frame in pairs
        if merge in made_of[last]
        for switch in _consumers(graph, merge, _SWITCHES)
        for end in _consumers(graph, switch, EXIT)
    ]
    return carried, frames


def _consumers(graph: Graph, node: int, ops: frozenset[str]) -> list[int]:
    out: Ints = graph.edges.dst[graph.out_edges(node)][graph.edges.slot[graph.out_edges(node)] == 0]
    return [consumer for consumer in out.tolist() if graph.ops[consumer] in ops]
