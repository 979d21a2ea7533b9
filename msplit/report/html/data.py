"""Data that the page's script works on: the graph, its tree of boxes and the simulated run, as columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from msplit.core.dag import Dag, chains, longest, quotient
from msplit.core.graph import CONTROL, Assignment, Ints
from msplit.cost.costs import Costs
from msplit.escape import visible
from msplit.flatten.flat import FlatGraph
from msplit.report.document import dimensions
from msplit.schedule.judge import Prediction
from msplit.schedule.problem import components
from msplit.shapes import Shapes


@dataclass(frozen=True, eq=False)
class Leaves:
    """Parts that the graph is drawn of: kernels in the order of their blocks, and joints.

    Attributes:
        node: Per leaf its node in the flat graph, -1 for a joint.
        stream: Its stream id, -1 for a joint.
        start_us: Its beginning in the simulated step, 0 for a joint.
        time_us: Its duration there.
        dag: Dependencies.
        first: Per block its first leaf.
        last: Per block its last leaf.
    """

    node: Ints
    stream: Ints
    start_us: np.ndarray
    time_us: np.ndarray
    dag: Dag
    first: Ints
    last: Ints

    @staticmethod
    def of(prediction: Prediction) -> Leaves:
        """Takes a prediction apart."""
        problem, simulation = prediction.problem, prediction.simulation
        kernels = np.diff(prediction.start)
        size = np.maximum(kernels, 1)
        end = np.cumsum(size)
        first = (end - size).astype(np.int32)
        block = np.repeat(np.arange(len(problem)), size)
        node = np.full(int(end[-1]) if len(end) else 0, -1, np.int32)
        node[kernels[block] > 0] = prediction.node
        work = np.where(node >= 0, prediction.kernel_us[node], 0.0)
        before = np.cumsum(work) - work
        # While a block shares the GPU, all its kernels take longer by one factor.
        whole = np.maximum(problem.time_us, 1e-12)
        factor = np.where(kernels > 0, (simulation.end_us - simulation.start_us) / whole, 0.0)
        begin = np.where(kernels > 0, simulation.start_us, 0.0)
        inner = before - before[first][block] if len(node) else before
        lane = prediction.plan.stream
        named = np.where(lane >= 0, np.append(prediction.lanes, -1)[lane], -1)
        last = (end - 1).astype(np.int32)
        inside = np.flatnonzero(block[1:] == block[:-1]) if len(block) else np.empty(0, np.int64)
        src = np.concatenate([inside, last[problem.dag.src]])
        dst = np.concatenate([inside + 1, first[problem.dag.dst()]])
        return Leaves(
            node=node,
            stream=named[block].astype(np.int32),
            start_us=begin[block] + inner * factor[block],
            time_us=work * factor[block],
            dag=Dag.of(len(node), src, dst),
            first=first,
            last=last,
        )


def home(flat: FlatGraph, leaves: Leaves) -> Ints:
    """Per node the leaf that it belongs to: its own, else that of its first consumer, else of its last producer; -1 for none."""
    graph = flat.graph
    found = np.full(len(flat), -1, np.int32)
    kernels = np.flatnonzero(leaves.node >= 0)
    found[leaves.node[kernels]] = kernels
    order = graph.topological
    result = found.tolist()
    for nodes, starts, others in (
        (order[::-1], graph.out_start.tolist(), graph.out_dst.tolist()),
        (order, graph.in_start.tolist(), graph.edges.src.tolist()),
    ):
        for node in nodes.tolist():
            if result[node] < 0:
                result[node] = next((result[o] for o in others[starts[node] : starts[node + 1]] if result[o] >= 0), -1)
    return np.asarray(result, np.int32)


def columns(
    flat: FlatGraph,
    costs: Costs,
    prediction: Prediction,
    assignment: Assignment | None,
    shapes: Shapes | None = None,
    critical: Ints | None = None,
) -> dict[str, Any]:
    """The graph for the page. Numbers are rounded to what it shows."""
    leaves = Leaves.of(prediction)
    tree = contract(leaves.dag, leaves.stream)
    graph = flat.graph
    ops: dict[str, int] = {}
    edges = graph.edges
    return {
        "nodes": {
            "name": list(map(visible, graph.names)),
            "op": [ops.setdefault(op, len(ops)) for op in graph.ops],
            "ops": list(map(visible, ops)),
            "stream": prediction.ids.tolist(),
            "time": rounded(prediction.kernel_us),
            "flops": _whole(costs.flops),
            "bytes": _whole(costs.bytes),
            "share": rounded(costs.share),
            "known": costs.known.astype(int).tolist(),
            "host": flat.host.astype(int).tolist(),
            "reason": assignment.reason.tolist() if assignment is not None else [],
            "home": home(flat, leaves).tolist(),
            **_results(flat, shapes),
        },
        "critical": [] if critical is None else critical[prediction.kernel_us[critical] > 0].tolist(),
        "reasons": [list(map(visible, reason)) for reason in assignment.reasons] if assignment is not None else [],
        "edges": {
            "src": edges.src.tolist(),
            "dst": edges.dst.tolist(),
            "control": np.flatnonzero(edges.port == CONTROL).tolist(),
        },
        "leaves": {
            "node": leaves.node.tolist(),
            "stream": leaves.stream.tolist(),
            "start": rounded(leaves.start_us),
            "time": rounded(leaves.time_us),
        },
        "links": {"src": leaves.dag.src.tolist(), "dst": leaves.dag.dst().tolist()},
        "waits": {
            "on": leaves.last[prediction.plan.wait_on].tolist(),
            "by": leaves.first[prediction.plan.wait_node].tolist(),
        },
        "tree": {"parent": tree.parent.tolist(), "kind": tree.kind.tolist(), "kinds": list(KINDS)},
        "makespan": round(prediction.makespan_us, 3),
        "lanes": prediction.lanes.tolist(),
    }


_MOST_RESULTS = 8
"""Outputs of a node whose types and shapes the page tells."""


def _results(flat: FlatGraph, shapes: Shapes | None) -> dict[str, Any]:
    """Types and shapes of what each node gives, as numbers in a list of all that there are."""
    if shapes is None:
        return {"result": [], "results": []}
    texts: dict[str, int] = {}
    numbers = []
    for node in range(len(flat)):
        outputs = shapes.outputs[node]
        lines = [
            f"{shapes.dtype(node, port)} {dimensions(shape)}".strip()
            for port, shape in enumerate(outputs[:_MOST_RESULTS])
        ]
        if len(outputs) > _MOST_RESULTS:
            lines.append(f"and {len(outputs) - _MOST_RESULTS} more")
        numbers.append(texts.setdefault("; ".join(lines), len(texts)))
    return {"result": numbers, "results": list(map(visible, texts))}


def rounded(values: np.ndarray) -> Sequence[float]:
    """To what the page shows; whole numbers as integers, which take less room."""
    return [int(value) if value.is_integer() else value for value in np.round(values, 3).tolist()]


def _whole(values: np.ndarray) -> Sequence[int]:
    return [int(value) for value in np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0).tolist()]


SHOWN = 300
"""Boxes on the first view at most."""

MOST_CHILDREN = 150
"""Boxes that take the place of one that is opened at most."""

_STEP = 2
"""Bands become 2 ** _STEP times as thick in a step."""

KINDS = ("chain", "alike", "part", "piece")
"""Kinds of boxes, by what things in one share: one after the other; same inputs and consumers; one stream between two levels; too many."""


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
        shown: Most boxes that are few enough.
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
    _cut(state, shown)
    return Tree(np.asarray(state.parent, np.int32), np.asarray(state.kind, np.int32), len(dag))


class _State:
    """The tree while it grows, and the graph that is left to look at: per node its stream and its number in the tree."""

    def __init__(self, dag: Dag, stream: Ints) -> None:
        self.dag, self.stream, self.number = dag, stream, list(range(len(dag)))
        self.parent, self.kind = [-1] * len(dag), list[int]()

    def add(self, members: list[int], kind: str) -> int:
        """A box around members of the first view."""
        box = len(self.parent)
        self.parent.append(-1)
        self.kind.append(KINDS.index(kind))
        for member in members:
            self.parent[member] = box
        return box

    def merge(self, leader: Ints, kind: str) -> Ints:
        """Puts nodes that have one leader into a box. Leaders are their own, and come first. Returns per node its new number."""
        heads, inverse = np.unique(leader, return_inverse=True)
        group: Ints = inverse.astype(np.int32)
        members: list[list[int]] = [[] for _ in heads]
        for node, box in enumerate(group.tolist()):
            members[box].append(self.number[node])
        self.number = [found[0] if len(found) == 1 else self.add(found, kind) for found in members]
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
    return components(len(state.dag), src[inside], dst[inside])


def _levels(dag: Dag) -> Ints:
    """Longest path in edges from a source; the numbering is topological."""
    return (longest(np.ones(len(dag)), np.arange(len(dag), dtype=np.int32), *dag.consumers()) - 1).astype(np.int32)


def _cut(boxes: _State, shown: int) -> None:
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
