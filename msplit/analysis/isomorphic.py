"""Isomorphic branches: they compute the same on other data, so that one batched branch could replace them. And those that nearly are.

A branch is a chain of kernels that no other work enters or leaves. Its canonical form is what its kernels do, in order (op, attributes,
shapes), names and weights left out; equal forms are found by hashing. Branches of one form whose first kernels are equally many kernels
away from the inputs can not depend on each other: the last kernel of either is no nearer to the inputs than its first.

Nearly isomorphic are branches that do one op more, found by hashing every form with one op left out, and branches of the same ops on other
sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from msplit.analysis.branches import Blocks
from msplit.core.dag import longest
from msplit.core.graph import TensorValue
from msplit.flatten.flat import FlatGraph
from msplit.opset.traits import GATHERS, ops_with
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
