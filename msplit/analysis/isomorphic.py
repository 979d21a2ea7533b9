"""Parts of a graph that compute the same: isomorphic branches, and nodes with the same inputs.

Isomorphic branches: they compute the same on other data, so that one batched branch could replace them. And those that nearly are.

A branch is a chain of kernels that no other work enters or leaves. Its canonical form is what its kernels do, in order (op, attributes,
shapes), names and weights left out; equal forms are found by hashing. Branches of one form whose first kernels are equally many kernels
away from the inputs can not depend on each other: the last kernel of either is no nearer to the inputs than its first.

Nearly isomorphic are branches that do one op more, found by hashing every form with one op left out, and branches of the same ops on other
sizes.

Nodes that compute the same from the same inputs: TensorFlow's optimizer makes one node of them.

Grappler's common subgraph elimination merges nodes of equal op, device, attributes and inputs, and `_stream_id` is an attribute to it. So
such nodes get one id, or the annotated graph would run more nodes than the graph that it was made of. The cuda engine merges them, too.

Source: `tensorflow/core/grappler/optimizers/common_subgraph_elimination.cc`.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.analysis.branches import Blocks
from msplit.analysis.colocation import ColocationGroups
from msplit.core.dag import DisjointSets, distinct, longest
from msplit.core.graph import CONTROL, Floats, FunctionRef, Ints, TensorValue, memoize
from msplit.errors import LoadError
from msplit.flatten.flat import FlatGraph
from msplit.formats.model import STREAM_ID
from msplit.opset import schema
from msplit.opset.traits import CONSTANTS, GATHERS, ops_with
from msplit.shapes import Shapes

KERNEL_US = 1.1
"""Cost of each kernel inside a CUDA graph, whatever it computes."""

LONGEST = 256
"""Kernels of a branch that is compared with its kind with one op left out: takes time quadratic in this."""

SHORTEST = 3
"""Kernels of a branch that may be called nearly isomorphic: two ops that differ in one have nothing in common."""

_ALONE = ops_with("runs alone")
_LOOKUPS = GATHERS | {"EmbeddingLookupSparse"}
Signature = tuple[Any, ...]


@dataclass(frozen=True)
class Isomorphic:
    """Branches of one form.

    Attributes:
        branches: Nodes of the flat graph by branch, each in order; the branches in the graph's order.
        groups: How many batched branches they would be: only those that start equally deep run together.
        saved_us: What fewer kernels would save.
    """

    branches: tuple[tuple[int, ...], ...]
    groups: int
    saved_us: float


@dataclass(frozen=True)
class NearlyIsomorphic:
    """Branches that miss being like others.

    Attributes:
        branches: Nodes by branch: all of one form.
        like: A branch of the form that they nearly have.
        extra: Position of the op that they do besides, or -1.
        lacks: Position in `like` of the op that they do not, or -1.
        differs: Position of the first op whose sizes differ, or -1.
        cost_us: What the difference costs where the others run as one: the op besides and a copy around it, or every kernel once more.
    """

    branches: tuple[tuple[int, ...], ...]
    like: tuple[int, ...]
    cost_us: float
    extra: int = -1
    lacks: int = -1
    differs: int = -1


@dataclass(frozen=True)
class IsomorphicBranches:
    """Groups of isomorphic branches that `find` gives: those that save most, or cost most, first."""

    isomorphic: tuple[Isomorphic, ...] = ()
    nearly: tuple[NearlyIsomorphic, ...] = ()


def find(flat: FlatGraph, shapes: Shapes, blocks: Blocks) -> IsomorphicBranches:
    """Finds isomorphic and nearly isomorphic branches.

    Near-linear in the graph, apart from the kernels of a branch (see `LONGEST`). Where a shape is not known, nothing is isomorphic.
    """
    members = _members(blocks)
    depth = _depths(blocks, [len(nodes) for nodes in members])
    ops = flat.graph.ops
    sets: dict[tuple[tuple[str, ...], int], list[tuple[int, ...]]] = {}
    for block, nodes in enumerate(members):
        names = tuple(ops[node] for node in nodes)
        if _ALONE.isdisjoint(names):
            sets.setdefault((names, depth[block]), []).append(nodes)
    forms = _Forms(flat, shapes)
    isomorphic: dict[Signature, list[list[tuple[int, ...]]]] = {}
    nearly: list[NearlyIsomorphic] = []
    shorter = _one_less({names for names, _ in sets})
    for (names, level), found in sets.items():
        by_form = forms.divide(found) if len(found) > 1 else {}
        for form, same in by_form.items():
            if len(same) > 1:
                isomorphic.setdefault(form, []).append(same)
        nearly += _other_sizes(by_form)
        for position, less in shorter.get(names, ()):
            others = sets.get((less, level))
            if others is not None:
                nearly += _one_more(forms, found, others, position)
    return IsomorphicBranches(
        tuple(sorted(map(_isomorphic, isomorphic.values()), key=lambda one: (-one.saved_us, one.branches))),
        tuple(sorted(nearly, key=lambda one: (-one.cost_us, one.branches))),
    )


def _members(blocks: Blocks) -> list[tuple[int, ...]]:
    """Nodes of the flat graph per block, those that launch something, in order."""
    order = np.argsort(blocks.of, kind="stable")
    order = order[blocks.kernels.time_us[order] > 0]
    bounds = np.searchsorted(blocks.of[order], np.arange(len(blocks) + 1)).tolist()
    nodes = blocks.kernels.node[order].tolist()
    return [tuple(nodes[bounds[block] : bounds[block + 1]]) for block in range(len(blocks))]


def _depths(blocks: Blocks, lengths: Sequence[int]) -> list[int]:
    """Per block the most kernels that come before its first one."""
    own = np.asarray(lengths, np.float64)
    ends = longest(own, np.arange(len(blocks), dtype=np.int32), *blocks.consumers)
    depths: list[int] = (ends - own).astype(np.int64).tolist()
    return depths


class _Forms:
    """Canonical forms of branches."""

    def __init__(self, flat: FlatGraph, shapes: Shapes) -> None:
        self._flat, self._shapes = flat, shapes
        self._kinds = flat.graph.kind.tolist()
        self._attributes: dict[int, Signature] = {}

    def divide(self, branches: Iterable[tuple[int, ...]]) -> dict[Signature, list[tuple[int, ...]]]:
        """Branches by form. Those without a known form are left out."""
        found: dict[Signature, list[tuple[int, ...]]] = {}
        for nodes in branches:
            form = self.of(nodes)
            if form is not None:
                found.setdefault(form, []).append(nodes)
        return found

    def of(self, nodes: tuple[int, ...]) -> Signature | None:
        """The form of a branch; None where a shape is not known."""
        kernels = [self._kernel(node) for node in nodes]
        return None if not kernels or None in kernels else tuple(kernels)

    def _kernel(self, node: int) -> Signature | None:
        graph = self._flat.graph
        op = graph.ops[node]
        sizes = [self._shapes.shape(producer, port) for producer, port in graph.inputs(node)]
        made = self._shapes.shape(node)
        if op in _LOOKUPS and sizes and sizes[0] is not None:
            sizes[0] = sizes[0][1:]  # tables of unequal length lie below each other all the same
        for size in (*sizes, made):
            if size is None or None in size:
                return None
        kind = self._kinds[node]
        attributes = self._attributes.get(kind)
        if attributes is None:
            attributes = self._attributes[kind] = _attributes(graph.attrs[node])
        return op, attributes, tuple(sizes), made


def _attributes(attrs: Mapping[str, Any]) -> Signature:
    return tuple(
        sorted(
            (name, repr(value))
            for name, value in attrs.items()
            if not name.startswith("_") and not isinstance(value, TensorValue)
        )
    )


def _isomorphic(groups: list[list[tuple[int, ...]]]) -> Isomorphic:
    saved = sum((len(same) - 1) * len(same[0]) for same in groups)
    return Isomorphic(tuple(sorted(nodes for same in groups for nodes in same)), len(groups), saved * KERNEL_US)


def _other_sizes(by_form: Mapping[Signature, list[tuple[int, ...]]]) -> list[NearlyIsomorphic]:
    """Forms of the same ops beside the most frequent one, where there is one that several branches have."""
    if len(by_form) < 2:
        return []
    common = max(by_form, key=lambda form: len(by_form[form]))
    like = by_form[common]
    if len(like[0]) < SHORTEST or len(like) < 2:
        return []  # nobody runs as one here
    result = []
    for form, same in by_form.items():
        if form != common:
            differs = next(place for place, pair in enumerate(zip(form, common, strict=True)) if pair[0] != pair[1])
            result.append(NearlyIsomorphic(tuple(same), like[0], len(like[0]) * KERNEL_US, differs=differs))
    return result


def _one_less(sequences: Iterable[tuple[str, ...]]) -> dict[tuple[str, ...], list[tuple[int, tuple[str, ...]]]]:
    """Per sequence of ops the positions of ops without which it is another of the sequences."""
    known = set(sequences)
    lengths = {len(names) for names in known}
    found: dict[tuple[str, ...], list[tuple[int, tuple[str, ...]]]] = {}
    for names in known:
        if not SHORTEST < len(names) <= LONGEST or len(names) - 1 not in lengths:
            continue
        for place in range(len(names)):
            if place and names[place] == names[place - 1]:
                continue  # leaving out either of two equal neighbours is the same
            less = names[:place] + names[place + 1 :]
            if less in known:
                found.setdefault(names, []).append((place, less))
    return found


def _one_more(
    forms: _Forms, longer: list[tuple[int, ...]], shorter: list[tuple[int, ...]], position: int
) -> list[NearlyIsomorphic]:
    """Branches that have a form of the shorter ones but for one op."""
    wanted = forms.divide(shorter)
    result = []
    for form, same in forms.divide(longer).items():
        like = wanted.get(form[:position] + form[position + 1 :])
        if like is not None and max(len(same), len(like)) > 1:
            # The few are what differs from the many.
            few = min(len(same), len(like))
            if few == len(same):
                result.append(NearlyIsomorphic(tuple(same), like[0], 2 * KERNEL_US * few, extra=position))
            else:
                result.append(NearlyIsomorphic(tuple(like), same[0], 2 * KERNEL_US * few, lacks=position))
    return result


_COMMUTATIVE = ops_with("commutative")
_ALWAYS = ops_with("repeatable")
_NEVER = ops_with("never merged")
_HANDED_ON = "Identity"
"""Op that gives its input: the optimizer takes it out before it compares."""
LITTLE = 0.01
"""Share of the time of all kernels that copies may take beyond one of each, and still be tied to one stream."""
_SMALL = 256
"""Bytes of a constant that are compared before all of it is: those of weights differ there."""


def copies(flat: FlatGraph, time_us: Floats, fixed: NDArray[np.bool_] | None = None) -> Ints:
    """Per node the number of the nodes that are one to TensorFlow's optimizer, or -1 where it is the only one of its kind.

    Linear in nodes, edges and the bytes of those constants that begin alike. Ops that are stateful or not known are no copies, nor is what
    is fed or fetched. Copies are left out, the longest first, where running all of them one after the other would take more than
    `LITTLE` of the time of all kernels: whoever spreads those over streams wants them side by side, and an executor that does not merge
    them would run them in a row. `fixed` are nodes whose stream ids stay as they are, so that they tell them apart.
    """
    asked = (time_us,) if fixed is None else (time_us, fixed)
    return memoize(flat, "copies", asked, lambda: _cheap(_copies(flat, fixed), time_us))


def _cheap(same: Ints, time_us: Floats) -> Ints:
    """The copies that take little, however their nodes are numbered: of those that take equally long all or none."""
    found = np.flatnonzero(same >= 0)
    total = np.bincount(same[found], time_us[found], len(same))
    longest = np.zeros(len(same))
    np.maximum.at(longest, same[found], time_us[found])
    more = total - longest
    several, count = np.unique(more[distinct(same[found])], return_counts=True)
    most = int(np.searchsorted(np.cumsum(several * count), LITTLE * float(time_us.sum()), side="right"))
    limit = several[most - 1] if most else -1.0
    return np.where((same >= 0) & (more[same] <= limit), same, -1).astype(np.int32)


def _copies(flat: FlatGraph, fixed: NDArray[np.bool_] | None) -> Ints:
    graph = flat.graph
    own = _own(flat, fixed)
    starts = graph.in_start.tolist()
    sources, ports = graph.edges.src.tolist(), graph.edges.port.tolist()
    node_numbers: dict[Hashable, int] = {}
    number = list(range(len(graph)))  # the first node that computes the same
    gives = list(range(len(graph)))  # the first node that gives the same value on its first port
    for node in graph.topological.tolist():
        edges = range(starts[node], starts[node + 1])
        data = [
            (gives[sources[edge]] if not ports[edge] else number[sources[edge]], ports[edge])
            for edge in edges
            if ports[edge] != CONTROL
        ]
        control = {number[sources[edge]] for edge in edges if ports[edge] == CONTROL}
        key = own[node]
        if key is not None:
            if graph.ops[node] in _COMMUTATIVE:
                data.sort()
            number[node] = gives[node] = node_numbers.setdefault((key, *data, -1, *sorted(control)), node)
        if graph.ops[node] == _HANDED_ON and not control and len(data) == 1 and not data[0][1]:
            gives[node] = data[0][0]
    several = Counter(number)
    return np.asarray([first if several[first] > 1 else -1 for first in number], np.int32)


def with_copies(
    flat: FlatGraph, groups: ColocationGroups, same: Ints, fixed: NDArray[np.bool_] | None = None
) -> ColocationGroups:
    """Groups of nodes that belong together, and copies with each other, but where that would tie together two ids that were set by hand.

    `groups` is what must share a stream for other reasons, `same` is from `copies`, and `fixed` as there.
    """
    graph = flat.graph
    _, first, of = np.unique(groups.of, return_index=True, return_inverse=True)
    leader = np.where(groups.of >= 0, first[of.reshape(-1)], np.arange(len(flat)))
    sets = DisjointSets(len(flat))
    kept = (
        {} if fixed is None else {int(leader[v]): graph.attrs[v].get(STREAM_ID) for v in np.flatnonzero(fixed).tolist()}
    )
    for node in np.flatnonzero(same >= 0).tolist():
        one, other = sets.find(int(leader[node])), sets.find(int(leader[same[node]]))
        ids = [kept[root] for root in (one, other) if root in kept]
        if len(set(ids)) <= 1:
            sets.join(one, other)
            if ids:
                kept[sets.find(one)] = ids[0]
    roots = np.asarray([sets.find(node) for node in leader.tolist()], np.int32)
    several = np.bincount(roots, minlength=len(flat))[roots] > 1
    found, number = np.unique(roots[several], return_inverse=True)
    result = np.full(len(flat), -1, np.int32)
    result[several] = number.reshape(-1)
    return ColocationGroups(result, len(found))


def _own(flat: FlatGraph, fixed: NDArray[np.bool_] | None) -> list[Hashable | None]:
    """Per node what it is, its inputs left out: equal for nodes that may be copies of each other. None for what is never merged."""
    graph = flat.graph
    first, of = graph.per_kind()
    kinds = [_kind(graph.ops[node], graph.attrs[node], node) for node in first.tolist()]
    numbers: dict[Hashable, int] = {}
    numbered = [None if kind is None else numbers.setdefault(kind, place) for place, kind in enumerate(kinds)]
    visible = {tensor.node for tensor in (*flat.inputs, *flat.outputs)}
    by_node: list[Hashable | None] = [
        None if number is None or node in visible else (number, device)
        for node, (number, device) in enumerate(
            zip((numbered[kind] for kind in of.tolist()), graph.devices, strict=True)
        )
    ]
    for node in () if fixed is None else np.flatnonzero(fixed).tolist():
        if by_node[node] is not None:
            by_node[node] = (by_node[node], repr(graph.attrs[node].get(STREAM_ID)))
    _tell_constants_apart(flat, by_node)
    return by_node


def _kind(op: str, attrs: Mapping[str, Any], node: int) -> Hashable | None:
    info = schema.lookup(op)
    if info is None or op in _NEVER or op.startswith("Inplace") or "Queue" in op:
        return None
    if op not in _ALWAYS and (info.stateful or any(argument.is_ref for argument in info.inputs)):
        return None
    names = sorted(name for name in attrs if name != STREAM_ID and not (op in CONSTANTS and name == "value"))
    return (op, *((name, _plain(attrs.get(name), node)) for name in names))


def _plain(value: Any, node: int) -> Hashable:
    """An attribute's value as something that can be compared; a tensor is like none but that of its own kind of node."""
    if isinstance(value, TensorValue):
        return (value.dtype, value.shape, node)
    if isinstance(value, FunctionRef):
        return (value.name, *((name, _plain(value.attrs[name], node)) for name in sorted(value.attrs)))
    if isinstance(value, tuple):
        return tuple(_plain(item, node) for item in value)
    return (type(value).__name__, repr(value))


def _tell_constants_apart(flat: FlatGraph, own: list[Hashable | None]) -> None:
    """Adds its value to what a constant is, as far as it takes: where another is like it otherwise."""
    graph = flat.graph
    constants = [node for node, op in enumerate(graph.ops) if op in CONSTANTS and own[node] is not None]
    for most in (0, _SMALL, None):
        alike = Counter(own[node] for node in constants)
        constants = [node for node in constants if alike[own[node]] > 1]
        for node in constants:
            own[node] = (own[node], _value(graph.attrs[node].get("value"), most, node))


def _value(value: Any, most: int | None, node: int) -> Hashable:
    """The type, shape and first bytes of a constant, or a digest of all. One that can not be read is like no other."""
    if not isinstance(value, TensorValue):
        return node
    if most == 0:
        return (value.dtype, value.shape)
    try:
        array = value.load()
    except LoadError:
        return node
    if array.dtype.hasobject:
        return tuple(array.flat[:most].tolist())
    if array.size > _SMALL and not any(array.strides):
        return ("filled", array.reshape(-1)[:1].tobytes())  # it may claim more than the memory holds
    if most is not None:
        return array.flat[: max(most // array.itemsize, 1)].tobytes()
    return hashlib.blake2b(np.ascontiguousarray(array).view(np.uint8).data, digest_size=16).digest()
