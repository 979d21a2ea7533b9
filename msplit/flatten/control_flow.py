"""Control flow of TensorFlow 1, graphs cut down to what is needed, and attributes of flat nodes.

TensorFlow 1 control flow: back edges, the frames of while loops, and what runs under a Switch.

Which nodes are needed, and graphs cut down to them.

Attributes of a flat graph's nodes, still decoded only when somebody asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.core.dag import DisjointSets
from msplit.core.graph import CONTROL, Edges, Graph, Ints
from msplit.errors import GraphError
from msplit.opset import schema
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
    """Nodes that run under a Switch: from the Switches of one predicate to the Merges that join its branches again.

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


def inside(graph: Graph) -> Callable[[int], str]:
    """Function that says of a node of a graph without back edges what its tensors are inside of, such as "the loop 'while'", else "".

    They exist only while the loop turns, or where the branch of the cond is taken.
    """
    found = all_frames(graph)
    within = conds(graph, frames(graph).outermost)

    def told(node: int) -> str:
        frame, cond = found.inside.get(node, 0), int(within.outermost[node])
        frame = found.parent[frame] if graph.ops[node] in EXIT else frame
        if frame:
            return f"the loop {found.names[frame]!r}"
        leaves = graph.ops[node] in MERGE and not (within.outermost[graph.successors(node)] == cond).any()
        return "" if cond < 0 or leaves else f"the cond of {within.names[cond]!r}"

    return told


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


_NO_EFFECT, _PARAMETERS = ops_with("no effect"), ops_with("parameter")


def is_stateful(op: str) -> bool:
    """True if TensorFlow calls an op stateful. Unknown ops are not, nor are calls of functions by their name."""
    info = schema.lookup(op)
    # TensorFlow says so of parameters and results only to keep them from being merged.
    return info is not None and info.stateful and op not in _PARAMETERS


def has_effect(op: str) -> bool:
    """True if a node of this op does something though nobody uses its outputs. Unknown ops are taken to have none."""
    return is_stateful(op) and op not in _NO_EFFECT


def restricted(edges: Edges, keep: NDArray[np.bool_]) -> tuple[Edges, Ints]:
    """Edges between kept nodes in the numbering of those nodes, and that numbering (-1 for nodes that are left out)."""
    number = np.where(keep, np.cumsum(keep) - 1, -1).astype(np.int32)
    inside = edges.where(keep[edges.src] & keep[edges.dst])
    return replace(inside, src=number[inside.src], dst=number[inside.dst]), number


def without_inputs(edges: Edges, nodes: Sequence[int], count: int) -> Edges:
    """Edges but those into some nodes."""
    cut = np.zeros(count, dtype=np.bool_)
    cut[list(nodes)] = True
    if not cut[edges.dst].any():
        return edges
    return edges.where(~cut[edges.dst])


def fed_entirely(graph: Graph, fed: Iterable[tuple[int, int]], roots: Iterable[tuple[int, int]]) -> list[int]:
    """Nodes that do not run because all that is needed of them is fed; nothing in front of them runs for them.

    Args:
        fed: (node, port) of fed tensors.
        roots: (node, port) of what is fetched; port CONTROL for a node that just runs.
    """
    given = set(fed)
    # A node without inputs has nothing in front of it.
    nodes = {node for node, _ in given if graph.in_start[node] != graph.in_start[node + 1]}
    if not nodes:
        return []
    edges = graph.edges
    crossing = np.zeros(len(edges), np.bool_)
    for node, port in given:
        out = graph.out_edges(node)
        crossing[out[edges.port[out] == port]] = True
    without = replace(graph, edges=edges.where(~crossing))
    runs = without.ancestors([node for node, port in roots if (node, port) not in given])
    return sorted(node for node in nodes if not runs[node])


_COLOCATION = "_class"
_LOCATION = "loc:@"


class PickedAttrs(Sequence[Mapping[str, Any]]):
    """The attributes of nodes picked from several sources; `which` has per node its source, `index` its place there."""

    def __init__(self, sources: Sequence[Sequence[Mapping[str, Any]]], which: Ints, index: Ints) -> None:
        self._sources = sources
        self._which = which
        self._index = index

    def __len__(self) -> int:
        return len(self._which)

    def __getitem__(self, index: Any) -> Any:  # of an int or a slice, as of any sequence
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        source: Sequence[Mapping[str, Any]] = self._sources[int(self._which[index])]
        return source[int(self._index[index])]

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        sources = self._sources
        for which, index in zip(self._which.tolist(), self._index.tolist(), strict=True):
            yield sources[which][index]

    def kinds(self) -> list[int]:
        """Per node a number; nodes of the same number have the same op and the same attributes, but for the values of constants."""
        kinds_of: list[Sequence[int]] = []
        shifts = []
        shift = 0
        for source in self._sources:
            kinds = getattr(source, "kinds", None)
            kinds_of.append(kinds() if kinds is not None else range(len(source)))
            shifts.append(shift)
            shift += max(kinds_of[-1], default=-1) + 1
        return [
            kinds_of[which][index] + shifts[which]
            for which, index in zip(self._which.tolist(), self._index.tolist(), strict=True)
        ]

    def picked(self, nodes: Ints) -> PickedAttrs:
        """The attributes of some of the nodes."""
        return PickedAttrs(self._sources, self._which[nodes], self._index[nodes])


class CalledAttrs(Sequence[Mapping[str, Any]]):
    """The attributes of a function's body at one place where it is called.

    Args:
        body: Attributes of the body's nodes.
        names: The body's nodes by name.
        prefix: What the call puts in front of a node's name, with its "/".
        arguments: Attributes that the function is instantiated with.
    """

    def __init__(
        self, body: Sequence[Mapping[str, Any]], names: Mapping[str, int], prefix: str, arguments: Mapping[str, Any]
    ) -> None:
        self._body = body
        self._names = names
        self._prefix = prefix
        self._arguments = arguments

    def __len__(self) -> int:
        return len(self._body)

    def __getitem__(self, index: Any) -> Any:  # of an int or a slice, as of any sequence
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return _CalledNode(self._body[index], self)

    def kinds(self) -> Sequence[int]:
        """Those of the body: what a call makes of a value hangs on the value alone."""
        kinds = getattr(self._body, "kinds", None)
        return range(len(self)) if kinds is None else kinds()

    def translate(self, key: str, value: Any) -> Any:
        """A value as it reads in the flat graph: other nodes under their flat names, type parameters filled in."""
        if key == _COLOCATION and isinstance(value, tuple):
            return tuple(map(self._colocation, value))
        if key == "frame_name" and isinstance(value, str):
            # Each call runs its loops in frames of its own.
            return self._prefix + value
        if isinstance(value, str) and value in self._arguments:
            return self._arguments[value]
        return value

    def _colocation(self, item: Any) -> Any:
        if isinstance(item, str) and item.startswith(_LOCATION) and item.removeprefix(_LOCATION) in self._names:
            return f"{_LOCATION}{self._prefix}{item.removeprefix(_LOCATION)}"
        return item


class _CalledNode(Mapping[str, Any]):
    __slots__ = ("_attrs", "_call")

    def __init__(self, attrs: Mapping[str, Any], call: CalledAttrs) -> None:
        self._attrs = attrs
        self._call = call

    def __getitem__(self, key: str) -> Any:
        return self._call.translate(key, self._attrs[key])

    def get(self, key: str, default: Any = None) -> Any:
        """The value of an attribute, or a default."""
        return self[key] if key in self._attrs else default

    def __contains__(self, key: object) -> bool:
        return key in self._attrs

    def __iter__(self) -> Iterator[str]:
        return iter(self._attrs)

    def __len__(self) -> int:
        return len(self._attrs)

    def __repr__(self) -> str:
        return repr(dict(self))
