"""Matches the nodes of two graphs, and holds the values of their constants and variables against each other.

A node is known by a hash of all that leads to it, and by one of all that it leads to: an edit changes the first behind it and the second in
front of it, so that what has a path around the edit has one of them still. Hashes are made three times, each for what is left: of ops,
attributes and values, for nodes that were renamed; without values, for a model that was trained on; and of ops alone. Equal names go before
hashes that are unique, and from what is matched the rest is, along edges. A hash decides what is compared, never what is said of it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit import formats
from msplit.core.graph import FunctionRef, Graph, Ints, TensorValue
from msplit.errors import LoadError
from msplit.flatten.flat import FlatGraph
from msplit.opset import schema
from msplit.opset.traits import VARIABLES

NAMES = frozenset(("shared_name", "container", "frame_name", "var_name", "debug_name"))
"""Attributes that hold names, which change where nodes are renamed."""

_AT_ONCE = 1 << 20
"""Elements that are compared at a time."""


@dataclass(frozen=True)
class WeightDifference:
    """Distance of two values.

    Attributes:
        differing: Elements that differ; two that are no number are equal.
        elements: Elements of the value; 0 where type or shape differ, so that there is no distance.
        largest: Largest absolute difference; infinite where only one of two elements is a number, 0 between texts.
        relative: Largest difference, relative to the larger of the two elements: 2 is that between -1 and 1.
    """

    differing: int
    elements: int
    largest: float = 0.0
    relative: float = 0.0


@dataclass(frozen=True, eq=False)
class GraphValues:
    """Values of the constants and variables of a graph, decoded when they are asked for.

    Attributes:
        load: By node what decodes its value.
        digest: By node a hash of its type, shape and value.
        missing: Why the values of variables are not known, "" where they are.
    """

    load: Mapping[int, Callable[[], NDArray[Any]]]
    digest: Mapping[int, bytes]
    missing: str = ""

    @staticmethod
    def of(flat: FlatGraph) -> GraphValues:
        """Reads all of them once. A constant that can not be decoded has none."""
        graph, missing = flat.graph, ""
        values = {node: graph.attrs[node].get("value") for node in graph.nodes_with("value")}
        load: dict[int, Any] = {n: value.load for n, value in values.items() if isinstance(value, TensorValue)}
        handles = np.flatnonzero(graph.with_ops(VARIABLES) & (flat.origin_function < 0)).tolist()
        try:
            saved = formats.variables(flat.model) if handles else {}
        except LoadError as problem:
            saved, missing = {}, problem.what
        load |= {node: partial(np.asarray, saved[graph.names[node]]) for node in handles if graph.names[node] in saved}
        digest = {}
        for node, one in load.items():
            try:
                digest[node] = _digest(one())
            except LoadError:
                continue
        return GraphValues(load, digest, missing)

    def difference(self, node: int, other: GraphValues, its: int) -> WeightDifference | None:
        """Distance of a node's value from that of another graph's node; None where they are equal, or one is not known."""
        before, now = self.digest.get(node), other.digest.get(its)
        return distance(self.load[node](), other.load[its]()) if before and now and before != now else None


def _digest(value: NDArray[Any]) -> bytes:
    found = hashlib.blake2b(f"{value.dtype.name} {value.shape}".encode(), digest_size=12)
    if value.dtype.hasobject:
        for item in value.ravel().tolist():
            data = item if isinstance(item, bytes) else str(item).encode()
            found.update(len(data).to_bytes(8, "little") + data)
    else:
        # Of one that is the same all over, and may take no room in the file, one element.
        found.update(
            np.ascontiguousarray(value if any(value.strides) else value.flat[:1]).reshape(-1).view(np.uint8).data
        )
    return found.digest()


def distance(before: NDArray[Any], now: NDArray[Any]) -> WeightDifference | None:
    """The distance of two values; None where all elements are equal."""
    if before.shape != now.shape or before.dtype != now.dtype:
        return WeightDifference(0, 0)
    differing, largest, relative = 0, 0.0, 0.0
    for start in range(0, before.size, _AT_ONCE):
        one, two = (value.flat[start : start + _AT_ONCE] for value in (before, now))
        unequal = one != two
        if before.dtype.kind in "OSUb":
            differing += int(np.count_nonzero(unequal))
            continue
        one, two = (v[unequal].astype(np.complex128 if before.dtype.kind == "c" else np.float64) for v in (one, two))
        number = ~(np.isnan(one) & np.isnan(two))
        one, two = one[number], two[number]
        differing += len(one)
        with np.errstate(all="ignore"):
            by = np.nan_to_num(np.abs(two - one), nan=np.inf)
            share = np.nan_to_num(by / np.maximum(np.abs(one), np.abs(two)), nan=np.inf)
        largest, relative = (max(old, float(new.max(initial=0.0))) for old, new in ((largest, by), (relative, share)))
    return WeightDifference(differing, before.size, largest, relative) if differing else None


def frozen(value: Any) -> Hashable:
    """An attribute's value as one that can be compared and hashed. Functions are all alike: their names say nothing."""
    if isinstance(value, TensorValue):
        return value.dtype, value.shape
    if isinstance(value, FunctionRef):
        return "function", *((key, frozen(value.attrs[key])) for key in sorted(value.attrs) if key[:1] != "_")
    if isinstance(value, tuple):
        return tuple(map(frozen, value))
    return "nan" if isinstance(value, float) and math.isnan(value) else (type(value).__name__, value)


def told(op: str, attrs: Mapping[str, Any]) -> Hashable:
    """The op and attributes that say what a node computes: not those that begin with an underscore, that are names, or left at defaults."""
    defaults = {} if (info := schema.lookup(op)) is None else info.defaults
    pairs = [(key, frozen(attrs[key])) for key in sorted(attrs) if key[:1] != "_" and key not in NAMES]
    return op, *((key, value) for key, value in pairs if key not in defaults or frozen(defaults[key]) != value)


def match(old: Graph, new: Graph, before: GraphValues, now: GraphValues) -> Ints:
    """Matches nodes, in time and memory that are linear in the graphs.

    Args:
        old: A DAG.
        new: Another one.
        before: Values in the old one.
        now: Values in the new one.

    Returns:
        Per old node its node in the new graph, or -1. No two have the same.
    """
    if old.names == new.names and all(
        np.array_equal(getattr(old.edges, name), getattr(new.edges, name)) for name in ("src", "port", "dst", "slot")
    ):
        return np.arange(len(old), dtype=np.int32)
    matcher, numbers = _Matcher(old, new), dict[Hashable, int]()
    kinds = [_kinds(graph, numbers) for graph in (old, new)]
    ops = [[numbers.setdefault(op, len(numbers)) for op in graph.ops] for graph in (old, new)]
    known = [
        [(kind, graph.devices[node], values.digest.get(node)) for node, kind in enumerate(own)]
        for graph, own, values in zip((old, new), kinds, (before, now), strict=True)
    ]
    for colours in ([[numbers.setdefault(one, len(numbers)) for one in own] for own in known], kinds, ops):
        if all(-1 in pair for pair in matcher.pair):
            matcher.by_structure(*colours)
    matcher.by_names()
    return np.array(matcher.pair[0], np.int32)


def _kinds(graph: Graph, numbers: dict[Hashable, int]) -> list[int]:
    """Per node a number that nodes of the same op and attributes share, in either graph; a constant's type and shape count, too."""
    first, of = graph.per_kind()
    alike = [told(graph.ops[node], graph.attrs[node]) for node in first.tolist()]
    kinds: list[int] = np.array([numbers.setdefault(one, len(numbers)) for one in alike], np.int64)[of].tolist()
    for node in graph.nodes_with("value"):
        kinds[node] = numbers.setdefault(told(graph.ops[node], graph.attrs[node]), len(numbers))
    return kinds


class _Side:
    """The edges of one graph as plain lists, and its nodes in topological order."""

    def __init__(self, graph: Graph) -> None:
        self.names, self.order = graph.names, graph.topological.tolist()
        edges, out = graph.edges, graph.out_order
        columns = (edges.port, edges.slot)
        self.into = _Adjacent(graph.in_start.tolist(), edges.src.tolist(), *(one.tolist() for one in columns))
        self.out = _Adjacent(graph.out_start.tolist(), graph.out_dst.tolist(), *(one[out].tolist() for one in columns))

    def hashes(self, colour: Sequence[int], adjacent: _Adjacent, order: Iterable[int]) -> list[int]:
        """Per node a hash of its colour and of those of its neighbours on one side, which `order` has before it."""
        found = [0] * len(colour)
        starts, ends, ports, slots = adjacent.starts, adjacent.ends, adjacent.ports, adjacent.slots
        for node in order:
            around = [
                hash((found[ends[edge]], ports[edge], slots[edge])) for edge in range(starts[node], starts[node + 1])
            ]
            around.sort()
            found[node] = hash((colour[node], *around))
        return found


@dataclass(frozen=True)
class _Adjacent:
    """Edges on one side of each node: those of node v are `starts[v]` to `starts[v + 1]`."""

    starts: list[int]
    ends: list[int]
    ports: list[int]
    slots: list[int]


class _Matcher:
    """Pairs of nodes while they are found: per node of each graph the other's, or -1."""

    def __init__(self, old: Graph, new: Graph) -> None:
        self.sides = _Side(old), _Side(new)
        self.pair = [-1] * len(old), [-1] * len(new)
        self.waiting: list[tuple[int, int]] = []

    def free(self, side: int) -> list[int]:
        """Nodes of a graph without a match."""
        return [node for node, other in enumerate(self.pair[side]) if other < 0]

    def join(self, old: int, new: int) -> None:
        """Makes two nodes a pair. What is around them is looked at by `spread`."""
        self.pair[0][old], self.pair[1][new] = new, old
        self.waiting.append((old, new))

    def unique(self, keys: Sequence[Callable[[int], Hashable]]) -> None:
        """Joins nodes whose key no other node without a match has; a key of None is none."""
        places: list[dict[Hashable, int]] = [{}, {}]
        for side, key in enumerate(keys):
            for node in self.free(side):
                if (found := key(node)) is not None:
                    places[side][found] = -1 if found in places[side] else node
        for found, old in places[0].items():
            new = places[1].get(found, -1)
            if old >= 0 and new >= 0:
                self.join(old, new)

    def by_structure(self, *colours: Sequence[int]) -> None:
        """Joins nodes by what leads to them and what they lead to."""
        front = [side.hashes(own, side.into, side.order) for side, own in zip(self.sides, colours, strict=True)]
        behind = [side.hashes(own, side.out, side.order[::-1]) for side, own in zip(self.sides, colours, strict=True)]

        def whole(side: int) -> Callable[[int], Hashable]:
            return lambda node: (front[side][node], behind[side][node])

        def named(side: int, parts: Callable[[int], Hashable]) -> Callable[[int], Hashable]:
            names = self.sides[side].names
            return lambda node: None if (part := parts(node)) is None else (names[node], part)

        def partly(side: int, adjacent: _Adjacent, hashes: list[int]) -> Callable[[int], Hashable]:
            # What nothing leads to is not known by what leads to it.
            return lambda node: hashes[node] if adjacent.starts[node] < adjacent.starts[node + 1] else None

        keys = [
            (whole(side), partly(side, one.into, front[side]), partly(side, one.out, behind[side]))
            for side, one in enumerate(self.sides)
        ]
        for key in (0, 1, 2):
            self.unique([named(side, keys[side][key]) for side in (0, 1)])
            self.unique([keys[side][key] for side in (0, 1)])
        self.spread(*colours)
        self.alike(whole(0), whole(1), *colours)

    def alike(self, old: Callable[[int], Hashable], new: Callable[[int], Hashable], *colours: Sequence[int]) -> None:
        """Joins nodes that several have the key of, such as those of equal towers, the first ones first, and what is around them."""
        places: dict[Hashable, list[int]] = {}
        for node in reversed(self.free(1)):
            places.setdefault(new(node), []).append(node)
        for node in self.free(0):
            others = places.get(old(node), ())
            while others and self.pair[1][others[-1]] >= 0:
                others.pop()
            if others and self.pair[0][node] < 0:
                self.join(node, others.pop())
                self.spread(*colours)

    def spread(self, *colours: Sequence[int]) -> None:
        """Joins what is at the same place around nodes that are joined, if it has the same colour and nothing else there has."""
        while self.waiting:
            both = self.waiting.pop()
            for which in ("into", "out"):
                places: list[dict[Hashable, int]] = [{}, {}]
                for side, node in enumerate(both):
                    adjacent, pair, colour = getattr(self.sides[side], which), self.pair[side], colours[side]
                    for edge in range(adjacent.starts[node], adjacent.starts[node + 1]):
                        if pair[other := adjacent.ends[edge]] < 0:
                            key = adjacent.ports[edge], adjacent.slots[edge], colour[other]
                            places[side][key] = other if places[side].get(key, other) == other else -1
                for found, old in places[0].items():
                    new = places[1].get(found, -1)
                    if old >= 0 and new >= 0 and self.pair[0][old] < 0 and self.pair[1][new] < 0:
                        self.join(old, new)

    def by_names(self) -> None:
        """Joins what is left by names, whatever op it has now; then what has another op and name between the same nodes."""
        self.unique([self.sides[side].names.__getitem__ for side in (0, 1)])
        self.waiting.clear()

        def place(side: int) -> Callable[[int], Hashable]:
            one, pair = self.sides[side], self.pair[side]

            def key(node: int) -> Hashable:
                found: list[tuple[Any, ...]] = []
                for around in (one.into, one.out):
                    first, last = around.starts[node], around.starts[node + 1]
                    ends = around.ends[first:last]
                    if not ends or any(pair[end] < 0 for end in ends):
                        return None
                    ends = ends if side else [pair[end] for end in ends]
                    found.append(
                        tuple(sorted(zip(ends, around.ports[first:last], around.slots[first:last], strict=True)))
                    )
                return tuple(found)

            return key

        self.unique([place(0), place(1)])
