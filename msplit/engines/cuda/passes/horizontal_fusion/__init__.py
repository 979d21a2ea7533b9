"""Alike independent branches as one: horizontal merging.

Ops that are alike and independent (`batcher`) become one op with one more axis, the members (`batch_rules`): products become
batched products, lookups one lookup in all tables, pointwise ops gain a dimension. Weights are stacked once (`weights`). What lies side by
side already is not copied (`builder`), and what reads members on their own reads views.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from msplit.engines.cuda.ir.graph import Key, Merge, OpGraph
from msplit.engines.cuda.passes.horizontal_fusion.batcher import Batcher
from msplit.engines.cuda.passes.horizontal_fusion.weights import SMALL_BYTES, add_products, put_rows_first
from msplit.engines.cuda.passes.pattern import value_key


def batch_branches(graph: OpGraph) -> bool:
    """Merges what can be merged, and notes it in `merges`."""
    united = _unite_constants(graph)
    batcher = Batcher(graph)
    batcher.run()
    if not batcher.merges:
        return united
    builder = batcher.builder
    for name, key in graph.fetches.items():
        like = graph.ops.get(key[0])
        if like is not None:
            graph.fetches[name] = builder.plain(key, like)
    graph.ops = builder.ops
    graph.prune()
    builder.weights.read_from_stacks()
    add_products(graph)
    put_rows_first(graph)
    builder.weights.finish()
    graph.forget_constants()
    graph.dtypes |= {key: dtype for key, dtype in builder.types.items() if key[0] in graph.ops}
    graph.merges += batcher.merges
    return True


def merge_facts(merges: Sequence[Merge]) -> Mapping[str, Any]:
    """For the report of a run: how many groups there are, their sizes with how often each occurs, and the copies that they take."""
    launching = [merge for merge in merges if merge.launches]
    sizes = Counter(merge.members for merge in launching)
    return {
        "groups": len(launching),
        "group_sizes": {str(size): count for size, count in sorted(sizes.items(), reverse=True)},
        "grouped_ops": sum(merge.members for merge in launching),
        "group_copies": sum(merge.copies for merge in merges),
    }


def _unite_constants(graph: OpGraph) -> bool:
    """Small constants of equal value become one: members that share a bias are to be seen to share it."""
    first: dict[tuple[str, tuple[int, ...], bytes], Key] = {}
    names: dict[Key, Key] = {}
    for key, value in graph.constants.items():
        if value.nbytes <= SMALL_BYTES and value.dtype.kind in "biuf":
            names[key] = first.setdefault(value_key(value), key)
    changed = False
    for op in graph.ops.values():
        inputs = [names.get(key, key) for key in op.inputs]
        changed |= inputs != op.inputs
        op.inputs = inputs
    return changed
