"""Graphs of nodes as arrays, assignments of streams to them, and a cache of results about them.

The graph that everything above works on: plain data, no protobuf, no networkx in its types.

Nodes are integers 0..n-1 in the order of the file. Edges are parallel integer arrays sorted by consumer, so that a million nodes
cost a few arrays and not a million objects. A data edge goes from an output port to an input slot; a control edge has port and
slot -1.

Node -> stream id, with the rule that decided each. Immutable.

Memory: results about a graph are kept with it, and no garbage is collected while millions of objects are made.

Analysis, rules and planning ask for the same things about the same graph (its canonical order, its branches, its embedding columns),
often in one process. What they find is kept as long as the graph lives.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import networkx


Floats = NDArray[np.float64]

Ints = NDArray[np.int32]
CONTROL = -1
"""Port and slot of a control edge."""


@dataclass(frozen=True)
class TensorValue:
    """A constant, decoded only when somebody asks.

    Attributes:
        dtype: Name as in ``"float32"``.
        load: Decodes the payload.
    """

    dtype: str
    shape: tuple[int, ...]
    load: Callable[[], NDArray[Any]] = field(repr=False, compare=False)


@dataclass(frozen=True)
class FunctionRef:
    """An attribute that names a function of the library, with the attributes it is instantiated with."""

    name: str
    attrs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Edges:
    """Parallel arrays, one entry per edge, sorted by (dst, slot) with control edges after data edges of the same consumer.

    Attributes:
        src: Producer.
        port: Output port of the producer, or CONTROL.
        dst: Consumer.
        slot: Position among the consumer's data inputs, or CONTROL.
    """

    src: Ints
    port: Ints
    dst: Ints
    slot: Ints

    def __len__(self) -> int:
        return len(self.src)

    @staticmethod
    def of(src: Any, port: Any, dst: Any, slot: Any) -> Edges:
        """Sorts unsorted parallel sequences into Edges."""
        arrays = [np.asarray(column, dtype=np.int32) for column in (src, port, dst, slot)]
        slot_key = np.where(arrays[3] == CONTROL, np.iinfo(np.int32).max, arrays[3])
        order = np.lexsort((slot_key, arrays[2]))
        return Edges(*(column[order] for column in arrays))

    @staticmethod
    def together(parts: Sequence[Edges], first: Sequence[int]) -> Edges:
        """The edges of graphs that stand side by side, one graph after the other. The nodes of each are numbered from `first` on."""
        shift = np.repeat(np.asarray(first, np.int32), [len(part) for part in parts])
        src, port, dst, slot = (
            np.concatenate([getattr(part, name) for part in parts]) for name in ("src", "port", "dst", "slot")
        )
        return Edges(src + shift, port, dst + shift, slot)

    def where(self, kept: NDArray[np.bool_]) -> Edges:
        """The edges that a mask keeps."""
        return Edges(self.src[kept], self.port[kept], self.dst[kept], self.slot[kept])


@dataclass(frozen=True)
class BrokenInput:
    """An input that names nothing: it has no edge. The verifier reports it.

    Attributes:
        node: The consumer; -1 for a result of a function.
        text: The input as the file has it.
        why: What is wrong with it.
    """

    node: int
    text: str
    why: str


@dataclass(frozen=True)
class Argument:
    """A parameter or a result of a function.

    Attributes:
        dtype: Name as in ``"float32"``.
        node: For a result: the body node that makes it; for a parameter: its stand-in node (op ``_Arg``) in the body graph.
        port: Output port of that node.
    """

    name: str
    dtype: str
    node: int
    port: int = 0


@dataclass(frozen=True, eq=False)
class Function:
    """A function of the library.

    Attributes:
        body: Its nodes, one stand-in node of op ``_Arg`` per parameter first, in order; then the NodeDefs in file order.
        control_results: Body nodes that run whenever the function runs.
    """

    name: str
    body: Graph
    parameters: tuple[Argument, ...]
    results: tuple[Argument, ...]
    control_results: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Graph:
    """Nodes and edges.

    Attributes:
        devices: Requested devices, "" where none is.
        attrs: Attributes per node as plain values, decoded on access: int, float, bool, str (bytes where not UTF-8), dtype names
            (``"float32"``, ``"float32_ref"``), shapes (tuple with None for an unknown size; None alone for unknown rank),
            TensorValue, FunctionRef, and tuples of these.
        functions: The library, by name.
        broken_inputs: Inputs as written that could not be made edges; empty in every graph that passed verification.
    """

    names: Sequence[str]
    ops: Sequence[str]
    devices: Sequence[str]
    attrs: Sequence[Mapping[str, Any]]
    edges: Edges
    functions: Mapping[str, Function] = field(default_factory=dict)
    broken_inputs: tuple[BrokenInput, ...] = ()

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def index(self) -> Mapping[str, int]:
        """Node by name; the first one where a name is there twice."""
        return numbered(self.names)

    def nodes_with(self, key: str) -> list[int]:
        """Nodes that have an attribute, ascending. Fast where the attributes are still encoded: none is decoded."""
        search: Callable[[str], list[int]] | None = getattr(self.attrs, "nodes_with", None)
        return search(key) if search else [node for node, attrs in enumerate(self.attrs) if key in attrs]

    def with_ops(self, ops: Container[str]) -> NDArray[np.bool_]:
        """Mask of the nodes that have one of some ops."""
        return np.fromiter((op in ops for op in self.ops), np.bool_, len(self))

    @cached_property
    def kind(self) -> Ints:
        """Per node a number: nodes of the same number have the same op and the same attributes, but for the values of constants.

        What follows from op and types alone is found once per kind and not once per node. Nodes that nobody has compared have a kind of
        their own.
        """
        kinds: Callable[[], Sequence[int]] | None = getattr(self.attrs, "kinds", None)
        return np.asarray(range(len(self)) if kinds is None else kinds(), dtype=np.int32)

    def per_kind(self) -> tuple[Ints, Ints]:
        """A node of each kind, the first, in the order of the graph; and per node which of them is of its kind."""
        _, first, of = np.unique(self.kind, return_index=True, return_inverse=True)
        order = np.argsort(first)
        place = np.empty(len(order), np.int32)
        place[order] = np.arange(len(order), dtype=np.int32)
        return first[order].astype(np.int32), place[of]

    def calls(self) -> list[tuple[int, str]]:
        """(node, function) for every attribute that names a function and every op that is one, ascending.

        The function need not be in the library.
        """
        search: Callable[[], list[tuple[int, str]]] | None = getattr(self.attrs, "function_names", None)
        named = search() if search else list(_named_functions(self.attrs))
        called = {op for op in dict.fromkeys(self.ops) if op in self.functions}
        if called:
            named += [(node, op) for node, op in enumerate(self.ops) if op in called]
            named.sort()
        return named

    @cached_property
    def in_start(self) -> Ints:
        """Edges into node v are `in_start[v]:in_start[v + 1]` of `edges`."""
        return _starts(self.edges.dst, len(self))

    @cached_property
    def out_order(self) -> Ints:
        """Edge numbers sorted by producer, then by consumer."""
        return np.argsort(self.edges.src, kind="stable").astype(np.int32)

    @cached_property
    def out_start(self) -> Ints:
        """Edges out of node v are `out_order[out_start[v]:out_start[v + 1]]`."""
        return _starts(self.edges.src[self.out_order], len(self))

    @cached_property
    def out_dst(self) -> Ints:
        """Consumers, in the order of `out_order`."""
        return self.edges.dst[self.out_order]

    def in_edges(self, node: int) -> range:
        """Numbers of the edges into a node, data edges by slot first."""
        return range(int(self.in_start[node]), int(self.in_start[node + 1]))

    def out_edges(self, node: int) -> Ints:
        """Numbers of the edges out of a node."""
        return self.out_order[self.out_start[node] : self.out_start[node + 1]]

    def predecessors(self, node: int) -> Ints:
        """Producers of a node, one entry per edge, data inputs by slot first."""
        return self.edges.src[self.in_start[node] : self.in_start[node + 1]]

    def successors(self, node: int) -> Ints:
        """Consumers of a node, one entry per edge."""
        return self.out_dst[self.out_start[node] : self.out_start[node + 1]]

    def ancestors(self, nodes: Iterable[int]) -> NDArray[np.bool_]:
        """Per node whether some of these depend on it by data or control edges. They do on themselves."""
        return _reached(self.in_start, self.edges.src, nodes)

    def descendants(self, nodes: Iterable[int]) -> NDArray[np.bool_]:
        """Per node whether it depends on some of these by data or control edges. They do on themselves."""
        return _reached(self.out_start, self.out_dst, nodes)

    def inputs(self, node: int) -> list[tuple[int, int]]:
        """The data inputs of a node as (producer, port), by slot."""
        edges = self.edges
        return [(int(edges.src[e]), int(edges.port[e])) for e in self.in_edges(node) if edges.port[e] != CONTROL]

    def uses(self, node: int, port: int) -> list[tuple[int, int]]:
        """Readers of an output of a node, as (consumer, slot), by consumer."""
        edges, out = self.edges, self.out_edges(node)
        out = out[edges.port[out] == port]
        return list(zip(edges.dst[out].tolist(), edges.slot[out].tolist(), strict=True))

    @cached_property
    def topological(self) -> Ints:
        """Nodes so that producers come before consumers; among ready nodes the lowest number first of its level.

        Kahn's algorithm by levels. Deterministic. Shorter than the graph if and only if the graph has a cycle.
        """
        order = np.argsort(self.level, kind="stable").astype(np.int32)
        return order[np.searchsorted(self.level[order], 0) :]

    @cached_property
    def level(self) -> Ints:
        """Length of the longest path, in edges, from a source to each node; -1 for nodes on or behind a cycle."""
        return _levels(self.in_start, self.out_start, self.out_dst)

    def to_networkx(self) -> networkx.MultiDiGraph[str]:
        """The graph for notebooks: nodes keyed by name with `op` and `device`, edges with `port` and `slot`."""
        import networkx

        result: networkx.MultiDiGraph[str] = networkx.MultiDiGraph()
        result.add_nodes_from(
            (name, {"op": op, "device": device})
            for name, op, device in zip(self.names, self.ops, self.devices, strict=True)
        )
        edges = self.edges
        result.add_edges_from(
            (self.names[s], self.names[d], {"port": int(p), "slot": int(k)})
            for s, d, p, k in zip(edges.src, edges.dst, edges.port, edges.slot, strict=True)
        )
        return result


def numbered(names: Sequence[str]) -> dict[str, int]:
    """The place of each name; of several of one name the first."""
    # Backwards, so that the first is the last to be put in.
    return dict(zip(reversed(names), range(len(names) - 1, -1, -1), strict=True))


def _named_functions(attrs: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, str]]:
    for node, values in enumerate(attrs):
        for key in sorted(values):
            value = values[key]
            for item in value if isinstance(value, tuple) else (value,):
                if isinstance(item, FunctionRef):
                    yield node, item.name


def _starts(sorted_nodes: Ints, count: int) -> Ints:
    return np.searchsorted(sorted_nodes, np.arange(count + 1)).astype(np.int32)


def _reached(start: Ints, ends: Ints, roots: Iterable[int]) -> NDArray[np.bool_]:
    starts, targets = start.tolist(), ends.tolist()
    found = bytearray(len(starts) - 1)
    stack = list(roots)
    for root in stack:
        found[root] = 1
    while stack:
        node = stack.pop()
        for target in targets[starts[node] : starts[node + 1]]:
            if not found[target]:
                found[target] = 1
                stack.append(target)
    return np.frombuffer(found, dtype=np.bool_)


def _levels(in_start: Ints, out_start: Ints, out_dst: Ints) -> Ints:
    """Levels by Kahn's algorithm, a frontier at a time, on plain lists: narrow frontiers (long chains) make array calls slower."""
    count = len(in_start) - 1
    waiting = np.diff(in_start).tolist()
    starts = out_start.tolist()
    targets = out_dst.tolist()
    level = np.full(count, -1, dtype=np.int32).tolist()
    frontier = [node for node in range(count) if waiting[node] == 0]
    depth = 0
    while frontier:
        following = []
        for node in frontier:
            level[node] = depth
            for target in targets[starts[node] : starts[node + 1]]:
                waiting[target] -= 1
                if waiting[target] == 0:
                    following.append(target)
        frontier = following
        depth += 1
    return np.asarray(level, dtype=np.int32)


UNASSIGNED = -1


@dataclass(frozen=True, eq=False)
class Assignment:
    """Stream ids of the nodes of one flat graph.

    Attributes:
        ids: Per node its stream id, or UNASSIGNED.
        reason: Per node an index into `reasons`, or -1 where no rule claimed it.
        reasons: (rule key, why in words), such as ``("embedding", "lookup of table 'user/emb' (2.4 MB)")``.
    """

    ids: Ints
    reason: Ints
    reasons: tuple[tuple[str, str], ...] = ()

    @staticmethod
    def empty(count: int) -> Assignment:
        """No node is assigned."""
        return Assignment(np.full(count, UNASSIGNED, np.int32), np.full(count, -1, np.int32))

    def claim(self, nodes: Ints, ids: Ints | int, rule: str, why: str) -> Assignment:
        """A copy in which `nodes` have `ids`. Nodes that are claimed already keep theirs."""
        nodes = np.asarray(nodes, dtype=np.int32)
        wanted = np.broadcast_to(np.asarray(ids, dtype=np.int32), nodes.shape)
        free = self.ids[nodes] == UNASSIGNED
        nodes, wanted = nodes[free], wanted[free]
        if len(nodes) == 0:
            return self
        new_ids, new_reason = self.ids.copy(), self.reason.copy()
        new_ids[nodes] = wanted
        new_reason[nodes] = len(self.reasons)
        return Assignment(new_ids, new_reason, (*self.reasons, (rule, why)))

    def claim_many(self, claims: list[tuple[Ints, int, str]], rule: str) -> Assignment:
        """Like `claim` for many groups (nodes, id, why) at once: one copy instead of one per group. Earlier groups win."""
        new_ids, new_reason, reasons = self.ids.copy(), self.reason.copy(), list(self.reasons)
        for nodes, stream, why in claims:
            free = nodes[new_ids[nodes] == UNASSIGNED]
            if len(free):
                new_ids[free] = stream
                new_reason[free] = len(reasons)
                reasons.append((rule, why))
        return Assignment(new_ids, new_reason, tuple(reasons))

    def why(self, node: int) -> tuple[str, str] | None:
        """The rule that decided a node's stream and its reason, or None where no rule did."""
        reason = int(self.reason[node])
        return self.reasons[reason] if reason >= 0 else None

    def filled(self, default: int = 0) -> Ints:
        """The ids with unassigned nodes on the default stream."""
        return np.where(self.ids == UNASSIGNED, np.int32(default), self.ids).astype(np.int32)


Found = TypeVar("Found")

_KEPT = 3
"""Results of one question that are kept for one object: more than one only where costs or options differ."""

_MANY = 100_000
"""Objects: the collector looks at fewer young ones in a few milliseconds."""

_results: WeakKeyDictionary[Any, dict[str, list[tuple[tuple[Any, ...], Any]]]] = WeakKeyDictionary()


def memoize(owner: object, question: str, details: tuple[Any, ...], find: Callable[[], Found]) -> Found:
    """Call `find` once for an object and keep its result.

    Args:
        owner: What it is about; nobody may change it. The result is dropped with it, and must not hold it.
        question: What is asked.
        details: What else the answer hangs on. Arrays, and objects without an equality of their own, count as equal only to themselves.
        find: Finds it.
    """
    kept = _results.setdefault(owner, {}).setdefault(question, [])
    for known, result in kept:
        if len(known) == len(details) and all(map(_same, known, details)):
            answer: Found = result
            return answer
    found = find()
    kept.append((details, found))
    del kept[:-_KEPT]
    return found


def _same(one: Any, other: Any) -> bool:
    return one is other or (not isinstance(one, np.ndarray) and bool(one == other))


@contextmanager
def no_collection() -> Iterator[None]:
    """Keeps Python's collector of reference cycles away from the block: nothing here makes cycles, and it looks at every object again.

    What the block made counts as old afterwards, or the collector would look at all of it at once when it is let in again.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        # What somebody else has frozen would thaw; but counting that takes a walk through it, which has to be worth it.
        if gc.get_count()[0] > _MANY and not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()
        gc.enable()
