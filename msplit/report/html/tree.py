"""What the report's graph shows first, and what opens when: kernels in chains, chains in branches, branches in parts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from msplit.core.dag import Dag, chains, quotient
from msplit.core.graph import Ints

SHOWN = 300
"""Boxes on the first view at most."""

MOST_CHILDREN = 150
"""Boxes that take the place of one that is opened at most."""

_STEP = 2
"""Bands become 2 ** _STEP times as thick in a step."""

KINDS = ("chain", "alike", "part", "piece")
"""Why things are in one box: one after the other; same inputs and same consumers; one stream between two levels; too many to show."""


@dataclass(frozen=True, eq=False)
class Tree:
    """Leaves are 0..leaves-1, in topological order; boxes follow, in no particular order.

    Attributes:
        parent: Per leaf and box the box that it is in, -1 for what the first view shows.
        kind: Per box an index into `KINDS`.
        leaves: Number of leaves.
    """

    parent: Ints
    kind: Ints
    leaves: int


def contract(dag: Dag, stream: Ints, shown: int = SHOWN) -> Tree:
    """Puts leaves into boxes until few enough are left to look at.

    Chains of one stream become boxes in any case. Where that leaves too many, boxes of one stream with the same producers and the same
    consumers (the columns of a recommender) become one, chains of boxes become one, again and again; what is left of a fork and its join is
    a branch. A graph that does not come apart like this (a lattice) is cut across into bands of levels, thicker each time: what is in a
    band on one stream is a part.

    Near-linear: a round is linear, and rounds end when they no longer help.

    Args:
        dag: Dependencies of the leaves, each once, numbered topologically.
        stream: Per leaf its stream; leaves without one have -1.
        shown: What "few enough" means.
    """
    state = _State(dag, stream)
    state.merge(chains(state.dag, state.stream), "chain")
    while len(state.dag) > shown:
        before = len(state.dag)
        state.merge(_twins(state), "alike")
        state.merge(chains(state.dag, state.stream), "chain")
        if len(state.dag) > 0.95 * before:
            break
    if len(state.dag) > shown:
        _bands(state, shown)
    boxes = state.boxes
    _cut(boxes, shown)
    return Tree(np.asarray(boxes.parent, np.int32), np.asarray(boxes.kind, np.int32), len(dag))


class _Boxes:
    """The tree while it grows."""

    def __init__(self, leaves: int) -> None:
        self.parent = [-1] * leaves
        self.kind: list[int] = []

    def add(self, members: list[int], kind: str) -> int:
        """A box around members of the first view."""
        box = len(self.parent)
        self.parent.append(-1)
        self.kind.append(KINDS.index(kind))
        for member in members:
            self.parent[member] = box
        return box


class _State:
    """The graph that is left to look at: per node its stream and its number in the tree."""

    def __init__(self, dag: Dag, stream: Ints) -> None:
        self.dag = dag
        self.stream = stream
        self.number = list(range(len(dag)))
        self.boxes = _Boxes(len(dag))

    def merge(self, leader: Ints, kind: str) -> Ints:
        """Puts nodes that have one leader into a box. Leaders are their own, and come first. Returns per node its new number."""
        heads, inverse = np.unique(leader, return_inverse=True)
        group: Ints = inverse.astype(np.int32)
        members: list[list[int]] = [[] for _ in heads]
        for node, box in enumerate(group.tolist()):
            members[box].append(self.number[node])
        self.number = [found[0] if len(found) == 1 else self.boxes.add(found, kind) for found in members]
        self.stream = self.stream[heads]
        self.dag = quotient(self.dag, group, len(heads))
        return group


def _twins(state: _State) -> Ints:
    """Per node the first with the same producers, the same consumers and the same stream."""
    dag = state.dag
    start, src = dag.start.tolist(), dag.src.tolist()
    out_start, out = (column.tolist() for column in dag.consumers())
    first: dict[tuple[int, tuple[int, ...], tuple[int, ...]], int] = {}
    leader = [
        first.setdefault(
            (stream, tuple(src[start[node] : start[node + 1]]), tuple(out[out_start[node] : out_start[node + 1]])), node
        )
        for node, stream in enumerate(state.stream.tolist())
    ]
    return np.asarray(leader, np.int32)


def _bands(state: _State, shown: int) -> None:
    """Cuts the graph across into bands of levels, and merges what is in one band on one stream.

    Where the streams are in few enough pieces, only what hangs together is merged; else everything is.
    """
    level = _levels(state.dag)
    thickness = 0
    whole = len(np.unique(_components(state, np.zeros_like(level)))) <= shown
    while len(state.dag) > shown and (int(level.max(initial=0)) >> thickness) > 0:
        thickness += _STEP
        band = level >> thickness
        group = state.merge(_components(state, band) if whole else _lanes(state, band), "part")
        lowest = np.full(len(state.dag), np.iinfo(np.int32).max, np.int32)
        np.minimum.at(lowest, group, level)
        level = lowest


def _lanes(state: _State, band: Ints) -> Ints:
    """Per node the first node in its band and on its stream."""
    keys = band.astype(np.int64) * (int(state.stream.max(initial=0)) + 2) + state.stream + 1
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    leader: Ints = first[inverse].astype(np.int32)
    return leader


def _components(state: _State, band: Ints) -> Ints:
    """Per node the first node of its component, over edges within one band and one stream."""
    src, dst = state.dag.src, state.dag.dst()
    inside = (band[src] == band[dst]) & (state.stream[src] == state.stream[dst])
    leader = list(range(len(state.dag)))
    for left, right in zip(src[inside].tolist(), dst[inside].tolist(), strict=True):
        a, b = left, right
        while leader[a] != a:
            leader[a] = a = leader[leader[a]]
        while leader[b] != b:
            leader[b] = b = leader[leader[b]]
        if a != b:
            leader[max(a, b)] = min(a, b)
    for node, above in enumerate(leader):
        # Leaders are smaller than what they lead, so that one pass in order reaches every root.
        leader[node] = leader[above]
    return np.asarray(leader, np.int32)


def _levels(dag: Dag) -> Ints:
    """Longest path in edges from a source; the numbering is topological."""
    start, src = dag.start.tolist(), dag.src.tolist()
    level = [0] * len(dag)
    for node in range(len(dag)):
        producers = src[start[node] : start[node + 1]]
        if producers:
            level[node] = 1 + max([level[producer] for producer in producers])
    return np.asarray(level, np.int32)


def _cut(boxes: _Boxes, shown: int) -> None:
    """Cuts boxes that hold too many things into pieces of neighbours, and the first view too."""
    parent = np.asarray(boxes.parent)
    order = np.argsort(parent, kind="stable")
    starts = np.searchsorted(parent[order], np.arange(-1, len(parent) + 1)).tolist()
    for box in range(-1, len(parent)):
        members = order[starts[box + 1] : starts[box + 2]].tolist()
        most = shown if box < 0 else MOST_CHILDREN
        while len(members) > most:
            size = min(-(-len(members) // most), MOST_CHILDREN)
            pieces = [members[at : at + size] for at in range(0, len(members), size)]
            members = [piece[0] if len(piece) == 1 else boxes.add(piece, "piece") for piece in pieces]
        if box >= 0:
            for member in members:
                boxes.parent[member] = box
