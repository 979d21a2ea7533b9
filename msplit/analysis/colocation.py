"""Nodes that must share a stream, and what shows it: paths between nodes, and users of one resource that nothing orders.

Constraints between nodes that must share a stream: colocation classes, regions, variable handles with their users, unordered writes.

Whether a path leads from one node to another, for a few nodes of a large graph.

Who uses the same variable, table or array, and which of them nothing orders.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np

from msplit.core.dag import DisjointSets
from msplit.core.graph import CONTROL, Edges, Graph, Ints
from msplit.flatten.control_flow import Frames, all_frames
from msplit.flatten.flat import FlatGraph
from msplit.opset import schema
from msplit.opset.traits import EXIT, ops_with

_AT_ONCE = 512
"""Nodes whose ancestors are found in one pass over the graph: a set of them is an integer of so many bits."""

_SWITCHES = ops_with("switch")


def paths(graph: Graph, nodes: Iterable[int], back_edges: Edges | None = None) -> dict[int, set[int]]:
    """Per node of some those of the others from which a path leads to it. Each pass over the graph answers for `_AT_ONCE` of them.

    A path out of a while loop of TensorFlow 1 may lead through its back edges. Every turn of the loop is then over before what the path
    leads to, if the variable that it leaves by is handed on from turn to turn: what a turn made of it waits for the turn before. A path
    never leads through the back edge of a loop from outside of it, for the loop may have no turns, and none ends inside of the loop
    whose back edge it takes, for the first turn does not wait for it.

    Back edges, NextIteration -> Merge, are those that were cut out of the loops of the graph.
    """
    wanted = list(dict.fromkeys(nodes))
    leaving, frames = (
        _leaving(graph, back_edges) if wanted and back_edges is not None and len(back_edges) else ([], None)
    )
    return _above(graph, wanted, wanted, leaving, frames) if wanted else {}


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


_READERS, _PASSING = ops_with("reads state"), ops_with("hands on a handle")


def users(flat: FlatGraph) -> dict[str, dict[int, bool]]:
    """By variable, table or array the nodes that use it, and whether they may write. Handles of one shared name are one.

    Ops that msplit does not know may write.
    """
    graph = flat.graph
    kinds = {op: _kind(op) for op in dict.fromkeys(graph.ops)}
    found: dict[str, dict[int, bool]] = {}
    for node, op in enumerate(graph.ops):
        kind = kinds[op]
        if kind is None:
            continue
        shared = graph.attrs[node].get("shared_name")
        name = shared if isinstance(shared, str) and shared else graph.names[node]
        known = found.setdefault(name, {})
        waiting, seen = [node], {node}
        while waiting:
            producer = waiting.pop()
            for edge in graph.out_edges(producer).tolist():
                user, slot = int(graph.edges.dst[edge]), int(graph.edges.slot[edge])
                if slot == CONTROL or (producer == node and not _is_handle(op, int(graph.edges.port[edge]))):
                    continue
                if graph.ops[user] not in _PASSING:
                    known[user] = known.get(user, False) or _writes(flat, user, slot, kind)
                    continue
                hands_on = kind == "resource" or graph.ops[user].startswith("Ref")
                if hands_on and user not in seen:
                    seen.add(user)
                    waiting.append(user)
                elif not hands_on:
                    known.setdefault(user, False)  # an Identity of a reference reads it
    return found


def unordered(before: Mapping[int, Set[int]], known: Mapping[int, bool], apart: Sequence[int]) -> list[tuple[int, int]]:
    """(writer, user) of the pairs that no path orders, either way.

    Args:
        known: The users, and whether they may write.
        apart: By node what it must share with another for the two not to count: its stream, or its group.
    """
    found = []
    done: set[int] = set()
    for writer in (node for node, writes in known.items() if writes):
        done.add(writer)
        for other in known:
            if other in done or apart[other] == apart[writer]:
                continue
            if writer not in before[other] and other not in before[writer]:
                found.append((writer, other))
    return found


def _kind(op: str) -> str | None:
    """The kind of a value that an op makes: a handle ("resource") or a reference ("ref") that it was not given."""
    info = schema.lookup(op)
    if op == "KvVarHandleOp":
        return "resource"
    if info is None or not info.stateful:
        return None
    if any(argument.dtype == "resource" or argument.is_ref for argument in info.inputs):
        return None
    if any(argument.is_ref for argument in info.outputs):
        return "ref"
    return "resource" if any(argument.dtype == "resource" for argument in info.outputs) else None


def _is_handle(op: str, port: int) -> bool:
    """True if an output of an op that makes a handle is the handle: the flow of a TensorArray is a number."""
    info = schema.lookup(op)
    if info is None or port >= len(info.outputs):
        return True
    return info.outputs[port].dtype == "resource" or info.outputs[port].is_ref


def _writes(flat: FlatGraph, user: int, slot: int, kind: str) -> bool:
    op = flat.graph.ops[user]
    if op in _READERS:
        return False
    info = schema.lookup(op)
    if kind == "ref" and info is not None:
        # An op that does not ask for the reference gets the value.
        dtypes = schema.input_dtypes(op, flat.graph.attrs[user])
        return bool(dtypes and slot < len(dtypes) and (dtypes[slot] or "").endswith("_ref"))
    return True


CLASS = "_class"
LOCATION = "loc:@"
_HANDLES = ops_with("handle")
_FORWARDS = ops_with("colocated")


@dataclass(frozen=True, eq=False)
class ColocationGroups:
    """Nodes that belong together.

    Attributes:
        of: Per node the number of its group, or -1 for a node on its own. Groups are numbered by their lowest node.
        count: Number of groups; each has two nodes or more.
    """

    of: Ints
    count: int

    def members(self) -> list[Ints]:
        """The nodes of each group, ascending."""
        grouped = np.flatnonzero(self.of >= 0)
        order = grouped[np.argsort(self.of[grouped], kind="stable")].astype(np.int32)
        return np.split(order, np.searchsorted(self.of[order], np.arange(1, self.count))) if self.count else []


def groups(
    flat: FlatGraph, *, classes: bool = True, regions: bool = True, handles: bool = True, state: bool = True
) -> ColocationGroups:
    """Closes all that ties nodes together, transitively.

    Tied are: by `classes` the nodes of one ``_class: loc:@x`` with each other and with node ``x`` (also where ``x`` itself is not in the
    graph any more), by `regions` those of one region, by `handles` a variable's handle with the nodes that take it, and by `state` what
    writes a variable, table or array with its other users that no path orders: on two streams they would race.
    """
    pairs = _classes(flat) if classes else []
    pairs += _regions(flat) if regions else []
    pairs += _handle_users(flat) if handles else []
    of = _closed(flat, pairs)
    if state and (racing := _racing(flat, of)):
        of = _closed(flat, pairs + racing)
    return ColocationGroups(of, int(of.max(initial=-1)) + 1)


def _closed(flat: FlatGraph, pairs: list[tuple[int, int]]) -> Ints:
    """Per node the number of its group, or -1."""
    tied = sorted({node for pair in pairs for node in pair})
    place = {node: number for number, node in enumerate(tied)}
    sets = DisjointSets(len(tied))
    for first, second in pairs:
        sets.join(place[first], place[second])
    number = np.unique([sets.find(node) for node in range(len(tied))], return_inverse=True)[1]
    of = np.full(len(flat), -1, np.int32)
    of[tied] = number
    return of


def _racing(flat: FlatGraph, of: Ints) -> list[tuple[int, int]]:
    """Pairs of users of one state on the GPU, of which one writes, that are in no group together and that nothing orders."""
    group = np.where(of >= 0, of, len(flat) + np.arange(len(flat))).tolist()
    known = [
        {node: writes for node, writes in of_one.items() if not flat.host[node]} for of_one in users(flat).values()
    ]
    apart = [of_one for of_one in known if any(of_one.values()) and len({group[node] for node in of_one}) > 1]
    place = np.empty(len(flat), np.int32)
    place[flat.graph.topological] = np.arange(len(flat), dtype=np.int32)
    open_ = [of_one for of_one in apart if not _chained(flat, sorted(of_one, key=place.__getitem__))]
    before = paths(flat.graph, [node for of_one in open_ for node in of_one], flat.back_edges)
    return [pair for of_one in open_ for pair in unordered(before, of_one, group)]


def _chained(flat: FlatGraph, nodes: list[int]) -> bool:
    """True if an edge leads from each node to the next, as the flow of a TensorArray does: then all are ordered, and nothing is to be
    searched."""
    dst = flat.graph.edges.dst
    return all(after in dst[flat.graph.out_edges(node)] for node, after in itertools.pairwise(nodes))


def _classes(flat: FlatGraph) -> list[tuple[int, int]]:
    graph = flat.graph
    first: dict[str, int] = {}
    pairs = []
    for node in graph.nodes_with(CLASS):
        values = graph.attrs[node].get(CLASS)
        for value in values if isinstance(values, tuple) else (values,):
            if isinstance(value, str) and value.startswith(LOCATION):
                name = value[len(LOCATION) :]
                leader = first.setdefault(name, graph.index.get(name, node))
                if leader != node:
                    pairs.append((leader, node))
    return pairs


def _regions(flat: FlatGraph) -> list[tuple[int, int]]:
    inside = np.flatnonzero(flat.region >= 0)
    _, first, of = np.unique(flat.region[inside], return_index=True, return_inverse=True)
    leaders = inside[first][of]
    return [(leader, node) for leader, node in zip(leaders.tolist(), inside.tolist(), strict=True) if leader != node]


def _handle_users(flat: FlatGraph) -> list[tuple[int, int]]:
    graph = flat.graph
    pairs = []
    for handle in [node for node, op in enumerate(graph.ops) if op in _HANDLES]:
        waiting = [handle]
        while waiting:
            node = waiting.pop()
            for edge in graph.out_edges(node).tolist():
                user = int(graph.edges.dst[edge])
                if graph.edges.port[edge] == CONTROL:
                    continue
                pairs.append((handle, user))
                if graph.ops[user] in _FORWARDS and graph.attrs[user].get("T") == "resource":
                    waiting.append(user)
    return pairs
