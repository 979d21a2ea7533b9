"""Alike independent branches as one: horizontal merging.

Ops that are alike (`signature`) and independent (`batcher`) become one op with one more axis, the members (`batch_rules`): products become
batched products, lookups one lookup in all tables, pointwise ops gain a dimension. Weights are stacked once (`weights`). What lies side by
side already is not copied (`builder`), and what reads members on their own reads views.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from msplit.engines.cuda.ir.graph import Key, OpGraph
from msplit.engines.cuda.passes.horizontal_fusion.batcher import Agenda, Group
from msplit.engines.cuda.passes.horizontal_fusion.layout import put_rows_first
from msplit.engines.cuda.passes.horizontal_fusion.sums import add_products
from msplit.engines.cuda.passes.horizontal_fusion.unbatched import read_from_stacks
from msplit.engines.cuda.passes.horizontal_fusion.weights import SMALL_BYTES

__all__ = ["Group", "group_branches", "group_facts"]


def group_branches(graph: OpGraph) -> list[Group]:
    """Changes a source, whose shapes are known, in place.

    Returns:
        The merges, in the order in which they run.
    """
    _unite_constants(graph)
    agenda = Agenda(graph)
    agenda.run()
    if not agenda.groups:
        return []
    draft = agenda.draft
    for name, key in graph.fetches.items():
        like = graph.ops.get(key[0])
        if like is not None:
            graph.fetches[name] = draft.plain(key, like)
    graph.ops = draft.ops
    graph.prune()
    read_from_stacks(graph, draft.weights)
    add_products(graph)
    put_rows_first(graph)
    draft.weights.finish()
    _forget_constants(graph)
    graph.sort()
    return agenda.groups


def group_facts(groups: Sequence[Group]) -> Mapping[str, Any]:
    """For the report of a run: how many groups there are, their sizes with how often each occurs, and the copies that they take."""
    launching = [group for group in groups if group.launches]
    sizes = Counter(group.members for group in launching)
    return {
        "groups": len(launching),
        "group_sizes": {str(size): count for size, count in sorted(sizes.items(), reverse=True)},
        "grouped_ops": sum(group.members for group in launching),
        "group_copies": sum(group.copies for group in groups),
    }


def _unite_constants(graph: OpGraph) -> None:
    """Small constants of equal value become one: members that share a bias are to be seen to share it."""
    first: dict[tuple[str, tuple[int, ...], bytes], Key] = {}
    names: dict[Key, Key] = {}
    for key, value in graph.constants.items():
        if value.nbytes <= SMALL_BYTES and value.dtype.kind in "biuf":
            names[key] = first.setdefault((value.dtype.str, value.shape, value.tobytes()), key)
    for op in graph.ops.values():
        op.inputs = [names.get(key, key) for key in op.inputs]


def _forget_constants(graph: OpGraph) -> None:
    """Lets go of constants that nothing reads any more: stacked weights would otherwise be held twice."""
    read = {key for op in graph.ops.values() for key in op.inputs} | set(graph.fetches.values())
    graph.constants = {key: value for key, value in graph.constants.items() if key in read}
