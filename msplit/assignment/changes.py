"""Differences of two models, streams aside: what was added, removed, changed or renamed, and what that costs.

The flat graphs are compared, and functions that stay, as bodies of loops do, where matched nodes name them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile, zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.analysis.branches import critical_path
from msplit.analysis.matching import NAMES, GraphValues, WeightDifference, frozen, match
from msplit.assignment.model import DisplayMixin, Facts
from msplit.core.graph import CONTROL, Edges, Floats, FunctionRef, Ints, TensorValue, no_collection
from msplit.errors import MsplitError
from msplit.flatten.build import body
from msplit.flatten.flat import FlatGraph
from msplit.opset import schema
from msplit.shapes import Shapes
from msplit.shapes.registry import Outputs


@dataclass(frozen=True)
class Aspect:
    """A property of a node that has another value now.

    Attributes:
        what: ``op``, ``dtype``, ``shape`` (``shape:1`` of a further output), ``device``, ``input 0``, ``control input``, or an attribute.
        old: Its value before, as plain data, and `new` its value now; None where there is none.
    """

    what: str
    old: Any
    new: Any


@dataclass(frozen=True)
class NodeDifference:
    """A node that is not the same in both models, or that only one of them has.

    Attributes:
        was: Its name before.
        aspects: What changed, its value aside.
        weights: Distance of its value, of a constant or a variable; None where it is equal or there is none.
        function: Function that it is in, such as the body of a loop; "" for the model itself.
    """

    name: str
    was: str
    op: str
    aspects: tuple[Aspect, ...]
    weights: WeightDifference | None
    old_us: float
    new_us: float
    function: str = ""


@dataclass(frozen=True)
class ScopeChanges:
    """Changes of a scope: numbers of nodes, and the time of its nodes of either model that are not the same or take another time."""

    scope: str
    added: int
    removed: int
    changed: int
    old_us: float
    new_us: float


@dataclass(frozen=True, repr=False)
class ModelDifference(DisplayMixin):
    """Differences of two models, streams aside. Times in µs, as the nodes alone take.

    Attributes:
        renamed: (scope or name before, scope or name now, nodes in it), the most nodes first.
        ends: Inputs and outputs that are not the same, as aspects.
        scopes: What changed by scope: below what all names of changed nodes begin with.
        work_us: All kernels, before and now.
        critical_path_us: The longest path, before and now.
        left: Nodes that are not on it any more, by their old names; `joined` are those that were not.
        not_compared: What could not be compared, a sentence each.
    """

    renamed: tuple[tuple[str, str, int], ...]
    added: tuple[NodeDifference, ...]
    removed: tuple[NodeDifference, ...]
    changed: tuple[NodeDifference, ...]
    ends: tuple[Aspect, ...]
    scopes: tuple[ScopeChanges, ...]
    work_us: tuple[float, float]
    critical_path_us: tuple[float, float]
    left: tuple[str, ...]
    joined: tuple[str, ...]
    not_compared: tuple[str, ...]

    @property
    def same(self) -> bool:
        """True if nothing but names and order changed."""
        return not (self.added or self.removed or self.changed or self.ends)

    def _facts(self) -> Facts:
        return [(what, f"{len(getattr(self, what)):,}") for what in ("added", "removed", "changed", "renamed")]


@dataclass(frozen=True, eq=False)
class PricedModel:
    """One of two models that are compared, or a function of it, of which no shapes are known."""

    flat: FlatGraph
    shapes: Shapes | None
    time_us: Floats


@no_collection()
def structure(old: PricedModel, new: PricedModel) -> ModelDifference:
    """Compares two models but for their streams, in time and memory that are linear in them."""
    added, removed, changed = (list[NodeDifference]() for _ in range(3))
    renamed = Counter[tuple[str, str]]()
    waiting, seen, problems = [("", old, new)], set[tuple[str, str]](), dict[str, None]()
    whole = np.zeros(0, np.int32)
    for function, one, two in waiting:  # grows while it is gone through
        before, now = GraphValues.of(one.flat), GraphValues.of(two.flat)
        problems |= dict.fromkeys(f"Values of variables: {said}." for said in (before.missing, now.missing) if said)
        new_of = match(one.flat.graph, two.flat.graph, before, now)
        whole = whole if function else new_of
        removed += _lone(one, np.flatnonzero(new_of < 0), function, 1, 0)
        added += _lone(two, np.flatnonzero(~np.isin(np.arange(len(two.flat)), new_of)), function, 0, 1)
        found, called = _differences(one, two, new_of, before, now, function)
        changed += found
        renamed.update(_renamings(one.flat.graph.names, two.flat.graph.names, new_of.tolist()))
        for names in (names for names in called if names not in seen):
            seen.add(names)
            try:
                waiting.append((names[1], _unpriced(old, names[0]), _unpriced(new, names[1])))
            except MsplitError as problem:
                problems[f"Function {names[1]}: {problem.what}."] = None
    paths = [critical_path(one.flat.graph, one.time_us) for one in (old, new)]
    on_new, on_old = set(paths[1][1].tolist()), {int(whole[node]) for node in paths[0][1].tolist()}
    return ModelDifference(
        renamed=tuple((*scopes, nodes) for scopes, nodes in sorted(renamed.items(), key=lambda one: (-one[1], one[0]))),
        added=tuple(added),
        removed=tuple(removed),
        changed=tuple(changed),
        ends=tuple(_ends(old.flat, new.flat, whole)),
        scopes=_by_scope(old, new, whole, added, removed, changed),
        work_us=(float(old.time_us.sum()), float(new.time_us.sum())),
        critical_path_us=(paths[0][0], paths[1][0]),
        left=tuple(old.flat.graph.names[node] for node in paths[0][1].tolist() if int(whole[node]) not in on_new),
        joined=tuple(new.flat.graph.names[node] for node in paths[1][1].tolist() if node not in on_old),
        not_compared=tuple(problems),
    )


def _lone(model: PricedModel, nodes: NDArray[Any], function: str, old: float, new: float) -> Iterator[NodeDifference]:
    """Nodes that one model has, which take `old` times their time before, and `new` times now."""
    graph = model.flat.graph
    for node in nodes.tolist():
        name, time = graph.names[node], float(model.time_us[node])
        yield NodeDifference(name, name, graph.ops[node], (), None, old * time, new * time, function)


def _unpriced(model: PricedModel, function: str) -> PricedModel:
    flat = body(model.flat.model, function)
    return PricedModel(flat, None, np.zeros(len(flat)))


def _renamings(old: Sequence[str], new: Sequence[str], new_of: Sequence[int]) -> Iterator[tuple[str, str]]:
    """For each matched node with another name both names, without what both end with; a part of each stays."""
    for name, other in zip(old, new_of, strict=True):
        if other >= 0 and name != new[other]:
            one, two = name.split("/"), new[other].split("/")
            while len(one) > 1 and len(two) > 1 and one[-1] == two[-1]:
                one, two = one[:-1], two[:-1]
            yield "/".join(one), "/".join(two)


def _differences(
    old: PricedModel, new: PricedModel, new_of: Ints, before: GraphValues, now: GraphValues, function: str
) -> tuple[list[NodeDifference], dict[tuple[str, str], None]]:
    """Matched nodes that are not the same, and pairs of functions that matched nodes name."""
    one, two = old.flat.graph, new.flat.graph
    found = dict(_inputs(old.flat, new.flat, new_of))
    matched = np.flatnonzero(new_of >= 0)
    pairs = one.kind[matched].astype(np.int64) * (int(two.kind.max(initial=0)) + 1) + two.kind[new_of[matched]]
    _, first, of = np.unique(pairs, return_index=True, return_inverse=True)
    alike = [_attributes(old, new, int(matched[at]), int(new_of[matched[at]])) for at in first.tolist()]
    called = dict.fromkeys(names for _, functions in alike for names in functions)
    unshared = _unshared(aspect for aspects, _ in alike for aspect in aspects)
    for node, other, kind in zip(matched.tolist(), new_of[matched].tolist(), of.tolist(), strict=True):
        aspects = [aspect for aspect in alike[kind][0] if aspect.what not in NAMES or aspect in unshared]
        if one.devices[node] != two.devices[other]:
            aspects.append(Aspect("device", one.devices[node], two.devices[other]))
        if old.shapes is not None and new.shapes is not None and all(aspect.what != "shape" for aspect in aspects):
            aspects += _shapes(old.shapes.outputs[node], new.shapes.outputs[other])
        if aspects:
            found[node] = [*aspects, *found.get(node, ())]
    weights = {
        node: distance
        for node in before.digest
        if new_of[node] >= 0 and (distance := before.difference(node, now, int(new_of[node]))) is not None
    }
    changed = [
        NodeDifference(
            two.names[new_of[node]],
            one.names[node],
            two.ops[new_of[node]],
            tuple(found.get(node, ())),
            weights.get(node),
            float(old.time_us[node]),
            float(new.time_us[new_of[node]]),
            function,
        )
        for node in sorted({*found, *weights})
    ]
    return changed, called


def _unshared(aspects: Iterable[Aspect]) -> set[Aspect]:
    """Names of storage that do not only differ: what had one name has two now, or the other way round."""
    names = {aspect for aspect in aspects if aspect.what in NAMES and aspect.old and aspect.new}
    uses = Counter(aspect.old for aspect in names), Counter(aspect.new for aspect in names)
    return {aspect for aspect in names if uses[0][aspect.old] > 1 or uses[1][aspect.new] > 1}


def _shapes(old: Outputs, new: Outputs) -> Iterator[Aspect]:
    for port, (was, now) in enumerate(zip_longest(old, new)):
        if was != now:
            yield Aspect(f"shape:{port}" if port else "shape", was, now)


def _attributes(
    old: PricedModel, new: PricedModel, node: int, other: int
) -> tuple[list[Aspect], list[tuple[str, str]]]:
    """What the ops and attributes of two nodes differ in, and pairs of functions that they name."""
    one, two = old.flat.graph, new.flat.graph
    ops, attrs = (one.ops[node], two.ops[other]), (one.attrs[node], two.attrs[other])
    defaults = [{} if (info := schema.lookup(op)) is None else info.defaults for op in ops]
    dtypes = old.flat.dtype(node), new.flat.dtype(other)
    aspects = [Aspect(what, *both) for what, both in (("op", ops), ("dtype", dtypes)) if both[0] != both[1]]
    functions: list[tuple[str, str]] = []
    for key in sorted({*attrs[0], *attrs[1]}):
        was, now = (own.get(key, known.get(key)) for own, known in zip(attrs, defaults, strict=True))
        if key[:1] == "_" or (isinstance(was, TensorValue) and isinstance(now, TensorValue)):
            continue
        pairs = zip(*(value if isinstance(value, tuple) else (value,) for value in (was, now)), strict=False)
        functions += [(a.name, b.name) for a, b in pairs if isinstance(a, FunctionRef) and isinstance(b, FunctionRef)]
        if key == "shared_name" or (key not in NAMES and frozen(was) != frozen(now) and (was, now) != dtypes):
            aspects.append(Aspect(key, was, now))
    return aspects, functions


def _inputs(old: FlatGraph, new: FlatGraph, new_of: Ints) -> Iterator[tuple[int, list[Aspect]]]:
    """Matched nodes that read something else now."""
    before, now = old.all_edges, new.all_edges
    mapped = new_of[before.src], before.port, new_of[before.dst], before.slot
    pairs = zip(mapped, (now.src, now.port, now.dst, now.slot), strict=True)
    if len(before) == len(now) and all(np.array_equal(one, two) for one, two in pairs):
        return
    ids = new_of.tolist()
    was, is_now = _readers(old, before, ids), _readers(new, now, range(len(new)))
    for node, other in enumerate(ids):
        one, two = (was(node), is_now(other)) if other >= 0 else ({}, {})
        if one.keys() != two.keys():
            gone, come = (
                {key[0]: name for key, name in a.items() if key not in b} for a, b in ((one, two), (two, one))
            )
            yield node, [Aspect(what, gone.get(what), come.get(what)) for what in {**gone, **come}]


def _readers(flat: FlatGraph, edges: Edges, ids: Sequence[int]) -> Callable[[int], dict[tuple[str, int, int], str]]:
    """Function that gives what a node reads: slot, and number and port of the tensor in the new graph -> its name."""
    starts, names = np.searchsorted(edges.dst, np.arange(len(flat) + 1)).tolist(), flat.graph.names
    sources, ports, slots = edges.src.tolist(), edges.port.tolist(), edges.slot.tolist()

    def read(node: int) -> dict[tuple[str, int, int], str]:
        found = {}
        for edge in range(starts[node], starts[node + 1]):
            source, port = sources[edge], ports[edge]
            what, name = f"input {slots[edge]}", f"{names[source]}:{port}" if port else names[source]
            if port == CONTROL:
                what, name = "control input", names[source]
            found[what, ids[source] if ids[source] >= 0 else ~source, port] = name
        return found

    return read


def _ends(old: FlatGraph, new: FlatGraph, new_of: Ints) -> Iterator[Aspect]:
    """Inputs and outputs that one of the models does not have, or under another name of its signature."""
    signed = old.model.signature is not None and new.model.signature is not None
    for what, was, now in (("input", old.inputs, new.inputs), ("output", old.outputs, new.outputs)):
        before = [((int(new_of[end.node]), end.port, end.name if signed else ""), end.name) for end in was]
        after = [((end.node, end.port, end.name if signed else ""), end.name) for end in now]
        both = dict(before).keys() & dict(after).keys()
        yield from (Aspect(what, name, None) for key, name in before if key not in both)
        yield from (Aspect(what, None, name) for key, name in after if key not in both)


def _by_scope(
    old: PricedModel,
    new: PricedModel,
    new_of: Ints,
    added: Sequence[NodeDifference],
    removed: Sequence[NodeDifference],
    changed: Sequence[NodeDifference],
) -> tuple[ScopeChanges, ...]:
    """Changes by scope, those of the model itself, with nodes that only take another time; the costliest first."""
    lists = enumerate((added, removed, changed))
    rows = [(one.name, kind, one.old_us, one.new_us) for kind, nodes in lists for one in nodes if not one.function]
    told = {one.was for one in changed if not one.function}
    names = old.flat.graph.names, new.flat.graph.names
    matched = np.flatnonzero(new_of >= 0)
    moved = matched[np.abs(old.time_us[matched] - new.time_us[new_of[matched]]) > 1e-9]
    others = ((node, int(new_of[node])) for node in moved.tolist() if names[0][node] not in told)
    rows += [(names[1][other], 3, float(old.time_us[node]), float(new.time_us[other])) for node, other in others]
    found: dict[str, list[tuple[str, int, float, float]]] = {}
    for _, alike in groupby(sorted(rows), lambda row: row[0].partition("/")[0]):
        own = list(alike)
        levels = zip(*(row[0].split("/")[:-1] for row in own), strict=False)
        depth = sum(1 for _ in takewhile(lambda level: len(set(level)) == 1, levels))
        for row in own:
            found.setdefault("/".join(row[0].split("/")[: depth + 1 if depth > 1 else 1]), []).append(row)
    scopes = []
    for scope, own in found.items():
        kinds = Counter(row[1] for row in own)
        times = sum(row[2] for row in own), sum(row[3] for row in own)
        scopes.append(ScopeChanges(scope, kinds[0], kinds[1], kinds[2], *times))
    return tuple(
        sorted(scopes, key=lambda one: (-abs(one.new_us - one.old_us), -one.added - one.removed - one.changed))
    )
