"""TensorFlow 1 control flow: back edges, the frames of while loops, and what runs under a Switch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from msplit.core.graph import CONTROL, Edges, Graph, Ints
from msplit.core.union_find import DisjointSets
from msplit.errors import GraphError
from msplit.opset.traits import ENTER, EXIT, MERGE, NEXT, SWITCH, ops_with

_MERGE = MERGE | ops_with("xla merge")


@dataclass(frozen=True, eq=False)
class Nested:
    """Nodes inside loops or conds.

    Attributes:
        outermost: Per node the index in `names` of the outermost one it is in, -1 where it is in none.
        names: Frame names, or names of the predicates.
    """

    outermost: Ints
    names: Sequence[str]


def cut_back_edges(graph: Graph) -> tuple[Edges, Edges]:
    """Splits edges into those of a graph without loops and the back edges of while loops (NextIteration -> Merge)."""
    edges, leaves = graph.edges, graph.with_ops(NEXT)
    if not leaves.any():
        return edges, edges.where(np.zeros(len(edges), np.bool_))
    back = leaves[edges.src] & graph.with_ops(_MERGE)[edges.dst] & (edges.port != CONTROL)
    return edges.where(~back), edges.where(back)


def check_acyclic(graph: Graph, where: str) -> None:
    """Refuses a graph that is no DAG.

    Raises:
        GraphError: Names one cycle.
    """
    behind = graph.level < 0
    if not behind.any():
        return
    # Every node that is left waits for another one that is left: walking backwards ends up in a cycle.
    node = int(np.flatnonzero(behind)[0])
    seen: dict[int, int] = {}
    path: list[int] = []
    while node not in seen:
        seen[node] = len(path)
        path.append(node)
        sources = graph.predecessors(node)
        node = int(sources[behind[sources]][0])
    cycle = [graph.names[n] for n in reversed(path[seen[node] :])]
    shown = [*cycle[:8], "…"] if len(cycle) > 8 else cycle
    raise GraphError(
        [f"a cycle of {len(cycle)} nodes that is no while loop: {' -> '.join([*shown, cycle[0]])}"], where=where
    )


@dataclass(frozen=True, eq=False)
class Frames:
    """The frames of while loops, numbered from 1; 0 is no frame.

    Attributes:
        inside: Node -> the innermost frame that it is in, from Enter to Exit; nodes in none are left out. Producers come first.
        parent: Per frame the one around it, which has a lower number.
        depth: Per frame how many it is inside of, itself included.
        names: Per frame its name.
    """

    inside: Mapping[int, int]
    parent: Sequence[int]
    depth: Sequence[int]
    names: Sequence[str]


def all_frames(graph: Graph) -> Frames:
    """The frames of while loops of a graph without back edges.

    A frame is known by its name within the frame around it, as the executor knows it. Nodes outside every frame that a frame
    reads are not part of it: they pass through an Enter first.
    """
    parent, depth, names = [0], [0], [""]
    known: dict[tuple[int, str], int] = {}
    within: dict[int, int] = {}
    after: dict[int, int] = {}
    for node in _downstream(graph, np.flatnonzero(graph.with_ops(ENTER)).tolist()):
        around = [after.get(source, 0) for source in graph.predecessors(node).tolist()]
        # Inputs from frames of equal depth are nothing that runs: the first counts, wherever the file has the frames.
        inside = max(around, key=depth.__getitem__, default=0)
        op = graph.ops[node]
        if op in ENTER:
            key = inside, str(graph.attrs[node].get("frame_name", ""))
            if key not in known:
                known[key] = len(parent)
                parent.append(inside)
                depth.append(depth[inside] + 1)
                names.append(key[1])
            inside = known[key]
        if inside:
            within[node] = inside
            after[node] = parent[inside] if op in EXIT else inside
    return Frames(within, parent, depth, names)


def frames(graph: Graph) -> Nested:
    """The outermost frames of while loops, with everything nested in them."""
    found = all_frames(graph)
    top, names = [-1], list[str]()
    for frame in range(1, len(found.parent)):
        if found.parent[frame]:
            top.append(top[found.parent[frame]])
        else:
            top.append(len(names))
            names.append(found.names[frame])
    outermost = np.full(len(graph), -1, np.int32)
    for node, frame in found.inside.items():
        outermost[node] = top[frame]
    return Nested(outermost, names)


def conds(graph: Graph, in_frame: Ints) -> Nested:
    """What runs under a Switch: from the Switches of one predicate to the Merges that join its branches again.

    Switches and Merges of while loops are the loops' own; a loop under a Switch is part of the cond. Conds of one predicate are
    one only where edges inside them join them: many conds of a training graph ask for the same `is_training`. `in_frame` has per
    node its outermost frame, -1 outside of every loop.
    """
    names: list[str] = []
    outermost = np.full(len(graph), -1, np.int32)
    switches = np.flatnonzero(graph.with_ops(SWITCH) & (in_frame < 0)).tolist()
    if not switches:
        return Nested(outermost, names)
    parent, top, depth = [0], [-1], [0]
    known: dict[tuple[int, tuple[int, int]], int] = {}
    context_after: dict[int, int] = {}
    for node in _downstream(graph, switches):
        sources = dict.fromkeys(graph.predecessors(node).tolist())
        around = [context_after[source] for source in sources if source in context_after]
        context = max(around, key=depth.__getitem__, default=0)
        op = graph.ops[node]
        after = context
        if in_frame[node] < 0 and op in SWITCH and len(inputs := graph.inputs(node)) > 1:
            predicate = context, _named(graph, inputs[1])
            if predicate not in known:
                known[predicate] = len(parent)
                parent.append(context)
                depth.append(depth[context] + 1)
                if context:
                    top.append(top[context])
                else:
                    top.append(len(names))
                    names.append(graph.names[predicate[1][0]])
            context = after = known[predicate]
        elif in_frame[node] < 0 and op in _MERGE and context:
            # What an unbalanced Merge joins ends with the outermost of its branches.
            context = min(around, key=depth.__getitem__)
            after = parent[context]
        if context:
            outermost[node] = top[context]
        if after:
            context_after[node] = after
    return _connected(graph, outermost, names, np.array(sorted(context_after), np.int32))


def _named(graph: Graph, tensor: tuple[int, int]) -> tuple[int, int]:
    """A predicate without the Identity that every cond makes of it."""
    while graph.ops[tensor[0]] == "Identity" and (inputs := graph.inputs(tensor[0])):
        tensor = inputs[0]
    return tensor


def _connected(graph: Graph, outermost: Ints, names: Sequence[str], stays: Ints) -> Nested:
    """Splits conds into those parts that edges join; `stays` are the nodes whose consumers are inside of a cond too."""
    edges = graph.edges
    leads_inside = np.zeros(len(graph), np.bool_)
    leads_inside[stays] = True
    joins = leads_inside[edges.src] & (outermost[edges.src] >= 0) & (outermost[edges.src] == outermost[edges.dst])
    members = np.flatnonzero(outermost >= 0).tolist()
    parts = DisjointSets(len(graph))
    for source, target in zip(edges.src[joins].tolist(), edges.dst[joins].tolist(), strict=True):
        parts.join(source, target)
    number: dict[int, int] = {}
    result = np.full(len(graph), -1, np.int32)
    split_names: list[str] = []
    for node in members:
        first = parts.find(node)
        if first not in number:
            number[first] = len(split_names)
            split_names.append(names[int(outermost[node])])
        result[node] = number[first]
    return Nested(result, split_names)


def _downstream(graph: Graph, roots: Sequence[int]) -> list[int]:
    """Nodes that some nodes reach, themselves included, producers first."""
    if not roots:
        return []  # most graphs; sorting a large one takes a while
    order: list[int] = graph.topological[graph.descendants(roots)[graph.topological]].tolist()
    return order
